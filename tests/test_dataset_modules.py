"""Data modules: which sequences are for what, loaders with workers, with and without Lightning."""

import gc
import pickle
import subprocess
import sys

import pytest
import torch
from small_scenes import cv2, make_kitti, make_mapillary

from mdps.datasets import DataError, ImageFormat
from mdps.datasets.loading import start_worker
from mdps.datasets.modules import KittiDataModule, MapillaryDataModule

SMALL = {"image": ImageFormat(32, 32), "length": 5, "n_workers": 0}


@pytest.fixture(scope="module")
def mgl(tmp_path_factory):
    root = tmp_path_factory.mktemp("mgl")
    for i, name in enumerate(("amsterdam", "berlin", "paris")):
        make_mapillary(root, name, seed=i)
    return root


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    root = tmp_path_factory.mktemp("kitti")
    make_kitti(root)
    return root


def ready(module):
    module.setup()
    return module


def scenes(part):
    return {run.scene for run in part}


def test_mapillary(mgl):
    module = ready(MapillaryDataModule(str(mgl), **SMALL))
    # of each scene 4 x 4 of the panoramas, 2 of the others; nothing is long, so that nothing is kept for tests
    assert [len(part) for part in module.splits] == [42, 12, 0] and scenes(module.splits.train) == {
        "amsterdam",
        "berlin",
        "paris",
    }
    assert len(module.train) == 42 and module.crop_metres == 400 and module.batch_size == 3
    batch = next(iter(module.train_dataloader()))
    assert batch["image"].shape == (3, 5, 3, 32, 32) and batch["map"].shape == (3, 3, 800, 800) and len(batch["name"]) == 3
    assert next(iter(module.val_dataloader()))["uv_pose"].shape == (1, 5, 3)
    assert len(list(module.test_dataloader())) == 0
    again = ready(MapillaryDataModule(mgl, **SMALL))
    assert again.splits == module.splits and again.fingerprint == module.fingerprint
    assert ready(MapillaryDataModule(mgl, **SMALL, seed=1)).splits != module.splits


def test_long_sequences_have_larger_maps(mgl):
    module = MapillaryDataModule(mgl, length=100)
    assert module.crop_metres == 1228 and module.batch_size == 2


def test_scenes_for_one_purpose_each(mgl):
    module = ready(MapillaryDataModule(mgl, scenes={"train": ["paris", "berlin"], "test": ["amsterdam"]}, **SMALL))
    assert [scenes(part) for part in module.splits] == [{"paris", "berlin"}, set(), {"amsterdam"}]
    assert [len(part) for part in module.splits] == [36, 0, 18]
    with pytest.raises(ValueError, match="scenes: expected every scene once, got paris, berlin, paris"):
        MapillaryDataModule(mgl, scenes={"train": ["paris", "berlin"], "test": ["paris"]})
    for text in ("paris", {"train": ["berlin"], "test": "paris"}):
        with pytest.raises(ValueError, match="scenes: expected a sequence of names, got the text 'paris'; for one scene"):
            MapillaryDataModule(mgl, scenes=text)
    with pytest.raises(ValueError, match="scenes: expected the keys train, val, test, got tests"):
        MapillaryDataModule(mgl, scenes={"tests": ["paris"]})


def test_panoramas(mgl):
    """Four views a frame, of the same scenes by the same fingerprint."""
    module, alone = (ready(MapillaryDataModule(mgl, views=views, **SMALL)) for views in (4, 1))
    n_train, n_val, n_test = map(len, module.splits)
    assert n_train + n_val == 12 and n_val > 0 == n_test  # of each scene 4 of the panoramas
    assert {run.track for part in module.splits for run in part} == {"seqA_front"}
    assert next(iter(module.train_dataloader()))["image"].shape == (3, 5, 4, 3, 32, 32)
    assert module.fingerprint == alone.fingerprint
    named = ready(MapillaryDataModule(mgl, views=4, scenes={"train": ["paris"], "test": ["berlin"]}, **SMALL))
    assert [len(part) for part in named.splits] == [4, 0, 4]
    of_file = ready(MapillaryDataModule(mgl, views=4, scenes=["paris"], split="file", **SMALL))
    assert len(of_file.splits.train) == 3 and {len(f.beside) for run in of_file.splits.val for f in run.frames} == {3}
    with pytest.raises(ValueError, match="views: expected 1 or 4, got 2"):
        MapillaryDataModule(mgl, views=2)


