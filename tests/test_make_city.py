"""Made cities against brute force in float64, against the readers of maps and data sets, and against themselves."""

import dataclasses
import importlib.util
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

if importlib.util.find_spec("cv2") is None:
    pytest.skip("OpenCV is not installed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
import cv2
import make_city
from city import ground, mapillary_files, plan, recording, render, scene, sprites, tracks
from city.render import Camera, Light

from mdps import maps
from mdps.datasets import kitti, mapillary
from mdps.datasets.camera import camera_to_world

PLAIN = Light(noise=0.0)
TINY = recording.Size(blocks=2, drives=3, keyframes=7, frames=8, kitti_scale=0.25)


@pytest.fixture(scope="module")
def tiny():
    """Small cities wherever make_city is called in this module."""
    before = dict(recording.SIZES)
    recording.SIZES["small"] = TINY
    yield
    recording.SIZES.update(before)


@pytest.fixture
def plain(tiny, monkeypatch):
    """White light and no noise, so that an image can be compared with the same view rendered again."""
    monkeypatch.setattr(recording, "light_of_day", lambda rng: PLAIN)


def make(out, *arguments):
    assert make_city.main(["--out", str(out), "--image-size", "64", *map(str, arguments)]) == 0
    return out


@pytest.fixture(scope="module")
def mgl(tiny, tmp_path_factory):
    return make(tmp_path_factory.mktemp("mgl"), "--seed", 0)


@pytest.fixture(scope="module")
def raw(tiny, tmp_path_factory):
    return make(tmp_path_factory.mktemp("kitti"), "--seed", 0, "--format", "kitti")


@pytest.fixture(scope="module")
def city(mgl):
    return make_city.read_city(mgl / "osm/made_0.osm", None, 0)


def bare(world, **changes):
    """The world without billboards."""
    nothing = {"spots": np.empty((0, 2)), "spot_sprite": np.empty(0, np.int64), "spot_size": np.empty((0, 2), np.float32)}
    return dataclasses.replace(world, **nothing, **changes)


def world_of(city, start, end, top, one_sided):
    """A world of other walls with the city's ground and facades."""
    n = len(start)
    textured = dataclasses.replace(
        city.world.walls,
        facade=np.zeros(n, np.int32), start=np.zeros(n, np.float32), tint=np.ones((3, n), np.float32), has_cornice=one_sided,
    )  # fmt: skip
    return bare(city.world, start=start, end=end, top=top.astype(np.float32), one_sided=one_sided, walls=textured)


def brute_force(world, camera):
    """Depth (H, W) by intersecting each ray with each wall, and which pixels can be compared: not at an edge, not too far."""
    u, v = np.meshgrid(np.arange(camera.width), np.arange(camera.height))
    pixels = np.stack([(u - camera.centre[0]) / camera.focal, (v - camera.centre[1]) / camera.focal, np.ones(u.shape)], -1)
    rays = pixels.reshape(-1, 3) @ camera.rotation.T
    with np.errstate(divide="ignore", invalid="ignore"):
        best = np.where(rays[:, 2] < 0, -camera.position[2] / rays[:, 2], np.inf)
    unsure = np.zeros(len(rays), bool)
    for a, b, top, one_sided in zip(world.start, world.end, world.top.astype(float), world.one_sided):
        d, to = b - a, a - camera.position[:2]
        if one_sided and d[0] * -to[1] - d[1] * -to[0] > 0:  # the camera is on the left: inside
            continue
        cross = rays[:, 0] * d[1] - rays[:, 1] * d[0]
        with np.errstate(divide="ignore", invalid="ignore"):
            t = (to[0] * d[1] - to[1] * d[0]) / cross
            s = (to[0] * rays[:, 1] - to[1] * rays[:, 0]) / cross
            z = camera.position[2] + t * rays[:, 2]
        slack = 2e-3 * np.maximum(1, np.abs(t))
        near = (t > 0) & (s > -slack / np.hypot(*d)) & (s < 1 + slack / np.hypot(*d)) & (z > -slack) & (z < top + slack)
        met = (t > 0) & (s >= 0) & (s <= 1) & (z >= 0) & (z < top)
        sure = (t > 0) & (s > slack / np.hypot(*d)) & (s < 1 - slack / np.hypot(*d)) & (z > slack) & (z < top - slack)
        unsure |= near & ~sure & (t < best + slack)
        best = np.where(met & (t < best), t, best)
    drawn = np.isinf(best) | (best * np.hypot(*rays.T[:2]) < render.FAR - 1)
    return best.reshape(u.shape), (drawn & ~unsure).reshape(u.shape)


def some_walls(rng, n):
    """Houses with holes, of several heights, and fences that cross them and each other."""
    start, end, top, one_sided = [], [], [], []
    for _ in range(n):
        middle, turn, size = rng.uniform(-60, 60, 2), rng.uniform(0, 2 * np.pi), rng.uniform(4, 14, 2)
        if np.hypot(*middle) < 20:
            continue
        c, s = np.cos(turn), np.sin(turn)
        ring = middle + np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * size / 2 @ np.array([[c, s], [-s, c]])
        for corners in (ring, middle + 0.4 * (ring - middle)[::-1]):
            start += list(corners)
            end += list(np.roll(corners, -1, 0))
        top += [float(rng.uniform(3, 25))] * 8
        one_sided += [True] * 8
    for _ in range(n):
        ends = rng.uniform(-50, 50, (2, 2))
        start.append(ends[0]), end.append(ends[1]), top.append(float(rng.uniform(0.5, 2))), one_sided.append(False)
    start, end = np.array(start), np.array(end)
    owner, begin, stop = scene.split_crossings(start, end)
    d = (end - start)[owner]
    return start[owner] + begin[:, None] * d, start[owner] + stop[:, None] * d, np.array(top)[owner], np.array(one_sided)[owner]


@pytest.mark.parametrize("seed", range(4))
def test_depth_of_any_walls_is_that_of_brute_force(city, seed):
    rng = np.random.default_rng(seed)
    world = world_of(city[0], *some_walls(rng, 25))
    roll, pitch, yaw = rng.normal(0, 4, 2).tolist() + [float(rng.uniform(-180, 180))]
    camera = Camera(97, 71, 55.0, (47.3, 36.1), np.array([0.3, -0.4, 1.9]), camera_to_world(roll, pitch, yaw))
    _, depth = render.render(world, camera)
    expected, same = brute_force(world, camera)
    assert same.mean() > 0.9
    np.testing.assert_array_equal(np.isinf(depth[same]), np.isinf(expected[same]))
    finite = same & np.isfinite(expected)
    np.testing.assert_allclose(depth[finite], expected[finite], rtol=1e-5)
    assert np.unique(np.round(expected[finite], 1)).size > 50


def test_a_far_wall_that_rises_over_a_near_one_at_one_end_alone(city):
    start, end = np.array([[30.0, 10.0], [-12.0, 30.0]]), np.array([[-30.0, 10.0], [60.0, 150.0]])
    world = world_of(city[0], start, end, np.array([4.0, 12.0]), np.zeros(2, bool))
    camera = Camera(101, 101, 50.0, (50.0, 50.0), np.array([0.0, 0.0, 2.0]), camera_to_world(0.0, 0.0, 0.0))
    _, depth = render.render(world, camera)
    expected, same = brute_force(world, camera)
    np.testing.assert_allclose(depth[same], expected[same], rtol=1e-5)
    assert ((expected > 20) & (expected < 100))[:40].sum() > 50


@pytest.mark.parametrize("k", range(3))
def test_depth_in_a_city_is_that_of_brute_force(city, k):
    place, yaw = places(city[0], 3, seed=9)[k]
    world = bare(city[0].near(place))
    camera = Camera(64, 64, 32.0, (31.5, 31.5), np.array([*place, 2.2]), camera_to_world(1.5, -1.0, yaw))
    _, depth = render.render(world, camera)
    expected, same = brute_force(world, camera)
    same &= np.isfinite(expected)
    assert same.mean() > 0.5
    np.testing.assert_allclose(depth[same], expected[same], rtol=1e-5)


def places(made, n, seed=0):
    """Places on the streets, with a direction to look in, degrees."""
    rng = np.random.default_rng(seed)
    found = []
    for drive in recording.drives(rng, made, n, 150.0):
        xy, heading = drive.at(np.array([float(rng.uniform(20, drive.length - 20))]))
        found.append((xy[0], 90 - float(np.degrees(heading[0])) + float(rng.uniform(-60, 60))))
    return found


def sharp_corners(made):
    """Corners of buildings where two walls do not just go on: (C, 2)."""
    found = []
    for ring in (ring for area in made.elements.areas if area.group == "building" for ring in area.outer):
        d = np.roll(ring, -1, 0) - ring
        d /= np.hypot(*d.T)[:, None]
        found.append(ring[np.abs(d[:, 0] * np.roll(d, 1, 0)[:, 1] - d[:, 1] * np.roll(d, 1, 0)[:, 0]) > 0.5])
    return np.concatenate(found)


def test_corners_of_buildings_are_edges_of_the_depth(city):
    """In a row, 1 / depth of one wall is affine: its second difference vanishes, but not at a corner."""
    n_corners = 0
    for place, yaw in places(city[0], 8):
        world = bare(city[0].near(place))
        rotation = camera_to_world(0.0, 0.0, yaw)
        camera = Camera(256, 256, 128.0, (127.5, 127.5), np.array([*place, 2.0]), rotation)
        _, depth = render.render(world, camera)
        inverse = 1 / depth.astype(np.float64)
        bend = np.abs(inverse[:, 2:] - 2 * inverse[:, 1:-1] + inverse[:, :-2])
        wall = depth[:, 1:-1] < 50
        assert np.median(bend[:120][wall[:120]]) < 5e-8
        for corner in sharp_corners(city[0]):
            x, _, z = rotation.T @ np.array([*(corner - place), 0.0])
            column, row = round(127.5 + 128 * x / z), 120
            if 3 < z < 40 and 4 < column < 250 and abs(depth[row, column - 2 : column + 3] / z - 1).min() < 0.01:
                assert bend[row, column - 3 : column + 2].max() > 5e-7
                n_corners += 1
    assert n_corners > 10


def test_billboards_stand_upright_at_their_distance(city):
    made = city[0]
    lamp = list(sprites.SPRITES).index("lamp") + 2 * (sprites.N_TREES - 1)  # trees come first, with more pictures
    spots = {"spots": np.array([[2.0, 10.0]]), "spot_sprite": np.array([lamp]), "spot_size": np.array([[1.5, 6.0]], np.float32)}
    world = dataclasses.replace(
        world_of(made, np.array([[-9.0, 50.0]]), np.array([[-8.0, 50.0]]), np.ones(1), np.ones(1, bool)), **spots
    )
    camera = Camera(200, 200, 100.0, (99.5, 99.5), np.array([0.0, 0.0, 2.0]), camera_to_world(0.0, 0.0, 0.0))
    _, depth = render.render(world, camera)
    rows, columns = np.nonzero(np.abs(depth - 10) < 1e-3)
    stands = (columns > 99.5 + 100 * (2 - 0.75) / 10 - 1) & (columns < 99.5 + 100 * (2 + 0.75) / 10 + 1) & (rows < 100)
    assert abs(rows[stands].min() - (99.5 - 100 * (6 - 2) / 10)) < 3  # its top
    assert abs(np.median(columns[stands]) - (99.5 + 100 * 2 / 10)) < 3


def test_ground_has_the_colour_of_its_kind(city):
    made = city[0]
    palette = np.array([colour for colour, _ in ground.GROUND.values()])
    light = Light(noise=0.0)
    close, n = [], 0
    for place, yaw in places(made, 6, seed=4):
        camera = Camera(96, 96, 48.0, (47.5, 47.5), np.array([*place, 2.0]), camera_to_world(0.0, 6.0, yaw))
        image, depth = render.render(bare(made.near(place)), camera, light)
        u, v = np.meshgrid(np.arange(96), np.arange(96))
        rays = np.stack([(u - 47.5) / 48, (v - 47.5) / 48, np.ones(u.shape)], -1) @ camera.rotation.T
        points = rays * np.minimum(depth, 1e6)[..., None] + camera.position
        on_ground = (np.abs(points[..., 2]) < 1e-3) & (depth < 12)
        kinds = made.canvas.at(points[on_ground][:, :2])
        close.append(np.abs(image[on_ground].astype(float) - palette[kinds]).max(1) < 60)
        n += len(np.unique(kinds))
    assert np.concatenate(close).mean() > 0.85
    assert n > 12


def test_the_ground_lies_where_the_map_says(city):
    made = city[0]
    start, end, _ = ground.segments(made.roads)
    on_roads = made.canvas.at((start + end) / 2)
    assert np.isin(on_roads, [ground.KINDS["road"], ground.KINDS["marking"]]).mean() > 0.99
    for building in (a for a in made.elements.areas if a.group == "building" and not a.inner):
        ring = building.outer[0].astype(np.float32)
        low, high = ring.min(0) - 2, ring.max(0) + 2
        points = np.random.default_rng(0).uniform(low, high, (60, 2))
        distance = np.array([cv2.pointPolygonTest(ring, (float(x), float(y)), True) for x, y in points])
        is_building = made.canvas.at(points) == ground.KINDS["building"]
        assert is_building[distance > 0.3].all()
        others = np.array([distances_to_buildings(made, p) for p in points[distance < -0.3]])
        assert not is_building[distance < -0.3][others > 0.3].any()


def distances_to_buildings(made, point):
    """From a point outside to the nearest building; negative inside."""
    rings = [a.outer[0].astype(np.float32) for a in made.elements.areas if a.group == "building"]
    return -max(cv2.pointPolygonTest(ring, (float(point[0]), float(point[1])), True) for ring in rings)


def test_drives_stay_on_streets_and_out_of_buildings(city):
    made = city[0]
    start, end, widths = ground.segments(made.roads)
    for drive in recording.drives(np.random.default_rng(3), made, 4, 300.0):
        assert drive.length >= 250
        d = end - start
        between = drive.points[:, None] - start
        t = np.clip((between * d).sum(-1) / (d * d).sum(-1), 0, 1)
        assert (np.hypot(*np.moveaxis(between - t[..., None] * d, -1, 0)) - widths).min(1).max() < 0.3
        assert np.hypot(*np.diff(drive.points, axis=0).T).max() < 0.6
        for building in (a for a in made.elements.areas if a.group == "building"):
            for ring in building.outer:
                polygon = ring.astype(np.float32)
                assert max(cv2.pointPolygonTest(polygon, (float(x), float(y)), False) for x, y in drive.points[::4]) < 0


def test_a_dead_end_is_left_where_it_was_entered(city):
    road = [maps.Line("road", "highway:residential", np.array([[-50.0, 0.0], [50.0, 0.0]]))]
    network = tracks.Network(road, ground.Canvas(maps.Box(-100.0, -100.0, 100.0, 100.0)))
    drive = network.drive(np.random.default_rng(0), 400.0, np.zeros(2, np.int64))
    assert drive.length > 300
    assert np.abs(drive.points[:, 0]).max() < 50 and np.abs(drive.points[:, 1]).max() < 3.5
    east = np.diff(drive.points[:, 0])
    assert (np.sign(drive.points[1:, 1]) == -np.sign(east))[np.abs(east) > 0.49].all()  # on the right


def test_roads_under_buildings_and_at_the_border_are_not_driven_on():
    ways = [[[-50, 0], [50, 0]], [[-50, 40], [50, 40]], [[-50, -90], [50, -90]], [[0, 0], [0, 40]]]
    roads = [maps.Line("road", "highway:residential", np.array(way, float)) for way in ways]
    canvas = ground.Canvas(maps.Box(-100.0, -100.0, 100.0, 100.0))
    canvas.fill((np.array([[-10.0, 33.0], [10.0, 33.0], [10.0, 39.0], [-10.0, 39.0]]),), "building")
    driven = tracks.Network(roads, canvas).edges
    assert [edge[2].tolist() for edge in driven] == [ways[0], ways[0][::-1]]  # the second is too near, the last one under it


def test_every_tag_has_a_class_and_every_class_but_rare_ones_a_tag(tmp_path):
    groups = set()
    for seed in range(4):
        sketch = plan.draw_city(np.random.default_rng(seed), 5)
        sketch.write(tmp_path / "city.osm", maps.Projection(50.0, 10.0), (49.9, 9.9, 50.1, 10.1))
        found = maps.osm_elements(maps.read_osm(tmp_path / "city.osm"), maps.Projection(50.0, 10.0))
        n_inner = sum(role == "inner" for members, _ in sketch.relations for _, role in members)
        n_tagged = sum(bool(tags) for _, tags in sketch.ways) + len(sketch.relations)
        assert len(found.areas) + len(found.lines) == n_tagged
        assert len(found.points) == len(sketch.node_tags)
        assert sum(len(a.inner) for a in found.areas) == n_inner > 0
        assert +found.missing == {}
        groups |= {e.group for e in (*found.areas, *found.lines, *found.points)}
    rare = {"building_outline", "busway", "junction", "fuel", "parking_entrance"}
    assert {*maps.AREAS, *maps.WAYS, *maps.NODES} - groups <= rare


def test_buildings_of_an_invented_city_do_not_cross(city):
    made = city[0]
    walls = made.world.one_sided
    n_houses = sum(len(ring) for a in made.elements.areas if a.group == "building" for ring in (*a.outer, *a.inner))
    assert walls.sum() == n_houses  # nothing was cut


def files(root):
    return {p.relative_to(root): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_same_seed_same_bytes_another_seed_another_city(mgl, raw, tiny, tmp_path):
    again = make(tmp_path / "again", "--seed", 0)
    assert files(again) == files(mgl)
    assert files(make(tmp_path / "kitti", "--seed", 0, "--format", "kitti")) == files(raw)
    make(again, "--seed", 1)
    one, other = (maps.RasterMap.load(again / name / "map.npz") for name in ("made_0", "made_1"))
    assert one.classes.shape != other.classes.shape or (one.classes != other.classes).mean() > 0.2
    splits = json.loads((again / mapillary.SPLIT_FILE).read_text())
    assert set(splits["train"]) == set(splits["val"]) == {"made_0", "made_1"}
    ids = [i for part in splits.values() for listed in part.values() for i in listed]
    assert len(ids) == len(set(ids)) == 6 * TINY.keyframes


def test_mgl_is_read_without_a_complaint(mgl):
    found = mapillary.read_scene(mgl / "made_0")
    assert str(found.problems) == ""
    assert [len(t.frames) for t in found.tracks] == [TINY.keyframes] * 6  # four directions, two perspective drives
    assert all(
        f.image.is_file() and cv2.imread(str(f.image)).shape[1::-1] == (f.camera.width, f.camera.height)
        for t in found.tracks
        for f in t.frames
    )
    splits = mapillary.read_splits(mgl, ["made_0"])
    assert len(splits["train"]["made_0"]) == 2 * TINY.keyframes and len(splits["val"]["made_0"]) == TINY.keyframes
    own, tiles = maps.RasterMap.load(mgl / "made_0/map.npz"), maps.tiles_pickle.read_tiles_pickle(mgl / "made_0/tiles.pkl")
    np.testing.assert_array_equal(own.classes, tiles.classes)
    assert own.projection == tiles.projection


def test_mgl_has_what_its_documentation_says(mgl):
    dump = json.loads((mgl / "made_0/dump.json").read_text())
    raster = maps.RasterMap.load(mgl / "made_0/map.npz")
    errors = []
    for name, sequence in dump.items():
        views = list(sequence["views"].items())
        times = [view["capture_time"] for _, view in views]
        places = np.array([view["t_c2w"] for _, view in views])
        assert all(isinstance(t, int) for t in times) and np.diff(times).min() > 0
        assert np.hypot(*np.diff(places[:, :2], axis=0).T).min() >= 4
        assert [view["index"] for _, view in views] == list(range(len(views)))
        for view_name, view in views:
            direction = view_name.rsplit("_", 1)[1]
            assert name.endswith(f"_{direction}") or direction == "undistorted"
            rotation = np.array(view["R_c2w"])
            turned = Rotation.from_euler("X", -90, degrees=True) * Rotation.from_matrix(rotation).inv()
            np.testing.assert_allclose(view["roll_pitch_yaw"], turned.as_euler("YXZ", degrees=True), atol=1e-9)
            np.testing.assert_allclose(raster.projection.to_metres(view["latlong"]), view["t_c2w"][:2], atol=1e-6)
            assert max(np.abs(view["roll_pitch_yaw"][:2])) < 8 and 1.4 < view["t_c2w"][2] < 2.6
            errors.append(raster.projection.to_metres(view["gps_position"][:2]) - view["t_c2w"][:2])
        assert {view["camera_id"] for _, view in views} == set(sequence["cameras"])
    assert 1 < np.std(errors) < 2 * recording.GPS_NOISE and np.abs(np.mean(errors, 0)).max() < 2 * recording.GPS_NOISE


def test_cities_made_at_once_are_all_in_the_file_of_splits(tmp_path):
    path = tmp_path / mapillary_files.SPLIT_FILE
    names = [f"made_{i}" for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: mapillary_files._add_to_splits(path, name, {"train": [1], "val": [2]}), names))
    splits = json.loads(path.read_text())
    assert set(splits["train"]) == set(splits["val"]) == set(names) and set(tmp_path.iterdir()) == {path}


def test_views_of_a_panorama_look_in_four_directions(mgl):
    dump = json.loads((mgl / "made_0/dump.json").read_text())
    bodies = [dump[f"made0000drive000_{d}"] for d in ("front", "left", "back", "right")]
    assert bodies[0]["cameras"]["perspective_from_pano"]["params"] == [32, 32, 32, 32]
    for k in range(TINY.keyframes):
        yaws = np.array([list(body["views"].values())[k]["roll_pitch_yaw"][2] for body in bodies])
        turned_left = (yaws[0] - yaws) % 360
        np.testing.assert_allclose(turned_left, [0, 90, 180, 270], atol=0.5)
        assert len({tuple(list(body["views"].values())[k]["t_c2w"]) for body in bodies}) == 1


def difference(made, frame, position):
    """Mean difference, in grey levels, between the image of a frame and what is seen from a position with its angles."""
    camera, rotation = frame.camera, camera_to_world(frame.roll, frame.pitch, frame.yaw)
    eye = Camera(camera.width, camera.height, camera.fx, (camera.cx, camera.cy), np.array(position), rotation)
    again, _ = render.render(made.near(eye.position[:2]), eye, PLAIN)
    return np.abs(cv2.imread(str(frame.image))[..., ::-1].astype(float) - again).mean()


def test_images_show_the_city_from_the_pose_in_the_file(plain, city, tmp_path):
    """What the reader says of a view renders that view again; from half a metre aside it is another image."""
    made = city[0]
    make(tmp_path / "plain", "--seed", 0)
    found = mapillary.read_scene(tmp_path / "plain/made_0")
    dump = json.loads((tmp_path / "plain/made_0/dump.json").read_text())
    for track in found.tracks:
        frame = track.frames[3]
        z = dump[track.name]["views"][frame.name]["t_c2w"][2]
        assert difference(made, frame, (frame.x, frame.y, z)) < 5  # JPEG
        assert difference(made, frame, (frame.x + 0.35, frame.y + 0.35, z)) > 5


def test_kitti_is_read_and_shows_the_city_from_the_camera(plain, city, tmp_path):
    made = city[0]
    raw = make(tmp_path / "plain", "--seed", 0, "--format", "kitti")
    for part, n in (("train", 16), ("test2", 8)):
        found = kitti.read_drives(raw, raw / f"{part}_files.txt")
        assert str(found.problems) == "" and sum(len(t.frames) for t in found.tracks) == n
        for track in found.tracks:
            times = np.array([f.seconds for f in track.frames])
            np.testing.assert_allclose(np.diff(times), 0.1, atol=1e-6)
            frame = track.frames[4]
            assert difference(made, frame, (frame.x, frame.y, 1.65)) < 4
            assert difference(made, frame, (frame.x + 0.5, frame.y + 0.5, 1.65)) > 6
    shifted = kitti.read_drives(raw, raw / "test1_files.txt")
    assert all(f.shift is not None and max(map(abs, f.shift)) <= 1 for t in shifted.tracks for f in t.frames)


def test_several_cities_are_those_of_their_seeds(mgl, tiny, tmp_path):
    """Whatever was made before in the same process."""
    out = make(tmp_path, "--seed", 1, 0)
    files = sorted(p.relative_to(mgl) for p in (mgl / "made_0").rglob("*") if p.is_file())
    assert len(files) > 9 and (out / "made_1/dump.json").exists()
    assert all((out / p).read_bytes() == (mgl / p).read_bytes() for p in files)


def test_preview_has_a_row_for_each_place(tiny, tmp_path):
    assert make_city.main(["--seed", "2", "--preview", str(tmp_path / "p.png")]) == 0
    picture = cv2.imread(str(tmp_path / "p.png"))
    assert picture.shape[1] * 4 == picture.shape[0] * 3
    assert list(tmp_path.iterdir()) == [tmp_path / "p.png"]


def test_a_road_alone_is_a_city(tiny, tmp_path):
    nodes = "".join(f'<node id="{i}" lat="{50 + y}" lon="10"/>' for i, y in enumerate((0.0, 0.001, 0.0027, 0.0037), 1))
    corners = '<node id="5" lat="50" lon="9.998"/><node id="6" lat="50.0037" lon="10.002"/>'
    way = '<way id="1"><nd ref="1"/><nd ref="2"/><nd ref="3"/><nd ref="4"/><tag k="highway" v="residential"/></way>'
    crossing = '<way id="2"><nd ref="2"/><nd ref="3"/><tag k="highway" v="residential"/></way>'
    (tmp_path / "road.osm").write_text(f'<osm version="0.6">{nodes}{corners}{way}{crossing}</osm>')
    out = make(tmp_path / "out", "--osm", tmp_path / "road.osm")
    assert str(mapillary.read_scene(out / "road_0").problems) == ""


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "expected --out DIR"),
        (["--out", "{tmp}", "--bbox", "1,2,3,4"], "together with --osm"),
        (["--out", "{tmp}", "--osm", "{tmp}/none.osm"], "none.osm"),
        (["--out", "{mgl}"], "there is a city already"),
        (["--out", "{tmp}", "--osm", "{tmp}/field.osm"], "streets to drive on"),
        (["--out", "{tmp}", "--osm", "{mgl}/osm/made_0.osm", "--bbox", "10,10,50,50"], "at most 3000 m"),
        (["--preview", "{tmp}/no/folder.png"], "folder.png"),
        (["--preview", "{tmp}/city"], "--preview: expected a name that ends with .png or .jpg"),
        (["--preview", "{tmp}/a.png", "--seed", "1", "2"], "--seed: expected one beside --preview, got 2"),
        (["--out", "{tmp}", "--format", "kitti", "--seed", "1", "2"], "--seed: expected one beside --format kitti, got 2"),
    ],
)
def test_refusals(mgl, tiny, tmp_path, capsys, arguments, words):
    node = '<node id="{}" lat="{}" lon="{}"/>'
    nodes = "".join(node.format(i + 1, 50 + 0.002 * (i // 2), 10 + 0.002 * (i % 2)) for i in range(4))
    (tmp_path / "field.osm").write_text(f'<osm version="0.6">{nodes}</osm>')
    filled = [a.format(tmp=tmp_path, mgl=mgl) for a in arguments]
    assert make_city.main(filled) == 2
    message = capsys.readouterr().err
    assert message.startswith("make_city: ") and words in message and message.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--bbox", "-1,2"], "expected LAT,LON,LAT,LON, got '-1,2'"),
        (["--seed", "-1"], "whole number"),
        (["--seed", "abc"], "--seed: expected a whole number from 0 to 999999, got abc"),
        (["--image-size", "3"], "16 to 4096"),
        (["--image-size", "1e3"], "--image-size: expected 16 to 4096 pixels, got 1e3"),
    ],
)
def test_arguments_that_are_none(capsys, arguments, words):
    with pytest.raises(SystemExit):
        make_city.main(arguments)
    assert words in capsys.readouterr().err


def test_a_real_extract_is_a_city_too(tiny, tmp_path):
    from real_data import real_data

    source = real_data("osm/berlin_neukolln.osm")
    out = make(tmp_path / "out", "--osm", source, "--bbox", "52.4712,13.4360,52.4752,13.4432")
    found = mapillary.read_scene(out / "berlin_neukolln_0")
    assert str(found.problems) == "" and len(found.tracks) == 6
    assert (out / "osm/berlin_neukolln_0.osm").read_bytes() == source.read_bytes()
    shutil.rmtree(out)
    assert mapillary_files.SPLIT_FILE == mapillary.SPLIT_FILE
