"""Interleaved timing: every job in turn, many rounds, the least time of each; only ratios inside one run mean something.

Each turn begins with a call that does not count: memory that the job before gave back is asked for again, page by page, which
doubled the time of a large training step.
"""

import time
from collections.abc import Callable


def interleaved(jobs: dict[str, Callable[[], object]], rounds: int = 15, least: float = 3e-2) -> dict[str, float]:
    """Return each job's least seconds per call. A round repeats a job until `least` seconds have passed."""
    repeats = {}
    for name, job in jobs.items():
        job()
        start = time.perf_counter()
        job()
        repeats[name] = max(1, int(least / max(time.perf_counter() - start, 1e-9)))
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(rounds):
        for name, job in jobs.items():
            job()
            start = time.perf_counter()
            for _ in range(repeats[name]):
                job()
            best[name] = min(best[name], (time.perf_counter() - start) / repeats[name])
    return best
