"""Global localization on maps: train and evaluate the paper's methods (its section "City Scale Global Localization Task").

    python training/localization.py demo                                     # made cities, all methods, small networks
    python training/localization.py train --data data/MGL --method mdps      # the paper's setting
    python training/localization.py evaluate RUN                             # a finished run again
    python training/localization.py ablation RUN                             # with 50, 100, 250 and 500 particles
    python training/localization_figures.py FOLDER                           # figures and tables of results

A run folder holds configuration.yaml, versions.json, history.jsonl, checkpoints, results/*.json, panels, figures, a TensorBoard
log, and of a smoother localizer.pt, for `mdps.localization.Localizer.load`. The same command on a folder that holds an
unfinished run goes on with it.
"""

import argparse
import dataclasses
import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import configuration
import lightning as L
import localization_demo
import localization_dynamics as dynamics
import localization_figures as figures
import localization_panels as panels
import staged
import torch
from configuration import ConfigurationError, option
from localization_methods import METHODS, Localization, Smoother, odometry_noise, stages
from staged import mix
from torch.utils.data import DataLoader, Subset

from mdps import Mixture
from mdps.datasets import DataError, ImageFormat, KittiDataModule, MapillaryDataModule
from mdps.localization import SPACE, Localizer, errors, to_batch, turned


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Everything that a run depends on, beside the data."""

    data: str = option("data/MGL", "folder of the data set")
    layout: str = option("mgl", "of the data: mgl (also made cities) or kitti", ("mgl", "kitti"))
    validation_scenes: str = option("", "MGL: names of scenes for validation alone, with commas; none: sequences of all scenes")
    test_scenes: str = option("", "MGL: names of scenes for the test alone, with commas")
    method: str = option("mdps", "what is trained: a name of the table in localization_methods.py", tuple(METHODS))
    networks: str = option("full", "size of the encoders: full is the paper's", ("full", "small"))
    pretrained: bool = option(False, "start the image encoder with torchvision's weights of ImageNet")
    seed: int = option(0, "seed of splits, crops, odometry, first weights, order and particles", minimum=0)
    length: int = option(10, "steps of the sequences that the encoders learn from", minimum=2)
    long_length: int = option(100, "steps of the sequences of later stages and of the test", minimum=2)
    crop: float = option(0.0, "side of the map in metres; 0: 400 for sequences of up to 10 steps, else 1228", minimum=0.0)
    odometry_metres: float = option(
        -1.0, "largest error of a position that odometry is made from, metres; -1: 5 for MGL, 1 for KITTI", minimum=-1.0
    )
    odometry_degrees: float = option(
        -1.0, "largest error of a turn of odometry, degrees; -1: 15 for MGL, 10 for KITTI", minimum=-1.0
    )
    n_training: int = option(0, "training sequences at most; 0: all", minimum=0)
    n_validation: int = option(200, "validation sequences at most", minimum=1)
    n_test: int = option(1000, "test sequences at most", minimum=1)
    n_particles: int = option(250, "particles of a filter; the smoother has twice as many", minimum=1)
    n_first: int = option(1000, "particles of the forward filter's first step", minimum=1)
    n_last: int = option(1500, "particles of the backward filter's first step, which is the last", minimum=1)
    first_metres: float = option(50.0, "standard deviation of the starts around the truth, metres", minimum=0.0)
    first_offset: float = option(
        48.0,
        "largest error of the middle of the forward start, east and north, metres; 0: the paper, 48: its program",
        minimum=0.0,
    )
    first_concentration: float = option(100.0, "concentration kappa of the forward start's heading", minimum=0.0)
    backward_start: str = option(
        "uniform", "of the backward filter: uniform over the map (the paper), true state (its program)", ("uniform", "true")
    )
    batch_size: int = option(3, "sequences of a training step", minimum=1)
    start: str = option("", "run folder whose weights to start from, such as one of MGL for KITTI")
    view_epochs: int = option(0, "epochs of a stage in which encoders learn from single images; 0: the paper", minimum=0)
    n_others: int = option(400, "poses that the true one is compared with in that stage", minimum=4)
    n_rotations: int = option(64, "headings of dense search in training", minimum=2)
    n_test_rotations: int = option(256, "headings of dense search and retrieval in the test", minimum=2)
    training_window: float = option(128.0, "side of the map that dense search and retrieval learn from, metres", minimum=1.0)
    window: float = option(256.0, "side of the map that they search in the test, metres", minimum=1.0)
    chunk: int = option(0, "images that are encoded at once; 0: all", minimum=0)
    max_epochs: int = option(200, "epochs of a stage at most", minimum=1)
    first_stage_epochs: int = option(0, "epochs of the first stage at most; 0: max_epochs", minimum=0)
    min_epochs: int = option(0, "epochs of a stage before it may stop early", minimum=0)
    patience: int = option(40, "epochs without a better validation loss that end a stage", minimum=1)
    rate_factor: float = option(1.0, "multiplies the learning rates of all stages", minimum=0.0)
    gradient_clip: float = option(300.0, "largest norm of a gradient; 0: any", minimum=0.0)
    plateau_factor: float = option(0.1, "what a rate is multiplied by on a plateau", minimum=0.0)
    plateau_patience: int = option(20, "epochs without progress that make a plateau", minimum=0)
    plateau_cooldown: int = option(0, "epochs after a fall of the rate that do not count", minimum=0)
    plateau_threshold: float = option(1e-4, "relative progress that counts", minimum=0.0)
    n_workers: int = option(4, "processes that load data", minimum=0)
    accelerator: str = option("auto", "where to run", ("auto", "cpu", "gpu"))
    threads: int = option(1, "CPU threads", minimum=1)


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "demo": {
        "networks": "small", "long_length": 10, "crop": 160.0, "n_validation": 24, "n_test": 40, "batch_size": 2,
        "view_epochs": 6, "n_rotations": 16, "max_epochs": 1, "n_test_rotations": 64,
        "training_window": 64.0, "window": 128.0, "first_metres": 25.0, "first_offset": 25.0, "odometry_metres": 1.0,
        "odometry_degrees": 10.0, "n_workers": 0,
    },
}  # fmt: skip


STEPS = ((0.0, 0.0), (5.0, 0.0), (10.0, 0.0), (5.0, 45.0))
"""Metres ahead and degrees to the left, of the figure of the learned dynamics."""


class Data(L.LightningDataModule):
    """The data set with sequences of this length, in batches."""

    def __init__(self, c: Configuration, length: int) -> None:
        super().__init__()
        self.c = c
        options: dict[str, Any] = {
            "length": length, "crop_metres": c.crop or None, "batch_size": c.batch_size, "n_workers": c.n_workers,
            "seed": c.seed, "noise": odometry_noise(c),
        }  # fmt: skip
        if c.networks == "small":
            options["image"] = ImageFormat(128, 128) if c.layout == "mgl" else ImageFormat(224, 80, 128.0)
        try:
            if c.layout == "kitti":
                self.source: MapillaryDataModule | KittiDataModule = KittiDataModule(c.data, **options)
            else:
                self.source = MapillaryDataModule(c.data, scenes=_scenes(c), **options)
            self.source.setup()
        except ValueError as error:  # the data's, or an option that does not fit them
            raise ConfigurationError(str(error)) from None
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

    def train_dataloader(self):
        return self.source.train_dataloader()

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
        return DataLoader(Subset(data, staged.spread(len(data), n)), batch_size=self.c.batch_size, num_workers=self.c.n_workers)


def _scenes(c: Configuration) -> dict[str, list[str]] | None:
    named = {part: [n.strip() for n in text.split(",") if n.strip()] for part, text in
             (("val", c.validation_scenes), ("test", c.test_scenes))}  # fmt: skip
    if not any(named.values()):
        return None
    there = sorted(path.parent.name for path in Path(c.data).glob("*/dump.json"))
    taken = {name for names in named.values() for name in names}
    return {"train": [name for name in there if name not in taken], **named}


def build(c: Configuration) -> Localization:
    """A model with the first weights of the configuration's seed; torch's generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(c.seed, 5) % 2**63)
        return METHODS[c.method].build(c)


