"""Everything for training in one object: scenes found and read, sequences dealt, loaders with workers.

The data modules are Lightning's where it is installed; without it they are plain objects with the same methods, of which
`setup` must be called first.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from ..maps.errors import DataError
from . import kitti, mapillary
from .loading import KITTI_IMAGE, MAPILLARY_IMAGE, FreshDraws, ImageFormat, SequenceDataset, start_worker
from .odometry import KITTI_NOISE, MAPILLARY_NOISE, OdometryNoise
from .scene import Scene, fingerprint
from .sequences import LONG, SHORT, Run, Splits, runs, split_long, split_short

if TYPE_CHECKING:
    from lightning import LightningDataModule as _Base
else:
    try:
        from lightning import LightningDataModule as _Base
    except ImportError:
        _Base = object

SHORT_CROP = 400.0
"""Side of the map for sequences of up to 10 frames, in metres."""
LONG_CROP = 1228.0
"""Side of the map for longer ones."""


class SequenceDataModule(_Base):
    """What the data modules share: three data sets and their loaders.

    Args:
        root: the data set's folder.
        length: T, frames in a sequence.
        image: size and focal length of the images.
        crop_metres: side of the square of map; None: 400 up to T = 10, else 1228.
        noise: of the odometry.
        batch_size: sequences in a batch of training; None: 3 up to T = 10, else 2. Validation and test take one.
        n_workers: processes for each loader; 0 loads in this one.
        seed: of everything that is random here.

    Attributes, after `setup`: splits (sequences), train, val, test (`SequenceDataset`), scenes, fingerprint (of all usable
    frames of the scenes, whatever the split; `check` prints it where the scenes are all in the folder, and of one scene's
    folder that of a module of this scene alone; KITTI's is that of its lists).
    """

    def __init__(
        self,
        root: str | Path,
        *,
        length: int,
        image: ImageFormat,
        crop_metres: float | None,
        noise: OdometryNoise,
        batch_size: int | None,
        n_workers: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.root, self.length, self.image, self.noise, self.seed = Path(root), length, image, noise, seed
        self.crop_metres = crop_metres if crop_metres is not None else SHORT_CROP if length <= SHORT else LONG_CROP
        self.batch_size = batch_size if batch_size is not None else 3 if length <= SHORT else 2
        self.n_workers = n_workers
        self.scenes: list[Scene] = []

    def setup(self, stage: str | None = None) -> None:
        """Read the scenes and deal their sequences; `stage` makes no difference.

        Sequences that do not fit into the map, and a part (train, val, test) that was asked for and is empty, are a warning.

        Raises:
            DataError: no sequence at all can be made of what is there.
        """
        if self.scenes:
            return
        scenes, splits = self.read()
        rasters = {scene.name: scene.map for scene in scenes if scene.map is not None}
        options: dict[str, Any] = {"image": self.image, "crop_metres": self.crop_metres, "noise": self.noise, "seed": self.seed}
        self.train, self.val, self.test = (SequenceDataset(part, rasters, **options) for part in splits)
        self.splits = Splits(*(part.sequences for part in (self.train, self.val, self.test)))
        too_wide = sum(len(part.left_out) for part in (self.train, self.val, self.test))
        if not any(self.splits):
            wide = f", {too_wide} do not fit into {self.crop_metres:.0f} m of map" if too_wide else ""
            n_frames = sum(scene.n_frames for scene in scenes)
            raise DataError(f"{self.root}: no sequence of {self.length} frames in {n_frames} frames{wide}")
        self.scenes, self.fingerprint = scenes, fingerprint(scenes)
        log = logging.getLogger("mdps")
        if too_wide:
            told = "%s: %d sequences left out, which do not fit into %.0f m of map (crop_metres)"
            log.warning(told, self.root, too_wide, self.crop_metres)
        for name, part in zip(Splits._fields, self.splits):
            if not part and name in self.asked_for():
                log.warning("%s: no sequence of %d frames for %s", self.root, self.length, name)
        sizes = ", ".join(f"{len(part)} {name}" for name, part in zip(Splits._fields, self.splits))
        log.info("%s: sequences of %d frames: %s; fingerprint %s", self.root, self.length, sizes, self.fingerprint)

    def asked_for(self) -> Sequence[str]:
        """Which of train, val and test should have sequences."""
        return Splits._fields

    def read(self) -> tuple[list[Scene], Splits]:
        """Read the scenes, and say which of their sequences are for what."""
        raise NotImplementedError

    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        """Batches in a new order, with new crops and noise, in every epoch."""
        return self._loader(self.train, batch_size=self.batch_size, sampler=FreshDraws(len(self.train), self.seed))

    def val_dataloader(self) -> DataLoader[dict[str, Any]]:
        """One sequence after another, always the same."""
        return self._loader(self.val, batch_size=1)

    def test_dataloader(self) -> DataLoader[dict[str, Any]]:
        """One sequence after another, always the same."""
        return self._loader(self.test, batch_size=1)

    def _loader(self, dataset: SequenceDataset, **options: Any) -> DataLoader[dict[str, Any]]:
        options |= {"num_workers": self.n_workers, "persistent_workers": self.n_workers > 0, "worker_init_fn": start_worker}
        return DataLoader(dataset, pin_memory=torch.cuda.is_available(), **options)


class MapillaryDataModule(SequenceDataModule):
    """Sequences of MGL.

    Args:
        root: folder of the scenes.
        scenes: names, whose sequences are dealt by `split`; or {"train": names, "val": names, "test": names}, each scene for
            one purpose; None: all scenes that are there.
        split: "seeded": long and short sequences as in `mdps.datasets.sequences`; "file": by the image ids of the split files,
            whose "val" is for validation and test.
        long_length: frames of long sequences. With `length` less than that sequences are short ones: none for training has a
            frame of a long one for validation or test.
        views: 1: every image is a frame by itself; 4: a frame is a panorama, of which all directions are there.
        others: as in `SequenceDataModule`.

    Scenes that cannot be read, or have no map or no usable frames, are passed over with a warning. The authors leave out the
    scene vilnius, of which they found files damaged; here what is damaged is left out file by file, and `check` counts it.

    Raises (in `setup`):
        ValueError: another split, or number of views. DataError: a scene that is not there, or nothing to load.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        scenes: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
        split: str = "seeded",
        length: int = SHORT,
        long_length: int = LONG,
        views: int = 1,
        image: ImageFormat = MAPILLARY_IMAGE,
        crop_metres: float | None = None,
        noise: OdometryNoise = MAPILLARY_NOISE,
        batch_size: int | None = None,
        n_workers: int = 4,
        seed: int = 0,
    ) -> None:
        if split not in ("seeded", "file"):
            raise ValueError(f"split: expected 'seeded' or 'file', got {split!r}")
        if views not in (1, len(mapillary.DIRECTIONS)):
            raise ValueError(f"views: expected 1 or {len(mapillary.DIRECTIONS)}, got {views!r}")
        if isinstance(scenes, Mapping) and set(scenes) - {"train", "val", "test"}:
            raise ValueError(f"scenes: expected the keys train, val, test, got {', '.join(map(str, scenes))}")
        parts = scenes.values() if isinstance(scenes, Mapping) else [scenes or ()]
        if text := next((part for part in parts if isinstance(part, str)), None):
            raise ValueError(f"scenes: expected a sequence of names, got the text {text!r}; for one scene [{text!r}]")
        names = [name for part in parts for name in part]
        if len(set(names)) < len(names):
            raise ValueError(f"scenes: expected every scene once, got {', '.join(names)}")
        super().__init__(
            root,
            length=length,
            image=image,
            crop_metres=crop_metres,
            noise=noise,
            batch_size=batch_size,
            n_workers=n_workers,
            seed=seed,
        )
        self.wanted, self.split, self.long_length, self.views = scenes, split, long_length, views

    def read(self) -> tuple[list[Scene], Splits]:
        """Read the scenes, and say which of their sequences are for what."""
        if isinstance(self.wanted, Mapping):
            scenes = self._scenes([name for names in self.wanted.values() for name in names])
            parts = {part: [scenes[n] for n in self.wanted.get(part, ()) if n in scenes] for part in Splits._fields}
            return list(scenes.values()), Splits(*map(self._runs, parts.values()))
        found = list(self._scenes(self.wanted).values())
        if self.split == "seeded":
            seen = self._seen(found)
            if self.length >= self.long_length:
                return found, split_long(seen, self.seed, self.length)
            return found, split_short(seen, self.seed, self.length, self.long_length)
        ids = mapillary.read_splits(self.root, [scene.name for scene in found])
        of = {part: [mapillary.in_split(s, ids[part].get(s.name, set())) for s in found] for part in ids}
        return found, Splits(self._runs(of["train"]), self._runs(of["val"]), self._runs(of["val"]))

    def asked_for(self) -> Sequence[str]:
        """Which of train, val and test should have sequences."""
        return [part for part, of in self.wanted.items() if of] if isinstance(self.wanted, Mapping) else super().asked_for()

    def _runs(self, scenes: Sequence[Scene]) -> list[Run]:
        return [run for scene in self._seen(scenes) for run in runs(scene, self.length)]

    def _seen(self, scenes: Sequence[Scene]) -> list[Scene]:
        """With frames of as many views as are wanted."""
        return [mapillary.join_views(scene) for scene in scenes] if self.views > 1 else list(scenes)

    def _scenes(self, names: Sequence[str] | None) -> dict[str, Scene]:
        """The scenes of these names that can be used."""
        folders = {path.name: path for path in mapillary.find_scenes(self.root)}
        if not folders:
            raise DataError(f"{self.root}: expected scenes, folders with a dump.json, found none")
        if names is not None and set(names) - set(folders):
            missing = ", ".join(sorted(set(names) - set(folders)))
            raise DataError(f"{self.root}: no scene {missing}; there are {', '.join(folders)}")
        usable = {}
        for name in folders if names is None else names:
            try:
                scene = mapillary.read_scene(folders[name])
            except DataError as error:
                logging.getLogger("mdps").warning("scene not used: %s", error)
                continue
            if scene.is_usable:
                usable[name] = scene
            else:
                wanting = "usable frames" if scene.map is not None else "a map"
                logging.getLogger("mdps").warning("scene not used: %s: without %s (`check` says why)", folders[name], wanting)
        return usable


