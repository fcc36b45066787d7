"""What a learned dynamics makes of one pose when the noise of the odometry is marginalised.

    python training/localization_dynamics.py FILE.npz OUT.png

Drawn from a small file that can be committed (`save_dynamics`): .npz without pickle, poses as `localization_scene.to_integers`.
Source: the paper's figure of learned dynamics. Cost: 1 s a plot.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from files import whole
from localization_figures import STYLE, plt
from localization_scene import (
    MODE,
    arrow_handle,
    cloud_handle,
    draw_arrows,
    draw_cloud,
    read_file,
    to_integers,
    to_poses,
)
from torch import Tensor

from mdps import Mixture
from mdps.datasets import OdometryNoise
from mdps.localization import SPACE
from mdps.maps import Box

FORMAT = "mdps localization dynamics 1"
PARTICLE = "#550000"


@dataclass(frozen=True, eq=False)
class Dynamics:
    """What becomes of the pose (0, 0, heading North), as particles, for each of C actions."""

    titles: tuple[str, ...]
    actions: Tensor
    """(C, 3), without noise."""
    particles: Tensor
    """(C, N, 3)."""


def spread(
    dynamics: Callable[[Tensor, Tensor, Tensor], Tensor],
    noise_size: int,
    steps: Sequence[tuple[float, float]],
    noise: OdometryNoise,
    generator: torch.Generator | None = None,
    n_actions: int = 1000,
    n_particles: int = 2,
) -> Dynamics:
    """Apply a dynamics to the pose (0, 0, North) with noisy odometry of several steps: the actions are marginalised.

    Args:
        dynamics: (particles (B, N, 3), standard normal noise (B, N, noise_size), actions (B, 3)) -> (B, N, 3); on the CPU.
        steps: what is driven in each case: metres ahead, and degrees of a turn to the left.
        noise: of odometry, as `mdps.datasets.noisy_odometry` makes it.
        n_actions: draws of the odometry's noise for each case. n_particles: of the dynamics' noise for each of those.
    """
    ahead, turn = torch.tensor(steps).float().unbind(-1)
    turn = turn.deg2rad()
    way = torch.pi / 2 + turn / 2  # an arc
    actions = torch.stack([ahead * way.cos(), ahead * way.sin(), turn], -1)
    uniform = 2 * torch.rand(len(steps), n_actions, 5, generator=generator) - 1
    off = torch.cat([noise.metres * (uniform[..., :2] - uniform[..., 2:4]), uniform[..., 4:] * np.radians(noise.degrees)], -1)
    noisy = SPACE.wrap(actions[:, None] + off).flatten(0, 1)
    start = torch.tensor([0.0, 0.0, torch.pi / 2]).expand(len(noisy), n_particles, 3)
    random = torch.randn(len(noisy), n_particles, noise_size, generator=generator)
    with torch.no_grad():
        moved = SPACE.wrap(dynamics(start, random, noisy)).view(len(steps), -1, 3)
    titles = (f"{a:g} m ahead" + (f", {abs(d):g}° {'left' if d > 0 else 'right'}" if d else "") for a, d in steps)
    return Dynamics(tuple(titles), actions, moved)


def save_dynamics(dynamics: Dynamics, path: Path) -> None:
    """Write them; the file's head says how."""
    about = np.array(json.dumps({"format": FORMAT, "titles": dynamics.titles}))
    arrays = {"actions": to_integers(dynamics.actions), "particles": to_integers(dynamics.particles)}
    with whole(path) as unfinished, unfinished.open("wb") as file:
        np.savez_compressed(file, about=about, **arrays)


def load_dynamics(path: Path) -> Dynamics:
    """Read what `save_dynamics` wrote.

    Raises:
        ValueError: another file.
    """
    about, arrays = read_file(path, FORMAT)
    return Dynamics(tuple(about["titles"]), to_poses(arrays["actions"]), to_poses(arrays["particles"]))


def draw_dynamics(dynamics: Dynamics, smoothing: float = 0.7) -> Any:
    """Density of particles after one step, a plot for each action; the start is a black arrow, the action's end a blue one.

    Args:
        smoothing: standard deviation of the kernels, in metres.
    """
    n, (_, count, _) = len(dynamics.titles), dynamics.particles.shape
    box = _region(dynamics.particles[..., :2].flatten(0, 1), 3 * smoothing)
    reach = box.size[0] / 2
    start = torch.tensor([0.0, 0.0, torch.pi / 2])
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(1.9 * n, 2.7))
        axes = figure.subplots(1, n, squeeze=False, sharey=True)[0]
        for k, ax in enumerate(axes):
            weights = torch.full((count,), 1 / count).log()
            draw_cloud(ax, Mixture(dynamics.particles[k], weights, torch.tensor([smoothing, smoothing, 1.0]), SPACE), box)
            draw_arrows(ax, dynamics.particles[k, :: max(1, count // 40)], PARTICLE, 0.12 * reach, 0.006, 3)
            draw_arrows(ax, start[None], "black", 0.25 * reach, 0.02, 4)
            draw_arrows(ax, (start + dynamics.actions[k])[None], MODE, 0.25 * reach, 0.02, 4)
            ax.set(xlim=(box.x_min, box.x_max), ylim=(box.y_min, box.y_max), aspect="equal")
            ax.set(title=dynamics.titles[k], xlabel="to the right [m]")
        axes[0].set_ylabel("ahead [m]")
        handles = [arrow_handle("black", "pose before"), arrow_handle(MODE, "odometry without noise")]
        handles += [arrow_handle(PARTICLE, "particles after"), cloud_handle("their density")]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, handlelength=1.5)
    return figure


def _region(places: Tensor, margin: float) -> Box:
    """A square around all places (N, 2) but a few far ones, and the start; the start in the middle from left to right."""
    low, high = places.quantile(0.002, 0).clamp(max=0), places.quantile(0.998, 0).clamp(min=0)
    half = max(-low[0], high[0], (high[1] - low[1]) / 2).item() + margin
    middle = (low[1] + high[1]).item() / 2
    return Box(-half, middle - half, half, middle + half)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a file of dynamics."""
    parser = argparse.ArgumentParser(description="What a learned dynamics does to one pose.")
    parser.add_argument("file", type=Path, help=".npz of dynamics")
    parser.add_argument("out", type=Path, help=".png")
    given = parser.parse_args(arguments)
    try:
        if given.out.suffix.lower() != ".png" or not given.out.parent.is_dir():
            raise ValueError(f"{given.out}: expected a file .png in a folder that is there")
        figure = draw_dynamics(load_dynamics(given.file))
        with plt.rc_context(STYLE):
            figure.savefig(given.out)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
