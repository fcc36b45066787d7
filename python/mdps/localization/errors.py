"""Errors of estimated poses, recall, and the summary of an evaluation that results and figures are made of.

A method leaves for every step up to three candidates, such as the highest modes of its belief (`estimates_of`) or of a volume
of scores. The first is its answer (top 1). Of the three (top 3) the best counts, and "best" has two meanings, both named in
every summary: `best_jointly`, the candidate that is nearest in position, with its other errors; `best_per_axis`, each error's
own minimum, whichever candidate it is from, which is never larger and no single pose need have.

Recall at r is the share of counted steps whose error is < r; what cannot be judged (no candidate, NaN) is an error of infinity.
Plain torch: torchmetrics has no recall of a regression at thresholds, and its errors know no angles.

Source: the paper, "Global Localization Task" and "Top 3 Mode Finding"; Sarlin et al. 2023 for recall at 1, 3 and 5 m and
degrees, and for lateral and longitudinal errors. The authors of the paper compare by <=, and take top 3 per axis.
Cost: that of `Mixture.modes` for each belief; the rest is sorting.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..metrics import negative_log_likelihood, position_error
from ..mixture import Mixture

RADII = (5.0, 5.0, math.radians(30))
"""The paper's: modes, and poses of a volume of scores, that differ by less in x, y (metres) and heading (radians) are one."""
RECALL_AT = (1.0, 3.0, 5.0)
"""Metres or degrees."""
METRES = (0.0, 0.1, 0.5, *map(float, range(1, 31)))
DEGREES = (0.0, *map(float, range(1, 90, 2)))
"""Thresholds of the paper's recall curves."""


class PoseErrors(NamedTuple):
    """Errors of one shape (...), at least 0; infinite where there is no estimate."""

    position: Tensor
    """Metres."""
    angle: Tensor
    """Radians, at most pi."""
    lateral: Tensor
    """Metres across the true heading."""
    longitudinal: Tensor
    """Metres along the true heading."""


class Estimates(NamedTuple):
    """What a method says of B sequences of T steps, beside the truth: all that `summarize` needs."""

    poses: Tensor
    """(B, T, K, 3): candidates by falling density, x and y in metres, headings in radians."""
    log_densities: Tensor
    """(B, T, K), or any score; -inf: there is no such candidate."""
    truth: Tensor
    """(B, T, 3)."""
    counted: Tensor
    """(B, T) bool: False at padding, and at steps that are not to be judged."""
    nll: Tensor | None
    """(B, T) in nats, where the method has a density over poses."""

    def cpu(self) -> "Estimates":
        """The same on the CPU."""
        return Estimates(*(x if x is None else x.cpu() for x in self))  # type: ignore[arg-type]


def pose_errors(estimate: Tensor, truth: Tensor) -> PoseErrors:
    """Errors of poses (..., 3) against true ones, whose shape broadcasts to theirs: metres, and headings in radians."""
    dx, dy, turn = (estimate - truth).unbind(-1)
    cos, sin = truth[..., 2].cos(), truth[..., 2].sin()
    return PoseErrors(
        position=position_error(estimate, truth),
        angle=torch.atan2(turn.sin(), turn.cos()).abs(),
        lateral=(dy * cos - dx * sin).abs(),
        longitudinal=(dx * cos + dy * sin).abs(),
    )


def best_jointly(candidates: Tensor, truth: Tensor, log_densities: Tensor | None = None) -> PoseErrors:
    """Errors (...) of that candidate which is nearest in position.

    Args:
        candidates: (..., K, 3), metres and radians.
        truth: (..., 3).
        log_densities: (..., K); a candidate that has -inf or NaN does not count. None: all count.
    """
    errors = _candidate_errors(candidates, truth, log_densities)
    nearest = errors.position.argmin(-1, keepdim=True)
    return PoseErrors(*(error.gather(-1, nearest).squeeze(-1) for error in errors))


def best_per_axis(candidates: Tensor, truth: Tensor, log_densities: Tensor | None = None) -> PoseErrors:
    """The smallest of each error (...) over the candidates, every error for itself; arguments as in `best_jointly`."""
    return PoseErrors(*(error.amin(-1) for error in _candidate_errors(candidates, truth, log_densities)))


