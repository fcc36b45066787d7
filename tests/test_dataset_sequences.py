"""Sequences: where tracks are cut, what stays together when they are dealt, and noisy odometry."""

import math
from pathlib import Path

import numpy as np
import pytest

from mdps.datasets import Frame, MapillaryDataModule, Scene, Track, noisy_odometry
from mdps.datasets.camera import Camera
from mdps.datasets.scene import Problems, fingerprint
from mdps.datasets.sequences import LONG, SHORT, cut, deal, divide, runs, split_long, split_short
from mdps.maps import Box, Projection, RasterMap

CAMERA = Camera(64, 64, 32.0, 32.0, 31.5, 31.5)


def track(seconds, xy=None, name="a", group=None):
    xy = [(0.0, 0.0)] * len(seconds) if xy is None else xy
    frames = [
        Frame(f"{name}{i}", Path(f"{i}.jpg"), CAMERA, float(s), *p, 0.0, 0.0, 0.0) for i, (s, p) in enumerate(zip(seconds, xy))
    ]
    return Track(name, tuple(frames), group or name)


def scene(*tracks, name="here"):
    return Scene(name, Path(name), tracks, None, None, 0, Problems())


def panorama(n, name="p", start=0, missing=()):
    """Four tracks of one group."""
    made = [track(range(start, start + n), name=f"{name}_{d}", group=name) for d in ("front", "left", "back", "right")]
    return [t._replace(frames=tuple(f for i, f in enumerate(t.frames) if (k, i) not in missing)) for k, t in enumerate(made)]


def test_cut_at_pauses_of_more_than_30_s():
    pieces = cut(track([0, 10, 40, 70.001, 71]))
    assert [[f.seconds for f in p.frames] for p in pieces] == [[0, 10, 40], [70.001, 71]]


def test_cut_at_steps_of_more_than_100_m():
    pieces = cut(track(range(4), [(0, 0), (60, 80), (120.1, 160), (121, 160)]))
    assert [[f.seconds for f in p.frames] for p in pieces] == [[0, 1], [2, 3]]


def test_cut_where_time_runs_backwards():
    pieces = cut(track([0, 10, 9.9, 12, 12, -100, -99]))
    assert [[f.seconds for f in p.frames] for p in pieces] == [[0, 10], [9.9, 12, 12], [-100, -99]]


def test_cut_keeps_every_frame_in_order():
    random = np.random.default_rng(0)
    whole = track(np.cumsum(random.exponential(15, 200)), np.cumsum(random.normal(0, 50, (200, 2)), 0).tolist())
    pieces = cut(whole)
    assert tuple(f for p in pieces for f in p.frames) == whole.frames and len(pieces) > 10
    for piece in pieces:
        for a, b in zip(piece.frames, piece.frames[1:]):
            assert b.seconds - a.seconds <= 30 and math.hypot(b.x - a.x, b.y - a.y) <= 100


def test_an_empty_track_has_no_pieces():
    assert cut(track([])) == [] and runs(scene(track([])), 10) == []


@pytest.mark.parametrize("n, expected", [(9, 0), (10, 1), (19, 1), (20, 2), (100, 10)])
def test_runs_do_not_drop_the_exactly_full_one(n, expected):
    found = runs(scene(track(range(n))), 10)
    assert [len(r.frames) for r in found] == [10] * expected
    assert len({r.name for r in found}) == expected


def test_a_run_never_spans_a_cut():
    assert len(runs(scene(track([*range(15), *range(100, 115)])), 10)) == 2
    assert [r.frames[0].seconds for r in runs(scene(track([*range(15), *range(100, 115)])), 10)] == [0, 100]


@pytest.mark.parametrize("length", [0, -1])
def test_length(length):
    with pytest.raises(ValueError, match="length: expected 1 or more frames, got"):
        runs(scene(track(range(9))), length)


def test_shares():
    items = divide("here", track(range(1000)), 10)
    parts = deal(items, (0.5, 0.2, 0.3), 0)
    assert [len(p) for p in parts] == [50, 20, 30]
    assert sorted(r.name for p in parts for r in p) == sorted(r.name for r in items)
    for shares in [(0.5, 0.2), (1.5, -0.5)]:
        with pytest.raises(ValueError, match="shares: expected numbers >= 0 with a sum of 1"):
            deal(items, shares, 0)


