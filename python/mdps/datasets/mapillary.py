"""Mapillary Geo-Localization (MGL): one folder for each city, as OrienterNet's preparation writes it.

    <root>/splits_MGL_13loc.json                {"train": {scene: [image ids]}, "val": {...}}
    <root>/splits_MGL_v2_<scene>.json           or one file for each scene: {"train": [image ids], "val": [...]}
    <root>/<scene>/dump.json                    {sequence: {"views": {view: ...}, "cameras": {camera: ...}}}
    <root>/<scene>/images/<view>.jpg
    <root>/<scene>/map.npz or tiles.pkl         the map, as `mdps.maps` reads and writes it

A panorama is four views of 90 degrees, <image id>_{front,left,back,right}, in four sequences <sequence>_<direction>; every
other image is one view, <image id>_undistorted. In which direction "front" looks is different in every prepared copy: the yaw
of a view is read, never assumed. Files count principal points from the corner of the image; `Camera` counts from the centre of
its first pixel.

What is missing or wrong in one view, camera or sequence is left out and counted (`Scene.problems`); only a file that cannot be
read at all raises. Cost: about 60 us a view.
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..maps import Projection, RasterMap
from ..maps.errors import DataError
from .camera import MAX_TILT, Array, Camera, roll_pitch_yaw, wrap_degrees
from .reading import file_name, load_map, mapping, number, numbers, read_json
from .scene import Frame, Problems, Scene, Track

DIRECTIONS = ("front", "left", "back", "right")
"""The views of a panorama."""
MAX_OFF = 2.0
"""Degrees that a view of a panorama may look beside its quarter turn."""
SPLIT_FILE = "splits_MGL_13loc.json"
FARTHEST = 1e6
"""Metres from the origin beyond which nothing is a position."""
OTHER_ORIGIN = 0.1
"""Metres (median) from the views' positions to their latitudes and longitudes from which the map must have another origin.

