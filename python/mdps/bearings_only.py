"""Bearings-only tracking: the synthetic task of the paper (appendix, "Bearings Only Tracking Task"), simulated.

A vehicle drives from waypoint to waypoint in a square arena; a radar reports its bearing, sometimes falsely. The state is
the pose (x, y, heading) in metres and radians; speed and waypoint stay hidden. All sequences are simulated at once: 11,000
sequences of 50 steps take under a second.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ARENA = 10.0
"""The arena is [-ARENA, ARENA] in x and y, in metres."""
RADAR = (-5.0, 0.0)
"""Position of the radar, in metres."""
TIME_STEP = 0.25
"""Seconds of one internal step of the simulator."""
STRIDE = 3
"""Internal steps between two stored states: 0.75 s."""
SPEEDS = (1.0, 2.0)
"""Speeds of the vehicle, in m/s, equally likely; drawn with each waypoint."""
MAX_TURN = math.radians(30)
"""The largest turn of one internal step, and the smallest angle between the ways to a new waypoint and to the radar."""
BORDER = 2.0
"""Waypoints lie at most this far from a side of the arena, in metres."""
REACHED = 0.5
"""A waypoint counts as reached within this distance, in metres."""
MAX_STEPS = 1000
"""A waypoint that is not reached after more than this many internal steps is given up."""
CONCENTRATION = 50.0
"""Concentration of the von Mises noise of a true bearing: a standard deviation of about 8 degrees."""
FALSE_RATE = 0.15
"""Chance of a false bearing, uniform on the circle."""

_LOG_TRUE = math.log((1 - FALSE_RATE) / (2 * math.pi * torch.special.i0e(torch.tensor(CONCENTRATION).double()).item()))


class Vehicles(NamedTuple):
    """S vehicles with all that decides how they go on: the true state, of which the task's state is the pose."""

    position: np.ndarray
    """(S, 2), real, in metres."""
    heading: np.ndarray
    """(S), real, in [-pi, pi)."""
    waypoint: np.ndarray
    """(S, 2), real: where the vehicle is heading for, in metres."""
    speed: np.ndarray
    """(S), real, in m/s."""
    age: np.ndarray
    """(S), integer: internal steps since the waypoint was drawn."""


class Drives(NamedTuple):
    """Vehicles at every internal step, as `drive` returns them."""

    states: np.ndarray
    """(S, K, 3) float64: x, y in metres, heading in [-pi, pi)."""
    waypoints: np.ndarray
    """(S, K, 2) float64: where the vehicle was heading for in the step that led to this state, in metres."""
    speeds: np.ndarray
    """(S, K) float64, in m/s: its speed in that step."""


class LabelledSequences(NamedTuple):
    """Labelled sequences, as `simulate` returns them."""

    states: Tensor
    """(S, T, 3) float32: x, y in metres, heading in [-pi, pi)."""
    observations: Tensor
    """(S, T) float32: bearing of the vehicle from the radar, in [-pi, pi)."""


def simulate(n_sequences: int, n_steps: int = 50, *, seed: int) -> LabelledSequences:
    """Simulate labelled sequences; the same arguments give the same numbers.

    The states are those after internal steps 1, 4, 7, ..., so 0.75 s apart; the start itself is not stored.

    Args:
        n_sequences: S >= 0.
        n_steps: T >= 1, stored states a sequence.
        seed: any integer >= 0.

    Returns:
        states (S, T, 3) and observations (S, T).

    Raises:
        ValueError: a number out of range.

    Cost: about 30 us a sequence of 50 steps.
    """
    if n_sequences < 0:
        raise ValueError(f"n_sequences: expected 0 or more, got {n_sequences}")
    if n_steps < 1:
        raise ValueError(f"n_steps: expected 1 or more, got {n_steps}")
    if seed < 0:
        raise ValueError(f"seed: expected 0 or more, got {seed}")
    random = np.random.Generator(np.random.Philox(seed))
    states = drive(n_sequences, STRIDE * (n_steps - 1) + 1, random).states[:, ::STRIDE]
    observations = observe(states, random)
    return LabelledSequences(_float32(states), _float32(observations))


def drive(n_vehicles: int, n_internal_steps: int, random: np.random.Generator) -> Drives:
    """Drive vehicles from uniform poses for a number of internal steps of 0.25 s; the start itself is not returned."""
    vehicles = place(n_vehicles, random)
    states = np.empty((n_internal_steps, n_vehicles, 3))
    waypoints, speeds = np.empty((n_internal_steps, n_vehicles, 2)), np.empty((n_internal_steps, n_vehicles))
    for k in range(n_internal_steps):
        vehicles = advance(vehicles, random)
        states[k, :, :2], states[k, :, 2] = vehicles.position, vehicles.heading
        waypoints[k], speeds[k] = vehicles.waypoint, vehicles.speed
    return Drives(states.swapaxes(0, 1), waypoints.swapaxes(0, 1), speeds.T)


