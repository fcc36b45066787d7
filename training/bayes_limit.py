"""The limit of the bearings-only task: what a filter and a smoother reach that know the true model.

    python training/bayes_limit.py --output runs/bayes_limit.json      # 300,000 particles, 40 sequences: about six minutes

A bootstrap filter on the full state of a vehicle (pose, waypoint, speed, age of the waypoint) that moves by the simulator's own
`advance` and weighs by its own likelihood; it is resampled when the effective number of particles falls below one half. The
smoother is the same run looked at from its end: the last weights, handed down the ancestry, which is valid for every model.
Most smoothers are not valid for this one: between waypoints it moves without noise, so that a state has one possible
predecessor, and those that weigh predecessors by the transition's density (FFBS, two filters) have nothing to choose from.

Scored as the learned methods are: -log m(true pose), with m the kernel density of the weighted particles, over all steps. Each
belief is scored with every pair of bandwidths of a grid, and the best pair is what counts.

Bias: every number is an upper bound of the optimum. By Gibbs' inequality no density scores better on average than the exact
posterior; ours has kernels as wide as the particles need, and the smoother's ancestries run together towards the start: more
particles lower both numbers. (Choosing the best of 48 pairs on the sequences that are scored lowers them by far less than their
standard error.)

Two starts. Known: the first stored pose as the learned methods get it, read with their noise; waypoint and speed by the model.
Unknown: uniform. An interrupted run goes on with the same command. One thread; memory 0.5 GB for 300,000 particles.

Source: Gordon, Salmond & Smith 1993 (the filter); Kitagawa 1996 (the smoother).
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import bearings_only
import configuration
import methods
import numpy as np
import staged
import torch
from configuration import ConfigurationError, option
from files import write_whole
from staged import mix
from torch import Tensor

from mdps import Mixture, metrics, ops
from mdps import bearings_only as task

N_STEPS = 50
POSITION_BANDWIDTHS = (0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.8, 1.2)
"""Standard deviations of the kernels in x and y, metres."""
HEADING_BANDWIDTHS = (0.015, 0.03, 0.07, 0.14, 0.22, 0.35)
"""Of the kernels in heading, radians: von Mises of concentration b**-2."""
DENSITY_FLOOR = 1e-8
"""What the authors' program adds to densities in its loss; numbers with it stand beside those without."""
RESAMPLE_BELOW = 0.5
"""Resampled when the effective number of particles falls below this share."""
STARTS = ("known", "unknown")
BELIEFS = ("forward", "smoothed")


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Everything that the numbers depend on."""

    n_particles: int = option(300_000, "particles", minimum=2)
    n_sequences: int = option(40, "sequences of 50 steps", minimum=2)
    seed: int = option(0, "seed of sequences and particles", minimum=0)


class Particles(NamedTuple):
    """Weighted vehicles."""

    vehicles: task.Vehicles
    """N vehicles, float32."""
    log_weights: Tensor
    """(N,) float32; they need not be normalised."""


def known_start(state: Tensor, n: int, key: Tensor, random: np.random.Generator) -> Particles:
    """N vehicles at the first stored state, as a reading of their pose with the noise of the learned methods leaves them.

    The stored state follows the first internal step, in which the vehicle turned from a uniform heading towards its waypoint by
    at most 30 degrees: with chance 1/6 it faces the waypoint now, and otherwise what is left to turn is uniform in +-150
    degrees. One half of the particles are of either kind, weighted by the chance of the kind and of the reading. (Waypoints are
    drawn for the pose after the step, at most 0.5 m from where the vehicle drew its own.)

    state: (3,), the pose that was read; key: a seed for its noise.
    """
    c = bearings_only.Configuration()
    pose = methods.around(state[None], n, c.position_noise, c.heading_concentration, key)[0].numpy()
    position, heading = pose[:, :2], pose[:, 2]
    waypoint = task.draw_waypoints(position, random)
    to_waypoint = np.arctan2(*(waypoint - position).T[::-1])
    reading = ops.von_mises_log_prob(torch.from_numpy(to_waypoint), state[2], torch.tensor(c.heading_concentration)).numpy()
    faces = math.log(task.MAX_TURN / np.pi) + reading
    left = np.abs(task.wrap(to_waypoint - heading))
    turns_on = np.where(left < np.pi - task.MAX_TURN, -math.log(2 * np.pi), -np.inf)
    first_half = np.arange(n) < n // 2
    log_weights = np.where(first_half, faces, turns_on).astype(np.float32)
    heading = np.where(first_half, to_waypoint, heading)
    speed = random.choice(task.SPEEDS, n).astype(np.float32)
    return Particles(task.Vehicles(position, heading, waypoint, speed, np.ones(n, np.int32)), torch.from_numpy(log_weights))


def unknown_start(n: int, random: np.random.Generator) -> Particles:
    """N vehicles after their first internal step, as the simulator starts them."""
    position, heading, waypoint, speed, age = task.place(n, random)
    real = (a.astype(np.float32) for a in (position, heading, waypoint, speed))
    return Particles(task.advance(task.Vehicles(*real, age.astype(np.int32)), random), torch.zeros(n))


class Belief(NamedTuple):
    """What the particles say about the pose at one step."""

    name: str
    """forward: given the observations up to this step; smoothed: given all."""
    step: int
    poses: Tensor
    """(N, 3) float32; smoothed: only the particles with descendants."""
    log_weights: Tensor
    """(N,) float32, normalised."""


def beliefs(start: Particles, observations: Tensor, key: Tensor, random: np.random.Generator) -> Iterator[Belief]:
    """Filter and smooth: yield the forward beliefs at steps 0 ... T-1, then the smoothed ones at T-1 ... 0.

    start: the vehicles at step 0; observations: (T,); key: a seed for resampling; random: for waypoints and speeds.

    Memory: 16 T N bytes, poses and ancestors. Time: 0.2 us T N on one core with AVX-512.
    """
    vehicles, log_weights = start
    n, effective = len(log_weights), torch.tensor(torch.inf)
    poses: list[Tensor] = []
    ancestors: list[Tensor | None] = []
    for t, observation in enumerate(observations):
        ancestor = None
        if effective < RESAMPLE_BELOW * n:
            ancestor = ops.resample(log_weights, key, stream=t)
            vehicles = task.Vehicles(*(field[ancestor.numpy()] for field in vehicles))
            log_weights = torch.zeros(n)
        for _ in range(task.STRIDE if t else 0):
            vehicles = task.advance(vehicles, random)
        pose = torch.from_numpy(np.column_stack([vehicles.position, vehicles.heading]))
        likelihood = task.observation_log_likelihood(pose, observation)
        log_weights, _, effective = ops.normalize_log_weights(log_weights + likelihood)
        poses.append(pose)
        ancestors.append(None if ancestor is None else ancestor.int())
        yield Belief("forward", t, pose, log_weights)
    weights = log_weights.double().exp()
    for t in reversed(range(len(poses))):
        alive = weights.nonzero()[:, 0]
        yield Belief("smoothed", t, poses[t][alive], (weights[alive] / weights.sum()).log().float())
        if (ancestor := ancestors[t]) is not None:
            weights = torch.bincount(ancestor, weights, minlength=n)


def score(belief: Belief, truth: Tensor) -> dict[str, Any]:
    """{nll: one list of headings' bandwidths for each of the positions', position_error [m], heading_error [rad], effective}.

    effective: number of particles. The errors are those of the mean.
    """

    def mixture(*bandwidths):
        return Mixture(belief.poses, belief.log_weights, torch.tensor(bandwidths), methods.SPACE)

    mean = mixture(1.0, 1.0, 1.0).mean
    return {
        "nll": [
            [metrics.negative_log_likelihood(mixture(p, p, h), truth).item() for h in HEADING_BANDWIDTHS]
            for p in POSITION_BANDWIDTHS
        ],
        "position_error": metrics.position_error(mean, truth).item(),
        "heading_error": metrics.heading_error(mean, truth).item(),
        "effective": ops.normalize_log_weights(belief.log_weights)[2].item(),
    }


def run_sequence(c: Configuration, index: int, start: str) -> dict[str, Any]:
    """Simulate a sequence, which depends on the seed and its index alone, and score both beliefs at all steps."""
    states, observations = task.simulate(1, N_STEPS, seed=mix(c.seed, 1, index))
    seed = mix(c.seed, 2, index, STARTS.index(start))
    random, (start_key, run_key) = np.random.Generator(np.random.SFC64(seed)), ops.split_seed(torch.tensor(seed), 2).unbind()
    known = start == "known"
    particles = known_start(states[0, 0], c.n_particles, start_key, random) if known else unknown_start(c.n_particles, random)
    scores: dict[str, list[Any]] = {name: [None] * N_STEPS for name in BELIEFS}
    for belief in beliefs(particles, observations[0], run_key, random):
        scores[belief.name][belief.step] = score(belief, states[0, belief.step])
    return {name: {k: [row[k] for row in rows] for k in rows[0]} for name, rows in scores.items()}


def summarize(sequences: list[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of one belief from its scores of S sequences; standard errors are those of a mean over sequences."""
    nll = np.array([s["nll"] for s in sequences])  # (S, T, positions, headings)
    errors = {"position_error": 1.0, "heading_error": 180 / np.pi}
    position, heading = (np.array([s[k] for s in sequences]).mean(1) * unit for k, unit in errors.items())
    return {
        **_best(nll),
        "position_error": position.mean(),
        "position_error_standard_error": _standard_error(position),
        "heading_error_degrees": heading.mean(),
        "effective_particles_of_steps": np.mean([s["effective"] for s in sequences], 0).tolist(),
        "with_density_floor": _best(-np.logaddexp(-nll, math.log(DENSITY_FLOOR))),
    }


