"""Pinhole cameras: intrinsics, orientation, and the three ways in which a loader changes an image.

Conventions, used by everything in `mdps.datasets`:

* World: x East, y North, z up, in metres. Camera: x right, y down, z forward.
* Yaw: degrees, clockwise from North, in [-180, 180). Heading: radians, counter-clockwise from East, in [-pi, pi);
  heading = 90 degrees - yaw. Pitch is positive when the camera looks down; roll is positive when the camera is turned
  counter-clockwise about its viewing direction, so that the world in its image appears turned clockwise.
* With L(yaw) the world-to-camera rotation of a level camera, R_world_to_camera = Rz(roll) Rx(pitch) L(yaw).
* A pixel has its centre at integers, (0, 0) is the centre of the top left one, and v points down.

So the image that a level camera would have taken at the same place shows at pixel p what the real one shows at
K Rz(roll) Rx(pitch) K^-1 p: a homography, exact for all depths.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..maps.errors import opencv

Array = npt.NDArray[np.float64]
MAX_TILT = 60.0
"""Roll and pitch, in degrees, beyond which an image is not rectified."""


class Camera(NamedTuple):
    """A pinhole camera; focal lengths and principal point in pixels, integers at pixel centres."""

    width: int
    height: int
    fx: float
    fy: float
    cx: float
    cy: float

    @property
    def matrix(self) -> Array:
        """K, (3, 3)."""
        return np.array([[self.fx, 0, self.cx], [0, self.fy, self.cy], [0, 0, 1]], float)

    @property
    def is_sensible(self) -> bool:
        """Whether the size is an image's, of at most 2^28 pixels, and the focal lengths are such that it sees 1 to 170 degrees.

        Images are resized to a focal length: a wrong one may ask for more memory than there is.
        """
        sides = (self.width, self.fx, self.cx), (self.height, self.fy, self.cy)
        seen = all(size >= 1 and size / 24 < focal < 60 * size and abs(centre) < 1e6 for size, focal, centre in sides)
        return seen and self.width * self.height <= 2**28

    def scaled(self, width: int, height: int) -> "Camera":
        """Return the camera of the same image resized to this size: the corners of the image stay its corners."""
        x, y = width / self.width, height / self.height
        return Camera(width, height, self.fx * x, self.fy * y, (self.cx + 0.5) * x - 0.5, (self.cy + 0.5) * y - 0.5)

    def shifted(self, left: int, top: int, width: int, height: int) -> "Camera":
        """Return the camera of the window of this size with its top left pixel at (left, top); negative: padding."""
        return Camera(width, height, self.fx, self.fy, self.cx - left, self.cy - top)


def heading_of(yaw: npt.ArrayLike) -> Array:
    """Heading in radians, counter-clockwise from East, in [-pi, pi), of yaw in degrees, clockwise from North, of any size."""
    return np.radians(wrap_degrees(90.0 - np.asarray(yaw, float)))


def yaw_of(heading: npt.ArrayLike) -> Array:
    """Yaw in degrees, clockwise from North, in [-180, 180), of a heading in radians, counter-clockwise from East."""
    return wrap_degrees(90.0 - np.degrees(np.asarray(heading, float)))


def wrap_degrees(angle: npt.ArrayLike) -> Array:
    """Wrap degrees to [-180, 180)."""
    wrapped = (np.asarray(angle, float) + 180.0) % 360.0
    return np.where(wrapped == 360.0, 0.0, wrapped) - 180.0  # a tiny negative angle + 360 rounds to 360


def wrap_radians(angle: npt.ArrayLike) -> Array:
    """Wrap radians to [-pi, pi)."""
    turn = 2 * math.pi
    wrapped = (np.asarray(angle, float) + math.pi) % turn
    return np.where(wrapped == turn, 0.0, wrapped) - math.pi


def camera_to_world(roll: npt.ArrayLike, pitch: npt.ArrayLike, yaw: npt.ArrayLike) -> Array:
    """The rotation (..., 3, 3) whose columns are the camera's axes in the world, of angles (...) in degrees."""
    return np.swapaxes(_tilt(roll, pitch) @ _level(yaw), -1, -2)


