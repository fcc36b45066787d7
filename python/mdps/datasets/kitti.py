"""KITTI raw drives, as they are distributed, with the split files that cross-view localization uses.

    <root>/<date>/calib_{cam_to_cam,imu_to_velo,velo_to_cam}.txt
    <root>/<date>/<drive>/image_02/data/<frame, 10 digits>.png         the left colour camera, rectified
    <root>/<date>/<drive>/image_02/timestamps.txt
    <root>/<date>/<drive>/oxts/data/<frame>.txt                        latitude, longitude, altitude, roll, pitch, yaw, ...
    <root>/{train,test1,test2}_files.txt                               lines: <date>/<drive>/<frame>.png [shift shift turn]
    <root>/map.npz or tiles.pkl                                        one map of all drives

The pose of the camera follows from that of the GPS/IMU unit, where a point x of the unit's axes is
R_rect [R_velo_to_cam (R_imu_to_velo x + T_imu_to_velo) + T_velo_to_cam] + K^-1 P[:, 3] in those of the rectified camera, and
Rz(yaw) Ry(pitch) Rx(roll) x + t in the world. The unit's yaw is in radians, counter-clockwise from East, and its pitch is
positive when the front points down. KITTI's principal points count from the centre of the first pixel, as `Camera` does.

A split file is a list of frames, not of sequences: test1 is a sample with duplicates and gaps. Here each drive's frames are
sorted, duplicates are dropped (the first line counts), and every frame keeps its time, so that gaps can be seen and cut.

What is missing or wrong in one line, frame or drive is left out and counted. Cost: about 90 us a frame.
Source: Geiger, Lenz, Stiller, Urtasun, "Vision meets robotics: the KITTI dataset", IJRR 2013.
"""

import re
from calendar import timegm
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..maps import Box, Projection, RasterMap
from ..maps.errors import DataError
from .camera import MAX_TILT, Array, Camera, heading_of, roll_pitch_yaw
from .reading import load_map, read_text
from .scene import Frame, Problems, Scene, Track

SPLIT_FILES = {"train": "train_files.txt", "val": "test1_files.txt", "test": "test2_files.txt"}
"""Which list is used for what; test1 shows the places of train, test2 others."""
SECONDS = 0.1
"""Between two frames, where a drive has no file of times."""
MOST_LEVER = 100.0
"""Metres from the GPS/IMU unit to the camera that no car has."""
MAP_MARGIN = 512.0
"""Metres of map around all drives."""

_DATE = re.compile(r"\d{4}_\d\d_\d\d")
_DRIVE = re.compile(r"\d{4}_\d\d_\d\d_drive_\d{4}_(?:sync|extract)")
_FRAME = re.compile(r"(\d{10})\.png")
_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d(?:\.\d+)?)")


class Calibration(NamedTuple):
    """The left colour camera of a day, and how it sits in the car."""

    camera: Camera
    rotation: Array
    """(3, 3): from the axes of the GPS/IMU unit to those of the camera."""
    translation: Array
    """(3,): the unit's origin in the camera's axes, in metres."""


class Listed(NamedTuple):
    """One line of a split file."""

    date: str
    drive: str
    frame: int
    shift: tuple[float, float, float] | None


def is_root(root: str | Path) -> bool:
    """Whether a folder looks like KITTI raw data: it has split files or folders of days."""
    root = Path(root)
    if not root.is_dir():
        return False
    return any((root / name).exists() for name in SPLIT_FILES.values()) or any(_DATE.fullmatch(p.name) for p in root.iterdir())