def place(n_vehicles: int, random: np.random.Generator) -> Vehicles:
    """Place vehicles uniformly in the arena, with uniform headings; their first `advance` draws waypoint and speed."""
    position = random.uniform(-ARENA, ARENA, (n_vehicles, 2))
    heading = random.uniform(-np.pi, np.pi, n_vehicles)
    age = np.full(n_vehicles, MAX_STEPS + 1)
    return Vehicles(position, heading, np.zeros((n_vehicles, 2)), np.zeros(n_vehicles), age)


def advance(vehicles: Vehicles, random: np.random.Generator) -> Vehicles:
    """Move vehicles by one internal step of 0.25 s; the true dynamics, in the floating-point type of the vehicles.

    A vehicle that has reached its waypoint, or has tried for too long, gets a new waypoint and speed, the only random part.
    Then it turns towards its waypoint by at most 30 degrees and moves along its heading.

    Cost: on one core with AVX-512 about 0.06 us a vehicle in float64, 0.04 us in float32.
    """
    position, heading, waypoint, speed, age = vehicles
    way = waypoint - position
    arrived = way[:, 0] ** 2 + way[:, 1] ** 2 < REACHED**2
    renew = np.flatnonzero(arrived | (age > MAX_STEPS))
    waypoint, speed, age = waypoint.copy(), speed.copy(), age.copy()
    waypoint[renew] = draw_waypoints(position[renew], random)
    speed[renew] = random.choice(SPEEDS, len(renew))
    age[renew] = 0
    turn = wrap(_direction(waypoint - position) - heading)
    heading = wrap(heading + np.clip(turn, -MAX_TURN, MAX_TURN))
    position = position + (speed * TIME_STEP)[:, None] * np.stack([np.cos(heading), np.sin(heading)], 1)
    return Vehicles(position, heading, waypoint, speed, age + 1)


def draw_waypoints(positions: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draw a waypoint for each position, (S, 2) metres: uniform in the border band of a random side, away from the radar.

    It is rejected while the ways to it and to the radar enclose less than 30 degrees.
    """
    waypoints = np.empty_like(positions)
    to_radar = _direction(np.array(RADAR) - positions)
    open_ = np.arange(len(positions))
    while len(open_):
        n = len(open_)
        side, along, depth = random.integers(4, size=n), random.uniform(-ARENA, ARENA, n), random.uniform(0, BORDER, n)
        across = np.where(side % 2 == 0, depth - ARENA, ARENA - depth)
        waypoints[open_] = np.where((side < 2)[:, None], np.stack([across, along], 1), np.stack([along, across], 1))
        angle = np.abs(wrap(_direction(waypoints[open_] - positions[open_]) - to_radar[open_]))
        open_ = open_[angle < MAX_TURN]
    return waypoints


def observe(states: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draw the bearings (...), in [-pi, pi), that the radar reports of vehicles with states (..., 3)."""
    bearing = _direction(states[..., :2] - np.array(RADAR))
    false = random.uniform(size=bearing.shape) < FALSE_RATE
    uniform = random.uniform(-np.pi, np.pi, bearing.shape)
    return np.where(false, uniform, wrap(bearing + random.vonmises(0.0, CONCENTRATION, bearing.shape)))


def observation_log_likelihood(states: Tensor, observations: Tensor) -> Tensor:
    """Log-density of bearings given states: the true measurement model, differentiable.

    Args:
        states: (..., 3): x, y in metres; the heading is not used.
        observations: (...), radians, broadcast against the leading dimensions of `states`.

    Returns:
        (...), log [0.85 VonMises(bearing, 50) + 0.15 / 2 pi].
    """
    bearing = torch.atan2(states[..., 1] - RADAR[1], states[..., 0] - RADAR[0])
    true = CONCENTRATION * (torch.cos(observations - bearing) - 1) + _LOG_TRUE
    return torch.logaddexp(true, torch.full_like(true, math.log(FALSE_RATE / (2 * math.pi))))


def wrap(angle: np.ndarray) -> np.ndarray:
    """Wrap angles to [-pi, pi)."""
    shifted = angle + np.pi  # np.remainder would do, and takes ten times as long
    return shifted - 2 * np.pi * np.floor(shifted / (2 * np.pi)) - np.pi


def _direction(vector: np.ndarray) -> np.ndarray:
    return np.arctan2(vector[..., 1], vector[..., 0])


def _float32(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
