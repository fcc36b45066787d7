"""Bearings-only tracking: train and evaluate the paper's methods (its section "Bearings Only Tracking Task").

    python training/bearings_only.py demo                        # a smoother in five minutes
    python training/bearings_only.py train --method mdps         # the paper's setting
    python training/bearings_only.py evaluate RUN                # a finished run again, on other sequences or particles
    python training/bearings_only.py reproduce                   # the paper's Figure 2: all methods, 11 runs each

A run folder holds configuration.yaml, versions.json, history.jsonl, metrics.json, figures, checkpoints and a TensorBoard log.
The same command on a folder that holds an unfinished run goes on with it.
"""

import argparse
import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bearings_only_figures as figures
import configuration
import lightning as L
import reproduce
import staged
import torch
from configuration import ConfigurationError, option
from files import whole, write_whole
from methods import METHODS, Tracker, fitting, stages
from staged import mix
from torch import Tensor

import mdps
from mdps import bearings_only as task
from mdps import metrics

NAMES = {"forward": "forward filter", "backward": "backward filter", "smoothed": "smoother"}
_LIMIT = json.loads((Path(__file__).parent / "results/bearings_only/bayes_limit.json").read_text())["results"]
BAYES_LIMIT = {
    name: (row["nll"], row["position_error"])
    for name, row in zip(NAMES, (_LIMIT["known"]["forward"], _LIMIT["unknown"]["forward"], _LIMIT["known"]["smoothed"]))
}
"""NLL and mean position error [m] of the true model, as bayes_limit.py measured them: 300,000 particles on the true augmented
state (pose, waypoint, speed). Filter and smoother know the start as here; beside the backward filter stands the filter with an
unknown start. They are upper bounds of the optimum."""


MODE_RADII = (2.0, 2.0, math.radians(30))
"""Metres and radians: modes as close as that in every dimension are one; a mode as close as that to the truth has found it."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Everything that a run depends on."""

    method: str = option("mdps", "what is trained: a name of the table in methods.py", tuple(METHODS))
    stages: str = option(
        "paper",
        "stages of mdps: paper (three) or code (four, the authors' program); those of other methods are the same in both",
        ("paper", "code"),
    )
    seed: int = option(0, "seed of data, first weights, order and particles; one seed, one result", minimum=0)
    n_training: int = option(5000, "training sequences", minimum=1)
    n_validation: int = option(1000, "validation sequences", minimum=1)
    n_evaluation: int = option(5000, "evaluation sequences, unseen in training", minimum=1)
    n_steps: int = option(50, "time steps of a sequence, 0.75 s each", minimum=2)
    label_every: int = option(4, "in training and validation every such step has a true state", minimum=1)
    n_particles: int = option(50, "particles of a filter; the smoother has twice as many", minimum=1)
    resampling: str = option(
        "method",
        "resampling scheme; method: the method's own",
        ("method", "stratified", "multinomial", "systematic", "residual"),
    )
    posterior_bandwidth: float = option(2.0, "first bandwidth of all beliefs in position, metres", minimum=0.11)
    resampling_bandwidth: float = option(
        0.0, "first bandwidth of the resampled mixtures in position, metres; 0: the method's own", minimum=0.0
    )
    position_noise: float = option(0.01, "standard deviation of the forward start around the truth, metres", minimum=0.0)
    heading_concentration: float = option(100.0, "concentration kappa of the forward start's heading", minimum=0.0)
    batch_size: int = option(32, "sequences of a training step", minimum=1)
    max_epochs: int = option(200, "epochs of a stage at most", minimum=1)
    first_stage_epochs: int = option(0, "epochs of the first stage at most; 0: max_epochs", minimum=0)
    min_epochs: int = option(25, "epochs of a stage before it may stop early", minimum=0)
    patience: int = option(15, "epochs without a better validation loss that end a stage", minimum=1)
    rate_factor: float = option(1.0, "multiplies the learning rates of all stages", minimum=0.0)
    gradient_clip: float = option(10.0, "largest norm of a gradient; 0: any", minimum=0.0)
    plateau_factor: float = option(0.1, "what a rate is multiplied by on a plateau", minimum=0.0, below=1.0)
    plateau_patience: int = option(10, "epochs without progress that make a plateau", minimum=0)
    plateau_cooldown: int = option(4, "epochs after a fall of the rate that do not count", minimum=0)
    plateau_threshold: float = option(1e-3, "relative progress that counts", minimum=0.0)
    density_floor: float = option(0.0, "added to densities in the loss; 0 is the paper, 1e-8 the authors' program", minimum=0.0)
    evaluation_batch_size: int = option(100, "sequences of a validation or evaluation step", minimum=1)
    accelerator: str = option("auto", "where to run", ("auto", "cpu", "gpu"))
    threads: int = option(1, "CPU threads; 1 is fastest where other programs run", minimum=1)


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "demo": {
        "n_training": 1000, "n_validation": 200, "n_evaluation": 500, "first_stage_epochs": 30, "max_epochs": 12,
        "min_epochs": 12, "rate_factor": 10.0, "resampling_bandwidth": 0.75, "posterior_bandwidth": 1.0,
    },
}  # fmt: skip