def read_drives(
    root: str | Path, split: str | Path | None = None, *, with_map: bool = True, raster: RasterMap | None = None
) -> Scene:
    """Read drives as one scene, "kitti", with one track for each drive.

    Args:
        root: the folder of the days.
        split: a file of frames; None: every image of every drive.
        with_map: whether to load the map. Without one, the origin of the map's frame is the middle of all drives.
        raster: the map, where it is loaded already.

    Raises:
        DataError: no such folder, or the split file cannot be read at all.
    """
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"{root}: no such folder")
    problems = Problems()
    listed = read_split(split, problems) if split is not None else _all_frames(root)
    if raster is None and with_map:
        raster = load_map(root, problems)
    projection = raster.projection if raster else None
    if projection is None and listed:
        area = map_area(root)
        projection = area[0] if area else None
    drives: dict[tuple[str, str], dict[int, Listed]] = {}
    for line in listed:
        frames = drives.setdefault((line.date, line.drive), {})
        if line.frame in frames:
            problems.add("frame listed twice: the first line counts", f"{line.drive}/{line.frame:010d}")
        frames.setdefault(line.frame, line)
    tracks = []
    for (date, drive), frames in sorted(drives.items()):
        if projection is None:
            problems.add("frame left out (no drive has a usable position)", drive, len(frames))
            continue
        track = _track(root / date, drive, frames, projection, problems)
        if raster is not None and track.frames:
            inside = raster.box.contains(np.array([(f.x, f.y) for f in track.frames]))
            if not inside.all():
                problems.add(
                    "frame outside of the map", f"{drive}/{track.frames[int(np.argmin(inside))].name}", int((~inside).sum())
                )
                track = track._replace(frames=tuple(f for f, is_in in zip(track.frames, inside) if is_in))
        if track.frames:
            tracks.append(track)
    return Scene("kitti", root, tuple(tracks), projection, raster, len(listed), problems)


def read_split(path: str | Path, problems: Problems) -> list[Listed]:
    """Read a split file: frames, with the fixed initial errors that test1 and test2 have. Lines that are none are counted.

    Raises:
        DataError: it is not there, or cannot be read.
    """
    listed = []
    for i, line in enumerate(read_text(Path(path)).splitlines(), 1):
        words = line.split()
        if not words:
            continue
        try:
            listed.append(_listed(words))
        except ValueError:
            expected = "expected <date>/<drive>/<frame>.png and no or three numbers in [-1, 1]"
            problems.add(f"line of the split file left out ({expected})", f"{path}:{i}: {line.strip()}")
    return listed


def read_calibration(folder: str | Path, camera: int = 2) -> Calibration:
    """Read the calibration of a day, of camera 0 to 3.

    Raises:
        DataError: a file is not there, or lacks an entry, or an entry has not as many numbers as it should, or no such ones.
    """
    folder = Path(folder)
    cam = _entries(folder / "calib_cam_to_cam.txt", {f"P_rect_{camera:02}": 12, f"S_rect_{camera:02}": 2, "R_rect_00": 9})
    velo, imu = (_entries(folder / f"calib_{name}.txt", {"R": 9, "T": 3}) for name in ("velo_to_cam", "imu_to_velo"))
    projection, rectified = cam[f"P_rect_{camera:02}"].reshape(3, 4), cam["R_rect_00"].reshape(3, 3)
    width, height = cam[f"S_rect_{camera:02}"]
    pinhole = Camera(int(width), int(height), *(float(projection[i]) for i in ((0, 0), (1, 1), (0, 2), (1, 2))))
    if not pinhole.is_sensible:
        file = folder / "calib_cam_to_cam.txt"
        raise DataError(f"{file}: expected a size in pixels, and focal lengths that see 1 to 170 degrees")
    to_cam = velo["R"].reshape(3, 3)
    with np.errstate(all="ignore"):
        rotation = rectified @ to_cam @ imu["R"].reshape(3, 3)
        try:
            offset = np.linalg.solve(projection[:, :3], projection[:, 3])
        except np.linalg.LinAlgError:
            offset = np.full(3, np.inf)
        translation = offset + rectified @ (to_cam @ imu["T"] + velo["T"])
        is_rigid = np.abs(rotation @ rotation.T - np.eye(3)).max() < 1e-2 and np.abs(translation).max() < MOST_LEVER
    if not is_rigid:  # NaN neither
        raise DataError(f"{folder}: expected calibrations that are rotations, and less than {MOST_LEVER:.0f} m")
    return Calibration(pinhole, rotation, translation)


