"""Global localization on maps: train and evaluate the paper's methods (its section "City Scale Global Localization Task").

    python training/localization.py demo                                     # made cities, all methods, small networks
    python training/localization.py train --data data/MGL --method mdps      # the paper's networks
    python training/localization.py evaluate RUN                             # a finished run again
    python training/localization.py ablation RUN                             # with 50, 100, 250 and 500 particles
    python training/localization_figures.py FOLDER                           # figures and tables of results

A run folder holds configuration.yaml, versions.json, data.json, history.jsonl, checkpoints, results/*.json, panels, figures, a
TensorBoard log, and of a smoother localizer.pt, for `mdps.localization.Localizer.load`. The same command on a folder that holds
an unfinished run goes on with it.
"""

import argparse
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import configuration
import localization_demo
import localization_dynamics as dynamics
import localization_figures as figures
import localization_panels as panels
import staged
import torch
from configuration import ConfigurationError, option
from files import whole, write_whole
from localization_base import Belief, Localization
from localization_data import Data, record, refuse_learned, refuse_other_data, refuse_seen
from localization_methods import METHODS, SmootherExperiment, stages, start_from_encoders
from staged import mix

from mdps import Mixture
from mdps.datasets import DataError
from mdps.localization import SPACE, Localizer, errors, to_batch


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Everything that a run depends on, beside the data."""

    data: str = option("data/MGL", "folder of the data set")
    layout: str = option("mgl", "of the data: mgl (also made cities) or kitti", ("mgl", "kitti"))
    validation_scenes: str = option(
        "", "MGL: names of scenes for validation alone, with commas; training needs some where test_scenes has; none in both: "
        "sequences of all scenes are dealt",
    )  # fmt: skip
    test_scenes: str = option("", "MGL: names of scenes for the test alone, with commas")
    method: str = option("mdps", "what is trained: a name of the table in localization_methods.py", tuple(METHODS))
    networks: str = option("full", "size of the encoders: full is the paper's", ("full", "small"))
    pretrained: bool = option(False, "start the image encoder with torchvision's weights of ImageNet")
    seed: int = option(0, "seed of splits, crops, odometry, first weights, order and particles", minimum=0)
    views: int = option(1, "images of a step; 4: MGL's panoramas, whose directions' scores add up (method mdps)", (1, 4))
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
    n_last: int = option(1500, "particles of the backward filter's first step, which is the last; the paper: 1000", minimum=1)
    first_metres: float = option(50.0, "standard deviation of the starts around the truth, metres", minimum=0.0)
    first_offset: float = option(
        48.0,
        "largest error of the middle of the forward start, east and north, metres; 0: the paper, 48: its program",
        minimum=0.0,
    )
    first_concentration: float = option(100.0, "concentration kappa of the forward start's heading", minimum=0.0)
    backward_start: str = option(
        "uniform", "of the backward filter: uniform over the map, or around the true state (the paper)", ("uniform", "true")
    )
    batch_size: int = option(3, "sequences of a training step", minimum=1)
    start: str = option("", "run folder whose weights to start from: of MGL for KITTI, or of encoders for what sees by them")
    view_epochs: int = option(0, "epochs of a stage in which encoders learn from single images; 0: the paper", minimum=0)
    n_others: int = option(400, "poses that the true one is compared with in that stage", minimum=4)
    n_rotations: int = option(64, "headings of dense search in training, an even number", minimum=2, even=True)
    n_test_rotations: int = option(
        256, "headings of dense search and retrieval in the test, an even number", minimum=2, even=True
    )
    training_window: float = option(128.0, "side of the map that dense search and retrieval learn from, metres", minimum=1.0)
    window: float = option(256.0, "side of the map that they search in the test, metres", minimum=1.0)
    chunk: int = option(0, "images that are encoded at once; 0: all", minimum=0)
    max_epochs: int = option(200, "epochs of a stage at most", minimum=1)
    first_stage_epochs: int = option(
        0, "epochs at most of the first stage, or of the second where view_epochs is set; 0: max_epochs", minimum=0
    )
    min_epochs: int = option(0, "epochs of a stage before it may stop early", minimum=0)
    patience: int = option(40, "epochs without a better validation loss that end a stage", minimum=1)
    rate_factor: float = option(1.0, "multiplies the learning rates of all stages", minimum=0.0)
    final_rate: float = option(
        1.0, "what a stage's rates are multiplied by in the end, falling with every batch; 1: falling on plateaus", minimum=0.0
    )
    gradient_clip: float = option(300.0, "largest norm of a gradient; 0: any", minimum=0.0)
    plateau_factor: float = option(0.1, "what a rate is multiplied by on a plateau", minimum=0.0, below=1.0)
    plateau_patience: int = option(20, "epochs without progress that make a plateau", minimum=0)
    plateau_cooldown: int = option(0, "epochs after a fall of the rate that do not count", minimum=0)
    plateau_threshold: float = option(1e-4, "relative progress that counts", minimum=0.0)
    n_workers: int = option(4, "processes that load data", minimum=0)
    accelerator: str = option("auto", "where to run", ("auto", "cpu", "gpu"))
    threads: int = option(1, "CPU threads", minimum=1)


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "demo": {
        "networks": "small", "long_length": 10, "crop": 160.0, "n_validation": 24, "batch_size": 2,
        "view_epochs": 4, "n_rotations": 16, "max_epochs": 1, "final_rate": 0.2, "n_test_rotations": 64,
        "training_window": 64.0, "window": 64.0, "first_metres": 25.0, "first_offset": 25.0, "odometry_metres": 1.0,
        "odometry_degrees": 10.0, "n_workers": 0,
    },
}  # fmt: skip


STEPS = ((0.0, 0.0), (5.0, 0.0), (10.0, 0.0), (5.0, 45.0))
"""Metres ahead and degrees to the left, of the figure of the learned dynamics."""
CHANCE = Belief("chance", "chance", (), is_trained=False)


def build(c: Configuration) -> Localization:
    """A model with the first weights of the configuration's seed; torch's generator stays as it was.

    Raises:
        ConfigurationError: options that do not fit one another, or a library or weights that are not there.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(mix(c.seed, 5) % 2**63)
        try:
            return METHODS[c.method].build(c)
        except (ValueError, ImportError, RuntimeError) as error:
            raise ConfigurationError(" ".join(str(error).split())) from None