def schedule(c: Configuration) -> staged.Schedule:
    """How long stages last and how their rates fall."""
    return staged.Schedule(**{f.name: getattr(c, f.name) for f in dataclasses.fields(staged.Schedule)})


@torch.no_grad()
def evaluate(model: Localization, data: Data, seed: int) -> dict[str, errors.Estimates]:
    """What the model says of the test sequences, by the name of each of its beliefs."""
    model.eval()
    found: dict[str, list[errors.Estimates]] = {}
    for i, items in enumerate(data.test_dataloader()):
        for name, estimates in model.estimates(to_batch(items), mix(seed, 6, i)).items():
            found.setdefault(name, []).append(estimates)
    return {name: errors.join(parts) for name, parts in found.items()}


def run_training(c: Configuration, folder: Path, command: str) -> list[figures.Result]:
    """Train in a folder, or go on there; then evaluate on the test sequences."""
    started = time.monotonic()
    torch.set_num_threads(c.threads)
    configuration.refuse_another(c, folder)
    short, long = Data(c, c.length), Data(c, c.long_length)
    short.check("train", "val")
    long.check("train", "val", "test")
    model, each = build(c), stages(c)
    if c.start:
        model.load_state_dict(_weights_to_start_from(c))
    folder.mkdir(parents=True, exist_ok=True)
    configuration.write_yaml(folder / "configuration.yaml", c)
    (folder / "versions.json").write_text(json.dumps(staged.versions(), indent=2))
    n_parameters = sum(p.numel() for p in model.parameters())
    sizes = ", ".join(f"{len(part)} {name}" for part, name in zip(long.source.splits, ("training", "validation", "test")))
    print(f"{c.method}: {n_parameters} parameters; sequences of {c.long_length}: {sizes}; run folder: {folder}")
    data = [short if "encoders" in stage.rates else long for stage in each]
    with staged.quiet():
        staged.train([model], data, each, schedule(c), [folder], [c.seed], c.accelerator)
    torch.save({"configuration": dataclasses.asdict(c), "state_dict": model.state_dict()}, folder / "model.pt")
    if isinstance(model, Smoother):
        Localizer(model.model, long.source.image).save(folder / "localizer.pt")
    seconds = sum(json.loads(p.read_text())["seconds"] for p in sorted(folder.glob("stage_*/finished.json")))
    cost = figures.Training(seconds / 3600, _tell_stages(folder), staged.versions()["machine"], n_parameters)
    results = _finish(model, long, folder, folder / "results", command, cost)
    print(f"Done in {staged.duration(time.monotonic() - started)}; figures: {folder / 'figures'}")
    return results