def test_split_files(mgl):
    module = ready(MapillaryDataModule(mgl, scenes=["paris"], split="file", **SMALL))
    train = {int(f.name.split("_")[0]) for run in module.splits.train for f in run.frames}
    val = {int(f.name.split("_")[0]) for run in module.splits.val for f in run.frames}
    assert train <= set(range(1000, 1018)) and val <= {*range(1018, 1024), *range(2000, 2012)} and train and val
    assert module.splits.test == module.splits.val
    with pytest.raises(ValueError, match="split: expected 'seeded' or 'file', got 'random'"):
        MapillaryDataModule(mgl, split="random")


def test_partial_data_is_passed_over(mgl, tmp_path, caplog):
    make_mapillary(tmp_path, "whole")
    make_mapillary(tmp_path, "mapless", n=10, n_flat=0, with_map=False)
    make_mapillary(tmp_path, "broken", n=2, n_flat=0)
    (tmp_path / "broken/dump.json").write_text("null")
    make_mapillary(tmp_path, "blind", n=2, n_flat=0)
    for path in (tmp_path / "blind/images").iterdir():
        path.unlink()
    module = ready(MapillaryDataModule(tmp_path, **SMALL))
    assert scenes(module.splits.train) == {"whole"}
    lines = sorted(r.getMessage() for r in caplog.records if "for test" not in r.getMessage())
    assert len(lines) == 3 and all(line.startswith("scene not used: ") and "\n" not in line for line in lines)
    assert "without usable frames" in lines[0] and "expected an object" in lines[1] and "without a map" in lines[2]


def warnings_of(module, caplog):
    caplog.clear()
    module.setup()
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_an_empty_part_is_a_warning(mgl, raw, tmp_path, caplog):
    """Unless nobody asked for it."""
    assert warnings_of(MapillaryDataModule(mgl, **SMALL), caplog) == [f"{mgl}: no sequence of 5 frames for test"]
    asked = {"train": ["berlin"], "val": [], "test": ["paris"]}
    assert warnings_of(MapillaryDataModule(mgl, scenes=asked, **SMALL), caplog) == []
    make_mapillary(tmp_path, "whole")
    make_mapillary(tmp_path, "short", n=4, n_flat=0)
    module = MapillaryDataModule(tmp_path, scenes={"train": ["whole"], "val": ["short"]}, **SMALL)
    assert warnings_of(module, caplog) == [f"{tmp_path}: no sequence of 5 frames for val"]
    assert warnings_of(KittiDataModule(raw, **SMALL), caplog) == []


def test_sequences_that_are_too_wide_are_a_warning(mgl, caplog):
    module = MapillaryDataModule(mgl, scenes={"train": ["berlin"]}, length=10, n_workers=0, crop_metres=109)
    n = sum(run.extent > 43 for run in module.read()[1].train)
    assert 0 < n < 9
    assert warnings_of(module, caplog) == [f"{mgl}: {n} sequences left out, which do not fit into 109 m of map (crop_metres)"]
    assert len(module.train) == 9 - n


def test_a_data_set_has_the_maps_of_its_own_scenes(mgl):
    """And so has the copy of it that a worker gets."""
    module = ready(MapillaryDataModule(mgl, scenes={"train": ["paris", "berlin"], "test": ["amsterdam"]}, **SMALL))
    assert [set(part.maps) for part in (module.train, module.val, module.test)] == [{"paris", "berlin"}, set(), {"amsterdam"}]
    sizes = [len(pickle.dumps(part)) for part in (module.val, module.test, module.train)]
    one_map = module.scenes[0].map.classes.nbytes
    assert sizes[0] < one_map < sizes[1] < 2 * one_map < sizes[2]


def test_a_worker_leaves_shared_memory_alone():
    was = cv2.getNumThreads()
    try:
        start_worker(0)
        assert gc.get_freeze_count() > 1000 and cv2.getNumThreads() <= 1
    finally:
        gc.unfreeze()
        cv2.setNumThreads(was)


