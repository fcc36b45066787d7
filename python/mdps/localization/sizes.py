"""How large the encoders are: those of the paper's model, and small ones that train from scratch on two CPU cores in minutes.

Source: Sarlin et al. 2023 (OrienterNet), whose encoders the paper takes, for `FULL`; `SMALL` is our own.
"""

from dataclasses import dataclass
from typing import Literal

from .geometry import Grid

Padding = Literal["replicate", "zeros"]


@dataclass(frozen=True)
class EncoderSizes:
    """Everything in which variants of the encoders differ."""

    image_backbone: str | tuple[int, ...]
    """A ResNet of torchvision by its name, or the widths of a narrow one, at strides 2, 4, 8, ... of the image."""
    rays: bool
    """The image network also sees where each pixel looks, as two more input channels: x / f and y / f."""
    latent: int
    """Channels of the image's features, at stride 2, and of the view from above before it is matched."""
    scale_bins: int
    """How many scales a pixel's depth is scored at."""
    scale_range: tuple[float, float]
    """The first and last scale: log2 of f / z, focal length in pixels of the features over depth in metres."""
    grid: Grid
    """Cells of the view from above; a cell is as large as a pixel of the map's features."""
    birds_eye_blocks: int
    """Residual blocks that the view from above passes."""
    batch_norm: bool
    """BatchNorm everywhere but on the map's way down; or GroupNorm in the image network and the view from above, and nothing
    in the map's."""
    embedding: int
    """Channels for each of the map's areas, ways and nodes."""
    map_levels: tuple[tuple[int, int], ...]
    """Width and number of the map network's convolutions at each resolution on the way down, half the one before."""
    map_decoder: tuple[int, ...]
    """Widths on the way back up."""
    map_padding: Padding
    """What the map's convolutions see beyond its edge: "replicate" or "zeros", which is faster."""
    map_stride: int
    """The map's features have one pixel for a square of map_stride x map_stride pixels of the map."""
    matching: int = 8
    """Channels in which the map and the view from above are compared."""


FULL = EncoderSizes(
    image_backbone="resnet101",
    rays=False,
    latent=128,
    scale_bins=33,
    scale_range=(0.0, 9.0),
    grid=Grid(0.5, 64, 129),
    birds_eye_blocks=4,
    batch_norm=True,
    embedding=16,
    map_levels=((64, 2), (128, 2), (256, 4), (512, 4)),  # VGG-19
    map_decoder=(128, 64, 64),
    map_padding="replicate",
    map_stride=1,
)
"""Those of the paper's model: for images of 256 x 256 (Mapillary) or 448 x 160 pixels (KITTI), maps of 0.5 m a pixel."""

SMALL = EncoderSizes(
    image_backbone=(16, 32, 64, 96),
    rays=True,
    latent=32,
    scale_bins=33,
    scale_range=(0.0, 9.0),
    grid=Grid(1.0, 32, 65),
    birds_eye_blocks=2,
    batch_norm=False,
    embedding=4,
    map_levels=((16, 2), (24, 2), (32, 2), (48, 2)),
    map_decoder=(32, 24, 16),
    map_padding="zeros",
    map_stride=2,
)
"""For images of 128 x 128 pixels and maps of 0.5 m a pixel, whose features have 1 m a pixel.

No BatchNorm, because training sees one to three sequences at once; and no GroupNorm for the map, because what is said about a
place must not depend on how large a piece of map lies around it. Deviates from the paper's model also in that it is told where
each pixel looks: on a level street that is nearly the depth, which otherwise takes long to be learned.
"""