def _best(nll):
    grid = nll.mean((0, 1))
    p, h = np.unravel_index(grid.argmin(), grid.shape)
    best = nll[:, :, p, h]
    return {
        "nll": best.mean(),
        "nll_standard_error": _standard_error(best.mean(1)),
        "bandwidths": {"position": POSITION_BANDWIDTHS[p], "heading": HEADING_BANDWIDTHS[h]},
        "nll_of_bandwidths": grid.tolist(),
        "nll_of_steps": best.mean(0).tolist(),
        "nll_of_sequences": best.mean(1).tolist(),
    }


def _standard_error(of_sequences):
    return of_sequences.std(ddof=1) / math.sqrt(len(of_sequences))


def table(results: dict[str, Any]) -> str:
    """The results as text."""
    lines = ["start     belief            NLL           with floor     position [m]   heading [deg]   bandwidths [m, rad]"]
    for start, rows in results.items():
        for name, row in rows.items():
            floored, b = row["with_density_floor"], row["bandwidths"]
            lines.append(
                f"{start:8s}  {name:8s}  {row['nll']:6.2f} ± {row['nll_standard_error']:.2f}"
                f"   {floored['nll']:6.2f} ± {floored['nll_standard_error']:.2f}"
                f"   {row['position_error']:5.2f} ± {row['position_error_standard_error']:.2f}"
                f"   {row['heading_error_degrees']:13.1f}   {b['position']}, {b['heading']}"
            )
    return "\n".join(lines)


