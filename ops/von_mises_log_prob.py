"""Log-density of the von Mises distribution, the normal distribution of angles."""

import math

import torch
from torch import Tensor

from . import _arguments as check
from ._operator import map_batch, operator, reference_active


def von_mises_log_prob(x: Tensor, mean: Tensor, concentration: Tensor) -> Tensor:
    """Return the log-density of angles under von Mises distributions, number by number.

    Args:
        x: angles in radians, wrapped or not; any shape. float32 or float64 (half types are computed in float32).
        mean: radians, wrapped or not; a shape that broadcasts with x.
        concentration: k >= 0, finite, about 1 / variance where it is large; a shape that broadcasts with x and mean. From
            k = 0, uniform on the circle, to 1e8 and beyond: k (cos(x - mean) - 1) is computed without its cancelling parts.

    Returns:
        The broadcast shape. A negative or infinite concentration, or a NaN, makes its own number NaN.

    Raises:
        TypeError: not real tensors of one dtype. ValueError: shapes that do not broadcast, or different devices.

    Cost: a sine a number, forward and backward; the Bessel functions once for each run of equal concentrations (so a
    concentration that broadcasts along the last dimension is nearly free). Gradients to all three.
    Source: the von Mises kernels of the paper's section 5, with concentration = bandwidth^-2.
    """
    names = ("x", "mean", "concentration")
    x, mean, concentration = check.reals(names, x, mean, concentration)
    if not x.shape == mean.shape == concentration.shape:
        x, mean, concentration = _broadcast(names, x, mean, concentration)
    if reference_active():
        return von_mises_log_prob_reference(x, mean, concentration)
    if x.dim() == 1:
        return _log_prob(x, mean, concentration)
    return _log_prob(x.reshape(-1), mean.reshape(-1), concentration.reshape(-1)).view(x.shape)


def _broadcast(names: tuple[str, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """torch.broadcast_tensors with an error that names the argument."""
    size: list[int] = []
    for name, t in zip(names, tensors):
        dim = max(len(size), t.dim())
        size = [1] * (dim - len(size)) + size
        for d, n in enumerate(t.shape, start=dim - t.dim()):
            if n != 1 and size[d] not in (1, n):
                raise ValueError(f"{name}: expected a shape that broadcasts with {tuple(size)}, got {tuple(t.shape)}")
            size[d] = n if n != 1 else size[d]
    return tuple(t.expand(size) for t in tensors)


def von_mises_log_prob_reference(x: Tensor, mean: Tensor, concentration: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    k = torch.where((concentration >= 0) & (concentration < torch.inf), concentration, torch.nan)
    # At 0 torch has 0 for the derivative of i0e; from above it is -1.
    above = torch.where(k == 0, k + torch.finfo(k.dtype).tiny, k)
    return -2 * k * ((x - mean) / 2).sin().square() - math.log(2 * math.pi) - torch.special.i0e(above).log()


def _save(ctx, args, out):
    ctx.save_for_backward(*args)


def _gradients(ctx, grad_log_prob):
    return _backward(grad_log_prob, *ctx.saved_tensors)


_backward = operator("von_mises_log_prob_backward")
_log_prob = operator("von_mises_log_prob", _save, _gradients)
map_batch("von_mises_log_prob")
map_batch("von_mises_log_prob_backward")


@torch.library.register_fake("mdps::von_mises_log_prob")
def _(x, mean, concentration):
    return x.new_empty(x.shape)


@torch.library.register_fake("mdps::von_mises_log_prob_backward")
def _(grad_log_prob, x, mean, concentration):
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape)
