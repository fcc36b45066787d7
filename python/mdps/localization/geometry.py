"""What map-based localization is made of: the map's features, a view from above, and the frame that both share.

A pose is (x East, y North, heading), metres and radians counter-clockwise from East, in a local frame whose origin is the
centre of the piece of map that is used: numbers stay small, as float32 needs. `MapFeatures.to_pixels` turns poses into what
`ops.pose_correlation` takes.

Source: Sarlin et al. 2023 (OrienterNet), section 3; the paper, "Global Localization Task".
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..state_space import StateSpace

SPACE = StateSpace(linear=("x", "y"), angular=("heading",))
"""Metres and radians."""


class Grid(NamedTuple):
    """The cells of a view from above, seen from a camera that looks along the columns.

    Row i lies (depth - i) * cell metres ahead: the first row is the farthest, the last one cell ahead. Column j lies
    (j - width // 2) * cell metres to the right.
    """

    cell: float = 0.5
    """Side of a cell in metres."""
    depth: int = 64
    """Rows."""
    width: int = 129
    """Columns, an odd number: the camera looks along the middle one."""

    @property
    def origin(self) -> tuple[float, float]:
        """Column and row of the camera, which lies below the last row; `origin` of `ops.pose_correlation`."""
        return float(self.width // 2), float(self.depth)


class BirdsEyeView(NamedTuple):
    """What an image shows, seen from above."""

    features: Tensor
    """(..., C, depth, width)."""
    confidence: Tensor
    """(..., depth, width), 0 to 1."""
    valid: Tensor
    """(..., depth, width) bool: the cell lies in the camera's field of view."""


class MapFeatures(NamedTuple):
    """A neural map, (B) pieces of it."""

    features: Tensor
    """(B, C, H, W), best in torch.channels_last; the first row is North."""
    first: Tensor
    """(B, 2): x and y of the middle of the first pixel, in metres of the local frame."""
    pixels_per_metre: float

    def to_pixels(self, poses: Tensor) -> Tensor:
        """Return column, row and angle of poses (B, ..., 3), for `ops.pose_correlation` with a view from above.

        Columns and rows are integers at pixels' middles. The angle is that of the view's first axis, to the right of the
        vehicle: clockwise on the screen, a quarter turn from the heading. Gradients pass.
        """
        first = self.first.view(-1, *[1] * (poses.dim() - 2), 2)
        u = (poses[..., 0] - first[..., 0]) * self.pixels_per_metre
        v = (first[..., 1] - poses[..., 1]) * self.pixels_per_metre
        return torch.stack([u, v, math.pi / 2 - poses[..., 2]], -1)

    def to_poses(self, pixels: Tensor) -> Tensor:
        """The inverse of `to_pixels`; headings in [-pi, pi)."""
        first = self.first.view(-1, *[1] * (pixels.dim() - 2), 2)
        x = first[..., 0] + pixels[..., 0] / self.pixels_per_metre
        y = first[..., 1] - pixels[..., 1] / self.pixels_per_metre
        return SPACE.wrap(torch.stack([x, y, math.pi / 2 - pixels[..., 2]], -1))


def centred_map(features: Tensor, pixels_per_metre: float) -> MapFeatures:
    """Map features (B, C, H, W) in the frame whose origin is the middle of the piece of map."""
    height, width = features.shape[-2:]
    half = torch.tensor([-(width - 1) / 2, (height - 1) / 2], dtype=features.dtype, device=features.device)
    return MapFeatures(features, (half / pixels_per_metre).expand(features.size(0), 2), pixels_per_metre)


def align(map: MapFeatures, view: BirdsEyeView, poses: Tensor, grid: Grid) -> Tensor:
    """How well views fit the map at poses: the mean product of features over the cells that are seen.

    Args:
        map: of B places.
        view: (B, C, depth, width), or (B, T, ...) with poses (B, T, N, 3): T views on one map.
        poses: (B, N, 3) or (B, T, N, 3), metres and radians. Where the map ends there is nothing.
        grid: of the view; a cell must be as large as a pixel of the map.

    Returns:
        Scores of the shape of poses without the last dimension; 0 where nothing is seen. Gradients pass to all.

    Raises:
        ValueError: shapes, or a grid of another resolution. Cost: that of `ops.pose_correlation`.
    """
    if abs(grid.cell * map.pixels_per_metre - 1) > 1e-6:
        raise ValueError(f"grid: expected cells of {1 / map.pixels_per_metre} m, pixels of the map, got {grid.cell} m")
    features = map.features.unsqueeze(1) if poses.dim() == 4 else map.features
    return ops.pose_correlation(
        features,
        view.features,
        map.to_pixels(poses),
        view.valid,
        origin=grid.origin,
        confidence=view.confidence,
        normalize="valid",
    )
