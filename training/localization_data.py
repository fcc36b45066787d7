"""The data of the localization experiment: which scenes and sequences are for what, in batches, and what a run has seen.

MGL's scenes, or made ones, are each for one purpose where some are named, else their sequences are dealt by the seed and the
length of long ones, and by how many views a step has. KITTI's lists say it.
"""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import staged
from configuration import ConfigurationError
from localization_base import odometry_noise
from torch.utils.data import DataLoader, Subset

from mdps.datasets import ImageFormat, KittiDataModule, MapillaryDataModule, fingerprint
from mdps.datasets.loading import start_worker
from mdps.localization import FULL, SMALL, to_batch, turned

DEALING = ("validation_scenes", "test_scenes", "seed", "long_length", "views")
"""Options that say, beside the data, which sequences are for what."""


class Data(L.LightningDataModule):
    """The data set with sequences of this length, in batches.

    Args:
        c: the run's configuration.
        test_alone: read no other scenes than those that are named for the test, where some are.

    Raises:
        ConfigurationError: options that do not fit the data. DataError: data that cannot be used.
    """

    def __init__(self, c: Any, length: int, test_alone: bool = False) -> None:
        super().__init__()
        self.c = c
        options: dict[str, Any] = {
            "length": length, "crop_metres": c.crop or None, "batch_size": c.batch_size, "n_workers": c.n_workers,
            "seed": c.seed, "noise": odometry_noise(c),
        }  # fmt: skip
        if c.networks == "small":
            options["image"] = ImageFormat(128, 128) if c.layout == "mgl" else ImageFormat(224, 80, 128.0)
        if c.views > 1 and (c.layout != "mgl" or c.method != "mdps"):
            raise ConfigurationError(f"views: expected 1 but for the method mdps and the layout mgl, got {c.views}")
        try:
            if c.layout == "kitti":
                self.source: MapillaryDataModule | KittiDataModule = KittiDataModule(c.data, **options)
            else:
                scenes = _scenes(c, test_alone)
                self.source = MapillaryDataModule(c.data, scenes=scenes, long_length=c.long_length, views=c.views, **options)
            self.source.setup()
        except ConfigurationError:
            raise
        except ValueError as error:  # the data's, or an option that does not fit them
            raise ConfigurationError(str(error)) from None
        stride, crop = (SMALL if c.networks == "small" else FULL).map_stride, self.source.crop_metres
        for scale in {raster.pixels_per_metre for raster in self.source.test.maps.values()}:
            if round(crop * scale) % stride:
                raise ConfigurationError(f"crop: expected a multiple of {stride / scale:g} m for these networks, got {crop:g}")
        if c.n_training:
            train = self.source.train
            train.sequences = [train.sequences[i] for i in staged.spread(len(train), c.n_training)]

    def check(self, *parts: str) -> None:
        """Raise ConfigurationError where train, val or test has no sequence."""
        for part in parts:
            if not len(getattr(self.source, part)):
                raise ConfigurationError(
                    f"data: expected {self.c.data} to have sequences of {self.source.length} images for {part}, found none"
                )

    def sizes(self) -> str:
        """How many sequences there are for what."""
        c, source = self.c, self.source
        numbers = {
            "training": len(source.train),
            "validation": min(len(source.val), c.n_validation),
            "test": min(len(source.test), c.n_test),
        }
        return ", ".join(f"{n} {name}" for name, n in numbers.items())

    def train_dataloader(self):
        made = self.source.train_dataloader()
        if self.trainer is not None:  # Lightning says it later, when workers have already asked for the first items
            made.sampler.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)
        return made

    def val_dataloader(self):
        return self._loader(self.source.val, self.c.n_validation)

    def test_dataloader(self):
        return self._loader(self.source.test, self.c.n_test)

    def on_before_batch_transfer(self, batch, index):
        """A batch for each run; here there is one. In training it is turned by quarters and mirrored at random."""
        made = to_batch(batch)
        if self.trainer.training:
            random = zlib.crc32(batch["odometry"].numpy().tobytes())  # other noise in every epoch, the same in every run
            made = turned(made, random % 4, bool(random & 4))
        return [made]

    def _loader(self, data, n):
        options = {"batch_size": self.c.batch_size, "num_workers": self.c.n_workers, "worker_init_fn": start_worker}
        return DataLoader(Subset(data, staged.spread(len(data), n)), **options)


