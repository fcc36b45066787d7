"""python -m mdps.maps raster: the files that it writes, where a GIS program puts them, and errors of one line."""

import subprocess
import sys

import numpy as np
import pytest
from osm_files import town, write_json, write_xml

from mdps.maps import Projection, RasterMap, read_osm
from mdps.maps.__main__ import main

cv2 = pytest.importorskip("cv2")

BBOX = "50.0,8.0,50.001,8.0015"


@pytest.fixture
def town_file(tmp_path):
    return write_xml(tmp_path / "town.osm", town())


def run(capsys, *arguments):
    code = main(["raster", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_writes_picture_map_and_place(tmp_path, town_file, capsys):
    out = tmp_path / "a" / "map.png"
    out.parent.mkdir()
    code, text, error = run(capsys, "--osm", town_file, "--bbox", BBOX, "--out", out)
    assert code == 0 and not error
    assert sorted(file.name for file in out.parent.iterdir()) == ["map.npz", "map.pgw", "map.png", "map.png.aux.xml", "map.prj"]
    city = RasterMap.load(out.with_suffix(".npz"))
    assert city.projection == Projection(50.0005, 8.00075) and city.pixels_per_metre == 2.0
    np.testing.assert_array_equal(cv2.imread(str(out))[..., ::-1], city.colour())
    height, width = city.classes.shape[1:]
    assert f"{width} x {height} pixels, 2 a metre" in text and "+proj=ortho +lat_0=50.0005 +lon_0=8.00075 +datum=WGS84" in text
    assert f"building {(city.classes[0] == 1).sum()}" in text and "nodes (pixels): tree 1\n" in text


def test_as_a_command(tmp_path, town_file):
    command = [sys.executable, "-m", "mdps.maps", "raster", "--osm", town_file, "--bbox", BBOX, "--ppm", "0.5"]
    done = subprocess.run([*command, "--out", tmp_path / "none" / "map.png"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "No such file or directory" in done.stderr


def corners_by_world_file(path, raster):
    """Outer corners of the picture by the format's definition, in metres."""
    a, d, b, e, c, f = (float(line) for line in path.read_text().split())
    height, width = raster.classes.shape[1:]
    return np.array([(a * u + b * v + c, d * u + e * v + f) for u, v in ((-0.5, -0.5), (width - 0.5, height - 0.5))])


def test_world_file_and_reference_systems(tmp_path, town_file, capsys):
    """pyproj, told only what the files say, finds the places on the Earth that the map's own projection does."""
    pyproj = pytest.importorskip("pyproj")
    out = tmp_path / "map.png"
    assert run(capsys, "--osm", town_file, "--bbox", BBOX, "--out", out)[0] == 0
    city = RasterMap.load(out.with_suffix(".npz"))
    corners = corners_by_world_file(out.with_suffix(".pgw"), city)
    np.testing.assert_allclose(corners, [(city.box.x_min, city.box.y_max), (city.box.x_max, city.box.y_min)], atol=1e-9)
    aux = (tmp_path / "map.png.aux.xml").read_text()
    wkt2 = aux.split("<SRS>")[1].split("</SRS>")[0].replace("&quot;", '"')
    for wkt in ((tmp_path / "map.prj").read_text(), wkt2):
        crs = pyproj.CRS.from_wkt(wkt)
        assert crs.is_projected
        longitude, latitude = pyproj.Transformer.from_crs(crs, "EPSG:4326", always_xy=True).transform(*corners.T)
        np.testing.assert_allclose(np.stack([latitude, longitude], -1), city.projection.to_degrees(corners), atol=1e-11)
    assert pyproj.CRS.from_wkt(wkt2).coordinate_operation.method_code == "9840"


@pytest.mark.parametrize("name", ["map.png", "map.tif"])
def test_gdal_finds_the_place(tmp_path, town_file, capsys, name):
    """A building's corner, found in the picture by GDAL's georeference, lies at its node's latitude and longitude."""
    rasterio, pyproj = pytest.importorskip("rasterio"), pytest.importorskip("pyproj")
    assert run(capsys, "--osm", town_file, "--bbox", BBOX, "--out", tmp_path / name, "--ppm", 10)[0] == 0
    with rasterio.open(tmp_path / name) as file:
        picture, crs, place = file.read(), file.crs, file.transform
    np.testing.assert_array_equal(picture.transpose(1, 2, 0), RasterMap.load(tmp_path / "map.npz").colour())
    rows, columns = np.nonzero((picture == np.array([0, 0, 255])[:, None, None]).all(0))  # outlines of buildings
    x, y = place.c + place.a * (columns.min() + 0.5), place.f + place.e * (rows.max() + 0.5)  # the school's south-west
    longitude, latitude = pyproj.Transformer.from_crs(crs.to_wkt(), "EPSG:4326", always_xy=True).transform(x, y)
    south, west = read_osm(town_file).nodes[1][:2]
    assert abs(latitude - south) * 111_000 < 0.11 and abs(longitude - west) * 71_500 < 0.11  # a pixel is 0.1 m


def test_bounds_of_the_file_and_southern_places(tmp_path, capsys):
    south = [element | {"lat": -element["lat"]} if "lat" in element else element for element in town()]
    bounds = {"minlat": -50.001, "minlon": 8.0, "maxlat": -50.0, "maxlon": 8.0015}
    source = write_json(tmp_path / "town.json", south, bounds=bounds)
    assert run(capsys, "--osm", source, "--out", tmp_path / "a.png")[0] == 0
    assert run(capsys, "--osm", source, "--bbox", "-50.001,8.0,-50.0,8.0015", "--out", tmp_path / "b.png")[0] == 0
    a, b = (RasterMap.load(tmp_path / name) for name in ("a.npz", "b.npz"))
    assert a.box == b.box and (a.classes[0] == 1).any()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            ["--bbox", "50.001,8.0,50.0,8.0015"],
            "--bbox: expected LAT,LON,LAT,LON in degrees, the south-west, then",
        ),
        (["--bbox", "50,8.01,50.01,8"], "the south-west, then the north-east corner, got '50,8.01,50.01,8'"),
        (["--bbox", "50,8,50.1"], "--bbox: expected LAT,LON,LAT,LON"),
        (["--bbox", "50,8,50.1,east"], "--bbox: expected LAT,LON,LAT,LON"),
        (["--bbox", "50,8,nan,9"], "--bbox: expected LAT,LON,LAT,LON"),
        (["--bbox", "50,8,95,9"], "--bbox: expected LAT,LON,LAT,LON"),
        (["--bbox", "60,8,60.1,8.1"], "--bbox: meets no data, the nodes of .* lie in 49.90000,8.00020,50.00080,8.00130$"),
        (["--bbox", "8.0,50.0,8.0015,50.001"], r"meets no data.*\(latitude and longitude are swapped\?\)"),
        ([], "names no bounds; give --bbox; its nodes lie in 49.9"),
        (["--bbox", "40,0,60,20"], r"expected at most 2\*\*30 pixels"),
        (["--bbox", BBOX, "--ppm", "0"], "pixels_per_metre: expected a positive number, got 0.0"),
        (["--bbox", BBOX, "--ppm", "1000"], "pixels_per_metre: expected at most 100"),
        (["--bbox", BBOX, "--out", "map.jpg"], r"--out: expected a name that ends with .png or .tif, got 'map.jpg'"),
        (["--bbox", BBOX, "--out", "none/map.tif"], "none/map.tif"),
        (["--bbox", BBOX, "--osm", "none.osm"], "none.osm: No such file"),
    ],
)
def test_errors_are_one_line(tmp_path, town_file, capsys, monkeypatch, options, match):
    monkeypatch.chdir(tmp_path)
    given = {"--osm": str(town_file), "--out": "map.png"} | dict(zip(options[::2], options[1::2]))
    if given["--out"].endswith(".tif"):
        pytest.importorskip("rasterio")
    code, text, error = run(capsys, *(value for pair in given.items() for value in pair))
    assert code == 1 and not text and error.startswith("error: ") and error.count("\n") == 1
    with pytest.raises(ValueError, match=match):
        raise ValueError(error.strip())
    assert not list(tmp_path.glob("map*"))


def test_no_nodes(tmp_path, capsys):
    source = write_json(tmp_path / "x.json", [{"type": "way", "id": 1, "nodes": [1, 2]}])
    code, _, error = run(capsys, "--osm", source, "--bbox", BBOX, "--out", tmp_path / "map.png")
    assert code == 1 and "holds no nodes, so nothing has a place" in error


@pytest.mark.parametrize(("module", "name"), [("cv2", "map.png"), ("rasterio", "map.tif")])
def test_optional_packages(tmp_path, town_file, capsys, monkeypatch, module, name):
    monkeypatch.setitem(sys.modules, module, None)
    code, _, error = run(capsys, "--osm", town_file, "--bbox", BBOX, "--out", tmp_path / name)
    assert code == 1 and "pip install" in error and error.count("\n") == 1


def test_a_map_that_is_too_wide_for_a_png(tmp_path, town_file, capsys):
    """A strip of 520 km by 0.1 km: libpng ends at a million pixels."""
    out = tmp_path / "wide.png"
    assert main(["raster", "--osm", str(town_file), "--bbox", "50,5,50.001,12.5", "--out", str(out)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {out}: expected at most 1000000 pixels a side for a PNG, got ") and err.count("\n") == 1
    assert not out.exists()
