"""Classes by tags, elements with holes, and pictures against geometry that is worked out pixel by pixel."""

import sys
import tracemalloc

import numpy as np
import pytest
from osm_files import town, write_json
from real_data import real_data

from mdps.maps import (
    AREAS,
    NODES,
    WAYS,
    Area,
    Box,
    Elements,
    Line,
    Point,
    Projection,
    elements,
    osm_elements,
    rasterise,
    read_osm,
)
from mdps.maps.osm import Member, Node, OsmData, Relation, Way
from mdps.maps.osm_classes import classify, is_area, is_on_ground

pytest.importorskip("cv2")

PLANE = Projection(50.0, 8.0)
AREA, WAY, NODE = "area", "way", "node"


@pytest.mark.parametrize(
    ("kind", "tags", "group", "label"),
    [
        (AREA, {"building": "yes"}, "building", "building"),
        (AREA, {"building": "house", "amenity": "parking"}, "building", "building:house"),
        (AREA, {"building": "yes", "tourism": "hotel", "amenity": "school"}, "building", "building:school"),
        (AREA, {"building": "no", "leisure": "park"}, "park", "leisure:park"),
        (AREA, {"amenity": "parking_space"}, "parking", "amenity:parking_space"),  # a prefix is enough
        (AREA, {"leisure": "pitch", "landuse": "grass"}, "playground", "leisure:pitch"),
        (AREA, {"landuse": "meadow"}, "grass", "landuse:meadow"),
        (AREA, {"landcover": "grass"}, "grass", "landcover:grass"),
        (AREA, {"landuse": "forest"}, "forest", "landuse:forest"),
        (AREA, {"waterway": "riverbank"}, "water", "waterway:riverbank"),
        (AREA, {"highway": "pedestrian", "area": "yes"}, "path", "highway:pedestrian"),  # group of ways
        (AREA, {"area:highway": "cycleway", "area": "yes"}, "cycleway", "highway:cycleway"),
        (AREA, {"amenity": "fuel"}, "fuel", "amenity:fuel"),  # group of nodes
        (AREA, {"amenity": "school", "landuse": "grass"}, None, None),  # the first key decides, and has no group
        (WAY, {"highway": "motorway_link"}, "road", "highway:motorway_link"),
        (WAY, {"highway": "living_street"}, None, None),
        (WAY, {"highway": "footway", "barrier": "wall"}, "path", "highway:footway"),
        (WAY, {"barrier": "retaining_wall"}, "wall", "barrier:retaining_wall"),
        (WAY, {"barrier": "yes"}, "fence", "barrier:yes"),
        (WAY, {"barrier": "bollard"}, "bollard", "barrier:bollard"),  # group of nodes
        (WAY, {"natural": "tree_row"}, "tree_row", "natural:tree_row"),
        (WAY, {"building": "yes"}, None, None),
        (NODE, {"natural": "tree"}, "tree", "natural:tree"),
        (NODE, {"natural": "tree_row"}, "tree", "natural:tree_row"),
        (NODE, {"barrier": "kerb"}, "kerb", "barrier:kerb"),  # group of ways
        (NODE, {"amenity": "bench", "highway": "crossing"}, "bench", "amenity:bench"),
        (NODE, {"amenity": "disused:bar", "shop": "books"}, "shop", "shop:books"),
        (NODE, {"shop": "disused"}, None, None),
        (NODE, {"highway": "stop"}, "stop_sign", "highway:stop"),
        (NODE, {"public_transport": "stop_position"}, "bus_stop_position", "public_transport:stop_position"),
        (NODE, {"name": "x", "entrance": "yes"}, None, None),
        (NODE, {"building": "yes"}, None, None),
        (NODE, {}, None, None),
    ],
)
def test_classes(kind, tags, group, label):
    assert classify(kind, tags) == (None if group is None else (group, label))


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ({}, True),
        *(({"level": level}, True) for level in ("0", "1", "-1;0", "0,1", "0-3", "-2--0", "0.5", "1;2", "ground", "")),
        *(({"level": level}, False) for level in ("2", "-1", "2;3", "2-5", "-3--1", "1.5")),
        *(({"layer": layer}, True) for layer in ("0", "1", "-1;0", "5", "?")),
        *(({"layer": layer}, False) for layer in ("-1", "-2;-1")),
        ({"location": "underground"}, False),
        ({"parking": "underground"}, False),
        ({"parking": "surface", "location": "roof", "level": "0"}, True),
    ],
)
def test_what_is_on_the_ground(tags, expected):
    assert is_on_ground(tags) == expected
    assert (classify(NODE, {"amenity": "bench", **tags}) is not None) == expected


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ({"building": "yes"}, True),
        ({"building": "no"}, False),
        ({"building": "yes", "area": "no"}, False),
        ({"highway": "residential", "junction": "roundabout"}, False),
        ({"highway": "pedestrian", "area": "yes"}, True),
        ({"natural": "wood"}, True),
        ({"natural": "coastline"}, False),
        ({"barrier": "fence"}, False),
        ({"landuse": "grass"}, True),
    ],
)
def test_closed_ways_that_are_areas(tags, expected):
    assert is_area(tags) == expected


