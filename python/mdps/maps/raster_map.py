"""A city as three small pictures: which kind of area, of way and of point lies in each pixel.

Conventions: `classes` is uint8 (3, H, W), channels areas, ways, nodes; 0 is void, value k is AREAS[k - 1], WAYS[k - 1] or
NODES[k - 1]. Row 0 is the north, column 0 the west; in pixel coordinates (u, v), u grows to the East, v to the South, and
integers are the *centres* of pixels: u = (x - x_min) * pixels_per_metre - 0.5, v = (y_max - y) * pixels_per_metre - 0.5. A
raster's box is W by H pixels; a size that is no whole number of pixels grows to the East and North.

File: .npz without pickle (what, where, and the picture), readable by numpy alone.
Cost: query is one copy of the cut; colour is a table look-up a pixel.
"""

import json
import math
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .colours import AREA_COLOURS, VOID, WAY_COLOURS
from .errors import DataError
from .osm_classes import AREAS, NODES, WAYS
from .projection import Array, Box, Projection, as_points

_FORMAT = "mdps raster map 1"
_MOST_PIXELS = 2**30
_TOLERANCE = 1e-3  # of a pixel: 1280.0000000000005 pixels are 1280, and so are 128.00006 metres at 0.1 metres a pixel


@dataclass(frozen=True, eq=False)
class RasterMap:
    """A map of classes (see the file's head), its resolution, and where it lies.

    Args:
        classes: uint8 (3, H, W). pixels_per_metre: 2 in MGL and KITTI. box: metres in the plane of `projection`;
            one that is no whole number of pixels large grows to the East and North.

    Raises:
        ValueError: dtype or shape, a resolution that is not positive, or (H, W) is not the box's size in pixels, rounded up.
    """

    classes: NDArray[np.uint8]
    pixels_per_metre: float
    box: Box
    projection: Projection

    def __post_init__(self) -> None:
        object.__setattr__(self, "pixels_per_metre", float(self.pixels_per_metre))
        classes = self.classes
        if not isinstance(classes, np.ndarray) or classes.dtype != np.uint8 or classes.ndim != 3 or classes.shape[0] != 3:
            got = (classes.dtype, classes.shape) if isinstance(classes, np.ndarray) else type(classes).__name__
            raise ValueError(f"classes: expected uint8 (3, H, W), got {got}")
        expected = grid_size(self.box, self.pixels_per_metre)
        if classes.shape[1:] != expected:
            raise ValueError(f"classes: expected (H, W) = {expected} for {self.box}, got {classes.shape[1:]}")
        object.__setattr__(self, "box", whole_pixels(self.box, self.pixels_per_metre))

    def to_pixels(self, xy: ArrayLike) -> Array:
        """Metres (..., 2) to pixel coordinates (u, v) float64 (..., 2), integers at the centres of pixels, also outside."""
        xy = as_points(xy, "xy")
        scale = self.pixels_per_metre
        return np.stack([(xy[..., 0] - self.box.x_min) * scale - 0.5, (self.box.y_max - xy[..., 1]) * scale - 0.5], -1)

    def to_metres(self, uv: ArrayLike) -> Array:
        """Pixel coordinates (u, v) (..., 2) to metres float64 (..., 2)."""
        uv = (as_points(uv, "uv") + 0.5) / self.pixels_per_metre
        return np.stack([self.box.x_min + uv[..., 0], self.box.y_max - uv[..., 1]], -1)

    def query(self, box: Box) -> "RasterMap":
        """A copy of a part: `box` moved to the nearest pixel borders, void outside of the map.

        Boxes of one size have one size in pixels wherever they lie, except that a fraction of a pixel is rounded up.

        Raises:
            ValueError: more than 2**30 pixels.
        """
        scale = self.pixels_per_metre
        height, width = grid_size(box, scale)
        left = round((box.x_min - self.box.x_min) * scale)
        bottom = round((box.y_min - self.box.y_min) * scale)
        x_min, y_min = self.box.x_min + left / scale, self.box.y_min + bottom / scale
        top = self.classes.shape[1] - bottom - height  # this raster's row of the cut's first row
        cut = np.zeros((3, height, width), np.uint8)
        rows, columns = _overlap(top, height, self.classes.shape[1]), _overlap(left, width, self.classes.shape[2])
        if rows and columns:
            (r, r_end), (c, c_end) = rows, columns
            cut[:, r - top : r_end - top, c - left : c_end - left] = self.classes[:, r:r_end, c:c_end]
        return RasterMap(cut, scale, Box(x_min, y_min, x_min + width / scale, y_min + height / scale), self.projection)

    def colour(self) -> NDArray[np.uint8]:
        """The picture of areas with ways over them, RGB uint8 (H, W, 3); colours are those of `mdps.maps.colours`."""
        table = np.array([VOID, *AREA_COLOURS.values(), *WAY_COLOURS.values()], np.uint8)
        areas, ways, _ = self.classes
        return np.take(table, np.where(ways > 0, ways + np.uint8(len(AREAS)), areas), axis=0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the map to a file at exactly this path, which appears whole or not at all; 10 to 60 bytes a thousand pixels."""
        target = Path(path)
        part = target.with_name(target.name + ".part")
        where = {
            "format": _FORMAT,
            "pixels_per_metre": self.pixels_per_metre,
            "box": [self.box.x_min, self.box.y_min, self.box.x_max, self.box.y_max],
            "origin": [self.projection.latitude, self.projection.longitude, self.projection.altitude],
            "groups": {"areas": AREAS, "ways": WAYS, "nodes": NODES},
        }
        try:
            with open(part, "wb") as file:
                np.savez_compressed(file, where=np.array(json.dumps(where)), classes=self.classes)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "RasterMap":
        """Read what `save` wrote. Nothing in the file is executed.

        Raises:
            DataError: no such file, another format, damaged, other groups than this version's, or values beyond the groups.
        """
        try:
            with zipfile.ZipFile(path) as archive:
                where = json.loads(str(_read_array(archive, "where", 1 << 16)[()]))
                if not isinstance(where, dict) or where.get("format") != _FORMAT:
                    raise DataError(f"{path}: expected a map file of format {_FORMAT!r}")
                check_groups(where["groups"], path)
                classes = _read_array(archive, "classes", 3 * _MOST_PIXELS)
                raster = RasterMap(classes, where["pixels_per_metre"], Box(*where["box"]), Projection(*where["origin"]))
        except DataError:
            raise
        except FileNotFoundError:
            raise DataError(f"{path}: no such file") from None
        except Exception as error:  # a damaged file fails anywhere in zipfile, zlib, json or numpy
            raise DataError(f"{path}: not a map file that RasterMap.save wrote, or damaged: {_line(error)}") from None
        check_values(raster.classes, path)
        return raster


def grid_size(box: Box, pixels_per_metre: float) -> tuple[int, int]:
    """Height and width in pixels that hold a box: fractions of a pixel are rounded up, errors of rounding are not.

    Raises:
        ValueError: a resolution that is not positive and finite, or more than 2**30 pixels.
    """
    if not (math.isfinite(pixels_per_metre) and pixels_per_metre > 0):
        raise ValueError(f"pixels_per_metre: expected a positive number, got {pixels_per_metre}")
    width, height = (max(1.0, np.ceil(length * pixels_per_metre - _TOLERANCE)) for length in box.size)
    if width * height > _MOST_PIXELS:
        raise ValueError(f"expected at most 2**30 pixels, got {width:.0f} x {height:.0f} for {box}")
    return int(height), int(width)


def whole_pixels(box: Box, pixels_per_metre: float) -> Box:
    """The box grown to the East and North to whole pixels."""
    height, width = grid_size(box, pixels_per_metre)
    return Box(box.x_min, box.y_min, box.x_min + width / pixels_per_metre, box.y_min + height / pixels_per_metre)


def check_groups(groups: object, path: object) -> None:
    """Raise DataError unless a file's names of classes are ours, in our order: its numbers would mean something else."""
    for name, expected in (("areas", AREAS), ("ways", WAYS), ("nodes", NODES)):
        found = groups.get(name) if isinstance(groups, dict) else None
        if not isinstance(found, (list, tuple)) or tuple(found) != expected:
            got = f"{len(found)} others" if isinstance(found, (list, tuple)) else "none"
            raise DataError(f"{path}: expected the {len(expected)} {name} {expected[0]}, ..., {expected[-1]}, got {got}")


def check_values(classes: NDArray[np.uint8], path: object) -> None:
    """Raise DataError where a raster (3, H, W) holds a number that stands for no class."""
    for name, channel, names in zip(("areas", "ways", "nodes"), classes, (AREAS, WAYS, NODES)):
        if channel.max(initial=0) > len(names):
            raise DataError(f"{path}: expected values in 0..{len(names)} for {name}, got {channel.max()}")


def _overlap(start: int, length: int, whole: int) -> tuple[int, int] | None:
    """What [start, start + length) and [0, whole) have in common."""
    first, last = max(start, 0), min(start + length, whole)
    return (first, last) if first < last else None


def _read_array(archive: zipfile.ZipFile, name: str, most_bytes: int) -> NDArray[np.uint8]:
    """An array of an .npz file; one that says that it is larger than it may be is refused before it is unpacked."""
    entry = archive.getinfo(name + ".npy")
    if entry.file_size > most_bytes + 4096:
        raise ValueError(f"{name} says that it holds {entry.file_size} bytes")
    with archive.open(entry) as file:
        array: NDArray[np.uint8] = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _line(error: Exception) -> str:
    """An error of another library on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
