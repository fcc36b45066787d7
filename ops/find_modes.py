"""The highest modes of a mixture, by mean-shift."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _arguments as check
from ._operator import map_batch, reference_active
from .mixture_log_prob import flat_mixture, kernel_log_prob, mixture_log_prob_reference

_NAMES = ("means", "log_weights", "bandwidths")
_UNIFORM = 1e18  # radians: a bandwidth whose kernel is the same all around the circle, to the last digit


def find_modes(
    means: Tensor,
    log_weights: Tensor,
    bandwidths: Tensor,
    n_modes: int,
    radii: float | Sequence[float],
    *,
    n_angular: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the highest modes of mixtures, local maxima of the density that `mixture_log_prob` computes.

    A mode is where mean-shift comes to rest (a step is below 1e-6 bandwidths, in float64 1e-10). Starts are the components'
    means, each moved by one step, in the order of the density there; those that differ from a mode found before by less
    than the radius in every dimension are passed over. Two modes as close as that count as one, the higher. The search ends
    with K modes, or when no start is left: a mode higher than the lowest found may be missed if K others were found from
    better starts. No mode is lower than its start, and no start than its mean.

    Args:
        means: (..., N, D), float32 or float64 (half types are computed in float32): components, N >= 1, 1 <= D <= 16, of
            which the last n_angular are angles in radians, in any range.
        log_weights: (..., N), normalised or not; -inf is a dead component.
        bandwidths: (D) or (..., D): standard deviations > 0 in the units of the state; a von Mises kernel has concentration
            bandwidth**-2. Infinity makes an angle uniform: its modes are told apart by the other dimensions.
        n_modes: K >= 1.
        radii: D numbers >= 0, or one for all dimensions, in the units of the state; infinity: the dimension tells no modes
            apart. Less than 1/100 of a bandwidth (or of a radian) counts as that.
        n_angular: number of angular dimensions, 0 to D.

    Returns:
        modes (..., K, D), by falling density, angles in [-pi, pi), and log_densities (..., K), of the mixture at the modes.
        Where there are fewer than K modes, the rest repeat the highest with log_densities -inf; where every component is
        dead, all are the first component's mean. A mean that is not finite, or a log-weight that is NaN or +inf, makes its
        row NaN, no other. No gradient passes.

    Raises:
        TypeError: dtypes, n_modes. ValueError: shapes, n_modes, radii, n_angular, bandwidths that are not positive.
            A GPU is not waited for to look at bandwidths: there such ones make the results of their row NaN.

    Cost: 2 N^2 kernels a row, and N a step of mean-shift, about 10 steps for each mode and for each start that leads to a
    mode found before. Memory O(N D + K D) a row, on the CPU for 64 rows at most.
    Source: mean-shift as EM, Carreira-Perpinan 2007, accelerated by SQUAREM, Varadhan & Roland 2008; the paper's point
    estimates (section 5) are such modes, there sought among samples.
    """
    means, log_weights, bandwidths = check.reals(_NAMES, means, log_weights, bandwidths)
    if means.dim() < 2 or means.size(-2) == 0:
        raise ValueError(f"means: expected shape (..., N, D) with N >= 1, got {tuple(means.shape)}")
    *lead, n, d = means.shape
    check.state_size(d, n_angular)
    check.shape("log_weights", log_weights, "(..., N)", *lead, n)
    check.shape("bandwidths", bandwidths, "(D) or (..., D)", *(() if bandwidths.dim() == 1 else lead), d)
    check.whole("n_modes", n_modes)
    if not 1 <= n_modes < 2**31:
        raise ValueError(f"n_modes: expected 1 to 2**31 - 1, got {n_modes}")
    radii = _radii(radii, d)
    if n_angular:
        linear, angular = bandwidths.split([d - n_angular, n_angular], -1)
        bandwidths = torch.cat([linear, angular.clamp(max=_UNIFORM)], -1)
    f = find_modes_reference if reference_active() else torch.ops.mdps.find_modes.default
    args = means.detach(), log_weights.detach(), bandwidths.detach()
    means, log_weights, bandwidths = flat_mixture(torch.Size(lead), *args)
    try:
        modes, log_densities = f(means, log_weights, bandwidths, n_modes, radii, n_angular)
    except RuntimeError as error:
        raise check.named(error) from None
    return modes.view(*lead, n_modes, d), log_densities.view(*lead, n_modes)


