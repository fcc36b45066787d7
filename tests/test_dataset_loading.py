"""Items: tensors in the stated conventions, checked against the map and the pictures that the cameras must see."""

import math

import numpy as np
import pytest
import torch
from small_scenes import make_kitti, make_mapillary, picture, rotation, small_map
from torch.utils.data import DataLoader

from mdps.datasets import DataError, FreshDraws, ImageFormat, OdometryNoise, SequenceDataset, kitti, loading, mapillary
from mdps.datasets.loading import KITTI_IMAGE, MAPILLARY_IMAGE, draw_crop, start_worker
from mdps.datasets.odometry import KITTI_NOISE, MAPILLARY_NOISE
from mdps.datasets.sequences import runs

NO_NOISE = OdometryNoise(0.0, 0.0)


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    root = tmp_path_factory.mktemp("mapillary")
    make_mapillary(root)
    return mapillary.read_scene(root / "berlin")


@pytest.fixture(scope="module")
def drives(tmp_path_factory):
    root = tmp_path_factory.mktemp("kitti")
    make_kitti(root)
    return kitti.read_drives(root, root / "test2_files.txt")


def dataset(scene, length=10, **changes):
    options = {"image": MAPILLARY_IMAGE, "crop_metres": 400.0, "noise": MAPILLARY_NOISE, **changes}
    return SequenceDataset(runs(scene, length), {scene.name: scene.map}, **options)


def test_an_item(scene):
    item = dataset(scene)[0]
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in item.items() if isinstance(value, torch.Tensor)}
    assert shapes == {
        "image": ((10, 3, 256, 256), torch.uint8),
        "camera": ((10, 4), torch.float32),
        "observed": ((10,), torch.bool),
        "pose": ((10, 3), torch.float32),
        "uv_pose": ((10, 3), torch.float32),
        "odometry": ((9, 3), torch.float32),
        "map": ((3, 800, 800), torch.uint8),
        "map_origin": ((2,), torch.float64),
        "pixels_per_metre": ((), torch.float64),
        "seconds": ((10,), torch.float64),
    }
    assert item["name"] == "berlin/seqA_front/1000_front" and item["observed"].all()
    assert item["seconds"].tolist() == list(range(10))
    for name in ("pose", "uv_pose"):
        assert (item[name][:, 2] >= -math.pi).all() and (item[name][:, 2] < math.pi).all()


def test_directions(tmp_path):
    """A drive to the North goes up on the screen, one to the East to the right (vita-epfl/Loc2#6); the camera looks ahead."""
    make_mapillary(tmp_path, offset=0.0, n=24)
    scene = mapillary.read_scene(tmp_path / "berlin")
    items = dataset(scene, 12, noise=NO_NOISE)
    north, east = items[0], items[1]
    assert items.sequences[0].track == items.sequences[1].track == "seqA_front"
    steps = north["pose"].diff(dim=0)
    assert torch.allclose(steps[:, :2], torch.tensor([0.0, 5.0])) and torch.allclose(
        north["pose"][:, 2], torch.tensor(math.pi / 2)
    )
    assert torch.allclose(north["odometry"], torch.tensor([0.0, -10.0, 0.0]), atol=1e-4)  # 2 pixels a metre, v is South
    assert torch.allclose(north["uv_pose"][:, 2], torch.tensor(-math.pi / 2))
    assert torch.allclose(east["pose"].diff(dim=0)[:, :2], torch.tensor([5.0, 0.0])) and east["pose"][:, 2].abs().max() < 1e-6
    assert torch.allclose(east["odometry"], torch.tensor([10.0, 0.0, 0.0]), atol=1e-4)
    for item in (north, east):  # the angle on the screen is the direction of the step, and so is the heading on the ground
        angle, ahead = item["uv_pose"][:-1, 2], item["odometry"][:, :2] / 10
        assert torch.allclose(torch.stack([angle.cos(), angle.sin()], 1), ahead, atol=1e-4)
        heading, ahead = item["pose"][:-1, 2], item["pose"].diff(dim=0)[:, :2] / 5
        assert torch.allclose(torch.stack([heading.cos(), heading.sin()], 1), ahead, atol=1e-4)