The two agree to a few centimetres where the origin is the same: projections differ in what they do with altitudes.
"""


class View(NamedTuple):
    """A frame with what else the file says of it."""

    frame: Frame
    latlong: tuple[float, float] | None
    rotation: list[float] | None
    """R_c2w, row after row."""


def find_scenes(root: str | Path) -> list[Path]:
    """Return the folders with a dump.json, as absolute paths: `root` itself, or those in it, by name."""
    root = Path(os.path.abspath(root))
    if (root / "dump.json").exists():
        return [root]
    return sorted(path.parent for path in root.glob("*/dump.json")) if root.is_dir() else []


def read_scene(folder: str | Path, *, with_map: bool = True) -> Scene:
    """Read a scene: all views that can be used, in order of time.

    Args:
        folder: with dump.json in it.
        with_map: whether to load the map; without it, views outside of it are not found.

    Raises:
        DataError: dump.json is not there, or is not what it should be as a whole.
    """
    folder = Path(os.path.abspath(folder))  # the scene's name is the folder's, also of "."
    problems = Problems()
    sequences = mapping(read_json(folder / "dump.json"), f"{folder / 'dump.json'}: top level")
    raster = load_map(folder, problems) if with_map else None
    images = _images(folder, problems)
    tracks: list[tuple[str, list[View]]] = []
    seen: set[str] = set()
    n_listed = 0
    for name, sequence in sequences.items():
        found: list[View] = []
        n_listed += _n_views(sequence)
        for view in _views(name, sequence, folder, images, problems):
            if view.frame.name in seen:
                problems.add("view listed twice: the first one is used", view.frame.name)
                continue
            seen.add(view.frame.name)
            found.append(view)
        tracks.append((name, found))
    _compare_angles([view for _, found in tracks for view in found], problems)
    frames = _place(tracks, raster, problems)
    ordered = tuple(Track(n, tuple(sorted(f, key=lambda f: (f.seconds, f.name))), _group(n, f)) for n, f in frames if f)
    return Scene(folder.name, folder, ordered, raster.projection if raster else None, raster, n_listed, problems)


def read_splits(root: str | Path, scenes: Iterable[str]) -> dict[str, dict[str, set[int]]]:
    """Read which image ids are for training and validation: {"train": {scene: ids}, "val": {scene: ids}}.

    Both layouts are taken: one file for all scenes, or one for each, in the root or in the scene's folder. A scene that no file
    mentions has no ids.

    Raises:
        DataError: no file at all, or one that is not what it should be.
    """
    root, scenes = Path(root), list(scenes)
    splits: dict[str, dict[str, set[int]]] = {"train": {}, "val": {}}
    n_files = 0
    if (root / SPLIT_FILE).exists():
        n_files += 1
        content = mapping(read_json(root / SPLIT_FILE), f"{root / SPLIT_FILE}: top level")
        for part, of in splits.items():
            listed = mapping(content.get(part, {}), f"{root / SPLIT_FILE}: {part!r}")
            of |= {s: _ids(listed[s], f"{root / SPLIT_FILE}: {part!r}, {s!r}") for s in scenes if s in listed}
    for scene in scenes:
        name = f"splits_MGL_v2_{scene}.json"
        for path in (root / name, root / scene / name):
            if not path.exists():
                continue
            n_files += 1
            content = mapping(read_json(path), f"{path}: top level")
            for part, of in splits.items():
                of[scene] = of.get(scene, set()) | _ids(content.get(part, []), f"{path}: {part!r}")
    if not n_files:
        raise DataError(f"{root}: expected {SPLIT_FILE} or splits_MGL_v2_<scene>.json, found neither")
    return splits


def in_split(scene: Scene, ids: set[int]) -> Scene:
    """Return a scene with only the frames of these image ids; all views of a panorama have its id."""
    tracks = [track._replace(frames=tuple(f for f in track.frames if image_id(f.name) in ids)) for track in scene.tracks]
    return scene._replace(tracks=tuple(track for track in tracks if track.frames))


def join_views(scene: Scene) -> Scene:
    """Return a scene with panoramas alone: the frames that look to the front, with the other directions beside them.

    Panoramas of which a direction is missing, or looks elsewhere than a quarter turn from the next, are left out.
    """
    views: dict[tuple[str, str], dict[str, Frame]] = {}
    for track in scene.tracks:
        for frame in track.frames:
            image, _, direction = frame.name.rpartition("_")
            views.setdefault((track.group, image), {})[direction] = frame
    tracks = []
    for track in scene.tracks:
        found = [_panorama(views[track.group, f.name.rpartition("_")[0]]) for f in track.frames if f.name.endswith("_front")]
        tracks.append(track._replace(frames=tuple(frame for frame in found if frame)))
    return scene._replace(tracks=tuple(track for track in tracks if track.frames))


def _panorama(views: dict[str, Frame]) -> Frame | None:
    """The view to the front, with the others beside it, if all are there."""
    if set(DIRECTIONS) - set(views):
        return None
    front = views["front"]
    left = {direction: float(wrap_degrees(front.yaw - views[direction].yaw)) / 90 for direction in DIRECTIONS}
    turns = {round(turn) % 4: views[direction] for direction, turn in left.items()}
    is_off = max(abs(turn - round(turn)) for turn in left.values()) * 90 > MAX_OFF
    return None if is_off or len(turns) < len(DIRECTIONS) else front._replace(beside=(turns[1], turns[2], turns[3]))


def image_id(view: str) -> int | None:
    """Return the image's id from the name of a view; None where it has none."""
    head = view.rsplit("_", 1)[0]
    return int(head) if head.isascii() and head.isdigit() and len(head) <= 20 else None


def _ids(value: Any, where: str) -> set[int]:
    ids = [_id(v) for v in value] if isinstance(value, list) else [None]
    if any(i is None for i in ids):
        raise DataError(f"{where}: expected a list of image ids, got {str(value)[:40]!r}")
    return {i for i in ids if i is not None}


def _id(value: Any) -> int | None:
    text = str(value)
    return int(text) if not isinstance(value, bool) and text.isascii() and text.isdigit() and len(text) <= 20 else None


def _images(folder: Path, problems: Problems) -> dict[str, int]:
    """The image files by name, with their sizes in bytes."""
    try:
        with os.scandir(folder / "images") as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    except OSError:
        packed = (folder / "images.tar.gz").exists()
        hint = "unpack images.tar.gz there" if packed else "expected a folder images/ with <view>.jpg"
        problems.add("no folder of images", f"{folder / 'images'}: {hint}")
        return {}


