"""Items of `mdps.datasets.SequenceDataset` as what filters on a map take: metres, around the middle of each piece of map."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..datasets import kitti
from .geometry import SPACE


class Batch(NamedTuple):
    """B sequences of T frames. Poses are x East, y North [m], heading [rad]: `mdps.localization.geometry`."""

    images: Tensor
    """uint8 (B, T, 3, H, W)."""
    camera: Tensor
    """(B, T, 4): fx, fy, cx, cy in pixels."""
    classes: Tensor
    """uint8 (B, 3, S, S): areas, ways and nodes of the map."""
    pixels_per_metre: float
    """Of the map."""
    poses: Tensor
    """(B, T, 3), true ones."""
    actions: Tensor
    """(B, T, 3): odometry that led to each step, East, North [m] and turn [rad]; that of the first step is 0, and not used."""
    observed: Tensor
    """bool (B, T): False where there is no image."""
    errors: Tensor | None = None
    """(B, T, 3): KITTI's fixed errors of a first guess of each pose, East, North [m] and turn [rad]; None: there are none."""

    def to(self, device: torch.device | str) -> "Batch":
        """The same on a device."""
        return Batch(*(x.to(device) if isinstance(x, Tensor) else x for x in self))  # type: ignore[arg-type]


def to_batch(items: Mapping[str, Any]) -> Batch:
    """Collated items of a data set, or one item (then B = 1), as a batch.

    Raises:
        ValueError: maps of several resolutions.
    """
    if items["image"].dim() == 4:
        items = {k: v.unsqueeze(0) for k, v in items.items() if isinstance(v, Tensor)}
    scale = items["pixels_per_metre"]
    if (scale != scale[0]).any():
        raise ValueError(f"pixels_per_metre: expected one resolution in a batch, got {scale.unique().tolist()}")
    pixels = items["uv_pose"]
    middle = pixels.new_tensor([(n - 1) / 2 for n in (items["map"].size(-1), items["map"].size(-2))] + [0.0])
    unit = pixels.new_tensor([1 / float(scale[0]), -1 / float(scale[0]), -1.0])
    poses, steps = SPACE.wrap((pixels - middle) * unit), items["odometry"] * unit
    actions = torch.cat([torch.zeros_like(poses[:, :1]), steps], 1)
    errors = _fixed_errors(items["shift"], poses[..., 2]) if "shift" in items else None
    return Batch(items["image"], items["camera"], items["map"], float(scale[0]), poses, actions, items["observed"], errors)


def turned(batch: Batch, quarter_turns: int, mirrored: bool = False) -> Batch:
    """The same sequences on maps turned counter-clockwise by quarter turns, after an exchange of East and West if mirrored.

    What was seen to the left is then to the right: images and cameras are mirrored too. Training on all eight teaches encoders
    to know no direction of the compass.

    Raises:
        ValueError: maps that are not square.
    """
    images, camera, classes, poses = batch.images, batch.camera, batch.classes, batch.poses
    actions, errors = batch.actions, batch.errors
    if classes.size(-1) != classes.size(-2):
        raise ValueError(f"classes: expected square maps, got {tuple(classes.shape)}")
    if mirrored:
        fx, fy, cx, cy = camera.unbind(-1)
        camera = torch.stack([fx, fy, images.size(-1) - 1 - cx, cy], -1)
        images, classes = images.flip(-1), classes.flip(-1)
        sign = poses.new_tensor([-1.0, 1.0, -1.0])
        poses, actions = poses * sign + poses.new_tensor([0.0, 0.0, math.pi]), actions * sign
        errors = None if errors is None else errors * sign
    classes = classes.rot90(quarter_turns, (-2, -1))
    cosine, sine = ((1, 0), (0, 1), (-1, 0), (0, -1))[quarter_turns % 4]

    def rotate(vectors: Tensor, turn: float) -> Tensor:
        x, y, angle = vectors.unbind(-1)
        return torch.stack([cosine * x - sine * y, sine * x + cosine * y, angle + turn], -1)

    poses, actions = SPACE.wrap(rotate(poses, quarter_turns * math.pi / 2)), rotate(actions, 0.0)
    errors = None if errors is None else rotate(errors, 0.0)
    return batch._replace(images=images, camera=camera, classes=classes, poses=poses, actions=actions, errors=errors)


def around(poses: Tensor, n: int, metres: float, concentration: float, seed: Tensor) -> Tensor:
    """N particles around each pose (B, 3), by seed () or (B,) -> (B, N, 3).

    Args:
        metres: standard deviation of their Gaussian places, the paper's is 50.
        concentration: kappa of their von Mises headings.
    """
    place, heading = ops.split_seed(_rows(seed, len(poses)), 2).unbind(-1)
    xy = poses[:, None, :2] + metres * ops.philox_normal(place.contiguous(), (len(poses), n, 2), dtype=poses.dtype)
    kappa = torch.full((len(poses), n), concentration, dtype=poses.dtype, device=poses.device)
    angle = poses[:, None, 2] + ops.philox_von_mises(heading.contiguous(), kappa)
    return SPACE.wrap(torch.cat([xy, angle.unsqueeze(-1)], -1))


def anywhere(batch: int, n: int, size: tuple[float, float], seed: Tensor) -> Tensor:
    """N particles uniform over a map of this size, East and North in metres, by seed () or (batch,) -> (batch, N, 3)."""
    half = torch.tensor([size[0] / 2, size[1] / 2, math.pi], dtype=torch.float32, device=seed.device)
    return (2 * ops.philox_uniform(_rows(seed, batch), (batch, n, 3)) - 1) * half


def _fixed_errors(shifts: Tensor, heading: Tensor) -> Tensor:
    """KITTI's shifts (B, T, 3) as errors in the map's frame."""
    yaw = 90 - heading.double().rad2deg()
    found = kitti.initial_errors(shifts.double().flatten(0, 1).numpy(), yaw.flatten().numpy())
    return torch.from_numpy(found).to(heading).view(shifts.shape)


def _rows(seed: Tensor, batch: int) -> Tensor:
    return ops.split_seed(seed, batch) if seed.dim() == 0 else seed.contiguous()
