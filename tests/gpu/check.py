"""What only a GPU can tell: whether the CUDA kernels are right, and how fast they are. tests/gpu/check.sh builds and runs it.

    python tests/gpu/check.py [--out FOLDER] [--seconds S] [--stages NAME,...] [--device cuda]

Each stage is a process of its own, with an end, so that one which crashes, hangs or spoils the device takes nothing along.
FOLDER/<card>.json holds every result from the moment it is there. Exit status 0: all stages ran, and nothing failed.
`--device cpu` tries the logic without a GPU: tests/test_gpu_check.py runs it.
"""

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# For `gpu`, `table` and the test files; not this folder, whose table.py is another one.
sys.path[:] = [str(HERE.parent), *(p for p in sys.path if p != str(HERE))]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's matrix products have the same bits on every stream
TOGETHER = 8
"""Stages that do not measure time run so many at a time."""


@dataclass
class Plan:
    """A stage: where its function is, seconds it may take, whether it has the device to itself, and whether it has to end."""

    function: str
    seconds: float
    alone: bool = False
    asked: bool = True
    parameter: str | None = None

    def stage(self) -> Callable[[Any], Iterable[dict[str, Any]]]:
        module, name = self.function.split(".")
        function = getattr(import_module(f"gpu.{module}"), name)
        return function if self.parameter is None else function(self.parameter)


def plans() -> dict[str, Plan]:
    """All stages, in the order in which they begin: first what takes long, and what measures last."""
    stems = sorted(p.stem[5:] for p in HERE.parent.glob("test_*.py") if "\nTestOperator = " in p.read_text())
    return {
        "memcheck": Plan("correctness.sanitizer", 150, parameter="memcheck"),
        "racecheck": Plan("correctness.sanitizer", 150, parameter="racecheck"),
        "parity": Plan("correctness.same_as_cpu", 120),
        **{f"derivatives of {stem}": Plan("correctness.derivatives", 120, parameter=stem) for stem in stems},
        "same bits": Plan("correctness.same_bits", 90),
        "errors": Plan("correctness.errors", 60),
        "memory": Plan("correctness.memory", 40),
        "filter": Plan("filter.stage", 60, alone=True),
        "localization": Plan("localization.stage", 60, alone=True),
        "map smoother": Plan("map_smoother.stage", 120, alone=True),
        "pairs": Plan("speed.pairs", 60, alone=True),
        "operators": Plan("speed.operators", 90, alone=True),
        "training": Plan("training.stage", 90, alone=True),
        "torch": Plan("speed.torch_eager", 45, alone=True, asked=False),
        "compiled": Plan("speed.compiled", 90, alone=True, asked=False),
        "keops": Plan("speed.keops", 90, alone=True, asked=False),
    }


SMALL = Plan("correctness.small", 120)
"""What the sanitizers run."""


# ---- One stage, in its own process ----------------------------------------------------------------------------------------


def describe(device: str) -> dict[str, Any]:
    """Name and numbers of the device."""
    import torch

    if device == "cpu":
        return {"name": "CPU", "sms": 0, "clock_mhz_most": 0}
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here")
    p = torch.cuda.get_device_properties(0)
    card = {
        "name": p.name,
        "sms": p.multi_processor_count,
        "memory_gb": round(p.total_memory / 1e9, 1),
        "uuid": f"GPU-{p.uuid}",
    }
    query = ["nvidia-smi", "-i", f"GPU-{p.uuid}", "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
        driver, clock = done.stdout.strip().split(", ")
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {**card, "driver": "unknown", "clock_mhz_most": getattr(p, "clock_rate", 0) / 1e3}
    return {**card, "driver": driver, "clock_mhz_most": float(clock)}


def versions(device: str) -> dict[str, str]:
    """Of what is measured."""
    import torch

    import mdps

    info = mdps.build_info()
    if device != "cpu" and not info["cuda"]:
        sys.exit("mdps was built without CUDA: bash tests/gpu/check.sh builds it")
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "python": sys.version.split()[0],
        "mdps": info["version"],
        "commit": os.environ.get("MDPS_COMMIT", "unknown"),
        "built_with_cuda": info["cuda"],
        "built_for": info["cuda_architectures"],
        "build_seconds": os.environ.get("MDPS_BUILD_SECONDS", "unknown"),
    }


def limits(card: dict[str, Any]) -> dict[str, Any]:
    """What results are held to, and what it comes from."""
    from gpu import correctness, filter, speed

    return {
        "pairs_share": speed.PAIRS_TARGET,
        "instructions_a_pair": speed.INSTRUCTIONS,
        "pairs_per_s_at_most": {w: speed.pairs_limit(w, card["sms"], card["clock_mhz_most"]) for w in speed.INSTRUCTIONS},
        "operator_us": speed.OPERATOR_TARGET_US,
        "filter_step_us": filter.STEP_TARGET_US,
        "memory_rows": correctness.ROWS_BOUND,
    }


def run_stage(plan: Plan, device: str, seconds: float, part: Path, card: dict[str, Any]) -> int:
    """Run a stage here; after each row its file holds all so far."""
    import torch

    from gpu.device import Run

    torch.set_num_threads(2)
    rows: list[dict[str, Any]] = []
    error = None
    try:
        for row in plan.stage()(Run(device, time.monotonic() + seconds, card)):
            rows.append(row)
            write(part, {"rows": rows})
    except Exception:
        error = traceback.format_exc()[-3000:]
    write(part, {"rows": rows, "ended": True} | ({"error": error} if error else {}))
    return error is not None or any(row["ok"] is False for row in rows)


def write(path: Path, content: dict[str, Any]) -> None:
    """Never half a file, whenever this is interrupted."""
    other = path.with_name(path.name + ".new")
    other.write_text(json.dumps(content, indent=1) + "\n")
    other.replace(path)