def schedule(c: Configuration) -> staged.Schedule:
    """How long stages last and how their rates fall."""
    return staged.Schedule(**{f.name: getattr(c, f.name) for f in dataclasses.fields(staged.Schedule)})


@torch.no_grad()
def evaluate(model: Localization, data: Data, seed: int, names: Sequence[str] | None = None) -> dict[str, errors.Estimates]:
    """What the model says of the test sequences, by the name of each of its beliefs, or of those that are named.

    It computes where the configuration says, and stays there; the estimates are on the CPU.
    """
    place = staged.device(model.c.accelerator)
    model.to(place).eval()
    found: dict[str, list[errors.Estimates]] = {}
    for i, items in enumerate(data.test_dataloader()):
        for name, estimates in model.estimates(to_batch(items).to(place), mix(seed, 6, i), names).items():
            found.setdefault(name, []).append(estimates.cpu())
    return {name: errors.join(parts) for name, parts in found.items()}


def run_training(c: Configuration, folder: Path, command: str, devices: int = 1) -> list[figures.Result]:
    """Train in a folder, or go on there; then evaluate on the test sequences.

    On several devices this runs in a process for each; number 0 alone evaluates, and the others return nothing.
    """
    started, first = time.monotonic(), staged.rank() == 0
    torch.set_num_threads(c.threads)
    place = staged.check_machine(c.accelerator, devices)
    if first:
        configuration.refuse_another(c, folder)
    if c.length > c.long_length:
        raise ConfigurationError(f"length: expected at most long_length, {c.long_length}, got {c.length}")
    model, each = build(c), stages(c)
    seconds_before, before, start = _start_from(model, c) if c.start else (0.0, c, {})
    short, long = _data(c, model, each)
    refuse_learned((short, long), ("val", "test"), before, start, c.start)
    n_parameters = sum(p.numel() for p in model.parameters())
    if first:
        kept = record((short, long), start)
        refuse_other_data(folder, kept)
        folder.mkdir(parents=True, exist_ok=True)
        configuration.write_yaml(folder / "configuration.yaml", c)
        staged.keep_versions(folder)
        write_whole(folder / "data.json", json.dumps(kept, indent=2))
        sizes = f"sequences of {long.source.length}: {long.sizes()}"
        print(f"{c.method}: {n_parameters} parameters; {sizes}; run folder: {folder}")
    data = [short if "encoders" in stage.rates else long for stage in each]
    with staged.quiet():
        staged.train([model], data, each, schedule(c), [folder], [c.seed], c.accelerator, devices)
    if not first:
        return []
    with whole(folder / "model.pt") as unfinished:
        torch.save({"configuration": dataclasses.asdict(c), "state_dict": model.state_dict(), "data": kept}, unfinished)
    if isinstance(model, SmootherExperiment):
        Localizer(model.model, long.source.image).save(folder / "localizer.pt")
    memory = _tell_stages(folder)
    if not model.outputs:
        return []
    hours, hardware = (seconds_before + _seconds(folder)) / 3600, staged.hardware(place, devices, c.threads)
    cost = figures.Training(hours, memory, hardware, n_parameters)
    results = _finish(model, long, folder / "results", command, c.seed, cost)
    print(f"Done in {staged.duration(time.monotonic() - started)}; figures: {folder / 'figures'}")
    return results


