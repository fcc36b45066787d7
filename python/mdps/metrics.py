"""What beliefs are judged by: negative log-likelihood of the truth, and errors of point estimates."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .mixture import Mixture


def negative_log_likelihood(belief: Mixture, truth: Tensor, *, density_floor: float = 0.0) -> Tensor:
    """-log[m(truth) + density_floor] of a mixture of batch shape (...) at states (..., D) -> (...), in nats.

    Args:
        density_floor: at least 0; with 1e-8 no state can cost more than 18.42 nats. 0 is the plain likelihood (the paper).
    """
    log_density = belief.log_prob(truth)
    if density_floor:
        log_density = torch.logaddexp(log_density, torch.full_like(log_density, math.log(density_floor)))
    return -log_density


def position_error(estimate: Tensor, truth: Tensor, n_linear: int = 2) -> Tensor:
    """Euclidean distance over the first `n_linear` dimensions: (..., D), (..., D) -> (...), in their unit."""
    return torch.linalg.vector_norm((estimate - truth)[..., :n_linear], dim=-1)


def heading_error(estimate: Tensor, truth: Tensor, dimension: int = 2) -> Tensor:
    """The angle between two headings the shorter way round: (..., D), (..., D) -> (...), in [0, pi] radians."""
    difference = estimate[..., dimension] - truth[..., dimension]
    return torch.atan2(difference.sin(), difference.cos()).abs()


def mode_errors(belief: Mixture, truth: Tensor, radii: float | Sequence[float]) -> tuple[Tensor, Tensor]:
    """Position and heading error of the highest mode, as point estimate, of beliefs over (x, y, heading).

    Args:
        belief: batch shape (...).
        truth: (..., 3).
        radii: as in `Mixture.modes`; modes as close as that count as one.

    Returns:
        position error (...), in the unit of x, and heading error (...), in [0, pi] radians.
    """
    best = belief.modes(1, radii)[0].squeeze(-2)
    return position_error(best, truth), heading_error(best, truth)


def mode_hits(
    belief: Mixture, truth: Tensor, radii: float | Sequence[float], *, k: int = 3, position: float, heading: float
) -> Tensor:
    """Whether one of the k highest modes is near the truth in position and heading at once: (...), bool.

    Args:
        belief: over (x, y, heading), batch shape (...).
        truth: (..., 3).
        radii: as in `Mixture.modes`: how close modes are one, so that k modes are k different places.
        k: how many modes count; 3 in the paper's figures.
        position: what is nearer than this is near, in the unit of x.
        heading: the same of the angle, in radians.

    A mode that there is not counts for nothing. NaN anywhere is no hit.
    """
    modes, log_densities = belief.modes(k, radii)
    truth = truth.unsqueeze(-2)
    near = (position_error(modes, truth) < position) & (heading_error(modes, truth) < heading)
    return (near & (log_densities > -math.inf)).any(-1)


def mode_recall(
    belief: Mixture, truth: Tensor, radii: float | Sequence[float], *, k: int = 3, position: float, heading: float
) -> float:
    """The share of steps, 0 to 1, at which one of the k highest modes is near the truth; arguments as in `mode_hits`."""
    return mode_hits(belief, truth, radii, k=k, position=position, heading=heading).double().mean().item()


def summarize(belief: Mixture, truth: Tensor) -> dict[str, float]:
    """The numbers of a result table, averaged over all steps of all sequences.

    Args:
        belief: over (x, y, heading), batch shape (B, T).
        truth: (B, T, 3).

    Returns:
        nll (nats), position_error (of the mean, in the unit of x), heading_error_degrees (of the circular mean).
    """
    mean = belief.mean
    return {
        "nll": negative_log_likelihood(belief, truth).mean().item(),
        "position_error": position_error(mean, truth).mean().item(),
        "heading_error_degrees": math.degrees(heading_error(mean, truth).mean().item()),
    }
