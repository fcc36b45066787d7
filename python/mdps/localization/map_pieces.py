"""The part of a large map that particles see, encoded.

A piece holds all that the views of its particles cover, and some metres around that for the map network to look at, as far as
the map goes: `MARGIN` where it is cut, `LEAST_MARGIN` as long as it is kept. It begins at a multiple of the network's coarsest
pixels: a place has the same features in all pieces, but for what the network sees of it beyond the margin.

Cost: that of the map network on the piece.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..maps import Box, RasterMap
from .birds_eye import Encoders
from .geometry import MapFeatures

MARGIN = 64.0
"""Metres of map around all that views cover, of a new piece."""
LEAST_MARGIN = 16.0
"""Metres that must be left of it. Where they are not, what the network sees of the void beyond changes features: by up to 1 at
the edge, by nothing from 10 m on (the small network)."""


class Piece(NamedTuple):
    """A part of the map, encoded."""

    box: Box
    """In the map's frame."""
    features: MapFeatures
    """Of batch 1, in the frame whose origin is the box's middle."""


def cut(encoders: Encoders, raster: RasterMap, places: NDArray[np.float64]) -> Piece:
    """Cut a piece around places (..., 2), metres in the map's frame, and encode it where the encoders' weights are."""
    scale, stride = raster.pixels_per_metre, encoders.map.stride
    coarsest = stride << len(encoders.map.decoder)
    whole, (low, high) = raster.box, _span(encoders, raster, places, MARGIN)
    spans = (low[0] - whole.x_min, high[0] - whole.x_min), (whole.y_max - high[1], whole.y_max - low[1])
    bounds = []
    for (first, last), n in zip(spans, raster.classes.shape[:0:-1]):
        start = min(math.floor(first * scale / coarsest), (n - 1) // coarsest) * coarsest
        end = max(math.ceil(last * scale / coarsest) * coarsest, start + coarsest)
        bounds.append((start, min(end, -(-n // stride) * stride)))  # the map's last features may be half void
    (left, right), (top, bottom) = bounds
    x_min, y_max = whole.x_min + left / scale, whole.y_max - top / scale
    part = raster.query(Box(x_min, y_max - (bottom - top) / scale, x_min + (right - left) / scale, y_max))
    classes = torch.from_numpy(part.classes).unsqueeze(0)
    return Piece(part.box, encoders.encode_map(classes.to(next(encoders.parameters()).device), scale))


def covers(encoders: Encoders, piece: Piece, raster: RasterMap, places: NDArray[np.float64]) -> bool:
    """Whether a piece holds all of the map that is seen from places (..., 2), metres in the map's frame, and what is around."""
    return bool(piece.box.grown(1e-6).contains(np.stack(_span(encoders, raster, places, LEAST_MARGIN))).all())


def _span(
    encoders: Encoders, raster: RasterMap, places: NDArray[np.float64], margin: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The lower and upper corner of the box around all that is seen from places, and a margin, as far as the map goes."""
    grid = encoders.sizes.grid
    reach = (math.hypot(grid.depth, grid.width // 2) + 1) * grid.cell  # to the farthest cell, and the pixel behind it
    box, flat = raster.box, places.reshape(-1, 2)
    corners = (box.x_min, box.y_min), (box.x_max, box.y_max)
    return np.clip(flat.min(0) - reach - margin, *corners), np.clip(flat.max(0) + reach + margin, *corners)