def test_dealing_is_seeded_and_indifferent_to_order():
    items = divide("here", track(range(1000)), 10)
    assert deal(items, (0.5, 0.5), 3) == deal(items[::-1], (0.5, 0.5), 3)
    assert deal(items, (0.5, 0.5), 3) != deal(items, (0.5, 0.5), 4)


def moments(part):
    return {(r.scene, r.group, f.seconds) for r in part for f in r.frames}


def disjoint(splits):
    train, val, test = map(moments, splits)
    return not (train & val or train & test or val & test)


# (track, frame) of views whose image is missing: the runs of the four views are no longer aligned
@pytest.mark.parametrize("missing", [(), {(0, 3), (1, 250), (2, 251), (3, 399)}], ids=["whole", "images missing"])
@pytest.mark.parametrize("seed", range(5))
def test_views_of_a_panorama_go_to_the_same_side(seed, missing):
    scenes = [scene(*panorama(420, "p", missing=missing), *panorama(230, "q", start=10_000), track(range(205), name="z"))]
    for splits in (split_long(scenes, seed), split_short(scenes, seed)):
        assert disjoint(splits) and (missing or min(map(len, splits)) > 0)  # five groups with missing images


@pytest.mark.parametrize("long", [10, 20, 50, 100, 200])
@pytest.mark.parametrize("length", [4, 10])
def test_training_has_no_frame_of_long_tests_whatever_is_long(monkeypatch, long, length):
    """By the data modules of both lengths, as training in stages has them."""
    scenes = [scene(*panorama(2050, "p")), scene(*panorama(1610, "p"), name="there"), scene(track(range(1205)), name="flat")]
    monkeypatch.setattr(MapillaryDataModule, "_scenes", lambda self, names: {s.name: s for s in scenes})
    short, whole = (MapillaryDataModule("", length=n, long_length=long, seed=3).read()[1] for n in (length, long))
    assert min(map(len, (*short, *whole))) > 0 and {len(r.frames) for r in whole.test} == {long}
    assert not moments(short.train) & (moments(whole.val) | moments(whole.test))
    assert not moments(whole.train) & (moments(whole.val) | moments(whole.test))


def test_short_sequences_are_not_from_long_tests():
    scenes = [scene(*panorama(1050, "p")), scene(*panorama(610, "p"), name="there")]
    long, short = split_long(scenes, 7), split_short(scenes, 7)
    assert {len(r.frames) for part in long for r in part} == {LONG}
    assert {len(r.frames) for part in short for r in part} == {SHORT}
    assert not (moments(short.train) | moments(short.val)) & (moments(long.val) | moments(long.test))
    assert moments(short.test) == moments(long.test)
    n = [len(part) for part in short]
    assert n[0] / (n[0] + n[1]) == pytest.approx(0.8, abs=0.02)


# Odometry


def poses(n=2000):
    random = np.random.default_rng(1)
    return np.concatenate([np.cumsum(random.normal(0, 3, (n, 2)), 0), random.uniform(-math.pi, math.pi, (n, 1))], 1)


def test_odometry_without_noise_is_the_difference():
    truth = poses()
    steps = noisy_odometry(truth, 0, 0, np.random.default_rng(0))
    assert steps.shape == (1999, 3)
    assert np.allclose(np.cumsum(steps[:, :2], 0), truth[1:, :2] - truth[0, :2])
    turned = truth[:-1, 2] + steps[:, 2]
    assert np.allclose(np.cos(turned), np.cos(truth[1:, 2])) and np.allclose(np.sin(turned), np.sin(truth[1:, 2]))
    assert (steps[:, 2] >= -math.pi).all() and (steps[:, 2] < math.pi).all()


def test_noise_of_odometry():
    """Positions: uniform errors, differenced, so triangular with correlation -1/2. Turns: uniform errors of their own."""
    truth = poses(20_000)
    exact = noisy_odometry(truth, 0, 0, np.random.default_rng(0))
    error = noisy_odometry(truth, 10.0, math.radians(15), np.random.default_rng(2)) - exact
    error[:, 2] = np.arcsin(np.sin(error[:, 2]))
    assert np.abs(error[:, :2]).max() <= 20 and np.abs(error[:, 2]).max() <= math.radians(15) + 1e-12
    assert np.allclose(error.std(0), [10 * math.sqrt(2 / 3)] * 2 + [math.radians(15) / math.sqrt(3)], rtol=0.02)
    lagged = [np.corrcoef(error[1:, k], error[:-1, k])[0, 1] for k in range(3)]
    assert np.allclose(lagged, [-0.5, -0.5, 0], atol=0.03)
    assert np.abs(np.cumsum(error[:, :2], 0)).max() <= 20  # the sum never drifts


