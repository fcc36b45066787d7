"""What beliefs are judged by: negative log-likelihood of the truth, and errors of point estimates."""

import math

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
