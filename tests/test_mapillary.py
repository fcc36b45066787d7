"""MGL: a made scene read back, and everything that was seen wrong in real copies, one clear line for each.

Numbers with # are threads of facebookresearch/OrienterNet in which users met it.
"""

import json
import math
import pickle

import numpy as np
import pytest
from real_data import real_data
from small_scenes import PROJECTION, SECOND, YAWS, copy, drive, make_mapillary, mapillary_camera, small_map, write

from mdps.datasets import DataError, fingerprint, mapillary
from mdps.datasets.camera import wrap_degrees
from mdps.maps import Projection
from mdps.maps.tiles_pickle import write_tiles_pickle


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made") / "root"
    make_mapillary(root)
    return root


@pytest.fixture
def scene(made, tmp_path):
    copy(made, tmp_path)
    return tmp_path / "berlin"


def edited(folder, edit):
    """Read the scene again after an edit of its dump."""
    dump = json.loads((folder / "dump.json").read_text())
    edit(dump)
    write(folder / "dump.json", dump)
    return mapillary.read_scene(folder)


def view(dump, name="1005_front"):
    return dump[f"seqA_{name.split('_')[1]}"]["views"][name]


def test_read(scene):
    """Also yaws beyond 180 degrees (#20), and a path that is a str (#31)."""
    read = mapillary.read_scene(str(scene))
    assert (read.name, read.n_listed, read.n_frames) == ("berlin", 108, 108)
    assert [(t.name, t.group, len(t.frames)) for t in read.tracks] == [
        ("seqA_front", "seqA", 24),
        ("seqA_left", "seqA", 24),
        ("seqA_back", "seqA", 24),
        ("seqA_right", "seqA", 24),
        ("seqB", "seqB", 12),
    ]
    assert read.projection == PROJECTION and read.map.classes.shape == (3, 1200, 1200)
    xy, yaws = drive()
    for track, turn in zip(read.tracks, YAWS.values()):
        for i, frame in enumerate(track.frames):
            assert (frame.x, frame.y, frame.seconds) == (*xy[i], SECOND + i)
            assert (frame.roll, frame.pitch) == (1.5, -2.0)
            assert -180 <= frame.yaw < 180 and math.remainder(frame.yaw - yaws[i] - 17.25 - turn, 360) == pytest.approx(0)
    assert read.tracks[0].frames[0].camera == (64, 64, 32.0, 32.0, 31.5, 31.5)  # pixel centres are integers
    assert list(read.problems.counts) == ["yaw outside of [-180, 180): wrapped"]


def test_views_of_panoramas_are_joined(scene):
    """By where they look, whatever they are called; without those of which one is missing or looks elsewhere."""

    def edit(dump):
        del dump["seqA_left"]["views"]["1002_left"]
        view(dump, "1004_right")["roll_pitch_yaw"][2] += 5.0
        view(dump, "1006_back")["roll_pitch_yaw"][2] += 1.0
        left, right = view(dump, "1008_left"), view(dump, "1008_right")
        dump["seqA_left"]["views"]["1008_left"], dump["seqA_right"]["views"]["1008_right"] = right, left

    read = edited(scene, edit)
    joined = mapillary.join_views(read)
    (track,) = joined.tracks
    assert (track.name, track.group) == ("seqA_front", "seqA")
    assert [f.name for f in track.frames] == [f"{1000 + i}_front" for i in range(24) if i not in (2, 4)]
    for frame in track.frames:
        names = [f.name.split("_")[1] for f in frame.beside]
        assert names == (["right", "back", "left"] if frame.name == "1008_front" else ["left", "back", "right"])
        turns = [math.remainder(frame.yaw - other.yaw - 90 * (k + 1), 360) for k, other in enumerate(frame.beside)]
        assert max(map(abs, turns)) <= (1.01 if frame.name == "1006_front" else 1e-9)
        assert {(f.x, f.y, f.seconds) for f in frame.beside} == {(frame.x, frame.y, frame.seconds)}
    assert len(read.tracks) == 5 and not any(f.beside for t in read.tracks for f in t.frames)


