"""A little geometry of the plan: offsets, insets, places along lines, points in polygons."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]


def along(start: Doubles, end: Doubles, distances: Doubles, aside: float) -> Doubles:
    """Places (P, 2) at distances (P,) from `start` towards `end`, and `aside` metres to the left."""
    direction = (end - start) / np.hypot(*(end - start))
    return start + distances[:, None] * direction + aside * np.array([-direction[1], direction[0]])


def inset(polygon: Doubles, back: Sequence[float]) -> Doubles:
    """Draw the sides of a convex polygon (P, 2), counter-clockwise, back by their distances; side i begins at corner i."""
    n = len(polygon)
    following = np.roll(polygon, -1, 0)
    direction = (following - polygon) / np.hypot(*(following - polygon).T)[:, None]
    base = polygon + np.asarray(back, np.float64)[:, None] * np.stack([-direction[:, 1], direction[:, 0]], 1)
    corners = np.empty((n, 2))
    for i in range(n):
        d0, d1 = direction[i - 1], direction[i]
        t = np.linalg.solve(np.stack([d0, -d1], 1), base[i] - base[i - 1])
        corners[i] = base[i - 1] + t[0] * d0
    return corners


def area(polygon: Doubles) -> float:
    """Signed area: positive where the corners run counter-clockwise."""
    x, y = polygon.T
    return float(0.5 * np.sum(x * np.roll(y, -1) - y * np.roll(x, -1)))


def inside(points: Doubles, polygon: Doubles) -> NDArray[np.bool_]:
    """Which points (P, 2) a polygon contains: the rule of even and odd."""
    result = np.zeros(len(points), bool)
    for (x0, y0), (x1, y1) in zip(polygon, np.roll(polygon, -1, 0)):
        if y0 != y1:
            crosses = (y0 > points[:, 1]) != (y1 > points[:, 1])
            result ^= crosses & (points[:, 0] < x0 + (points[:, 1] - y0) * (x1 - x0) / (y1 - y0))
    return result


def distances(points: Doubles, start: Doubles, end: Doubles) -> Doubles:
    """Distances (P,) of points from the nearest of segments (S, 2) to (S, 2)."""
    best = np.full(len(points), np.inf)
    for a, b in zip(start, end):
        d = b - a
        t = np.clip(((points - a) @ d) / max(float(d @ d), 1e-12), 0, 1)
        np.minimum(best, np.hypot(*(points - a - t[:, None] * d).T), out=best)
    return best


def scattered(rng: np.random.Generator, polygon: Doubles, n: int, apart: float) -> Doubles:
    """Up to n random places inside a polygon, at least `apart` metres from each other."""
    low, high = polygon.min(0), polygon.max(0)
    places = np.empty((0, 2))
    for place in rng.uniform(low, high, (6 * n, 2)):
        far = len(places) == 0 or np.hypot(*(places - place).T).min() >= apart
        if len(places) < n and far and inside(place[None], polygon)[0]:
            places = np.vstack([places, place])
    return places


def ellipse(centre: Doubles, radii: tuple[float, float], turn: float, n: int = 24) -> Doubles:
    """Places (n, 2) around an ellipse."""
    angle = np.linspace(0, 2 * np.pi, n, endpoint=False)
    c, s = np.cos(turn), np.sin(turn)
    return centre + np.stack([radii[0] * np.cos(angle), radii[1] * np.sin(angle)], 1) @ np.array([[c, s], [-s, c]])


def subdivided(polygon: Doubles, longest: float) -> Doubles:
    """The closed polygon with points added, so that no side is longer."""
    pieces = []
    for a, b in zip(polygon, np.roll(polygon, -1, 0)):
        n = max(1, int(np.ceil(np.hypot(*(b - a)) / longest)))
        pieces.append(a + (b - a) * np.arange(n)[:, None] / n)
    return np.concatenate(pieces)
