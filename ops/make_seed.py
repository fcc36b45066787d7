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
        ValueError: batch is negative.

    One seed serves any number of calls with different `stream` numbers. Cost: one torch.randint.
    """
    if batch is not None and batch < 0:
        raise ValueError(f"batch: expected a number >= 0, got {batch}")
    if device is None and generator is not None:
        device = generator.device
    shape = () if batch is None else (batch,)
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator, device=device, dtype=torch.int64)
