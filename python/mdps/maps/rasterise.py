"""Elements in metres to a picture of classes. Knows nothing of files.

Idea: one channel for areas, ways and nodes. In a channel the groups are painted from the last to the first, so that the first
listed wins a pixel, as with one mask a group and the first mask that is set, in one picture's memory. Corners are rounded to
whole pixels. Areas are filled by the even-odd rule over outer and inner rings together; buildings are also outlined in the
channel of ways; lines are one pixel wide, points one pixel. What crosses the picture's border goes on outside and is cut there
by OpenCV.

Cost: OpenCV's drawing, about 5 us an element that touches the picture, and a test of its extent for the others.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .elements import Elements, osm_elements
from .osm import OsmData
from .osm_classes import AREAS, NODES, WAYS
from .projection import Array, Box, Projection
from .raster_map import RasterMap, grid_size

_VALUES = {group: (channel, i + 1) for channel, groups in enumerate((AREAS, WAYS, NODES)) for i, group in enumerate(groups)}
_MOST_PIXELS_PER_METRE = 100.0  # so that the farthest points fit OpenCV's 32 bits

Picture = NDArray[np.uint8]


def rasterise(osm: OsmData | Elements, projection: Projection, box: Box, pixels_per_metre: float = 2.0) -> RasterMap:
    """Draw OpenStreetMap's data, or elements from anywhere, into a map of classes.

    Args:
        osm: what `read_osm` read, or elements in the metres of `projection`. box: metres; grown to whole pixels.

    Returns:
        The map, void where nothing lies. Data may reach beyond the box, or leave it empty.

    Raises:
        ValueError: pixels_per_metre outside of (0, 100], more than 2**30 pixels, or an element of an unknown group.
        ImportError: OpenCV is missing.

    Example:
        >>> osm = OsmData()
        >>> box = Box(0.0, 0.0, 10.0, 5.0)
        >>> rasterise(osm, Projection(52.47, 13.44), box).classes.shape
        (3, 10, 20)
    """
    cv2 = opencv()
    if pixels_per_metre > _MOST_PIXELS_PER_METRE:
        raise ValueError(f"pixels_per_metre: expected at most {_MOST_PIXELS_PER_METRE:.0f}, got {pixels_per_metre}")
    height, width = grid_size(box, pixels_per_metre)
    elements = osm_elements(osm, projection) if isinstance(osm, OsmData) else osm
    raster = RasterMap(np.zeros((3, height, width), np.uint8), pixels_per_metre, box, projection)
    jobs = _jobs(elements, raster)
    for channel, value in sorted(jobs, reverse=True):
        picture = raster.classes[channel]
        for shape, rings in jobs[channel, value]:
            if shape == "fill":
                cv2.fillPoly(picture, rings, value)
            elif shape == "point":
                picture[rings[0][0, 1], rings[0][0, 0]] = value
            else:
                cv2.polylines(picture, rings, shape == "ring", value, 1)
    return raster


_Jobs = dict[tuple[int, int], list[tuple[str, list[NDArray[np.int32]]]]]


def _jobs(elements: Elements, raster: RasterMap) -> _Jobs:
    """What is drawn with each (channel, value): a shape, "fill", "ring", "line" or "point", and its points in pixels."""
    jobs: _Jobs = {}

    def add(group: str, shape: str, rings: Sequence[Array]) -> None:
        if group not in _VALUES:
            raise ValueError(f"elements: expected groups of AREAS, WAYS or NODES, got {group!r}")
        pixels = _pixels(rings, raster)
        if pixels:
            jobs.setdefault(_VALUES[group], []).append((shape, pixels))

    for area in elements.areas:
        add(area.group, "fill", area.outer + area.inner)
        if area.group == "building":
            add("building_outline", "ring", area.outer + area.inner)
    for line in elements.lines:
        add(line.group, "line", [line.points])
    for point in elements.points:
        add(point.group, "point", [point.position[None]])
    return jobs


def _pixels(rings: Sequence[Array], raster: RasterMap) -> list[NDArray[np.int32]]:
    """Rings in whole pixels; none where they do not touch the picture."""
    pixels = [np.round(raster.to_pixels(ring)).astype(np.int32) for ring in rings]
    if not pixels:
        return []
    low = np.min([ring.min(0) for ring in pixels], 0)
    high = np.max([ring.max(0) for ring in pixels], 0)
    height, width = raster.classes.shape[1:]
    return pixels if (high >= 0).all() and low[0] < width and low[1] < height else []


def opencv() -> Any:
    """The module cv2, or an error of one line."""
    try:
        import cv2
    except ImportError:
        raise ImportError("drawing maps needs OpenCV: pip install opencv-python-headless") from None
    return cv2
