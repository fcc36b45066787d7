"""What `Localizer` is given, checked and brought to one form. Each function raises ValueError, naming the argument."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..datasets.camera import Camera
from ..maps import Box, Projection, RasterMap


def raster(map: RasterMap | tuple[NDArray[np.uint8] | Tensor, float]) -> RasterMap:
    """As a map; one of classes and pixels per metre alone has the origin in its middle."""
    if isinstance(map, RasterMap):
        return map
    classes, scale = map
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
    given = Camera(*size, *numbers("camera", camera, 4))
    if not given.is_sensible:
        expected = f"focal lengths that see 1 to 170 degrees of {size[0]} x {size[1]} pixels"
        raise ValueError(f"camera: expected {expected}, got fx = {given.fx}, fy = {given.fy}, cx = {given.cx}, cy = {given.cy}")
    return given


def numbers(name: str, value: ArrayLike | None, n: int) -> list[float]:
    """As n finite numbers."""
    try:
        array = np.asarray(value.tolist() if isinstance(value, Tensor) else value, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected {n} numbers, got {value!r}") from None
    if array.shape != (n,) or not np.isfinite(array).all():
        raise ValueError(f"{name}: expected {n} finite numbers, got {value!r}")
    return [float(x) for x in array]


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
