"""Items of `mdps.datasets.SequenceDataset` as what filters on a map take: metres, around the middle of each piece of map."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..datasets import kitti
from ..sequences import whole_number
from . import inputs
from .geometry import SPACE


class Batch(NamedTuple):
    """B sequences of T frames. Poses are x East, y North [m], heading [rad]: `mdps.localization.geometry`."""

    images: Tensor
    """uint8 (B, T, 3, H, W), or with mounts (B, T, V, 3, H, W)."""
    camera: Tensor
    """(B, T, 4): fx, fy, cx, cy in pixels, or with mounts (B, T, V, 4)."""
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
    mounts: Tensor | None = None
    """(V, 3): where V cameras sit, metres ahead and to the left of the pose, and radians to the left that each looks; None: one
    camera, at the pose."""

    def to(self, device: torch.device | str) -> "Batch":
        """The same on a device."""
        return Batch(*(x.to(device) if isinstance(x, Tensor) else x for x in self))  # type: ignore[arg-type]


_FORMS = {
    "image": "uint8 B T 3 H W",
    "camera": "float B T 4",
    "map": "uint8 B 3 S S'",
    "uv_pose": "float B T 3",
    "odometry": "float B T' 3",
    "observed": "bool B T",
    "map_origin": "float B 2",
    "pixels_per_metre": "float B",
}
"""Of what collated items have; T' is T - 1."""
_SEVERAL = {"image": "uint8 B T V 3 H W", "camera": "float B T V 4", "mounts": "float B V 3"}
"""Where there are several cameras."""


def to_batch(items: Mapping[str, Any]) -> Batch:
    """Collated items of a data set, or one item (then B = 1), as a batch.

    Raises:
        ValueError: maps of several resolutions, or cameras in several places; what an item has is missing, or of another shape
            or type.
    """
    if not isinstance(items, Mapping):
        raise ValueError(f"items: expected what a data set has, a mapping from names to tensors, got {type(items).__name__}")
    for name in _FORMS:
        if not isinstance(items.get(name), Tensor):
            raise ValueError(f"{name}: expected a tensor in items, got {type(items.get(name)).__name__}")
    if items["pixels_per_metre"].dim() == 0:
        items = {k: v.unsqueeze(0) for k, v in items.items() if isinstance(v, Tensor)}
    sizes = inputs.tensors(items, _FORMS | (_SEVERAL if "mounts" in items else {}))
    if sizes["T"] != sizes["T'"] + 1:
        got = tuple(items["odometry"].shape)
        raise ValueError(f"odometry: expected shape (B, T - 1, 3) with T = {sizes['T']}, that of image, got {got}")
    scale = items["pixels_per_metre"]
    if (scale != scale[0]).any():
        raise ValueError(f"pixels_per_metre: expected one resolution in a batch, got {scale.unique().tolist()}")
    mounts = items.get("mounts")
    if mounts is not None and (mounts != mounts[0]).any():
        raise ValueError(f"mounts: expected cameras in the same places in a batch, got {mounts.unique(dim=0).tolist()}")
    pixels = items["uv_pose"]
    middle = pixels.new_tensor([(n - 1) / 2 for n in (items["map"].size(-1), items["map"].size(-2))] + [0.0])
    unit = pixels.new_tensor([1 / float(scale[0]), -1 / float(scale[0]), -1.0])
    poses, steps = SPACE.wrap((pixels - middle) * unit), items["odometry"] * unit
    actions = torch.cat([torch.zeros_like(poses[:, :1]), steps], 1)
    errors = _fixed_errors(items["shift"], poses[..., 2]) if "shift" in items else None
    seen = items["image"], items["camera"], items["map"], float(scale[0])
    return Batch(*seen, poses, actions, items["observed"], errors, None if mounts is None else mounts[0])


