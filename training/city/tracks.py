"""Drives along the streets of a city.

Idea. Roads that share a point (to the centimetre) are a graph of crossings and the ways between them. A drive walks it at
random, prefers straight on, turns round at dead ends alone, keeps to the right of the middle, and cuts corners a little as cars
do. Pieces of road that a building covers (passages, or a map that is off) are not driven on.
"""

import dataclasses
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from city.ground import KINDS, PIXELS_PER_METRE, Canvas, half_width
from mdps.maps import Line

Doubles = NDArray[np.float64]

STREETS = ("primary", "secondary", "tertiary", "unclassified", "residential", "service", "trunk")
"""Values of `highway` that vehicles drive on, links included."""

BORDER = 25.0
"""Metres that drives keep from the border of the map, so that there is something to see."""

CLEARANCE = 1.2
"""Metres between the middle of a road and the nearest building, at least."""

LANE = 0.45
"""How far right of the middle a vehicle keeps, as a share of half the width, and at most 2.2 m."""


@dataclasses.dataclass(frozen=True)
class Drive:
    """A path: places (P, 2) in metres, 0.5 m apart."""

    points: Doubles

    def at(self, distances: Doubles) -> tuple[Doubles, Doubles]:
        """Places (F, 2) and headings (F,) in radians, counter-clockwise from East, at distances from the start."""
        steps = np.hypot(*np.diff(self.points, axis=0).T)
        known = np.concatenate([[0.0], np.cumsum(steps)])

        def place(d: Doubles) -> Doubles:
            return np.stack([np.interp(d, known, self.points[:, k]) for k in (0, 1)], 1)

        ahead = place(np.minimum(distances + 1.0, known[-1])) - place(np.maximum(distances - 1.0, 0.0))
        return place(distances), np.arctan2(ahead[:, 1], ahead[:, 0])

    @property
    def length(self) -> float:
        return float(np.hypot(*np.diff(self.points, axis=0).T).sum())


class Network:
    """Crossings and the ways between them."""

    def __init__(self, roads: list[Line], canvas: Canvas) -> None:
        self.edges: list[tuple[int, int, Doubles, float]] = []  # from, to, points, half width
        self.leaving: dict[int, list[int]] = {}
        numbers: dict[tuple[int, int], int] = {}
        lines = [line for line in roads if line.label.split(":")[-1].removesuffix("_link") in STREETS]
        keys = [[(round(x * 100), round(y * 100)) for x, y in line.points] for line in lines]
        uses: dict[tuple[int, int], int] = {}
        for chain in keys:
            for k, key in enumerate(chain):
                uses[key] = uses.get(key, 0) + (2 if k in (0, len(chain) - 1) else 1)
        for line, chain in zip(lines, keys):
            breaks = [k for k, key in enumerate(chain) if uses[key] > 1]
            for first, last in pairwise(breaks):
                points = line.points[first : last + 1]
                if _free(points, canvas):
                    ends = [numbers.setdefault(chain[k], len(numbers)) for k in (first, last)]
                    self._add(ends[0], ends[1], points, half_width(line.label))
                    self._add(ends[1], ends[0], points[::-1], half_width(line.label))

    def _add(self, start: int, end: int, points: Doubles, half: float) -> None:
        self.leaving.setdefault(start, []).append(len(self.edges))
        self.edges.append((start, end, points, half))

    def drive(self, rng: np.random.Generator, length: float, visits: NDArray[np.int64]) -> Drive:
        """A drive of about that many metres; begins where `visits`, which it counts up, is low."""
        least = np.flatnonzero(visits == visits.min())
        edge = int(least[rng.integers(len(least))])
        route, total = [edge], 0.0
        while total < length and len(route) < 10_000:
            visits[edge] += 1
            visits[edge ^ 1] += 1
            total += float(np.hypot(*np.diff(self.edges[edge][2], axis=0).T).sum())
            edge = self._following(rng, edge, visits)
            route.append(edge)
        return Drive(_smooth(np.concatenate([_lane(*self.edges[e][2:]) for e in route])))

    def _following(self, rng: np.random.Generator, edge: int, visits: NDArray[np.int64]) -> int:
        _, end, points, _ = self.edges[edge]
        choices = [e for e in self.leaving[end] if e != edge ^ 1]
        if not choices:
            return edge ^ 1
        heading = _unit(points[-1] - points[-2])
        straight = np.array([heading @ _unit(self.edges[e][2][1] - self.edges[e][2][0]) for e in choices])
        weight = np.exp(1.5 * straight - 0.7 * visits[choices]) * (straight > -0.8) + 1e-9
        return choices[int(rng.choice(len(choices), p=weight / weight.sum()))]


def _free(points: Doubles, canvas: Canvas) -> bool:
    """Whether a piece of road stays clear of the map's border and of buildings."""
    samples = _resampled(points, 0.5)
    from_corner = (samples - canvas.corner) * [1, -1]
    size = np.array(canvas.image.shape[::-1]) / PIXELS_PER_METRE
    if ((from_corner < BORDER) | (from_corner > size - BORDER)).any():
        return False
    around = [samples + CLEARANCE * np.array([np.cos(a), np.sin(a)]) for a in np.linspace(0, 2 * np.pi, 8, endpoint=False)]
    return not any((canvas.at(p) == KINDS["building"]).any() for p in [samples, *around])


def _unit(v: Doubles) -> Doubles:
    return np.asarray(v / max(float(np.hypot(*v)), 1e-9))


def _resampled(points: Doubles, step: float) -> Doubles:
    places = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(points, axis=0).T))])
    at = np.linspace(0, places[-1], max(2, int(np.ceil(places[-1] / step)) + 1))
    return np.stack([np.interp(at, places, points[:, k]) for k in (0, 1)], 1)


def _lane(points: Doubles, half: float) -> Doubles:
    """The middle of the right-hand lane, with its ends left out so that turns have room."""
    fine = _resampled(points, 0.5)
    direction = np.gradient(fine, axis=0)
    direction /= np.maximum(np.hypot(*direction.T), 1e-9)[:, None]
    lane = fine + min(LANE * half, 2.2) * np.stack([direction[:, 1], -direction[:, 0]], 1)
    cut = min(8, len(lane) // 3)
    return lane[cut : len(lane) - cut]


def _smooth(points: Doubles) -> Doubles:
    """Round the corners: a moving average over 6 m."""
    fine = _resampled(points, 0.5)
    n = 13
    padded = np.concatenate([np.repeat(fine[:1], n // 2, 0), fine, np.repeat(fine[-1:], n // 2, 0)])
    mean = np.stack([np.convolve(padded[:, k], np.ones(n) / n, "valid") for k in (0, 1)], 1)
    return _resampled(mean, 0.5)
