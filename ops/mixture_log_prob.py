"""Log-density of Gaussian x von Mises mixtures: the kernel state density m(x; particles, weights, bandwidth) of the paper."""

import math

import torch
from torch import Tensor

from . import _arguments as check
from ._operator import map_batch, operator, reference_active

_NAMES = ("x", "means", "log_weights", "bandwidths")


def mixture_log_prob(x: Tensor, means: Tensor, log_weights: Tensor, bandwidths: Tensor, *, n_angular: int = 0) -> Tensor:
    """Return the log-density of a mixture at every query.

    log m(x) = log sum_j exp(log_weights_j) prod_g Normal(x_g; mu_jg, beta_g^2) prod_a VonMises(x_a; mu_ja, beta_a^-2)

    Args:
        x: (..., M, D), queries; D <= 16 state dimensions, the last n_angular of them angles in radians, in any range.
        means: (..., N, D), the components' centres (particles).
        log_weights: (..., N); -inf is a dead component. They need not be normalised: the density scales with their sum.
        bandwidths: (D,) for all, or (..., D): standard deviations > 0 in the units of the state; a von Mises kernel has
            concentration bandwidth^-2.
        n_angular: how many dimensions, the last ones, are angles.
        All float32 or all float64 (half types are computed in float32), on one device, with equal leading dimensions.

    Returns:
        (..., M), finite and exact however far the query is; -inf where every component is dead.
        NaN in a query or a row of components makes that query or row NaN, no other.

    Raises:
        TypeError: dtypes. ValueError: shapes, devices, n_angular, bandwidths that are not positive and finite.
            A GPU is not waited for to look at bandwidths: there such ones make the results of their row NaN.

    Cost: O(MN) time, O(M + N) memory, forward and backward; gradients to all four tensors. Where all components are dead the
    gradient is 0. Source: the paper's equation for m(x_t | x_t^(:), w_t^(:), beta), section 2.3.
    """
    if not reference_active():
        try:  # The operator checks its arguments; what it refuses is looked at below, and refused or made to fit.
            if x.dim() == 3:
                return _mixture_log_prob(x, means, log_weights, bandwidths, n_angular)[0]
        except (AttributeError, RuntimeError, TypeError):
            pass
    x, means, log_weights, bandwidths = check.reals(_NAMES, x, means, log_weights, bandwidths)
    lead = mixture_shapes(x, means, log_weights, bandwidths, n_angular)
    if reference_active():
        return mixture_log_prob_reference(x, means, log_weights, bandwidths, n_angular)
    try:
        return _mixture_log_prob(*flat_mixture(lead, x, means, log_weights, bandwidths), n_angular)[0].reshape(
            *lead, x.size(-2)
        )
    except RuntimeError as error:
        raise check.named(error) from None


def mixture_shapes(x: Tensor, means: Tensor, log_weights: Tensor, bandwidths: Tensor, n_angular: int) -> torch.Size:
    """Check the shapes of queries and a mixture against each other; return the leading dimensions."""
    if x.dim() < 2 or means.dim() < 2:
        raise ValueError(f"x, means: expected shapes (..., M, D), (..., N, D), got {tuple(x.shape)}, {tuple(means.shape)}")
    *lead, n, d = means.shape
    check.state_size(d, n_angular)
    check.shape("x", x, "(..., M, D)", *lead, x.size(-2), d)
    check.shape("log_weights", log_weights, "(..., N)", *lead, n)
    if bandwidths.dim() != 1 or bandwidths.size(0) != d:
        check.shape("bandwidths", bandwidths, "(D,) or (..., D)", *lead, d)
    return x.shape[:-2]


def flat_mixture(lead: torch.Size, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Merge the leading dimensions into one, even if there are none; bandwidths (D,) stay as they are."""
    n = len(lead)
    return tuple(t.unsqueeze(0) if n == 0 else t if t.dim() == 1 else t.flatten(0, n - 1) for t in tensors)


def kernel_log_prob(difference: Tensor, bandwidths: Tensor, n_angular: int) -> Tensor:
    """Log-density of one kernel at x - mu, (..., D) -> (...), in plain PyTorch."""
    g = difference.size(-1) - n_angular
    linear, sigma = difference[..., :g], bandwidths[..., :g]
    log_p = (-0.5 * (linear / sigma) ** 2 - sigma.log() - 0.5 * math.log(2 * math.pi)).sum(-1)
    kappa = bandwidths[..., g:] ** -2
    angle = -2 * kappa * torch.sin(difference[..., g:] / 2) ** 2
    return log_p + (angle - torch.log(2 * math.pi * torch.special.i0e(kappa))).sum(-1)


def mixture_log_prob_reference(x: Tensor, means: Tensor, log_weights: Tensor, bandwidths: Tensor, n_angular: int) -> Tensor:
    """The same in plain PyTorch, O(MND) memory. Exponents are clamped: torch.exp is 75 times slower where it underflows."""
    shared = bandwidths if bandwidths.dim() == 1 else bandwidths[..., None, None, :]
    a = log_weights[..., None, :] + kernel_log_prob(x[..., :, None, :] - means[..., None, :, :], shared, n_angular)
    top = a.detach().amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    sums = torch.where(a == -torch.inf, 0.0, (a - top).clamp_min(-80).exp()).sum(-1)
    return torch.where(sums > 0, sums, 1.0).log() + torch.where(sums == 0, -torch.inf, top.squeeze(-1))


def _save(ctx, args, out):
    ctx.n_angular = args[4]
    ctx.save_for_backward(*args[:4], out[1])
    ctx.mark_non_differentiable(out[1])


def _gradients(ctx, grad, _):
    return *_backward(grad, *ctx.saved_tensors, ctx.n_angular), None


_backward = operator("mixture_log_prob_backward")
_mixture_log_prob = operator("mixture_log_prob", _save, _gradients)
map_batch("mixture_log_prob", shared={3: None})
map_batch("mixture_log_prob_backward", shared={4: 3})


@torch.library.register_fake("mdps::mixture_log_prob")
def _(x, means, log_weights, bandwidths, n_angular):
    x, means, log_weights, bandwidths = check.reals(_NAMES, x, means, log_weights, bandwidths)
    mixture_shapes(x, means, log_weights, bandwidths, n_angular)
    return x.new_empty(x.shape[:2]), x.new_empty(x.shape[:2])


@torch.library.register_fake("mdps::mixture_log_prob_backward")
def _(grad, x, means, log_weights, bandwidths, log2_sum, n_angular):
    return tuple(t.new_empty(t.shape) for t in (x, means, log_weights, bandwidths))
