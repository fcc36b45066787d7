"""MGL's tiles.pkl: what a good one holds arrives, whoever wrote it; a bad one gives one line and runs nothing."""

import io
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest

from mdps.maps import AREAS, NODES, WAYS, Box, DataError, Projection, RasterMap, read_tiles_pickle, write_tiles_pickle

cv2 = pytest.importorskip("cv2")


def city(height=150, width=200, ppm=2.0):
    rng = np.random.default_rng(0)
    classes = np.stack([rng.integers(0, n + 1, (height, width)) for n in (7, 10, 33)]).astype(np.uint8)
    box = Box(-40.25, 7.5, -40.25 + width / ppm, 7.5 + height / ppm)
    return RasterMap(classes, ppm, box, Projection(52.47, 13.44, 0.0))


def content(picture=None, **changes):
    """The format's dictionary, made here and not by the writer: two tiles of 32 m, the second narrower."""
    whole = city(64, 100) if picture is None else picture
    tiles, boxes = {}, {}
    for i in range(2):
        x = whole.box.x_min + 32 * i
        part = whole.classes[:, :, 64 * i : 64 * i + 64]
        tiles[i, 0] = io.BytesIO(png(part))
        boxes[i, 0] = f"{x},{whole.box.y_min},{x + part.shape[2] / 2},{whole.box.y_max}"
    latitude, longitude = np.float64(52.47), np.float64(13.44)
    return {
        "bbox": ",".join(map(str, (whole.box.x_min, whole.box.y_min, whole.box.x_max, whole.box.y_max))),
        "tile_size": 32,
        "ppm": 2,
        "groups": {"areas": list(AREAS), "ways": list(WAYS), "nodes": list(NODES)},
        "ref_latlonalt": (latitude, longitude, 0),
        "tiles_bbox": boxes,
        "tiles_raster": tiles,
    } | changes


def png(classes):
    """A PNG whose red, green and blue are areas, ways and nodes."""
    return cv2.imencode(".png", np.ascontiguousarray(classes[::-1].transpose(1, 2, 0)))[1].tobytes()


def write(path, value, protocol=4):
    path.write_bytes(value if isinstance(value, bytes) else pickle.dumps(value, protocol))
    return path


def same(a, b):
    np.testing.assert_array_equal(a.classes, b.classes)
    assert a.pixels_per_metre == b.pixels_per_metre and a.projection == b.projection
    assert np.allclose([a.box.x_min, a.box.y_max], [b.box.x_min, b.box.y_max])


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_read(tmp_path, protocol):
    same(read_tiles_pickle(write(tmp_path / "tiles.pkl", content(), protocol)), city(64, 100))


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_numbers_of_numpy_1_and_2(tmp_path, module):
    data = pickle.dumps(content(), protocol=3)
    here = np.float64(0).__reduce__()[0].__module__.encode()
    assert here in data
    same(read_tiles_pickle(write(tmp_path / "tiles.pkl", data.replace(here, module))), city(64, 100))


@pytest.mark.parametrize(
    ("height", "width", "tile_size"), [(150, 200, 32.0), (64, 64, 32.0), (1, 1, 128.0), (65, 64, 32.0), (40, 500, 100.5)]
)
def test_write_and_read(tmp_path, height, width, tile_size):
    written = city(height, width)
    write_tiles_pickle(written, tmp_path / "tiles.pkl", tile_size)
    same(read_tiles_pickle(tmp_path / "tiles.pkl"), written)


def test_written_tiles_are_the_formats(tmp_path):
    """What any program finds with pickle.load: north-west corner and size of each tile."""
    written = city(150, 200)
    write_tiles_pickle(written, tmp_path / "tiles.pkl", 32.0)
    with open(tmp_path / "tiles.pkl", "rb") as file:
        found = pickle.load(file)
    assert found["groups"] == content()["groups"] and found["ref_latlonalt"] == (52.47, 13.44, 0.0)
    assert set(found["tiles_raster"]) == {(i, j) for i in range(4) for j in range(3)}
    for (i, j), bytes_io in found["tiles_raster"].items():
        x_min, y_min, x_max, y_max = map(float, found["tiles_bbox"][i, j].split(","))
        assert (x_min, y_min) == (-40.25 + 32 * i, 7.5 + 32 * j)
        picture = cv2.imdecode(np.frombuffer(bytes_io.read(), np.uint8), cv2.IMREAD_COLOR)[..., ::-1].transpose(2, 0, 1)
        assert picture.shape == (3, 2 * (y_max - y_min), 2 * (x_max - x_min))
        np.testing.assert_array_equal(picture, written.query(Box(x_min, y_min, x_max, y_max)).classes)