def run_evaluation(folder: Path, changes: dict[str, Any], command: str) -> list[figures.Result]:
    """Evaluate a finished run on its test sequences again, perhaps with other data or particles, into a folder of its own."""
    saved = _checkpoint(folder)
    c = configuration.make(Configuration, saved["configuration"], changes)
    torch.set_num_threads(c.threads)
    model = build(c)
    model.load_state_dict(saved["state_dict"])
    data = Data(c, c.long_length)
    data.check("test")
    name = "_".join(f"{k}_{Path(str(v)).name}" for k, v in sorted(changes.items())) or "again"
    return _finish(model, data, folder, folder / "evaluations" / name, command, None)


def _checkpoint(folder: Path) -> dict[str, Any]:
    path = folder / "model.pt"
    if not path.is_file():
        raise ConfigurationError(f"run: expected the folder of a finished run, got {folder}, which has no model.pt")
    return torch.load(path, map_location="cpu", weights_only=True)


def _tell_stages(folder: Path) -> int:
    """Print how long each stage took and its memory; return the most of these, in MB."""
    done = [json.loads(path.read_text()) for path in sorted(folder.glob("stage_*/finished.json"))]
    for stage in done:
        gpu = f", {stage['gpu_memory_mb']} MB on the GPU" if "gpu_memory_mb" in stage else ""
        print(f"{stage['name']}: {stage['epochs']} epochs, {staged.duration(stage['seconds'])}, {stage['memory_mb']} MB{gpu}")
    return max(stage["memory_mb"] for stage in done)


def _weights_to_start_from(c: Configuration) -> dict[str, torch.Tensor]:
    saved = _checkpoint(Path(c.start))
    for name in ("method", "networks"):
        if saved["configuration"][name] != getattr(c, name):
            raise ConfigurationError(
                f"start: expected a run with {name} {getattr(c, name)}, got {c.start} with {saved['configuration'][name]}"
            )
    return saved["state_dict"]


def run_ablation(folder: Path, numbers: list[int], command: str) -> None:
    """The smoother of a finished run with other numbers of particles: a result for each, and their recall curves."""
    saved, place = _checkpoint(folder), folder / "ablation"
    if saved["configuration"]["method"] != "mdps":
        raise ConfigurationError(f"run: expected one of the method mdps, got {saved['configuration']['method']}")
    for n in numbers:
        c = configuration.make(Configuration, saved["configuration"], {"n_particles": n})
        torch.set_num_threads(c.threads)
        model, data = build(c), Data(c, c.long_length)
        model.load_state_dict(saved["state_dict"])
        summary = errors.summarize(evaluate(model, data, c.seed)["smoothed"])
        about = {"path": c.data, "fingerprint": data.source.fingerprint} | model.starts(data.source.test.has_shifts)
        title, method = model.titles()["smoothed"]
        figures.save_result(
            figures.Result(title, method, c.seed, command, staged.versions(), about, summary, particles=n), place
        )
        position = summary["top_1"]["position"]
        print(
            f"{n:5d} particles: recall at 5 m {100 * position['recall'][-1]:.1f} %, median {position['median']:.2f} m",
            flush=True,
        )
    figures.save_figures({"particles": figures.ablation(figures.load_results(place))}, place)
    print(f"Figure: {place / 'particles.png'}")


