"""The localization experiment in small: made cities, every method trained for minutes, all of them on a city none has seen.

Cities are made by make_city.py, several in a process; each method is a command `localization.py train --preset demo`, one more
at a time than there are cores. Before these, encoders learn from single images, which the smoother and dense search start from;
with two cores two processes share their batches of two, for threads would wait for one another. What is there already is kept:
after an interruption the same command goes on.
"""

import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import localization_figures as figures
import staged
import sweep

METHODS = ("dense-search", "mdps", "retrieval")
"""In this order: the longest first."""
EXPECTED = ("mdps", "mdpf", "mdpf-backward", "dense-search", "chance")
"""From the best to the worst."""
CITIES = 8
"""The last but one is for validation, the last for the test."""
HERE = Path(__file__).parent


def main(folder: Path) -> int:
    """Run the demo in a folder; returns the exit status."""
    started = time.monotonic()
    cities = folder / "cities"
    names = [f"made_{seed}" for seed in range(CITIES)]
    missing = [seed for seed, name in enumerate(names) if not (cities / name / "dump.json").exists()]
    print(f"Making {len(missing)} cities" if missing else "The cities are there", flush=True)
    cores = os.cpu_count() or 1
    if not _run([_cities(seeds, cities) for i in range(cores) if (seeds := missing[i::cores])]):
        return 1
    print(f"Training {', '.join(('encoders', *METHODS))} on {CITIES - 2} cities; logs: {folder}/METHOD/log.txt", flush=True)
    if not _run([_method("encoders", folder, names)]) or not _run([_method(method, folder, names) for method in METHODS]):
        return 1
    results = [r for method in METHODS for r in figures.load_results(folder / method / "results")]
    results = [r for i, r in enumerate(results) if (r.method, r.run) not in {(q.method, q.run) for q in results[:i]}]
    for result in results:
        figures.save_result(result, folder / "results")
    figures.draw(figures.load_results(folder / "results"), folder / "figures")
    print(f"\nAn unseen city, {results[0].summary['steps']} images; recall in percent:\n")
    print(figures.recall_table(figures.load_results(folder / "results"), markdown=False))
    print("\n" + _order(results))
    print(f"\nFigures: {folder / 'figures'}; trajectories: {folder / 'mdps' / 'panels'}")
    print(f"Done in {staged.duration(time.monotonic() - started)}")
    return 0


def _order(results: Sequence[figures.Result]) -> str:
    """Whether more is found the more a method knows: of the future, of where the drive began, of the steps before."""
    at_5_m = {r.method: 100 * r.summary["top_1"]["position"]["recall"][-1] for r in results}
    found = [at_5_m[method] for method in EXPECTED]
    told = ", ".join(f"{method} {recall:.1f}" for method, recall in zip(EXPECTED, found))
    as_expected = all(more > less for more, less in itertools.pairwise(found))
    return f"Recall at 5 m: {told}: {'' if as_expected else 'NOT '}in the order in which they know more."


def _cities(seeds: Sequence[int], cities: Path) -> sweep.Job:
    command = (sys.executable, str(HERE / "make_city.py"), "--out", str(cities), "--seed", *map(str, seeds))
    return sweep.Job(f"cities {', '.join(map(str, seeds))}", command, cities.parent / "logs" / f"cities_from_{seeds[0]}")


def _method(method: str, folder: Path, names: Sequence[str]) -> sweep.Job:
    options = {
        "--preset": "demo", "--method": method, "--data": folder / "cities", "--validation-scenes": names[-2],
        "--test-scenes": names[-1], "--output": folder / method,
    }  # fmt: skip
    if method == "encoders":  # trained alone: a process for each sequence of a batch, or the GPU
        options["--devices"] = min(2, os.cpu_count() or 1) if staged.device("auto").type == "cpu" else 1
    elif method != "retrieval":
        options |= {"--start": folder / "encoders", "--view-epochs": 0}
    command = sys.executable, str(HERE / "localization.py"), "train", *(str(x) for pair in options.items() for x in pair)
    return sweep.Job(method, command, folder / method)


def _run(jobs: Sequence[sweep.Job]) -> bool:
    """Run jobs, one more at a time than there are cores, so that none idles while the last job is alone.

    Returns False where one failed, after what it wrote last.
    """
    engine, waiting, running = sweep.Processes(), list(jobs), 0
    at_once = (os.cpu_count() or 1) + 1
    started = time.monotonic()
    try:
        while waiting or running:
            while waiting and running < at_once:
                engine.start(waiting.pop(0))
                running += 1
            for job, status in engine.ended():
                running -= 1
                if status:
                    tail = (job.folder / "log.txt").read_text().splitlines()[-5:]
                    print(f"{job.name} failed (exit status {status}):\n" + "\n".join(tail), file=sys.stderr)
                    return False
                print(f"  {job.name}: done after {staged.duration(time.monotonic() - started)}", flush=True)
            time.sleep(0.2)
    finally:
        engine.stop()
    return True
