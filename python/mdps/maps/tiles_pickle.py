"""MGL's and KITTI's tiles.pkl: a pickle is a program, so this one is run with nothing to call.

Format (OrienterNet's maps): a dictionary with `bbox` "xmin,ymin,xmax,ymax" in metres, `tile_size` (128), `ppm` (2), `groups`
{areas, ways, nodes: names}, `ref_latlonalt` (3 numbers), `tiles_bbox` {(i, j): string} and `tiles_raster` {(i, j): BytesIO of a
PNG, RGB = areas, ways, nodes}; i counts tiles from the west, j from the south; the last of a row or column may be smaller.
Numbers may be numpy's, under the module names of numpy 1 or 2.

Idea: the unpickler hands out three stand-ins, made anew for each file, for BytesIO, for numpy's scalars and for their dtype;
they only keep what they are given. Any other name that the file asks for is refused by name. Before it is run, its operations
are followed for those that would take much time or memory of little data. What comes out is checked like any input.
Cost: that of decoding the PNGs, and 2 us an operation of the pickle, some 20 a tile.
"""

import io
import math
import os
import pickle
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import DataError, opencv
from .osm_classes import AREAS, NODES, WAYS
from .pickle_program import follow
from .projection import Box, Projection
from .raster_map import RasterMap, check_groups, check_values, grid_size

_MOST_PIXELS = 2**20
"""Of a tile's side."""
_KEYS = ("bbox", "tile_size", "ppm", "groups", "ref_latlonalt", "tiles_bbox", "tiles_raster")


def read_tiles_pickle(path: str | os.PathLike[str]) -> RasterMap:
    """Read a tiles.pkl as one map, without executing anything in it. Tiles that are absent are void.

    Raises:
        DataError: no such file, damaged, asks for anything but the three types that the format needs, other groups, or tiles
            that do not fit; one line that names the file, and the tile.
        ImportError: OpenCV is missing.
    """
    content = _unpickle(path)
    missing = [key for key in _KEYS if not isinstance(content, dict) or key not in content]
    if missing:
        raise DataError(f"{path}: expected a dictionary with {', '.join(_KEYS)}; it lacks {', '.join(missing)}")
    check_groups(content["groups"], path)
    box = _box(content["bbox"], f"{path}: bbox")
    tile_size = _positive(content["tile_size"], f"{path}: tile_size")
    scale = _positive(content["ppm"], f"{path}: ppm")
    if not 1 <= tile_size * scale <= _MOST_PIXELS:
        raise DataError(f"{path}: tile_size: expected one to {_MOST_PIXELS} pixels, got {tile_size:g} m with {scale:g} a metre")
    tiles = content["tiles_raster"]
    if not isinstance(tiles, Mapping):
        raise DataError(f"{path}: tiles_raster: expected a dictionary of tiles, got {type(tiles).__name__}")
    try:
        projection = Projection(*_numbers(content["ref_latlonalt"], 3, f"{path}: ref_latlonalt"))
        raster = RasterMap(np.zeros((3, *grid_size(box, scale)), np.uint8), scale, box, projection)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    for key, tile in tiles.items():
        index = _tile_index(key, path)
        top = min(box.y_min + (index[1] + 1) * tile_size, box.y_max)
        _place(raster, index, tile_size, top, tile, f"{path}: tile {_index_text(key)}")
    check_values(raster.classes, path)
    return raster


