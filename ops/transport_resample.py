"""Resampling that is differentiable: entropy-regularised optimal transport from weighted to equally weighted particles."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import _arguments as check
from ._operator import map_batch, operator, reference_active, without_autocast


class Transported(NamedTuple):
    """What `transport_resample` returns."""

    particles: Tensor
    """(..., N, D), of equal weight; angles in [-pi, pi)."""
    marginal_error: Tensor
    """(...), the sum over particles of |weight that the plan took from it - its weight|, 0 to 2; no gradient."""
    iterations: Tensor
    """(...) int64: steps, 1 to max_iterations; max_iterations: the threshold may not have been reached. 0: the row is NaN."""


def transport_resample(
    particles: Tensor,
    log_weights: Tensor,
    *,
    epsilon: float = 0.5,
    scaling: float = 0.9,
    threshold: float = 1e-3,
    max_iterations: int = 500,
    n_angular: int = 0,
) -> Transported:
    """Turn N weighted particles into N particles of equal weight by entropy-regularised optimal transport.

    Every new particle is a weighted mean of the old ones, sum_j T_ij x_j, where T / N is the plan of least cost, less epsilon
    times its entropy, between the weighted cloud and the same cloud with equal weights. The cost is half the squared distance
    after division by sqrt(K) times the largest standard deviation among the K coordinates: epsilon has no unit. An angle counts
    as two coordinates, its cosine and its sine; the mean of angles is the direction of their mean cosine and sine.

    Args:
        particles: (..., N, D), N >= 1, 1 <= D <= 16, the last n_angular of them angles in radians, in any range. float32 or
            float64 (half types are computed in float32).
        log_weights: (..., N), normalised or not; -inf is a dead particle, a row of -inf alone counts as uniform.
        epsilon: > 0, regularisation: the larger, the closer all new particles are to the weighted mean.
        scaling: 0 <= scaling < 1; the steps begin with the squared range of the cloud for epsilon, and multiply by scaling**2.
        threshold: >= 0; a row stops once no potential would move by more, in units of the cost. What float32 can resolve is
            about 1e-6.
        max_iterations: >= 1, steps at most.
        n_angular: number of angular dimensions, 0 to D.

    Returns:
        particles (..., N, D), marginal_error (...), iterations (...). The rows of T sum to 1 exactly; the mean of the new
        particles is the weighted mean of the old ones up to marginal_error times their spread. NaN or infinite particles,
        NaN or +inf weights make their own row NaN. A row converges on its own: its bits do not depend on other rows.

    Raises:
        TypeError: not real tensors, not numbers. ValueError: shapes, devices, options.

    Gradients to particles and log_weights are those of the converged plan, by implicit differentiation at the potentials found:
    exact as threshold goes to 0. (The source's code takes the scale for a constant and clips the gradients of T, whose columns
    are exact there; here its rows are.)
    Cost: O(N^2) a step and row, 15 to 25 steps with the default options; backward half as much as forward. Memory O(N) a row,
    backward on the CPU the N x N plan of the rows at work.
    Source: Corenflos, Thornton, Deligiannidis & Doucet 2021, algorithm 3; the baseline OT-PF of the paper.
    """
    particles, log_weights = check.reals(("particles", "log_weights"), particles, log_weights)
    if particles.dim() < 2 or particles.size(-2) == 0:
        raise ValueError(f"particles: expected shape (..., N, D) with N >= 1, got {tuple(particles.shape)}")
    *lead, n, d = particles.shape
    check.state_size(d, n_angular)
    check.shape("log_weights", log_weights, "(..., N)", *lead, n)
    _check_options(epsilon, scaling, threshold, max_iterations)
    options = float(epsilon), float(scaling), float(threshold), max_iterations, n_angular
    if reference_active():
        return Transported(*transport_resample_reference(particles, log_weights, *options))
    rows = particles.shape[:-2].numel()
    out = _transport(particles.reshape(rows, n, d), log_weights.reshape(rows, n), *options)
    return Transported(out[0].view(particles.shape), out[1].view(lead), out[2].view(lead))


def _check_options(epsilon: float, scaling: float, threshold: float, max_iterations: int) -> None:
    for name, value in (("epsilon", epsilon), ("scaling", scaling), ("threshold", threshold)):
        if not isinstance(value, (int, float)):
            raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not isinstance(max_iterations, int):
        raise TypeError(f"max_iterations: expected an int, got {type(max_iterations).__name__}")
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon: expected a positive finite number, got {epsilon}")
    if not 0 <= scaling < 1:
        raise ValueError(f"scaling: expected a number in [0, 1), got {scaling}")
    if not 0 <= threshold < math.inf:
        raise ValueError(f"threshold: expected a finite number >= 0, got {threshold}")
    if not 1 <= max_iterations < 2**31:
        raise ValueError(f"max_iterations: expected 1 to 2^31 - 1, got {max_iterations}")


def transport_resample_reference(
    particles: Tensor, log_weights: Tensor, epsilon: float, scaling: float, threshold: float, most: int, n_angular: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain PyTorch, O(N^2) memory; the gradient by one Newton step, whose system is solved densely, O(N^3)."""
    linear, angles = particles.split([particles.size(-1) - n_angular, n_angular], -1)
    z = torch.cat([linear, angles.cos(), angles.sin()], -1)
    good = z.isfinite().all(-1).all(-1) & (log_weights < torch.inf).all(-1)
    z = torch.where(good[..., None, None], z, 0.0)
    dead = (log_weights == -torch.inf).all(-1) | ~good
    log_w = torch.where(dead[..., None], 0.0, log_weights).log_softmax(-1)
    x = _scaled(z)
    cost = (x.unsqueeze(-2) - x.unsqueeze(-3)).square().sum(-1) / 2
    with torch.no_grad():
        spread = x.amax((-2, -1)) - x.amin((-2, -1))
        f, g, steps = _potentials(cost, log_w, spread.square(), epsilon, scaling, threshold, most)
    if torch.is_grad_enabled() and cost.requires_grad | log_w.requires_grad:
        g = g + _newton_step(f, g, cost, log_w, epsilon)
    plan = (log_w.unsqueeze(-2) + (g.unsqueeze(-2) - cost) / epsilon).softmax(-1)
    error = (plan.mean(-2) - log_w.exp()).abs().sum(-1).detach()
    mean = without_autocast(torch.matmul, plan, z)
    linear, cosine, sine = mean.split([linear.size(-1), n_angular, n_angular], -1)
    angles = torch.atan2(sine, cosine)
    angles = torch.where(angles >= torch.pi, angles - 2 * torch.pi, angles)
    out = torch.where(good[..., None, None], torch.cat([linear, angles], -1), torch.nan)
    return out, torch.where(good, error, torch.nan), torch.where(good, steps, 0)