def _views(name: str, sequence: Any, folder: Path, images: dict[str, int], problems: Problems) -> list[View]:
    """The usable views of a sequence, each with its latitude and longitude if it has them."""
    try:
        file_name(name)
        views = mapping(mapping(sequence, "sequence").get("views"), "views")
        cameras = _cameras(mapping(sequence.get("cameras"), "cameras"), problems)
    except DataError as error:
        problems.add(f"sequence that is not one ({error})", name)
        return []
    found = []
    for view_name, view in views.items():
        file = f"{view_name}.jpg"
        try:
            file_name(view_name)
            rotation = None if mapping(view, "view").get("R_c2w") is None else numbers(view["R_c2w"], "R_c2w", (3, 3))
            frame = _frame(view_name, view, rotation, cameras, folder / "images" / file, problems)
            latlong = _latlong(view)
        except DataError as error:
            problems.add(f"view left out ({error})", view_name)
            continue
        if file not in images:
            problems.add("image not there", file)
        elif not images[file]:
            problems.add("image file is empty", file)
        else:
            found.append(View(frame, latlong, rotation))
    return found


def _n_views(sequence: Any) -> int:
    views = sequence.get("views") if isinstance(sequence, dict) else None
    return len(views) if isinstance(views, dict) else 0


def _cameras(cameras: dict[str, Any], problems: Problems) -> dict[str, Camera]:
    """The cameras of a sequence that can be used."""
    usable = {}
    for name, value in cameras.items():
        try:
            entry = mapping(value, "camera")
            if entry.get("model") != "PINHOLE":
                raise DataError(f"model: expected 'PINHOLE', got {str(entry.get('model'))[:20]!r}")
            fx, fy, cx, cy = numbers(entry.get("params"), "params", (4,))
            width, height = number(entry.get("width"), "width"), number(entry.get("height"), "height")
            camera = Camera(int(width), int(height), fx, fy, cx - 0.5, cy - 0.5)
            if not camera.is_sensible:
                raise DataError("width, height, params: expected a size in pixels, and focal lengths that see 1 to 170 degrees")
        except DataError as error:
            problems.add(f"camera left out ({error})", name)
            continue
        usable[name] = camera
    return usable


def _frame(
    name: str,
    view: dict[str, Any],
    rotation: list[float] | None,
    cameras: dict[str, Camera],
    image: Path,
    problems: Problems,
) -> Frame:
    """One view; the position is that of t_c2w."""
    camera = cameras.get(view["camera_id"]) if isinstance(view.get("camera_id"), str) else None
    if camera is None:
        raise DataError("camera_id: no such camera")
    x, y, _ = numbers(view.get("t_c2w"), "t_c2w", (3,))
    if max(abs(x), abs(y)) > FARTHEST:
        raise DataError("t_c2w: expected metres around the scene")
    if view.get("roll_pitch_yaw") is not None:
        roll, pitch, yaw = numbers(view["roll_pitch_yaw"], "roll_pitch_yaw", (3,))
    elif rotation is not None and _are_rotations(np.array([rotation]))[0]:
        problems.add("no roll_pitch_yaw: taken from R_c2w", name)
        roll, pitch, yaw = map(float, roll_pitch_yaw(np.reshape(rotation, (3, 3))))
    else:
        raise DataError("roll_pitch_yaw, R_c2w: expected one of them")
    if not -180 <= yaw < 180:
        problems.add("yaw outside of [-180, 180): wrapped", f"{name}: {yaw:.4g}")
    roll, pitch, yaw = ((angle + 180.0) % 360.0 - 180.0 for angle in (roll, pitch, yaw))
    if max(abs(roll), abs(pitch)) > MAX_TILT:
        raise DataError(f"roll, pitch: beyond {MAX_TILT:.0f} degrees")
    milliseconds = number(view.get("capture_time"), "capture_time")
    if not 0 <= milliseconds < 1e14:
        raise DataError("capture_time: expected milliseconds since 1970")
    return Frame(name, image, camera, milliseconds / 1000, x, y, yaw, roll, pitch)


