"""The Bayes limit of the bearings-only task: against enumeration, closed forms and the simulator, with few particles."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import i0e

pytest.importorskip("lightning")
pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))

import bayes_limit
import bearings_only

from mdps import bearings_only as task

RESULT = Path(bayes_limit.__file__).parent / "results/bearings_only/bayes_limit.json"
PI = math.pi
KEY = torch.tensor(11)


def rng(seed):
    return np.random.Generator(np.random.SFC64(seed))


def von_mises(difference, kappa):
    return np.exp(kappa * (np.cos(difference) - 1)) / (2 * PI * i0e(kappa))


def collected(start, observations, seed=0):
    """{name: beliefs in the order of steps}."""
    found = {"forward": {}, "smoothed": {}}
    for belief in bayes_limit.beliefs(start, observations, KEY, rng(seed)):
        found[belief.name][belief.step] = belief
    return {name: [of[t] for t in range(len(observations))] for name, of in found.items()}


def test_particles_move_as_the_simulator_moves(monkeypatch):
    """Without likelihoods nothing is resampled, so the particles are the vehicles of `drive` with the same random numbers."""
    monkeypatch.setattr(task, "observation_log_likelihood", lambda poses, observation: torch.zeros(len(poses)))
    random = rng(5)
    start = bayes_limit.unknown_start(200, random)
    got = [b.poses for b in bayes_limit.beliefs(start, torch.zeros(50), KEY, random) if b.name == "forward"]
    want = task.drive(200, 148, rng(5)).states[:, ::3]
    error = torch.stack(got, 1).double().numpy() - want  # 1e-6 a step of float32 rounding, over 148 steps
    error[..., 2] = np.arctan2(np.sin(error[..., 2]), np.cos(error[..., 2]))
    assert np.abs(error).max() < 2e-4


HYPOTHESES = [(angle, speed) for angle in (-0.5, -0.1, 0.3, 0.7) for speed in (1.0, 2.0)]


def straight_drives(n):
    """N vehicles at the origin, each facing a waypoint 200 m away: the hypotheses in turn."""
    angle, speed = (np.array([h[i] for h in HYPOTHESES], np.float32)[np.arange(n) % len(HYPOTHESES)] for i in (0, 1))
    waypoint = 200 * np.stack([np.cos(angle), np.sin(angle)], 1)
    return task.Vehicles(np.zeros((n, 2), np.float32), angle, waypoint, speed, np.ones(n, np.int32))


def test_filter_and_smoother_against_enumeration(monkeypatch):
    """Eight straight drives: by Bayes' rule their probabilities after every observation are products of likelihoods."""
    n, n_steps = 40_000, 8
    random = np.random.default_rng(3)
    angle, speed = np.array(HYPOTHESES).T
    way = 0.75 * speed[:, None] * np.arange(n_steps)
    tracks = np.stack([way * np.cos(angle)[:, None], way * np.sin(angle)[:, None]], -1)  # (hypotheses, T, 2)
    observations = np.arctan2(tracks[3, :, 1], tracks[3, :, 0] + 5) + random.normal(0, 0.14, n_steps)
    expected = np.arctan2(tracks[..., 1], tracks[..., 0] + 5)
    likelihoods = 0.85 * von_mises(observations - expected, 50.0) + 0.15 / (2 * PI)
    probabilities = likelihoods.cumprod(1) / likelihoods.cumprod(1).sum(0)

    resample, resampled = bayes_limit.ops.resample, []
    monkeypatch.setattr(bayes_limit.ops, "resample", lambda *a, **k: resampled.append(1) or resample(*a, **k))
    start = bayes_limit.Particles(straight_drives(n), torch.zeros(n))
    got = collected(start, torch.from_numpy(observations).float())
    assert 0.02 < probabilities[:, -1].max() < 0.98 and resampled, "otherwise this shows little"
    for name, of_steps in got.items():
        for t, belief in enumerate(of_steps):
            want = probabilities[:, t if name == "forward" else -1]
            poses = belief.poses.numpy()[:, None]
            if t:
                distance = np.abs(poses[..., :2] - tracks[:, t]).sum(-1)
            else:  # all are at the origin; their headings differ, their speeds do not show yet
                distance, want = np.abs(poses[..., 2] - angle[::2]), want[::2] + want[1::2]
            assert distance.min(1).max() < 1e-4
            weights = belief.log_weights.double().exp().numpy()
            assert abs(weights.sum() - 1) < 1e-4
            got_chances = np.bincount(distance.argmin(1), weights, len(want))
            # one stratified resampling moves a probability by less than 1 / 2 sqrt(N) = 0.0025; a few happen
            np.testing.assert_allclose(got_chances, want, atol=0.01, err_msg=f"{name} {t}")


