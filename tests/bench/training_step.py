"""One training step of the bearings-only task, by method and stage: B = 32 sequences of T = 50, N = 50 particles, M = 100.

Ours runs beside the same model under ops.reference(), where every operator is plain PyTorch, in interleaved rounds on one
thread: that ratio means something on any machine. "Calls" are those of torch's operators in one step, as its profiler counts
them; "at once" is the same step where eleven runs are trained at once, a run's share. The authors' seconds were measured with
their released code on one thread of a 2-core Xeon (Sapphire Rapids) under torch 2.13 and N = 50; compare them with ours on a
machine of that kind alone. Their stages 1 and 2 of MDPS also compute a smoothed belief that nothing uses, 0.6 s or more of
their step, and 0.5 s of their stage 4 is spent on underflowing exponents.

Memory: what the process grows by at its peak in MDPS 4.

All methods of training/methods.py, or those that are named: python -m bench.training_step mdps mdps-union
"""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler tells of each start and stop otherwise

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "training"))

import bearings_only
from methods import METHODS
from staged import StagedModule, peak_memory_mb

from bench.timing import interleaved
from mdps import bearings_only as task
from mdps import ops

AUTHORS = {("mdps", 0): 2.8, ("mdps", 1): 1.3, ("mdps", 2): 1.3, ("mdps", 3): 2.92, ("mdpf", 0): 0.73, ("mdpf", 1): 0.31}
AUTHORS |= {("tg-pf", 0): 0.20, ("sr-pf", 0): 0.28}
"""Seconds; no others of their program were measured in the same conditions."""
RUNS_AT_ONCE = 11


def configuration(method: str) -> bearings_only.Configuration:
    return bearings_only.Configuration(method=method, stages="code", n_training=32, n_validation=1, n_evaluation=1)


def steps(method: str, index: int, n_runs: int = 1):
    """A training step of one stage, forward pass, backward pass and Adam, and the same by references."""
    c = configuration(method)
    trackers, stage = [bearings_only.build(c) for _ in range(n_runs)], bearings_only.stages(c)[index]
    batches = [tuple(task.simulate(c.batch_size, c.n_steps, seed=i)) for i in range(n_runs)]
    schedule, seeds = bearings_only.schedule(c), list(range(n_runs))
    optimizers = StagedModule(trackers, stage, schedule, seeds, index).configure_optimizers()
    parameters = [[p for group in o.param_groups for p in group["params"]] for o in optimizers]

    def step():
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        losses = bearings_only.Tracker.losses_together(trackers, batches, tuple(stage.losses), seeds)
        sum(weight * loss[name] for loss in losses for name, weight in stage.losses.items()).backward()
        for optimizer, p in zip(optimizers, parameters):
            torch.nn.utils.clip_grad_norm_(p, schedule.gradient_clip)
            optimizer.step()

    def by_reference():
        with ops.reference():
            step()

    return stage.name, step, by_reference


def calls(step) -> int:
    """How often a step calls an operator of torch, in both passes and in Adam."""
    with profile(activities=[ProfilerActivity.CPU]) as run:
        step()
    return sum(operator.count for operator in run.key_averages())


def peak_memory() -> float:
    """MB by which the peak of three steps of MDPS 4 is above what the process, with everything imported, had before."""
    step = steps("mdps", 3)[1]
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    for _ in range(3):
        step()
    return peak_memory_mb() - before / 2**20


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    if names == ["--memory"]:
        print(f"{peak_memory():.0f}")
        return
    if unknown := set(names) - set(METHODS):
        sys.exit(f"training_step: expected names among {list(METHODS)}, got {sorted(unknown)}")
    start = time.perf_counter()
    task.simulate(11000, 50, seed=0)
    print(f"simulate, 11,000 sequences of 50 steps: {time.perf_counter() - start:.2f} s")
    process = [sys.executable, "-m", "bench.training_step", "--memory"]
    memory = subprocess.run(process, cwd=Path(__file__).parents[1], text=True, capture_output=True, check=True).stdout.strip()
    print(f"memory of a training step, MDPS 4: {memory} MB above the process\n")
    print("Training step, one thread, milliseconds (least of interleaved rounds)")
    print(
        f"{'method, stage':36} {'mdps':>8} {'reference':>10} {'ratio':>6} {'calls':>7} {'reference':>10} "
        f"{'authors':>8} {'ratio':>6} {'at once':>8}"
    )
    for method, index in ((m, i) for m in names or METHODS for i in range(len(bearings_only.stages(configuration(m))))):
        name, step, by_reference = steps(method, index)
        at_once = steps(method, index, RUNS_AT_ONCE)[1]
        times = interleaved({"mdps": step, "reference": by_reference, "at once": at_once}, rounds=5)
        ours, reference = times["mdps"], times["reference"]
        authors = AUTHORS.get((method, index))
        theirs = f"{1e3 * authors:8.0f} {authors / ours:6.1f}" if authors else " " * 15
        print(
            f"{f'{method} {index + 1}: {name}':36} {1e3 * ours:8.1f} {1e3 * reference:10.1f} {reference / ours:6.1f} "
            f"{calls(step):7,} {calls(by_reference):10,} {theirs} {1e3 * times['at once'] / RUNS_AT_ONCE:8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
