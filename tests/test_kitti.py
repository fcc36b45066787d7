"""KITTI: calibration and poses against closed forms and stated values, split files, and everything that can be missing."""

import math
import shutil
from itertools import pairwise

import numpy as np
import pytest
from real_data import real_data
from small_scenes import DAY, LEVER, copy, drive, make_kitti, save

from mdps.datasets import DataError, kitti
from mdps.datasets.scene import Problems
from mdps.datasets.sequences import runs

DRIVE = f"{DAY}_drive_0009_sync"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made") / "root"
    make_kitti(root)
    return root


@pytest.fixture
def root(made, tmp_path):
    copy(made, tmp_path)
    return tmp_path


def test_read_all_drives(root):
    """Without .downloaded, image_00 or velodyne (OrienterNet#39)."""
    scene = kitti.read_drives(str(root))
    assert (scene.name, scene.n_listed, scene.n_frames) == ("kitti", 48, 48)
    assert [(t.name, t.group) for t in scene.tracks] == [(f"{DAY}_drive_{k:04d}_sync",) * 2 for k in (9, 11)]
    frames = scene.tracks[0].frames
    assert [f.name for f in frames] == [f"{i:010d}" for i in range(48, 72)]
    assert np.allclose(np.diff([f.seconds for f in frames]), 0.1, atol=1e-6)
    assert frames[0].camera == (124, 38, 72.0, 72.0, 61.5, 18.0) and frames[0].shift is None
    assert len(scene.problems) == 0


def test_the_camera_of_a_level_car():
    """North and East (vita-epfl/Loc2#6): the camera is its lever ahead and to the left of the unit, and looks ahead."""
    ahead, left, _ = LEVER
    calibration = lever_calibration()
    expected = {0.0: (ahead, left, 90.0), math.pi / 2: (-left, ahead, 0.0), math.pi: (-ahead, -left, -90.0)}
    for heading, (x, y, yaw) in expected.items():
        xy, angles = kitti.camera_poses(np.array([[7.0, -3.0]]), np.array([[0.0, 0.0, heading]]), calibration)
        assert xy[0] == pytest.approx([7 + x, -3 + y], abs=1e-6)
        assert angles[0] == pytest.approx([0, 0, yaw], abs=1e-6)


def test_roll_and_pitch_of_the_car():
    """The unit's pitch is positive when the front points down, its roll when the left side is up."""
    _, angles = kitti.camera_poses(np.zeros((1, 2)), np.array([[0.0, 0.1, 0.3]]), lever_calibration())
    assert angles[0] == pytest.approx([0, math.degrees(0.1), 90 - math.degrees(0.3)], abs=1e-6)  # looks down
    _, angles = kitti.camera_poses(np.zeros((1, 2)), np.array([[0.1, 0.0, 0.3]]), lever_calibration())
    assert angles[0] == pytest.approx([-math.degrees(0.1), 0, 90 - math.degrees(0.3)], abs=1e-6)  # turned clockwise


def lever_calibration():
    ahead, left, up = LEVER
    rotation = np.array([[0.0, -1, 0], [0, 0, -1], [1, 0, 0]])
    return kitti.Calibration(None, rotation, -rotation @ np.array([ahead, left, up]))


def test_calibration_files(root):
    calibration = kitti.read_calibration(root / DAY)
    assert np.allclose(calibration.rotation, lever_calibration().rotation)
    assert np.allclose(calibration.translation, lever_calibration().translation, atol=1e-6)


def test_positions_in_the_map(root):
    scene = kitti.read_drives(root)
    xy, yaws = drive(24, 1.0)
    ahead, left, _ = LEVER
    for track, k in zip(scene.tracks, (9, 11)):
        for i, f in enumerate(track.frames):
            assert abs(f.yaw - yaws[i]) < 0.1 and (f.roll, f.pitch) == pytest.approx((-0.573, -1.146), abs=0.02)
            lever = (-left, ahead) if yaws[i] == 0 else (ahead, left)
            assert (f.x, f.y) == pytest.approx((xy[i, 0] + lever[0], xy[i, 1] + 10 * k + lever[1]), abs=0.05)