def turned(batch: Batch, quarter_turns: int, mirrored: bool = False) -> Batch:
    """The same sequences on maps turned counter-clockwise by quarter turns, after an exchange of East and West if mirrored.

    What was seen to the left is then to the right: images and cameras are mirrored too. Training on all eight teaches encoders
    to know no direction of the compass.

    Raises:
        ValueError: maps that are not square.
    """
    images, camera, classes, poses = batch.images, batch.camera, batch.classes, batch.poses
    actions, errors, mounts = batch.actions, batch.errors, batch.mounts
    if classes.size(-1) != classes.size(-2):
        raise ValueError(f"classes: expected square maps, got {tuple(classes.shape)}")
    if mirrored:
        fx, fy, cx, cy = camera.unbind(-1)
        camera = torch.stack([fx, fy, images.size(-1) - 1 - cx, cy], -1)
        images, classes = images.flip(-1), classes.flip(-1)
        sign = poses.new_tensor([-1.0, 1.0, -1.0])
        poses, actions = poses * sign + poses.new_tensor([0.0, 0.0, math.pi]), actions * sign
        errors = None if errors is None else errors * sign
        mounts = None if mounts is None else mounts * mounts.new_tensor([1.0, -1.0, -1.0])
    classes = classes.rot90(quarter_turns, (-2, -1))
    cosine, sine = ((1, 0), (0, 1), (-1, 0), (0, -1))[quarter_turns % 4]

    def rotate(vectors: Tensor, turn: float) -> Tensor:
        x, y, angle = vectors.unbind(-1)
        return torch.stack([cosine * x - sine * y, sine * x + cosine * y, angle + turn], -1)

    poses, actions = SPACE.wrap(rotate(poses, quarter_turns * math.pi / 2)), rotate(actions, 0.0)
    errors = None if errors is None else rotate(errors, 0.0)
    batch = batch._replace(images=images, camera=camera, classes=classes, mounts=mounts)
    return batch._replace(poses=poses, actions=actions, errors=errors)


def around(poses: Tensor, n: int, metres: float, concentration: float, seed: Tensor) -> Tensor:
    """N particles around each pose (B, 3), by seed () or (B,) -> (B, N, 3).

    Args:
        metres: standard deviation of their Gaussian places, the paper's is 50.
        concentration: kappa of their von Mises headings.

    Raises:
        TypeError: n or seed. ValueError: another argument, and which.
    """
    n = whole_number("n", n, 1)
    inputs.tensors({"poses": poses}, {"poses": "float B 3"})
    inputs.at_least(0, metres=metres, concentration=concentration)
    place, heading = ops.split_seed(_rows(seed, len(poses)), 2).unbind(-1)
    xy = poses[:, None, :2] + metres * ops.philox_normal(place.contiguous(), (len(poses), n, 2), dtype=poses.dtype)
    kappa = torch.full((len(poses), n), concentration, dtype=poses.dtype, device=poses.device)
    angle = poses[:, None, 2] + ops.philox_von_mises(heading.contiguous(), kappa)
    return SPACE.wrap(torch.cat([xy, angle.unsqueeze(-1)], -1))


def anywhere(batch: int, n: int, size: tuple[float, float], seed: Tensor) -> Tensor:
    """N particles uniform over a map of this size, East and North in metres, by seed () or (batch,) -> (batch, N, 3).

    Raises:
        TypeError: batch, n or seed. ValueError: another argument, and which.
    """
    batch, n = whole_number("batch", batch, 1), whole_number("n", n, 1)
    inputs.at_least(0, size=min(inputs.numbers("size", size, 2)))
    seeds = _rows(seed, batch)
    half = torch.tensor([size[0] / 2, size[1] / 2, math.pi], dtype=torch.float32, device=seeds.device)
    return (2 * ops.philox_uniform(seeds, (batch, n, 3)) - 1) * half


def _fixed_errors(shifts: Tensor, heading: Tensor) -> Tensor:
    """KITTI's shifts (B, T, 3) as errors in the map's frame."""
    yaw = 90 - heading.double().rad2deg()
    found = kitti.initial_errors(shifts.double().flatten(0, 1).numpy(), yaw.flatten().numpy())
    return torch.from_numpy(found).to(heading).view(shifts.shape)


def _rows(seed: Tensor, batch: int) -> Tensor:
    if not isinstance(seed, Tensor) or seed.dim() == 0:
        return ops.split_seed(seed, batch)
    if seed.shape != (batch,):
        raise ValueError(f"seed: expected shape () or ({batch},), got {tuple(seed.shape)}")
    return seed.contiguous()