def _radii(radii: float | Sequence[float], d: int) -> list[float]:
    numbers = [float(radii)] * d if isinstance(radii, (int, float)) else [float(r) for r in radii]
    if len(numbers) != d or not all(r >= 0 for r in numbers):
        raise ValueError(f"radii: expected {d} numbers >= 0, or one, got {radii}")
    return numbers


def find_modes_reference(
    means: Tensor, log_weights: Tensor, bandwidths: Tensor, n_modes: int, radii: list[float], n_angular: int
) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch, a row at a time, in float64 and by plain mean-shift, which takes many more steps."""
    modes = means[:, :1].repeat(1, n_modes, 1)
    log_densities = log_weights.new_full((means.size(0), n_modes), -math.inf)
    for b in range(means.size(0)):
        row = means[b].double(), log_weights[b].double(), bandwidths.expand(means.size(0), -1)[b].double()
        if not (row[0].isfinite().all() and (row[1] < math.inf).all() and (row[2] > 0).all()):
            modes[b], log_densities[b] = math.nan, math.nan
        elif found := _search(*row, n_modes, torch.tensor(radii, device=means.device).double(), n_angular):
            log_densities[b, : len(found)] = torch.stack([density for density, _ in found])
            modes[b] = torch.stack([mode for _, mode in found + found[:1] * (n_modes - len(found))])
    angles = modes[..., modes.size(-1) - n_angular :]
    outside = (angles < -math.pi) | (angles >= math.pi)
    angles.copy_(torch.where(outside, torch.remainder(angles + math.pi, 2 * math.pi) - math.pi, angles))
    return modes, log_densities


def _search(means, log_weights, bandwidths, n_modes, radii, n_angular):
    """The modes of a row as (log density, place)."""
    g = means.size(-1) - n_angular
    unit = torch.cat([bandwidths[:g], bandwidths[g:].clamp(max=1.0)])
    radii = torch.maximum(radii, 0.01 * unit)
    mixture = means[None], log_weights[None], bandwidths[None]

    def density(x):
        return mixture_log_prob_reference(x.view(1, -1, x.size(-1)), *mixture, n_angular)[0]

    def is_one(x, y):
        away = x - y
        turned = torch.remainder(away[..., g:] + math.pi, 2 * math.pi) - math.pi
        return (torch.cat([away[..., :g], turned], -1).abs() < radii).all(-1)

    found: list[tuple[Tensor, Tensor]] = []
    starts = torch.stack([_shift(x, means, log_weights, bandwidths, n_angular) for x in means])
    left = torch.where(log_weights == -math.inf, -math.inf, density(starts))  # the densities at starts that are left
    while len(found) < n_modes and left.max() > -math.inf:
        best = left.argmax()
        left[best] = -math.inf
        mode = _ascend(starts[best], means, log_weights, bandwidths, n_angular)
        new = density(mode)[0], mode
        if any(is_one(mode, place) for value, place in found if value >= new[0]):
            continue
        found = sorted([f for f in found if not is_one(mode, f[1])] + [new], key=lambda f: -f[0])
        left = torch.where(is_one(starts, mode), -math.inf, left)
    return found


def _shift(x, means, log_weights, bandwidths, n_angular):
    """Where a step of mean-shift leads from x."""
    g = means.size(-1) - n_angular
    p = (log_weights + kernel_log_prob(x - means, bandwidths, n_angular)).softmax(-1)[:, None]
    linear, angular = (means - x)[:, :g], (means - x)[:, g:]
    return x + torch.cat([(p * linear).sum(0), torch.atan2((p * angular.sin()).sum(0), (p * angular.cos()).sum(0))])


def _ascend(x, means, log_weights, bandwidths, n_angular):
    """Mean-shift from beside x to where it comes to rest."""
    d = means.size(-1)
    unit = torch.cat([bandwidths[: d - n_angular], bandwidths[d - n_angular :].clamp(max=1.0)])
    sign = 1 - 2 * (torch.arange(d, device=unit.device) % 2)
    x = x + 1e-3 * sign * unit
    for _ in range(20000):
        before, x = x, _shift(x, means, log_weights, bandwidths, n_angular)
        if ((x - before).abs() <= 1e-12 * unit).all():
            break
    return x


map_batch("find_modes", shared={2: None})


@torch.library.register_fake("mdps::find_modes")
def _(means, log_weights, bandwidths, n_modes, radii, n_angular):
    rows, _, d = means.shape
    return means.new_empty((rows, n_modes, d)), means.new_empty((rows, n_modes))
