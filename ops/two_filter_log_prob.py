"""Both filters' densities and the proposal of the two-filter smoother at every particle, in one call."""

import math

import torch
from torch import Tensor

from . import _arguments as check
from ._operator import map_batch, operator, reference_active
from .mixture_log_prob import flat_mixture, mixture_log_prob_reference, mixture_shapes

_NAMES = (
    "x",
    "forward_means",
    "forward_log_weights",
    "forward_bandwidths",
    "backward_means",
    "backward_log_weights",
    "backward_bandwidths",
)


def two_filter_log_prob(
    x: Tensor,
    forward_means: Tensor,
    forward_log_weights: Tensor,
    forward_bandwidths: Tensor,
    backward_means: Tensor,
    backward_log_weights: Tensor,
    backward_bandwidths: Tensor,
    *,
    n_angular: int = 0,
    mixing: float = 0.5,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log m_f(x), log m_b(x) and log q(x) with q = mixing m_f + (1 - mixing) m_b.

    Args:
        x: (..., M, D), the smoother's particles.
        forward_*, backward_*: the two mixtures, as in `mixture_log_prob`; their numbers of components may differ.
        n_angular: how many dimensions, the last ones, are angles.
        mixing: the forward mixture's share of q, 0 to 1.

    Returns:
        Three tensors (..., M). Where both densities are 0, log q is -inf and its gradient 0.

    Raises:
        TypeError: dtypes. ValueError: shapes, devices, n_angular, mixing, bandwidths that are not positive and finite.
            A GPU is not waited for to look at bandwidths: there such ones make the results of their row NaN.

    Cost: O(M (N_f + N_b)) time, O(M + N_f + N_b) memory; gradients to x and both mixtures.
    Source: the paper's equation of q(x_t) and of the smoothed weights, section 4.
    """
    args: tuple[Tensor, ...] = (
        x,
        forward_means,
        forward_log_weights,
        forward_bandwidths,
        backward_means,
        backward_log_weights,
        backward_bandwidths,
    )
    if not reference_active():
        try:  # The operator checks its arguments; what it refuses is looked at below.
            if x.dim() == 3:
                return _two_filter_log_prob(*args, n_angular, mixing)[:3]
        except (AttributeError, RuntimeError, TypeError):
            pass
    args = check.reals(_NAMES, *args)
    if not 0 <= mixing <= 1:
        raise ValueError(f"mixing: expected 0 to 1, got {mixing}")
    x, fm, fl, fb, bm, bl, bb = args
    lead = mixture_shapes(x, fm, fl, fb, n_angular)
    mixture_shapes(x, bm, bl, bb, n_angular)
    if reference_active():
        return two_filter_log_prob_reference(x, fm, fl, fb, bm, bl, bb, n_angular, mixing)
    try:
        out = _two_filter_log_prob(*flat_mixture(lead, *args), n_angular, mixing)
    except RuntimeError as error:
        raise check.named(error) from None
    log_f, log_b, log_q = (o.reshape(*lead, x.size(-2)) for o in out[:3])
    return log_f, log_b, log_q


def two_filter_log_prob_reference(
    x: Tensor, fm: Tensor, fl: Tensor, fb: Tensor, bm: Tensor, bl: Tensor, bb: Tensor, n_angular: int, mixing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain PyTorch."""
    log_f = mixture_log_prob_reference(x, fm, fl, fb, n_angular)
    log_b = mixture_log_prob_reference(x, bm, bl, bb, n_angular)
    f = log_f + (math.log(mixing) if mixing > 0 else -math.inf)
    b = log_b + (math.log1p(-mixing) if mixing < 1 else -math.inf)
    dead = (f == -torch.inf) & (b == -torch.inf)
    q = torch.logaddexp(torch.where(dead, 0.0, f), torch.where(dead, 0.0, b))
    return log_f, log_b, torch.where(dead, -torch.inf, q)


def _save(ctx, args, out):
    ctx.options = args[7:]
    ctx.save_for_backward(out[0], out[1], out[3], out[4], *args[:7])
    ctx.mark_non_differentiable(out[3], out[4])


def _gradients(ctx, grad_f, grad_b, grad_q, *_):
    wants_x = ctx.needs_input_grad[0]  # a smoother's particles are constants
    grad_x, *others = _backward(grad_f, grad_b, grad_q, *ctx.saved_tensors, *ctx.options, int(wants_x))
    return grad_x if wants_x else None, *others, None, None


_backward = operator("two_filter_log_prob_backward")
_two_filter_log_prob = operator("two_filter_log_prob", _save, _gradients)
map_batch("two_filter_log_prob", shared={3: None, 6: None})
map_batch("two_filter_log_prob_backward", shared={10: 3, 13: 6})


@torch.library.register_fake("mdps::two_filter_log_prob")
def _(x, fm, fl, fb, bm, bl, bb, n_angular, mixing):
    check.reals(_NAMES, x, fm, fl, fb, bm, bl, bb)
    mixture_shapes(x, fm, fl, fb, n_angular)
    mixture_shapes(x, bm, bl, bb, n_angular)
    return tuple(x.new_empty(x.shape[:2]) for _ in range(5))


@torch.library.register_fake("mdps::two_filter_log_prob_backward")
def _(grad_f, grad_b, grad_q, log_f, log_b, sum_f, sum_b, x, fm, fl, fb, bm, bl, bb, n_angular, mixing, wants_x):
    return x.new_empty(x.shape if wants_x else (0, 0, 0)), *(t.new_empty(t.shape) for t in (fm, fl, fb, bm, bl, bb))
