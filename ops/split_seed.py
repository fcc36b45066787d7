"""New seeds from a seed."""

import torch
from torch import Tensor

from . import _philox
from ._operator import map_batch, reference_active


def split_seed(seed: Tensor, n: int, *, stream: int = 0) -> Tensor:
    """Make n new, independent seeds from each seed.

    Args:
        seed: int64, () or (B,).
        n: how many, >= 0.
        stream: 0 to 2**32 - 1.

    Returns:
        int64, (n,) or (B, n), on the device of seed. Entry i does not depend on n, and no word is shared with any draw from
        the same seed.

    Raises:
        TypeError: seed is not an int64 tensor. ValueError: its shape, n or stream.

    Cost: one Philox block (4 ns) a seed. Source: Claessen & Palka 2013, on Philox4x32-10 words (kernels/split_seed.h).
    """
    _philox.check_seed(seed)
    _philox.check_stream(stream)
    _philox.check_count("n", n)
    f = split_seed_reference if reference_active() else torch.ops.mdps.split_seed.default
    out = f(seed, n, stream)
    return out if seed.dim() else out.view(n)


def split_seed_reference(seed: Tensor, n: int, stream: int) -> Tensor:
    """The same in plain PyTorch, (1 or B, n)."""
    blocks = torch.arange(n, device=seed.device)
    w = _philox.words(seed, seed.numel(), stream, _philox.KIND_SPLIT, blocks)
    return w[..., 1] << 32 | w[..., 0]


map_batch("split_seed", seed=0)


@torch.library.register_fake("mdps::split_seed")
def _(seed, n, stream):
    return seed.new_empty((1 if seed.dim() == 0 else seed.size(0), n))