def test_a_missing_tile_is_void_and_a_tile_may_be_a_row_too_large(tmp_path):
    whole = content()
    del whole["tiles_raster"][1, 0]
    found = read_tiles_pickle(write(tmp_path / "tiles.pkl", whole))
    np.testing.assert_array_equal(found.classes[:, :, :64], city(64, 100).classes[:, :, :64])
    assert not found.classes[:, :, 64:].any()
    larger = np.pad(city(64, 100).classes[:, :, :64], ((0, 0), (0, 1), (0, 0)))  # a fraction of a pixel more to the south
    found = read_tiles_pickle(write(tmp_path / "tiles.pkl", content(tiles_raster={(0, 0): io.BytesIO(png(larger))})))
    np.testing.assert_array_equal(found.classes[:, :, :64], city(64, 100).classes[:, :, :64])


@pytest.mark.parametrize("less, moved", [(0.1, 0), (0.35, 1)])
def test_a_height_that_is_no_whole_number_of_pixels(tmp_path, less, moved):
    """Rows of a tile count from its northern edge, in the format's program: v = (y_max - y) ppm - 0.5."""
    whole = city(64, 100)
    y_max = whole.box.y_max - less
    box = f"{whole.box.x_min},{whole.box.y_min},{whole.box.x_max},{y_max}"
    found = read_tiles_pickle(write(tmp_path / "tiles.pkl", content(bbox=box)))
    assert found.classes.shape == (3, 64, 100)
    np.testing.assert_array_equal(found.classes[:, moved:], whole.classes[:, : 64 - moved])
    for row in (0, 30, 62):  # where a row of the tile lies, in metres, there is it in the map, to half a pixel
        _, v = found.to_pixels((0.0, y_max - (row + 0.5) / 2))
        np.testing.assert_array_equal(found.classes[:, round(v)], whole.classes[:, row])