def write_tiles_pickle(raster: RasterMap, path: str | os.PathLike[str], tile_size: float = 128.0) -> None:
    """Write a map as tiles.pkl, for programs that read MGL's layout; our own is `RasterMap.save`.

    Raises:
        ValueError: tile_size is not positive, or no whole number of pixels. ImportError: OpenCV is missing.
    """
    cv2 = opencv()
    step = tile_size * raster.pixels_per_metre
    if not (step >= 1.0 and math.isfinite(step) and step == round(step)):
        raise ValueError(f"tile_size: expected a positive number of whole pixels, got {tile_size} m, {step} pixels")
    _, height, width = raster.classes.shape
    boxes, tiles = {}, {}
    for i, left in enumerate(range(0, width, int(step))):
        for j, bottom in enumerate(range(0, height, int(step))):
            right, top = min(left + int(step), width), min(bottom + int(step), height)
            picture = raster.classes[::-1, height - top : height - bottom, left:right].transpose(1, 2, 0)
            tiles[i, j] = io.BytesIO(cv2.imencode(".png", np.ascontiguousarray(picture))[1].tobytes())
            corners = raster.to_metres([(left - 0.5, height - bottom - 0.5), (right - 0.5, height - top - 0.5)])
            boxes[i, j] = ",".join(repr(float(value)) for value in corners.ravel())
    box, origin = raster.box, raster.projection
    content = {
        "bbox": f"{box.x_min!r},{box.y_min!r},{box.x_max!r},{box.y_max!r}",
        "tile_size": tile_size,
        "ppm": raster.pixels_per_metre,
        "groups": {"areas": list(AREAS), "ways": list(WAYS), "nodes": list(NODES)},
        "ref_latlonalt": (origin.latitude, origin.longitude, origin.altitude),
        "tiles_bbox": boxes,
        "tiles_raster": tiles,
    }
    Path(path).write_bytes(pickle.dumps(content, protocol=4))


def _unpickle(path: str | os.PathLike[str]) -> Any:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    _check_program(data, path)
    names = _stand_ins()

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) not in names:
                wanted = f"{module}.{name}"[:80]
                raise DataError(f"{path}: asks for {wanted!r}, which no file of map tiles needs: refused, nothing was executed")
            return names[module, name]

    try:
        return Unpickler(io.BytesIO(data)).load()
    except DataError:
        raise
    except Exception as error:  # a damaged pickle fails in any way
        raise DataError(f"{path}: not a file of map tiles (pickle), or damaged ({type(error).__name__})") from None


def _check_program(data: bytes, path: object) -> None:
    """Refuse a pickle that would take time or memory out of all proportion to its size, before it is run."""
    try:
        follow(data)
    except DataError as error:
        raise DataError(f"{path}: not a file of map tiles: {error}") from None
    except Exception as error:  # as above
        raise DataError(f"{path}: not a file of map tiles (pickle), or damaged ({type(error).__name__})") from None


class _Bytes:
    """What a BytesIO of the file holds; the base of the stand-ins, so that it can be told from other things."""

    content: Any = None


class _Dtype:
    code: Any = None


def _stand_ins() -> dict[tuple[str, str], Any]:
    """What stands for the names that a tiles.pkl may ask for; of one file only, as a pickle can change what it is given."""

    class Bytes(_Bytes):
        def __setstate__(self, state: Any) -> None:
            self.content = state[0] if isinstance(state, tuple) and state and isinstance(state[0], bytes) else None

    class Dtype(_Dtype):
        def __init__(self, code: Any, *_: Any) -> None:
            self.code, self.order = code, "="

        def __setstate__(self, state: Any) -> None:
            self.order = state[1] if isinstance(state, tuple) and len(state) > 1 else "="

    def scalar(dtype: Any, data: Any) -> float | int:
        if not isinstance(dtype, _Dtype) or dtype.code not in ("f8", "f4", "i8", "i4") or not isinstance(data, bytes):
            raise ValueError("a numpy scalar that is no number")
        order = ">" if getattr(dtype, "order", "=") == ">" else "<"
        kind = {"f8": "d", "f4": "f", "i8": "q", "i4": "i"}[dtype.code]
        number: float | int = struct.unpack(order + kind, data)[0]
        return number

    return {
        ("_io", "BytesIO"): Bytes,
        ("io", "BytesIO"): Bytes,
        ("numpy", "dtype"): Dtype,
        ("numpy.core.multiarray", "scalar"): scalar,  # numpy 1
        ("numpy._core.multiarray", "scalar"): scalar,  # numpy 2
    }


