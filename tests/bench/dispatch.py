"""What a call costs before any work is done: microseconds per call on tiny tensors, one thread.

4 x 8 log-weights, 32 angles, 4 queries of 8 components in one dimension. Rounds of 100 calls of every
job in turn, so that a busy machine disturbs all jobs alike; the smallest and the median round.
Bars: no more than 5 us for a face whose gradient is not recorded, no more than 10 us where it is (smallest round).
"""

import statistics
import time
from collections.abc import Callable

import torch

from mdps import ops

ROUNDS, CALLS = 60, 100
BARS = {"face, no grad": 5.0, "face, recorded": 10.0}


def jobs() -> dict[str, Callable[[], object]]:
    """Return what is timed, by name."""
    x = torch.randn(4, 8)
    result: dict[str, Callable[[], object]] = {"torch.add": lambda: torch.add(x, x)}
    angles, kappa = torch.randn(32), torch.rand(32)
    add_operator(result, "normalize_log_weights", ops.normalize_log_weights, [x], lambda out: out.log_weights)
    add_operator(result, "von_mises_log_prob", ops.von_mises_log_prob, [angles, angles, kappa], lambda out: out)
    mixture = [torch.randn(1, 4, 1), torch.randn(1, 8, 1), torch.randn(1, 8), torch.rand(1) + 0.5]
    add_operator(result, "mixture_log_prob", ops.mixture_log_prob, mixture, lambda out: out, raw_options=(0,))
    return result


def add_operator(result, name, face, args, pick, raw_options=()):
    """Add the operator alone and its face in three ways."""
    raw = getattr(torch.ops.mdps, name).default
    wanted = [a.clone().requires_grad_() for a in args]
    ones = torch.ones_like(pick(face(*args)))
    result[f"{name}: operator alone"] = lambda: raw(*args, *raw_options)
    result[f"{name}: face, no grad"] = lambda: face(*args)
    result[f"{name}: face, recorded"] = lambda: face(*wanted)
    result[f"{name}: forward + backward"] = lambda: torch.autograd.grad(pick(face(*wanted)), wanted, ones)


def measure(timed: dict[str, Callable[[], object]]) -> dict[str, tuple[float, float]]:
    """Return the smallest and the median microseconds per call."""
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(ROUNDS + 1):
        for name, job in timed.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                job()
            times[name].append((time.perf_counter() - start) * 1e6 / CALLS)
    return {name: (min(t[1:]), statistics.median(t[1:])) for name, t in times.items()}


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread; microseconds per call, smallest and median of {ROUNDS} rounds")
    for name, (least, median) in measure(jobs()).items():
        bar = next((f"  bar {b:.0f}{'' if least <= b else ': MISSED'}" for way, b in BARS.items() if name.endswith(way)), "")
        print(f"{name:44s} {least:7.2f} {median:7.2f}{bar}")


if __name__ == "__main__":
    main()
