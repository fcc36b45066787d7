"""Noisy odometry made from true poses, as the paper's localization experiments use it.

Every position gets its own uniform error before the differences are taken, so that the errors of two steps in a row have a
correlation of -1/2 and the summed positions never drift; every turn gets a uniform error of its own, so that headings do.
The actions are in the frame of the poses (the map's), not in the vehicle's, as in the authors' experiments.
"""

from typing import NamedTuple

import numpy as np

from .camera import Array, wrap_radians


class OdometryNoise(NamedTuple):
    """Largest errors; they are uniform between plus and minus these."""

    metres: float
    degrees: float


MAPILLARY_NOISE = OdometryNoise(5.0, 15.0)
KITTI_NOISE = OdometryNoise(1.0, 10.0)


def noisy_odometry(poses: Array, position_noise: float, heading_noise: float, random: np.random.Generator) -> Array:
    """Differences of poses with errors.

    Args:
        poses: (T, 3), x, y and an angle in radians, T >= 1.
        position_noise: largest error of x and of y of each pose, in their unit, >= 0.
        heading_noise: largest error of each turn, in radians, >= 0.

    Returns:
        (T - 1, 3): changes of x, y and the angle, the last in [-pi, pi), in the frame of the poses.
    """
    positions = poses[:, :2] + random.uniform(-1, 1, (len(poses), 2)) * position_noise
    turns = np.diff(poses[:, 2]) + random.uniform(-1, 1, max(len(poses) - 1, 0)) * heading_noise
    return np.concatenate([np.diff(positions, axis=0), wrap_radians(turns)[:, None]], 1)