def _place(raster: RasterMap, index: tuple[int, int], tile_size: float, top: float, tile: Any, where: str) -> None:
    """Decode a tile and put it where it belongs: its first row lies at `top`, metres North, its first column in the West.

    Where its size is no whole number of pixels, a row in the South and a column in the East are too much, and cut.
    """
    height, width = raster.classes.shape[1:]
    step = tile_size * raster.pixels_per_metre
    left, bottom = round(index[0] * step), round(index[1] * step)
    if not (left < width and bottom < height):
        raise DataError(f"{where}: lies outside of the map of {width} x {height} pixels")
    first = max(round((raster.box.y_max - top) * raster.pixels_per_metre), 0)
    rows, columns = height - bottom - first, min(round(step), width - left)
    content = tile.content if isinstance(tile, _Bytes) else None
    if not isinstance(content, bytes):
        raise DataError(f"{where}: expected a PNG in a BytesIO")
    picture = _decode(content, (rows + 1, columns + 1), where)
    if picture.shape[0] < rows or picture.shape[1] < columns:
        raise DataError(f"{where}: expected {columns} x {rows} pixels, got {picture.shape[1]} x {picture.shape[0]}")
    picture = picture[:rows, :columns]
    raster.classes[:, first : first + rows, left : left + columns] = picture.transpose(2, 0, 1)


def _decode(content: bytes, most: tuple[int, int], where: str) -> NDArray[np.uint8]:
    """A PNG as RGB (H, W, 3); its size is checked before it is unpacked."""
    if not _is_whole_png(content):
        raise DataError(f"{where}: expected a PNG, whole and undamaged")
    width, height = struct.unpack(">II", content[16:24])
    if not (0 < height <= most[0] and 0 < width <= most[1]):
        raise DataError(f"{where}: expected at most {most[1]} x {most[0]} pixels, got {width} x {height}")
    cv2 = opencv()
    picture = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
    if picture is None:
        raise DataError(f"{where}: expected a PNG that OpenCV reads")
    rgb: NDArray[np.uint8] = picture[..., ::-1]
    return rgb


def _is_whole_png(content: bytes) -> bool:
    """Whether all chunks are there with their sums of check; libpng would complain on the terminal, or read half a picture."""
    place, kind = 8, b""
    while kind != b"IEND" and place + 12 <= len(content):
        (length,) = struct.unpack_from(">I", content, place)
        kind, end = content[place + 4 : place + 8], place + 8 + length
        if content[end : end + 4] != struct.pack(">I", zlib.crc32(content[place + 4 : end])):
            return False
        place = end + 4
    return content.startswith(b"\x89PNG\r\n\x1a\n") and content[12:16] == b"IHDR" and kind == b"IEND"


def _tile_index(key: Any, path: object) -> tuple[int, int]:
    if isinstance(key, tuple) and len(key) == 2 and all(isinstance(k, int) and 0 <= k < 1 << 20 for k in key):
        return key
    raise DataError(f"{path}: expected tiles under (column, row), got {type(key).__name__} {_index_text(key)}")


def _index_text(key: Any) -> str:
    return str(key)[:40] if isinstance(key, tuple) and all(isinstance(k, int) and abs(k) < 1 << 64 for k in key) else ""


def _box(value: Any, where: str) -> Box:
    if not isinstance(value, str):
        raise DataError(f"{where}: expected 'xmin,ymin,xmax,ymax' in metres, got {type(value).__name__}")
    try:
        return Box(*map(float, value.split(",")))
    except (TypeError, ValueError):
        raise DataError(f"{where}: expected 'xmin,ymin,xmax,ymax' in metres, got {value[:60]!r}") from None


def _positive(value: Any, where: str) -> float:
    number = _float(value)
    if 0.0 < number < math.inf:
        return number
    raise DataError(f"{where}: expected a positive number")


def _numbers(value: Any, count: int, where: str) -> list[float]:
    numbers = [_float(v) for v in value] if isinstance(value, (tuple, list)) and len(value) == count else [math.nan]
    if all(map(math.isfinite, numbers)):
        return numbers
    raise DataError(f"{where}: expected {count} numbers")


def _float(value: Any) -> float:
    """A number of any size; NaN where it is none."""
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return math.inf