# ---- All stages -----------------------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A stage that has begun."""

    name: str
    seconds: float
    asked: bool
    part: Path
    process: subprocess.Popen
    start: float = field(default_factory=time.monotonic)

    def poll(self) -> dict[str, Any]:
        """What it has so far; with `seconds` once it is over. Ends it when its time is up."""
        status, took = self.process.poll(), time.monotonic() - self.start
        found = json.loads(self.part.read_text()) if self.part.exists() else {"rows": []}
        late = status is None and took > self.seconds
        if late:
            os.killpg(self.process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        result = {"ok": None, "rows": found["rows"], "error": found.get("error")}
        if status is None and not late:
            return result
        if late:
            result["error"] = f"stopped after {self.seconds:.0f} s"
        elif not found.get("ended"):
            log = self.part.with_suffix(".log").read_text(errors="replace")
            result["error"] = f"ended with status {status}: {log[-2000:]}"
        result["ok"] = not result["error"] and all(row["ok"] is not False for row in result["rows"])
        if late and not self.asked:
            result["ok"] = None
        return {**result, "seconds": round(took, 1)}


class Check:
    """A run over stages, and its file."""

    def __init__(self, device: str, seconds: float, names: list[str], out: Path) -> None:
        self.device, self.names = device, names
        self.end = time.monotonic() + seconds
        found = self.ask("describe")
        self.card = found["card"]
        self.path = out / (re.sub(r"[^\w.-]+", "_", self.card["name"]) + ".json")
        self.result: dict[str, Any] = {
            "card": {k: v for k, v in self.card.items() if k != "uuid"},
            **found["versions"],
            "limits": found["limits"],
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "passed": None,
            "stages": {},
        }
        self.save()

    def ask(self, what: str) -> dict[str, Any]:
        """The card and versions, from a process that ends: this one never uses the device."""
        command = [sys.executable, __file__, "--device", self.device, "--stage", what]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        if done.returncode:
            sys.exit(f"check: no stage can run:\n{done.stderr[-3000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    def save(self) -> None:
        write(self.path, self.result)

    def run(self) -> bool:
        """Run the stages; return whether all passed."""
        all_plans = plans()
        with tempfile.TemporaryDirectory() as folder:
            together = [n for n in self.names if not all_plans[n].alone]
            self.run_several(together, all_plans, Path(folder), TOGETHER)
            self.run_several([n for n in self.names if all_plans[n].alone], all_plans, Path(folder), 1)
        self.result["passed"] = all(self.result["stages"][n]["ok"] is not False for n in self.names)
        self.save()
        return self.result["passed"]

    def run_several(self, names: list[str], all_plans: dict[str, Plan], folder: Path, most: int) -> None:
        """Run stages, `most` at a time."""
        waiting, running = list(names), list[Running]()
        while waiting or running:
            while waiting and len(running) < most:
                name, left = waiting.pop(0), self.end - time.monotonic()
                plan = all_plans[name]
                if left < 10:
                    ok = False if plan.asked else None
                    self.result["stages"][name] = {"ok": ok, "rows": [], "error": "no time was left"}
                    continue
                running.append(self.begin(name, plan, min(left, plan.seconds), folder))
            time.sleep(0.1)
            for stage in list(running):
                now = stage.poll()
                changed = self.result["stages"].get(stage.name) != now
                self.result["stages"][stage.name] = now
                if changed:
                    self.save()
                if "seconds" in now:
                    running.remove(stage)
                    report(stage.name, now)

    def begin(self, name: str, plan: Plan, seconds: float, folder: Path) -> Running:
        part = folder / (name.replace(" ", "_") + ".json")
        command = [sys.executable, __file__, "--device", self.device, "--stage", name, "--part", str(part)]
        command += ["--seconds", str(0.95 * seconds), "--card", json.dumps(self.card)]
        with part.with_suffix(".log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        return Running(name, seconds, plan.asked, part, process)


def report(name: str, stage: dict[str, Any]) -> None:
    """A line for each stage, and one for each thing that failed."""
    failed = [row for row in stage["rows"] if row["ok"] is False]
    verdict = {True: "ok", False: "FAILED", None: "late"}[stage["ok"]]
    print(f"{verdict:6} {name}: {len(stage['rows'])} results, {len(failed)} failed, {stage['seconds']} s", flush=True)
    for row in failed[:8]:
        print("       " + json.dumps(row)[:400], flush=True)
    if stage["error"]:
        print("       " + stage["error"].strip()[-1200:].replace("\n", "\n       "), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run all stages, or with --stage one of them here. Returns the exit status."""
    known = plans()
    parser = argparse.ArgumentParser(description="Checks and measures the CUDA kernels on this machine's GPU.")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the JSON file")
    parser.add_argument("--seconds", type=float, default=300, help="most time for all")
    parser.add_argument("--stages", default=",".join(known), help=f"some of: {', '.join(known)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the logic alone")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--card", type=json.loads, default={}, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.stage == "describe":
        card = describe(given.device)
        print(json.dumps({"card": card, "versions": versions(given.device), "limits": limits(card)}))
        return 0
    if given.stage:
        plan = SMALL if given.stage == "small" else known[given.stage]
        return run_stage(plan, given.device, given.seconds, given.part, given.card)
    names = given.stages.split(",")
    if unknown := set(names) - set(known):
        parser.error(f"expected stages among {sorted(known)}, got {sorted(unknown)}")
    given.out.mkdir(parents=True, exist_ok=True)
    check = Check(given.device, given.seconds, names, given.out)
    passed = check.run()
    print(f"{'passed' if passed else 'FAILED'}: {check.path}")
    return not passed


if __name__ == "__main__":
    sys.exit(main())