def test_the_crop_is_the_map_around_the_track(scene):
    items = dataset(scene)
    centres = set()
    for draw in range(20):
        item = items[3, draw]
        u, v = item["uv_pose"][:, :2].T.double()
        assert u.min() >= 64 and u.max() <= 799 - 64 and v.min() >= 64 and v.max() <= 799 - 64
        x, y = item["pose"][:, :2].T.double()
        assert torch.allclose(item["map_origin"][0] + u / 2, x, atol=1e-3) and torch.allclose(
            item["map_origin"][1] - v / 2, y, atol=1e-3
        )
        for i in range(10):  # the whole raster at the same place, by its own convention: row 0 is north, (0, 0) its middle
            column, row = math.floor((x[i] + 300) * 2), math.floor((300 - y[i]) * 2)
            if abs((x[i] * 2) % 1 - 0.5) < 0.49 and abs((y[i] * 2) % 1 - 0.5) < 0.49:
                assert (
                    item["map"][:, round(v[i].item()), round(u[i].item())].numpy() == scene.map.classes[:, row, column]
                ).all()
        centres.add(tuple(item["map_origin"].tolist()))
    assert len(centres) == 20


def test_crops_are_uniform_among_those_that_show_the_track(scene):
    xy = np.array([[10.0, -20.0], [60.0, 30.0]])
    random = np.random.default_rng(0)
    boxes = [draw_crop(xy, scene.map, 200.0, random) for _ in range(3000)]
    left, bottom = np.array([(b.x_min, b.y_min) for b in boxes]).T
    assert {b.size for b in boxes} == {(200.0, 200.0)}
    # 200 m - 2 x 32 m - 50 m of track: 86 m to move in
    assert left.min() == pytest.approx(60 + 32 - 200, abs=1) and left.max() == pytest.approx(10 - 32, abs=1)
    assert bottom.min() == pytest.approx(30 + 32 - 200, abs=1) and bottom.max() == pytest.approx(-20 - 32, abs=1)
    for values in (left, bottom):
        assert values.mean() == pytest.approx((values.min() + values.max()) / 2, abs=2)
        assert values.std() == pytest.approx(86 / math.sqrt(12), rel=0.05)


def test_a_crop_at_the_border_is_void_outside(scene):
    small = scene._replace(map=small_map(side=200))
    item = dataset(small)[0]
    assert item["map"].shape == (3, 800, 800)
    assert (item["map"][0] > 0).sum() <= 400 * 400


@pytest.mark.parametrize("metres, pixels", [(400.0, 800), (128.00006, 256), (400.0000000000005, 800), (300.2, 600)])
def test_every_crop_has_the_same_size(scene, metres, pixels):
    """Sizes like 1280.0000000000005 and 128.00006, which the authors met."""
    items = dataset(scene, crop_metres=metres)
    assert {tuple(items[i, d]["map"].shape) for i in range(3) for d in range(5)} == {(3, pixels, pixels)}


def test_images_are_what_level_cameras_see(scene):
    items = dataset(scene)
    index = next(i for i, run in enumerate(items.sequences) if run.track == "seqA_left")
    item = items[index]
    assert torch.allclose(item["camera"], torch.tensor([128.0, 128.0, 127.5, 127.5]))
    for i in (0, 9):
        yaw = 90 - math.degrees(item["pose"][i, 2])
        level = picture(rotation(0, 0, yaw), 256, 256, 128, 128, 127.5, 127.5).astype(int)
        seen = item["image"][i].permute(1, 2, 0).numpy().astype(int)
        assert np.abs(seen - level)[16:-16, 16:-16].mean() < 3


def test_other_proportions_are_padded(scene):
    items = dataset(scene)
    index = next(i for i, run in enumerate(items.sequences) if run.track == "seqB")
    item = items[index]  # 80 x 60 pixels, f = 50
    assert torch.allclose(item["camera"], torch.tensor([160.0, 160.0, 127.5, 127.5]))
    assert not item["image"][:, :, :30].any() and not item["image"][:, :, -30:].any() and item["image"][:, :, 40:-40].all()