def roll_pitch_yaw(rotation: npt.ArrayLike) -> Array:
    """Angles (..., 3) in degrees of camera-to-world rotations (..., 3, 3); the inverse of `camera_to_world`.

    Roll and yaw are in [-180, 180), pitch in [-90, 90]. Of a camera that looks straight up or down only a sum of roll and
    yaw is defined.
    """
    right, down, ahead = np.moveaxis(np.asarray(rotation, float), -1, 0)
    pitch = np.degrees(np.arctan2(-ahead[..., 2], np.hypot(ahead[..., 0], ahead[..., 1])))
    roll = np.degrees(np.arctan2(right[..., 2], -down[..., 2]))
    yaw = np.degrees(np.arctan2(ahead[..., 0], ahead[..., 1]))
    return np.stack([wrap_degrees(roll), pitch, wrap_degrees(yaw)], -1)


def resize(image: np.ndarray, camera: Camera, width: int, height: int) -> tuple[np.ndarray, Camera]:
    """Resize an image (H, W, C) uint8 and its camera to width x height pixels: areas are averaged when it shrinks."""
    if (width, height) == (camera.width, camera.height):
        return image, camera
    cv2 = opencv()
    shrinks = width * height < camera.width * camera.height
    method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    return cv2.resize(image, (int(width), int(height)), interpolation=method), camera.scaled(width, height)


def resize_to_focal_length(image: np.ndarray, camera: Camera, focal_length: float) -> tuple[np.ndarray, Camera]:
    """Resize an image so that fx is as near to `focal_length`, in pixels, as whole pixels allow; aspect as it was."""
    scale = focal_length / camera.fx
    return resize(image, camera, max(round(camera.width * scale), 1), max(round(camera.height * scale), 1))


def fit(image: np.ndarray, camera: Camera, width: int, height: int) -> tuple[np.ndarray, Camera]:
    """Crop or pad an image (H, W, C) with black, equally on both sides, to width x height pixels; nothing is resampled."""
    left, top = (camera.width - width) // 2, (camera.height - height) // 2
    if (left, top, width, height) == (0, 0, camera.width, camera.height):
        return image, camera
    fitted = np.zeros((height, width, *image.shape[2:]), image.dtype)
    u, v = max(left, 0), max(top, 0)
    part = image[v : v + height, u : u + width]
    fitted[v - top : v - top + part.shape[0], u - left : u - left + part.shape[1]] = part
    return fitted, camera.shifted(left, top, width, height)


def rectify(image: np.ndarray, camera: Camera, roll: float, pitch: float) -> np.ndarray:
    """Return the image that the camera would have taken without roll and pitch (degrees); black where it saw nothing.

    Raises:
        ValueError: angles beyond 60 degrees, where little of an image is left.

    Cost: one bilinear warp, about 0.5 ms at 256 x 256.
    """
    if not (abs(roll) <= MAX_TILT and abs(pitch) <= MAX_TILT):
        raise ValueError(f"roll, pitch: expected at most {MAX_TILT:.0f} degrees, got {roll:.4g}, {pitch:.4g}")
    if roll == 0 and pitch == 0:
        return image
    cv2 = opencv()
    homography = camera.matrix @ _tilt(roll, pitch) @ np.linalg.inv(camera.matrix)
    method = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return cv2.warpPerspective(image, homography, (camera.width, camera.height), flags=method)


def _tilt(roll: npt.ArrayLike, pitch: npt.ArrayLike) -> Array:
    """Rz(roll) Rx(pitch) of angles in degrees: from the level camera's axes to the camera's."""
    r, p = np.radians(np.asarray(roll, float)), np.radians(np.asarray(pitch, float))
    r, p = np.broadcast_arrays(r, p)
    zero, one = np.zeros_like(r), np.ones_like(r)
    about_z = _matrix([[np.cos(r), -np.sin(r), zero], [np.sin(r), np.cos(r), zero], [zero, zero, one]])
    about_x = _matrix([[one, zero, zero], [zero, np.cos(p), -np.sin(p)], [zero, np.sin(p), np.cos(p)]])
    return about_z @ about_x


def _level(yaw: npt.ArrayLike) -> Array:
    """The world-to-camera rotation of a level camera: rows are its right, down and forward axis in the world."""
    y = np.radians(np.asarray(yaw, float))
    zero, one = np.zeros_like(y), np.ones_like(y)
    return _matrix([[np.cos(y), -np.sin(y), zero], [zero, zero, -one], [np.sin(y), np.cos(y), zero]])


def _matrix(rows: list[list[Array]]) -> Array:
    return np.stack([np.stack(row, -1) for row in rows], -2)
