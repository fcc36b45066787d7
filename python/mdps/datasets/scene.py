"""What is read from a folder: scenes of tracks of frames, the same for every format, and what had to be left out.

A `Frame` is one image with its camera and pose. A `Track` is what one camera recorded, in order of time, with whatever gaps
it has. A `Scene` is a place: its tracks, its map, and a record of everything that was found wanting. Reading a scene never
fails because of one bad frame: that frame is left out and counted, under a short reason, with one example.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..maps import Projection, RasterMap
from .camera import Camera


class Frame(NamedTuple):
    """One image of a track."""

    name: str
    image: Path
    camera: Camera
    seconds: float
    """When it was taken, since the epoch of the format."""
    x: float
    """East, in metres, in the map's frame."""
    y: float
    """North, in metres."""
    yaw: float
    """Degrees, clockwise from North, in [-180, 180)."""
    roll: float
    """Degrees."""
    pitch: float
    shift: tuple[float, float, float] | None = None
    """KITTI's fixed initial errors of the frame: along the heading, across it, and of the angle, each in [-1, 1]."""
    beside: tuple["Frame", ...] = ()
    """What was seen at the same time and place in other directions, each a quarter turn farther to the left; if joined."""


class Track(NamedTuple):
    """Frames of one camera in order of time."""

    name: str
    frames: tuple[Frame, ...]
    group: str
    """Tracks of one group show the same places at the same times (the four views of a panorama): never split them."""


class Problems:
    """A tally of what was left out or looks wrong: for each reason how often, and one example."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, str] = {}

    def add(self, reason: str, example: str, n: int = 1) -> None:
        """Count `n` more cases of `reason`; the first example is kept."""
        self.counts[reason] = self.counts.get(reason, 0) + n
        shown = "".join(c if c.isprintable() else "?" for c in example)  # it may come from a file
        self.examples.setdefault(reason, shown if len(shown) <= 120 else shown[:117] + "...")

    def merge(self, other: "Problems") -> None:
        """Add the cases of another tally."""
        for reason, count in other.counts.items():
            self.add(reason, other.examples[reason], count)

    def __len__(self) -> int:
        return len(self.counts)

    def __str__(self) -> str:
        return "\n".join(f"{n} x {reason}, e.g. {self.examples[reason]}" for reason, n in self.counts.items())


class Scene(NamedTuple):
    """A place with what was recorded there."""

    name: str
    path: Path
    tracks: tuple[Track, ...]
    projection: Projection | None
    """Of the map, else what the format says; None where there is neither."""
    map: RasterMap | None
    n_listed: int
    """Frames that the files name, usable or not."""
    problems: Problems

    @property
    def n_frames(self) -> int:
        """Frames that can be used."""
        return sum(len(track.frames) for track in self.tracks)

    @property
    def is_usable(self) -> bool:
        """Whether there is something to localize, and a map to do it on."""
        return self.map is not None and self.n_frames > 0


def fingerprint(scenes: Iterable[Scene]) -> str:
    """A stable hash, 16 hexadecimal digits, of the frames and maps of scenes.

    It depends on scenes, names of frames, times, poses to a millimetre and a thousandth of a degree, cameras to a thousandth of
    a pixel, KITTI's fixed initial errors to a millionth, the sizes of the image files in bytes, every pixel of the maps, and
    where the maps lie, to a millimetre; not on where the folder lies, nor on the order in which anything is listed. Results on
    two copies of a data set can be compared only where this is the same.

    Cost: about 15 us a frame (one look at each file), and 2 s a GB of map. The scenes are looked at one after another.
    """
    digests = sorted(_digest(scene) for scene in scenes)
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


def _digest(scene: Scene) -> bytes:
    digest = hashlib.sha256(f"scene {scene.name}\n".encode())
    for track in sorted(scene.tracks, key=lambda t: t.name):
        digest.update(f"track {track.name}\n".encode())
        for frame in track.frames:
            taken = _rounded(1e3, (frame.x, frame.y, frame.yaw, frame.roll, frame.pitch, frame.seconds, *frame.camera))
            shift = _rounded(1e6, frame.shift or ())
            digest.update(f"{frame.name} {taken} shift {shift} {_size(frame.image)}\n".encode())
    if scene.map is not None:
        box, origin = scene.map.box, scene.map.projection
        place = _rounded(1e3, (box.x_min, box.y_min, box.x_max, box.y_max))
        place += f" around {_rounded(1e9, (origin.latitude, origin.longitude))}"
        digest.update(f"map {scene.map.classes.shape} {scene.map.pixels_per_metre:.6f} {place}\n".encode())
        digest.update(np.ascontiguousarray(scene.map.classes).data)
    return digest.digest()


def _rounded(scale: float, values: Iterable[float]) -> str:
    """Numbers in whole steps of 1 / scale: the same text where two machines compute them with other errors of rounding."""
    return " ".join(f"{round(value * scale)}" for value in values)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