def camera_poses(xy: Array, angles: Array, calibration: Calibration) -> tuple[Array, Array]:
    """Poses of the camera from those of the GPS/IMU unit.

    Args:
        xy: (n, 2), the unit's position in the map's frame, in metres.
        angles: (n, 3), its roll, pitch and yaw in radians, as KITTI writes them.

    Returns:
        positions (n, 2) in metres; roll, pitch, yaw (n, 3) in degrees, in the conventions of `Camera`.
    """
    to_world = _unit_to_world(angles) @ calibration.rotation.T
    positions = np.concatenate([xy, np.zeros((len(xy), 1))], 1) - to_world @ calibration.translation
    return positions[:, :2], roll_pitch_yaw(to_world)


GUESS_METRES, GUESS_DEGREES = 20.0, 10.0
"""How far a first guess that a split file lists is off at most, in either direction, and in its heading."""


def initial_errors(shifts: Array, yaw: Array, max_metres: float = GUESS_METRES, max_degrees: float = GUESS_DEGREES) -> Array:
    """The fixed errors of a first guess that a split file lists, in the map's frame.

    Args:
        shifts: (n, 3), numbers in [-1, 1]: along the heading, to its left, and of the yaw (clockwise).
        yaw: (n,), degrees.
        max_metres, max_degrees: what 1 stands for; the numbers of the usual evaluation.

    Returns:
        (n, 3): what to add to x and y, in metres, and to the heading, in radians (counter-clockwise).
    """
    heading = heading_of(yaw)
    cos, sin = np.cos(heading), np.sin(heading)
    along, left = max_metres * shifts[:, 0], max_metres * shifts[:, 1]
    turn = -np.radians(max_degrees) * shifts[:, 2]
    return np.stack([cos * along - sin * left, sin * along + cos * left, turn], 1)


def map_area(root: str | Path) -> tuple[Projection, Box] | None:
    """The origin and the area of a map of all drives in a folder: their middle, and 512 m around; None without drives."""
    places = []
    for path in Path(root).glob("*/*/oxts/data/*.txt"):
        try:
            places.append(_oxts(path)[:2])
        except DataError:
            continue
    if not places:
        return None
    degrees = np.array(places)
    projection = Projection(*(degrees.min(0) + degrees.max(0)) / 2)
    xy = projection.to_metres(degrees[projection.sees(degrees)])
    return projection, Box(*xy.min(0), *xy.max(0)).grown(MAP_MARGIN)


def _track(day: Path, drive: str, frames: dict[int, Listed], projection: Projection, problems: Problems) -> Track:
    """The frames of a drive that can be used."""
    folder = day / drive
    if not folder.is_dir():
        problems.add("drive not there", str(folder))
        problems.add("frame left out (drive not there)", f"{drive}/{min(frames):010d}", len(frames))
        return Track(drive, (), drive)
    try:
        calibration = read_calibration(day)
    except DataError as error:
        problems.add("frame left out (no calibration)", str(error), len(frames))
        return Track(drive, (), drive)
    times = _times(folder, problems)
    usable, readings = [], []
    for number in sorted(frames):
        image = folder / f"image_02/data/{number:010d}.png"
        try:
            if not image.is_file():
                raise DataError("image not there")
            reading = _oxts(folder / f"oxts/data/{number:010d}.txt")
            if not projection.sees(reading[:2]):
                raise DataError("position far away from the map")
        except DataError as error:
            problems.add(
                f"frame left out ({str(error).removeprefix(f'{folder}/oxts/data/{number:010d}.txt: ')})",
                f"{drive}/{number:010d}",
            )
            continue
        usable.append((number, image))
        readings.append(reading)
    if not usable:
        return Track(drive, (), drive)
    unit = np.array(readings)
    xy, angles = camera_poses(projection.to_metres(unit[:, :2]), unit[:, 3:6], calibration)
    if times is not None and usable[-1][0] >= len(times):  # the clock of some, and another one for the rest, would mix
        problems.add("more frames than times: 0.1 s between frames", f"{drive}: {len(times)} times")
        times = None
    made = []
    for (number, image), (x, y), (roll, pitch, yaw) in zip(usable, xy.tolist(), angles.tolist()):
        if max(abs(roll), abs(pitch)) > MAX_TILT:
            problems.add(f"frame left out (roll, pitch: beyond {MAX_TILT:.0f} degrees)", f"{drive}/{number:010d}")
            continue
        seconds = number * SECONDS if times is None else times[number]
        made.append(Frame(f"{number:010d}", image, calibration.camera, seconds, x, y, yaw, roll, pitch, frames[number].shift))
    return Track(drive, tuple(made), drive)


