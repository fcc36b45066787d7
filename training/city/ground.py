"""The ground of a city as a raster of kinds: what the map's areas and ways look like from above, at their real widths.

Painted with OpenCV from the bottom to the top: areas, kerbs, roadways, paths, markings.
"""

import cv2
import numpy as np
from numpy.typing import NDArray

from city.textures import GROUND
from mdps.maps import Box, Elements, Line

Doubles = NDArray[np.float64]
Bytes = NDArray[np.uint8]

PIXELS_PER_METRE = 5
_SHIFT = 4  # OpenCV draws at places of 1/16 pixel

HALF_WIDTHS = {
    "motorway": 7.0, "trunk": 6.0, "primary": 6.0, "secondary": 5.5, "tertiary": 4.5, "unclassified": 3.5, "residential": 3.5,
    "service": 2.5, "track": 1.6, "construction": 3.0, "pedestrian": 2.5, "footway": 1.2, "path": 0.9, "steps": 1.2,
    "corridor": 1.0, "cycleway": 0.9, "busway": 3.0,
}  # fmt: skip
"""Metres from a way's line to the edge of what it stands for, by the value of `highway`."""

AREA_ORDER = ("grass", "park", "forest", "playground", "parking", "water", "path", "road", "building")
"""Of areas: later ones lie over earlier ones."""

KINDS = {name: value for value, name in enumerate(GROUND)}


def half_width(label: str) -> float:
    """Of a way with a label such as "highway:residential"."""
    value = label.split(":")[-1]
    return HALF_WIDTHS.get(value, 3.0 if value.endswith("_link") else 1.0)


def paint(elements: Elements, box: Box) -> Bytes:
    """The kind of ground in each pixel (H, W) of a box; row 0 is north."""
    canvas = Canvas(box)
    for group in AREA_ORDER:
        for area in elements.areas:
            if area.group == group:
                canvas.fill(area.outer + area.inner, group)
    roads = [line for line in elements.lines if line.group in ("road", "busway")]
    for line in roads:
        canvas.stroke(line.points, half_width(line.label) + 0.25, "kerb")
    for line in elements.lines:
        if line.group in ("path", "cycleway"):
            canvas.stroke(line.points, half_width(line.label), line.group)
        elif line.group == "kerb":
            canvas.stroke(line.points, 0.1, "kerb")
    for line in roads:
        canvas.stroke(line.points, half_width(line.label), line.group)
    for line in roads:
        if half_width(line.label) >= 3.5:
            canvas.dashes(line.points)
    start, end, widths = segments(roads)
    for point in elements.points:
        if point.group == "crossing" and len(start):
            _zebra(canvas, point.position, start, end, widths)
    return canvas.image


def segments(lines: list[Line]) -> tuple[Doubles, Doubles, Doubles]:
    """Starts (S, 2), ends (S, 2) and half widths (S,) of all pieces of ways."""
    start = [line.points[:-1] for line in lines]
    end = [line.points[1:] for line in lines]
    widths = [np.full(len(line.points) - 1, half_width(line.label)) for line in lines]
    return np.concatenate([np.empty((0, 2)), *start]), np.concatenate([np.empty((0, 2)), *end]), np.concatenate([[], *widths])


def nearest(place: Doubles, start: Doubles, end: Doubles) -> tuple[int, Doubles]:
    """The segment nearest to a place, and the nearest place on it."""
    d = end - start
    t = np.clip(((place - start) * d).sum(1) / np.maximum((d * d).sum(1), 1e-12), 0, 1)
    foot = start + t[:, None] * d
    best = int(np.argmin(np.hypot(*(foot - place).T)))
    return best, foot[best]


class Canvas:
    """A raster of kinds that is drawn on in metres."""

    def __init__(self, box: Box) -> None:
        self.corner = np.array([box.x_min, box.y_max])
        width, height = (int(np.ceil(round(size * PIXELS_PER_METRE, 3))) for size in box.size)
        self.image: Bytes = np.full((height, width), KINDS["paving"], np.uint8)

    def at(self, points: Doubles) -> Bytes:
        """The kinds at places (P, 2); those outside have that of the border."""
        column, row = np.floor((points - self.corner) * [PIXELS_PER_METRE, -PIXELS_PER_METRE]).astype(int).T
        height, width = self.image.shape
        return self.image[np.clip(row, 0, height - 1), np.clip(column, 0, width - 1)]

    def fill(self, rings: tuple[Doubles, ...], kind: str) -> None:
        """Fill what lies in an odd number of rings."""
        cv2.fillPoly(self.image, [self._pixels(ring) for ring in rings], KINDS[kind], shift=_SHIFT)

    def stroke(self, points: Doubles, half: float, kind: str) -> None:
        """Draw a band with round ends; half: metres from its middle to its edge."""
        thickness = max(1, round(2 * half * PIXELS_PER_METRE))
        cv2.polylines(self.image, [self._pixels(points)], False, KINDS[kind], thickness, shift=_SHIFT)

    def dashes(self, points: Doubles) -> None:
        """A broken line, three metres of every six, that stays clear of the ends."""
        lengths = np.hypot(*np.diff(points, axis=0).T)
        places = np.concatenate([[0.0], np.cumsum(lengths)])
        for first in np.arange(9.0, places[-1] - 11.0, 6.0):
            ends = [[np.interp(d, places, points[:, k]) for k in (0, 1)] for d in (first, first + 3.0)]
            self.stroke(np.array(ends), 0.1, "marking")

    def _pixels(self, points: Doubles) -> NDArray[np.int32]:
        pixels = (points - self.corner) * [PIXELS_PER_METRE, -PIXELS_PER_METRE] - 0.5
        return np.round(pixels * (1 << _SHIFT)).astype(np.int32)


def _zebra(canvas: Canvas, place: Doubles, start: Doubles, end: Doubles, widths: Doubles) -> None:
    """Stripes across the nearest roadway."""
    i, foot = nearest(place, start, end)
    if np.hypot(*(foot - place)) > widths[i] + 2 or np.hypot(*(end[i] - start[i])) < 1e-6:
        return
    direction = (end[i] - start[i]) / np.hypot(*(end[i] - start[i]))
    left = np.array([-direction[1], direction[0]])
    for aside in np.arange(-widths[i] + 0.5, widths[i] - 0.2, 1.0):
        middle = foot + aside * left
        corners = [middle + a * direction + b * left for a, b in ((-1.5, -0.25), (1.5, -0.25), (1.5, 0.25), (-1.5, 0.25))]
        canvas.fill((np.array(corners),), "marking")
