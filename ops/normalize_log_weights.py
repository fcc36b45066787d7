"""Normalised log-weights, their log-sum and the effective sample size: the tutorial operator (see CONTRIBUTING.md).

An operator file has five parts: the public function with its checks, the reference in plain PyTorch, what the derivative
saves and returns, the transforms, and the fake that tells torch.compile the shapes.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import _arguments as check
from ._operator import map_batch, operator, reference_active


class NormalizedWeights(NamedTuple):
    """What `normalize_log_weights` returns."""

    log_weights: Tensor
    """(..., N), normalised: their exponentials sum to 1."""
    log_sum: Tensor
    """(...), log of the sum of the weights that came in; -inf marks a collapse."""
    ess: Tensor
    """(...), effective sample size, 1 to N."""


def normalize_log_weights(log_weights: Tensor) -> NormalizedWeights:
    """Normalise log-weights over their last dimension.

    Args:
        log_weights: (..., N), N >= 1, float32 or float64 (half types are computed in float32). -inf is a dead particle.

    Returns:
        log_weights (..., N) with logsumexp 0, log_sum (...) and ess (...), the effective sample size (sum w)^2 / sum w^2.
        A row of -inf alone has collapsed: its log-weights become -log N, log_sum -inf, ess N, and no gradient flows.
        NaN or +inf makes its own row NaN.

    Raises:
        TypeError: not a real tensor. ValueError: no particle dimension, or N = 0.

    Cost: N exponentials a row, forward and backward; no memory but the results. Gradients to log_weights from all three.
    Source: the normalisation of w in the paper's section 2; ess is Kong, Liu & Wong 1994.
    """
    (log_weights,) = check.reals(("log_weights",), log_weights)
    if log_weights.dim() == 0 or log_weights.size(-1) == 0:
        raise ValueError(f"log_weights: expected shape (..., N) with N >= 1, got {tuple(log_weights.shape)}")
    if reference_active():
        return NormalizedWeights(*normalize_log_weights_reference(log_weights))
    if log_weights.dim() == 2:
        return NormalizedWeights(*_normalize(log_weights))
    lead = log_weights.shape[:-1]
    out = _normalize(log_weights.reshape(lead.numel(), log_weights.size(-1)))
    return NormalizedWeights(out[0].view(log_weights.shape), out[1].view(lead), out[2].view(lead))


def normalize_log_weights_reference(log_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain PyTorch."""
    n = log_weights.size(-1)
    collapsed = (log_weights == -torch.inf).all(-1, keepdim=True)
    uniform = torch.where(collapsed, torch.zeros_like(log_weights), log_weights)
    log_sum = torch.logsumexp(uniform, -1, keepdim=True)
    log_sum = torch.where(log_sum == torch.inf, torch.nan, log_sum)
    normalized = uniform - log_sum
    ess = torch.exp(-torch.logsumexp(2 * normalized, -1))
    normalized = torch.where(collapsed, torch.full_like(normalized, -math.log(n)), normalized)
    log_sum = torch.where(collapsed, torch.full_like(log_sum, -torch.inf), log_sum)
    return normalized, log_sum.squeeze(-1), ess


def _save(ctx, args, out):
    ctx.save_for_backward(*out)


def _gradients(ctx, grad_normalized, grad_log_sum, grad_ess):
    return _backward(grad_normalized, grad_log_sum, grad_ess, *ctx.saved_tensors)


_backward = operator("normalize_log_weights_backward")
_normalize = operator("normalize_log_weights", _save, _gradients)
map_batch("normalize_log_weights")
map_batch("normalize_log_weights_backward")


@torch.library.register_fake("mdps::normalize_log_weights")
def _(log_weights):
    rows = log_weights.shape[:1]
    return log_weights.new_empty(log_weights.shape), log_weights.new_empty(rows), log_weights.new_empty(rows)


@torch.library.register_fake("mdps::normalize_log_weights_backward")
def _(grad_normalized, grad_log_sum, grad_ess, normalized, log_sum, ess):
    return normalized.new_empty(normalized.shape)
