"""Logarithm of the modified Bessel function I0: the normaliser of the von Mises distribution."""

import torch
from torch import Tensor

from . import _arguments as check
from ._operator import map_batch, operator, reference_active


def log_i0(concentration: Tensor) -> Tensor:
    """Return log I0(concentration), number by number; no overflow, no cancellation.

    Args:
        concentration: any shape, float32 or float64 (half types are computed in float32), any range. The function is even:
            a negative number gives what its absolute value gives.

    Returns:
        The same shape: 0 at 0, about k^2 / 4 beside it, about |k| - log(2 pi |k|) / 2 far out. NaN stays NaN.

    Raises:
        TypeError: not a real tensor.

    Cost: a polynomial and two logarithms a number; no memory but the result. The gradient is I1 / I0.
    Source: Abramowitz & Stegun 9.6.12 and 9.7.1; in the paper it normalises the von Mises kernels of section 5.
    """
    (concentration,) = check.reals(("concentration",), concentration)
    if reference_active():
        return log_i0_reference(concentration)
    if concentration.dim() == 1:
        return _log_i0(concentration)
    return _log_i0(concentration.reshape(-1)).view(concentration.shape)


def log_i0_reference(concentration: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    return torch.special.i0e(concentration).log() + concentration.abs()


def _save(ctx, args, out):
    ctx.save_for_backward(*args)


def _gradients(ctx, grad_log_i0):
    return _backward(grad_log_i0, *ctx.saved_tensors)


_backward = operator("log_i0_backward")
_log_i0 = operator("log_i0", _save, _gradients)
map_batch("log_i0")
map_batch("log_i0_backward")


@torch.library.register_fake("mdps::log_i0")
def _(concentration):
    return concentration.new_empty(concentration.shape)


@torch.library.register_fake("mdps::log_i0_backward")
def _(grad_log_i0, concentration):
    return concentration.new_empty(concentration.shape)