class KittiDataModule(SequenceDataModule):
    """Sequences of KITTI: train_files.txt, test1_files.txt for validation and test2_files.txt for test, those that are there.

    The arguments are those of `SequenceDataModule`.

    Raises (in `setup`):
        DataError: no map, no split file, or nothing to load.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        length: int = SHORT,
        image: ImageFormat = KITTI_IMAGE,
        crop_metres: float | None = None,
        noise: OdometryNoise = KITTI_NOISE,
        batch_size: int | None = None,
        n_workers: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__(
            root,
            length=length,
            image=image,
            crop_metres=crop_metres,
            noise=noise,
            batch_size=batch_size,
            n_workers=n_workers,
            seed=seed,
        )

    def read(self) -> tuple[list[Scene], Splits]:
        """Read the drives of each list; the scenes have one map."""
        paths = {part: self.root / name for part, name in kitti.SPLIT_FILES.items()}
        there = {part: path for part, path in paths.items() if path.exists()}
        if not there:
            raise DataError(f"{self.root}: expected {', '.join(kitti.SPLIT_FILES.values())}, found none of them")
        scenes: dict[str, Scene] = {}
        raster = None
        for part, path in there.items():
            scene = kitti.read_drives(self.root, path, raster=raster)
            if scene.map is None:
                raise DataError(next(example for reason, example in scene.problems.examples.items() if "map" in reason))
            raster, scenes[part] = scene.map, scene
        splits = Splits(**{part: runs(scenes[part], self.length) if part in scenes else [] for part in paths})
        return list(scenes.values()), splits