def test_focal_length(drives):
    item = dataset(drives, image=KITTI_IMAGE, noise=KITTI_NOISE)[0]
    assert item["image"].shape == (10, 3, 160, 448)
    fx, fy, cx, cy = item["camera"][0].tolist()
    assert (fx, fy) == pytest.approx((256, 256), rel=0.01)
    yaw = 90 - math.degrees(item["pose"][0, 2])
    level = picture(rotation(0, 0, yaw), 448, 160, fx, fy, cx, cy).astype(int)
    seen = item["image"][0].permute(1, 2, 0).numpy().astype(int)
    assert np.abs(seen - level)[50:110, 60:-60].mean() < 8  # the picture's car is level, the real one is tilted by a degree


def test_kitti_shifts(drives, scene):
    assert torch.equal(dataset(drives)[0]["shift"], torch.tensor([0.5, -0.25, 1.0]).expand(10, 3))
    assert "shift" not in dataset(scene)[0]


def test_an_item_of_panoramas(scene):
    """What the items of the four directions have, side by side, with the front's pose."""
    item, alone = dataset(mapillary.join_views(scene))[0], dataset(scene)
    firsts = [(i, run.frames[0].name) for i, run in enumerate(alone.sequences)]
    of = {name.split("_")[1]: alone[i] for i, name in firsts if name.startswith("1000")}
    assert [tuple(item[k].shape) for k in ("image", "camera", "observed")] == [(10, 4, 3, 256, 256), (10, 4, 4), (10,)]
    for v, direction in enumerate(("front", "left", "back", "right")):
        for name in ("image", "camera"):
            assert torch.equal(item[name][:, v], of[direction][name])
        gap = of[direction]["pose"] - item["pose"] - item["mounts"][v]
        assert gap[:, :2].abs().max() == 0 and torch.cos(gap[:, 2]).min() > 1 - 1e-6
    assert torch.equal(item["pose"], of["front"]["pose"]) and torch.equal(item["odometry"], of["front"]["odometry"])
    assert item.keys() - of["front"].keys() == {"mounts"}


def test_a_panorama_is_observed_with_all_its_views(tmp_path):
    make_mapillary(tmp_path)
    scene = mapillary.join_views(mapillary.read_scene(tmp_path / "berlin"))
    (tmp_path / "berlin/images/1001_left.jpg").unlink()
    item = dataset(scene)[0]
    assert item["observed"].tolist() == [True, False] + [True] * 8
    assert not item["image"][1, 1].any() and item["image"][1, 0].any()


def test_unreadable_images_are_not_observed(tmp_path, caplog):
    make_mapillary(tmp_path)
    images = tmp_path / "berlin/images"
    scene = mapillary.read_scene(tmp_path / "berlin")
    whole = dataset(scene)[0]
    (images / "1001_front.jpg").unlink()  # after the scene was read
    (images / "1002_front.jpg").write_bytes(b"<html>Object does not exist</html>")
    (images / "1003_front.jpg").write_bytes((images / "1003_front.jpg").read_bytes()[:700])
    (images / "1004_front.jpg").write_bytes(b"")
    (images / "1005_front.jpg").write_bytes((images / "2000_undistorted.jpg").read_bytes())  # of another camera
    item = dataset(scene)[0]
    assert item["observed"].tolist() == [True] + [False] * 5 + [True] * 4
    assert not item["image"][1:6].any() and torch.equal(item["camera"], whole["camera"])
    assert torch.equal(item["image"][6:], whole["image"][6:]) and torch.equal(item["uv_pose"], whole["uv_pose"])
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 5 and all("\n" not in line and f"{1001 + i}_front.jpg" in line for i, line in enumerate(lines))
    assert "expected the camera's proportions, 64 x 64, got 80 x 60" in lines[4]


