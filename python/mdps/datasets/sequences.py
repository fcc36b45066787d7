"""Sequences of T frames, cut from the tracks of scenes, and dealt to training, validation and test.

A track is cut where two frames are more than 30 s or 100 m apart, or time runs backwards; the pieces are divided into runs of T
frames, and what is left of a piece is too short and dropped. (The authors' loop also drops a run that fills the piece exactly;
this one does not.) Long sequences have T = 100, short ones T = 10.

Dealing is seeded, and knows what belongs together: the four views of a panorama show the same places, so that runs of
the same drive that overlap in time go to the same side. Short sequences are cut from what long ones for validation and
test do not use: no frame of a test is ever trained on. Another drive may have been to the same place.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .scene import Frame, Scene, Track

LONG = 100
SHORT = 10
MAX_SECONDS = 30.0
"""A longer pause cuts a track."""
MAX_METRES = 100.0
"""A longer step cuts a track."""
LONG_SHARES = (0.5, 0.2, 0.3)
"""Of the long sequences: for training, validation and test."""
SHORT_SHARES = (0.8, 0.2)
"""Of the short sequences: for training and validation."""


class Run(NamedTuple):
    """One sequence: T frames of a track, one after another."""

    scene: str
    track: str
    group: str
    frames: tuple[Frame, ...]

    @property
    def name(self) -> str:
        """scene/track/first frame, which is unique."""
        return f"{self.scene}/{self.track}/{self.frames[0].name}"

    @property
    def extent(self) -> float:
        """The larger side of the box around the positions, in metres."""
        xy = np.array([(f.x, f.y) for f in self.frames])
        return float((xy.max(0) - xy.min(0)).max())


class Splits(NamedTuple):
    """Sequences for training, validation and test."""

    train: list[Run]
    val: list[Run]
    test: list[Run]


def cut(track: Track, max_seconds: float = MAX_SECONDS, max_metres: float = MAX_METRES) -> list[Track]:
    """Cut a track where two frames are too far apart in time or in space, or time runs backwards.

    The pieces are in order and miss no frame.
    """
    if not track.frames:
        return []
    seconds = np.array([f.seconds for f in track.frames])
    xy = np.array([(f.x, f.y) for f in track.frames])
    dt = np.diff(seconds)
    far = (dt < 0) | (dt > max_seconds) | (np.hypot(*np.diff(xy, axis=0).T) > max_metres)
    ends = [0, *(np.flatnonzero(far) + 1), len(track.frames)]
    return [track._replace(frames=track.frames[a:b]) for a, b in pairwise(ends)]


def runs(scene: Scene, length: int, max_seconds: float = MAX_SECONDS, max_metres: float = MAX_METRES) -> list[Run]:
    """All sequences of `length` frames of a scene, in order; they do not overlap.

    Raises:
        ValueError: length less than 1.
    """
    if length < 1:
        raise ValueError(f"length: expected 1 or more frames, got {length}")
    pieces = [piece for track in scene.tracks for piece in cut(track, max_seconds, max_metres)]
    return [run for piece in pieces for run in divide(scene.name, piece, length)]


def divide(scene: str, piece: Track, length: int) -> list[Run]:
    """Divide a piece of a track into runs of `length` frames from its beginning; what is left at its end is dropped."""
    starts = range(0, len(piece.frames) - length + 1, length)
    return [Run(scene, piece.name, piece.group, piece.frames[s : s + length]) for s in starts]


def deal(items: Sequence[Run], shares: Sequence[float], seed: int) -> list[list[Run]]:
    """Deal sequences at random into parts of about these shares; the same arguments give the same parts.

    What overlaps in time in the same group stays together. A sequence's place in the shuffle depends on its name and
    the seed alone: another copy of the data that lacks some of them deals the others almost alike.

    Args:
        shares: of each part, >= 0, with a sum of 1.
        seed: any integer.

    Raises:
        ValueError: shares that are negative or have another sum.
    """
    if min(shares) < 0 or abs(sum(shares) - 1) > 1e-9:
        raise ValueError(f"shares: expected numbers >= 0 with a sum of 1, got {tuple(shares)}")
    parts = _together(items)
    keys = sorted(parts, key=lambda key: hashlib.sha256(f"{seed} {key}".encode()).digest())
    sizes = np.array([len(parts[key]) for key in keys])
    middles = (np.cumsum(sizes) - sizes / 2) / max(sizes.sum(), 1)  # where each group lies between 0 and 1
    which = np.searchsorted(np.cumsum(shares)[:-1], middles, side="right")
    return [[item for key, w in zip(keys, which) if w == k for item in parts[key]] for k in range(len(shares))]


def split_long(scenes: Iterable[Scene], seed: int, length: int = LONG) -> Splits:
    """Deal the long sequences of scenes: half of them for training, a fifth for validation, the rest for test."""
    return Splits(*deal([run for scene in scenes for run in runs(scene, length)], LONG_SHARES, seed))


def split_short(scenes: Sequence[Scene], seed: int, length: int = SHORT, long: int = LONG) -> Splits:
    """Deal the short sequences of scenes: 80 % for training, 20 % for validation, and those within long tests for test.

    Only frames that `split_long` with the same seed keeps from validation and test are trained on.
    """
    kept = split_long(scenes, seed, long)
    held_out = {(run.scene, run.group, frame.seconds) for run in kept.val + kept.test for frame in run.frames}
    free = [run for scene in scenes for run in runs(_without(scene, held_out), length)]
    train, val = deal(free, SHORT_SHARES, seed)
    tests = [Track(run.track, run.frames, run.group) for run in kept.test]
    test = [short for run, track in zip(kept.test, tests) for short in divide(run.scene, track, length)]
    return Splits(train, val, test)


def _together(items: Sequence[Run]) -> dict[str, list[Run]]:
    """Sequences that overlap in time in the same group of a scene, under the name of the group and their first second."""
    groups: dict[str, list[Run]] = {}
    for item in items:
        groups.setdefault(f"{item.scene}/{item.group}", []).append(item)
    together: dict[str, list[Run]] = {}
    for name, members in groups.items():
        end, key = -math.inf, ""
        for item in sorted(members, key=lambda item: (item.frames[0].seconds, item.name)):
            if item.frames[0].seconds > end:
                key = f"{name}/{item.frames[0].seconds:.3f}"
            end = max(end, item.frames[-1].seconds)
            together.setdefault(key, []).append(item)
    return together


def _without(scene: Scene, moments: set[tuple[str, str, float]]) -> Scene:
    """Return a scene without the frames of these moments, (scene, group, seconds); where some are gone, a track is cut."""
    tracks = []
    for track in scene.tracks:
        gone = np.array([(scene.name, track.group, f.seconds) in moments for f in track.frames], bool)
        ends = [0, *(np.flatnonzero(np.diff(gone)) + 1), len(gone)]
        tracks += [track._replace(frames=track.frames[a:b]) for a, b in pairwise(ends) if a < b and not gone[a]]
    return scene._replace(tracks=tuple(tracks))