def test_frames_are_in_order_of_time(scene):
    def edit(dump):
        dump["seqB"]["views"] = dict(reversed(dump["seqB"]["views"].items()))

    frames = edited(scene, edit).tracks[-1].frames
    assert [f.seconds for f in frames] == sorted(f.seconds for f in frames)


def test_the_offset_of_panoramas_is_read(tmp_path):
    """In every prepared copy the views look elsewhere."""
    make_mapillary(tmp_path, "a", offset=-40.0)
    make_mapillary(tmp_path, "b", offset=33.0)
    a, b = (mapillary.read_scene(tmp_path / name).tracks[0].frames[0].yaw for name in "ab")
    assert (a, b) == (-40.0, 33.0)


# What is wrong with a view costs that view, is counted, and says why in one line (#29: null entries are normal).
BAD_VIEWS = {
    "null": (lambda d: d["seqA_front"]["views"].update({"1005_front": None}), "expected an object {...}, got null"),
    "list": (lambda d: d["seqA_front"]["views"].update({"1005_front": [1]}), "expected an object {...}, got a list of 1"),
    "no camera": (lambda d: view(d).update(camera_id="other"), "camera_id: no such camera"),
    "camera is a list": (lambda d: view(d).update(camera_id=[1]), "camera_id: no such camera"),
    "no position": (lambda d: view(d).pop("t_c2w"), "t_c2w: expected 3 numbers, got null"),
    "NaN": (lambda d: view(d).update(t_c2w=[math.nan, 0, 0]), "t_c2w: expected a finite number, got nan"),
    "infinite": (
        lambda d: view(d).update(roll_pitch_yaw=[0, 0, math.inf]),
        "roll_pitch_yaw: expected a finite number, got inf",
    ),
    "huge": (lambda d: view(d).update(t_c2w=[10**400, 0, 0]), "t_c2w: expected a finite number, got inf"),
    "far away": (lambda d: view(d).update(t_c2w=[1e7, 0, 0]), "t_c2w: expected metres around the scene"),
    "before 1970": (lambda d: view(d).update(capture_time=-1), "capture_time: expected milliseconds since 1970"),
    "text": (lambda d: view(d).update(t_c2w=["1", 0, 0]), "t_c2w: expected a number, got '1'"),
    "two numbers": (lambda d: view(d).update(t_c2w=[1, 2]), "t_c2w: expected 3 numbers, got a list of 2"),
    "no time": (lambda d: view(d).update(capture_time=None), "capture_time: expected a number, got null"),
    "no angles": (lambda d: view(d).update(R_c2w=None, roll_pitch_yaw=None), "roll_pitch_yaw, R_c2w: expected one of them"),
    "null roll": (lambda d: view(d).update(roll_pitch_yaw=[None, 0, 0]), "roll_pitch_yaw: expected a number, got null"),
    "ragged rotation": (lambda d: view(d).update(R_c2w=[[1, 0, 0], [0, 1], [0]]), "R_c2w: expected 3 numbers, got a list of 2"),
    "upside down": (lambda d: view(d).update(R_c2w=None, roll_pitch_yaw=[170, 0, 0]), "roll, pitch: beyond 60 degrees"),
    "latlong": (lambda d: view(d).update(latlong=[413.4, 52.4]), "latlong: expected degrees, latitude first"),
}


@pytest.mark.parametrize("edit, reason", BAD_VIEWS.values(), ids=BAD_VIEWS)
def test_a_bad_view_is_left_out_and_counted(scene, edit, reason):
    read = edited(scene, edit)
    assert read.n_frames == 107 and read.n_listed == 108
    assert len(read.tracks[0].frames) == 23
    found = [r for r in read.problems.counts if r.startswith("view left out")]
    assert len(found) == 1 and reason in found[0] and "\n" not in found[0]
    assert read.problems.counts[found[0]] == 1 and read.problems.examples[found[0]] == "1005_front"


def test_a_name_that_leads_elsewhere(scene):
    for name in ("../../../etc/passwd", "/etc/passwd", "..", "a\\b", "x" * 300, "a\nb", ""):
        read = edited(scene, lambda d, name=name: d["seqB"]["views"].update({name: d["seqB"]["views"]["2000_undistorted"]}))
        assert read.n_frames == 108
        assert "view left out (name: expected one that can be a file's)" in read.problems.counts