def osm(*ways, nodes=None, relations=()):
    """A grid of nodes: number 100 y + x lies about x, y metres from the origin."""
    places = PLANE.to_degrees([(n % 100, n // 100) for n in range(10_000)])
    grid = {n: Node(*place, {}) for n, place in enumerate(places.tolist())}
    return OsmData(grid if nodes is None else nodes, dict(enumerate(ways)), dict(enumerate(relations)))


def test_town(tmp_path):
    found = osm_elements(read_osm(write_json(tmp_path / "town.json", town())), PLANE)
    assert [(area.group, area.label) for area in found.areas] == [
        ("building", "building:school"),
        ("park", "leisure:park"),
        ("building", "building:apartments"),
    ]
    assert [(line.group, len(line.points)) for line in found.lines] == [("road", 2), ("road", 5)]
    assert [(point.group, point.label) for point in found.points] == [("tree", "natural:tree")]
    outer, inner = found.areas[2].outer, found.areas[2].inner
    assert [len(ring) for ring in outer + inner] == [4, 4]
    assert sorted(map(tuple, outer[0].round())) == [(14, 56), (14, 89), (86, 56), (86, 89)]
    assert not any(found.missing.values())


def test_lines_break_at_missing_nodes_and_areas_go_on():
    data = osm(Way((1, 2, 3, -1, 5, -1, 7, 8), {"highway": "path"}), Way((0, 50, 5050, -1, 5000, 0), {"building": "yes"}))
    found = osm_elements(data, PLANE)
    assert [line.points.round().tolist() for line in found.lines] == [[[1, 0], [2, 0], [3, 0]], [[7, 0], [8, 0]]]
    assert found.areas[0].outer[0].round().tolist() == [[0, 0], [50, 0], [50, 50], [0, 50]]
    assert found.missing["nodes of ways"] == 2 and found.missing["nodes of areas"] == 1


def test_nodes_behind_the_earth_are_missing():
    nodes = {1: Node(50.0, 8.0, {}), 2: Node(50.001, 8.0, {}), 3: Node(-50.0, -172.0, {"natural": "tree"})}
    found = osm_elements(osm(Way((1, 2, 3), {"highway": "path"}), nodes=nodes), PLANE)
    assert len(found.lines[0].points) == 2 and found.missing["nodes of ways"] == 1 and not found.points


@pytest.mark.parametrize("seed", range(5))
def test_rings_of_multipolygons_are_joined(seed):
    """A ring of 12 nodes and a hole, cut into open ways in random order and direction."""
    rng = np.random.default_rng(seed)
    angles = np.arange(12) * np.pi / 6
    ways, members = [], []
    for radius, role in ((40, "outer"), (10, "inner")):
        ring = [int(100 * round(50 + radius * np.sin(a)) + round(50 + radius * np.cos(a))) for a in angles]
        cuts = np.sort(rng.choice(12, 3, replace=False))
        for first, last in zip(cuts, [*cuts[1:], cuts[0] + 12]):
            piece = [ring[i % 12] for i in range(first, last + 1)]
            ways.append(Way(tuple(piece[:: rng.choice([-1, 1])]), {}))
            members.append(Member("way", len(ways) - 1, role))
    rng.shuffle(members)
    shape = Relation(tuple(Member(*member) for member in members), {"type": "multipolygon", "landuse": "grass"})
    found = osm_elements(osm(*ways, relations=[shape]), PLANE)
    (area,) = found.areas
    assert [len(ring) for ring in area.outer + area.inner] == [12, 12]
    picture = rasterise(found, PLANE, Box(0, 0, 100, 100), 1.0).classes[0]
    rows, columns = np.mgrid[:100, :100]
    distance = np.hypot(columns + 0.5 - 50, 99.5 - rows - 50)
    assert (picture[(distance < 36) & (distance > 12)] == AREAS.index("grass") + 1).all()
    assert not picture[(distance < 8) | (distance > 43)].any()


def test_incomplete_multipolygons():
    """Of two outer rings one lacks a way: it goes, with its hole; the other stays, with its own."""
    square = lambda x, size: (x, x + size, 100 * size + x + size, 100 * size + x, x)  # noqa: E731
    ways = [Way(square(0, 20), {}), Way(square(505, 5), {}), Way((40, 60, 2060), {}), Way(square(545, 5), {})]
    members = [("way", 0, "outer"), ("way", 1, "inner"), ("way", 2, "outer"), ("way", 77, "outer"), ("way", 3, "inner")]
    members += [("node", 5, "label"), ("way", 3, "unheard of")]
    shape = Relation(tuple(Member(*member) for member in members), {"type": "multipolygon", "natural": "water"})
    others = Relation(shape.members, {"type": "boundary", "natural": "water"}), Relation((), shape.tags)
    found = osm_elements(osm(*ways, relations=[shape, *others]), PLANE)
    (area,) = found.areas
    assert [ring[0].round().tolist() for ring in area.outer + area.inner] == [[0, 0], [5, 5]]
    assert found.missing["members of relations"] == 1 and found.missing["rings that do not close"] == 1


def inside_by_definition(ring, border):
    """Point by point and edge by edge."""
    count = 0
    for x, y in ring:
        odd = False
        for (x0, y0), (x1, y1) in zip(border, np.roll(border, -1, 0)):
            if (y0 > y) != (y1 > y) and x < x0 + (y - y0) * (x1 - x0) / (y1 - y0):
                odd = not odd
        count += odd
    return 2 * count >= len(ring)


@pytest.mark.parametrize("at_once", [1, 7, 1 << 17])
def test_which_border_holds_a_ring(monkeypatch, at_once):
    """Against the definition: on a grid, where corners and edges meet, and anywhere; few pairs at a time or all."""
    monkeypatch.setattr(elements, "_AT_ONCE", at_once)
    rng = np.random.default_rng(0)
    found = []
    for k in range(200):
        border, ring = (rng.integers(0, 8, (rng.integers(3, 12), 2)).astype(float) for _ in range(2))
        if k % 2:
            border, ring = border + rng.normal(size=border.shape), 0.3 * ring + rng.normal(size=2) + 3
        found.append(elements._inside(ring, border))
        assert found[-1] == inside_by_definition(ring, border)
    assert 20 < sum(found) < 180


def test_a_hole_of_many_nodes_takes_little_memory():
    """Of 40,000 nodes in a border of 40,000; all pairs at once would take gigabytes."""
    angles = np.linspace(0, 2 * np.pi, 40_000, endpoint=False)
    lake = np.stack([np.cos(angles), np.sin(angles)], 1) * (1 + 0.3 * np.sin(7 * angles))[:, None]
    comb = np.stack([np.arange(4000.0), np.where(np.arange(4000) % 2, 1000.0, 0.0)], 1)  # every edge meets most points
    comb = np.concatenate([comb, [[4000.0, 2000.0], [-1.0, 2000.0]]])
    below, above = (np.stack([np.linspace(5, 3900, 4000), np.full(4000, y)], 1) for y in (1.0, 999.0))
    tracemalloc.start()
    try:
        assert elements._inside(50 * lake, 100 * lake) and not elements._inside(50 * lake + [500, 0], 100 * lake)
        assert not elements._inside(below, comb) and elements._inside(above, comb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3e7


def square(x, y, size):
    """Corners at centres of pixels of 1 m, so that they are rounded to themselves."""
    return np.array([(x, y), (x + size, y), (x + size, y + size), (x, y + size)]) + 0.5


def draw(*elements, box=None, ppm=1.0):
    found = Elements()
    for element in elements:
        {Area: found.areas, Line: found.lines, Point: found.points}[type(element)].append(element)
    return rasterise(found, PLANE, box or Box(0, 0, 40, 30), ppm).classes


def test_a_building_with_a_courtyard():
    areas, ways, nodes = draw(Area("building", "building", (square(5, 5, 20),), (square(10, 10, 6),)))
    expected = np.zeros((30, 40), np.uint8)
    expected[30 - 26 : 30 - 5, 5:26] = 1
    expected[30 - 16 : 30 - 11, 11:16] = 0  # the courtyard's border is the building's
    np.testing.assert_array_equal(areas, expected)
    outline = np.zeros_like(expected)
    for low, high in ((5, 25), (10, 16)):
        outline[29 - high : 30 - low, [low, high]] = outline[[29 - high, 29 - low], low : high + 1] = 5
    np.testing.assert_array_equal(ways, outline)
    assert WAYS[4] == "building_outline" and not nodes.any()


def test_the_first_listed_group_wins_whatever_the_order():
    park, pond = Area("park", "", (square(0, 0, 20),), ()), Area("water", "", (square(10, 0, 15),), ())
    wall, road = (Line(group, "", np.array([(0.5, y), (30.5, y)])) for group, y in (("wall", 5.5), ("road", 5.5)))
    tree, lamp = (Point(group, "", np.array([3.5, 3.5])) for group in ("tree", "lamp"))
    elements = [park, pond, wall, road, tree, lamp]
    classes = draw(*elements)
    np.testing.assert_array_equal(classes, draw(*elements[::-1]))
    assert classes[0, 24, 12] == AREAS.index("park") + 1 and classes[0, 24, 24] == AREAS.index("water") + 1
    assert classes[1, 24, 3] == WAYS.index("wall") + 1 and classes[2, 26, 3] == NODES.index("tree") + 1


def test_groups_of_another_kind_keep_their_shape():
    classes = draw(Area("path", "", (square(0, 0, 3),), ()), Area("fuel", "", (square(10, 0, 3),), ()))
    assert (classes[1] == WAYS.index("path") + 1).sum() == 16 and (classes[2] == NODES.index("fuel") + 1).sum() == 16
    assert not classes[0].any()
    assert (draw(Point("kerb", "", np.array([1.0, 1.0])))[1] > 0).sum() == 1


def left_of(points, a, b):
    """Distance from the line a b, positive to its left."""
    d, away = (b - a) / np.linalg.norm(b - a), points - a
    return d[0] * away[..., 1] - d[1] * away[..., 0]


@pytest.mark.parametrize("far", [50.0, 1e4, 1e6, 5e6])
def test_what_crosses_the_border_is_cut_there(far):
    """Lines and triangles with a corner far outside, against distances worked out for each pixel."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:60, :80]
    centres = np.stack([columns + 0.5, 59.5 - rows], -1) / 2
    for _ in range(20):
        direction = rng.normal(size=2)
        a, b = rng.uniform((5, 5), (35, 25)), far * direction / np.linalg.norm(direction)
        ways = draw(Line("road", "", np.stack([a, b])), ppm=2.0)[1]
        t = np.clip((centres - a) @ (b - a) / ((b - a) @ (b - a)), 0, 1)
        distance = np.linalg.norm(centres - (a + t[..., None] * (b - a)), axis=-1)
        assert distance[ways > 0].max() < 0.75  # 1.5 pixels
        u = (ways > 0).any(np.argmax(np.abs(b - a)))  # every row or column between the ends has its pixel
        assert u.sum() == np.ptp(np.nonzero(u)) + 1
        c = rng.uniform((5, 5), (35, 25))
        areas = draw(Area("park", "", (np.stack([a, b, c]),), ()), ppm=2.0)[0]
        sides = np.stack([left_of(centres, p, q) for p, q in ((a, b), (b, c), (c, a))])
        depth = np.maximum(sides.min(0), (-sides).min(0))  # how deep in the triangle, whichever way it turns
        assert (areas[depth > 0.75] > 0).all() and not areas[(depth < -0.75) & (distance > 0.75)].any()


def test_even_odd_against_brute_force():
    rng = np.random.default_rng(1)
    rings = tuple(rng.uniform((-5, -5), (45, 35), (n, 2)) for n in (7, 5, 6))
    areas = draw(Area("grass", "", rings[:1], rings[1:]), ppm=4.0)[0]
    rows, columns = np.mgrid[:120, :160]
    x, y = (columns + 0.5) / 4, 30 - (rows + 0.5) / 4
    inside, nearest = np.zeros(x.shape, bool), np.full(x.shape, np.inf)
    for ring in rings:
        for (x0, y0), (x1, y1) in zip(ring, np.roll(ring, -1, 0)):
            inside ^= ((y0 > y) != (y1 > y)) & (x < x0 + (y - y0) * (x1 - x0) / (y1 - y0))
            t = np.clip(((x - x0) * (x1 - x0) + (y - y0) * (y1 - y0)) / ((x1 - x0) ** 2 + (y1 - y0) ** 2), 0, 1)
            nearest = np.minimum(nearest, np.hypot(x - x0 - t * (x1 - x0), y - y0 - t * (y1 - y0)))
    clear = nearest > 2.0 / 4
    np.testing.assert_array_equal((areas > 0)[clear], inside[clear])


def test_outside_and_empty():
    assert not draw().any()
    assert not draw(Area("park", "", (square(50, 0, 5),), ()), Line("road", "", np.array([(-9.0, 0), (-2.0, 9)]))).any()
    assert not draw(Point("tree", "", np.array([40.2, 3.0]))).any()
    assert draw(Point("tree", "", np.array([39.9, 29.9])))[2, 0, 39] == 1


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda: draw(Line("tramway", "", np.zeros((2, 2)))),
            "elements: expected groups of AREAS, WAYS or NODES, got 'tramway'",
        ),
        (
            lambda: draw(Line("road", "", np.zeros((0, 2)))),
            "elements: expected rings, .* of one or more points",
        ),
        (lambda: draw(Point("tree", "", np.array([np.nan, 0.0]))), "elements: expected .* finite and on the Earth"),
        (lambda: draw(Area("park", "", (square(0, 0, 1e10),), ())), "elements: expected .* finite and on the Earth"),
        (lambda: draw(ppm=0.0), "pixels_per_metre: expected a positive number"),
        (lambda: draw(ppm=np.nan), "pixels_per_metre: expected a positive number"),
        (lambda: draw(ppm=101.0), "pixels_per_metre: expected at most 100, got 101.0"),
        (lambda: draw(box=Box(0, 0, 1e5, 1e5)), r"expected at most 2\*\*30 pixels"),
    ],
)
def test_bad_arguments(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_without_opencv(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(ImportError, match=r"images and maps need OpenCV: pip install opencv-python-headless"):
        draw()


def real_map(name, south, west, north, east):
    data = read_osm(real_data(f"osm/{name}"))
    plane = Projection((south + north) / 2, (west + east) / 2)
    return rasterise(data, plane, plane.to_box(south, west, north, east))


def seen(city):
    """Share of the picture that shows the colour of a building: neither its outline nor a way over it."""
    return (city.colour() == (84, 155, 255)).all(-1).mean()


def test_neukolln():
    corners = 52.4712, 13.4360, 52.4752, 13.4432
    city = real_map("berlin_neukolln.osm", *corners)
    assert city.classes.shape == (3, 891, 979) == pixels_by_geodesics(*corners)
    assert seen(city) == pytest.approx(0.115, abs=0.001)
    assert len(np.unique(city.classes[2])) > 20


def pixels_by_geodesics(south, west, north, east):
    """Shape of the picture from pyproj's distances on the ellipsoid; over half a kilometre they are those of the plane."""
    geodesic = pytest.importorskip("pyproj").Geod(ellps="WGS84")
    middle = (west + east) / 2
    width = geodesic.inv(west, south, middle, south)[2] + geodesic.inv(middle, north, east, north)[2]
    return 3, int(np.ceil(2 * geodesic.inv(middle, south, middle, north)[2])), int(np.ceil(2 * width))


def test_helsinki_has_courtyards():
    corners = 60.1672, 24.9385, 60.1717, 24.9475
    city = real_map("helsinki_centre_crop.osm", *corners)
    assert city.classes.shape == (3, 1003, 1000) == pixels_by_geodesics(*corners)
    assert seen(city) == pytest.approx(0.465, abs=0.006)
    elements = osm_elements(read_osm(real_data("osm/helsinki_centre_crop.osm")), city.projection)
    holes = [ring for area in elements.areas if area.group == "building" for ring in area.inner]
    assert len(holes) == 13
    inside = rasterise(Elements([Area("water", "", (ring,), ()) for ring in holes]), city.projection, city.box).classes[0] > 0
    built = city.classes[0][inside] == 1
    assert built.mean() < 0.5  # their borders, and one that is built over
