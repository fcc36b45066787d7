"""Standard normal deviates from Philox words."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _philox
from ._operator import map_batch
from .philox_uniform import draw


def philox_normal(seed: Tensor, shape: Sequence[int], *, stream: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw standard normal numbers.

    Args:
        seed: int64, () shared by the rows or (B,) one for each; the result is on its device.
        shape: (B, ...); the first size is the batch. With a seed () rows are numbered; with seeds (B,) a row has the same
            bits when it is drawn alone.
        stream: 0 to 2**32 - 1; other streams of the same seed are independent.
        dtype: float32 (the normal distribution out to 6.6) or float64 (out to 8.6).

    Returns:
        Tensor of this shape, a function of the arguments alone; no word is shared with philox_uniform or resample. With
        mixture_resample all are shared: on one seed and stream its Gaussian kernels take exactly these numbers. Give one of
        the two another stream, or a seed of its own (split_seed).

    Raises:
        TypeError: seed is not an int64 tensor, or the dtype is another. ValueError: bad shape or stream.

    Cost: 1.5 ns a number in float32, 4 in float64, on one core with AVX-512.
    Source: Box & Muller 1958 on Philox4x32-10 words (kernels/draw.h).
    """
    return draw(torch.ops.mdps.philox_normal.default, philox_normal_reference, seed, shape, stream, dtype)


def philox_normal_reference(seed: Tensor, rows: int, n: int, stream: int, dtype: torch.dtype) -> Tensor:
    """The same in plain PyTorch, (rows, n)."""
    if dtype == torch.float32:
        w = _philox.word_rows(seed, rows, stream, _philox.KIND_NORMAL, (n + 1) // 2 * 2)
        u, v = _philox.open_unit(w[:, ::2], w[:, ::2], dtype), _philox.centred_unit(w[:, 1::2], w[:, 1::2], dtype)
    else:
        w = _philox.word_rows(seed, rows, stream, _philox.KIND_NORMAL, (n + 1) // 2 * 4)
        u, v = _philox.open_unit(w[:, ::4], w[:, 1::4], dtype), _philox.centred_unit(w[:, 2::4], w[:, 3::4], dtype)
    radius, angle = torch.sqrt(-2 * u.log()), 2 * math.pi * v
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1).flatten(1)[:, :n]


map_batch("philox_normal", seed=0)


@torch.library.register_fake("mdps::philox_normal")
def _(seed, rows, n, stream, is_double):
    rows = rows if seed.dim() == 0 else seed.size(0)
    return seed.new_empty((rows, n), dtype=torch.float64 if is_double else torch.float32)
