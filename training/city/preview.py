"""A picture to check a made city by eye: for a few places the image, its depth, and the map with the camera's frustum.

On the map, points show what each column of the image meets at eye level; they have the colours of the bar under the image, so
that a corner in the image can be found in the map.
"""

from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from city import recording
from city.render import Camera, Light, render
from city.scene import Scene
from mdps.datasets.camera import camera_to_world
from mdps.maps import NODES, Box, RasterMap

Doubles = NDArray[np.float64]
Bytes = NDArray[np.uint8]

PIXELS = 448
"""Rows and columns of a panel."""
MAP_METRES = 112.0
FOCAL = PIXELS * 0.5
FARTHEST = 60.0
"""Metres: where the depth's colours end."""


def draw(scene: Scene, raster: RasterMap, seed: int, path: Path, n_places: int = 4) -> None:
    """Draw a row for each place into one picture."""
    rng = np.random.default_rng([seed, 4])
    rows = []
    for drive in recording.drives(rng, scene, n_places, 300.0):
        places, headings = drive.at(np.array([float(rng.uniform(0.2, 0.8)) * drive.length]))
        yaw = 90 - float(np.degrees(headings[0])) + float(rng.uniform(-50, 50))
        rows.append(_row(scene, raster, places[0], yaw, recording.light_of_day(rng)))
    picture = np.vstack(rows)
    if not cv2.imwrite(str(path), picture[..., ::-1]):
        raise OSError(f"{path}: cannot be written; expected the name of a picture, such as preview.png")


def _row(scene: Scene, raster: RasterMap, place: Doubles, yaw: float, light: Light) -> Bytes:
    middle = (PIXELS - 1) / 2
    camera = Camera(PIXELS, PIXELS, FOCAL, (middle, middle), np.array([*place, 2.0]), camera_to_world(0.0, 0.0, yaw))
    image, depth = render(scene.near(place), camera, light)
    image = np.vstack([image[:-14], np.repeat(_hues(PIXELS)[None], 14, 0)])
    colours = np.asarray(cv2.applyColorMap(_byte(255 * np.minimum(1, 4 / depth)), cv2.COLORMAP_TURBO))[..., ::-1]
    colours = np.where(np.isfinite(depth)[..., None], colours, 40).astype(np.uint8)
    colours = cv2.putText(np.ascontiguousarray(colours), "depth", (8, 20), cv2.FONT_HERSHEY_SIMPLEX, 0.5, (255, 255, 255), 1)
    return np.hstack([image, colours, _map(raster, place, yaw, depth[PIXELS // 2 - 1])])


def _map(raster: RasterMap, place: Doubles, yaw: float, depth: NDArray[np.float32]) -> Bytes:
    """The map around a place, north up, with the frustum and what the middle row of the image meets."""
    part = raster.query(Box.around(place, MAP_METRES))
    panel = cv2.resize(part.colour(), (PIXELS, PIXELS), interpolation=cv2.INTER_NEAREST)
    scale = PIXELS / MAP_METRES
    corner = np.array([part.box.x_min, part.box.y_max])

    def at(xy: Doubles) -> tuple[int, int]:
        u, v = ((xy - corner) * [scale, -scale]).round().astype(int)
        return int(u), int(v)

    for row, column in zip(*np.nonzero(part.classes[2])):
        tree = part.classes[2, row, column] == NODES.index("tree") + 1
        u, v = ((np.array([column, row]) + 0.5) * scale / part.pixels_per_metre).astype(int)
        cv2.circle(panel, (int(u), int(v)), 3 if tree else 2, (0, 92, 9) if tree else (20, 20, 20), -1)
    c, s = np.cos(np.radians(yaw)), np.sin(np.radians(yaw))
    ahead, right = np.array([s, c]), np.array([c, -s])
    slopes = (np.arange(PIXELS) - (PIXELS - 1) / 2) / FOCAL
    for slope in slopes[[0, -1]]:
        cv2.line(
            panel, at(place), at(place + 55 * (ahead + slope * right) / np.hypot(1, slope)), (255, 255, 255), 2, cv2.LINE_AA
        )
    for slope, z, hue in zip(slopes, depth, _hues(PIXELS)):
        if z < FARTHEST:
            u, v = at(place + float(z) * (ahead + slope * right))
            cv2.circle(panel, (u, v), 3, tuple(int(h) for h in hue), -1)
    cv2.circle(panel, at(place), 6, (0, 0, 0), -1)
    cv2.circle(panel, at(place), 4, (255, 255, 255), -1)
    return np.asarray(panel, np.uint8)


def _hues(n: int) -> Bytes:
    """Colours (n, 3) from red over green to violet."""
    hsv = np.stack([np.linspace(0, 150, n), np.full(n, 255), np.full(n, 255)], 1).astype(np.uint8)
    return np.asarray(cv2.cvtColor(hsv[None], cv2.COLOR_HSV2RGB)[0], np.uint8)


def _byte(values: NDArray[np.float32]) -> Bytes:
    return np.clip(values, 0, 255).astype(np.uint8)