def recall(errors: Tensor, thresholds: Sequence[float]) -> list[float]:
    """The share, 0 to 1, of errors (any shape) that are < each threshold, in the errors' unit. NaN is never smaller.

    Raises:
        ValueError: no errors. Cost: sorts the errors once.
    """
    if errors.numel() == 0:
        raise ValueError("errors: expected at least one")
    ordered = errors.flatten().double().sort().values
    limits = torch.tensor(thresholds, dtype=torch.float64, device=ordered.device)
    return (torch.searchsorted(ordered, limits) / len(ordered)).tolist()


@torch.no_grad()
def top_poses(belief: Mixture, k: int) -> tuple[Tensor, Tensor]:
    """The paper's k poses of a belief over (x, y, heading): its highest mode, then that of what is not near it, and so on.

    Near are the components that differ from a pose by less than `RADII` in every dimension: they are left out before the next
    is sought. So the flanks of one broad mode count as poses too, as they do in a volume of scores (`best_poses`);
    `Mixture.modes` has local maxima of the belief alone.

    Returns:
        poses (..., k, 3) and log-densities (..., k) of what was left, by falling density; where nothing was left, the first
        pose again with -inf.

    Cost: k times that of `Mixture.modes(1, RADII)`. Source: the paper, "Top 3 Mode Finding via Non-Maximal Suppression".
    """
    radii, log_weights = belief.means.new_tensor(RADII), belief.log_weights
    poses: list[Tensor] = []
    log_densities: list[Tensor] = []
    for _ in range(k):
        left = Mixture(belief.means, log_weights, belief.bandwidths, belief.space)
        pose, log_density = left.modes(1, RADII)
        poses.append(torch.where(log_density.unsqueeze(-1) == -math.inf, poses[0], pose) if poses else pose)
        log_densities.append(log_density)
        near = (belief.space.wrap(belief.means - pose).abs() < radii).all(-1)
        log_weights = torch.where(near, -math.inf, log_weights)
    return torch.cat(poses, -2), torch.cat(log_densities, -1)


def estimates_of(belief: Mixture, truth: Tensor, counted: Tensor | None = None) -> Estimates:
    """The three highest poses (`top_poses`), and the likelihood of the truth, of beliefs over (x, y, heading).

    Args:
        belief: batch shape (B, T). truth: (B, T, 3).
        counted: (B, T) bool, see `Estimates`; None: all steps.
    """
    poses, log_densities = top_poses(belief, 3)
    counted = torch.ones(truth.shape[:-1], dtype=torch.bool, device=truth.device) if counted is None else counted
    with torch.no_grad():
        return Estimates(poses, log_densities, truth, counted, negative_log_likelihood(belief, truth))


def guesses(truth: Tensor, side: float, counted: Tensor | None = None, generator: torch.Generator | None = None) -> Estimates:
    """Chance: three poses anywhere on a square map with the origin in its middle, in any direction.

    Args:
        truth: (B, T, 3). side: of the map, in metres. counted: as in `estimates_of`.
    """
    size = torch.tensor([side, side, 2 * math.pi], dtype=truth.dtype)
    poses = ((torch.rand(*truth.shape[:-1], 3, 3, generator=generator, dtype=truth.dtype) - 0.5) * size).to(truth.device)
    counted = torch.ones(truth.shape[:-1], dtype=torch.bool, device=truth.device) if counted is None else counted
    nll = torch.full_like(truth[..., 0], math.log(side * side * 2 * math.pi))
    return Estimates(poses, torch.zeros_like(poses[..., 0]), truth, counted, nll)


def join(parts: Sequence[Estimates]) -> Estimates:
    """The estimates of several batches as one.

    Raises:
        ValueError: none, numbers of steps or candidates that differ, or an nll in some of them only.
    """
    shapes = {(tuple(part.poses.shape[1:]), part.nll is None) for part in parts}
    if len(shapes) != 1:
        raise ValueError(f"parts: expected batches that differ in B alone, got (T, K, 3), no nll: {sorted(shapes) or 'none'}")
    nll = [part.nll for part in parts if part.nll is not None]
    return Estimates(
        torch.cat([part.poses for part in parts]),
        torch.cat([part.log_densities for part in parts]),
        torch.cat([part.truth for part in parts]),
        torch.cat([part.counted for part in parts]),
        torch.cat(nll) if nll else None,
    )


