"""The bearings-only simulator against the facts of the task."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import i0e

from mdps import bearings_only as task

PI = math.pi


@pytest.fixture(scope="module")
def drives():
    return task.drive(400, 148, np.random.default_rng(0))


@pytest.fixture(scope="module")
def sequences():
    return task.simulate(2000, seed=3)


def angle(a):
    return np.arctan2(np.sin(a), np.cos(a))


def test_shapes_types_and_ranges(sequences):
    states, observations = sequences
    assert states.shape == (2000, 50, 3) and observations.shape == (2000, 50)
    assert states.dtype == observations.dtype == torch.float32
    assert states[..., 2].abs().max() <= PI and observations.abs().max() <= PI
    assert states[..., :2].abs().max() < 12.5, "a turn leads out of the arena by at most its radius"


def test_same_seed_same_numbers_other_seed_others():
    a, b, c = task.simulate(20, seed=5), task.simulate(20, seed=5), task.simulate(20, seed=6)
    assert torch.equal(a.states, b.states) and torch.equal(a.observations, b.observations)
    assert not torch.equal(a.states, c.states)


def test_global_generators_are_neither_used_nor_moved():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    task.simulate(5, seed=0)
    assert torch.equal(before[0], torch.get_rng_state()) and (before[1] == np.random.get_state()[1]).all()


def test_stored_states_are_internal_steps_1_4_7(drives):
    stored = task.simulate(7, 5, seed=11).states
    random = np.random.Generator(np.random.Philox(11))
    internal = task.drive(7, 13, random).states
    np.testing.assert_allclose(stored.numpy(), internal[:, [0, 3, 6, 9, 12]], atol=1e-6)


def drive_in_one_piece(n_vehicles, n_internal_steps, random):
    """The simulator as it was before `advance`: runs of old seeds must find their sequences again, to the last bit."""

    def wrap(a):
        return (a + np.pi) % (2 * np.pi) - np.pi

    position = random.uniform(-10, 10, (n_vehicles, 2))
    heading = random.uniform(-np.pi, np.pi, n_vehicles)
    waypoint, speed, age = np.zeros((n_vehicles, 2)), np.zeros(n_vehicles), np.full(n_vehicles, 1001)
    states = np.empty((n_internal_steps, n_vehicles, 3))
    for k in range(n_internal_steps):
        renew = np.flatnonzero((np.square(waypoint - position).sum(1) < 0.25) | (age > 1000))
        waypoint[renew] = task.draw_waypoints(position[renew], random)
        speed[renew] = random.choice((1.0, 2.0), len(renew))
        age[renew] = 0
        way = waypoint - position
        turn = wrap(np.arctan2(way[:, 1], way[:, 0]) - heading)
        heading = wrap(heading + np.clip(turn, -math.radians(30), math.radians(30)))
        position = position + (speed * 0.25)[:, None] * np.stack([np.cos(heading), np.sin(heading)], 1)
        age += 1
        states[k, :, :2], states[k, :, 2] = position, heading
    return states.swapaxes(0, 1)


@pytest.mark.parametrize("n_vehicles, seed", [(1, 0), (37, 1), (2000, 2)])
def test_the_numbers_of_a_seed_stay_the_same_to_the_last_bit(n_vehicles, seed):
    got = task.drive(n_vehicles, 148, np.random.default_rng(seed)).states
    np.testing.assert_array_equal(got, drive_in_one_piece(n_vehicles, 148, np.random.default_rng(seed)))


def test_wrap_is_the_remainder_to_the_last_bit():
    turns = np.random.default_rng(0).uniform(-3 * np.pi, 3 * np.pi, 100_000)
    edges = np.array([k * np.pi for k in (-3, -1, 0, 1, 3)])
    angles = np.concatenate([turns, edges, np.nextafter(edges, 9), np.nextafter(edges, -9)])
    np.testing.assert_array_equal(task.wrap(angles), (angles + np.pi) % (2 * np.pi) - np.pi)


def test_advance_leaves_its_argument_and_keeps_its_type():
    random = np.random.default_rng(0)
    double = task.place(300, random)
    vehicles = task.Vehicles(*(a.astype(np.float32) for a in double[:4]), double.age.astype(np.int32))
    before = [a.copy() for a in vehicles]
    after = task.advance(vehicles, random)
    for a, b, c in zip(vehicles, before, after, strict=True):
        np.testing.assert_array_equal(a, b)
        assert c.dtype == b.dtype and c.shape == b.shape
    assert (after.age == 1).all() and np.isin(after.speed, (1, 2)).all()


def test_vehicles_move_along_their_heading_at_1_or_2_metres_a_second(drives):
    states, _, speeds = drives
    assert set(np.unique(speeds)) == {1.0, 2.0}
    moves = np.diff(states[..., :2], axis=1)
    heading, speed = states[:, 1:, 2], speeds[:, 1:]
    np.testing.assert_allclose(moves[..., 0], 0.25 * speed * np.cos(heading), atol=1e-12)
    np.testing.assert_allclose(moves[..., 1], 0.25 * speed * np.sin(heading), atol=1e-12)


def test_turns_go_to_the_waypoint_by_at_most_30_degrees(drives):
    states, waypoints, _ = drives
    before, after, goal = states[:, :-1], states[:, 1:], waypoints[:, 1:]
    wanted = angle(np.arctan2(goal[..., 1] - before[..., 1], goal[..., 0] - before[..., 0]) - before[..., 2])
    turned = angle(after[..., 2] - before[..., 2])
    assert np.abs(turned).max() <= PI / 6 + 1e-9
    np.testing.assert_allclose(turned, np.clip(wanted, -PI / 6, PI / 6), atol=1e-9)
    assert (np.abs(turned) > PI / 6 - 1e-9).any(), "some turns are cut"


def test_waypoint_and_speed_change_only_on_arrival(drives):
    states, waypoints, speeds = drives
    changed = (np.diff(waypoints, axis=1) != 0).any(-1)
    distance = np.linalg.norm(states[:, :-1, :2] - waypoints[:, :-1], axis=-1)
    np.testing.assert_array_equal(changed, distance < 0.5)
    assert changed.sum() > 300
    assert not (np.diff(speeds, axis=1) != 0)[~changed].any()
    assert stats.binomtest(int((np.diff(speeds, axis=1) != 0)[changed].sum()), int(changed.sum())).pvalue > 1e-4


def test_a_waypoint_out_of_reach_is_given_up(monkeypatch):
    monkeypatch.setattr(task, "REACHED", 0.0)
    monkeypatch.setattr(task, "MAX_STEPS", 10)
    waypoints = task.drive(50, 34, np.random.default_rng(0)).waypoints
    changed = (np.diff(waypoints, axis=1) != 0).any(-1)
    assert (np.flatnonzero(changed.all(0)) == [10, 21, 32]).all(), "after more than 10 steps: with the 12th, 23rd, ..."
    assert changed.sum() == 3 * 50


def test_waypoints_lie_in_the_border_and_away_from_the_radar():
    random = np.random.default_rng(0)
    positions = random.uniform(-10, 10, (20000, 2))
    waypoints = task.draw_waypoints(positions, random)
    assert np.abs(waypoints).max() <= 10 and np.abs(waypoints).max(1).min() >= 8
    to = np.arctan2(*(waypoints - positions).T[::-1])
    radar = np.arctan2(*(np.array([-5.0, 0.0]) - positions).T[::-1])
    assert np.abs(angle(to - radar)).min() >= PI / 6


def test_waypoints_are_uniform_in_the_band_of_a_random_side():
    # The radar is straight up from here: only waypoints within 30 degrees of that are rejected, none right or below.
    positions = np.tile([[-5.0, -1e-3]], (40000, 1))
    waypoints = task.draw_waypoints(positions, np.random.default_rng(1))
    right = waypoints[waypoints[:, 0] > 8]
    assert stats.kstest(right[:, 0], "uniform", args=(8, 2)).pvalue > 1e-4
    inner = right[np.abs(right[:, 1]) < 8]  # the corners belong to two sides
    assert stats.kstest(inner[:, 1], "uniform", args=(-8, 16)).pvalue > 1e-4
    below = (waypoints[:, 1] < -8) & (np.abs(waypoints[:, 0]) < 8)
    assert stats.binomtest(int(below.sum()), int(below.sum() + len(inner))).pvalue > 1e-4, "sides are equally likely"


def test_starts_are_uniform():
    states = task.drive(5000, 1, np.random.default_rng(2)).states[:, 0]
    inside = states[(np.abs(states[:, :2]) < 9).all(1)]  # one step of at most 0.5 m away from the start
    for i in (0, 1):
        assert stats.kstest(inside[:, i], "uniform", args=(-9, 18)).pvalue > 1e-4


def test_observations_are_the_mixture_of_true_and_false_bearings(sequences):
    states, observations = (a.double().numpy() for a in sequences)
    error = angle(observations - np.arctan2(states[..., 1], states[..., 0] + 5)).ravel()
    grid = np.linspace(-PI, PI, 20001)
    density = 0.85 * np.exp(50 * (np.cos(grid) - 1)) / (2 * PI * i0e(50)) + 0.15 / (2 * PI)
    cdf = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(grid))])
    assert stats.kstest(error, lambda x: np.interp(x, grid, cdf)).pvalue > 1e-4
    assert abs(cdf[-1] - 1) < 1e-8
    far = np.abs(error) > 1.0  # beyond 7 deviations of a true bearing: false
    assert abs(far.mean() - 0.15 * (1 - 1 / PI)) < 4 * math.sqrt(0.1 * 0.9 / error.size)


def test_observation_log_likelihood_against_scipy():
    random = np.random.default_rng(4)
    states, bearing = random.uniform(-10, 10, (50, 3)), random.uniform(-PI, PI, 50)
    mean = np.arctan2(states[:, 1], states[:, 0] + 5)
    want = np.log(0.85 * stats.vonmises.pdf(bearing, 50, loc=mean) + 0.15 / (2 * PI))
    got = task.observation_log_likelihood(torch.from_numpy(states), torch.from_numpy(bearing))
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-10)


@pytest.mark.parametrize("arguments, word", [((-1, 5, 0), "n_sequences"), ((1, 0, 0), "n_steps"), ((1, 5, -1), "seed")])
def test_errors(arguments, word):
    with pytest.raises(ValueError, match=word):
        task.simulate(*arguments[:2], seed=arguments[2])


def test_no_sequences():
    assert task.simulate(0, seed=0).states.shape == (0, 50, 3)
