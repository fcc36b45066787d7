"""The paper's Figure 2 by one command: every method trained several times, with a table and a figure.

    python training/bearings_only.py reproduce                                       # all methods, 11 runs; into runs/figure_2
    python training/bearings_only.py reproduce --methods mdpf mdps --runs 3 --jobs 2
    python training/bearings_only.py reproduce --draw runs/figure_2/results --output runs/figure_2     # what is there so far

A run is a run folder of `train`, in a process of its own, and so goes on where it stopped. When it ends, one JSON holds all
that is to be known of it: with that the run is finished, and tables and figures need nothing else. Run 0 of all methods comes
first, then run 1, so that an early look shows every method.
"""

import argparse
import dataclasses
import datetime
import json
import os
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import configuration
import reproduce_figures as figures
import staged
import sweep
import torch
from configuration import ConfigurationError
from files import write_whole
from methods import METHODS, first_bandwidths, fitting

PROGRAM = Path(__file__).with_name("bearings_only.py")
SECONDS_BETWEEN_LOOKS = 0.2
NUMBER = (int, float)
NEEDED = {
    "method": str, "run": int, "machine": str, "versions": dict, "configuration": dict, "n_parameters": int, "results": dict,
    "peak_memory_mb": NUMBER, "epochs": NUMBER, "hours": NUMBER,
}  # fmt: skip
"""What tables and figures are made from; records of earlier versions have no more."""


@dataclass(frozen=True)
class Run:
    """One training of one method."""

    method: str
    number: int
    configuration: Any
    output: Path

    @property
    def name(self) -> str:
        return f"{self.method} run {self.number}"

    @property
    def folder(self) -> Path:
        return self.output / self.method / f"seed_{self.configuration.seed}"

    @property
    def record(self) -> Path:
        return self.output / "results" / f"{self.method}_run_{self.number:02d}.json"

    @property
    def flags(self) -> list[str]:
        """The flags that make `train` repeat it."""
        c = self.configuration
        changed = [f.name for f in dataclasses.fields(c) if getattr(c, f.name) != f.default or f.name in ("method", "seed")]
        return [text for name in changed for text in ("--" + name.replace("_", "-"), str(getattr(c, name)))]


@dataclass(frozen=True)
class Group:
    """Runs of one method that are trained at once, by one process; often one run."""

    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        return self.runs[0].name + (f" to {self.runs[-1].number}" if len(self.runs) > 1 else "")

    @property
    def folder(self) -> Path:
        """Where its log is, and what it needs to go on."""
        return staged.shared_folder([run.folder for run in self.runs])

    def left(self) -> "list[Group]":
        """What is not finished: it, nothing, or each such run by itself, which leaves alone those that are finished."""
        missing = [run for run in self.runs if not run.record.exists()]
        return [self] if len(missing) == len(self.runs) else [Group((run,)) for run in missing]

    def job(self) -> sweep.Job:
        """What trains and evaluates it, or goes on with that."""
        first = self.runs[0]
        output = first.folder if len(self.runs) == 1 else first.folder.parent
        at_once = () if len(self.runs) == 1 else ("--runs-at-once", str(len(self.runs)))
        command = (sys.executable, str(PROGRAM), "train", *first.flags, *at_once, "--output", str(output))
        return sweep.Job(self.name, command, self.folder, first.configuration.threads)


def add_parser(commands: Any, configuration_class: type, presets: Iterable[str]) -> None:
    """Add the sub-command to an argparse's sub-parsers."""
    parser = commands.add_parser("reproduce", help="the paper's Figure 2: train all methods, 11 runs each; draw and print")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help=f"of {', '.join(METHODS)} [all]")
    parser.add_argument(
        "--runs", type=_positive, default=11, metavar="INT", help="runs of every method; run K has the seed plus K [11]"
    )
    parser.add_argument("--jobs", type=_positive, metavar="INT", help="processes at a time [cores / threads]")
    parser.add_argument(
        "--runs-at-once",
        type=_positive,
        default=1,
        metavar="INT",
        help="runs that a process trains as one batch [1]",
    )
    parser.add_argument("--engine", choices=("processes", "ray"), default="processes", help="what runs them [processes]")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="of run folders, results, table, figure [runs/figure_2; with --draw the folder that is drawn]",
    )
    parser.add_argument(
        "--draw",
        type=Path,
        metavar="FOLDER",
        help="draw and print the results in a folder; train nothing, whatever other options say",
    )
    parser.add_argument("--preset", choices=tuple(presets), default="paper", help="where the defaults come from [paper]")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with `option: value` lines; flags override it")
    configuration.add_flags(parser, configuration_class, without=("method",))