def summarize(estimates: Estimates) -> dict[str, Any]:
    """The numbers of an evaluation, ready for JSON; numbers that are not finite are None.

    Returns:
        sequences, steps: how many were counted.
        nll: mean in nats where it is finite; nll_infinite: steps where it is not. Both None without a density.
        recall_at, metres, degrees: the thresholds of what follows.
        top_1, top_3_jointly, top_3_per_axis: each has position, lateral, longitudinal (metres) and angle (degrees), and each of
            these recall (at `recall_at`), curve (recall at `metres` or `degrees`), median; in top_1 also over_time, which has
            low, median, high: the quartiles over the sequences at every step.

    Raises:
        ValueError: shapes, nothing counted, or a truth that is not finite where it is counted.
    """
    poses, log_densities, truth, counted, nll = _checked(estimates)
    chosen = {
        "top_1": best_jointly(poses[..., :1, :], truth, log_densities[..., :1]),
        "top_3_jointly": best_jointly(poses[..., :3, :], truth, log_densities[..., :3]),
        "top_3_per_axis": best_per_axis(poses[..., :3, :], truth, log_densities[..., :3]),
    }
    kept = None if nll is None else nll[counted].double()
    finite = None if kept is None else kept[kept.isfinite()]
    return {
        "sequences": int(counted.any(1).sum()),
        "steps": int(counted.sum()),
        "nll": None if finite is None else _number(finite.mean()),
        "nll_infinite": None if kept is None or finite is None else len(kept) - len(finite),
        "recall_at": list(RECALL_AT),
        "metres": list(METRES),
        "degrees": list(DEGREES),
        **{name: _axes(errors, counted, over_time=name == "top_1") for name, errors in chosen.items()},
    }


def _axes(errors: PoseErrors, counted: Tensor, over_time: bool) -> dict[str, Any]:
    axes: dict[str, Any] = {}
    for name, error in errors._asdict().items():
        error = error.double().rad2deg() if name == "angle" else error.double()
        kept = error[counted]
        axes[name] = {
            "recall": [_number(share) for share in recall(kept, RECALL_AT)],
            "curve": [_number(share) for share in recall(kept, DEGREES if name == "angle" else METRES)],
            "median": _number(kept.quantile(0.5)),
        }
        if over_time:
            axes[name]["over_time"] = _quartiles(error, counted)
    return axes


def _quartiles(error: Tensor, counted: Tensor) -> dict[str, list[float | None]]:
    """Over the sequences, at every step; None at a step that no sequence counts."""
    levels = error.new_tensor([0.25, 0.5, 0.75])
    nothing = error.new_full((3,), math.nan)
    steps = [e[c].quantile(levels) if c.any() else nothing for e, c in zip(error.T, counted.T)]
    return {name: [_number(step[i]) for step in steps] for i, name in enumerate(("low", "median", "high"))}


def _number(value: Tensor | float) -> float | None:
    number = float(value)
    return round(number, 5) if math.isfinite(number) else None


def _candidate_errors(candidates: Tensor, truth: Tensor, log_densities: Tensor | None) -> PoseErrors:
    """(..., K), infinite where there is no candidate."""
    if candidates.dim() < 2 or candidates.size(-1) != 3 or truth.shape != candidates.shape[:-2] + (3,):
        raise ValueError(
            f"expected candidates (..., K, 3) and truth (..., 3), got {tuple(candidates.shape)} and {tuple(truth.shape)}"
        )
    alive = candidates.isfinite().all(-1)
    if log_densities is not None:
        alive = alive & (log_densities > -math.inf)
    return PoseErrors(*(e.masked_fill(~alive, math.inf) for e in pose_errors(candidates, truth.unsqueeze(-2))))


def _checked(estimates: Estimates) -> Estimates:
    poses, _, truth, counted, nll = estimates
    expected = {"log_densities": poses.shape[:-1], "truth": poses.shape[:-2] + (3,), "counted": poses.shape[:-2]}
    if poses.dim() != 4 or poses.size(-1) != 3:
        raise ValueError(f"poses: expected shape (B, T, K, 3), got {tuple(poses.shape)}")
    for name, shape in expected.items():
        if getattr(estimates, name).shape != shape:
            raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(getattr(estimates, name).shape)}")
    if nll is not None and nll.shape != counted.shape:
        raise ValueError(f"nll: expected shape {tuple(counted.shape)}, got {tuple(nll.shape)}")
    if counted.dtype != torch.bool or not counted.any():
        raise ValueError(f"counted: expected bool, True at some step, got {counted.dtype} and {int(counted.sum())} steps")
    if not truth[counted].isfinite().all():
        raise ValueError("truth: expected finite poses at all steps that are counted")
    return estimates
