"""Reading files that may hold anything: JSON, images, maps, and checks of what came out of them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from ..maps import RasterMap
from ..maps.errors import DataError, opencv
from ..maps.tiles_pickle import read_tiles_pickle
from .camera import Camera
from .scene import Problems

MAP_FILES = ("map.npz", "tiles.pkl")
"""Where a scene's map is looked for, in this order."""


def read_text(path: Path) -> str:
    """Return what a text file holds.

    Raises:
        DataError: it is not there, or cannot be read.
    """
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: expected text, got other bytes") from None


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        DataError: it is not there, cannot be read, or is not JSON.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except RecursionError:
        raise DataError(f"{path}: expected JSON, got lists in lists without end") from None
    except ValueError as error:
        raise DataError(f"{path}: expected JSON: {error}") from None


def mapping(value: Any, what: str) -> dict[str, Any]:
    """Return value, a JSON object.

    Raises:
        DataError: it is something else.
    """
    if not isinstance(value, dict):
        raise DataError(f"{what}: expected an object {{...}}, got {_kind(value)}")
    return value


def number(value: Any, what: str) -> float:
    """Return a finite number.

    Raises:
        DataError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DataError(f"{what}: expected a number, got {_kind(value)}")
    try:
        converted = float(value)
    except OverflowError:
        converted = math.inf
    if not math.isfinite(converted):
        raise DataError(f"{what}: expected a finite number, got {_kind(converted)}")
    return converted


def numbers(value: Any, what: str, shape: tuple[int, ...]) -> list[float]:
    """Return the finite numbers of nested lists of this shape, flat.

    Raises:
        DataError: it is something else.
    """
    if not isinstance(value, list) or len(value) != shape[0]:
        raise DataError(f"{what}: expected {' x '.join(map(str, shape))} numbers, got {_kind(value)}")
    if len(shape) == 1:
        return [number(v, what) for v in value]
    return [n for row in value for n in numbers(row, what, shape[1:])]


def file_name(name: str) -> str:
    """Return a name that is safe as that of a file in a folder.

    Raises:
        DataError: it would lead elsewhere, or nowhere.
    """
    if not name or len(name) > 200 or name.startswith(".") or any(c in "/\\:" or not c.isprintable() for c in name):
        raise DataError("name: expected one that can be a file's")
    return name


def read_image(path: Path, camera: Camera) -> tuple[np.ndarray, Camera]:
    """Read an image, RGB (H, W, 3) uint8, with the camera for its size: files may be larger or smaller than was said.

    Raises:
        DataError: it is not there, is no whole image, or has other proportions than the camera.
    """
    cv2 = opencv()
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    is_cut = data[:2].tobytes() == b"\xff\xd8" and b"\xff\xd9" not in data[-1024:].tobytes()
    try:
        image = None if is_cut or not data.size else cv2.imdecode(data, cv2.IMREAD_COLOR)
    except cv2.error:
        image = None
    if image is None:
        raise DataError(f"{path}: expected a whole image, got {data.size} bytes that are none")
    height, width = image.shape[:2]
    if abs(width * camera.height - height * camera.width) > 2 * max(camera.width, camera.height, width, height):
        raise DataError(f"{path}: expected the camera's proportions, {camera.width} x {camera.height}, got {width} x {height}")
    return np.ascontiguousarray(image[:, :, ::-1]), camera.scaled(width, height)


def load_map(folder: Path, problems: Problems) -> RasterMap | None:
    """Load the map of a folder, from our own file or tiles.pkl; None, and a problem, where there is none that can be read."""
    for name in MAP_FILES:
        path = folder / name
        if not path.exists():
            continue
        try:
            return read_tiles_pickle(path) if name.endswith(".pkl") else RasterMap.load(path)
        except (ValueError, OSError) as error:
            problems.add("map that cannot be read", str(error))
            return None
    problems.add("no map", f"{folder}: expected one of {', '.join(MAP_FILES)}; `python -m mdps.maps raster` makes one")
    return None


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, (list, dict)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return repr(value) if len(repr(value)) <= 20 else repr(value)[:17] + "..."