@pytest.mark.parametrize("name", ["a\nb", "../x", "\x1b[31m", ""])
def test_a_sequence_with_a_name_that_is_none(scene, name):
    read = edited(scene, lambda d: d.update({name: d.pop("seqB")}))
    assert read.n_frames == 96
    text = str(read.problems)
    assert "sequence that is not one (name: expected one that can be a file's)" in text
    assert all(c.isprintable() for line in text.split("\n") for c in line) and text.count("\n") == len(read.problems) - 1


BAD_CAMERAS = {
    "fisheye": {"model": "FISHEYE"},
    "params": {"params": [1, 2, 3]},
    "null": {"params": None},
    "no focal length": {"params": [0, 1, 2, 3]},
    "more memory than there is, once it is resized": {"params": [1e-3, 50, 32, 32]},
    "a huge image": {"width": 10**6, "height": 10**6, "params": [5e5, 5e5, 5e5, 5e5]},
    "no size": {"width": 0},
    "NaN": {"width": math.nan},
}


@pytest.mark.parametrize("change", BAD_CAMERAS.values(), ids=BAD_CAMERAS)
def test_a_bad_camera_costs_its_views(scene, change):
    read = edited(scene, lambda d: d["seqB"]["cameras"]["flat"].update(change))
    assert [t.name for t in read.tracks] == ["seqA_front", "seqA_left", "seqA_back", "seqA_right"]
    assert read.problems.counts["view left out (camera_id: no such camera)"] == 12
    assert sum(r.startswith("camera left out") for r in read.problems.counts) == 1


BAD_SEQUENCES = {
    "null": None,
    "list": [],
    "no views": {"cameras": {}},
    "no cameras": {"views": {}},
    "views a list": {"views": [], "cameras": {}},
    "cameras null": {"views": {}, "cameras": None},
}


@pytest.mark.parametrize("value", BAD_SEQUENCES.values(), ids=BAD_SEQUENCES)
def test_a_bad_sequence_is_left_out(scene, value):
    read = edited(scene, lambda d: d.update(seqB=value))
    assert read.n_frames == 96
    assert any(r.startswith("sequence that is not one") for r in read.problems.counts)


# #4: an answer that is no JSON
BAD_FILES = {
    "missing": (None, "no such file"),
    "empty": (b"", "expected JSON: Expecting value: line 1 column 1"),
    "html": (b"<html>Object does not exist</html>", "expected JSON: Expecting value"),
    "cut": (b'{"seqA": {"views": {"10', "expected JSON: Unterminated string"),
    "null": (b"null", "top level: expected an object {...}, got null"),
    "list": (b"[1, 2]", "top level: expected an object {...}, got a list of 2"),
    "deep": (b"[" * 100_000, "expected JSON, got lists in lists without end"),
    "a number of 5000 digits": (b'{"a": 1' + b"0" * 5000 + b"}", "expected JSON: Exceeds the limit"),
    "bytes": (b"\xff\xfe\x00\x01", "expected text, got other bytes"),
    "gzip": (b"\x1f\x8b\x08\x00", "expected text, got other bytes"),
}


@pytest.mark.parametrize("content, reason", BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_is_none_raises_one_line(scene, content, reason):
    path = scene / "dump.json"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DataError, match=reason.replace("{", r"\{").replace(".", r"\.")) as caught:
        mapillary.read_scene(scene)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_an_empty_scene(scene):
    write(scene / "dump.json", {})
    read = mapillary.read_scene(scene)
    assert read.tracks == () and read.n_listed == 0


def test_missing_and_empty_images_are_normal(scene):
    """#64: images are gone from the server."""
    (scene / "images/1003_left.jpg").unlink()
    (scene / "images/1004_left.jpg").unlink()
    (scene / "images/1004_left.jpg").write_bytes(b"")
    read = mapillary.read_scene(scene)
    assert read.n_frames == 106
    assert read.problems.counts["image not there"] == 1 and read.problems.counts["image file is empty"] == 1


