"""Projection against pyproj and EPSG's worked example; pixels, cuts and files of maps."""

import json
import zipfile

import numpy as np
import pytest

from mdps.maps import AREAS, NODES, WAYS, Box, DataError, Projection, RasterMap

PLACES = [(52.4732, 13.4396, 0.0), (60.16945, 24.943, 30.0), (-33.87, 151.2, 0.0), (0.0, 0.0, 0.0), (78.2, 179.99, 5.0)]


def around(origin, degrees=0.3):
    rng = np.random.default_rng(0)
    return np.array(origin[:2]) + rng.uniform(-degrees, degrees, (500, 2))


@pytest.mark.parametrize("origin", PLACES)
def test_projection_is_pyprojs_topocentric_one(origin):
    pyproj = pytest.importorskip("pyproj")
    points = around(origin)
    ellipsoid = "+ellps=WGS84"
    topocentric = f"+proj=topocentric +lat_0={origin[0]} +lon_0={origin[1]} +h_0={origin[2]} {ellipsoid}"
    pipeline = pyproj.Transformer.from_pipeline(f"+proj=pipeline +step +proj=cart {ellipsoid} +step {topocentric}")
    east, north, _ = pipeline.transform(points[:, 1], points[:, 0], np.zeros(len(points)))
    np.testing.assert_allclose(Projection(*origin).to_metres(points), np.stack([east, north], -1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("origin", PLACES)
def test_projection_is_pyprojs_orthographic_one(origin):
    pyproj = pytest.importorskip("pyproj")
    points = around(origin)
    east, north = pyproj.Proj(f"+proj=ortho +lat_0={origin[0]} +lon_0={origin[1]} +ellps=WGS84")(points[:, 1], points[:, 0])
    np.testing.assert_allclose(Projection(*origin).to_metres(points), np.stack([east, north], -1), atol=1e-6, rtol=0)


def test_projection_of_epsgs_example():
    """Guidance note 7-2, Geographic/topocentric conversions; its point is 73 m high, ours lies on the ellipsoid below."""
    latitude, longitude = 53 + 48 / 60 + 33.820 / 3600, 2 + 7 / 60 + 46.380 / 3600
    phi, phi_0, turn = np.radians([latitude, 55.0, longitude - 5.0])
    up = np.array([np.cos(phi) * np.sin(turn), np.sin(phi) * np.cos(phi_0) - np.cos(phi) * np.sin(phi_0) * np.cos(turn)])
    xy = Projection(55.0, 5.0, 200.0).to_metres((latitude, longitude))
    np.testing.assert_allclose(xy + 73.0 * up, [-189013.869, -128642.040], atol=1e-3, rtol=0)


@pytest.mark.parametrize("origin", PLACES)
def test_projection_and_back(origin):
    projection, points = Projection(*origin), around(origin)
    xy = projection.to_metres(points)
    np.testing.assert_allclose(projection.to_metres(projection.to_degrees(xy)), xy, atol=1e-6, rtol=0)
    turns = (projection.to_degrees(xy) - points + 180.0) % 360.0 - 180.0
    np.testing.assert_allclose(turns, 0.0, atol=1e-10)
    assert projection.to_metres(np.zeros((0, 2))).shape == (0, 2)
    assert np.abs(projection.to_metres(origin[:2])).max() < 1e-8


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: Projection(91, 0), r"Projection: expected a latitude in \[-90, 90\].*got \(91.0, 0.0\)"),
        (lambda: Projection(0, 0, np.nan), "Projection: expected a finite altitude, got nan"),
        (lambda: Projection(52, 13).to_metres([1.0, 2.0, 3.0]), r"latitude_longitude: expected a shape \(..., 2\), got \(3,\)"),
        (lambda: Projection(52, 13).to_metres([(52, 13), (np.nan, 13)]), r"expected a latitude .* got \(nan, 13.0\)"),
        (lambda: Projection(52, 13).to_metres((-52, -167)), r"\(-52.0, -167.0\) is more than 60 degrees away"),
        (lambda: Projection(52, 13).to_degrees((1e7, 0.0)), "xy: expected finite metres around the origin, got .*10000000"),
        (lambda: Projection(52, 13).to_degrees((np.nan, 0.0)), "xy: expected finite metres"),
        (lambda: Projection(52, 13).to_box(53, 13, 52, 14), "expected south < north and west < east, got latitudes 53, 52"),
        (lambda: Box(0, 0, -1, 1), "Box: expected x_min < x_max"),
        (lambda: Box(0, 0, np.inf, 1), "Box: expected finite bounds"),
        (lambda: raster(4, 4, ppm=0.0), "pixels_per_metre: expected a positive number, got 0.0"),
        (lambda: RasterMap(np.zeros((3, 4, 4)), 1, Box(0, 0, 4, 4), Projection(0, 0)), "classes: expected uint8"),
        (
            lambda: RasterMap(np.zeros((3, 5, 4), np.uint8), 1, Box(0, 0, 4, 4), Projection(0, 0)),
            r"\(4, 4\) for .* got \(5, 4\)",
        ),
        (lambda: raster(4, 4).query(Box(0, 0, 1e6, 1e6)), r"expected at most 2\*\*30 pixels, got 2000000 x 2000000"),
    ],
)
def test_bad_arguments(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_box():
    box = Box.around((10.0, -5.0), (4.0, 2.0))
    assert box == Box(8, -6, 12, -4) and box.centre == (10.0, -5.0) and box.size == (4.0, 2.0)
    assert box.grown(1.0) == Box(7, -7, 13, -3)
    np.testing.assert_array_equal(box.contains([(8, -6), (10, -5), (12.1, -5), (np.nan, 0)]), [True, True, False, False])
    assert box.intersects(Box(12, -4, 13, 0)) and not box.intersects(Box(12.1, -4, 13, 0))


def raster(height, width, ppm=2.0, corner=(100.0, 50.0)):
    """Every pixel has values that no neighbour has."""
    rows, columns = np.mgrid[:height, :width]
    classes = np.stack([(rows + 3 * columns) % 8, (2 * rows + columns) % 11, (5 * rows + 7 * columns) % 34]).astype(np.uint8)
    scale = ppm or 1.0
    box = Box(*corner, corner[0] + width / scale, corner[1] + height / scale)
    return RasterMap(classes, ppm, box, Projection(52.0, 13.0))


def test_pixels_are_integers_at_centres():
    city = raster(20, 30)  # x 100..115, y 50..60
    np.testing.assert_allclose(
        city.to_pixels([(100.25, 59.75), (100.0, 60.0), (115.0, 50.0)]), [(0, 0), (-0.5, -0.5), (29.5, 19.5)]
    )
    xy = np.random.default_rng(0).uniform(0, 200, (4, 5, 2))
    np.testing.assert_allclose(city.to_metres(city.to_pixels(xy)), xy, atol=1e-12)


@pytest.mark.parametrize(
    "box", [Box(103, 52, 108, 57), Box(95, 45, 120, 65), Box(98.3, 57.9, 103.3, 62.9), Box(112, 40, 118, 51)]
)
def test_query_keeps_every_pixel_in_its_place(box):
    city = raster(20, 30)
    cut = city.query(box)
    assert cut.classes.shape == (3, round(2 * box.size[1]), round(2 * box.size[0]))
    assert abs(cut.box.x_min - box.x_min) <= 0.25 and abs(cut.box.y_max - box.y_max) <= 0.25
    rows, columns = np.mgrid[: cut.classes.shape[1], : cut.classes.shape[2]]
    uv = city.to_pixels(cut.to_metres(np.stack([columns, rows], -1)))
    u, v = np.moveaxis(np.round(uv).astype(int), -1, 0)
    np.testing.assert_allclose(uv, np.stack([u, v], -1), atol=1e-9)
    inside = (u >= 0) & (u < 30) & (v >= 0) & (v < 20)
    expected = np.where(inside, city.classes[:, v.clip(0, 19), u.clip(0, 29)], 0)
    np.testing.assert_array_equal(cut.classes, expected)


def test_query_is_a_copy_and_one_size_everywhere():
    city = raster(200, 300, corner=(-1234.567, 7654.321))
    rng = np.random.default_rng(0)
    for _ in range(300):
        centre = rng.uniform((-1240, 7650), (-1080, 7760))
        assert city.query(Box.around(centre, 12.8000006)).classes.shape == (3, 26, 26)
        assert city.query(Box.around(centre, 64.0)).classes.shape == (3, 128, 128)
    cut = city.query(city.box)
    assert cut.box == city.box and not np.shares_memory(cut.classes, city.classes)
    np.testing.assert_array_equal(cut.classes, city.classes)
    assert city.query(Box(0, 0, 10, 10)).classes.max() == 0  # far away


def test_sizes_are_rounded_with_tolerance():
    box = Box(0.0, 0.0, 640.00000000000025, 64.00003)
    assert RasterMap(np.zeros((3, 128, 1280), np.uint8), 2, box, Projection(0, 0)).box == Box(0, 0, 640, 64)
    grown = RasterMap(np.zeros((3, 129, 1281), np.uint8), 2, Box(0, 0, 640.2, 64.4), Projection(0, 0))
    assert grown.box == Box(0, 0, 640.5, 64.5)


def test_colours():
    city = raster(8, 8)
    city.classes[:, :2] = 0
    city.classes[0, 0] = 1
    city.classes[1, 0, 1], city.classes[2, 1] = 8, 5
    picture = city.colour()
    assert picture.dtype == np.uint8 and picture.shape == (8, 8, 3)
    assert picture[0, 0].tolist() == [84, 155, 255] and picture[0, 1].tolist() == [255, 0, 0]  # building, road over it
    assert picture[1, 3].tolist() == [229, 229, 229]


def test_save_and_load(tmp_path):
    city = raster(20, 30, ppm=3.0, corner=(-1 / 3, 2 / 7))
    city.save(tmp_path / "map of a city")
    again = RasterMap.load(tmp_path / "map of a city")
    np.testing.assert_array_equal(again.classes, city.classes)
    assert (again.pixels_per_metre, again.box, again.projection) == (3.0, city.box, city.projection)
    assert [file.name for file in tmp_path.iterdir()] == ["map of a city"]
    with np.load(tmp_path / "map of a city", allow_pickle=False) as arrays:
        assert set(arrays) == {"where", "classes"}


def changed(path, **changes):
    """The saved file with other values."""
    with np.load(path) as arrays:
        content = dict(arrays)
    where = json.loads(str(content["where"])) | {k: v for k, v in changes.items() if k != "classes"}
    np.savez(path, where=np.array(json.dumps(where)), classes=changes.get("classes", content["classes"]))


def flipped(data, i):
    return data[:i] + bytes([data[i] ^ 255]) + data[i + 1 :]


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda p: p.unlink(), "no such file"),
        (lambda p: p.write_bytes(b""), "not a map file that RasterMap.save wrote, or damaged"),
        (lambda p: p.write_text("<html>"), "not a map file"),
        (lambda p: p.write_bytes(p.read_bytes()[:-40]), "not a map file"),
        (lambda p: p.write_bytes(p.read_bytes().replace(b"where.npy", b"other.npy")), "damaged"),
        (lambda p: p.write_bytes(flipped(p.read_bytes(), 500)), "damaged"),
        (lambda p: np.savez(p, other=np.zeros(3)), "KeyError"),
        (lambda p: np.savez(p, where=np.array({}, dtype=object), classes=np.zeros(3)), "Object arrays"),
        (lambda p: changed(p, format="other"), "expected a map file of format 'mdps raster map 1'"),
        (
            lambda p: changed(p, groups={"areas": list(AREAS), "ways": ["road"], "nodes": list(NODES)}),
            "expected the 10 ways fence",
        ),
        (lambda p: changed(p, groups=None), "expected the 7 areas building, ..., water, got none"),
        (lambda p: changed(p, box=[0, 0, 1]), "damaged"),
        (lambda p: changed(p, box=[0, 0, 1, 1]), r"expected \(H, W\) = \(2, 2\)"),
        (lambda p: changed(p, origin=[99, 0, 0]), "expected a latitude"),
        (lambda p: changed(p, pixels_per_metre="two"), "damaged"),
        (lambda p: changed(p, classes=np.full((3, 20, 30), 200, np.uint8)), r"expected values in 0..7 for areas, got 200"),
    ],
)
def test_bad_files_give_one_line(tmp_path, damage, match):
    path = tmp_path / "map.npz"
    raster(20, 30).save(path)
    damage(path)
    with pytest.raises(DataError, match=match) as caught:
        RasterMap.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_claims_to_be_vast_is_not_unpacked(tmp_path):
    path = tmp_path / "map.npz"
    raster(20, 30).save(path)
    with zipfile.ZipFile(path) as archive:
        where = archive.read("where.npy")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("where.npy", where + bytes(1 << 22))
    with pytest.raises(DataError, match="where says that it holds 419"):
        RasterMap.load(path)


def test_numbers_of_groups():
    assert (len(AREAS), len(WAYS), len(NODES)) == (7, 10, 33)