def _data(c: Configuration, model: Localization, each: Sequence[staged.Stage]) -> tuple[Data, Data]:
    """Short and long sequences, for stages in which the encoders learn, and for others and the test; one object where they are
    the same, or no long ones are wanted."""
    short = Data(c, c.length)
    short.check("train", "val")
    learns_from_long = any("encoders" not in stage.rates for stage in each)
    wanted = ("train", "val") * learns_from_long + ("test",) * bool(model.outputs)
    long = Data(c, c.long_length) if wanted and c.length != c.long_length else short
    long.check(*wanted)
    return short, long


def run_evaluation(folder: Path, changes: dict[str, Any], command: str, seed: int | None = None) -> list[figures.Result]:
    """Evaluate a finished run on its test sequences again, into a folder of its own.

    Args:
        changes: of the configuration, such as other data or numbers of particles.
        seed: of the particles; None: the run's. Which sequences are for the test is up to the run's own seed.
    """
    staged.check_seed(0 if seed is None else seed)
    model, data = _load(folder, changes)
    told = {k: v for k, v in changes.items() if k not in MACHINE} | ({} if seed is None else {"seed": seed})
    if "data" in told:  # folders of one name may hold different data
        told["data"] = f"{Path(told['data']).name}_{data.source.fingerprint[:8]}"
    name = "_".join(f"{k}_{v}" for k, v in sorted(told.items())) or "again"
    return _finish(model, data, folder / "evaluations" / name, command, model.c.seed if seed is None else seed, None)


def _load(folder: Path, changes: dict[str, Any]) -> tuple[Localization, Data]:
    """The model of a finished run and its test sequences."""
    saved = _checkpoint(folder)
    before, c = (configuration.make(Configuration, saved["configuration"], more) for more in ({}, changes))
    if not METHODS[c.method].build.outputs:
        raise ConfigurationError(f"run: expected one of a method that has estimates, got {folder} of the method {c.method}")
    torch.set_num_threads(c.threads)
    staged.device(c.accelerator)
    refuse_seen(dataclasses.replace(c, validation_scenes=""), before, str(folder))
    model = build(dataclasses.replace(c, pretrained=False))  # its weights are those of the run
    staged.give_weights(model, saved["state_dict"], folder / "model.pt")
    data = Data(c, c.long_length, test_alone=True)
    data.check("test")
    refuse_learned([data], ["test"], before, saved["data"], str(folder))
    return model, data


def _checkpoint(folder: Path) -> dict[str, Any]:
    """The configuration of a finished run, its weights, and its data's record, which older runs have not kept."""
    path = folder / "model.pt"
    if not path.is_file():
        raise ConfigurationError(f"run: expected the folder of a finished run, got {folder}, which has no model.pt")
    return {"data": {}} | staged.load_model(path)


def _seconds(folder: Path) -> float:
    """How long the stages of a run took."""
    return sum(stage["seconds"] for stage in staged.finished_stages(folder))


def _tell_stages(folder: Path) -> int:
    """Print how long each stage took and its memory; return the most of these in MB, of a GPU where one was used."""
    done = staged.finished_stages(folder)
    for stage in done:
        gpu = f", {stage['gpu_memory_mb']} MB on the GPU" if "gpu_memory_mb" in stage else ""
        print(f"{stage['name']}: {stage['epochs']} epochs, {staged.duration(stage['seconds'])}, {stage['memory_mb']} MB{gpu}")
    return max(stage.get("gpu_memory_mb", stage["memory_mb"]) for stage in done)