def test_no_images_at_all(scene):
    (scene / "images").rename(scene / "elsewhere")
    (scene / "images.tar.gz").write_bytes(b"")
    read = mapillary.read_scene(scene)
    assert read.n_frames == 0 and "unpack images.tar.gz" in read.problems.examples["no folder of images"]


def test_tmpdir_changes_nothing(scene, monkeypatch, tmp_path):
    """#39: a variable of the environment must not choose the folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    assert mapillary.read_scene(scene).n_frames == 108


def test_a_view_in_two_sequences_counts_once(scene):
    read = edited(scene, lambda d: d.update(seqC=d["seqB"]))
    assert read.n_frames == 108 and read.problems.counts["view listed twice: the first one is used"] == 12


def test_angles_from_the_rotation(scene):
    whole = mapillary.read_scene(scene)

    def edit(dump):
        for sequence in dump.values():
            for v in sequence["views"].values():
                del v["roll_pitch_yaw"]

    for before, after in zip(whole.tracks, edited(scene, edit).tracks):
        for a, b in zip(before.frames, after.frames):
            assert (a.roll, a.pitch) == pytest.approx((b.roll, b.pitch), abs=1e-9)
            assert float(wrap_degrees(a.yaw - b.yaw)) == pytest.approx(0, abs=1e-9)


def test_only_a_rotation_has_angles(scene):
    for bad in ([[1, 0, 0], [0, 1, 0], [0, 0, -1]], [[2, 0, 0], [0, 1, 0], [0, 0, 1]], [[1e300, 0, 0]] * 3):
        read = edited(scene, lambda d, bad=bad: view(d).update(R_c2w=bad, roll_pitch_yaw=None))
        assert read.problems.counts["view left out (roll_pitch_yaw, R_c2w: expected one of them)"] == 1


def test_angles_are_wrapped_on_load(scene):
    frames = edited(scene, lambda d: view(d).update(roll_pitch_yaw=[361.5, -362.0, -539.0])).tracks[0].frames
    assert (frames[5].roll, frames[5].pitch, frames[5].yaw) == (1.5, -2.0, -179.0)


def test_angles_that_contradict_the_rotation_are_told(scene):
    read = edited(scene, lambda d: view(d).update(roll_pitch_yaw=[1.5, -2.0, 90.0]))
    assert read.problems.examples["roll_pitch_yaw is not that of R_c2w by more than 1 degree"] == "1005_front"
    read = edited(scene, lambda d: view(d).update(R_c2w=[[1, 0, 0], [0, 1, 0], [0, 0, -1]]))
    assert read.problems.examples["R_c2w that is no rotation"] == "1005_front"


def test_the_map_in_tiles_is_the_same(scene):
    before = mapillary.read_scene(scene)
    (scene / "map.npz").unlink()
    write_tiles_pickle(before.map, scene / "tiles.pkl")
    after = mapillary.read_scene(scene)
    assert np.array_equal(after.map.classes, before.map.classes) and after.tracks == before.tracks
    assert fingerprint([after]) == fingerprint([before])


def test_views_outside_of_the_map(scene):
    small_map(side=200).save(scene / "map.npz")
    read = mapillary.read_scene(scene)
    assert read.n_frames == 108
    small_map(side=100).save(scene / "map.npz")
    read = mapillary.read_scene(scene)
    assert read.n_frames + read.problems.counts["view outside of the map"] == 108
    assert all(abs(f.x) <= 50 and abs(f.y) <= 50 for t in read.tracks for f in t.frames) and read.n_frames > 0


def test_a_map_with_another_origin(scene):
    """The user's own map of the same place: positions come from latitude and longitude."""
    before = mapillary.read_scene(scene)
    other = Projection(*PROJECTION.to_degrees(np.array([100.0, -50.0])))
    small_map(other).save(scene / "map.npz")
    read = mapillary.read_scene(scene)
    assert read.problems.counts["position made from latlong: the map has another origin than t_c2w"] == 108
    for a, b in zip(before.tracks, read.tracks):
        for f, g in zip(a.frames, b.frames):
            assert (g.x, g.y) == pytest.approx((f.x - 100, f.y + 50), abs=0.02)


