"""`check` and `show`: a page and a picture of whatever there is, one line where there is nothing."""

import json
import math
import pickle
import random
import shutil
from itertools import pairwise

import numpy as np
import pytest
from small_scenes import DAY, copy, make_kitti, make_mapillary, small_map, write

from mdps.datasets import KittiDataModule, MapillaryDataModule, kitti, mapillary
from mdps.datasets.__main__ import main
from mdps.datasets.health import check
from mdps.maps import write_tiles_pickle

cv2 = pytest.importorskip("cv2")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    make_mapillary(root / "mgl", "berlin", n=12, n_flat=3)
    make_kitti(root / "raw", n=12)
    return root


@pytest.fixture
def mgl(made, tmp_path):
    copy(made / "mgl", tmp_path / "mgl")
    return tmp_path / "mgl"


@pytest.fixture
def raw(made, tmp_path):
    copy(made / "raw", tmp_path / "raw")
    return tmp_path / "raw"


def printed(capsys, *arguments):
    assert main([str(a) for a in arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys, *arguments):
    assert main([str(a) for a in arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err.strip()


def test_check_mapillary(mgl, capsys, monkeypatch):
    page = printed(capsys, "check", mgl)
    assert "berlin: 51 of 51 frames usable in 5 tracks; sequences: 4 of 10, 0 of 100" in page
    assert "positions over 30 x 25 m" in page and "map: 1200 x 1200 pixels, 2 a metre, origin 52.47000, 13.44000" in page
    assert "images of 64 x 64, 80 x 60 pixels, 77 to 90 degrees wide; roll within 1.5, pitch within 2.0 degrees" in page
    assert "areas 7 of 7, ways 10 of 10, nodes 33 of 33" in page
    assert "1 x track whose roll and pitch are all 0: were they measured?, e.g. seqB" in page
    assert "split train  6 images, 6 of them usable" in page and "split val    9 images, 9 of them usable" in page
    assert page == printed(capsys, "check", mgl) and len(page.splitlines()) < 30
    assert page.splitlines()[-1].startswith("fingerprint  ") and len(page.split()[-1]) == 16
    assert printed(capsys, "check", mgl / "berlin").splitlines()[1:] == page.splitlines()[1:]
    monkeypatch.chdir(mgl / "berlin")
    assert printed(capsys, "check", ".").splitlines()[1:] == page.splitlines()[1:]
    moved = mgl.rename(mgl.with_name("elsewhere"))
    assert printed(capsys, "check", moved).split()[-1] == page.split()[-1]


def test_the_fingerprint_is_a_data_modules(mgl, capsys):
    """Also where scenes are there that nobody can use; a module of one scene has that of its folder."""
    for name in ("mapless", "blind", "broken"):
        copy(mgl / "berlin", mgl / name)
    (mgl / "mapless/map.npz").unlink()
    shutil.rmtree(mgl / "blind/images")
    (mgl / "broken/dump.json").unlink()
    (mgl / "broken/dump.json").write_text("null")
    copy(mgl / "berlin", mgl / "paris")

    def module(**options):
        made = MapillaryDataModule(mgl, n_workers=0, **options)
        made.setup()
        return made.fingerprint

    last = printed(capsys, "check", mgl).splitlines()[-1]
    assert last == f"fingerprint  of the 2 of 5 scenes with a map and usable frames  {module()}"
    paris = printed(capsys, "check", mgl / "paris").splitlines()[-1]
    assert paris == f"fingerprint  {module(scenes=['paris'])}" != f"fingerprint  {module(scenes=['berlin'])}"
    last = printed(capsys, "check", mgl / "mapless").splitlines()[-1]
    assert last == "fingerprint  of the 0 of 1 scenes with a map and usable frames  none"


def test_check_reports_hostile_numbers(mgl, raw, capsys):
    (mgl / "berlin/map.npz").unlink()
    write_tiles_pickle(small_map(), mgl / "berlin/tiles.pkl")
    content = pickle.loads((mgl / "berlin/tiles.pkl").read_bytes())
    vast = {"tile_size": [10**400, 1e308, 1e-300], "ppm": [10**400, 1e308], "ref_latlonalt": [(10**400, 0, 0), (0, 0, 1e309)]}
    for key, values in vast.items():
        for value in values:
            (mgl / "berlin/tiles.pkl").write_bytes(pickle.dumps(content | {key: value}))
            page = printed(capsys, "check", mgl)
            assert "1 x map that cannot be read, e.g. " in page and "berlin: 51 of 51 frames usable" in page
    (raw / "map.npz").unlink()
    files = {name: (raw / DAY / f"calib_{name}.txt") for name in ("cam_to_cam", "imu_to_velo", "velo_to_cam")}
    for path in files.values():
        text = path.read_text()
        for line in text.splitlines()[1:]:
            name, _, numbers = line.partition(": ")
            path.write_text(text.replace(line, f"{name}: {' '.join(['1e308'] * len(numbers.split()))}"))
            page = printed(capsys, "check", raw)
            assert "24 x frame left out (no calibration), e.g. " in page and "kitti: 0 of 24 frames usable" in page
        path.write_text(text)
    projection = next(line for line in files["cam_to_cam"].read_text().splitlines() if line.startswith("P_rect"))
    files["cam_to_cam"].write_text(files["cam_to_cam"].read_text().replace(projection, "P_rect_02: 1 1 0 0 1 1 0 0 0 0 1 0"))
    assert "24 x frame left out (no calibration), e.g. " in printed(capsys, "check", raw)


def test_check_tells_what_is_wrong(mgl, capsys):
    known = printed(capsys, "check", mgl).split()[-1]
    folder = mgl / "berlin"
    dump = json.loads((folder / "dump.json").read_text())
    front = dump["seqA_front"]["views"]
    front["1004_front"]["t_c2w"][0] += 200
    front["1004_front"]["latlong"] = None
    front["1005_front"]["roll_pitch_yaw"] = [0, 0, math.nan]
    write(folder / "dump.json", dump)
    (folder / "images/1000_front.jpg").unlink()
    (folder / "images/1000_front.jpg").write_bytes(b"no image")
    (folder / "images/1001_left.jpg").unlink()
    page = printed(capsys, "check", mgl)
    assert "berlin: 49 of 51 frames usable" in page and page.split()[-1] != known
    assert "2 x jump faster than 60 m/s, e.g. seqA_front: to 1004_front" in page
    assert "1 x view left out (roll_pitch_yaw: expected a finite number, got nan), e.g. 1005_front" in page
    assert "1 x image not there, e.g. 1001_left.jpg" in page
    assert "1 x image that cannot be used, of 8 that were opened, e.g. " in page


def test_check_kitti(raw, capsys):
    page = printed(capsys, "check", raw)
    assert "kitti: 24 of 24 frames usable in 2 tracks; sequences: 2 of 10, 0 of 100" in page and "nothing is wrong" in page
    module = KittiDataModule(raw, n_workers=0)
    module.setup()
    assert f"fingerprint of the lists  {module.fingerprint}" in page
    assert "test1_files.txt  12 of 13 frames usable" in page and "1 x frame listed twice" in page
    shutil.rmtree(raw / DAY / f"{DAY}_drive_0011_sync")
    (raw / "test2_files.txt").unlink()
    page = printed(capsys, "check", raw)
    assert "test1_files.txt  0 of 13 frames usable" in page and "1 x drive not there" in page
    assert "test2_files.txt  not there (for test)" in page


def test_check_sees_a_camera_that_looks_aside(raw):
    for path in raw.glob("*/*/oxts/data/*.txt"):
        words = path.read_text().split()
        words[5] = str(float(words[5]) + math.pi / 2)
        path.write_text(" ".join(words))
    assert "2 x drive whose camera does not look ahead" in check(raw)


def test_check_nothing(tmp_path, capsys):
    assert refused(capsys, "check", tmp_path / "nowhere").endswith("nowhere: no such folder")
    assert "neither MGL (folders with a dump.json) nor KITTI" in refused(capsys, "check", tmp_path)


def test_check_of_nothing_but_a_dump(tmp_path, capsys):
    (tmp_path / "berlin").mkdir()
    (tmp_path / "berlin/dump.json").write_text("{}")
    page = printed(capsys, "check", tmp_path)
    assert "berlin: 0 of 0 frames usable" in page and "map: none" in page
    assert "expected splits_MGL_13loc.json or splits_MGL_v2_<scene>.json, found neither" in page


def test_check_of_nothing_but_lists(raw, capsys):
    shutil.rmtree(raw / DAY)
    page = printed(capsys, "check", raw)
    assert "0 drives with usable frames" in page and "train_files.txt  0 of 12 frames usable" in page


@pytest.mark.parametrize("seed", range(20))
def test_check_never_fails_on_damaged_data(mgl, raw, seed, capsys):
    """Files cut, overwritten, removed, at random: the page is printed, and nothing in a file is run."""
    chance = random.Random(seed)
    for root in (mgl, raw):
        files = sorted(
            p for p in root.rglob("*") if p.is_file() and (p.suffix not in (".jpg", ".png") or chance.random() < 0.1)
        )
        for path in chance.sample(files, min(len(files), 12)):
            damage(path, chance)
        if main(["check", str(root)]) == 0:
            assert "fingerprint" in capsys.readouterr().out
        else:
            assert capsys.readouterr().err.count("\n") == 1 and not mapillary.find_scenes(root) and not kitti.is_root(root)


def damage(path, chance):
    content = path.read_bytes()
    path.unlink()
    kind = chance.randrange(6)
    if kind == 1:
        path.write_bytes(content[: chance.randrange(len(content) + 1)])
    elif kind == 2:
        path.write_bytes(chance.randbytes(chance.randrange(100)))
    elif kind == 3:
        changed = bytearray(content)
        for _ in range(5):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        path.write_bytes(bytes(changed))
    elif kind == 4:
        path.mkdir()
    elif kind == 5:
        path.write_bytes(content.replace(b"1", b"null").replace(b"2", b"1e999"))


@pytest.mark.parametrize("seed", range(30))
def test_a_dump_with_anything_in_any_place(mgl, seed):
    """One value anywhere in dump.json replaced by something else: read, or one line."""
    chance = random.Random(seed)
    dump = json.loads((mgl / "berlin/dump.json").read_text())
    node, path = dump, []
    while isinstance(node, (dict, list)) and node and (len(path) < 2 or chance.random() < 0.8):
        key = chance.choice(sorted(node)) if isinstance(node, dict) else chance.randrange(len(node))
        path.append((node, key))
        node = node[key]
    parent, key = path[-1]
    parent[key] = chance.choice([None, True, "x", [], {}, -1, 1e308, math.nan, [[[]]], {"a": 1}, "../../x", 10**400])
    write(mgl / "berlin/dump.json", dump)
    page = check(mgl)
    assert "fingerprint" in page and "berlin: " in page


# Pictures


def test_show_a_picture(mgl, tmp_path, capsys):
    out = tmp_path / "shown.png"
    assert (
        printed(capsys, "show", mgl, "--sequence", "berlin/seqA_left", "--out", out).strip()
        == f"{out}: berlin/seqA_left/1000_left"
    )
    assert cv2.imread(str(out)).shape == (600, 1500, 3)
    assert "seqA_back/1000_back" in printed(
        capsys, "show", mgl / "berlin", "--sequence", "seqA_back", "--length", "7", "--out", out
    )


def test_show_a_film(raw, tmp_path, capsys):
    out = tmp_path / "shown.mp4"
    assert "drive_0011_sync" in printed(capsys, "show", raw, "--sequence", f"{DAY}_drive_0011", "--length", "4", "--out", out)
    film = cv2.VideoCapture(str(out))
    frames = [film.read()[1] for _ in range(int(film.get(cv2.CAP_PROP_FRAME_COUNT)))]
    assert len(frames) == 4 and frames[0].shape == (600, 1200, 3)
    assert all((np.abs(a.astype(int) - b) > 30).any() for a, b in pairwise(frames))


def test_show_where_the_track_is_on_the_map(tmp_path, capsys):
    """The drive goes North, then East: its line is drawn at the left and at the top of the track's box."""
    make_mapillary(tmp_path, "here", n=24, n_flat=0, offset=0.0)
    (tmp_path / "here/map.npz").unlink()
    out = tmp_path / "shown.png"
    printed(capsys, "show", tmp_path, "--sequence", "here/seqA_front", "--length", "24", "--out", out)
    black = cv2.imread(str(out))[60:520, 930:1430].max(-1) < 40
    columns, rows = black.sum(0), black.sum(1)
    assert columns.max() > 100 and rows.max() > 100  # two straight lines
    assert columns.argmax() < 200 and rows.argmax() < 200


def test_show_without_a_map_or_images(mgl, raw, tmp_path, capsys):
    out = tmp_path / "shown.png"
    (mgl / "berlin/map.npz").unlink()
    (mgl / "berlin/images/1003_front.jpg").unlink()
    (mgl / "berlin/images/1003_front.jpg").write_bytes(b"no image")
    printed(capsys, "show", mgl, "--out", out)
    (raw / "map.npz").unlink()
    printed(capsys, "show", raw, "--out", out)


def test_show_refuses_in_one_line(mgl, tmp_path, capsys):
    out = tmp_path / "shown.png"
    line = refused(capsys, "show", mgl, "--sequence", "berlin/other", "--out", out)
    assert "no sequence 'berlin/other' of 10 frames; tracks: berlin/seqA_front (12 frames), " in line
    assert "expected a file .png or .mp4, got 'shown.gif'" in refused(capsys, "show", mgl, "--out", tmp_path / "shown.gif")
    assert "no such folder" in refused(capsys, "show", mgl, "--out", tmp_path / "nowhere/shown.png")
    assert "neither MGL nor KITTI" in refused(capsys, "show", tmp_path / "nowhere", "--out", out)
    assert "length: expected 1 or more frames, got 0" in refused(capsys, "show", mgl, "--length", "0", "--out", out)
    shutil.rmtree(mgl / "berlin/images")
    assert "none that can be used, `check` says why" in refused(capsys, "show", mgl, "--out", out)
    assert not out.exists()


def test_show_runs_nothing(mgl, tmp_path, capsys, monkeypatch):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "trapped"), "w"))

    (mgl / "berlin/map.npz").unlink()
    (mgl / "berlin/tiles.pkl").write_bytes(pickle.dumps({"bbox": Trap()}))
    printed(capsys, "show", mgl, "--out", tmp_path / "shown.png")
    assert "map that cannot be read" in check(mgl)
    assert not (tmp_path / "trapped").exists()
