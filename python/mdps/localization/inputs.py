"""What `Localizer` and its neighbours are given, checked and brought to one form. Each function raises ValueError, naming the
argument."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..datasets.camera import Camera
from ..maps import Box, Projection, RasterMap

if TYPE_CHECKING:
    from .batch import Batch


def raster(map: RasterMap | tuple[NDArray[np.uint8] | Tensor, float]) -> RasterMap:
    """As a map; one of classes and pixels per metre alone has the origin in its middle."""
    if isinstance(map, RasterMap):
        return map
    if not isinstance(map, tuple | list) or len(map) != 2:
        raise ValueError(f"map: expected a RasterMap, or classes and pixels per metre, got {type(map).__name__}")
    classes, (scale,) = map[0], numbers("map: pixels per metre", [map[1]], 1)
    classes = classes.cpu().numpy() if isinstance(classes, Tensor) else np.asarray(classes)
    if classes.ndim != 3 or 0 in classes.shape or not scale > 0:
        raise ValueError(
            f"map: expected classes uint8 (3, H, W) and pixels per metre, got {classes.dtype} {classes.shape}, {scale}"
        )
    size = classes.shape[2] / scale, classes.shape[1] / scale
    return RasterMap(classes, scale, Box.around((0.0, 0.0), size), Projection(0.0, 0.0))


def pixels(image: NDArray[np.uint8] | Tensor) -> NDArray[np.uint8]:
    """As (H, W, 3)."""
    pixels = image.cpu().numpy() if isinstance(image, Tensor) else np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or 3 not in (pixels.shape[0], pixels.shape[2]):
        raise ValueError(f"image: expected uint8 (H, W, 3) or (3, H, W), got {pixels.dtype} {pixels.shape}")
    return np.ascontiguousarray(pixels if pixels.shape[2] == 3 else pixels.transpose(1, 2, 0))


def camera(camera: Camera | ArrayLike | None, pixels: NDArray[np.uint8]) -> Camera:
    """That of an image (H, W, 3)."""
    size = pixels.shape[1], pixels.shape[0]
    if isinstance(camera, Camera):
        if (camera.width, camera.height) != size:
            raise ValueError(f"camera: expected that of an image of {size} pixels, got {camera.width, camera.height}")
        camera = camera[2:]
    return sensible(Camera(*size, *numbers("camera", camera, 4)))


def sensible(camera: Camera) -> Camera:
    """The same camera, if an image can be of it."""
    if not camera.is_sensible:
        expected = f"focal lengths that see 1 to 170 degrees of {camera.width} x {camera.height} pixels"
        got = ", ".join(f"{name} = {number}" for name, number in zip(camera._fields[2:], camera[2:]))
        raise ValueError(f"camera: expected {expected}, got {got}")
    return camera


def batch(given: "Batch", size: tuple[int, int], metres: float) -> None:
    """Check that the parts of a batch fit one another and images of this size (height, width), that what is used of them is
    finite, and that sequences begin on their maps, or not farther from them than this."""
    if isinstance(given.poses, Tensor) and 0 in given.poses.shape[:2]:
        raise ValueError(f"poses: expected one sequence or more, of one step or more, got shape {tuple(given.poses.shape)}")
    forms = {
        "poses": "float B T 3",
        "images": "uint8 B T 3 H W",
        "camera": "float B T 4",
        "classes": "uint8 B 3 S S'",
        "actions": "float B T 3",
        "observed": "bool B T",
    }
    if given.mounts is not None:
        forms |= {"images": "uint8 B T V 3 H W", "camera": "float B T V 4", "mounts": "float V 3"}
    sizes = tensors(given._asdict(), forms)
    if (sizes["H"], sizes["W"]) != size:
        raise ValueError(f"sequence: expected images of {size} pixels, as in training, got {sizes['H'], sizes['W']}")
    for name, used in (("poses", given.poses[:, 0]), ("actions", given.actions[:, 1:]), ("mounts", given.mounts)):
        if used is not None and not used.isfinite().all():
            raise ValueError(f"{name}: expected finite numbers, got {used[~used.isfinite()][0].item()}")
    for camera in given.camera[given.observed].reshape(-1, 4).tolist():
        sensible(Camera(size[1], size[0], *camera))
    width, height = sizes["S'"] / given.pixels_per_metre, sizes["S"] / given.pixels_per_metre
    for x, y, _ in given.poses[:, 0].tolist():
        near_map("poses", x, y, Box.around((0.0, 0.0), (width, height)), metres)


def tensors(values: Mapping[str, object], forms: Mapping[str, str]) -> dict[str, int]:
    """Check that values are tensors of forms such as "float B T 4": a type, and a shape, in which a letter is one number
    wherever it is; return the numbers."""
    sizes: dict[str, int] = {}
    for name, form in forms.items():
        (kind, *letters), value, known = form.split(), values.get(name), dict(sizes)
        expected = f"{name}: expected {kind} ({', '.join(letters)})"
        if not isinstance(value, Tensor):
            raise ValueError(f"{expected}, got {type(value).__name__}")
        sizes = dict(zip(letters, value.shape)) | known
        wanted = [int(x) if x.isdigit() else sizes.get(x) for x in letters]
        is_kind = value.is_floating_point() if kind == "float" else value.dtype == getattr(torch, kind)
        if list(value.shape) != wanted or not is_kind:
            told = "".join(f", {x} = {known[x]}" for x in letters if x in known and not x.isdigit()).replace(",", " with", 1)
            raise ValueError(f"{expected}{told}, got {value.dtype} {tuple(value.shape)}")
    return sizes


def numbers(name: str, value: ArrayLike | None, n: int) -> list[float]:
    """As n finite numbers."""
    try:
        array = np.asarray(value.tolist() if isinstance(value, Tensor) else value, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected {n} numbers, got {value!r}") from None
    if array.shape != (n,) or not np.isfinite(array).all():
        raise ValueError(f"{name}: expected {n} finite numbers, got {value!r}")
    return [float(x) for x in array]


def rows(name: str, value: ArrayLike, n: int) -> list[list[float]]:
    """As one row or more of n finite numbers each."""
    given = value.tolist() if isinstance(value, Tensor | np.ndarray) else value
    if not isinstance(given, list | tuple) or not given:
        raise ValueError(f"{name}: expected rows of {n} numbers, got {value!r}")
    return [numbers(f"{name}[{i}]", row, n) for i, row in enumerate(given)]


def near_map(name: str, x: float, y: float, box: Box, metres: float) -> None:
    """Check that a place lies on the map, or not farther from it than this."""
    if not box.grown(metres).contains((x, y)):
        reach = f"x from {box.x_min:.0f} to {box.x_max:.0f}, y from {box.y_min:.0f} to {box.y_max:.0f} m"
        raise ValueError(f"{name}: expected a place on the map, {reach}, or within {metres:g} m of it, got x = {x}, y = {y}")


def at_least(least: float, **values: float) -> None:
    """Check that values are finite and not smaller."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= least):
            raise ValueError(f"{name}: expected at least {least:g}, got {value}")