def without_latlong(dump):
    for name in ("1005_front", "1006_left"):
        view(dump, name).update(latlong=None)


@pytest.mark.parametrize("away", [(0.0, 4.44), (-0.3, 0.2), (3000.0, -2000.0)])
def test_a_map_whose_origin_is_near_or_far(tmp_path, away):
    """However little the origin is away, no pose is shifted in silence; what has no latlong has no place."""
    make_mapillary(tmp_path, n_flat=0)
    folder = tmp_path / "berlin"
    before = mapillary.read_scene(folder)
    other = Projection(*PROJECTION.to_degrees(np.array(away)))
    small_map(other, side=8000.0 if max(away) > 100 else 600.0).save(folder / "map.npz")
    read = edited(folder, without_latlong)
    assert read.problems.counts["position made from latlong: the map has another origin than t_c2w"] == 94
    (reason,) = [r for r in read.problems.counts if "no usable latlong" in r]
    assert read.problems.counts[reason] == 2 and read.n_frames == 94
    placed = {frame.name: frame for track in read.tracks for frame in track.frames}
    gone = {"1005_front", "1006_left"}
    frames = {f.name: f for t in before.tracks for f in t.frames if f.name not in gone}
    assert placed.keys() == frames.keys()
    for name, f in frames.items():
        xy = other.to_metres(PROJECTION.to_degrees(np.array([f.x, f.y])))
        assert (placed[name].x, placed[name].y) == pytest.approx(xy, abs=1e-6)


def test_positions_and_latlong_that_agree_to_centimetres(scene):
    """Projections differ in altitudes, and latitudes may be rounded: the positions are used as they are."""

    def edit(dump):
        for sequence in dump.values():
            for i, v in enumerate(sequence["views"].values()):
                metres = np.array(v["t_c2w"][:2]) * (1 + 300 / 6.4e6) + [0.03, -0.4 * (-1) ** i]
                v["latlong"] = PROJECTION.to_degrees(metres).tolist()

    read = edited(scene, edit)
    assert read.tracks == mapillary.read_scene(scene).tracks and read.n_frames == 108
    assert list(read.problems.counts) == ["yaw outside of [-180, 180): wrapped"]


def test_an_excerpt_in_the_format():
    """Its positions are those of its latitudes and longitudes around one origin, to a millimetre."""
    scipy_optimize = pytest.importorskip("scipy.optimize")
    content = json.loads((real_data("mgl_format_example") / "berlin/dump.json").read_text())
    views = [v for sequence in content.values() for v in sequence["views"].values()]
    degrees, xy = np.array([v["latlong"] for v in views]), np.array([v["t_c2w"][:2] for v in views])
    found = scipy_optimize.least_squares(
        lambda p: (Projection(*p).to_metres(degrees) - xy).ravel(), degrees.mean(0), x_scale=1e-5
    )
    assert np.abs(found.fun).max() < 1e-3 < mapillary.OTHER_ORIGIN / 10


def test_positions_without_latlong(scene):
    def edit(dump):
        for sequence in dump.values():
            for v in sequence["views"].values():
                del v["latlong"]

    assert edited(scene, edit).n_frames == 108


class Trap:
    def __reduce__(self):
        return (open, ("trapped", "w"))


