"""A made city in the layout of Mapillary's MGL: dump.json, images, splits, the map (map.npz, tiles.pkl), osm/<scene>.osm.

Every third drive is of panoramas, which become four views of 90 degrees, each direction its own sequence; the others are of one
camera that looks ahead. The poses in the file are exact, gps_position and compass_angle are not.
"""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from files import write_whole
from numpy.typing import NDArray

from city import recording
from city.render import Camera
from city.scene import Scene
from mdps.datasets.camera import camera_to_world, roll_pitch_yaw
from mdps.maps import RasterMap, write_tiles_pickle

Doubles = NDArray[np.float64]

SPLIT_FILE = "splits_MGL_13loc.json"
DIRECTIONS = {"front": 0.0, "left": 90.0, "back": 180.0, "right": 270.0}
EPOCH = 1_600_000_000_000
"""Milliseconds since 1970 when the first drive begins."""
PANORAMAS_EVERY, VALIDATION_EVERY = 3, 4
"""Every such drive, from the first on, has a panoramic camera; every such one, from the second on, is for validation."""


def write(root: Path, name: str, scene: Scene, raster: RasterMap, size: recording.Size, pixels: int, seed: int) -> int:
    """Record drives and write the scene; returns the number of images. Adds the scene to the root's file of splits."""
    rng = np.random.default_rng([seed, 2])
    folder = root / name
    drives = recording.drives(rng, scene, size.drives, size.keyframes * 7.5)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    raster.save(folder / "map.npz")
    write_tiles_pickle(raster, folder / "tiles.pkl")
    dump: dict[str, Any] = {}
    parts: dict[str, list[int]] = {"train": [], "val": []}
    n_images = 0
    for k, drive in enumerate(drives):
        path = recording.keyframes(rng, drive, size.keyframes)
        first = (seed + 1) * 10**9 + k * 10**5
        record = _panoramas if k % PANORAMAS_EVERY == 0 else _perspectives
        sequences = record(
            rng, scene, path, pixels, f"made{seed:04d}drive{k:03d}", first, EPOCH + k * 3_600_000, folder / "images"
        )
        dump |= sequences
        parts["val" if k % VALIDATION_EVERY == 1 else "train"] += range(first, first + len(path.seconds))
        n_images += sum(len(s["views"]) for s in sequences.values())
    _add_to_splits(root / SPLIT_FILE, name, parts)
    write_whole(folder / "dump.json", json.dumps(dump))
    return n_images


def _add_to_splits(path: Path, name: str, parts: dict[str, list[int]]) -> None:
    """One city at a time, which others that are being made wait for."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        splits = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {part: {} for part in parts}
        for part, ids in parts.items():
            splits[part][name] = ids
        write_whole(path, json.dumps(splits))
    finally:
        os.close(folder)


def _panoramas(
    rng: np.random.Generator, scene: Scene, path: recording.Poses, pixels: int, name: str, first: int, start: int, images: Path
) -> dict[str, Any]:
    """The sequences of a drive with a panoramic camera on the roof."""
    offset, height = float(rng.uniform(-45, 45)), float(rng.uniform(2.1, 2.5))
    focal = pixels / 2
    model = {"id": "perspective_from_pano", "model": "PINHOLE", "width": pixels, "height": pixels}
    model["params"] = [focal, focal, pixels / 2, pixels / 2]
    views = _Views(rng, scene, path, height, first, start, images)
    sequences = {}
    for direction, left in DIRECTIONS.items():
        turn = _about_y(left + offset)
        cameras = [Camera(pixels, pixels, focal, (focal - 0.5, focal - 0.5), p, r @ turn.T) for p, r in views.poses]
        made = dict(views.take(cameras, direction, "perspective_from_pano"))
        sequences[f"{name}_{direction}"] = {"views": made, "cameras": {"perspective_from_pano": model}}
    return sequences


def _perspectives(
    rng: np.random.Generator, scene: Scene, path: recording.Poses, pixels: int, name: str, first: int, start: int, images: Path
) -> dict[str, Any]:
    """The sequence of a drive with a camera behind the windscreen."""
    width, height = pixels, pixels * 3 // 4
    focal = float(round(pixels * rng.uniform(0.6, 0.9), 2))
    identity = f"v2, made, city, {width}, {height}, perspective, {focal / pixels:.4f}"
    model = {
        "id": identity,
        "model": "PINHOLE",
        "width": width,
        "height": height,
        "params": [focal, focal, width / 2, height / 2],
    }
    views = _Views(rng, scene, path, float(rng.uniform(1.5, 1.8)), first, start, images)
    cameras = [Camera(width, height, focal, (width / 2 - 0.5, height / 2 - 0.5), p, r) for p, r in views.poses]
    made = dict(views.take(cameras, "undistorted", identity))
    return {name: {"views": made, "cameras": {identity: model}}}


class _Views:
    """Poses of a drive's camera, and what the file says of each view."""

    def __init__(
        self, rng: np.random.Generator, scene: Scene, path: recording.Poses, height: float, first: int, start: int, images: Path
    ) -> None:
        self.scene, self.images, self.first = scene, images, first
        n = len(path.seconds)
        tilt = recording.TILT_NOISE * (0.7 * rng.normal(size=(1, 2)) + 0.7 * rng.normal(size=(n, 2)))
        yaw = 90 - np.degrees(path.headings) + 1.5 * recording.drifting(rng, (n, 1), 0.8)[:, 0]
        z = height + 0.02 * rng.normal(size=n)
        self.poses = list(zip(np.column_stack([path.places, z]), camera_to_world(tilt[:, 0], tilt[:, 1], yaw)))
        gps = path.places + recording.GPS_NOISE * recording.drifting(rng, (n, 2), 0.95)
        self.gps = np.column_stack([scene.projection.to_degrees(gps), 30 + rng.normal(size=n)])
        self.degrees = scene.projection.to_degrees(path.places)
        self.compass = (yaw + recording.COMPASS_NOISE * recording.drifting(rng, (n, 1), 0.9)[:, 0]) % 360
        self.times = start + np.round(1000 * path.seconds).astype(np.int64)
        self.light, self.chunk = recording.light_of_day(rng), int(rng.integers(10**9, 10**10))

    def take(self, cameras: list[Camera], suffix: str, camera: str) -> list[tuple[str, dict[str, Any]]]:
        """Take the images; returns the names of the views and their entries."""
        views = []
        for i, shot in enumerate(cameras):
            view = f"{self.first + i}_{suffix}"
            recording.take(self.scene.near, shot, self.light, self.first + i, self.images / f"{view}.jpg")
            entry = {
                "camera_id": camera,
                "latlong": self.degrees[i].tolist(),
                "t_c2w": shot.position.tolist(),
                "R_c2w": shot.rotation.tolist(),
                "roll_pitch_yaw": roll_pitch_yaw(shot.rotation).tolist(),
                "capture_time": int(self.times[i]),
                "gps_position": self.gps[i].tolist(),
                "compass_angle": float(self.compass[i]),
                "chunk_id": self.chunk,
                "index": i,
            }
            views.append((view, entry))
        return views


def _about_y(degrees: float) -> Doubles:
    """World to camera: turns a camera to its left."""
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return np.array([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]])
