"""`Localizer`: files, online against offline, frames, pieces of large maps, images of any size, and what it refuses."""

import os
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from test_localization_models import TINY
from torch.utils.data import default_collate

from mdps.localization import Encoders, Localizer, MapSmoother, OdometryDynamics, localizer, map_pieces, to_batch
from mdps.localization.batch import _FORMS as FORMS
from mdps.localization.batch import Batch
from mdps.maps import Box, Projection, RasterMap
from mdps.maps.errors import DataError

SEED = torch.tensor(7)
FEW = {"metres": 10.0, "heading_concentration": 5.0, "n_first": 40}
CAMERA = (16.0, 16.0, 7.5, 7.5)


def made_localizer(size=16, n=20, temperature=200.0, dynamics=None):
    """With weights at random, and measurements that matter."""
    torch.manual_seed(3)
    model = MapSmoother(Encoders(TINY), n, dynamics)
    with torch.no_grad():
        for f in (model.smoother.forward_filter, model.smoother.backward_filter):
            f.likelihood.log_temperature.fill_(temperature).log_()
    return Localizer(model, (size, size, None))


def made_map(side, seed=0, corner=None):
    """Classes in blocks of 4 m, `side` metres wide, around the origin or from a corner on."""
    random = np.random.default_rng(seed)
    blocks = np.stack([random.integers(0, k, (side // 4, side // 4)) for k in (8, 11, 34)]).astype(np.uint8)
    x, y = corner or (-side / 2, -side / 2)
    classes = np.ascontiguousarray(blocks.repeat(8, 1).repeat(8, 2))
    return RasterMap(classes, 2.0, Box(x, y, x + side, y + side), Projection(52.0, 13.0))


def made_batch(T=6, side=64, step=3.0):
    images = torch.randint(0, 256, (1, T, 3, 16, 16), dtype=torch.uint8)
    classes = torch.from_numpy(made_map(side).classes).unsqueeze(0)
    poses = torch.stack([step * torch.arange(T) - 5, torch.full((T,), 2.0), torch.zeros(T)], -1).unsqueeze(0)
    actions = torch.zeros(1, T, 3)
    actions[:, 1:] = poses.diff(dim=1) + torch.randn(1, T - 1, 3) * torch.tensor([0.5, 0.5, 0.05])
    return Batch(images, torch.tensor(CAMERA).expand(1, T, 4), classes, 2.0, poses, actions, torch.ones(1, T, dtype=torch.bool))


def steps(made, batch, start=0, observed=None):
    """The beliefs of an online localization that has been started."""
    beliefs = []
    for t in range(start, batch.images.size(1)):
        image = batch.images[0, t] if observed is None or observed[t] else None
        beliefs.append(made.step(image, batch.camera[0, t], batch.actions[0, t] if t > 0 else None))
    return beliefs


def assert_alike(belief, other, by=(0.0, 0.0)):
    """The same particles and weights, up to rounding, places moved by so many metres."""
    n = min(belief.n_components, other.n_components)  # what follows in a sequence's beliefs has no weight
    move = torch.tensor([*by, 0.0], dtype=torch.float64)
    torch.testing.assert_close(belief.means[..., :n, :].double() + move, other.means[..., :n, :].double(), rtol=0, atol=1e-3)
    got, want = (b.log_weights[..., :n].double() for b in (belief, other))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


# ---- Online and offline -------------------------------------------------------------------------------------------------


def test_step_by_step_is_the_forward_filter_of_the_sequence():
    made, batch = made_localizer(), made_batch()
    whole = made.smooth(batch, **FEW, n_last=30, seed=SEED)
    assert whole.smoothed.batch_shape == (1, 6) and whole.smoothed.log_weights.isfinite().all()
    made.start((batch.classes[0], 2.0), batch.poses[0, 0], **FEW, seed=SEED)
    beliefs = steps(made, batch)
    for t, belief in enumerate(beliefs):
        f = whole.forward.posterior
        want = type(f)(f.means[0, t], f.log_weights[0, t], f.bandwidths, f.space)
        assert belief.batch_shape == () and belief.means.dtype == torch.float64
        assert_alike(belief, want)
        assert (belief.log_weights.max() - belief.log_weights.min()) > 1  # the images are not without effect
        torch.testing.assert_close(belief.bandwidths, want.bandwidths.double())
        modes, log_densities = belief.modes(3, (5.0, 5.0, 0.5))
        assert modes.shape == (3, 3) and log_densities[0].isfinite() and belief.mean.shape == (3,)
    made.start((batch.classes[0], 2.0), batch.poses[0, 0], **FEW, seed=SEED)
    for belief, again in zip(beliefs, steps(made, batch)):
        assert torch.equal(belief.means, again.means)
    made.start((batch.classes[0], 2.0), batch.poses[0, 0], **FEW, seed=torch.tensor(8))
    assert not torch.equal(steps(made, batch)[0].means, beliefs[0].means)


def test_steps_without_an_image():
    made, batch = made_localizer(), made_batch()
    observed = torch.tensor([False, True, False, False, True, True])
    whole = made.smooth(batch._replace(observed=observed[None]), **FEW, n_last=30, seed=SEED).forward.posterior
    made.start((batch.classes[0].numpy(), 2.0), batch.poses[0, 0].tolist(), **FEW, seed=SEED)
    for t, belief in enumerate(steps(made, batch, observed=observed)):
        assert_alike(belief, type(whole)(whole.means[0, t], whole.log_weights[0, t], whole.bandwidths, whole.space))
        uniform = (belief.log_weights - belief.log_weights[0]).abs().max() < 1e-6
        assert uniform != observed[t]
    made.start((batch.classes[0], 2.0), batch.poses[0, 0], **FEW)
    assert made.step(None).means.isfinite().all() and made.step(None, odometry=(1.0, 0.0, 0.0)).means.isfinite().all()


def test_the_first_pose_alone_is_used():
    made, batch = made_localizer(), made_batch()
    other = batch._replace(poses=torch.cat([batch.poses[:, :1], torch.full((1, 5, 3), 9.0)], 1))
    assert torch.equal(*(made.smooth(b, **FEW, n_last=30, seed=SEED).smoothed.means for b in (batch, other)))


# ---- Several cameras ----------------------------------------------------------------------------------------------------

MOUNTS = torch.tensor([[1.0, 0.5, 0.3], [-1.5, -0.5, -2.0]])


def two_cameras(batch):
    """The batch as what two cameras see, the second one other things."""
    images = torch.stack([batch.images, batch.images.flip(1, 3)], 2)
    camera = torch.stack([batch.camera, batch.camera * torch.tensor([1.25, 1.25, 1.0, 1.0])], 2)
    return batch._replace(images=images, camera=camera, mounts=MOUNTS)


def test_step_by_step_with_two_cameras_is_the_forward_filter():
    made, batch = made_localizer(), two_cameras(made_batch())
    observed = torch.tensor([True, True, False, True, True, True])
    whole = made.smooth(batch._replace(observed=observed[None]), **FEW, n_last=30, seed=SEED).forward.posterior
    made.start((batch.classes[0], 2.0), batch.poses[0, 0], **FEW, mounts=MOUNTS, seed=SEED)
    for t, belief in enumerate(steps(made, batch, observed=observed)):
        assert_alike(belief, type(whole)(whole.means[0, t], whole.log_weights[0, t], whole.bandwidths, whole.space))
        assert ((belief.log_weights.max() - belief.log_weights.min()) > 1) == observed[t]


def test_scores_of_cameras_add_up():
    made, batch = made_localizer(temperature=20.0), two_cameras(made_batch())
    images, camera = batch.images[0, 0], batch.camera[0, 0]

    def log_weights(*seen):
        made.start((batch.classes[0], 2.0), batch.poses[0, 0], **FEW, mounts=MOUNTS.tolist(), seed=SEED)
        return made.step(seen, camera).log_weights

    both, first, second = log_weights(*images), log_weights(images[0], None), log_weights(None, images[1].numpy())
    off = both - first - second
    torch.testing.assert_close(off, off.mean().expand(len(off)), rtol=0, atol=1e-4)
    for alone in (first, second):
        assert alone.std() > 0.1
    nothing = log_weights(None, None)
    torch.testing.assert_close(nothing, nothing.mean().expand(len(nothing)))


def test_one_camera_at_the_pose_is_a_camera_without_mounts():
    made, batch = made_localizer(), made_batch()
    made.start((batch.classes[0], 2.0), batch.poses[0, 0], **FEW, seed=SEED)
    want = steps(made, batch)
    made.start((batch.classes[0], 2.0), batch.poses[0, 0], **FEW, mounts=np.zeros((1, 3)), seed=SEED)
    one = batch._replace(images=batch.images.unsqueeze(2), camera=batch.camera.unsqueeze(2))
    for belief, alone in zip(steps(made, one), want):
        assert_alike(belief, alone)


def test_pieces_hold_what_far_cameras_see(monkeypatch):
    """Cameras 60 m from the pose: the same beliefs as with all of the map at once."""
    made, batch = made_localizer(temperature=20.0), two_cameras(made_batch(T=20))
    batch = batch._replace(actions=torch.tensor([[[6.0, 1.0, 0.02]]]).expand(1, 20, 3))
    beliefs = []
    for margin in (0.0, 1000.0):
        monkeypatch.setattr(map_pieces, "MARGIN", margin + 30.0)
        made.start(made_map(400), (-60.0, 20.0, 0.4), **FEW, mounts=[(60.0, 0.0, 0.0), (0.0, -60.0, 1.0)], seed=SEED)
        beliefs.append(steps(made, batch))
    for belief, want in zip(*beliefs):
        assert_alike(belief, want)


def test_cameras_that_are_refused():
    made, batch = made_localizer(), two_cameras(made_batch())
    city, seen = (batch.classes[0], 2.0), (batch.images[0, 0], batch.camera[0, 0])
    for mounts, words in [
        (3.0, "mounts: expected rows of 3 numbers, got 3.0"),
        ([], r"mounts: expected rows of 3 numbers, got \[\]"),
        (MOUNTS[0], r"mounts\[0\]: expected 3 finite numbers, got 1.0"),
        (MOUNTS * torch.nan, r"mounts\[0\]: expected 3 finite numbers"),
        (MOUNTS[:, :2], r"mounts\[0\]: expected 3 finite numbers"),
    ]:
        with pytest.raises(ValueError, match=words):
            made.start(city, batch.poses[0, 0], **FEW, mounts=mounts)
    made.start(city, batch.poses[0, 0], **FEW, mounts=MOUNTS)
    for given, words in [
        ((seen[0][:1], seen[1]), "image: expected 2 of them, as there are mounts, got 1"),
        ((seen[0], seen[1][:1]), "camera: expected 2 of them, as there are mounts, got 1"),
        ((seen[0], None), "camera: expected 2 of them, as there are mounts, got NoneType"),
        ((seen[0], seen[1] * 0), "camera: expected focal lengths"),
    ]:
        with pytest.raises(ValueError, match=words):
            made.step(*given)
    for change, words in [
        ({"mounts": None}, r"images: expected uint8 \(B, T, 3, H, W\)"),
        ({"mounts": MOUNTS[:1]}, r"mounts: expected float \(V, 3\) with V = 2, got torch.float32 \(1, 3\)"),
        ({"mounts": MOUNTS * torch.nan}, "mounts: expected finite numbers, got nan"),
        ({"camera": batch.camera[:, :, 0]}, r"camera: expected float \(B, T, V, 4\) with B = 1, T = 6, V = 2"),
        ({"camera": batch.camera * 0}, "camera: expected focal lengths"),
    ]:
        with pytest.raises(ValueError, match=words):
            made.smooth(batch._replace(**change), **FEW)


# ---- Frames and pieces --------------------------------------------------------------------------------------------------


def test_beliefs_are_in_the_frame_of_the_map():
    """The same map elsewhere: the same beliefs, elsewhere."""
    made, batch = made_localizer(), made_batch()
    made.start(made_map(64), (1.0, 2.0, 0.0), **FEW, seed=SEED)
    here = steps(made, batch)
    made.start(made_map(64, corner=(1000.0, -500.5)), (1.0 + 1032.0, 2.0 - 468.5, 0.0), **FEW, seed=SEED)
    for belief, moved in zip(here, steps(made, batch)):
        assert_alike(belief, moved, by=(1032.0, -468.5))
    first = here[0].mean
    assert (first[:2] - torch.tensor([1.0, 2.0])).norm() < 15


@pytest.mark.parametrize("direction", [(7.0, 1.0, 0.02), (-2.0, -7.0, -0.02)])
def test_pieces_are_moved_along(monkeypatch, direction):
    """Far over a large map, piece by piece: the same beliefs as with all of the map at once."""
    made, batch = made_localizer(temperature=20.0), made_batch(T=24)
    batch = batch._replace(actions=torch.tensor([[direction]]).expand(1, 24, 3))
    city, cut, boxes = made_map(400), map_pieces.cut, []

    def seen_cut(*args):
        boxes.append((piece := cut(*args)).box)
        return piece

    monkeypatch.setattr(localizer, "cut", seen_cut)
    monkeypatch.setattr(map_pieces, "MARGIN", 30.0)  # more than the tiny network looks
    start = np.array([-90.0, 80.0, 0.4]) if direction[0] > 0 else np.array([60.0, 90.0, 3.0])
    made.start(city, start, **FEW, seed=SEED)
    by_pieces = steps(made, batch)
    assert len(boxes) >= 3 and all(max(box.size) < 200 for box in boxes)
    for box in boxes:  # whole pixels of the network's coarsest features, counted from the map's corner
        assert ((box.x_min + 200) * 2) % 4 == 0 and ((200 - box.y_max) * 2) % 4 == 0
    boxes.clear()
    monkeypatch.setattr(map_pieces, "MARGIN", 1000.0)
    made.start(city, start, **FEW, seed=SEED)
    at_once = steps(made, batch)
    assert [box.size for box in boxes] == [(400.0, 400.0)]
    for belief, want in zip(by_pieces, at_once):
        assert_alike(belief, want)
    gone = (by_pieces[-1].mean - torch.from_numpy(start))[:2]
    assert (gone / 23 - torch.tensor(direction[:2])).norm() < 1.5


def test_a_way_out_of_the_map_and_back():
    made, batch = made_localizer(), made_batch(T=17)
    out = torch.tensor([[30.0, -20.0, 0.0]]).expand(8, 3)
    batch = batch._replace(actions=torch.cat([torch.zeros(1, 3), out, -out])[None])
    made.start(made_map(100), (20.0, -20.0, 0.0), **FEW, seed=SEED)
    beliefs = steps(made, batch)
    away = beliefs[8]
    assert (away.mean[:2] - torch.tensor([260.0, -180.0])).norm() < 40
    torch.testing.assert_close(away.log_weights, torch.full_like(away.log_weights, away.log_weights[0]))  # nothing is there
    assert all(b.means.isfinite().all() and b.log_weights.isfinite().all() for b in beliefs)
    assert (beliefs[-1].log_weights.max() - beliefs[-1].log_weights.min()) > 0.1


@pytest.mark.parametrize("size", [(3, 101, 77), (3, 8, 300)])
def test_maps_of_any_size(size):
    made = made_localizer()
    classes = np.random.default_rng(0).integers(0, 7, size).astype(np.uint8)
    made.start((classes, 2.0), (0.0, 0.0, 0.0), **FEW, seed=SEED)
    assert made.step(torch.zeros(3, 16, 16, dtype=torch.uint8), CAMERA).log_weights.isfinite().all()


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    small_scenes = pytest.importorskip("small_scenes")
    from mdps.datasets import mapillary

    root = tmp_path_factory.mktemp("mapillary")
    small_scenes.make_mapillary(root)
    return mapillary.read_scene(root / "berlin")


def items_of(scene):
    from mdps.datasets import ImageFormat, OdometryNoise, SequenceDataset
    from mdps.datasets.sequences import runs

    options = {"image": ImageFormat(16, 16), "crop_metres": 200.0, "noise": OdometryNoise(1.0, 3.0)}
    return SequenceDataset(runs(scene, 4), {scene.name: scene.map}, **options)


@pytest.fixture(scope="module")
def items(scene):
    return items_of(scene)


def test_panoramas_step_by_step_and_as_a_sequence(scene):
    """An item of four views, on its map."""
    from mdps.datasets.mapillary import join_views

    made, item = made_localizer(), items_of(join_views(scene))[1]
    batch = to_batch(item)
    whole = made.smooth(batch, **FEW, n_last=30, seed=SEED).forward.posterior
    made.start((item["map"], 2.0), batch.poses[0, 0], **FEW, mounts=item["mounts"], seed=SEED)
    for t, belief in enumerate(steps(made, batch)):
        assert_alike(belief, type(whole)(whole.means[0, t], whole.log_weights[0, t], whole.bandwidths, whole.space))
        assert (belief.log_weights.max() - belief.log_weights.min()) > 0.1


def test_items_are_smoothed_in_the_frame_of_their_poses(items):
    made, options = made_localizer(), FEW | {"n_last": 30, "seed": SEED}
    one = made.smooth(items[2], **options)
    local = made.smooth(to_batch(items[2]), **options)
    by = (items[2]["pose"][0] - to_batch(items[2]).poses[0, 0])[:2].tolist()
    pairs = [
        (b.smoothed, b.forward.posterior, b.forward.predicted, b.backward.posterior, b.backward.predicted) for b in (local, one)
    ]
    for near, far in zip(*pairs):
        assert far.means.dtype == torch.float64 and far.batch_shape == (1, 4)
        assert_alike(near, far, by)
    start = one.forward.predicted.mean[0, 0]
    assert (start - items[2]["pose"][0])[:2].norm() < 5  # 40 particles, 10 m
    both = made.smooth(default_collate([items[2], items[5]]), **options)
    assert both.smoothed.batch_shape == (2, 4)
    start = both.forward.predicted.mean[1, 0]
    assert (start - items[5]["pose"][0])[:2].norm() < 5


def test_items_with_first_errors_are_smoothed(items):
    """KITTI's, of validation and test: they are no concern of the localizer."""
    made, options = made_localizer(), FEW | {"n_last": 30, "seed": SEED}
    with_errors = items[2] | {"shift": torch.rand(4, 3)}
    assert to_batch(with_errors).errors is not None
    for form in (with_errors, to_batch(with_errors), default_collate([with_errors])):
        got, want = made.smooth(form, **options).smoothed, made.smooth(items[2], **options).smoothed
        if isinstance(form, Batch):
            want = made.smooth(to_batch(items[2]), **options).smoothed
        assert torch.equal(got.means, want.means) and torch.equal(got.log_weights, want.log_weights)


# ---- Images -------------------------------------------------------------------------------------------------------------


def first_weights(made, image, camera):
    made.start(made_map(64), (0.0, 0.0, 0.0), **FEW, seed=SEED)
    return made.step(image, camera).log_weights


def test_images_in_any_form():
    pytest.importorskip("cv2")
    from mdps.datasets import Camera

    made = made_localizer()
    image = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8)
    want = first_weights(made, image, CAMERA)
    rows = image.permute(1, 2, 0).numpy()
    for form in (rows, np.asfortranarray(rows), rows[:, :, ::-1].copy()[:, :, ::-1], image.permute(1, 2, 0)):
        assert torch.equal(first_weights(made, form, CAMERA), want)
    for camera in (list(CAMERA), np.array(CAMERA), torch.tensor(CAMERA), Camera(16, 16, *CAMERA)):
        assert torch.equal(first_weights(made, image, camera), want)
    large = rows.repeat(2, 0).repeat(2, 1)  # of twice the size: area averages give the image back
    torch.testing.assert_close(first_weights(made, large, (32.0, 32.0, 15.5, 15.5)), want)
    padded = np.zeros((16, 32, 3), np.uint8)
    padded[:, 8:24] = rows
    wide = Localizer(made.model, (32, 16, None))
    torch.testing.assert_close(first_weights(wide, rows, CAMERA), first_weights(wide, padded, (16.0, 16.0, 15.5, 7.5)))
    focal = Localizer(made.model, (16, 16, 16.0))
    torch.testing.assert_close(first_weights(focal, large, (32.0, 32.0, 15.5, 15.5)), want)
    assert not torch.equal(first_weights(made, 255 - image, CAMERA), want)


# ---- Files --------------------------------------------------------------------------------------------------------------


def test_a_file_is_the_localizer(tmp_path):
    dynamics = OdometryDynamics(scale=(3.0, 2.0, 0.1), width=8), OdometryDynamics(scale=(1.0, 2.0, 0.3), width=8, reverse=True)
    made, batch = made_localizer(dynamics=dynamics), made_batch()
    made.image = made.image._replace(focal_length=16.0)
    made.save(tmp_path / "localizer.pt")
    assert os.listdir(tmp_path) == ["localizer.pt"]
    loaded = Localizer.load(tmp_path / "localizer.pt")
    assert loaded.image == made.image and loaded.model.encoders.sizes == TINY and not loaded.model.training
    options = FEW | {"n_last": 30, "seed": SEED}
    want, got = made.smooth(batch, **options).smoothed, loaded.smooth(batch, **options).smoothed
    assert torch.equal(want.means, got.means) and torch.equal(want.log_weights, got.log_weights)
    assert [m.numel() for m in loaded.model.parameters()] == [m.numel() for m in made.model.parameters()]
    for name, value in made.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value), name


def test_a_file_is_read_by_another_process(tmp_path):
    made = made_localizer()
    made.save(tmp_path / "localizer.pt")
    made_map(64).save(tmp_path / "map.npz")
    np.save(tmp_path / "image.npy", np.random.default_rng(0).integers(0, 256, (16, 16, 3)).astype(np.uint8))
    program = """
        import numpy as np, sys, torch
        from mdps.localization import Localizer
        from mdps.maps import RasterMap
        folder = sys.argv[1]
        made, city = Localizer.load(folder + "/localizer.pt"), RasterMap.load(folder + "/map.npz")
        start = {"metres": 10.0, "heading_concentration": 5.0, "n_first": 40, "seed": torch.tensor(7)}
        made.start(city, (1.0, 2.0, 0.5), **start)
        image = np.load(folder + "/image.npy")
        made.step(image, (16.0, 16.0, 7.5, 7.5))
        print(made.step(image, (16.0, 16.0, 7.5, 7.5), (1.0, 0.0, 0.0)).mean.tolist())
        assert "lightning" not in sys.modules and "torchvision" not in sys.modules and "cv2" not in sys.modules
    """
    run = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    out = subprocess.run(run, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    made.start(made_map(64), (1.0, 2.0, 0.5), **FEW, seed=SEED)
    image = np.load(tmp_path / "image.npy")
    made.step(image, CAMERA)
    assert eval(out.stdout) == pytest.approx(made.step(image, CAMERA, (1.0, 0.0, 0.0)).mean.tolist(), abs=1e-4)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("was_here",)


def test_files_that_are_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = made_localizer()
    made.save("good.pt")
    good = torch.load("good.pt", weights_only=True)

    def refused(path, words):
        with pytest.raises(DataError, match=words) as error:
            Localizer.load(path)
        assert "\n" not in str(error.value) and len(str(error.value)) < 400 and str(error.value).startswith(str(path))

    refused("nowhere.pt", "no such file")
    (tmp_path / "text.pt").write_text("not a model")
    refused("text.pt", "not a file that Localizer.save wrote, or damaged")
    (tmp_path / "half.pt").write_bytes((tmp_path / "good.pt").read_bytes()[:5000])
    refused("half.pt", "not a file that Localizer.save wrote, or damaged")
    refused(".", "not a file that Localizer.save wrote")
    torch.save({"format": "mdps localizer 1", "x": Evil()}, "evil.pt")
    refused("evil.pt", "not a file that Localizer.save wrote")
    assert not (tmp_path / "was_here").exists()
    torch.save(made.model.state_dict(), "weights.pt")
    refused("weights.pt", r"expected a file of format 'mdps localizer 1', that Localizer.save wrote, got None")
    torch.save([1], "list.pt")
    refused("list.pt", "got 'list'")
    changes = {
        "state_dict": {k: v for k, v in good["state_dict"].items() if "log_temperature" not in k},
        "sizes": good["sizes"] | {"latent": 16},
        "image": (0, 16),
        "dynamics": 3,
        "n_particles": 0,
    }
    for name, value in changes.items():
        torch.save(good | {name: value}, "changed.pt")
        refused("changed.pt", "what it holds does not fit together")
        torch.save({k: v for k, v in good.items() if k != name}, "changed.pt")
        refused("changed.pt", "what it holds does not fit together")
    with pytest.raises(RuntimeError, match="device"):
        Localizer.load("good.pt", "nowhere")
    torch.save(good | {"groups": good["groups"] | {"ways": ("road",)}}, "changed.pt")
    refused("changed.pt", "expected the 10 ways")


def test_only_odometry_dynamics_can_be_saved(tmp_path):
    class Other(OdometryDynamics):
        pass

    made = made_localizer(dynamics=(Other(), OdometryDynamics(reverse=True)))
    with pytest.raises(ValueError, match="model: expected filters with OdometryDynamics, got Other"):
        made.save(tmp_path / "x.pt")
    assert not list(tmp_path.iterdir())


# ---- What it refuses ----------------------------------------------------------------------------------------------------


def test_arguments_that_are_refused():
    made, image = made_localizer(), np.zeros((16, 16, 3), np.uint8)
    with pytest.raises(RuntimeError, match=r"there is no map: call start\(map, pose\) first"):
        made.step(image, CAMERA)
    city = made_map(64)
    starts = [
        ({"map": (city.classes, 4.0)}, "map: expected 2 pixels per metre, as in training, got 4"),
        ({"map": (city.classes[0], 2.0)}, r"map: expected classes uint8 \(3, H, W\)"),
        ({"map": (city.classes.astype(float), 2.0)}, r"classes: expected uint8 \(3, H, W\)"),
        ({"map": (city.classes, 0.0)}, "map: expected classes"),
        ({"map": city.classes}, "map: expected a RasterMap, or classes and pixels per metre, got ndarray"),
        ({"map": (city.classes, "2 m")}, "map: pixels per metre: expected 1 numbers, got"),
        ({"pose": (1.0, 2.0)}, "pose: expected 3 finite numbers"),
        ({"pose": (1.0, 2.0, np.nan)}, "pose: expected 3 finite numbers"),
        ({"pose": None}, "pose: expected 3"),
        ({"pose": (1.0, "North", 2)}, "pose: expected 3 numbers"),
        ({"metres": -1.0}, "metres: expected at least 0, got -1.0"),
        ({"heading_concentration": np.inf}, "heading_concentration: expected at least 0, got inf"),
        ({"n_first": 0}, "n_first: expected at least 1, got 0"),
        ({"pose": (1e4, 0.0, 0.0)}, r"pose: expected a place on the map, x from -?\d+ to \d+, .*, got x = 10000.0, y = 0.0"),
        ({"pose": (0.0, -500.0, 0.0), "metres": 1.0}, "pose: expected a place on the map, .* or within 3 m of it"),
        ({"seed": torch.tensor([1, 2])}, r"seed: expected shape \(\), got \(2,\)"),
    ]
    for change, words in starts:
        with pytest.raises(ValueError, match=words):
            made.start(**{"map": city, "pose": (0.0, 0.0, 0.0), "seed": SEED, **change})
    for change, words in [
        ({"n_first": 2.5}, "n_first: expected an int, got 2.5"),
        ({"seed": 3}, "seed: expected an int64 tensor .*, got int"),
        ({"seed": torch.tensor(3.0)}, "seed: expected dtype int64, got torch.float32"),
    ]:
        with pytest.raises(TypeError, match=words):
            made.start(**{"map": city, "pose": (0.0, 0.0, 0.0), "seed": SEED, **change})
    made.start(city, (0.0, 0.0, 0.0), **FEW, seed=SEED)
    with pytest.raises(ValueError, match="odometry: expected None at the first step"):
        made.step(image, CAMERA, (0.0, 0.0, 0.0))
    first = made.step(image, CAMERA)
    for given, words in [
        ((image.astype(float), CAMERA, (0, 0, 0)), r"image: expected uint8 \(H, W, 3\) or \(3, H, W\), got float64"),
        ((image[..., :2], CAMERA, (0, 0, 0)), "image: expected uint8"),
        ((image, None, (0, 0, 0)), "camera: expected 4"),
        (
            (image, (0.0, 16.0, 7.5, 7.5), (0, 0, 0)),
            "camera: expected focal lengths that see 1 to 170 degrees of .*, got fx = 0.0",
        ),
        ((image, CAMERA, None), "odometry: expected 3"),
        ((image, CAMERA, (1.0, np.inf, 0.0)), "odometry: expected 3 finite numbers"),
    ]:
        with pytest.raises(ValueError, match=words):
            made.step(*given)
    again = made.step(None, None, (0.0, 0.0, 0.0))  # what was refused has changed nothing
    made.start(city, (0.0, 0.0, 0.0), **FEW, seed=SEED)
    assert torch.equal(made.step(image, CAMERA).means, first.means)
    assert torch.equal(made.step(None, None, (0.0, 0.0, 0.0)).means, again.means)
    batch = made_batch()
    with pytest.raises(ValueError, match=r"sequence: expected images of \(16, 16\) pixels, as in training, got \(8, 16\)"):
        made.smooth(batch._replace(images=batch.images[..., :8, :]))
    with pytest.raises(ValueError, match="map: expected 2 pixels per metre"):
        made.smooth(batch._replace(pixels_per_metre=1.0))
    with pytest.raises(ValueError, match="n_last: expected at least 1"):
        made.smooth(batch, n_last=0)


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("poses", lambda x: x[:, :0], r"poses: expected one sequence or more, of one step or more, got shape \(1, 0, 3\)"),
        ("poses", lambda x: x[0], r"poses: expected float \(B, T, 3\), got torch.float32 \(6, 3\)"),
        ("poses", lambda x: x.long(), r"poses: expected float \(B, T, 3\), got torch.int64 \(1, 6, 3\)"),
        ("poses", lambda x: x * torch.tensor(torch.nan), "poses: expected finite numbers, got nan"),
        ("poses", lambda x: x + 100.0, r"poses: expected a place on the map, .* or within 30 m of it, got x = 95.0, y = 102.0"),
        ("images", lambda x: x[0], r"images: expected uint8 \(B, T, 3, H, W\) with B = 1, T = 6, got .* \(6, 3, 16, 16\)"),
        ("images", lambda x: x.float(), "images: expected uint8 .*, got torch.float32"),
        ("camera", lambda x: x[:, 1:], r"camera: expected float \(B, T, 4\) with B = 1, T = 6, got torch.float32 \(1, 5, 4\)"),
        ("camera", lambda x: x * torch.tensor([0.0, 1.0, 1.0, 1.0]), "camera: expected focal lengths .*, got fx = 0.0"),
        ("camera", lambda x: x * torch.tensor([1e6, 1.0, 1.0, 1.0]), "camera: expected focal lengths .*, got fx = 1600"),
        ("camera", lambda x: x * torch.tensor([1.0, 1.0, torch.nan, 1.0]), "camera: expected focal .*, cx = nan"),
        ("classes", lambda x: x[0], r"classes: expected uint8 \(B, 3, S, S'\) with B = 1, got torch.uint8 \(3, 128, 128\)"),
        ("actions", lambda x: x[..., :2], r"actions: expected float \(B, T, 3\) with B = 1, T = 6, got .* \(1, 6, 2\)"),
        ("actions", lambda x: x + torch.inf, "actions: expected finite numbers, got inf"),
        ("observed", lambda x: x.float(), r"observed: expected bool \(B, T\) with B = 1, T = 6, got torch.float32"),
        ("observed", lambda x: None, r"observed: expected bool \(B, T\), got NoneType"),
        ("pixels_per_metre", lambda x: float("nan"), "map: expected 2 pixels per metre, as in training, got nan"),
    ],
)
def test_batches_that_are_refused(name, change, words):
    made, batch = made_localizer(), made_batch()
    with pytest.raises(ValueError, match=words):
        made.smooth(batch._replace(**{name: change(getattr(batch, name))}), **FEW)


def test_what_is_not_used_may_be_anything():
    """Where there is no image, and of poses and odometry all but the first, or that."""
    made, batch = made_localizer(), made_batch()
    observed = torch.tensor([[True, False, True, True, True, True]])
    camera, poses, actions = batch.camera.clone(), batch.poses.clone(), batch.actions.clone()
    camera[0, 1], poses[0, 1:], actions[0, 0] = 0.0, torch.nan, torch.nan
    plain = batch._replace(observed=observed)
    odd = plain._replace(camera=camera, poses=poses, actions=actions)
    want, got = (made.smooth(b, **FEW, n_last=30, seed=SEED).smoothed for b in (plain, odd))
    assert torch.equal(got.means, want.means) and torch.equal(got.log_weights, want.log_weights)


def test_poses_and_odometry_in_double_precision():
    made, batch = made_localizer(), made_batch()
    double = batch._replace(poses=batch.poses.double(), actions=batch.actions.double(), camera=batch.camera.double())
    want, got = (made.smooth(b, **FEW, n_last=30, seed=SEED).smoothed for b in (batch, double))
    assert torch.equal(got.means, want.means) and torch.equal(got.log_weights, want.log_weights)


def test_items_that_are_refused(items):
    made, item = made_localizer(), items[2]
    for change, words in [
        *(({name: None}, f"{name}: expected .*, got NoneType") for name in FORMS),
        ({"odometry": item["odometry"][1:]}, r"odometry: expected shape \(B, T - 1, 3\) with T = 4, .*, got \(1, 2, 3\)"),
        ({"image": item["image"][:0]}, r"camera: expected float \(B, T, 4\) with B = 1, T = 0"),
        ({"camera": item["camera"] * 0}, "camera: expected focal lengths"),
        ({"uv_pose": item["uv_pose"] + 1e4}, "poses: expected a place on the map"),
    ]:
        given = {k: v for k, v in (item | change).items() if v is not None}
        with pytest.raises(ValueError, match=words):
            made.smooth(given, **FEW)
    with pytest.raises(ValueError, match="items: expected what a data set has, a mapping from names to tensors, got int"):
        made.smooth(3)


def test_the_example_of_the_documentation(tmp_path, monkeypatch, capsys):
    small_scenes = pytest.importorskip("small_scenes")
    small_scenes.make_mapillary(tmp_path / "data")
    made_localizer(size=32, temperature=5.0).save(tmp_path / "localizer.pt")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"\n\n((?: {8}.*\n|\n)+)", Localizer.__doc__.partition("Example")[2])
    names = {}
    exec(compile(textwrap.dedent(code), "the example of Localizer", "exec"), names)
    assert names["smoothed"].batch_shape == (1, 10) and names["poses"].shape == (3, 3)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("at ") and "or at one of" in line for line in lines) == 10


def test_torchs_default_dtype_does_not_matter(tmp_path):
    made = made_localizer()
    made.save(tmp_path / "localizer.pt")
    image, batch = np.random.default_rng(0).integers(0, 256, (16, 16, 3)).astype(np.uint8), made_batch()
    results = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            loaded = Localizer.load(tmp_path / "localizer.pt")
            loaded.start(made_map(64), (1.0, 2.0, 0.5), **FEW, seed=SEED)
            loaded.step(image, CAMERA)
            found = loaded.step(image, CAMERA, (1.0, 0.0, 0.0)).means, loaded.smooth(batch, seed=SEED).smoothed.means
        finally:
            torch.set_default_dtype(torch.float32)
        results.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*results))