def test_the_known_start_is_what_simulated_vehicles_with_that_reading_are(monkeypatch):
    """A million vehicles take their first step from one point with uniform headings, weighted by the noise of the reading."""
    monkeypatch.setattr(task, "TIME_STEP", 1e-6)  # so that the step turns, but does not move
    state, n = torch.tensor([2.0, -3.0, 0.4]), 1_000_000
    random = rng(1)
    parked = task.place(n, random)._replace(position=np.tile([[2.0, -3.0]], (n, 1)))
    simulated = task.advance(parked, random)
    weights = von_mises(simulated.heading - 0.4, 100.0)
    start = bayes_limit.known_start(state, n, KEY, random)
    vehicles, ours = start.vehicles, start.log_weights.double().exp().numpy()

    def moments(v, w):
        way = v.waypoint - v.position
        left = np.angle(np.exp(1j * (np.arctan2(way[:, 1], way[:, 0]) - v.heading)))
        quantities = [np.abs(left) < 1e-3, np.cos(left), np.sin(left), v.waypoint[:, 0], v.waypoint[:, 1], v.speed == 2]
        quantities += [np.cos(v.heading - 0.4), np.sin(v.heading - 0.4), np.abs(left) > 2.6]
        mean = np.array([np.average(q, weights=w) for q in quantities])
        error = np.array([np.sqrt((w**2 * (q - m) ** 2).sum()) / w.sum() for q, m in zip(quantities, mean)])
        return mean, error

    (a, error_a), (b, error_b) = moments(simulated, weights), moments(vehicles, ours)
    assert (np.abs(a - b) < 4.5 * np.hypot(error_a, error_b) + 1e-4).all(), (a, b)
    assert (error_a < 0.05).all() and (error_b < 0.05).all() and 0.05 < a[0] < 0.5
    assert (vehicles.age == 1).all()


def test_the_score_of_a_known_start_is_a_closed_form(monkeypatch):
    """At step 0 positions are Normal(truth, 0.01^2), and so is their kernel density, wider by the kernel's variance."""
    monkeypatch.setattr(bayes_limit, "HEADING_BANDWIDTHS", (100.0,))  # kappa 1e-4: uniform on the circle
    monkeypatch.setattr(bayes_limit, "POSITION_BANDWIDTHS", (0.01, 0.05, 0.5))
    state = torch.tensor([4.0, 5.0, -2.0])
    start = bayes_limit.known_start(state, 100_000, KEY, rng(0))
    belief = next(bayes_limit.beliefs(start, torch.tensor([2.5]), KEY, rng(0)))  # a false bearing: all weigh the same
    got = bayes_limit.score(belief, state)
    want = [math.log(2 * PI * (b**2 + 0.01**2)) + math.log(2 * PI) for b in (0.01, 0.05, 0.5)]
    np.testing.assert_allclose(np.array(got["nll"])[:, 0], want, atol=0.02)
    assert got["position_error"] < 1e-3 and got["heading_error"] < 0.02


def test_score_against_brute_force():
    random = np.random.default_rng(2)
    poses, weights = random.normal(0, 1, (300, 3)), random.dirichlet(np.ones(300))
    truth = np.array([0.2, -0.3, 0.5])
    belief = bayes_limit.Belief("forward", 0, torch.from_numpy(poses).float(), torch.from_numpy(weights).log().float())
    got = bayes_limit.score(belief, torch.from_numpy(truth).float())
    for p, row in zip(bayes_limit.POSITION_BANDWIDTHS, got["nll"], strict=True):
        for h, nll in zip(bayes_limit.HEADING_BANDWIDTHS, row, strict=True):
            kernels = stats.norm.pdf(truth[:2], poses[:, :2], p).prod(1) * von_mises(truth[2] - poses[:, 2], h**-2)
            assert abs(nll + math.log(weights @ kernels)) < 2e-3
    assert abs(got["position_error"] - np.linalg.norm(weights @ poses[:, :2] - truth[:2])) < 1e-5
    assert abs(got["effective"] - 1 / np.square(weights).sum()) < 1e-2
    heading = np.angle(weights @ np.exp(1j * poses[:, 2]))
    assert abs(got["heading_error"] - abs(heading - truth[2])) < 1e-5


def test_summary_against_loops():
    random = np.random.default_rng(0)
    shape = (len(bayes_limit.POSITION_BANDWIDTHS), len(bayes_limit.HEADING_BANDWIDTHS))
    nll = random.uniform(2, 30, (3, 4, *shape))
    nll[:, :, 2, 1] -= 5
    errors = random.uniform(0, 1, (3, 4))
    sequences = [
        {"nll": a.tolist(), "position_error": e.tolist(), "heading_error": e.tolist(), "effective": (100 * e).tolist()}
        for a, e in zip(nll, errors)
    ]
    got = bayes_limit.summarize(sequences)
    of_sequences = [sum(nll[s, t, 2, 1] for t in range(4)) / 4 for s in range(3)]
    p, h = bayes_limit.POSITION_BANDWIDTHS[2], bayes_limit.HEADING_BANDWIDTHS[1]
    assert got["bandwidths"] == {"position": p, "heading": h}
    assert abs(got["nll"] - sum(of_sequences) / 3) < 1e-12
    assert abs(got["nll_standard_error"] - stats.sem(of_sequences)) < 1e-12
    np.testing.assert_allclose(got["nll_of_steps"], [nll[:, t, 2, 1].mean() for t in range(4)])
    assert abs(got["heading_error_degrees"] - math.degrees(errors.mean())) < 1e-10
    floored = [[-math.log(math.exp(-x) + 1e-8) for x in row] for row in nll[:, :, 2, 1]]
    assert abs(got["with_density_floor"]["nll"] - np.mean(floored)) < 1e-9