def _times(folder: Path, problems: Problems) -> list[float] | None:
    """Seconds since 1970 of the frames of a drive, one a line; None where no file says them."""
    for path in (folder / "image_02/timestamps.txt", folder / "oxts/timestamps.txt"):
        if not path.exists():
            continue
        try:
            return [_seconds(line) for line in read_text(path).rstrip().splitlines()]
        except ValueError as error:
            problems.add("times that cannot be read: 0.1 s between frames", f"{path}: {error}")
            return None
    problems.add("no file of times: 0.1 s between frames", folder.name)
    return None


def _seconds(line: str) -> float:
    """Take a time apart, as in 2011-09-26 13:08:24.967930880; ValueError if it is none."""
    found = _TIME.fullmatch(line.strip())
    if found is None:
        raise ValueError(f"expected a date and a time, got {line.strip()[:30]!r}")
    year, month, day, hour, minute = map(int, found.groups()[:5])
    return timegm((year, month, day, hour, minute, 0)) + float(found[6])


def _oxts(path: Path) -> list[float]:
    """Latitude and longitude in degrees, altitude in metres, roll, pitch and yaw in radians."""
    try:
        words = read_text(path).split()
        values = [float(word) for word in words[:6]]
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        values = []
    if len(values) < 6 or not np.isfinite(values).all() or not (abs(values[0]) <= 90 and abs(values[1]) <= 180):
        raise DataError(f"{path}: expected latitude, longitude, altitude, roll, pitch, yaw, ...")
    return values


def _entries(path: Path, sizes: dict[str, int]) -> dict[str, Array]:
    """The numbers of these entries of a calibration file, NAME: NUMBER NUMBER ..."""
    found = {}
    for line in read_text(path).splitlines():
        name, _, rest = line.partition(":")
        if name.strip() in sizes:
            try:
                found[name.strip()] = np.array([float(word) for word in rest.split()])
            except ValueError:
                continue
    for name, size in sizes.items():
        if name not in found or found[name].size != size or not np.isfinite(found[name]).all():
            got = f"{found[name].size} values" if name in found else "none"
            raise DataError(f"{path}: {name}: expected {size} finite numbers, got {got}")
    return found


def _listed(words: list[str]) -> Listed:
    """Take a line apart; ValueError if it is none."""
    date, drive, file = words[0].split("/")
    frame = _FRAME.fullmatch(file)
    if not (_DATE.fullmatch(date) and _DRIVE.fullmatch(drive) and frame) or len(words) not in (1, 4):
        raise ValueError
    if len(words) == 1:
        return Listed(date, drive, int(frame[1]), None)
    along, left, turn = (float(word) for word in words[1:])
    if not all(abs(value) <= 1 for value in (along, left, turn)):
        raise ValueError
    return Listed(date, drive, int(frame[1]), (along, left, turn))


def _all_frames(root: Path) -> list[Listed]:
    images = (path for path in root.glob("*/*/image_02/data/*.png") if _FRAME.fullmatch(path.name))
    parts = ((path.parts[-5], path.parts[-4], int(path.stem)) for path in images)
    return [Listed(date, drive, frame, None) for date, drive, frame in sorted(parts) if _DRIVE.fullmatch(drive)]


def _unit_to_world(angles: Array) -> Array:
    """Rz(yaw) Ry(pitch) Rx(roll) of angles (n, 3) in radians, (n, 3, 3)."""
    (sr, sp, sy), (cr, cp, cy) = np.sin(angles.T), np.cos(angles.T)
    rows = [
        [cy * cp, cy * sp * sr - sy * cr, cy * sp * cr + sy * sr],
        [sy * cp, sy * sp * sr + cy * cr, sy * sp * cr - cy * sr],
        [-sp, cp * sr, cp * cr],
    ]
    return np.stack([np.stack(row, -1) for row in rows], -2)
