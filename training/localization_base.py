"""What the methods of the localization experiment share: a model's duties, where filters start, losses of single frames.

Of a batch that several processes share each computes some rows, with the random numbers that these have in the whole of it.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mdps import ops
from mdps.datasets import OdometryNoise
from mdps.datasets.odometry import KITTI_NOISE, MAPILLARY_NOISE
from mdps.localization import SPACE, Batch, Scene, around, pose_loss
from mdps.localization.errors import Estimates


class Belief(NamedTuple):
    """One of the answers that a method's model gives."""

    title: str
    """In figures."""
    method: str
    """What results call it."""
    starts: tuple[str, ...]
    """Where it starts: of "forward", "backward", "sliding", "true window", "near"."""
    is_trained: bool = True
    """Whether what training cost is told with it."""


WHOLE = slice(None)
"""All rows of a batch."""


class Localization(nn.Module):
    """What training and evaluation need of a method's model."""

    c: Any
    """The configuration."""
    outputs: ClassVar[dict[str, Belief]]
    """Its beliefs by name."""

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """The parameters by what the stages call them; every parameter is in one group."""
        raise NotImplementedError

    def losses(self, batch: Batch, names: tuple[str, ...], seed: int, rows: slice = WHOLE) -> dict[str, Tensor]:
        """The named losses of these rows of a batch, with the random numbers that they have in the whole of it."""
        raise NotImplementedError

    def estimates(self, batch: Batch, seed: int, names: Sequence[str] | None = None) -> dict[str, Estimates]:
        """What the model says of a batch, by the name of each of its beliefs: all, or at least those that are named."""
        raise NotImplementedError

    def starts(self, name: str, fixed: bool) -> dict[str, str]:
        """What results say of where a belief starts; fixed: from errors that the data's lists name."""
        off = "the errors that KITTI's lists name" if fixed else f"up to {self.c.first_offset:g} m east and north"
        first = "around the guess that KITTI's lists name" if fixed else "around the true pose"
        texts = {
            "forward": ("start off the truth by", off),
            "backward": ("backward start", self.c.backward_start),
            "sliding": ("first window", first),
            "true window": ("every window", "around the true pose"),
            "near": ("every frame", "within 28 m and 10 degrees of the guess that KITTI's lists name"),
        }
        return dict(texts[start] for start in self.outputs[name].starts)

    @staticmethod
    def losses_together(
        models: "Sequence[Localization]",
        batches: Sequence[Batch],
        names: tuple[str, ...],
        seeds: Sequence[int],
        rows: slice = WHOLE,
    ) -> list[dict[str, Tensor]]:
        """The losses of several models, each with its batch; of these rows of it."""
        return [m.losses(b, names, seed, rows) for m, b, seed in zip(models, batches, seeds, strict=True)]


def of_rows(batch: Batch, rows: slice) -> Batch:
    """Some of the sequences of a batch; mounts are those of all."""
    return batch._replace(**{k: x[rows] for k, x in batch._asdict().items() if isinstance(x, Tensor) and k != "mounts"})


def view_loss(scene: Scene, batch: Batch, log_temperatures: Tensor, n: int, seed: int, rows: slice) -> Tensor:
    key, first = torch.tensor(seed, device=batch.poses.device), rows.start or 0
    loss = pose_loss(scene, batch.poses[rows], n, log_temperatures, side(batch), key, first=first)
    return mean_of_observed(loss, batch, rows)


def mean_of_observed(losses: Tensor, batch: Batch, rows: slice) -> Tensor:
    """The average of losses (B, T), of these rows of a batch, over the frames that have an image; 0 where there is none.

    The divisor is the number of frames of the whole batch, times the part that the rows are of it: averages of several parts,
    weighted by their sizes, are that of the whole.
    """
    n = batch.observed.sum().clamp(min=1) * (len(losses) / len(batch.observed))
    return torch.where(batch.observed[rows], losses, 0.0).sum() / n


def map_of_each_frame(batch: Batch) -> Tensor:
    """The number of the map of each frame, (B * T)."""
    B, T = batch.observed.shape
    return torch.arange(B, device=batch.observed.device).repeat_interleave(T)


def row_keys(seed: Tensor, batch: Batch, rows: slice) -> Tensor:
    """Seeds of these rows of a batch, those that they have in the whole of it, from seed ()."""
    return ops.split_seed(seed, len(batch.poses))[rows].contiguous()


def start(batch: Batch, c: Any, seed: Tensor, rows: slice = WHOLE) -> Tensor:
    """Particles of the first step, around a guess of the true pose: the data's own, of KITTI's lists for validation and test,
    or a place drawn near it. Around the truth itself the start's own middle would be the answer."""
    middle, particles = ops.split_seed(seed, 2).unbind()
    poses = batch.poses[:, 0]
    if batch.errors is not None:
        guess = SPACE.wrap(poses + batch.errors[:, 0])
    else:
        error = c.first_offset * (2 * ops.philox_uniform(middle, (len(poses), 2)) - 1)
        guess = torch.cat([poses[:, :2] + error, poses[:, 2:]], -1)
    return around(guess[rows], c.n_first, c.first_metres, c.first_concentration, row_keys(particles, batch, rows))


def odometry_noise(c: Any) -> OdometryNoise:
    """The configuration's, or the data's own."""
    own = KITTI_NOISE if c.layout == "kitti" else MAPILLARY_NOISE
    metres = own.metres if c.odometry_metres < 0 else c.odometry_metres
    return OdometryNoise(metres, own.degrees if c.odometry_degrees < 0 else c.odometry_degrees)


def side(batch: Batch) -> float:
    """Of the maps, in metres."""
    return batch.classes.size(-1) / batch.pixels_per_metre
