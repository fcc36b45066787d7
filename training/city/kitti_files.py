"""A made city in the layout of KITTI's raw data: calibration, oxts, image_02, times, split files, the map.

The rig is ours, with round numbers: a GPS/IMU unit, a laser scanner (of which only the axes matter) and the rectified left
colour camera, 1242 x 375 pixels or a part of that. The unit drives along the streets; where the camera is follows from the
calibration.
The first drives are for training, test1 is a sample of them with initial errors, test2 is the last drives.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from city import recording
from city.render import Camera, Light
from city.scene import Scene
from mdps.maps import RasterMap, write_tiles_pickle

Doubles = NDArray[np.float64]

WIDTH, HEIGHT, FOCAL, CENTRE = 1242, 375, 721.5, (609.5, 172.9)
STEP = 0.1
"""Seconds between frames."""
UNIT_HEIGHT = 0.93
IMU_TO_VELO = np.eye(3), np.array([-0.81, 0.32, -0.8])
VELO_TO_CAM = np.array([[0.0, -1.0, 0.0], [0.0, 0.0, -1.0], [1.0, 0.0, 0.0]]), np.array([0.0, -0.08, -0.27])
BASELINE = np.array([0.06, 0.0, 0.0])
"""From the first camera to the left colour camera, in the axes of both."""
TILT = np.radians(0.7)
"""Deviation of the unit's roll and pitch."""


