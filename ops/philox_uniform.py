"""Uniform deviates from Philox words."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import _philox
from ._operator import map_batch, reference_active


def philox_uniform(seed: Tensor, shape: Sequence[int], *, stream: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw uniform numbers in [0, 1).

    Args:
        seed: int64, () shared by the rows or (B,) one for each; the result is on its device.
        shape: (B, ...); the first size is the batch. With a seed () rows are numbered; with seeds (B,) a row has the same
            bits when it is drawn alone.
        stream: 0 to 2**32 - 1; other streams of the same seed are independent.
        dtype: float32 (multiples of 2^-24) or float64 (multiples of 2^-53).

    Returns:
        Tensor of this shape. It is a function of the arguments alone, whatever the device and number of threads, and the
        first numbers of a row do not depend on how many follow.

    Raises:
        TypeError: seed is not an int64 tensor, or the dtype is another. ValueError: bad shape or stream.

    Cost: 1 ns a number in float32, 2.3 in float64, on one core with AVX-512.
    Source: Philox4x32-10, Salmon et al. 2011, with cuRAND's layout (kernels/philox.h).
    """
    return draw(torch.ops.mdps.philox_uniform.default, philox_uniform_reference, seed, shape, stream, dtype)


def draw(op: Callable, reference: Callable, seed: Tensor, shape: Sequence[int], stream: int, dtype: torch.dtype) -> Tensor:
    """What philox_uniform and philox_normal do around their operators."""
    shape = tuple(shape)
    _philox.check_seed(seed)
    _philox.check_stream(stream)
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"dtype: expected float32 or float64, got {dtype}")
    if not shape or any(s < 0 for s in shape):
        raise ValueError(f"shape: expected (B, ...), got {shape}")
    if seed.dim() == 1 and seed.size(0) != shape[0]:
        raise ValueError(f"shape: expected {seed.size(0)} rows, one for each seed, got {shape}")
    n = math.prod(shape[1:])
    if reference_active():
        return reference(seed, shape[0], n, stream, dtype).reshape(shape)
    return op(seed, shape[0] if seed.dim() == 0 else 0, n, stream, int(dtype == torch.float64)).view(shape)


def philox_uniform_reference(seed: Tensor, rows: int, n: int, stream: int, dtype: torch.dtype) -> Tensor:
    """The same in plain PyTorch, (rows, n)."""
    if dtype == torch.float32:
        w = _philox.word_rows(seed, rows, stream, _philox.KIND_UNIFORM, n)
        return _philox.unit(w, w, dtype)
    w = _philox.word_rows(seed, rows, stream, _philox.KIND_UNIFORM, 2 * n)
    return _philox.unit(w[:, ::2], w[:, 1::2], dtype)


map_batch("philox_uniform", seed=0)


@torch.library.register_fake("mdps::philox_uniform")
def _(seed, rows, n, stream, is_double):
    rows = rows if seed.dim() == 0 else seed.size(0)
    return seed.new_empty((rows, n), dtype=torch.float64 if is_double else torch.float32)