def _start_from(model: Localization, c: Configuration) -> tuple[float, Configuration, dict[str, Any]]:
    """Give a model the weights of the run that it starts from.

    Returns for how long encoders were trained there, its configuration and its data's record.
    """
    try:
        saved = _checkpoint(Path(c.start))
        before = configuration.make(Configuration, saved["configuration"])
    except ConfigurationError as error:
        raise ConfigurationError(f"start: {str(error).removeprefix('run: ')}") from None
    of_encoders = before.method == "encoders" != c.method and METHODS[c.method].learns_from_views
    for name in ("networks",) if of_encoders else ("method", "networks"):
        if getattr(before, name) != getattr(c, name):
            expected, got = f"a run with {name} {getattr(c, name)}", f"{c.start} with {getattr(before, name)}"
            raise ConfigurationError(f"start: expected {expected}, got {got}")
    refuse_seen(c, before, c.start)
    try:
        if of_encoders:
            start_from_encoders(model, saved["state_dict"])
        else:
            model.load_state_dict(saved["state_dict"])
    except (RuntimeError, KeyError, AttributeError) as error:
        what = f"expected weights of {'encoders' if of_encoders else c.method} with networks {c.networks}"
        raise ConfigurationError(f"start: {what} in {c.start}, got others: {' '.join(str(error).split())[:200]}") from None
    return _seconds(Path(c.start)) if of_encoders else 0.0, before, saved["data"]


def run_ablation(folder: Path, numbers: list[int], changes: dict[str, Any], command: str) -> None:
    """The smoother of a finished run with other numbers of particles: a result for each, and their recall curves."""
    method, place = _checkpoint(folder)["configuration"].get("method"), folder / "ablation"
    if method != "mdps":
        raise ConfigurationError(f"run: expected one of the method mdps, got {method}")
    for n in numbers:
        model, data = _load(folder, changes | {"n_particles": n})
        summary = errors.summarize(evaluate(model, data, model.c.seed, ("smoothed",))["smoothed"])
        title, method = model.outputs["smoothed"][:2]
        about = {"versions": staged.versions(), "data": _about(model, data, "smoothed")}
        figures.save_result(figures.Result(title, method, model.c.seed, command, **about, summary=summary, particles=n), place)
        position = summary["top_1"]["position"]
        print(
            f"{n:5d} particles: recall at 5 m {100 * position['recall'][-1]:.1f} %, median {position['median']:.2f} m",
            flush=True,
        )
    figures.save_figures({"particles": figures.ablation(_results(place))}, place)
    print(f"Figure: {place / 'particles.png'}")


def _results(place: Path) -> list[figures.Result]:
    """All results in a folder, also those of earlier calls.

    Raises:
        ConfigurationError: a file is no result.
    """
    try:
        return figures.load_results(place)
    except ValueError as error:
        raise ConfigurationError(f"run: {error}") from None


def _about(model: Localization, data: Data, name: str) -> dict[str, str]:
    """What results say of the data, and of where a belief starts."""
    starts = model.starts(name, data.source.test.has_shifts) if name in model.outputs else {}
    return {"path": model.c.data, "fingerprint": data.source.fingerprint} | starts


def _finish(
    model: Localization, data: Data, place: Path, command: str, seed: int, cost: figures.Training | None
) -> list[figures.Result]:
    """Evaluate, write the results into `place`, draw and print them."""
    found = evaluate(model, data, seed)
    any_ = next(iter(found.values()))
    found["chance"] = errors.guesses(any_.truth, data.source.crop_metres, any_.counted, torch.Generator().manual_seed(0))
    results = []
    for name, estimates in found.items():
        about = {"versions": staged.versions(), "data": _about(model, data, name)}
        output = model.outputs.get(name, CHANCE)
        learned = cost if output.is_trained else None
        summary = errors.summarize(estimates)
        results.append(figures.Result(output.title, output.method, seed, command, **about, summary=summary, training=learned))
        figures.save_result(results[-1], place)
    print("\n" + figures.recall_table(results, markdown=False) + "\n")
    figures.draw(_results(place), place.parent / "figures" if place.name == "results" else place)
    if isinstance(model, SmootherExperiment):
        _draw_trajectories(model, data, place.parent / "panels" if place.name == "results" else place)
    return results