def _compare_angles(views: list[View], problems: Problems) -> None:
    """Tell where R_c2w says something else than roll_pitch_yaw, which is used."""
    given = [view for view in views if view.rotation is not None]
    if not given:
        return
    rotations = np.array([view.rotation for view in given])
    angles = np.array([(view.frame.roll, view.frame.pitch, view.frame.yaw) for view in given])
    good = _are_rotations(rotations)
    differ = np.abs(wrap_degrees(roll_pitch_yaw(rotations.reshape(-1, 3, 3)) - angles)).max(-1) > 1
    told = {"R_c2w that is no rotation": ~good, "roll_pitch_yaw is not that of R_c2w by more than 1 degree": good & differ}
    for reason, which in told.items():
        if which.any():
            problems.add(reason, given[int(np.argmax(which))].frame.name, int(which.sum()))


def _are_rotations(rotations: Array) -> NDArray[np.bool_]:
    """Which of n times 9 numbers are a rotation, (n)."""
    r = rotations.reshape(-1, 3, 3)
    square = np.abs(r).max((1, 2)) <= 2  # larger numbers could overflow
    r = np.where(square[:, None, None], r, 0)
    return square & (np.abs(r @ r.swapaxes(1, 2) - np.eye(3)).max((1, 2)) < 1e-3) & (np.linalg.det(r) > 0)


def _latlong(view: dict[str, Any]) -> tuple[float, float] | None:
    if view.get("latlong") is None:
        return None
    latitude, longitude = numbers(view["latlong"], "latlong", (2,))
    if not (abs(latitude) <= 90 and abs(longitude) <= 180):
        raise DataError("latlong: expected degrees, latitude first")
    return latitude, longitude


def _place(tracks: list[tuple[str, list[View]]], raster: RasterMap | None, problems: Problems) -> list[tuple[str, list[Frame]]]:
    """Frames in the frame of the map, without those outside of it.

    The positions in the file are relative to an origin that the file does not name. Where latitudes and longitudes say that the
    map has another one, positions are made from them, and views without them are left out.
    """
    if raster is None:
        return [(name, [view.frame for view in found]) for name, found in tracks]
    views = [(i, view) for i, (_, found) in enumerate(tracks) for view in found]
    if not views:
        return []
    xy = np.array([(view.frame.x, view.frame.y) for _, view in views])
    known, made = _to_metres(raster.projection, [view.latlong for _, view in views])
    apart = float(np.hypot(*np.median((made - xy)[known], axis=0))) if known.any() else 0.0
    moved = apart > OTHER_ORIGIN
    if moved:
        reason = "position made from latlong: the map has another origin than t_c2w"
        problems.add(reason, f"{apart:.4g} m apart", int(known.sum()))
        xy[known] = made[known]
    kept: list[list[Frame]] = [[] for _ in tracks]
    for (i, view), (x, y), inside, is_known in zip(views, xy.tolist(), raster.box.contains(xy), known):
        if moved and not is_known:
            problems.add("view left out (no usable latlong, and the map has another origin than t_c2w)", view.frame.name)
        elif inside:
            kept[i].append(view.frame._replace(x=x, y=y))
        else:
            problems.add("view outside of the map", f"{view.frame.name} at {x:.0f}, {y:.0f} m")
    return [(name, frames) for (name, _), frames in zip(tracks, kept)]


def _to_metres(projection: Projection, places: list[tuple[float, float] | None]) -> tuple[NDArray[np.bool_], Array]:
    """Which places are given and near enough to have a position, and the positions (n, 2), 0 for the others."""
    degrees = np.array([(math.nan, math.nan) if place is None else place for place in places])
    known = projection.sees(degrees)
    metres = np.zeros((len(places), 2))
    metres[known] = projection.to_metres(degrees[known])
    return known, metres


def _group(name: str, frames: list[Frame]) -> str:
    """The sequence's name without the direction, if its views are those of panoramas."""
    for direction in DIRECTIONS:
        if name.endswith(f"_{direction}") and frames[0].name.endswith(f"_{direction}"):
            return name[: -len(direction) - 1]
    return name