def test_split_files(root):
    """Lists are not sequences: test1 has duplicates (#10, #45: count what comes)."""
    train = kitti.read_drives(root, root / "train_files.txt")
    assert train.n_frames == 24 and train.tracks[0].frames[0].shift is None
    test1 = kitti.read_drives(root, root / "test1_files.txt")
    assert (test1.n_listed, test1.n_frames) == (25, 24)
    assert test1.problems.counts == {"frame listed twice: the first line counts": 1}
    assert {f.shift for f in test1.tracks[0].frames} == {(0.5, -0.25, 1.0)}


def test_gaps_stay_visible_in_the_times(root):
    lines = (root / "train_files.txt").read_text().splitlines()
    (root / "some.txt").write_text("\n".join(lines[:3] + lines[13:15]) + "\n")
    frames = kitti.read_drives(root, root / "some.txt").tracks[0].frames
    assert np.allclose(np.diff([f.seconds for f in frames]), [0.1, 0.1, 1.1, 0.1], atol=1e-6)


def test_any_order_line_ends_and_blank_lines(root):
    lines = (root / "train_files.txt").read_text().splitlines()
    (root / "some.txt").write_bytes(("\r\n\r\n".join(reversed(lines)) + "\r\n").encode())
    assert kitti.read_drives(root, root / "some.txt").tracks == kitti.read_drives(root, root / "train_files.txt").tracks


BAD_LINES = [
    "hello",
    f"{DAY}/{DRIVE}/0000000048.png 0.1",
    f"{DAY}/{DRIVE}/0000000048.png 0.1 0.2 x",
    f"{DAY}/{DRIVE}/0000000048.png 0.1 0.2 1.5",
    f"{DAY}/{DRIVE}/0000000048.png 0.1 0.2 nan",
    f"{DAY}/{DRIVE}/48.png",
    f"../{DRIVE}/0000000048.png",
    f"{DAY}/../../etc/0000000048.png",
    f"{DAY}/{DRIVE}/../../../../etc/passwd",
    "/etc/passwd",
]


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_left_out(root, line):
    with open(root / "train_files.txt", "a") as file:
        file.write(line + "\n")
    scene = kitti.read_drives(root, root / "train_files.txt")
    assert scene.n_frames == 24
    (reason,) = scene.problems.counts
    assert "expected <date>/<drive>/<frame>.png and no or three numbers in [-1, 1]" in reason
    assert scene.problems.examples[reason].startswith(f"{root / 'train_files.txt'}:25: ")


def test_a_split_file_that_is_not_there(root):
    with pytest.raises(DataError, match="nowhere.txt: no such file"):
        kitti.read_drives(root, root / "nowhere.txt")
    with pytest.raises(DataError, match="nowhere: no such folder"):
        kitti.read_drives(root / "nowhere")


def reasons(root):
    scene = kitti.read_drives(root, root / "train_files.txt")
    return scene.n_frames, scene.problems.counts


def test_a_drive_that_is_not_there(root):
    shutil.rmtree(root / DAY / DRIVE)
    assert reasons(root) == (0, {"drive not there": 1, "frame left out (drive not there)": 24})


def test_an_image_that_is_not_there(root):
    (root / DAY / DRIVE / "image_02/data/0000000050.png").unlink()
    assert reasons(root) == (23, {"frame left out (image not there)": 1})


BAD_OXTS = ["", "1 2 3", "49.0 8.4 100 x 0 0", "49.0 8.4 100 nan 0 0", "490 8.4 100 0 0 0", "\x00\x01"]


@pytest.mark.parametrize("text", BAD_OXTS)
def test_bad_oxts(root, text):
    (root / DAY / DRIVE / "oxts/data/0000000050.txt").write_text(text)
    reason = "frame left out (expected latitude, longitude, altitude, roll, pitch, yaw, ...)"
    assert reasons(root) == (23, {reason: 1})