def refuse_seen(c: Any, before: Any, run: str) -> None:
    """Raise ConfigurationError where sequences of the test or validation may be those that an earlier run has learned from.

    Args:
        c: what is tested with. before: the configuration of the run, which is called `run` in the message.
    """
    if "kitti" in (c.layout, before.layout) or not _in_one_folder(c, before):
        return
    kept, wanted = ({name for names in _named(x).values() for name in names} for x in (before, c))
    if not kept and not wanted:
        for name in ("seed", "long_length", "views"):
            if getattr(c, name) != getattr(before, name):
                expected = f"{getattr(before, name)}, that of {run}, which has learned from what another deals to the test"
                raise ConfigurationError(f"{name}: expected {expected}; got {getattr(c, name)}")
    elif not wanted or wanted - kept:
        learned, of = ", ".join(sorted(wanted - kept)) or "none", ", ".join(sorted(kept)) or "other data"
        raise ConfigurationError(f"test_scenes: expected scenes that {run} has not learned from, of {of}; got {learned}")


def record(data: Sequence[Data], before: dict[str, Any]) -> dict[str, Any]:
    """What a run keeps of its data: their fingerprint, and digests of the scenes that it has learned from.

    before: the record of the run that it starts from, {} where there is none.
    """
    learned = _digests(data, "train").keys() | set(before.get("learned", ()))
    return {"fingerprint": data[0].source.fingerprint, "learned": sorted(learned)}


def refuse_other_data(folder: Path, kept: dict[str, Any]) -> None:
    """Raise ConfigurationError where the folder holds a run on data that were not these; `kept` is the record of these."""
    file = folder / "data.json"
    before = json.loads(file.read_text())["fingerprint"] if file.exists() else kept["fingerprint"]
    if before != kept["fingerprint"]:
        raise ConfigurationError(
            f"output: {folder} holds a run on data of the fingerprint {before}, which is {kept['fingerprint']} now; "
            "expected the same data, or another --output"
        )


def refuse_learned(data: Sequence[Data], parts: Sequence[str], before: Any, kept: dict[str, Any], run: str) -> None:
    """As `refuse_seen`, by what is in the data instead of where they lie; nothing is refused if the run has kept no record.

    Args:
        parts: what is asked about, of val and test. before, kept: the configuration and the record of the run.
    """
    c, now = data[0].c, data[0].source.fingerprint
    same, is_dealt = kept.get("fingerprint") == now, not any(_named(c).values())
    if not kept or (same and is_dealt and all(getattr(c, x) == getattr(before, x) for x in DEALING)):
        return
    if is_dealt and not same and _in_one_folder(c, before):
        expected = f"the data that {run} has learned from, of the fingerprint {kept['fingerprint']}"
        raise ConfigurationError(f"data: expected {expected}, as others may have its sequences in the test; got {now}")
    if seen := [name for digest, name in _digests(data, *parts).items() if digest in kept["learned"]]:
        got = ", ".join(sorted(seen))
        raise ConfigurationError(f"test_scenes: expected scenes that {run} has not learned from in any folder; got {got}")


def _digests(data: Sequence[Data], *parts: str) -> dict[str, str]:
    """Of MGL's scenes that have sequences for these parts, with their names, on which they do not depend."""
    if data[0].c.layout != "mgl":
        return {}
    names = {run.scene for d in data for part in parts for run in getattr(d.source.splits, part)}
    return {fingerprint([s._replace(name="")]): s.name for s in data[0].source.scenes if s.name in names}


def _in_one_folder(c: Any, other: Any) -> bool:
    return Path(c.data).resolve() == Path(other.data).resolve()


def _named(c: Any) -> dict[str, list[str]]:
    texts = {"val": c.validation_scenes, "test": c.test_scenes}
    return {part: [n.strip() for n in text.split(",") if n.strip()] for part, text in texts.items()}


def _scenes(c: Any, test_alone: bool) -> dict[str, list[str]] | None:
    named = _named(c)
    if test_alone:
        return {"test": named["test"]} if named["test"] else None
    if not any(named.values()):
        return None
    for part, option in (("val", "validation_scenes"), ("test", "test_scenes")):
        if not named[part]:
            raise ConfigurationError(f"{option}: expected names of scenes, as there are some for another purpose, got none")
    there = sorted(path.parent.name for path in Path(c.data).glob("*/dump.json"))
    taken = {name for names in named.values() for name in names}
    return {"train": [name for name in there if name not in taken], **named}
