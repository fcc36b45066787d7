"""The state of a data set on one page: what is there, what is missing, what looks wrong, and its fingerprint.

Works on whatever part of MGL or KITTI a folder holds; nothing in it makes it fail. Cost: that of reading the scenes.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..maps import AREAS, NODES, WAYS
from ..maps.errors import DataError
from . import kitti, mapillary
from .camera import wrap_degrees
from .reading import read_image
from .scene import Problems, Scene, Track, fingerprint
from .sequences import LONG, SHORT, runs

MOST_PROBLEMS = 20
"""Lines of problems of a scene."""
SAMPLED_IMAGES = 8
"""Images of a scene that are opened."""
MAX_SPEED = 60.0
"""Metres a second between two frames that nobody drives in a city."""


def check(root: str | Path) -> str:
    """Return a report on a folder of MGL or KITTI, or of one MGL scene, as lines of text.

    Its fingerprint is that of a data module of all scenes of the folder, which are those with a map and usable frames. A module
    of some of them alone has another one.

    Raises:
        DataError: no such folder, or nothing of either kind in it.
    """
    root = Path(os.path.abspath(root))
    if not root.is_dir():
        raise DataError(f"{root}: no such folder")
    folders = mapillary.find_scenes(root)
    if folders:
        return _mapillary(root, folders)
    if kitti.is_root(root):
        return _kitti(root)
    raise DataError(f"{root}: neither MGL (folders with a dump.json) nor KITTI (folders of days, or train_files.txt, ...)")


def _mapillary(root: Path, folders: list[Path]) -> str:
    lines = [f"{root}: MGL, {len(folders)} scene{'s' if len(folders) > 1 else ''}"]
    seen: dict[str, set[int | None]] = {}
    n_usable = 0

    def scenes() -> Iterator[Scene]:  # one after another: the maps of all would fill the memory
        nonlocal n_usable
        for folder in folders:
            try:
                scene = mapillary.read_scene(folder)
            except DataError as error:
                lines.extend(["", f"{folder.name}: cannot be read", f"  {error}"])
                continue
            lines.extend(["", *_scene(scene)])
            seen[scene.name] = {mapillary.image_id(frame.name) for track in scene.tracks for frame in track.frames}
            if scene.is_usable:  # as a data module takes them
                n_usable += 1
                yield scene

    known = fingerprint(scenes())
    of = "" if n_usable == len(folders) else f"of the {n_usable} of {len(folders)} scenes with a map and usable frames  "
    told = f"fingerprint  {of}{known if n_usable else 'none'}"
    return "\n".join([*lines, "", *_mapillary_splits(root if folders != [root] else root.parent, seen), told])


def _kitti(root: Path) -> str:
    scene = kitti.read_drives(root)
    lines = [f"{root}: KITTI raw, {len(scene.tracks)} drive{'s' if len(scene.tracks) != 1 else ''} with usable frames", ""]
    lines += _scene(scene)
    lists = []
    for part, name in kitti.SPLIT_FILES.items():
        if not (root / name).exists():
            lines.append(f"{name:<16} not there (for {part})")
            continue
        try:
            listed = kitti.read_drives(root, root / name, raster=scene.map, with_map=False)
        except DataError as error:
            lines.append(f"{name:<16} cannot be read: {error}")
            continue
        lists.append(listed)
        lines.append(f"{name:<16} {_counts(listed)}")
        lines += [f"  {line}" for line in _listed(listed.problems)]
    if lists:
        lines.append(f"fingerprint of the lists  {fingerprint(lists)}")
    return "\n".join([*lines, f"fingerprint  {fingerprint([scene])}"])


def _mapillary_splits(root: Path, seen: dict[str, set[int | None]]) -> list[str]:
    """What the split files say of the images that are there."""
    try:
        splits = mapillary.read_splits(root, seen)
    except DataError as error:
        return [f"split files  {error}"]
    lines = []
    for part, of in splits.items():
        n_listed = sum(map(len, of.values()))
        n_there = sum(len(ids & seen[name]) for name, ids in of.items())
        lines.append(f"split {part:<6} {n_listed} images, {n_there} of them usable")
    return lines


def _scene(scene: Scene) -> list[str]:
    """The paragraph of a scene."""
    problems = Problems()
    problems.merge(scene.problems)
    _look_at_frames(scene, problems)
    _look_at_images(scene, problems)
    lines = [f"{scene.name}: {_counts(scene)}"]
    lines += [f"  {line}" for line in (*_extent(scene), *_cameras(scene), *_map(scene))]
    return lines + [f"  {line}" for line in (_listed(problems) or ["nothing is wrong"])]


def _counts(scene: Scene) -> str:
    sequences = ", ".join(f"{len(runs(scene, n))} of {n}" for n in (SHORT, LONG))
    return f"{scene.n_frames} of {scene.n_listed} frames usable in {len(scene.tracks)} tracks; sequences: {sequences}"


def _extent(scene: Scene) -> list[str]:
    frames = [frame for track in scene.tracks for frame in track.frames]
    if not frames:
        return []
    xy, seconds = np.array([(f.x, f.y) for f in frames]), np.array([f.seconds for f in frames])
    steps = np.concatenate([np.diff([f.seconds for f in t.frames]) for t in scene.tracks])
    metres = np.concatenate(
        [np.hypot(*np.diff([(f.x, f.y) for f in t.frames], axis=0).T) for t in scene.tracks if len(t.frames) > 1] or [[]]
    )
    (width, height), days = xy.max(0) - xy.min(0), (seconds.max() - seconds.min()) / 86400
    line = f"positions over {width:.0f} x {height:.0f} m, times over {days:.1f} days"
    if len(metres):
        line += (
            f"; between frames {np.median(metres):.1f} m and {np.median(steps):.2f} s (median), at most {metres.max():.0f} m"
        )
    return [line]


def _cameras(scene: Scene) -> list[str]:
    frames = [frame for track in scene.tracks for frame in track.frames]
    if not frames:
        return []
    sizes = sorted({f"{f.camera.width} x {f.camera.height}" for f in frames})
    shown = ", ".join(sizes[:3]) + (f" and {len(sizes) - 3} other sizes" if len(sizes) > 3 else "")
    views = np.degrees(2 * np.arctan(np.array([f.camera.width / 2 / f.camera.fx for f in frames])))
    roll, pitch = np.abs([(f.roll, f.pitch) for f in frames]).max(0)
    view = f"{views.min():.0f}" if views.max() - views.min() < 1 else f"{views.min():.0f} to {views.max():.0f}"
    return [f"images of {shown} pixels, {view} degrees wide; roll within {roll:.1f}, pitch within {pitch:.1f} degrees"]


def _map(scene: Scene) -> list[str]:
    if scene.map is None:
        return ["map: none"]
    raster = scene.map
    height, width = raster.classes.shape[1:]
    known = (raster.classes > 0).mean((1, 2))
    building = (raster.classes[0] == AREAS.index("building") + 1).mean()
    groups = {"areas": AREAS, "ways": WAYS, "nodes": NODES}
    seen = [f"{name} {len(np.unique(c[c > 0]))} of {len(groups[name])}" for name, c in zip(groups, raster.classes)]
    place = f"{raster.projection.latitude:.5f}, {raster.projection.longitude:.5f}"
    return [
        f"map: {width} x {height} pixels, {raster.pixels_per_metre:g} a metre, origin {place}",
        f"     {building:.1%} building, {known[1]:.1%} ways; classes: {', '.join(seen)}",
    ]


def _look_at_frames(scene: Scene, problems: Problems) -> None:
    """Tilts that nobody measured, speeds that nobody drives, cars that drive sideways."""
    for track in scene.tracks:
        if len(track.frames) < 2:
            continue
        if all(frame.roll == 0 and frame.pitch == 0 for frame in track.frames):
            problems.add("track whose roll and pitch are all 0: were they measured?", track.name)
        seconds, xy = np.array([f.seconds for f in track.frames]), np.array([(f.x, f.y) for f in track.frames])
        dt, metres = np.diff(seconds), np.hypot(*np.diff(xy, axis=0).T)
        if (dt < 0).any():
            problems.add("time that runs backwards", track.frames[int(np.argmax(dt < 0)) + 1].name, int((dt < 0).sum()))
        jumps = (metres > MAX_SPEED * np.maximum(dt, 0.05)) & (metres > 10)
        if jumps.any():
            name = track.frames[int(np.argmax(jumps)) + 1].name
            problems.add(f"jump faster than {MAX_SPEED:.0f} m/s", f"{track.name}: to {name}", int(jumps.sum()))
        if scene.name == "kitti":
            _look_at_headings(track, problems)


def _look_at_headings(track: Track, problems: Problems) -> None:
    """The camera of a car looks where the car drives."""
    steps = np.diff([(f.x, f.y) for f in track.frames], axis=0)
    moving = np.hypot(*steps.T) > 0.5
    if moving.any():
        direction = np.degrees(np.arctan2(steps[:, 0], steps[:, 1]))
        aside = np.abs(wrap_degrees(direction - [f.yaw for f in track.frames[:-1]]))[moving]
        if np.median(aside) > 30:
            problems.add("drive whose camera does not look ahead", f"{track.name}: {np.median(aside):.0f} degrees (median)")


def _look_at_images(scene: Scene, problems: Problems) -> None:
    """Open a few images."""
    frames = [frame for track in scene.tracks for frame in track.frames]
    for i in sorted({round(i) for i in np.linspace(0, len(frames) - 1, SAMPLED_IMAGES)}) if frames else []:
        try:
            read_image(frames[i].image, frames[i].camera)
        except DataError as error:
            problems.add(f"image that cannot be used, of {min(SAMPLED_IMAGES, len(frames))} that were opened", str(error))


def _listed(problems: Problems) -> list[str]:
    lines = str(problems).splitlines()
    more = len(lines) - MOST_PROBLEMS
    return lines[:MOST_PROBLEMS] + ([f"... and {more} other reasons"] if more > 0 else [])
