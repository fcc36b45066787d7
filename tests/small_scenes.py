"""Small made scenes in the formats of MGL and KITTI, written with none of the code that reads them.

The world is a sphere of smooth colours (`colours`), so that what a camera of any orientation sees has a closed form.
Orientations come from scipy, by the published relation (Rx(-90) R_c2w^-1) = Ry(roll) Rx(pitch) Rz(yaw), intrinsic.
"""

import json
import math
import os
import shutil
from pathlib import Path

import cv2
import numpy as np
from scipy.spatial.transform import Rotation

from mdps.maps import Box, Projection, RasterMap

PROJECTION = Projection(52.47, 13.44)
SIDE = 600.0
"""Metres of map, around the origin."""
YAWS = {"front": 0.0, "left": -90.0, "back": 180.0, "right": 90.0}
SECOND = 1_600_000_000


def rotation(roll, pitch, yaw):
    """Camera-to-world, (3, 3), of angles in degrees."""
    angles = Rotation.from_euler("YXZ", [roll, pitch, yaw], degrees=True)
    return (Rotation.from_euler("X", -90, degrees=True).inv() * angles).inv().as_matrix()


def colours(directions):
    """Of the directions (..., 3), unit vectors in the world: uint8 (..., 3)."""
    a = np.array([[1.0, 0.3, 0.1], [-0.4, 1.0, 0.2], [0.1, 0.2, 1.0]])
    return np.round(127.5 + 60 * np.sin(2 * directions @ a) + 50 * (directions @ a.T) / 1.2).astype(np.uint8)


def picture(to_world, width, height, fx, fy, cx, cy):
    """What a camera with the axes `to_world` sees; principal point as integers at pixel centres."""
    u, v = np.meshgrid(np.arange(width), np.arange(height))
    rays = np.stack([(u - cx) / fx, (v - cy) / fy, np.ones_like(u, float)], -1)
    return colours(rays / np.linalg.norm(rays, axis=-1, keepdims=True) @ to_world.T)


