"""KITTI end to end, by the protocol of its test: fixed first errors, the fitting of MGL's run, lateral and longitudinal errors.

No map of Karlsruhe is here. For the real drive a map is made up around its track; what is checked is that images, calibration,
poses, lists and map come together, not how well a place is found.
"""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("matplotlib")
pytest.importorskip("cv2")

import tiny_localization as tiny
from real_data import real_data
from small_scenes import DAY, make_kitti, make_mapillary

# isort: split
import localization
import localization_figures
import localization_methods
import make_city
from city import recording
from city.plan import draw_city

from mdps.datasets import KittiDataModule, kitti
from mdps.localization import SPACE, to_batch, windows
from mdps.maps import rasterise, read_osm

DRIVE = f"{DAY}_drive_0009_sync"


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(localization_methods.SIZES, "small", tiny.SIZES)
    monkeypatch.setattr(localization.figures, "draw", lambda *a: None)
    monkeypatch.setattr(localization, "_draw_trajectories", lambda *a: None)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made") / "kitti"
    make_kitti(root, 8)
    return root


def test_the_first_guess_is_that_of_the_lists(made):
    """Shifts 0.5, -0.25, 1: 10 m ahead, 5 m to the right, 10 degrees clockwise; R(90 - yaw) @ shifts * 20 m."""
    data = KittiDataModule(made, length=4, crop_metres=96.0, n_workers=0)
    data.setup()
    assert data.test.has_shifts and data.val.has_shifts and not data.train.has_shifts
    batch = to_batch(data.test[0])
    heading = batch.poses[..., 2]
    ahead, right = torch.stack([heading.cos(), heading.sin()], -1), torch.stack([heading.sin(), -heading.cos()], -1)
    torch.testing.assert_close(batch.errors[..., :2], 10 * ahead + 5 * right, atol=1e-4, rtol=0)
    torch.testing.assert_close(batch.errors[..., 2], torch.full((1, 4), -math.radians(10)))
    yaw = math.radians(90) - heading  # error = R(90 - yaw) @ shifts * 20 m
    rotation = torch.stack([(math.pi / 2 - yaw).cos(), -(math.pi / 2 - yaw).sin(), (math.pi / 2 - yaw).sin(),
                            (math.pi / 2 - yaw).cos()], -1).unflatten(-1, (2, 2))  # fmt: skip
    torch.testing.assert_close(batch.errors[..., :2], 20 * rotation @ torch.tensor([0.5, -0.25]), atol=1e-4, rtol=0)
    assert to_batch(data.train[0]).errors is None


def test_filters_start_there(made):
    data = KittiDataModule(made, length=4, crop_metres=96.0, n_workers=0)
    data.setup()
    c = tiny.configured(n_first=20000, first_metres=3.0, first_offset=30.0, layout="kitti")
    batch = to_batch(data.test[0])
    starts = [localization_methods.start(batch, c, torch.tensor(seed)) for seed in range(2)]
    off = [SPACE.difference(particles, batch.poses[:, :1]).mean(1) for particles in starts]
    for found in off:  # whatever the seed
        torch.testing.assert_close(found[:, :2], batch.errors[:, 0, :2], atol=0.1, rtol=0)
        torch.testing.assert_close(found[:, 2], batch.errors[:, 0, 2], atol=5e-3, rtol=0)
    drawn = [localization_methods.start(batch._replace(errors=None), c, torch.tensor(seed)) for seed in range(2)]
    off = [SPACE.difference(particles, batch.poses[:, :1]).mean(1) for particles in drawn]
    assert (off[0] - off[1]).abs().max() > 1 and all(x[:, :2].abs().max() < 31 and x[:, 2].abs().max() < 5e-3 for x in off)


@pytest.mark.parametrize("method", ["dense-search", "retrieval"])
def test_windows_begin_at_the_guess(method, made, monkeypatch):
    """And estimates near a guess are that, whatever weights say."""
    data = KittiDataModule(made, length=4, crop_metres=96.0, n_workers=0)
    data.setup()
    batch = to_batch(data.test[0])
    model = localization.build(tiny.configured(method=method, layout="kitti", n_test_rotations=36)).eval()
    starts = []

    def slide(*args, start, **options):
        starts.append(start)
        return windows.search_sliding_window(*args, start=start, **options)

    monkeypatch.setattr(localization_methods, "search_sliding_window", slide)
    with torch.no_grad():
        found = model.estimates(batch, 0)
    guesses = SPACE.wrap(batch.poses + batch.errors)
    torch.testing.assert_close(starts[0], guesses[:, 0])
    off = SPACE.difference(found["near"].poses[..., 0, :], guesses)
    assert (off[..., :2].norm(dim=-1) <= 28.3).all() and (off[..., 2].abs() <= math.radians(10) * 1.001).all()
    with torch.no_grad():
        assert set(model.estimates(batch._replace(errors=None), 0)) == set(found) - {"near"}


def check_results(folder, n_steps):
    results = localization_figures.load_results(folder / "run/results")
    for r in results:
        told = "the errors that KITTI's lists name" if r.method in ("mdps", "mdpf", "ffbs", "retrieval-pf") else None
        assert r.data.get("start off the truth by") == told and r.summary["steps"] == n_steps
        if r.method.endswith("near"):
            assert r.data["every frame"] == "within 28 m and 10 degrees of the guess that KITTI's lists name"
        if r.method in ("dense-search", "retrieval"):
            assert r.data["first window"] == "around the guess that KITTI's lists name"
        for axis in ("lateral", "longitudinal"):
            assert r.summary["top_1"][axis]["median"] >= 0 and len(r.summary["top_1"][axis]["recall"]) == 3
    table = localization_figures.recall_table(results, axes=("lateral", "longitudinal"), markdown=False)
    assert "lateral 1 m" in table and "longitudinal 1 m" in table and table.splitlines()[-1].startswith("chance")
    return results