def schedule(c: Configuration) -> staged.Schedule:
    """How long stages last and how their rates fall."""
    return staged.Schedule(**{f.name: getattr(c, f.name) for f in dataclasses.fields(staged.Schedule)})


class Data(L.LightningDataModule):
    """The three sets of sequences of each run, simulated from its seed in under a second."""

    def __init__(self, runs: Sequence[Configuration]) -> None:
        super().__init__()
        self.runs, c = runs, runs[0]
        sizes = {"training": c.n_training, "validation": c.n_validation, "evaluation": c.n_evaluation}
        self.sets = {
            name: [task.simulate(n, c.n_steps, seed=mix(run.seed, 3, i)) for run in runs]
            for i, (name, n) in enumerate(sizes.items())
        }

    def train_dataloader(self):
        c, seeds = self.runs[0], [mix(run.seed, 4) for run in self.runs]
        sampler = staged.EpochSampler(c.n_training, c.batch_size, seeds, lambda: self.trainer.current_epoch)
        return staged.loader(staged.Rows(*self.sets["training"]), sampler)

    def val_dataloader(self):
        c = self.runs[0]
        sampler = staged.EpochSampler(c.n_validation, c.evaluation_batch_size, [None] * len(self.runs))
        return staged.loader(staged.Rows(*self.sets["validation"]), sampler)