def small_map(projection=PROJECTION, side=SIDE, seed=0):
    """Blocks of classes at 2 pixels per metre, around the origin."""
    random = np.random.default_rng(seed)
    n = round(side * 2)
    blocks = np.stack([random.integers(0, k, (n // 40 + 1,) * 2) for k in (8, 11, 34)]).astype(np.uint8)
    classes = np.ascontiguousarray(blocks.repeat(40, 1).repeat(40, 2)[:, :n, :n])
    classes[1, :, np.arange(n) % 40 > 3] = 0  # ways are narrow, nodes are points
    classes[2, random.uniform(size=(n, n)) > 0.002] = 0
    return RasterMap(classes, 2.0, Box(-side / 2, -side / 2, side / 2, side / 2), projection)


def drive(n=24, step=5.0):
    """Positions (n, 2) and yaws (n) of a drive: half of it to the North, then to the East."""
    half = n // 2
    north = [(-60.0, -60.0 + step * i, 0.0) for i in range(half)]
    east = [(-60.0 + step * (i + 1), north[-1][1], 90.0) for i in range(n - half)]
    path = np.array(north + east)
    return path[:, :2], path[:, 2]


def mapillary_view(xy, yaw, seconds, camera, projection=PROJECTION, roll=1.5, pitch=-2.0):
    """One view of dump.json."""
    return {
        "camera_id": camera,
        "latlong": projection.to_degrees(np.array(xy)).tolist(),
        "t_c2w": [*map(float, xy), 2.0],
        "R_c2w": rotation(roll, pitch, yaw).tolist(),
        "roll_pitch_yaw": [roll, pitch, yaw],
        "capture_time": int(seconds * 1000),
        "gps_position": [*projection.to_degrees(np.array(xy) + 1.0).tolist(), 38.0],
        "compass_angle": yaw % 360,
        "chunk_id": 1,
        "index": 0,
    }


def mapillary_camera(name, width, height, f):
    return {"id": name, "model": "PINHOLE", "width": width, "height": height, "params": [f, f, width / 2, height / 2]}


def make_mapillary(root, scene="berlin", n=24, *, offset=17.25, with_map=True, n_flat=12, start=SECOND, seed=0):
    """A scene with a panorama sequence of n images (four views each) and an undistorted sequence; returns its dump."""
    folder = Path(root) / scene
    (folder / "images").mkdir(parents=True)
    dump = {}
    xy, yaws = drive(n)
    for direction, turn in YAWS.items():
        views = {}
        for i in range(n):
            # yaws are written as they come, beyond 180 too
            yaw = yaws[i] + offset + turn + (360 if i == 3 else 0)
            name = f"{1000 + i}_{direction}"
            views[name] = mapillary_view(xy[i], yaw, start + i, "pano")
            save(folder / f"images/{name}.jpg", picture(rotation(1.5, -2.0, yaw), 64, 64, 32, 32, 31.5, 31.5))
        dump[f"seqA_{direction}"] = {"views": views, "cameras": {"pano": mapillary_camera("pano", 64, 64, 32.0)}}
    views = {}
    for i in range(n_flat):
        name = f"{2000 + i}_undistorted"
        views[name] = mapillary_view(xy[i] + 3, yaws[i], start + 100 + 2 * i, "flat", roll=0.0, pitch=0.0)
        save(folder / f"images/{name}.jpg", picture(rotation(0, 0, yaws[i]), 80, 60, 50, 50, 39.5, 29.5))
    dump["seqB"] = {"views": views, "cameras": {"flat": mapillary_camera("flat", 80, 60, 50.0)}}
    write(folder / "dump.json", dump)
    if with_map:
        small_map(seed=seed).save(folder / "map.npz")
    ids = [*range(1000, 1000 + n), *range(2000, 2000 + n_flat)]
    write(Path(root) / "splits_MGL_13loc.json", {"train": {scene: ids[: n - 6]}, "val": {scene: ids[n - 6 :]}})
    return dump


DAY = "2011_09_26"
LEVER = (1.5, 0.25, 0.6)
"""Where the camera is, seen from the unit: metres ahead, to the left, up."""
KITTI_CAMERA = (124, 38, 72.0, 72.0, 61.5, 18.0)


def make_kitti(root, n=24, *, drives=(9, 11), with_map=True, first=48):
    """Drives of n images from frame `first` on, 1 m apart; the camera looks ahead, and its picture is that of a level car."""
    day = Path(root) / DAY
    day.mkdir(parents=True)
    projection = Projection(49.0, 8.4)
    write_calibration(day)
    xy, yaws = drive(n, 1.0)
    for k in drives:
        folder = day / f"{DAY}_drive_{k:04d}_sync"
        for part in ("image_02", "oxts"):
            (folder / part / "data").mkdir(parents=True)
        stamps = [f"2011-09-26 13:{k:02d}:{i // 10:02d}.{i % 10}00000000" for i in range(first + n)]
        (folder / "image_02/timestamps.txt").write_text("\n".join(stamps) + "\n")
        for i in range(n):
            heading = math.radians(90 - yaws[i])
            place = projection.to_degrees(xy[i] + [0, 10 * k])
            numbers = [*place, 114.0, 0.01, -0.02, heading, *[0.0] * 24]
            (folder / f"oxts/data/{first + i:010d}.txt").write_text(" ".join(map(str, numbers)))
            save(folder / f"image_02/data/{first + i:010d}.png", picture(rotation(0, 0, yaws[i]), *KITTI_CAMERA))
    if with_map:
        small_map(projection).save(Path(root) / "map.npz")
    names = [f"{DAY}/{DAY}_drive_{k:04d}_sync/{first + i:010d}.png" for k in drives for i in range(n)]
    (Path(root) / "train_files.txt").write_text("\n".join(names[:n]) + "\n")
    shifted = [f"{name} 0.5 -0.25 1.0" for name in names[n:]]
    (Path(root) / "test1_files.txt").write_text("\n".join(shifted[:12] + shifted[11:12] + shifted[12:]) + "\n")
    (Path(root) / "test2_files.txt").write_text("\n".join(shifted) + "\n")
    return projection


def write_calibration(day):
    """A unit with the axes of the laser scanner, and a camera that looks ahead, at LEVER in the unit's axes."""
    width, height, fx, fy, cx, cy = KITTI_CAMERA
    # the unit is 0.75 m behind and 0.5 m below the scanner; the rest of the lever lies between scanner and camera 0,
    # except 0.06 m to the right, between cameras 0 and 2
    ahead, left, up = LEVER
    t_velo = np.array([-0.75, 0.0, -0.5])
    rest = np.array([ahead, left + 0.06, up]) + t_velo  # camera 0 in the scanner's axes
    to_camera = np.array([[0, -1, 0], [0, 0, -1], [1, 0, 0]])
    p = [fx, 0, cx, fx * 0.06 * -1, 0, fy, cy, 0, 0, 0, 1, 0]
    text = {
        "imu_to_velo": {"R": np.eye(3), "T": t_velo},
        "velo_to_cam": {"R": to_camera, "T": -to_camera @ rest},
        "cam_to_cam": {"S_rect_02": [width, height], "R_rect_00": np.eye(3), "P_rect_02": p},
    }
    for name, entries in text.items():
        lines = ["calib_time: 09-Jan-2012 13:57:47"]
        lines += [f"{key}: {' '.join(f'{v:.6e}' for v in np.ravel(value))}" for key, value in entries.items()]
        (day / f"calib_{name}.txt").write_text("\n".join(lines) + "\n")


def save(path, rgb):
    options = [cv2.IMWRITE_JPEG_QUALITY, 95] if path.suffix == ".jpg" else []
    assert cv2.imwrite(str(path), rgb[:, :, ::-1], options)


def write(path, content):
    Path(path).write_text(json.dumps(content))


def copy(source, target):
    """Copy a folder of data; images stay the same files, so that tests that change one must remove it first."""
    shutil.copytree(source, target, copy_function=_link, dirs_exist_ok=True)


def _link(source, target):
    (os.link if source.endswith((".jpg", ".png")) else shutil.copy)(source, target)
