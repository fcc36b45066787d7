"""What a vehicle records on a drive: when and where it takes images, in what light, and how far off its GPS is."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from city.render import Camera, Light, World, render
from city.scene import Scene
from city.tracks import Drive, Network

Doubles = NDArray[np.float64]

GPS_NOISE = 3.0
"""Metres: standard deviation of the GPS, which drifts over about twenty images."""
COMPASS_NOISE = 8.0
TILT_NOISE = 1.2
"""Degrees: of roll and pitch, about half of it from image to image."""


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a city is and how much is recorded in it."""

    blocks: int  # in each direction
    drives: int
    keyframes: int  # of a drive in MGL's layout
    frames: int  # of a drive in KITTI's, 10 a second
    kitti_scale: float  # of KITTI's images, which are 1242 x 375 pixels at 1


SIZES = {"small": Size(4, 3, 104, 150, 0.5), "full": Size(9, 20, 220, 600, 1.0)}


@dataclasses.dataclass(frozen=True)
class Poses:
    """Poses of a vehicle: places (F, 2), headings (F,) counter-clockwise from East in radians, seconds (F,)."""

    places: Doubles
    headings: Doubles
    seconds: Doubles


def drives(rng: np.random.Generator, scene: Scene, n: int, metres: float) -> list[Drive]:
    """Drives that together see much of the city.

    Raises:
        ValueError: the map has no street to drive on.
    """
    network = Network(scene.roads, scene.canvas)
    if not network.edges:
        raise ValueError("map: expected streets to drive on (highway=residential and the like) inside of the box, found none")
    visits = np.zeros(len(network.edges), np.int64)
    return [network.drive(rng, metres, visits) for _ in range(n)]


def keyframes(rng: np.random.Generator, drive: Drive, n: int, least: float = 4.0) -> Poses:
    """n places at least that many metres apart as the crow flies, fewer where the drive ends before."""
    fine = np.arange(0.0, drive.length, 0.25)
    places, headings = drive.at(fine)
    speed = np.clip(7 + np.cumsum(rng.normal(0, 0.15, len(fine))), 3, 12)
    seconds = np.cumsum(0.25 / speed)
    chosen = [0]
    wanted = float(rng.uniform(least + 0.1, least + 3))
    for i in range(1, len(fine)):
        if np.hypot(*(places[i] - places[chosen[-1]])) >= wanted:
            chosen.append(i)
            wanted = float(rng.uniform(least + 0.1, least + 3))
            if len(chosen) == n:
                break
    return Poses(places[chosen], headings[chosen], seconds[chosen])


def steady(rng: np.random.Generator, drive: Drive, n: int, step: float) -> Poses:
    """n places `step` seconds apart at a speed that changes slowly, fewer where the drive ends before."""
    speed = np.clip(7 + np.cumsum(rng.normal(0, 0.25, n)), 2, 12)
    distance = np.concatenate([[0.0], np.cumsum(speed[:-1] * step)])
    distance = distance[distance < drive.length]
    places, headings = drive.at(distance)
    return Poses(places, headings, step * np.arange(len(distance), dtype=np.float64))


def drifting(rng: np.random.Generator, shape: tuple[int, int], memory: float) -> Doubles:
    """Noise of deviation 1 whose columns drift: an autoregressive process of first order."""
    noise = rng.normal(size=shape)
    for i in range(1, len(noise)):
        noise[i] = memory * noise[i - 1] + np.sqrt(1 - memory**2) * noise[i]
    return noise


def light_of_day(rng: np.random.Generator) -> Light:
    """The light of a recording, from clear to overcast, from morning to evening."""
    cloud, warmth = float(rng.uniform(0, 1)), float(rng.uniform(-0.06, 0.08))
    sky = (1 - cloud) * np.array([110, 155, 215]) + cloud * np.array([190, 195, 200])
    horizon = (1 - cloud) * np.array([200, 214, 228]) + cloud * np.array([214, 214, 214])
    gain = float(rng.uniform(0.8, 1.1)) * np.array([1 + warmth, 1.0, 1 - warmth])
    return Light(float(rng.uniform(0, 2 * np.pi)), _three(gain), _three(sky), _three(horizon), float(rng.uniform(1, 4)))


def _three(values: Doubles) -> tuple[float, float, float]:
    r, g, b = (float(v) for v in values)
    return r, g, b


def take(near: Callable[[Doubles], World], camera: Camera, light: Light, seed: int, path: Path) -> None:
    """Render an image and write it; the name's ending is the format."""
    image, _ = render(near(camera.position[:2]), camera, light, seed)
    options = [cv2.IMWRITE_JPEG_QUALITY, 92] if path.suffix == ".jpg" else [cv2.IMWRITE_PNG_COMPRESSION, 1]
    if not cv2.imwrite(str(path), image[..., ::-1], options):
        raise OSError(f"{path}: cannot be written")