def main(given: dict[str, Any], program: ModuleType) -> int:
    """Train what is not finished, then draw; returns the exit status. `program` is the module bearings_only.py."""
    methods, n_runs, jobs, at_once = (given.pop(name) for name in ("methods", "runs", "jobs", "runs_at_once"))
    engine, output, draw_alone = given.pop("engine"), given.pop("output"), given.pop("draw")
    file, preset = given.pop("config"), program.PRESETS[given.pop("preset")]
    if draw_alone:
        _draw(draw_alone, output or draw_alone, program)
        return 0
    if unknown := [m for m in methods or () if m not in METHODS]:
        raise ConfigurationError(f"methods: expected some of {list(METHODS)}, got {unknown[0]!r}")
    given = (configuration.read_yaml(file) if file else {}) | given
    base = configuration.make(program.Configuration, preset, given)
    output, methods = output or Path("runs/figure_2"), [m for m in METHODS if m in (methods or METHODS)]
    each = {m: fitting(dataclasses.replace(base, method=m), given) for m in methods}
    staged.check_machine(base.accelerator)
    for c in each.values():
        program.build(c)  # refuses, before anything is written, options that the method does not have
    runs = [Run(m, k, dataclasses.replace(c, seed=c.seed + k), output) for k in range(n_runs) for m, c in each.items()]
    if any((output / "results").glob("*.json")):
        read_records(output / "results", "output")  # also those of other methods, which are drawn with them
    for run in runs:
        _check_what_is_there(run, program.Configuration)
    groups = [
        Group(tuple(run for run in runs if run.method == m and first <= run.number < first + at_once))
        for first in range(0, n_runs, at_once)
        for m in methods
    ]
    jobs = jobs or max(1, len(os.sched_getaffinity(0)) // base.threads)
    failed = train(groups, jobs, engine, program)
    if any((output / "results").glob("*.json")):
        _draw(output / "results", output, program)
    if failed:
        print(f"{len(failed)} of {len(runs)} runs failed; the same command tries them again", file=sys.stderr)
    return 1 if failed else 0


def train(groups: Sequence[Group], jobs: int, engine: str, program: ModuleType) -> list[Run]:
    """Bring all runs to their end, some at a time; returns those that failed."""
    runs = [run for group in groups for run in group.runs]
    waiting = deque(unfinished for group in groups for unfinished in group.left())
    running: dict[str, Group] = {}
    failed = []
    n_finished = sum(run.record.exists() for run in runs)
    print(f"{len(runs)} runs, {n_finished} of them finished before; {jobs} processes; {runs[0].output}", flush=True)
    if not waiting:
        return []
    progress, at_work = Progress(runs, jobs, program), _engine(engine, jobs, runs[0].configuration.accelerator)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                group = waiting.popleft()
                running[group.name] = group
                at_work.start(group.job())
            ends = at_work.ended()
            progress.epochs(run for group in running.values() for run in group.runs)
            for job, status in ends:
                group = running.pop(job.name)
                for run in group.runs:
                    if status == 0:
                        write_record(run, program)
                        progress.finished(run)
                    else:
                        failed.append(run)
                        progress.failed(run, status, group.folder / "log.txt")
            time.sleep(0 if ends else SECONDS_BETWEEN_LOOKS)
    finally:
        at_work.stop()
        progress.close()
    return failed


def write_record(run: Run, program: ModuleType) -> None:
    """The JSON of a finished run, all of it or none."""
    c, folder = run.configuration, run.folder
    metrics = json.loads((folder / "metrics.json").read_text())
    record = {
        "method": run.method,
        "run": run.number,
        "seed": c.seed,
        "command": shlex.join(["python", "training/bearings_only.py", "train", *run.flags]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(c.accelerator),
        "versions": json.loads((folder / "versions.json").read_text()),
        "configuration": dataclasses.asdict(c),
        "first_bandwidths": first_bandwidths(c),
        "n_parameters": sum(p.numel() for p in program.build(c).parameters()),
        "results": metrics["results"],
        "stages": [{**s, "hours": s["seconds"] / 3600} for s in metrics["stages"]],
        "runs_at_once": _runs_at_once(metrics["stages"]),
        "peak_memory_mb": metrics["peak_memory_mb"],
        "evaluation_seconds": metrics["evaluation_seconds"],
    }
    record["epochs"] = sum(stage["epochs"] for stage in record["stages"])
    record["hours"] = sum(stage["hours"] for stage in record["stages"])
    run.record.parent.mkdir(parents=True, exist_ok=True)
    write_whole(run.record, json.dumps(record, indent=2) + "\n")


def _runs_at_once(stages: Sequence[dict[str, Any]]) -> int | None:
    """The most that shared a process in a stage; None where a stage is of an earlier version, which did not tell."""
    told = [stage.get("runs_at_once") for stage in stages]
    return None if None in told else max(told)


def machine(accelerator: str) -> str:
    """The processor, how many of it, and the GPU where runs compute on one."""
    place = staged.device(accelerator)
    return staged.processor() + (f", {staged.hardware(place)}" if place.type == "cuda" else "")


def read_records(folder: Path, argument: str = "draw") -> list[dict[str, Any]]:
    """All runs that a folder has JSONs of.

    Raises:
        ConfigurationError: there are none, or one is not the JSON of a run; it names the argument that led there.
    """
    records = [read_record(path, argument) for path in sorted(folder.glob("*.json"))]
    if not records:
        raise ConfigurationError(f"{argument}: expected a folder with JSONs of runs, got {folder}, which has none")
    return records


def read_record(path: Path, argument: str) -> dict[str, Any]:
    """The JSON of a run, in which nothing is missing that a table or figure needs."""
    try:
        record = json.loads(path.read_text())
    except ValueError:
        record = None
    if missing := _missing(record):
        what = f"expected JSONs of runs in {path.parent}, got {path.name}, which has no {missing}"
        raise ConfigurationError(f"{argument}: {what}")
    return record


def _missing(record: Any) -> str:
    """What a record has not, or not of the right type; empty where it is whole."""
    if not isinstance(record, dict):
        return "JSON of a run"
    if wrong := [name for name, kind in NEEDED.items() if not isinstance(record.get(name), kind)]:
        return wrong[0]
    for name, key in (("configuration", "threads"), ("versions", "torch")):
        if key not in record[name]:
            return f"{key} in its {name}"
    rows = [record["results"][belief] for belief in figures.JUDGED if belief in record["results"]]
    if not rows or not isinstance(rows[0], dict) or not all(isinstance(number, NUMBER) for number in rows[0].values()):
        return "numbers of a belief in its results"
    return next((f"{key} in its results" for key in figures.PER_STEP if key not in rows[0]), "")


class Progress:
    """What a sweep says: a line an epoch, rewritten in place on a terminal, and a line for every run that ended."""

    def __init__(self, runs: Sequence[Run], jobs: int, program: ModuleType) -> None:
        self.jobs, self.in_place, self.left = jobs, sys.stdout.isatty(), 0
        self.unfinished = {run.name: run for run in runs if not run.record.exists()}
        self.n_runs, self.n_failed = len(runs), 0
        self.stages = {run.method: program.stages(run.configuration) for run in runs}
        self.at_most = {
            run.method: sum(stage.max_epochs or run.configuration.max_epochs for stage in self.stages[run.method])
            for run in runs
        }
        self.seconds = {
            run.name: {(r["stage"], r["epoch"]): r["seconds"] for r in staged.read_history(run.folder)} for run in runs
        }
        self.read = {run.name: _whole_lines(run.folder / "history.jsonl") for run in runs}
        self.methods = {run.name: run.method for run in runs}

    def epochs(self, running: Iterable[Run]) -> None:
        """Say what running runs have done since the last call."""
        for run in running:
            path = run.folder / "history.jsonl"
            if _size(path) == self.read[run.name]:
                continue
            with path.open() as file:
                file.seek(self.read[run.name])
                whole = file.read().rpartition("\n")[0]
            self.read[run.name] += len(whole) + 1 if whole else 0
            for row in map(json.loads, whole.splitlines()):
                self.seconds[run.name][row["stage"], row["epoch"]] = row["seconds"]
                stage = f"stage {row['stage']}/{len(self.stages[run.method])}"
                numbers = f"loss {row['training_loss']:7.3f}  validation {row[staged.VALIDATION]:7.3f}"
                self._say(f"{run.name}  {stage}  epoch {row['epoch'] + 1}  {numbers}  {self._remaining()}", last=False)

    def finished(self, run: Run) -> None:
        """Say that a run is finished."""
        record = json.loads(run.record.read_text())
        self.unfinished.pop(run.name, None)
        results = record["results"][figures.belief_of(record)]
        numbers = f"NLL {results['nll']:.3f} after {record['epochs']} epochs, {staged.duration(3600 * record['hours'])}"
        self._say(f"{run.name}  finished: {numbers}  {self._remaining()}", last=True)

    def failed(self, run: Run, status: int, log: Path) -> None:
        """Say that a run failed, and where to read why."""
        self.unfinished.pop(run.name, None)
        self.n_failed += 1
        reason = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1][:200]
        how = f"exit status {status}" if status >= 0 else f"killed by signal {-status}"
        self._say(f"{run.name}  FAILED, {how}: {reason} (log: {log})", last=True)

    def close(self) -> None:
        """Leave a line that is rewritten in place."""
        if self.in_place:
            print(flush=True)

    def _remaining(self):
        """Where no run of a method is finished, it is taken to need all epochs that it may."""
        every = [s for seconds in self.seconds.values() for s in seconds.values()]
        left, word = 0.0, "about"
        for name, run in self.unfinished.items():
            alike = [self.seconds[n] for n, m in self.methods.items() if m == run.method]
            done = [len(s) for n, s in self.seconds.items() if self.methods[n] == run.method and n not in self.unfinished and s]
            known = [s for seconds in alike for s in seconds.values()] or every
            word = word if done else "at most"
            expected = sum(done) / len(done) if done else self.at_most[run.method]
            left += max(0.0, expected - len(self.seconds[name])) * sum(known) / max(1, len(known))
        n_ended = self.n_runs - len(self.unfinished) - self.n_failed
        return f"[{n_ended} of {self.n_runs} runs; {word} {staged.duration(left / self.jobs)} left]"

    def _say(self, line, last):
        if self.in_place:
            print(f"\r{line[: shutil.get_terminal_size().columns - 1] if not last else line}\033[K", end="\n" if last else "")
            sys.stdout.flush()
        else:
            print(line, flush=True)


def _check_what_is_there(run, configuration_class):
    stored = run.folder / "configuration.yaml"
    before = [read_record(run.record, "output")["configuration"]] if run.record.exists() else []
    before += [configuration.read_yaml(stored)] if stored.exists() else []
    for values in before:
        c = configuration.make(configuration_class, values)
        changed = [f.name for f in dataclasses.fields(c) if getattr(c, f.name) != getattr(run.configuration, f.name)]
        if changed:
            raise ConfigurationError(
                f"output: {run.output} holds {run.name} with another {', '.join(changed)}; "
                "expected the same configuration, or another --output"
            )


def _engine(name, jobs, accelerator):
    if name == "processes":
        return sweep.Processes()
    try:
        return sweep.Ray(jobs, torch.cuda.device_count() if staged.device(accelerator).type == "cuda" else 0)
    except ImportError:
        raise ConfigurationError("engine: ray is not installed; pip install ray, or --engine processes") from None


def _draw(results, folder, program):
    titles = {name: method.title.replace("\n", " ") for name, method in METHODS.items()}
    records = read_records(results)
    comparable = all(program.limits(record["configuration"]) for record in records)
    limits = {belief: limit[0] for belief, limit in program.BAYES_LIMIT.items()} if comparable else {}
    text = figures.draw(records, folder, limits, titles)
    print("\n" + text)
    print(f"Table: {folder / 'table.md'}; figure: {folder / 'figure_2.png'}, {folder / 'figure_2.pdf'}; JSONs: {results}")


def _size(path):
    return path.stat().st_size if path.exists() else 0


def _whole_lines(path):
    """Bytes up to the last whole line: what follows was cut off, and goes when the run goes on."""
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


def _positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return int(text)