def _scaled(z: Tensor) -> Tensor:
    """Coordinates (..., N, K), centred and divided by sqrt(K) times the largest standard deviation."""
    centred = z - z.mean(-2, keepdim=True)
    equal = (z == z[..., :1, :]).all(-2, keepdim=True)
    variance = torch.where(equal, 0.0, centred.square().mean(-2, keepdim=True)).max(-1, keepdim=True).values
    return centred / torch.where(variance > 0, variance * z.size(-1), 1.0).sqrt()


def _log_sums(f: Tensor, g: Tensor, cost: Tensor, log_w: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithms of S and R as defined in kernels/transport_resample.h; e: (..., 1)."""
    entries = (f.unsqueeze(-1) + g.unsqueeze(-2) - cost) / e.unsqueeze(-1)
    return (entries + log_w.unsqueeze(-2)).logsumexp(-1), entries.logsumexp(-2) - math.log(cost.size(-1))


def _potentials(
    cost: Tensor, log_w: Tensor, first: Tensor, epsilon: float, scaling: float, threshold: float, max_iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """f, g and the number of steps; rows that have ended stay as they are."""
    f, g = torch.zeros_like(log_w), torch.zeros_like(log_w)
    e = first.clamp_min(epsilon).unsqueeze(-1)
    active, steps = torch.ones_like(e, dtype=torch.bool), torch.zeros_like(e, dtype=torch.int64)
    for step in range(max_iterations):
        log_s, log_r = _log_sums(f, g, cost, log_w, e)
        share = e / 2 if step else e
        most = share * torch.maximum(log_s.abs(), log_r.abs()).amax(-1, keepdim=True)
        steps = torch.where(active, step + 1, steps)
        last = step + 1 == max_iterations
        moving = active & ((e > epsilon) if last else (e > epsilon) | (most > threshold))
        f, g = torch.where(moving, f - share * log_s, f), torch.where(moving, g - share * log_r, g)
        e, active = (e * scaling**2).clamp_min(epsilon), moving
        if last or not active.any():
            break
    e = torch.full_like(e, epsilon)
    return f - epsilon * _log_sums(f, g, cost, log_w, e)[0], g, steps.squeeze(-1)


def _newton_step(f: Tensor, g: Tensor, cost: Tensor, log_w: Tensor, epsilon: float) -> Tensor:
    """0 with the gradient of the fixed point's g. A last row and column settle the constant that f and g may exchange."""
    n = f.size(-1)
    log_sums = _log_sums(f, g, cost, log_w, torch.full_like(f[..., :1], epsilon))
    rows = (log_w.unsqueeze(-2) + (g.unsqueeze(-2) - cost) / epsilon).softmax(-1)
    columns = ((f.unsqueeze(-1) - cost) / epsilon).softmax(-2)
    jacobian = torch.eye(2 * n + 1, dtype=f.dtype, device=f.device).repeat(*f.shape[:-1], 1, 1)
    jacobian[..., :n, n:-1], jacobian[..., n:-1, :n] = rows.detach(), columns.mT.detach()
    jacobian[..., :n, -1], jacobian[..., -1, :n], jacobian[..., -1, -1] = 1, 1, 0
    residual = torch.cat([*log_sums, torch.zeros_like(f[..., :1])], -1)
    step = -epsilon * torch.linalg.solve(jacobian, residual)[..., n:-1]
    return step - step.detach()


def _save(ctx, args, out):
    ctx.options = args[2], args[6]
    ctx.save_for_backward(*args[:2], out[3])
    ctx.mark_non_differentiable(*out[1:])


def _gradients(ctx, grad, *_):
    return *_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


_backward = operator("transport_resample_backward")
_transport = operator("transport_resample", _save, _gradients)
map_batch("transport_resample")
map_batch("transport_resample_backward")


@torch.library.register_fake("mdps::transport_resample")
def _(particles, log_weights, epsilon, scaling, threshold, max_iterations, n_angular):
    rows, n, _ = particles.shape
    steps = particles.new_empty((rows,), dtype=torch.int64)
    return particles.new_empty(particles.shape), particles.new_empty((rows,)), steps, particles.new_empty((rows, 2, n))


@torch.library.register_fake("mdps::transport_resample_backward")
def _(grad, particles, log_weights, potentials, epsilon, n_angular):
    return particles.new_empty(particles.shape), log_weights.new_empty(log_weights.shape)
