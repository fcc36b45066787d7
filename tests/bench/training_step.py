"""One training step of the bearings-only task, stage by stage: B = 32 sequences of T = 50, N = 50 particles, M = 100.

Ours runs beside the same model under ops.reference(), where every operator is plain PyTorch, in interleaved rounds on one
thread: that ratio means something on any machine. The authors' seconds were measured with their released code on one thread
of a 2-core Xeon (Sapphire Rapids) under torch 2.13 and N = 50; compare them with ours on a machine of that kind alone. Their
stages 1 and 2 of MDPS also compute a smoothed belief that nothing uses, 0.6 s or more of their step.
"""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "training"))

import bearings_only
from staged import StagedModule

from bench.timing import interleaved
from mdps import bearings_only as task
from mdps import ops

AUTHORS = {("mdps", 0): 2.8, ("mdps", 1): 1.3, ("mdps", 2): 1.3, ("mdps", 3): 2.9, ("mdpf", 0): 0.73, ("mdpf", 1): 0.31}


def steps(method: str, index: int):
    """A training step of one stage, forward pass, backward pass and Adam, and the same by references."""
    c = bearings_only.Configuration(method=method, stages="code", n_training=32, n_validation=1, n_evaluation=1)
    tracker, stage = bearings_only.build(c), bearings_only.stages(c)[index]
    batch = tuple(task.simulate(c.batch_size, c.n_steps, seed=0))
    schedule = bearings_only.schedule(c)
    (optimizer,) = StagedModule([tracker], stage, schedule, [0], index).configure_optimizers()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def step():
        optimizer.zero_grad(set_to_none=True)
        losses = tracker.losses(batch, tuple(stage.losses), 0)
        sum(weight * losses[name] for name, weight in stage.losses.items()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, schedule.gradient_clip)
        optimizer.step()

    def by_reference():
        with ops.reference():
            step()

    return stage.name, step, by_reference


def main() -> None:
    torch.set_num_threads(1)
    start = time.perf_counter()
    task.simulate(11000, 50, seed=0)
    print(f"simulate, 11,000 sequences of 50 steps: {time.perf_counter() - start:.2f} s\n")
    print("Training step, one thread, milliseconds (least of interleaved rounds)")
    print(f"{'method, stage':32} {'mdps':>8} {'reference':>10} {'ratio':>6} {'authors':>8} {'ratio':>6}")
    for (method, index), authors in AUTHORS.items():
        name, step, by_reference = steps(method, index)
        times = interleaved({"mdps": step, "reference": by_reference}, rounds=5)
        ours, reference = times["mdps"], times["reference"]
        print(
            f"{f'{method} {index + 1}: {name}':32} {1e3 * ours:8.1f} {1e3 * reference:10.1f} {reference / ours:6.1f} "
            f"{1e3 * authors:8.0f} {authors / ours:6.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
