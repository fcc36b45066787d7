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

from .errors import RADII
from .geometry import MapFeatures


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
    is_small: bool
    """Whether a gradient may keep what all slices are made from."""

    def chunks(self) -> Sequence[Sequence[int]]:
        """Return all headings, in portions whose slices are computed together."""

    def slices(self, rotations: Sequence[int], row: int | None = None) -> Tensor:
        """Return the logits at these headings: (B, len(rotations), H, W), or (1, ...) of one of the B volumes."""


class Region(NamedTuple):
    """Where poses are looked for, if that is known: around a pose in position and heading."""

    centre: Tensor
    """(B, 3), metres and radians."""
    radius: float
    """Metres from the centre; infinity for all."""
    turn: float = math.pi
    """Radians to either side of the heading; pi for all."""


class Searcher(Protocol):
    """Finds a view on maps: `DenseSearch`, `Retrieval`, or anything like them."""

    def search(self, map: MapFeatures, view: Tensor | tuple, k: int = 3) -> SearchResult:
        """Return the k best poses of each view (B, ...) on its map."""


@torch.no_grad()
def best_poses(volume: Volume, map: MapFeatures, k: int, region: Region | None = None) -> SearchResult:
    """Return the k best poses by non-maximum suppression: the best, then the best of the cells that are not near it, ...

    Two poses are near each other if they differ by less than `errors.RADII` in every dimension, the rule of `Mixture.modes`.

    Args:
        volume: over the pixels of the map.
        map: whose pixels they are.
        k: at least 1.
        region: cells outside of it have probability 0, and headings that are outside in all rows cost nothing. If no pixel
            lies in it, poses have no meaning, and all of a row's results are -inf.

    Raises:
        ValueError: k, or the region: shape, radius, a turn that has no heading. NaN in a volume makes its results NaN.
    """
    if k < 1:
        raise ValueError(f"k: expected at least 1, got {k}")
    if region is not None:
        volume = _Restricted(volume, map, region)
    B, K = map.features.size(0), volume.n_rotations
    values, cells = torch.full((B, K), -math.inf, dtype=torch.float64), torch.zeros(B, K, dtype=torch.int64)
    sums = []
    for rotations in volume.chunks():
        logits = volume.slices(rotations).flatten(2)
        value, cell = logits.max(-1)
        values[:, list(rotations)], cells[:, list(rotations)] = value.cpu().double(), cell.cpu()
        sums.append(logits.flatten(1).logsumexp(-1))
    normalizer = torch.stack(sums).logsumexp(0)
    rows = [_Suppression(volume, b, values[b], cells[b], map).best(k) for b in range(B)]
    found = normalizer.new_tensor([[cell for cell, _ in row] for row in rows])
    logits = normalizer.new_tensor([[logit for _, logit in row] for row in rows])
    log_probs = torch.where(logits == -math.inf, logits, logits - normalizer.unsqueeze(-1))
    return SearchResult(cells_to_poses(map, found, K), log_probs, normalizer)


def cells_to_poses(map: MapFeatures, cells: Tensor, n_rotations: int) -> Tensor:
    """Poses (B, ..., 3) of the cells (k, v, u) (B, ..., 3) of volumes over a map."""
    k, v, u = cells.unbind(-1)
    return map.to_poses(torch.stack([u, v, math.pi / 2 - k * (2 * math.pi / n_rotations)], -1))


def negative_log_prob(volume: Volume, map: MapFeatures, truth: Tensor) -> Tensor:
    """-log of the probability of the true poses (B, 3), log-probabilities being interpolated linearly in u, v and heading.

    Heading wraps around. A position outside of the map counts as the nearest in it, so that the loss is finite; a truth that
    is not finite has a NaN loss, and no gradient. Unless the volume is small, each chunk of slices is computed again for the
    backward pass, so that memory is that of one chunk.

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
        if torch.is_grad_enabled() and not volume.is_small:
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
    # Corner i has the upper cell of axis n where bit n of i is set.
    k, v, u = (torch.stack([(low, high)[i >> n & 1] for i in range(8)], -1) for n, (low, high, _) in enumerate(axes))
    weights = [torch.stack([(1 - share, share)[i >> n & 1] for i in range(8)], -1) for n, (_, _, share) in enumerate(axes)]
    return _Corners(k, v, u, weights[0] * weights[1] * weights[2])


def _share(logits: Tensor, rotations: Sequence[int], corners: _Corners) -> Tensor:
    """What slices (B, R, H, W) add to the interpolated logit: (B,)."""
    here = corners.k.unsqueeze(-1) == torch.tensor(rotations, device=corners.k.device)
    rows = torch.arange(len(logits), device=logits.device).unsqueeze(-1)
    values = logits[rows, here.long().argmax(-1), corners.v, corners.u]
    return torch.where(here.any(-1), corners.weight * values, 0.0).sum(-1)


class _Restricted:
    """A volume whose cells outside of a region have logit -inf."""

    def __init__(self, volume: Volume, map: MapFeatures, region: Region) -> None:
        centre, K = region.centre, volume.n_rotations
        if centre.shape != (map.features.size(0), 3):
            raise ValueError(f"region: expected a centre of shape {(map.features.size(0), 3)}, got {tuple(centre.shape)}")
        if not region.radius > 0 or not region.turn * K >= math.pi * (1 - 1e-6):
            expected = f"a radius above 0 and a turn of at least {math.pi / K} for {K} headings"
            raise ValueError(f"region: expected {expected}, got {region.radius} and {region.turn}")
        self.volume, self.n_rotations, self.is_small = volume, K, volume.is_small
        height, width = map.features.shape[-2:]
        u, v, _ = map.to_pixels(centre)[:, :, None, None].unbind(1)
        rows = torch.arange(height, device=centre.device).view(-1, 1) - v
        columns = torch.arange(width, device=centre.device) - u
        self.near = torch.hypot(rows, columns) <= region.radius * map.pixels_per_metre * (1 + 1e-6)
        headings = torch.arange(K, device=centre.device) * (2 * math.pi / K)
        apart = torch.remainder(headings - centre[:, 2:] + math.pi, 2 * math.pi) - math.pi
        self.turned = apart.abs() <= region.turn * (1 + 1e-6)
        self.wanted = self.turned.any(0).tolist()

    def chunks(self) -> list[list[int]]:
        wanted = [[r for r in rotations if self.wanted[r]] for rotations in self.volume.chunks()]
        return [rotations for rotations in wanted if rotations]

    def slices(self, rotations: Sequence[int], row: int | None = None) -> Tensor:
        rows = slice(None) if row is None else slice(row, row + 1)
        allowed = self.near[rows].unsqueeze(1) & self.turned[rows][:, list(rotations), None, None]
        return torch.where(allowed, self.volume.slices(rotations, row), -math.inf)


class _Suppression:
    """Non-maximum suppression in volume b, given the highest logit of each slice (K) and its pixel (K)."""

    def __init__(self, volume: Volume, row: int, values: Tensor, pixels: Tensor, map: MapFeatures) -> None:
        self.volume, self.row, self.width = volume, row, map.features.size(-1)
        self.values, self.pixels = values, pixels
        turn = 2 * math.pi / volume.n_rotations
        units = (turn, 1 / map.pixels_per_metre, 1 / map.pixels_per_metre)
        # The most cells apart, in k, v and u, that two can be and near each other.
        self.reach = [math.ceil(radius / unit - 1e-6) - 1 for radius, unit in zip(reversed(RADII), units)]
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
        self.values[rotation], self.pixels[rotation] = value.item(), pixel.item()
