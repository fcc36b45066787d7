"""Von Mises deviates from Philox words."""

import math

import torch
from torch import Tensor

from . import _arguments as check
from . import _philox
from ._operator import map_batch, reference_active

MAX_ATTEMPTS = 64


def philox_von_mises(seed: Tensor, concentration: Tensor, *, stream: int = 0) -> Tensor:
    """Draw angles from von Mises distributions with mean 0 and these concentrations.

    Args:
        seed: int64, () shared by the rows or (B,) one for each, on the device of concentration.
        concentration: (B, ...), float32 or float64 (half types are computed in float32): kappa >= 0, the inverse square of
            a small standard deviation in radians. 0 is the uniform distribution; any size up to infinity (angle 0).
        stream: 0 to 2**32 - 1; other streams of the same seed are independent.

    Returns:
        Angles in [-pi, pi), of the shape and dtype of concentration, without gradient. A function of the arguments alone.
        NaN and negative concentrations give NaN there, and nowhere else. The words are those of the von Mises kernels of
        mixture_resample on the same seed and stream: give one of the two another stream, or a seed of its own (split_seed).

    Raises:
        TypeError: not an int64 seed, not a real concentration. ValueError: shapes or stream.

    Cost: 9 to 14 ns a number in float32, 13 to 21 in float64, on one core with AVX-512; it always ends (64 attempts, of
    which 1.5 are needed on average).
    Source: Best & Fisher 1979, in the form without cancellation of kernels/draw.h; torch.distributions.VonMises hangs or
    loses its variance at the ends of this range.
    """
    (concentration,) = check.reals(("concentration",), concentration)
    _philox.check_stream(stream)
    _philox.check_seed(seed)
    if concentration.dim() == 0:
        raise ValueError("concentration: expected shape (B, ...), got ()")
    rows = concentration.size(0)
    if seed.dim() == 1 and seed.size(0) != rows:
        raise ValueError(f"concentration: expected {seed.size(0)} rows, one for each seed, got {tuple(concentration.shape)}")
    if seed.device != concentration.device:
        raise ValueError(f"seed: expected the device of concentration, {concentration.device}, got {seed.device}")
    flat = concentration.detach().reshape(rows, math.prod(concentration.shape[1:]))
    f = philox_von_mises_reference if reference_active() else torch.ops.mdps.philox_von_mises.default
    return f(flat, seed, stream).reshape(concentration.shape)


def philox_von_mises_reference(concentration: Tensor, seed: Tensor, stream: int) -> Tensor:
    """The same in plain PyTorch, (B, n)."""
    (rows, n), dtype = concentration.shape, concentration.dtype
    k = torch.where(concentration > 0, concentration, 0.0).clamp(max=1e300 if dtype == torch.float64 else 1e36)
    width = (1 + 1 / (torch.sqrt(1 + 4 * k * k) + 2 * k)) / 4
    t = torch.sqrt(width / (k + width))
    angle, waiting = torch.zeros_like(k), torch.ones_like(k, dtype=torch.bool)
    elements = torch.arange(n, device=seed.device)
    for attempt in range(MAX_ATTEMPTS):
        w = _philox.words(seed, rows, stream, _philox.KIND_VON_MISES, elements, attempt)
        v, u = _philox.centred_unit(w[..., 0], w[..., 1], dtype), _philox.open_unit(w[..., 2], w[..., 3], dtype)
        sine, cosine = t * torch.sin(math.pi * v), torch.cos(math.pi * v).abs()
        y = 2 * k * sine**2 / (cosine**2 + sine**2) + 2 * width
        angle = torch.where(waiting, 2 * torch.atan2(sine, cosine), angle)
        waiting = waiting & ~(u <= y * torch.exp(1 - y))
        if not waiting.any():
            break
    angle = torch.where(angle >= math.pi, -angle, angle)
    angle = torch.where(concentration == math.inf, 0.0, angle)
    return torch.where(concentration >= 0, angle, math.nan)


map_batch("philox_von_mises", seed=1)


@torch.library.register_fake("mdps::philox_von_mises")
def _(concentration, seed, stream):
    return concentration.new_empty(concentration.shape)