def build(c: Configuration) -> Tracker:
    """A tracker with the first weights of the configuration's seed; torch's generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(mix(c.seed, 5) % 2**63)
        return Tracker(c)


@torch.no_grad()
def evaluate(tracker: Tracker, states: Tensor, observations: Tensor, seed: int) -> dict[str, dict[str, float]]:
    """The numbers of the result table, {belief: {nll, position_error, heading_error_degrees, ...}}, over all steps.

    It computes where the configuration says, and the tracker stays there.
    """
    totals: dict[str, dict[str, float]] = {}
    place = staged.device(tracker.c.accelerator)
    tracker.to(place).eval()
    for i, index in enumerate(torch.arange(len(states)).split(tracker.c.evaluation_batch_size)):
        truth = states[index].to(place)
        for name, belief in tracker.beliefs(truth, observations[index].to(place), mix(seed, 6, i)).items():
            for key, value in (metrics.summarize(belief, truth) | of_modes(belief, truth)).items():
                row = totals.setdefault(name, {})
                row[key] = row.get(key, 0.0) + value * len(index) / len(states)
    return totals


def of_modes(belief: mdps.Mixture, truth: Tensor) -> dict[str, float]:
    """Errors of the highest mode, and the share of steps at which one of the three highest is near the truth."""
    position, heading = metrics.mode_errors(belief, truth, MODE_RADII)
    recall = metrics.mode_recall(belief, truth, MODE_RADII, k=3, position=MODE_RADII[0], heading=MODE_RADII[2])
    return {
        "mode_position_error": position.mean().item(),
        "mode_heading_error_degrees": math.degrees(heading.mean().item()),
        "recall_of_modes": float(recall),
    }


def limits(options: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """BAYES_LIMIT for a run of this configuration; none of it where its sequences or starts are others."""
    of_task = "n_steps", "position_noise", "heading_concentration"
    defaults = {k: getattr(Configuration(), k) for k in of_task}
    return BAYES_LIMIT if all(options.get(k, default) == default for k, default in defaults.items()) else {}


def table(results: dict[str, dict[str, float]], true_model: dict[str, tuple[float, float]]) -> str:
    """The result table as text."""
    lines = [
        "                  this run                                                         true model",
        "                     NLL   position [m]   heading [deg]   recall of modes       NLL   position [m]",
    ]
    for name, row in results.items():
        theirs = "  {:8.2f}   {:12.2f}".format(*true_model[name]) if name in true_model else f"  {'-':>8}   {'-':>12}"
        ours = f"{row['nll']:8.2f}   {row['position_error']:12.2f}   {row['heading_error_degrees']:13.1f}"
        ours += f"   {row['recall_of_modes']:15.3f}"
        lines.append(f"{NAMES[name]:16s}{ours}{theirs}")
    lines.append(
        "Errors are those of the mean. Recall: one of the three highest modes is within 2 m and 30 degrees of the truth."
    )
    if not true_model:
        return "\n".join([*lines, "True model: measured for sequences and starts of the default size alone."])
    lines.append(
        "True model: 300,000 particles on the true augmented state (pose, waypoint, speed), start known; in the backward"
    )
    lines.append("filter's row: a filter that does not know the start.")
    return "\n".join(lines)


def run_training(c: Configuration, folder: Path, runs_at_once: int = 1, devices: int = 1) -> list[dict[str, Any]]:
    """Train in a folder, or go on there; then evaluate, draw and return the metrics.

    On several devices this runs in a process for each; number 0 alone evaluates, and the others return nothing.

    Several runs at once have the seeds c.seed, c.seed + 1, ... and the folders seed_SEED in `folder`; they give what they give
    one by one, up to rounding.
    """
    started = time.monotonic()
    runs = [dataclasses.replace(c, seed=c.seed + i) for i in range(runs_at_once)]
    folders = [folder] if runs_at_once == 1 else [folder / f"seed_{run.seed}" for run in runs]
    first = staged.rank() == 0
    staged.check_machine(c.accelerator, devices)
    torch.set_num_threads(c.threads)
    trackers, data = [build(run) for run in runs], Data(runs)
    if first:
        _open_folders(runs, folders)
    n_parameters = sum(p.numel() for p in trackers[0].parameters())
    if first:
        print(
            f"{c.method}: {n_parameters} parameters, {c.n_training} sequences of {c.n_steps} steps, {c.n_particles} particles"
        )
        print(f"run folder: {folder}" + (f", {runs_at_once} runs at once" if runs_at_once > 1 else ""))
    with staged.quiet():
        staged.train(trackers, data, stages(c), schedule(c), folders, [run.seed for run in runs], c.accelerator, devices)
    records: list[dict[str, Any]] = []
    if not first:
        return records
    for run, own, tracker, sequences in zip(runs, folders, trackers, data.sets["evaluation"]):
        with whole(own / "model.pt") as unfinished:
            torch.save({"configuration": dataclasses.asdict(run), "state_dict": tracker.state_dict()}, unfinished)
        seconds = (time.monotonic() - started) / runs_at_once
        records.append(_finish(tracker, sequences, own, run.seed, "metrics.json", seconds))
    return records


def run_demo(folder: Path) -> None:
    """Train a small smoother from scratch, in a folder that may hold an earlier demo, which goes, and no other run."""
    c = configuration.make(Configuration, PRESETS["demo"])
    staged.check_machine(c.accelerator)
    configuration.refuse_another(c, folder)
    if (folder / "configuration.yaml").exists():
        shutil.rmtree(folder)
    run_training(c, folder)


def run_evaluation(
    folder: Path, n_sequences: int | None, n_particles: int | None, seed: int, machine: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Evaluate a finished run on fresh sequences, perhaps with another number of particles or on another machine."""
    checkpoint = folder / "model.pt"
    staged.check_seed(seed)
    if not checkpoint.is_file():
        raise ConfigurationError(f"run: expected the folder of a finished run, got {folder}, which has no model.pt")
    saved = staged.load_model(checkpoint)
    numbers = {"n_evaluation": n_sequences, "n_particles": n_particles}
    changes = {k: v for k, v in numbers.items() if v is not None} | (machine or {})
    c = configuration.make(Configuration, saved["configuration"], changes)
    torch.set_num_threads(c.threads)
    tracker = build(c)
    staged.give_weights(tracker, saved["state_dict"], checkpoint)
    sequences = task.simulate(c.n_evaluation, c.n_steps, seed=mix(c.seed, 7, seed))
    fewer = f"_{n_sequences}_sequences" if n_sequences is not None else ""
    name = f"evaluation_{c.n_particles}_particles{fewer}_seed_{seed}.json"
    return _finish(tracker, sequences, folder, seed, name, None)


