"""Elements in metres to a picture of classes. Knows nothing of files.

Idea: one channel for areas, ways and nodes. In a channel the groups are painted from the last to the first, so that the first
listed wins a pixel, as with one mask a group and the first mask that is set, in one picture's memory. Corners are rounded to
whole pixels. Areas are filled by the even-odd rule over outer and inner rings together; buildings are also outlined in the
channel of ways; lines are one pixel wide, points one pixel. What crosses the picture's border goes on outside and is cut there
by OpenCV.

Cost: OpenCV's drawing, some 10 us an element that touches the picture, and 1 us for the others.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .elements import Elements, osm_elements
from .errors import opencv
from .osm import OsmData
from .osm_classes import AREAS, NODES, WAYS
from .projection import Array, Box, Projection
from .raster_map import RasterMap, grid_size

_VALUES = {group: (channel, i + 1) for channel, groups in enumerate((AREAS, WAYS, NODES)) for i, group in enumerate(groups)}
_MOST_PIXELS_PER_METRE = 100.0  # so that the farthest points that a plane sees fit OpenCV's 32 bits


def rasterise(osm: OsmData | Elements, projection: Projection, box: Box, pixels_per_metre: float = 2.0) -> RasterMap:
    """Draw OpenStreetMap's data, or elements from anywhere, into a map of classes.

    Args:
        osm: what `read_osm` read, or elements in the metres of `projection`. box: metres; grown to whole pixels.

    Returns:
        The map, void where nothing lies. Data may reach beyond the box, or leave it empty.

    Raises:
        ValueError: pixels_per_metre outside of (0, 100], more than 2**30 pixels, or elements without group or points.
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
    """What is drawn with each (channel, value): a shape, "fill", "ring", "line" or "point", and its points in whole pixels."""
    shapes: list[tuple[str, str, Sequence[Array]]] = []
    for area in elements.areas:
        borders = area.outer + area.inner
        shapes.append((area.group, "fill", borders))
        if area.group == "building":
            shapes.append(("building_outline", "ring", borders))
    shapes += [(line.group, "line", (line.points,)) for line in elements.lines]
    shapes += [(point.group, "point", (point.position[None],)) for point in elements.points]
    pixels = _pixels([ring for _, _, rings in shapes for ring in rings], raster)
    jobs: _Jobs = {}
    for group, shape, rings in shapes:
        if group not in _VALUES:
            raise ValueError(f"elements: expected groups of AREAS, WAYS or NODES, got {group!r}")
        touching = [ring for ring in (next(pixels) for _ in rings) if ring is not None]
        if touching:
            jobs.setdefault(_VALUES[group], []).append((shape, touching))
    return jobs


def _pixels(rings: Sequence[Array], raster: RasterMap) -> Iterator[NDArray[np.int32] | None]:
    """Each ring in whole pixels, or None where it does not touch the picture; all at once, as most rings are a few points."""
    if not rings:
        return
    ends = np.cumsum([len(ring) for ring in rings])
    starts = np.concatenate([[0], ends[:-1]])
    exact = raster.to_pixels(np.concatenate(rings))
    if (starts == ends).any() or not (np.abs(exact) < 2**30).all():
        raise ValueError("elements: expected rings, lines and positions of one or more points, finite and on the Earth")
    points = np.round(exact).astype(np.int32)
    low, high = np.minimum.reduceat(points, starts), np.maximum.reduceat(points, starts)
    height, width = raster.classes.shape[1:]
    touches = np.all((high >= 0) & (low < (width, height)), axis=-1)
    for first, end, touch in zip(starts, ends, touches):
        yield points[first:end] if touch else None
