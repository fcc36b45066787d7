"""Seeds: int64 tensors that make every random operator a pure function of its arguments."""

import torch
from torch import Tensor


def make_seed(
    generator: torch.Generator | None = None, batch: int | None = None, device: torch.device | str | None = None
) -> Tensor:
    """Draw a seed from a torch generator.

    Args:
        generator: where the randomness comes from; None is torch's default generator of the device, which
            torch.manual_seed sets.
        batch: number of seeds, one for each row of a batch; None gives one seed that the batch shares.
        device: of the seed; None is the generator's, or the default device.

    Returns:
        int64 tensor () or (batch,), uniform over 64 bits.

    Raises:
        ValueError: batch is negative, or the generator is of another kind of device.

    One seed serves any number of calls with different `stream` numbers. Cost: one torch.randint. In a CUDA graph every replay
    draws another seed; a generator of one's own has to be made known to the graph first, graph.register_generator_state.
    """
    if batch is not None and batch < 0:
        raise ValueError(f"batch: expected a number >= 0, got {batch}")
    if generator is not None:
        device = generator.device if device is None else torch.device(device)
        if device.type != generator.device.type:
            raise ValueError(f"generator: expected one of the seed's device, {device}, got one of {generator.device}")
    shape = () if batch is None else (batch,)
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator, device=device, dtype=torch.int64)