def test_missing_oxts(root):
    (root / DAY / DRIVE / "oxts/data/0000000050.txt").unlink()
    assert reasons(root) == (23, {"frame left out (no such file)": 1})


def test_a_position_on_the_other_side_of_the_earth(root):
    (root / DAY / DRIVE / "oxts/data/0000000050.txt").write_text("-49 -170 0 0 0 0")
    assert reasons(root) == (23, {"frame left out (position far away from the map)": 1})


def test_a_position_outside_of_the_map(root):
    (root / DAY / DRIVE / "oxts/data/0000000050.txt").write_text("49.1 8.4 0 0 0 0")
    assert reasons(root) == (23, {"frame outside of the map": 1})


@pytest.mark.parametrize("name", ["cam_to_cam", "imu_to_velo", "velo_to_cam"])
@pytest.mark.parametrize(
    "text, reason", [(None, "no such file"), ("R: 1 2 3\n", "expected"), ("", "expected"), ("R: x\n\xff", "")]
)
def test_bad_calibration(root, name, text, reason):
    path = root / DAY / f"calib_{name}.txt"
    path.unlink() if text is None else path.write_text(text, "latin-1")
    n, problems = reasons(root)
    assert n == 0 and problems == {"frame left out (no calibration)": 24}
    with pytest.raises(DataError, match=f"calib_{name}.txt: .*{reason}") as caught:
        kitti.read_calibration(root / DAY)
    assert "\n" not in str(caught.value)


def test_a_singular_camera(root):
    path = root / DAY / "calib_cam_to_cam.txt"
    path.write_text(path.read_text().replace("P_rect_02: 7.2", "P_rect_02: 0.0 "))
    with pytest.raises(DataError, match=r"P_rect_02: expected 12 finite numbers, got 13 values"):
        kitti.read_calibration(root / DAY)
    path.write_text(path.read_text().replace("P_rect_02: 0.0 00000e+01", "P_rect_02: 0"))
    with pytest.raises(DataError, match="focal lengths that see 1 to 170 degrees"):
        kitti.read_calibration(root / DAY)


@pytest.mark.parametrize("text", [None, "yesterday\n", "\xff", "2011-99-26 13:00:00.0\n"])
def test_times(root, text):
    """The times of the oxts, else 0.1 s between frames, and it is said."""
    path = root / DAY / DRIVE / "image_02/timestamps.txt"
    if text is None:
        path.rename(root / DAY / DRIVE / "oxts/timestamps.txt")
        assert reasons(root) == (24, {})
        (root / DAY / DRIVE / "oxts/timestamps.txt").unlink()
    else:
        path.write_text(text, "latin-1")
    n, problems = reasons(root)
    assert n == 24 and len(problems) == 1 and "0.1 s between frames" in next(iter(problems))
    frames = kitti.read_drives(root, root / "train_files.txt").tracks[0].frames
    assert np.allclose([f.seconds for f in frames], np.arange(48, 72) * 0.1)


@pytest.mark.parametrize("kind", ["short", "empty", "blank in the middle", "blank first", "blank last"])
def test_times_that_are_not_one_a_frame(root, kind):
    """No drive has two clocks, and no frame another one's time."""
    path = root / DAY / DRIVE / "image_02/timestamps.txt"
    whole = kitti.read_drives(root, root / "train_files.txt").tracks[0].frames
    lines = path.read_text().splitlines()
    blank = {"blank in the middle": 60, "blank first": 0, "blank last": len(lines)}
    lines = lines[:60] if kind == "short" else [] if kind == "empty" else [*lines[: blank[kind]], "", *lines[blank[kind] :]]
    path.write_text("\n".join(lines) + "\n\n")
    frames = kitti.read_drives(root, root / "train_files.txt").tracks[0].frames
    if kind == "blank last":
        assert frames == whole and reasons(root) == (24, {})
        return
    assert np.allclose([f.seconds for f in frames], np.arange(48, 72) * 0.1)
    (reason,) = reasons(root)[1]
    expected = "more frames than times: 0.1 s" if kind in ("short", "empty") else "times that cannot be read: 0.1 s"
    assert reason == f"{expected} between frames"