@torch.no_grad()
def _draw_trajectories(model: SmootherExperiment, data: Data, folder: Path, n: int = 3) -> None:
    """Panels and films of some test sequences, and the learned dynamics, with the files that they are drawn from.

    Beliefs are computed where the configuration says, and drawn on the CPU, where the model is left.
    """
    folder.mkdir(exist_ok=True)
    test, place = data.source.test, staged.device(model.c.accelerator)
    model.to(place).eval()
    for i in staged.spread(len(test), min(n, len(test))):
        batch = to_batch(test[i])
        found = model.beliefs(batch.to(place), i)
        beliefs = {k: staged.on_cpu(Mixture(b.means[0], b.log_weights[0], b.bandwidths, SPACE)) for k, b in found.items()}
        T = len(batch.poses[0])
        images = batch.images[0] if batch.mounts is None else batch.images[0, :, 0]
        sequence = batch.classes[0], batch.pixels_per_metre, batch.poses[0], images, beliefs
        panel = panels.make_panel(test[i]["name"], *sequence, panels.evenly(T, panels.FRAMES), batch.observed[0])
        panels.save_panel(panel, folder / f"sequence_{i:03d}.npz")
        figures.save_figures({f"sequence_{i:03d}": panels.draw_panel(panels.thin(panel, panels.COLUMNS))}, folder)
        panels.draw_film(panel, folder / f"sequence_{i:03d}.mp4")
    move = model.cpu().model.smoother.forward_filter.dynamics
    spread = dynamics.spread(move, move.noise_size, STEPS, data.source.noise, torch.Generator().manual_seed(0))
    dynamics.save_dynamics(spread, folder / "dynamics.npz")
    figures.save_figures({"dynamics": dynamics.draw_dynamics(spread)}, folder)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return int(text)


MACHINE = ("accelerator", "threads")
_CHANGES = ("data", "test_scenes", "n_test", "n_particles", "n_first", "n_last", "window", "n_test_rotations", *MACHINE)
"""What an evaluation can change."""


def _without(kept: Sequence[str]) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(Configuration) if f.name not in kept)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="localization.py", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train one method and evaluate it")
    train.add_argument("--preset", choices=tuple(PRESETS), default="paper", help="where the defaults come from [paper]")
    train.add_argument("--config", type=Path, metavar="FILE", help="YAML file with `option: value` lines; flags override it")
    train.add_argument("--output", type=Path, metavar="FOLDER", help="run folder [runs/localization_METHOD_seed_SEED]")
    train.add_argument(
        "--devices", type=_positive, metavar="INT", default=1, help="processes that share every batch, one a GPU or CPU [1]"
    )
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
    configuration.add_flags(ablation, Configuration, without=_without(MACHINE))
    evaluation = commands.add_parser("evaluate", help="evaluate a finished run again")
    evaluation.add_argument("run", type=Path, help="run folder")
    evaluation.add_argument("--seed", type=int, metavar="INT", help="seed of the particles [the run's]")
    configuration.add_flags(evaluation, Configuration, without=_without(_CHANGES))
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    given = vars(_parser().parse_args(arguments))
    name = given.pop("command")
    command = "python training/localization.py " + shlex.join(arguments if arguments is not None else sys.argv[1:])
    try:
        if name == "demo":
            return localization_demo.main(given["output"])
        if name == "ablation":
            run_ablation(given.pop("run"), given.pop("n_particles"), given, command)
        elif name == "evaluate":
            run_evaluation(given.pop("run"), given, command, given.pop("seed"))
        else:
            file, preset, output = given.pop("config"), PRESETS[given.pop("preset")], given.pop("output")
            devices = given.pop("devices")
            c = configuration.make(Configuration, preset, configuration.read_yaml(file) if file else {}, given)
            run_training(c, output or Path("runs") / f"localization_{c.method}_seed_{c.seed}", command, devices)
    except (ConfigurationError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        goes_on = {"train": " The same command goes on from the last whole epoch.", "demo": " The same command goes on."}
        print("\nInterrupted." + goes_on.get(name, ""), file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    torch.set_flush_denormal(True)  # a trained network's gradients are full of numbers below 1e-38: a third of a step otherwise
    sys.exit(main())