def test_more_particles_come_closer_to_the_limit():
    def nll(n):
        c = bayes_limit.Configuration(n, 3, 0)
        scores = [bayes_limit.run_sequence(c, i, "known") for i in range(3)]
        return [bayes_limit.summarize([s[name] for s in scores])["with_density_floor"]["nll"] for name in bayes_limit.BELIEFS]

    (few_filtered, few_smoothed), (filtered, smoothed) = nll(30), nll(10_000)
    assert filtered < few_filtered - 1 and smoothed < few_smoothed - 1
    assert smoothed < filtered


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(bayes_limit, "N_STEPS", 4)


def run(folder, *flags):
    return bayes_limit.main(["--n-particles", "50", "--n-sequences", "3", "--output", str(folder / "limit.json"), *flags])


def numbers(folder):
    record = json.loads((folder / "limit.json").read_text())
    assert record.pop("processor_seconds") > 0
    return record


def test_an_interrupted_run_ends_with_the_same_numbers(short, tmp_path, monkeypatch, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(whole) == 0
    assert "known" in capsys.readouterr().out
    ordinary, calls = bayes_limit.run_sequence, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) in (3, 4):
            raise KeyboardInterrupt
        return ordinary(*arguments)

    monkeypatch.setattr(bayes_limit, "run_sequence", interrupted)
    assert run(cut) == 130
    assert "goes on" in capsys.readouterr().err
    with (cut / "limit.json.partial").open("a") as file:
        file.write('{"start": "known", "ind')  # killed while it wrote
    assert run(cut) == 130
    assert run(cut) == 0
    assert len(calls) == 2 + 1 + 1 + 4
    assert numbers(whole) == numbers(cut)
    assert [p.name for p in cut.iterdir()] == ["limit.json"]


def test_a_finished_run_is_shown_again(short, tmp_path, monkeypatch, capsys):
    run(tmp_path)
    shown = capsys.readouterr().out.splitlines()[-6:]
    monkeypatch.setattr(bayes_limit, "run_sequence", None)
    assert run(tmp_path) == 0
    assert capsys.readouterr().out.splitlines() == shown


def test_another_configuration_is_refused(short, tmp_path, monkeypatch, capsys):
    run(tmp_path)
    assert run(tmp_path, "--seed", "1") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "another configuration" in error and "'seed': 1" in error
    (tmp_path / "limit.json").write_text("no numbers")
    assert run(tmp_path) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "expected the numbers of this program" in error


def test_sequences_depend_on_seed_and_index_alone(short):
    few, many = bayes_limit.Configuration(50, 2, 7), bayes_limit.Configuration(50, 9, 7)
    assert bayes_limit.run_sequence(few, 1, "known") == bayes_limit.run_sequence(many, 1, "known")
    assert bayes_limit.run_sequence(few, 1, "known") != bayes_limit.run_sequence(few, 0, "known")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--n-particles", "1"], "--n-particles: expected at least 2, got 1"),
        (["--n-sequences", "1"], "--n-sequences: expected at least 2, got 1"),
        (["--seed", "-1"], "--seed: expected at least 0, got -1"),
        (["--n-particles", "many"], "--n-particles: expected int, got 'many'"),
        (["--particles", "5"], "unrecognized arguments: --particles"),
    ],
)
def test_bad_arguments(arguments, words, capsys):
    with pytest.raises(SystemExit) as exit:
        bayes_limit.main(arguments)
    assert exit.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_the_numbers_that_runs_are_held_against():
    """The result in the repository is of this program with its defaults, and the training program's table reads it."""
    record = json.loads(RESULT.read_text())
    assert record["configuration"] == {"n_particles": 300_000, "n_sequences": 40, "seed": 0}
    results = record["results"]
    for start in bayes_limit.STARTS:
        for name in bayes_limit.BELIEFS:
            row = results[start][name]
            assert len(row["nll_of_steps"]) == 50 and len(row["nll_of_sequences"]) == 40
            assert abs(np.mean(row["nll_of_sequences"]) - row["nll"]) < 1e-4
            assert abs(np.min(row["nll_of_bandwidths"]) - row["nll"]) < 1e-4
    assert bearings_only.BAYES_LIMIT["smoothed"][0] == results["known"]["smoothed"]["nll"]
    assert bearings_only.BAYES_LIMIT["forward"][1] == results["known"]["forward"]["position_error"]
    assert bearings_only.BAYES_LIMIT["backward"][0] == results["unknown"]["forward"]["nll"]