def test_nothing_to_load(mgl, raw, tmp_path):
    with pytest.raises(DataError, match="nowhere: expected scenes, folders with a dump.json, found none"):
        ready(MapillaryDataModule(mgl / "nowhere"))
    with pytest.raises(DataError, match="no scene rome; there are amsterdam, berlin, paris"):
        ready(MapillaryDataModule(mgl, scenes=["berlin", "rome"]))
    module = MapillaryDataModule(mgl, length=50)
    for _ in range(2):
        with pytest.raises(DataError, match="no sequence of 50 frames in 324 frames"):
            ready(module)
    with pytest.raises(DataError, match="no sequence of 12 frames in 324 frames, 27 do not fit into 70 m of map"):
        ready(MapillaryDataModule(mgl, length=12, crop_metres=70))
    with pytest.raises(DataError, match="expected train_files.txt, test1_files.txt, test2_files.txt, found none of them"):
        ready(KittiDataModule(tmp_path))
    make_kitti(tmp_path, with_map=False)
    with pytest.raises(DataError, match="expected one of map.npz, tiles.pkl"):
        ready(KittiDataModule(tmp_path))


def test_kitti(raw):
    module = ready(KittiDataModule(str(raw), length=10, n_workers=0))
    assert [len(part) for part in module.splits] == [2, 2, 2]
    assert [{r.track[-9:-5] for r in part} for part in module.splits] == [{"0009"}, {"0011"}, {"0011"}]
    batch = next(iter(module.test_dataloader()))
    assert batch["image"].shape == (1, 10, 3, 160, 448) and batch["shift"].shape == (1, 10, 3)
    assert "shift" not in next(iter(module.train_dataloader()))
    assert module.scenes[0].map is module.scenes[1].map


def test_lists_that_are_not_there(tmp_path):
    make_kitti(tmp_path)
    (tmp_path / "test2_files.txt").unlink()
    module = ready(KittiDataModule(tmp_path, **SMALL))
    assert len(module.splits.val) == 4 and len(module.splits.test) == 0


def test_workers(mgl):
    options = {**SMALL, "n_workers": 2, "scenes": ["berlin"]}
    alone = list(ready(MapillaryDataModule(mgl, **{**options, "n_workers": 0})).train_dataloader())
    together = list(ready(MapillaryDataModule(mgl, **options)).train_dataloader())
    assert len(alone) == len(together)
    for a, b in zip(alone, together):
        assert a["name"] == b["name"] and torch.equal(a["image"], b["image"]) and torch.equal(a["odometry"], b["odometry"])


@pytest.mark.filterwarnings("ignore")  # Lightning's own: few workers, deprecated parts of torch
def test_a_lightning_trainer_takes_it(mgl, tmp_path):
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight, self.seen, self.origins = torch.nn.Parameter(torch.zeros(())), [], []

        def training_step(self, batch, index):
            self.seen += batch["name"]
            self.origins += batch["map_origin"].flatten().tolist()
            return self.weight * batch["uv_pose"].mean()

        def validation_step(self, batch, index):
            assert batch["image"].shape[:2] == (1, 5)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    model = Model()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"max_epochs": 2, "accelerator": "cpu", "log_every_n_steps": 1}
    trainer = lightning.Trainer(default_root_dir=tmp_path, **quiet, **options)
    trainer.fit(model, datamodule=MapillaryDataModule(mgl, scenes=["berlin"], **SMALL))
    half = len(model.seen) // 2
    assert sorted(model.seen[:half]) == sorted(model.seen[half:]) and model.seen[:half] != model.seen[half:]
    assert not set(model.origins[: len(model.origins) // 2]) & set(model.origins[len(model.origins) // 2 :])


def test_without_lightning(mgl):
    code = (
        "import sys; sys.modules['lightning'] = None\n"
        "from mdps.datasets import ImageFormat, MapillaryDataModule\n"
        f"m = MapillaryDataModule({str(mgl)!r}, length=5, image=ImageFormat(32, 32), n_workers=0); m.setup()\n"
        "print(len(list(m.val_dataloader())))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["12"], done.stderr


def test_importing_the_package_imports_neither_lightning_nor_opencv_nor_matplotlib():
    code = "import sys, mdps.datasets; print(sorted({'lightning', 'cv2', 'matplotlib', 'osmium'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