def test_nothing_in_a_map_is_executed(scene, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (scene / "map.npz").unlink()
    (scene / "tiles.pkl").write_bytes(pickle.dumps(Trap()))
    read = mapillary.read_scene(scene)
    assert not (tmp_path / "trapped").exists()
    assert read.map is None and "tiles.pkl" in read.problems.examples["map that cannot be read"]
    assert read.n_frames == 108


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a map"])
def test_a_map_that_is_none(scene, content):
    (scene / "map.npz").write_bytes(content)
    read = mapillary.read_scene(scene)
    assert read.map is None and "map.npz" in read.problems.examples["map that cannot be read"]


def test_without_map(tmp_path):
    make_mapillary(tmp_path, with_map=False)
    read = mapillary.read_scene(tmp_path / "berlin")
    assert read.map is None and read.n_frames == 108 and "no map" in read.problems.counts
    assert "no map" not in mapillary.read_scene(tmp_path / "berlin", with_map=False).problems.counts


def test_find_scenes(tmp_path):
    make_mapillary(tmp_path, "paris", n=2, n_flat=0)
    make_mapillary(tmp_path, "berlin", n=2, n_flat=0)
    (tmp_path / "empty").mkdir()
    assert [p.name for p in mapillary.find_scenes(str(tmp_path))] == ["berlin", "paris"]
    assert mapillary.find_scenes(tmp_path / "paris") == [tmp_path / "paris"]
    assert mapillary.find_scenes(tmp_path / "nowhere") == []


@pytest.mark.parametrize("path", [".", "../berlin", "images/..", "../../root/berlin/"])
def test_a_scenes_name_is_its_folders(scene, monkeypatch, path):
    """However the path is written; so is the fingerprint the same."""
    known = fingerprint([mapillary.read_scene(scene)])
    (scene.parent / "root").mkdir()
    folder = scene.rename(scene.parent / "root/berlin")
    monkeypatch.chdir(folder)
    read = mapillary.read_scene(path)
    assert read.name == "berlin" and fingerprint([read]) == known
    assert mapillary.find_scenes(path) == [folder] and mapillary.find_scenes("..") == [folder]


# Splits


def test_one_split_file_for_all_scenes(scene):
    splits = mapillary.read_splits(scene.parent, ["berlin", "unknown"])
    assert splits["train"] == {"berlin": set(range(1000, 1018))}
    assert splits["val"] == {"berlin": {*range(1018, 1024), *range(2000, 2012)}}
    part = mapillary.in_split(mapillary.read_scene(scene), splits["train"]["berlin"])
    assert [len(t.frames) for t in part.tracks] == [18] * 4  # an id of a panorama is that of its four views


@pytest.mark.parametrize("where", [".", "berlin"])
def test_a_split_file_for_each_scene(scene, where):
    """#53: the layout of MGL's second version."""
    root = scene.parent
    (root / "splits_MGL_13loc.json").unlink()
    write(root / where / "splits_MGL_v2_berlin.json", {"val": [1001, "1002"], "train": [1003]})
    assert mapillary.read_splits(root, ["berlin", "paris"]) == {"train": {"berlin": {1003}}, "val": {"berlin": {1001, 1002}}}


BAD_SPLITS = {
    "missing": (None, "expected splits_MGL_13loc.json or splits_MGL_v2_<scene>.json, found neither"),
    "list": ("[]", "top level: expected an object"),
    "part": ('{"train": [], "val": {}}', "'train': expected an object"),
    "ids": ('{"train": {"berlin": 7}, "val": {}}', "'train', 'berlin': expected a list of image ids, got '7'"),
    "names": ('{"train": {"berlin": ["x"]}, "val": {}}', "expected a list of image ids"),
    "null": ('{"train": {"berlin": [null]}, "val": {}}', "expected a list of image ids"),
    "true": ('{"train": {"berlin": [true]}, "val": {}}', "expected a list of image ids"),
}


@pytest.mark.parametrize("text, reason", BAD_SPLITS.values(), ids=BAD_SPLITS)
def test_bad_splits_raise_one_line(scene, text, reason):
    path = scene.parent / "splits_MGL_13loc.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(DataError, match=reason) as caught:
        mapillary.read_splits(scene.parent, ["berlin"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name, expected", [("12_front", 12), ("12_undistorted", 12), ("x_front", None), ("_front", None)])
def test_image_id(name, expected):
    assert mapillary.image_id(name) == expected


def test_several_cameras_in_one_sequence(scene):
    """Every view has its own camera's numbers."""

    def edit(dump):
        dump["seqB"]["cameras"]["other"] = mapillary_camera("other", 80, 60, 40.0)
        dump["seqB"]["views"]["2001_undistorted"]["camera_id"] = "other"

    frames = edited(scene, edit).tracks[-1].frames
    assert [f.camera.fx for f in frames[:3]] == [50.0, 40.0, 50.0]