def test_a_tilt_that_no_image_is_rectified_of(root):
    path = root / DAY / DRIVE / "oxts/data/0000000050.txt"
    words = path.read_text().split()
    path.write_text(" ".join([*words[:4], "1.3", *words[5:]]))
    assert reasons(root) == (23, {"frame left out (roll, pitch: beyond 60 degrees)": 1})


def test_without_map_the_origin_is_the_middle_of_the_drives(root):
    (root / "map.npz").unlink()
    scene = kitti.read_drives(root, root / "train_files.txt")
    projection, box = kitti.map_area(root)
    assert scene.map is None and scene.projection == projection and scene.n_frames == 24
    xy = projection.to_metres([read_place(p) for p in root.glob("*/*/oxts/data/*.txt")])
    assert np.allclose(xy.min(0) + xy.max(0), 0, atol=0.01)
    assert np.allclose([box.x_min, box.y_max], [xy[:, 0].min() - 512, xy[:, 1].max() + 512])


def read_place(path):
    return [float(word) for word in path.read_text().split()[:2]]


def test_no_usable_position_at_all(root):
    (root / "map.npz").unlink()
    for path in root.glob("*/*/oxts/data/*.txt"):
        path.write_text("")
    assert reasons(root)[0] == 0 and kitti.map_area(root) is None


def test_is_root(root, tmp_path_factory):
    assert kitti.is_root(str(root))
    assert not kitti.is_root(root / "nowhere") and not kitti.is_root(tmp_path_factory.mktemp("empty"))


def test_initial_errors_lie_along_the_heading():
    """North and East: the first number is metres ahead, the second to the left, the third turns clockwise."""
    shifts = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    north = kitti.initial_errors(shifts, np.zeros(3))
    assert np.allclose(north, [[0, 20, 0], [-20, 0, 0], [0, 0, -math.radians(10)]])
    east = kitti.initial_errors(shifts, np.full(3, 90.0), 1.0, 1.0)
    assert np.allclose(east, [[1, 0, 0], [0, 1, 0], [0, 0, -math.radians(1)]])


def test_the_real_drive():
    """Values that others state for drive 9 of 2011-09-26, and what its own numbers say."""
    root = real_data("kitti")
    scene = kitti.read_drives(root, with_map=False)
    assert scene.n_frames == 10 and not [r for r in scene.problems.counts if "left out" in r]
    frame = scene.tracks[0].frames[0]
    assert frame.name == "0000000041"
    assert (round(frame.roll, 2), round(frame.pitch, 2), round(frame.yaw, 2)) == (-2.41, 0.14, 105.70)  # oxts yaw: -15.74
    assert frame.camera[:2] == (1242, 375) and frame.camera.fx == pytest.approx(721.5377)
    # the car drives where it looks, at the speed that it measures
    xy = np.array([(f.x, f.y) for f in scene.tracks[0].frames])
    step, seconds = xy[-1] - xy[0], scene.tracks[0].frames[-1].seconds - frame.seconds
    assert math.degrees(math.atan2(step[0], step[1])) == pytest.approx(frame.yaw, abs=3)
    assert np.hypot(*step) / seconds == pytest.approx(np.hypot(10.352, 0.112), rel=0.1)  # vf, vl of frame 41
    # the camera is 1.09 m ahead of the unit and 0.3 m to its right
    unit = scene.projection.to_metres([49.009235334493, 8.4377222470096])
    assert np.hypot(*(xy[0] - unit)) == pytest.approx(1.12, abs=0.02)


