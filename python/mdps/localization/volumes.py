"""Scores of poses on a grid of headings and pixels, (B, K, H, W), that are never all in memory.

Idea: a volume gives the slices of some headings at a time. One pass over them keeps, of each heading, the highest score and
where it is, and the log-sum-exp of all. That is enough for the best pose and its probability, and nearly enough for the next
best far from it: a slice is computed again only if the place of its highest score has been suppressed by a better pose. The
result is exactly that of suppression in the whole volume.

Heading k of K is 2 pi k / K, counter-clockwise from East; v and u are the row and column of the map's pixel.

Source: Sarlin et al. 2023 (OrienterNet), section 3.3; the paper, "Top 3 Mode Finding via Non-Maximal Suppression".
Cost: that of one pass over the slices, and of those that are computed again, fewer than (k - 1) K / 6 for radii of 30
degrees. Memory: a chunk of slices, and O(B K).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .geometry import MapFeatures

SUPPRESSION = (5.0, 5.0, math.radians(30))
"""Radii in x and y (metres) and heading of the paper: poses that differ by less in every dimension are one."""


class SearchResult(NamedTuple):
    """The best poses of a volume."""

    poses: Tensor
    """(B, k, 3), metres and radians, headings in [-pi, pi), by falling score. Where there are fewer than k apart from each
    other, the rest repeat the best."""
    log_probs: Tensor
    """(B, k): log-probability of their cell, of all cells; -inf where poses repeat the best."""
    log_normalizer: Tensor
    """(B,): log-sum-exp of the logits of all cells."""


class Volume(Protocol):
    """Logits of B volumes, computed by slices."""

    n_rotations: int
    """K."""

    def chunks(self) -> Sequence[Sequence[int]]:
        """Return all headings, in portions whose slices are computed together."""

    def slices(self, rotations: Sequence[int], row: int | None = None) -> Tensor:
        """Return the logits at these headings: (B, len(rotations), H, W), or (1, ...) of one of the B volumes."""


class Searcher(Protocol):
    """Finds a view on maps: `DenseSearch`, `Retrieval`, or anything like them."""

    def search(self, map: MapFeatures, view: Tensor | tuple, k: int = 3) -> SearchResult:
        """Return the k best poses of each view (B, ...) on its map."""


@torch.no_grad()
def best_poses(volume: Volume, map: MapFeatures, k: int, radii: Sequence[float] = SUPPRESSION) -> SearchResult:
    """Return the k best poses by non-maximum suppression: the best, then the best of the cells that are not near it, ...

    Args:
        volume: over the pixels of the map.
        map: whose pixels they are.
        k: at least 1.
        radii: in x, y (metres) and heading (radians): a cell that differs from a pose by less in all three is near it. The
            rule of `Mixture.modes`.

    Raises:
        ValueError: k. NaN in a volume makes its log-probabilities NaN.
    """
    if k < 1:
        raise ValueError(f"k: expected at least 1, got {k}")
    order, sums, highest, places = [], [], [], []
    for rotations in volume.chunks():
        logits = volume.slices(rotations).flatten(2)
        value, place = logits.max(-1)
        order += rotations
        highest.append(value)
        places.append(place)
        sums.append(logits.flatten(1).logsumexp(-1))
    back = torch.tensor(order, device=sums[0].device).argsort()
    values, cells = torch.cat(highest, 1)[:, back].cpu(), torch.cat(places, 1)[:, back].cpu()
    normalizer = torch.stack(sums).logsumexp(0)
    rows = [_Suppression(volume, b, values[b], cells[b], map, radii).best(k) for b in range(len(values))]
    found = torch.tensor([[cell for cell, _ in row] for row in rows], dtype=normalizer.dtype, device=normalizer.device)
    logits = torch.tensor([[logit for _, logit in row] for row in rows], dtype=normalizer.dtype, device=normalizer.device)
    return SearchResult(cells_to_poses(map, found, volume.n_rotations), logits - normalizer.unsqueeze(-1), normalizer)


def cells_to_poses(map: MapFeatures, cells: Tensor, n_rotations: int) -> Tensor:
    """Poses (B, ..., 3) of the cells (k, v, u) (B, ..., 3) of volumes over a map."""
    k, v, u = cells.unbind(-1)
    return map.to_poses(torch.stack([u, v, math.pi / 2 - k * (2 * math.pi / n_rotations)], -1))


def negative_log_prob(volume: Volume, map: MapFeatures, truth: Tensor) -> Tensor:
    """-log of the probability of the true poses (B, 3), log-probabilities being interpolated linearly in u, v and heading.

    Heading wraps around. A position outside of the map counts as the nearest in it, so that the loss is finite; a truth that
    is not finite has a NaN loss, and no gradient. Each chunk of slices is computed again for the backward pass, so that
    memory is that of one chunk.

    Returns:
        (B,), in nats: log of the number of cells if all are equally likely.

    Raises:
        ValueError: the shape of truth.
    """
    expected = (map.features.size(0), 3)
    if truth.shape != expected:
        raise ValueError(f"truth: expected shape {expected}, got {tuple(truth.shape)}")
    good = truth.isfinite().all(-1)
    corners = _corners(map, torch.where(good.unsqueeze(-1), truth, 0.0).detach(), volume.n_rotations)

    def part(rotations: Sequence[int]) -> tuple[Tensor, Tensor]:
        logits = volume.slices(rotations)
        return logits.flatten(1).logsumexp(-1), _share(logits, rotations, corners)

    parts = []
    for rotations in volume.chunks():
        if torch.is_grad_enabled():
            parts.append(checkpoint(part, rotations, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(part(rotations))
    sums, shares = (torch.stack(x) for x in zip(*parts))
    return torch.where(good, sums.logsumexp(0) - shares.sum(0), math.nan)


class _Corners(NamedTuple):
    """The 8 cells around a pose in each of B volumes, (B, 8), and their weights in linear interpolation."""

    k: Tensor
    v: Tensor
    u: Tensor
    weight: Tensor


def _corners(map: MapFeatures, poses: Tensor, n_rotations: int) -> _Corners:
    height, width = map.features.shape[-2:]
    pixels = map.to_pixels(poses)
    axes = []
    for position, size in ((pixels[:, 1], height), (pixels[:, 0], width)):
        position = position.clamp(0, size - 1)
        low = position.floor().clamp(max=max(size - 2, 0))
        axes.append((low.long(), (low.long() + 1).clamp(max=size - 1), position - low))
    turn = poses[:, 2] * (n_rotations / (2 * math.pi))
    low = turn.floor()
    axes.insert(0, (low.long() % n_rotations, (low.long() + 1) % n_rotations, turn - low))
    cells = [torch.stack([(low, high)[i >> n & 1] for i in range(8)], -1) for n, (low, high, _) in enumerate(axes)]
    weights = [torch.stack([(1 - share, share)[i >> n & 1] for i in range(8)], -1) for n, (_, _, share) in enumerate(axes)]
    return _Corners(*cells, weights[0] * weights[1] * weights[2])


def _share(logits: Tensor, rotations: Sequence[int], corners: _Corners) -> Tensor:
    """What slices (B, R, H, W) add to the interpolated logit: (B,)."""
    here = corners.k.unsqueeze(-1) == torch.tensor(rotations, device=corners.k.device)
    rows = torch.arange(len(logits), device=logits.device).unsqueeze(-1)
    values = logits[rows, here.long().argmax(-1), corners.v, corners.u]
    return torch.where(here.any(-1), corners.weight * values, 0.0).sum(-1)


class _Suppression:
    """Non-maximum suppression in volume b, given the highest logit of each slice (K) and its pixel (K)."""

    def __init__(
        self, volume: Volume, row: int, values: Tensor, pixels: Tensor, map: MapFeatures, radii: Sequence[float]
    ) -> None:
        self.volume, self.row, self.width = volume, row, map.features.size(-1)
        self.values, self.pixels = values.clone(), pixels.clone()
        turn = 2 * math.pi / volume.n_rotations
        units = (turn, 1 / map.pixels_per_metre, 1 / map.pixels_per_metre)
        # The most cells apart, in k, v and u, that two can be and near each other.
        self.reach = [math.ceil(radius / unit - 1e-6) - 1 for radius, unit in zip((radii[2], radii[1], radii[0]), units)]
        self.found: list[tuple[int, int, int]] = []

    def best(self, k: int) -> list[tuple[tuple[int, int, int], float]]:
        """Cells (k, v, u) and logits of the best."""
        poses: list[tuple[tuple[int, int, int], float]] = []
        while len(poses) < k:
            rotation = int(self.values.argmax())
            logit = float(self.values[rotation])
            if logit == -math.inf and poses:
                return poses + [(poses[0][0], -math.inf)] * (k - len(poses))
            cell = (rotation, *divmod(int(self.pixels[rotation]), self.width))
            if any(self._near(cell, other) for other in self.found):
                self._renew(rotation)
            else:
                self.found.append(cell)
                poses.append((cell, logit))
        return poses

    def _turned(self, a: int, b: int) -> bool:
        apart = abs(a - b)
        return min(apart, self.volume.n_rotations - apart) <= self.reach[0]

    def _near(self, a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
        return self._turned(a[0], b[0]) and abs(a[1] - b[1]) <= self.reach[1] and abs(a[2] - b[2]) <= self.reach[2]

    def _renew(self, rotation: int) -> None:
        """The highest logit of a slice without what is near the poses that were found."""
        logits = self.volume.slices([rotation], self.row)[0, 0].clone()
        for other, v, u in self.found:
            if self._turned(rotation, other):
                rows = slice(max(0, v - self.reach[1]), v + self.reach[1] + 1)
                logits[rows, max(0, u - self.reach[2]) : u + self.reach[2] + 1] = -math.inf
        value, pixel = logits.flatten().max(0)
        self.values[rotation], self.pixels[rotation] = value.cpu(), pixel.cpu()