class Run:
    """A pickle of it calls a function with arguments."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def tile(data):
    return {"tiles_raster": {(0, 0): io.BytesIO(data)}}


def vast_png(width, height):
    """A PNG whose head says that it is larger than its pixels are."""
    data = png(np.zeros((3, 4, 4), np.uint8))
    head = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + head + struct.pack(">I", zlib.crc32(head)) + data[33:]


GROUPS = content()["groups"]
SMALL = png(np.zeros((3, 4, 4), np.uint8))
GOOD = png(city(64, 100).classes[:, :, :64])
ROW = png(np.full((3, 64, 64), 99, np.uint8))


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (b"", "not a file of map tiles"),
        (b"<html>", "not a file of map tiles"),
        (pickle.dumps(content())[:-100], "not a file of map tiles"),
        (b"\x80\x04P1\n.", "not a file of map tiles"),  # a persistent id
        (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b".", "not a file of map tiles"),  # says: bytes of an exabyte
        (b"\x80\x04}" + b")" + b"\x85" * 1_000_000 + b"K\x01s.", "not a file of map tiles: tuples in tuples"),
        ([1, 2], "expected a dictionary with bbox, .*; it lacks bbox"),
        ({k: v for k, v in content().items() if k != "ppm"}, "it lacks ppm"),
        (content(groups={**GROUPS, "nodes": ["tree"]}), "expected the 33 nodes tree, ..., street_cabinet, got 1 others"),
        (content(groups=[1]), "expected the 7 areas .* got none"),
        (content(bbox="0,0,1"), "bbox: expected 'xmin,ymin,xmax,ymax' in metres, got '0,0,1'"),
        (content(bbox=[0, 0, 1, 1]), "bbox: expected .* got list"),
        (content(bbox="0,0,nan,1"), "bbox: expected"),
        (content(bbox="0,0,1e9,1e9"), r"expected at most 2\*\*30 pixels"),
        (content(ppm=0), "ppm: expected a positive number"),
        (content(tile_size="128"), "tile_size: expected a positive number"),
        (content(ppm=10**400), "ppm: expected a positive number"),
        (content(tile_size=10**400), "tile_size: expected a positive number"),
        (content(tile_size=1e308), r"tile_size: expected one to 1048576 pixels, got 1e\+308 m with 2 a metre"),
        (content(tile_size=0.25), "tile_size: expected one to 1048576 pixels, got 0.25 m with 2 a metre"),
        (content(tile_size=10**3000), "a vast number, which it has no use for"),
        (content(ref_latlonalt=(10**400, 13, 0)), "ref_latlonalt: expected 3 numbers"),
        (content(ref_latlonalt=(52, 13, float("nan"))), "ref_latlonalt: expected 3 numbers"),
        (content(tiles_raster={(10**400, 0): io.BytesIO(GOOD)}), r"expected tiles under \(column, row\), got tuple"),
        (content(ref_latlonalt=(52, 13)), "ref_latlonalt: expected 3 numbers"),
        (content(ref_latlonalt=(152, 13, 0)), r"expected a latitude in \[-90, 90\]"),
        (content(tiles_raster=[1]), "tiles_raster: expected a dictionary of tiles, got list"),
        (content(tiles_raster={0: io.BytesIO(GOOD)}), r"expected tiles under \(column, row\), got int"),
        (content(tiles_raster={(0, -1): io.BytesIO(GOOD)}), r"expected tiles under \(column, row\), got tuple \(0, -1\)"),
        (content(tiles_raster={(9, 0): io.BytesIO(GOOD)}), r"tile \(9, 0\): lies outside of the map of 100 x 64 pixels"),
        (content(tiles_raster={(0, 0): GOOD}), r"tile \(0, 0\): expected a PNG in a BytesIO"),
        (content(**tile(b"JPEG")), r"tile \(0, 0\): expected a PNG, whole and undamaged"),
        (content(**tile(GOOD[:-20])), "whole and undamaged"),
        (content(**tile(SMALL)), "expected 64 x 64 pixels, got 4 x 4"),
        (content(**tile(vast_png(60000, 60000))), "expected at most 65 x 65 pixels, got 60000 x 60000"),
        (content(**tile(GOOD[:500] + b"x" + GOOD[501:])), "whole and undamaged"),
        (content(**tile(vast_png(64, 64))), "expected a PNG that OpenCV reads"),
        (content(**tile(ROW)), "expected values in 0..7 for areas, got 99"),
    ],
)
def test_bad_files_give_one_line(tmp_path, value, match):
    path = write(tmp_path / "tiles.pkl", value)
    with pytest.raises(DataError, match=match) as caught:
        read_tiles_pickle(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_no_such_file(tmp_path):
    with pytest.raises(DataError, match="none.pkl: No such file"):
        read_tiles_pickle(tmp_path / "none.pkl")


@pytest.mark.parametrize("protocol", [0, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "call",
    [
        (os.system, "touch ran"),
        (eval, "open('ran', 'w')"),
        (open, "ran", "w"),
        (__import__, "antigravity"),
        (getattr, "x", "upper"),
        (io.StringIO, "x"),
        (np.array, [1, 2]),
        (np.load, "ran"),
    ],
)
def test_nothing_is_executed(tmp_path, monkeypatch, call, protocol):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "tiles.pkl", {"bbox": Run(*call)}, protocol)
    with pytest.raises(
        DataError, match="asks for '.*', which no file of map tiles needs: refused, nothing was executed"
    ) as caught:
        read_tiles_pickle(path)
    assert not (tmp_path / "ran").exists() and "\n" not in str(caught.value)


def op_global(module, name):
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


@pytest.mark.parametrize(
    "program",
    [
        op_global("io", "BytesIO.__init__") + b".",
        op_global("numpy.core.multiarray", "_reconstruct") + b".",
        op_global("numpy", "dtype") + b"}\x8c\x04codeK\x01sb.",  # attributes of a class
        op_global("numpy.core.multiarray", "scalar") + b"N}\x8c\x08__name__\x8c\x01xs\x86b.",  # and of a function
        op_global("numpy.core.multiarray", "scalar") + b"N}\x8c\x0c__defaults__N}s\x86bK\x01K\x02\x86R.",
        op_global("numpy.core.multiarray", "scalar") + b"K\x01C\x02ab\x86R.",  # a scalar whose type is a number
        op_global("numpy", "dtype") + b"\x8c\x01O\x85R.",
        b"\x82\x01.",  # the registry of extensions
    ],
)
def test_programs_leave_no_trace(tmp_path, program):
    """A pickle that tampers with what it is given fails, and the next file is read as ever."""
    with pytest.raises(DataError):
        read_tiles_pickle(write(tmp_path / "bad.pkl", b"\x80\x04" + program))
    same(read_tiles_pickle(write(tmp_path / "tiles.pkl", content())), city(64, 100))


HOSTILE = {
    # t = (t, t), sixty times, and a key of a dictionary
    "shared tuples": (
        b"\x80\x04})" + b"".join(b"\x940h" + bytes([k]) + b"h" + bytes([k]) + b"\x86" for k in range(60)) + b"K\x01s.",
        "tuples in tuples",
    ),
    "shared tuples by DUP": (b"\x80\x04})" + b"2\x86" * 60 + b"K\x01s.", "DUP"),
    "shared tuples behind a BUILD of nothing": (
        b"\x80\x04})" + b"".join(b"N}\x86b\x94h" + bytes([k]) + b"\x86" for k in range(60)) + b"K\x01s.", "tuples in tuples",
    ),
    "shared tuples behind SETITEMS of nothing": (
        b"\x80\x04})" + b"".join(b"(u\x94h" + bytes([k]) + b"\x86" for k in range(60)) + b"K\x01s.", "tuples in tuples",
    ),
    "shared tuples behind marks": (
        b"\x80\x04})" + b"".join(b"\x94(h" + bytes([k]) + b"h" + bytes([k]) + b"t" for k in range(60)) + b"K\x01s.",
        "tuples in tuples",
    ),
    "frozen sets": (b"\x80\x04}(" + b"(" * 60 + b"\x91" * 60 + b"K\x01s.", "FROZENSET"),
    "a set": (b"\x80\x04\x8f(K\x01\x90.", "EMPTY_SET"),
    "a long tuple as many keys": (
        b"\x80\x04}(" + b"N" * 10**6 + b"t\x94K\x01s" + b"h\x00K\x01s" * 10**6 + b".", "tuples in tuples, or of many things",
    ),
    "a vast number as many keys": (
        b"\x80\x04}\x8b" + struct.pack("<I", 10**6) + b"\x01" * 10**6 + b"\x94K\x01s" + b"h\x00K\x01s" * 10**6 + b".",
        "a vast number",
    ),
    "a memo without end": (b"\x80\x04Nr\xff\xff\xff\x03.", "number 67108863 in a memo, after 3 operations"),
    "a memo without end, as text": (b"Np67108863\n.", "number 67108863 in a memo, after 2 operations"),
    "marks without end": (b"\x80\x04" + b"N" * 10**6 + b"(1" * 10**6 + b".", "it lacks"),
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What is said of each hostile file, by one process that must not take long, nor much memory."""
    folder = tmp_path_factory.mktemp("hostile")
    for i, (program, _) in enumerate(HOSTILE.values()):
        write(folder / f"{i}.pkl", program)
    code = (
        "import resource\nfrom mdps.maps import DataError, read_tiles_pickle\n"
        f"peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\nfor i in range({len(HOSTILE)}):\n"
        f"    before = peak()\n    try:\n        read_tiles_pickle({str(folder)!r} + f'/{{i}}.pkl')\n"
        "    except DataError as error:\n        print((peak() - before) // 1024, error, flush=True)\n"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        printed = done.stdout
        assert done.returncode == 0, done.stderr
    except subprocess.TimeoutExpired as expired:
        printed = (expired.stdout or b"").decode()
    return printed.splitlines()


@pytest.mark.parametrize("name", HOSTILE)
def test_little_data_takes_little_time_and_memory(answers, name):
    i = list(HOSTILE).index(name)
    assert len(answers) > i, "it did not come to an end"
    megabytes, _, told = answers[i].partition(" ")
    assert f"{i}.pkl" in told and HOSTILE[name][1] in told and int(megabytes) < 100


def test_every_writer_of_tiles_is_followed(tmp_path):
    """Both of Python's picklers, all protocols that can hold bytes, with and without `pickletools.optimize`; many tiles."""
    keys = [(i, j) for i in range(30) for j in range(30)]
    boxes = dict.fromkeys(keys, "0,0,1,1")  # the same tuples as keys of two dictionaries
    tiles = {key: io.BytesIO(GOOD) for key in keys[:1] + keys[30:31]}
    whole = content(tiles_bbox=boxes, tiles_raster=tiles, tile_size=np.float64(32), ppm=np.int64(2))
    known = read_tiles_pickle(write(tmp_path / "tiles.pkl", content(tiles_raster={(0, 0): io.BytesIO(GOOD)}))).classes
    whole["tiles_raster"].pop((1, 0))
    for protocol in (3, 4, 5):
        slow = io.BytesIO()
        pickle._Pickler(slow, protocol).dump(whole)
        for data in (pickle.dumps(whole, protocol), slow.getvalue()):
            for form in (data, pickletools.optimize(data)):
                np.testing.assert_array_equal(read_tiles_pickle(write(tmp_path / "tiles.pkl", form)).classes, known)


@pytest.mark.parametrize("size", [0.0, -1.0, 0.3, np.nan, np.inf])
def test_bad_tile_size(tmp_path, size):
    with pytest.raises(ValueError, match="tile_size: expected a positive number of whole pixels, got"):
        write_tiles_pickle(city(), tmp_path / "tiles.pkl", size)