def test_one_pose_has_no_odometry():
    assert noisy_odometry(poses(1), 1, 1, np.random.default_rng(0)).shape == (0, 3)


# Fingerprint


def test_fingerprint():
    whole = [scene(*panorama(20)), scene(track(range(5)), name="there")]
    known = fingerprint(whole)
    assert len(known) == 16 and int(known, 16) >= 0
    assert fingerprint(whole[::-1]) == known
    assert fingerprint([whole[0]._replace(tracks=whole[0].tracks[::-1], path=Path("elsewhere")), whole[1]]) == known
    fewer = whole[0].tracks[0]._replace(frames=whole[0].tracks[0].frames[1:])
    assert fingerprint([whole[0]._replace(tracks=(fewer, *whole[0].tracks[1:])), whole[1]]) != known
    moved = whole[1].tracks[0].frames[0]._replace(yaw=0.01)
    changed = whole[1].tracks[0]._replace(frames=(moved, *whole[1].tracks[0].frames[1:]))
    assert fingerprint([whole[0], whole[1]._replace(tracks=(changed,))]) != known
    assert fingerprint([]) == fingerprint([])


CHANGES = {
    "x": lambda f: f._replace(x=f.x + 0.01),
    "roll": lambda f: f._replace(roll=f.roll + 0.01),
    "pitch": lambda f: f._replace(pitch=f.pitch - 0.01),
    "shift": lambda f: f._replace(shift=(0.1, 0.0, -0.2)),
    "width": lambda f: f._replace(camera=f.camera._replace(width=f.camera.width + 1)),
    "height": lambda f: f._replace(camera=f.camera._replace(height=f.camera.height + 1)),
    "fx": lambda f: f._replace(camera=f.camera._replace(fx=f.camera.fx + 0.01)),
    "fy": lambda f: f._replace(camera=f.camera._replace(fy=f.camera.fy + 0.01)),
    "cx": lambda f: f._replace(camera=f.camera._replace(cx=f.camera.cx - 0.5)),
    "cy": lambda f: f._replace(camera=f.camera._replace(cy=f.camera.cy - 0.5)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_fingerprint_sees_what_a_network_sees(change):
    whole = scene(track(range(5)))
    frames = list(whole.tracks[0].frames)
    frames[2] = change(frames[2])
    changed = whole._replace(tracks=(whole.tracks[0]._replace(frames=tuple(frames)),))
    assert fingerprint([changed]) != fingerprint([whole])
    frames[2] = frames[2]._replace(shift=(0.1, 0.0, -0.200002) if frames[2].shift else (0.0, 0.0, 0.0))
    again = whole._replace(tracks=(whole.tracks[0]._replace(frames=tuple(frames)),))
    assert fingerprint([again]) != fingerprint([changed])


def test_the_fingerprint_sees_where_the_map_lies():
    whole = scene(track(range(5)))

    def on(x=0.0, latitude=52.0, longitude=13.0):
        classes = np.zeros((3, 20, 30), np.uint8)
        place = Projection(latitude, longitude)
        return fingerprint([whole._replace(map=RasterMap(classes, 2.0, Box(x, -5.0, x + 15.0, 5.0), place))])

    assert on() != fingerprint([whole])
    assert on() == on(1e-7, 52 + 1e-12, 13 - 1e-12)  # errors of rounding
    assert len({on(), on(x=0.5), on(latitude=52.0001), on(longitude=13.0001)}) == 4


def test_the_fingerprint_does_not_see_errors_of_rounding():
    whole = scene(track(range(5)))
    frames = whole.tracks[0].frames
    moved = [
        f._replace(x=f.x + 1e-9, yaw=f.yaw - 1e-12, camera=f.camera._replace(fx=f.camera.fx * (1 + 1e-15))) for f in frames
    ]
    assert fingerprint([whole._replace(tracks=(whole.tracks[0]._replace(frames=tuple(moved)),))]) == fingerprint([whole])