@pytest.mark.parametrize("method", ["mdps", "dense-search", "retrieval"])
def test_a_run_of_mgl_goes_on_with_kitti(method, made, tmp_path):
    """The paper's way: weights of MGL first, then the stages of KITTI."""
    for seed, name in enumerate("abc"):
        make_mapillary(tmp_path / "mgl", name, 4, n_flat=0, seed=seed)
    scenes = {"data": str(tmp_path / "mgl"), "validation_scenes": "b", "test_scenes": "c"}
    assert tiny.train(tmp_path / "first", **scenes, method=method, view_epochs=0) == 0
    options = {"data": str(made), "layout": "kitti", "method": method, "start": str(tmp_path / "first/run"), "view_epochs": 0}
    assert tiny.train(tmp_path / "second", **options) == 0
    assert len(list((tmp_path / "second/run").glob("stage_*/finished.json"))) == (5 if method == "mdps" else 1)
    found = {r.method for r in check_results(tmp_path / "second", 8)}
    assert ({f"{method}-near", method} <= found) == (method != "mdps")


@pytest.mark.slow
def test_curves_of_both_axes_are_drawn(made, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(localization_methods.SIZES, "small", tiny.SIZES)
    monkeypatch.setattr(localization, "_draw_trajectories", lambda *a: None)
    assert tiny.train(tmp_path, data=str(made), layout="kitti", method="dense-search") == 0
    drawn = {p.name for p in (tmp_path / "run/figures").iterdir()}
    assert "recall_lateral_longitudinal_jointly.png" in drawn
    assert "lateral and longitudinal" in (tmp_path / "run/figures/table.md").read_text()


@pytest.mark.slow
def test_a_made_city(tmp_path, monkeypatch):
    """As `make_city.py --format kitti` writes it: rendered images and its own map."""
    size = recording.Size(blocks=2, drives=3, keyframes=7, frames=8, kitti_scale=0.25)
    monkeypatch.setitem(recording.SIZES, "small", size)
    root = tmp_path / "city"
    assert make_city.main(["--out", str(root), "--seed", "3", "--format", "kitti"]) == 0
    lines = (root / "test2_files.txt").read_text()
    (root / "test1_files.txt").write_text(lines)  # the sample of so few frames has no sequence
    assert tiny.train(tmp_path, data=str(root), layout="kitti") == 0
    check_results(tmp_path, 8)


@pytest.fixture(scope="module")
def track(tmp_path_factory):
    """The real drive's ten images, calibration and poses; a map and lists that are made up.

    The lists that come with the drive name three of these images and test2 none, so all ten are for every purpose here.
    """
    root = tmp_path_factory.mktemp("track")
    source = real_data("kitti") / DAY
    shutil.copytree(source, root / DAY, copy_function=lambda a, b: Path(b).symlink_to(a))
    random = np.random.default_rng(0)
    projection, _ = kitti.map_area(root)
    sketch = draw_city(random, 4)
    reach = np.abs(sketch.places).max(0) + 30
    (south, west), (north, east) = projection.to_degrees([-reach, reach])
    sketch.write(root / "made.osm", projection, (south, west, north, east))
    rasterise(read_osm(root / "made.osm"), projection, projection.to_box(south, west, north, east)).save(root / "map.npz")
    names = [f"{DAY}/{DRIVE}/{path.name}" for path in sorted((root / DAY / DRIVE / "image_02/data").glob("*.png"))]
    shifts = random.uniform(-1, 1, (len(names), 3))
    (root / "train_files.txt").write_text("".join(f"{name}\n" for name in names))
    for name in ("test1", "test2"):
        lines = [f"{n} {' '.join(f'{v:.4f}' for v in shift)}\n" for n, shift in zip(names, shifts)]
        (root / f"{name}_files.txt").write_text("".join(lines))
    return root, shifts


def test_the_real_drive(track, tmp_path):
    root, shifts = track
    options = {"data": str(root), "layout": "kitti", "length": 10, "long_length": 10, "crop": 160.0}
    data = KittiDataModule(root, length=10, crop_metres=160.0, n_workers=0)
    data.setup()
    assert [len(part) for part in data.splits] == [1, 1, 1]
    item = data.test[0]
    assert item["image"].shape == (10, 3, 160, 448) and item["observed"].all() and item["map"].any()
    assert item["camera"][:, 0].allclose(torch.tensor(256.0), atol=0.5)
    batch = to_batch(item)
    noise = SPACE.difference(batch.actions[:, 1:], SPACE.difference(batch.poses[:, 1:], batch.poses[:, :-1]))
    assert noise[..., :2].abs().max() <= 2.001 and noise[..., 2].abs().max() <= math.radians(10.01)  # +-1 m at both ends
    off = batch.errors[0, :, :2].norm(dim=-1).numpy()
    assert np.allclose(off, 20 * np.hypot(*shifts[:, :2].T), atol=0.01)
    assert tiny.train(tmp_path, **options) == 0
    results = check_results(tmp_path, 10)
    assert {r.method for r in results} == {"mdps", "mdpf", "mdpf-backward", "ffbs", "chance"}
    assert all(math.isfinite(row["training_loss"]) for row in tiny.history(tmp_path))