@pytest.fixture
def whole_drive(tmp_path):
    """The real drive with all of its 447 frames; the pictures are a small black one."""
    source = real_data("kitti")
    oxts, images = f"{DAY}/{DRIVE}/oxts", tmp_path / f"{DAY}/{DRIVE}/image_02"
    shutil.copytree(source / DAY, tmp_path / DAY, ignore=shutil.ignore_patterns("*.png"), dirs_exist_ok=True)
    save(tmp_path / "black.png", np.zeros((375, 1242, 3), np.uint8))
    for path in (source / oxts / "data").glob("*.txt"):
        (images / f"data/{path.stem}.png").hardlink_to(tmp_path / "black.png")
    return tmp_path


def test_the_real_drive_moves_as_it_measured(whole_drive):
    """447 frames: positions against the speeds that the unit measured, headings against the direction of motion."""
    scene = kitti.read_drives(whole_drive)
    frames = scene.tracks[0].frames
    assert scene.n_frames == 447
    xy = np.array([(f.x, f.y) for f in frames])
    stamps = (whole_drive / DAY / DRIVE / "oxts/timestamps.txt").read_text().split()[1::2]
    seconds = np.array([np.dot([3600, 60, 1], [float(v) for v in stamp.split(":")]) for stamp in stamps])
    assert np.abs(seconds - seconds[0] - [f.seconds - frames[0].seconds for f in frames]).max() < 0.03  # unit and camera
    oxts = np.array([np.loadtxt(p) for p in sorted(whole_drive.glob("*/*/oxts/data/*.txt"))])
    assert oxts.shape == (447, 30)
    calibration = kitti.read_calibration(whole_drive / DAY)
    lever = -calibration.rotation.T @ calibration.translation  # of the camera, in the unit's axes
    assert lever[:2] == pytest.approx([1.08, -0.26], abs=0.03)
    forward = oxts[:, 8] - oxts[:, 22] * lever[1]  # vf and the turn rate: how fast the camera moves along the car
    left = oxts[:, 9] + oxts[:, 22] * lever[0]
    step, dt = np.diff(xy, axis=0), np.diff(seconds)
    assert 330 < np.hypot(*step.T).sum() < 340
    heading = np.radians(90 - np.array([f.yaw for f in frames]))[:-1]
    ahead = (step * np.stack([np.cos(heading), np.sin(heading)], 1)).sum(1) / dt
    aside = (step * np.stack([-np.sin(heading), np.cos(heading)], 1)).sum(1) / dt
    middle = (forward[1:] + forward[:-1]) / 2
    assert np.sqrt(np.mean((ahead - middle) ** 2)) < 0.25
    assert np.sqrt(np.mean((aside - (left[1:] + left[:-1]) / 2) ** 2)) < 0.25


def test_sequences_of_the_real_lists(whole_drive):
    lists = {name: real_data(f"kitti/{name}_files_drive0009_only.txt") for name in ("train", "test1")}
    train, test1 = (kitti.read_drives(whole_drive, path) for path in lists.values())
    assert (train.n_frames, test1.n_frames) == (251, 79)
    assert test1.problems.counts["frame listed twice: the first line counts"] == 12
    assert [len(runs(train, n)) for n in (10, 100)] == [25, 2] and [len(runs(test1, n)) for n in (10, 100)] == [7, 0]
    gaps = [round((b.seconds - a.seconds) / 0.1036) for a, b in pairwise(test1.tracks[0].frames)]
    assert min(gaps) == 1 and max(gaps) > 5 and all(f.shift is not None for f in test1.tracks[0].frames)


def test_the_real_split_files():
    root = real_data("kitti")
    problems = Problems()
    train = kitti.read_split(root / "train_files_drive0009_only.txt", problems)
    test1 = kitti.read_split(root / "test1_files_drive0009_only.txt", problems)
    assert (len(train), len(test1), len(problems)) == (251, 91, 0)
    assert min(line.frame for line in train) == 48 and all(line.shift is None for line in train)
    assert test1[0].frame == 62 and test1[0].shift == (0.16229638, -0.7328123, -0.794436)