def _finish(
    model: Localization, data: Data, folder: Path, place: Path, command: str, cost: figures.Training | None
) -> list[figures.Result]:
    """Evaluate, write the results into `place`, draw and print them."""
    c = model.c
    found = evaluate(model, data, c.seed)
    about = {"versions": staged.versions(), "data": {"path": c.data, "fingerprint": data.source.fingerprint}}
    about["data"] |= model.starts(data.source.test.has_shifts)
    summaries = {name: errors.summarize(estimates) for name, estimates in found.items()}
    any_ = next(iter(found.values()))
    chance = errors.guesses(any_.truth, data.source.crop_metres, any_.counted, torch.Generator().manual_seed(0))
    titles = model.titles() | {"chance": ("chance", "chance")}
    results = []
    for name, summary in (summaries | {"chance": errors.summarize(chance)}).items():
        title, method = titles[name]
        learned = cost if name != "chance" else None
        results.append(figures.Result(title, method, c.seed, command, **about, summary=summary, training=learned))
        figures.save_result(results[-1], place)
    print("\n" + figures.recall_table(results, markdown=False) + "\n")
    figures.draw(figures.load_results(place), place.parent / "figures" if place.name == "results" else place)
    if isinstance(model, Smoother):
        _draw_trajectories(model, data, place.parent / "panels" if place.name == "results" else place)
    return results


@torch.no_grad()
def _draw_trajectories(model: Smoother, data: Data, folder: Path, n: int = 3) -> None:
    """Panels and films of some test sequences, and the learned dynamics, with the files that they are drawn from."""
    folder.mkdir(exist_ok=True)
    test = data.source.test
    for i in staged.spread(len(test), min(n, len(test))):
        batch = to_batch(test[i])
        beliefs = {k: Mixture(b.means[0], b.log_weights[0], b.bandwidths, SPACE) for k, b in model.beliefs(batch, i).items()}
        T = len(batch.poses[0])
        sequence = batch.classes[0], batch.pixels_per_metre, batch.poses[0], batch.images[0], beliefs
        panel = panels.make_panel(test[i]["name"], *sequence, panels.evenly(T, 5), batch.observed[0])
        panels.save_panel(panel, folder / f"sequence_{i:03d}.npz")
        figures.save_figures({f"sequence_{i:03d}": panels.draw_panel(panel)}, folder)
        film = panels.make_panel(test[i]["name"], *sequence, range(T), batch.observed[0])
        panels.draw_film(film, folder / f"sequence_{i:03d}.mp4")
    move = model.model.smoother.forward_filter.dynamics
    spread = dynamics.spread(move, move.noise_size, STEPS, data.source.noise, torch.Generator().manual_seed(0))
    dynamics.save_dynamics(spread, folder / "dynamics.npz")
    figures.save_figures({"dynamics": dynamics.draw_dynamics(spread)}, folder)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="localization.py", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train one method and evaluate it")
    train.add_argument("--preset", choices=tuple(PRESETS), default="paper", help="where the defaults come from [paper]")
    train.add_argument("--config", type=Path, metavar="FILE", help="YAML file with `option: value` lines; flags override it")
    train.add_argument("--output", type=Path, metavar="FOLDER", help="run folder [runs/localization_METHOD_seed_SEED]")
    configuration.add_flags(train, Configuration)
    demo = commands.add_parser("demo", help="made cities, every method trained for minutes, all tried on an unseen city")
    demo.add_argument(
        "--output", type=Path, metavar="FOLDER", default=Path("runs/localization_demo"), help="[runs/localization_demo]"
    )
    ablation = commands.add_parser("ablation", help="the smoother of a finished run with other numbers of particles")
    ablation.add_argument("run", type=Path, help="run folder")
    ablation.add_argument(
        "--n-particles", type=_positive, nargs="+", default=[50, 100, 250, 500], metavar="INT", help="[50 100 250 500]"
    )
    evaluation = commands.add_parser("evaluate", help="evaluate a finished run again")
    evaluation.add_argument("run", type=Path, help="run folder")
    configuration.add_flags(evaluation, Configuration, without=_TRAINING)
    return parser


_TRAINING = tuple(
    f.name
    for f in dataclasses.fields(Configuration)
    if f.name not in ("data", "test_scenes", "seed", "n_test", "n_particles", "n_first", "n_last", "window", "n_test_rotations")
)
"""What an evaluation cannot change."""


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    given = vars(_parser().parse_args(arguments))
    name = given.pop("command")
    command = "python training/localization.py " + " ".join(arguments if arguments is not None else sys.argv[1:])
    try:
        if name == "demo":
            return localization_demo.main(given["output"])
        if name == "ablation":
            run_ablation(given["run"], given["n_particles"], command)
        elif name == "evaluate":
            run_evaluation(given.pop("run"), given, command)
        else:
            file, preset, output = given.pop("config"), PRESETS[given.pop("preset")], given.pop("output")
            c = configuration.make(Configuration, preset, configuration.read_yaml(file) if file else {}, given)
            run_training(c, output or Path("runs") / f"localization_{c.method}_seed_{c.seed}", command)
    except (ConfigurationError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on from the last whole epoch.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