def test_few_images_are_decoded_once(scene, monkeypatch):
    decoded = []

    def load_image(frame, image):
        decoded.append(frame.name)
        return loading_image(frame, image)

    loading_image = loading.load_image
    monkeypatch.setattr(loading, "load_image", load_image)
    items = dataset(scene)
    first, again = items[0, 0], items[0, 1]
    assert len(decoded) == 10 and torch.equal(first["image"], again["image"])
    assert not torch.equal(first["odometry"], again["odometry"])
    first["image"].zero_()
    assert torch.equal(items[0]["image"], again["image"]) and again["image"].any()
    monkeypatch.setattr(loading, "_KEPT_BYTES", 3 * 256 * 256 * 10)
    many = dataset(scene)
    assert len(many) > 1 and torch.equal(many[0]["image"], again["image"]) and len(many[0]) == len(again)
    assert len(decoded) == 30


def test_repeatable(scene):
    items, again = dataset(scene, seed=5), dataset(scene, seed=5)
    assert same(items[2], again[2]) and same(items[2], items[2, 0])
    assert not same(items[2], items[2, 1]) and not same(items[2], dataset(scene, seed=6)[2])
    fewer = SequenceDataset(
        items.sequences[2:4], items.maps, image=MAPILLARY_IMAGE, crop_metres=400.0, noise=MAPILLARY_NOISE, seed=5
    )
    assert same(items[2], fewer[0])


def same(a, b):
    return all(torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a)


def test_an_epoch_does_not_depend_on_workers(scene):
    items = dataset(scene, image=ImageFormat(32, 32))
    epochs = []
    for workers in (0, 2):
        loader = DataLoader(items, 2, sampler=FreshDraws(len(items), 3), num_workers=workers, worker_init_fn=start_worker)
        epochs.append([list(loader), list(loader)])
    for a, b in zip(epochs[0], epochs[1]):
        assert all(same(x, y) for x, y in zip(a, b)) and len(a) == 5
    first, second = ({n: o for batch in epoch for n, o in zip(batch["name"], batch["map_origin"])} for epoch in epochs[0])
    assert set(first) == {run.name for run in items.sequences} == set(second)
    assert list(first) != list(second) and not any(torch.equal(first[n], second[n]) for n in first)


def test_epochs_can_be_set():
    sampler = FreshDraws(50, 1)
    epochs = [list(sampler) for _ in range(3)]
    assert sorted(i for i, _ in epochs[0]) == list(range(50)) and [e[0][1] for e in epochs] == [0, 1, 2] and len(sampler) == 50
    sampler.set_epoch(1)
    assert list(sampler) == epochs[1]


def test_too_wide_sequences_are_left_out(scene):
    items = dataset(scene, 24, crop_metres=120.0)  # 55 m North, 60 m East
    assert len(items) == 0 and len(items.left_out) == 4
    assert len(dataset(scene, 10, crop_metres=120.0)) == 9


def test_bad_arguments(scene):
    options = {"image": MAPILLARY_IMAGE, "crop_metres": 400.0, "noise": MAPILLARY_NOISE}
    with pytest.raises(ValueError, match=r"sequences: expected all of one length, got lengths \[5, 10\]"):
        SequenceDataset(runs(scene, 10) + runs(scene, 5), {"berlin": scene.map}, **options)
    with pytest.raises(ValueError, match=r"sequences: expected as many views in every frame, got \[1, 4\]"):
        SequenceDataset(runs(scene, 10) + runs(mapillary.join_views(scene), 10), {"berlin": scene.map}, **options)
    with pytest.raises(DataError, match="berlin: expected a map in `maps`, got those of no scene"):
        SequenceDataset(runs(scene, 10), {}, **options)
    with pytest.raises(ValueError, match="crop_metres: expected more than 64, got 10"):
        dataset(scene, crop_metres=10)


def test_nothing_is_not_a_number(scene, drives):
    for items in (dataset(scene), dataset(drives, image=KITTI_IMAGE, noise=KITTI_NOISE)):
        for i in range(len(items)):
            assert all(torch.isfinite(v).all() for v in items[i].values() if isinstance(v, torch.Tensor))