def _finish(tracker, sequences, folder, seed, name, seconds):
    print(f"Evaluating {len(sequences[0])} unseen sequences, every step")
    true_model, started = limits(dataclasses.asdict(tracker.c)), time.monotonic()
    results = evaluate(tracker, *sequences, seed=seed)
    record = {
        "results": results,
        "true_model": {k: {"nll": v[0], "position_error": v[1]} for k, v in true_model.items()},
        "n_sequences": len(sequences[0]),
        "n_particles": tracker.c.n_particles,
        "seed": seed,
        "evaluation_seconds": time.monotonic() - started,
    }
    if seconds is not None:
        record["seconds_of_this_call"] = seconds
        record["stages"] = staged.finished_stages(folder)
        record["peak_memory_mb"] = max([staged.peak_memory_mb(), *(s.get("memory_mb", 0) for s in record["stages"])])
    write_whole(folder / name, json.dumps(record, indent=2))
    print("\n" + table(results, true_model) + "\n")
    place = folder if seconds is not None else folder / Path(name).stem
    figures.draw_run(place, staged.read_history(folder), tracker, sequences, seed)
    print(f"Numbers: {folder / name}; figures: {place / 'figures'}")
    return record


def _open_folders(runs, folders):
    """All of them or none."""
    for run, folder in zip(runs, folders):
        configuration.refuse_another(run, folder)
    for run, folder in zip(runs, folders):
        folder.mkdir(parents=True, exist_ok=True)
        configuration.write_yaml(folder / "configuration.yaml", run)
        staged.keep_versions(folder)


def _parser():
    parser = argparse.ArgumentParser(prog="bearings_only.py", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train one method, evaluate it and draw its figures")
    train.add_argument("--preset", choices=tuple(PRESETS), default="paper", help="where the defaults come from [paper]")
    train.add_argument("--config", type=Path, metavar="FILE", help="YAML file with `option: value` lines; flags override it")
    train.add_argument("--output", type=Path, metavar="FOLDER", help="run folder [runs/bearings_only_METHOD_seed_SEED]")
    train.add_argument(
        "--runs-at-once", type=int, metavar="INT", default=1, help="train so many runs, of consecutive seeds, as one batch [1]"
    )
    train.add_argument(
        "--devices", type=int, metavar="INT", default=1, help="processes that share every batch, one a GPU or CPU [1]"
    )
    configuration.add_flags(train, Configuration)
    demo = commands.add_parser("demo", help="train a smoother in five minutes on two cores: train --preset demo, from scratch")
    demo.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        default=Path("runs/demo"),
        help="run folder, emptied of an earlier demo first [runs/demo]",
    )
    evaluation = commands.add_parser("evaluate", help="evaluate a finished run on fresh sequences")
    evaluation.add_argument("run", type=Path, help="run folder")
    evaluation.add_argument("--n-evaluation", type=int, metavar="INT", help="sequences [as the run]")
    evaluation.add_argument("--n-particles", type=int, metavar="INT", help="particles of a filter [as the run]")
    evaluation.add_argument("--seed", type=int, default=1, metavar="INT", help="seed of sequences and particles [1]")
    others = tuple(f.name for f in dataclasses.fields(Configuration) if f.name not in ("accelerator", "threads"))
    configuration.add_flags(evaluation, Configuration, without=others)
    reproduce.add_parser(commands, Configuration, PRESETS)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    given = vars(_parser().parse_args(arguments))
    command = given.pop("command")
    try:
        if command == "evaluate":
            numbers = [given.pop(name) for name in ("run", "n_evaluation", "n_particles", "seed")]
            run_evaluation(*numbers, machine=given)
        elif command == "reproduce":
            return reproduce.main(given, sys.modules[__name__])
        elif command == "demo":
            run_demo(given["output"])
        else:
            file, preset, output = given.pop("config"), PRESETS[given.pop("preset")], given.pop("output")
            runs_at_once, devices = given.pop("runs_at_once"), given.pop("devices")
            for option_, number in (("runs_at_once", runs_at_once), ("devices", devices)):
                if number < 1:
                    raise ConfigurationError(f"{option_}: expected at least 1, got {number}")
            given = (configuration.read_yaml(file) if file else {}) | given
            c = fitting(configuration.make(Configuration, preset, given), given)
            name = f"seed_{c.seed}" if runs_at_once == 1 else f"seeds_{c.seed}_to_{c.seed + runs_at_once - 1}"
            run_training(c, output or Path("runs") / f"bearings_only_{c.method}_{name}", runs_at_once, devices)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        goes_on = command in ("train", "reproduce")  # a demo begins anew, an evaluation has no epochs
        print("\nInterrupted." + " The same command goes on from the last whole epoch." * goes_on, file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