def write(root: Path, scene: Scene, raster: RasterMap, size: recording.Size, seed: int) -> int:
    """Record drives and write them; returns the number of images."""
    rng = np.random.default_rng([seed, 3])
    date = f"2030_01_{seed % 28 + 1:02d}"
    day = root / date
    drives = recording.drives(rng, scene, size.drives, size.frames * 1.3)
    day.mkdir(parents=True, exist_ok=True)
    raster.save(root / "map.npz")
    write_tiles_pickle(raster, root / "tiles.pkl")
    scale = size.kitti_scale
    _write_calibration(day, scale)
    listed: list[list[str]] = []
    for k, drive in enumerate(drives):
        name = f"{date}_drive_{k + 1:04d}_sync"
        path = recording.steady(rng, drive, size.frames, STEP)
        _record(rng, scene, path, scale, day / name, k)
        listed.append([f"{date}/{name}/{i:010d}.png" for i in range(len(path.seconds))])
    n_test = max(1, size.drives // 5)
    train = [line for lines in listed[:-n_test] for line in lines]
    test2 = [line for lines in listed[-n_test:] for line in lines]
    test1 = sorted(train[int(i)] for i in rng.integers(len(train), size=max(1, len(train) // 5)))
    for file, lines, moved in (("test1", test1, True), ("test2", test2, True), ("train", train, False)):
        shifts = [" " + " ".join(f"{v:.6f}" for v in rng.uniform(-1, 1, 3)) if moved else "" for _ in lines]
        (root / f"{file}_files.txt").write_text("".join(f"{a}{b}\n" for a, b in zip(lines, shifts)), encoding="utf-8")
    return sum(map(len, listed))


def rig() -> tuple[Doubles, Doubles]:
    """From the unit's axes to the camera's: rotation (3, 3) and translation (3,)."""
    (r_imu, t_imu), (r_velo, t_velo) = IMU_TO_VELO, VELO_TO_CAM
    return r_velo @ r_imu, r_velo @ t_imu + t_velo + BASELINE


def unit_to_world(roll: float, pitch: float, yaw: float) -> Doubles:
    """Rz(yaw) Ry(pitch) Rx(roll), radians."""
    (sr, sp, sy), (cr, cp, cy) = np.sin([roll, pitch, yaw]), np.cos([roll, pitch, yaw])
    x = np.array([[1, 0, 0], [0, cr, -sr], [0, sr, cr]])
    y = np.array([[cp, 0, sp], [0, 1, 0], [-sp, 0, cp]])
    z = np.array([[cy, -sy, 0], [sy, cy, 0], [0, 0, 1]])
    return np.asarray(z @ y @ x, np.float64)


def _record(rng: np.random.Generator, scene: Scene, path: recording.Poses, scale: float, folder: Path, number: int) -> None:
    for part in ("image_02/data", "oxts/data"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    n = len(path.seconds)
    angles = np.column_stack([TILT * recording.drifting(rng, (n, 2), 0.9), path.headings])
    light = recording.light_of_day(rng)
    velocity = np.gradient(path.places, axis=0) / STEP if n > 1 else np.zeros((n, 2))
    turn = np.gradient(np.unwrap(path.headings)) / STEP if n > 1 else np.zeros(n)
    degrees = scene.projection.to_degrees(path.places)
    for i in range(n):
        _take(scene, path.places[i], angles[i], scale, light, 1000 * number + i, folder / f"image_02/data/{i:010d}.png")
        ahead = np.array([np.cos(angles[i, 2]), np.sin(angles[i, 2])])
        yaw = float(np.arctan2(ahead[1], ahead[0]))
        speeds = [velocity[i, 1], velocity[i, 0], velocity[i] @ ahead, velocity[i] @ [-ahead[1], ahead[0]], 0.0]
        rest = [0.0, 0.0, 9.81, 0.0, 0.0, 9.81, 0.0, 0.0, turn[i], 0.0, 0.0, turn[i], 0.05, 0.02]
        row = [*degrees[i], 115.0, *angles[i, :2], yaw, *speeds, *rest]
        text = " ".join([f"{v:.13g}" for v in row] + ["4", "10", "4", "4", "4"])
        (folder / f"oxts/data/{i:010d}.txt").write_text(text + "\n", encoding="utf-8")
    times = "".join(f"2030-01-01 {10 + number % 12:02d}:{int(t) // 60:02d}:{t % 60:012.9f}\n" for t in path.seconds)
    for part in ("image_02", "oxts"):
        (folder / part / "timestamps.txt").write_text(times, encoding="utf-8")


def _take(scene: Scene, place: Doubles, angles: Doubles, scale: float, light: Light, seed: int, path: Path) -> None:
    rotation, translation = rig()
    to_world = unit_to_world(*angles) @ rotation.T
    position = np.array([*place, UNIT_HEIGHT]) - to_world @ translation
    width, height, focal, centre = image_size(scale)
    recording.take(scene.near, Camera(width, height, focal, centre, position, to_world), light, seed, path)


def image_size(scale: float) -> tuple[int, int, float, tuple[float, float]]:
    """Width, height, focal length and centre (integers at the centres of pixels) of the camera."""
    u, v = ((c + 0.5) * scale - 0.5 for c in CENTRE)
    return int(WIDTH * scale), int(HEIGHT * scale), FOCAL * scale, (u, v)


def _write_calibration(day: Path, scale: float) -> None:
    width, height, focal, (u, v) = image_size(scale)
    k = np.array([[focal, 0, u], [0, focal, v], [0, 0, 1]])
    lines = ["calib_time: 01-Jan-2030 00:00:00"]
    for camera, offset in ((0, np.zeros(3)), (2, BASELINE)):
        lines += [f"S_rect_{camera:02d}: {width:e} {height:e}", f"R_rect_{camera:02d}: {_row(np.eye(3))}"]
        lines.append(f"P_rect_{camera:02d}: {_row(np.column_stack([k, k @ offset]))}")
    (day / "calib_cam_to_cam.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, (rotation, translation) in (("imu_to_velo", IMU_TO_VELO), ("velo_to_cam", VELO_TO_CAM)):
        text = f"{lines[0]}\nR: {_row(rotation)}\nT: {_row(translation)}\n"
        (day / f"calib_{name}.txt").write_text(text, encoding="utf-8")


def _row(values: Doubles) -> str:
    return " ".join(f"{v:.12e}" for v in np.ravel(values))