def run(c: Configuration, output: Path) -> dict[str, Any]:
    """Run all sequences from both starts, or those that are still missing, and write the numbers.

    Finished sequences are kept in a file beside `output`, until that is written.
    """
    torch.set_num_threads(1)
    partial = output.with_name(output.name + ".partial")
    if output.exists():
        return _of_configuration(output, output.read_text(), c)
    done = _read(partial, c)
    output.parent.mkdir(parents=True, exist_ok=True)
    print(f"{c.n_particles} particles, {c.n_sequences} sequences; {len(done)} of {2 * c.n_sequences} runs are done")
    for index in range(c.n_sequences):
        for start in STARTS:
            if (start, index) in done:
                continue
            began = time.process_time()
            scores = run_sequence(c, index, start)
            seconds = time.process_time() - began
            done[start, index] = {"start": start, "index": index, "seconds": seconds, "scores": scores}
            with partial.open("a") as file:
                if not file.tell():
                    file.write(json.dumps({"configuration": dataclasses.asdict(c)}) + "\n")
                file.write(json.dumps(done[start, index]) + "\n")
            print(f"sequence {index + 1}/{c.n_sequences}, start {start}: {seconds:.1f} s of processor time", flush=True)
    record = _record(c, done)
    write_whole(output, json.dumps(record, indent=1) + "\n")
    partial.unlink()
    return record


def _record(c, done):
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in dataclasses.asdict(c).items())
    results = {
        start: {name: summarize([done[start, index]["scores"][name] for index in range(c.n_sequences)]) for name in BELIEFS}
        for start in STARTS
    }
    record = {
        "command": f"python training/bayes_limit.py {flags}",
        "configuration": dataclasses.asdict(c),
        "versions": staged.versions() | {"numpy": np.__version__},
        "processor_seconds": sum(row["seconds"] for row in done.values()),
        "density_floor": DENSITY_FLOOR,
        "position_bandwidths": POSITION_BANDWIDTHS,
        "heading_bandwidths": HEADING_BANDWIDTHS,
        "results": results,
    }
    return json.loads(json.dumps(record), parse_float=lambda text: float(f"{float(text):.6g}"))


def _read(partial, c):
    """The finished runs of an interrupted call; a line that was cut off is left out, and out of the file."""
    if not partial.exists():
        return {}
    lines = [line for line in partial.read_text().splitlines(keepends=True) if line.endswith("\n")]
    if not lines:
        return {}
    _of_configuration(partial, lines[0], c)
    partial.write_text("".join(lines))
    return {(row["start"], row["index"]): row for row in map(json.loads, lines[1:])}


def _of_configuration(path, text, c):
    """What `text` from the file at `path` holds, if it is this program's and of configuration c."""
    try:
        record = json.loads(text)
        before = record["configuration"]
    except (ValueError, TypeError, KeyError):
        raise ConfigurationError(f"output: {path} exists; expected the numbers of this program there, or no file") from None
    if before != dataclasses.asdict(c):
        raise ConfigurationError(
            f"output: {path} is of another configuration, {before}; expected {dataclasses.asdict(c)}, or another --output"
        )
    return record


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bayes_limit.py", description=__doc__.split("\n\n")[0])
    configuration.add_flags(parser, Configuration)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", default=Path("runs/bayes_limit.json"), help="JSON [runs/bayes_limit.json]"
    )
    given = vars(parser.parse_args(arguments))
    output = given.pop("output")
    try:
        record = run(configuration.make(Configuration, given), output)
    except (ConfigurationError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on after the last whole sequence.", file=sys.stderr)
        return 130
    print(table(record["results"]))
    print(f"Numbers: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
