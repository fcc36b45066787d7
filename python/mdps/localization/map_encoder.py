"""From a map of classes to features that can be compared with a view from above: embeddings and a U-Net.

Each pixel's area, way and node is replaced by a learned vector, 0 by zeros; convolutions make features of them, on the way down
to coarser resolutions and back up, beside what was there on the way down. Where one feature stands for a square of pixels the
first convolution sees just that square, so that the middle of the feature is the middle of the square.

Source: Sarlin et al. 2023 (OrienterNet), section 3.2, and the paper, "Measurement Models", for FULL: on the way down it is
VGG-19 (Simonyan and Zisserman 2015) to an eighth of the resolution, without pretrained weights.
Cost: FULL 11.7 million parameters, and 64 channels at full resolution several times, 1.5 GB each at 2456 x 2456 pixels.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..maps import AREAS, NODES, WAYS
from .image_encoder import Pointwise
from .sizes import EncoderSizes, Padding

CLASSES = len(AREAS), len(WAYS), len(NODES)
"""How many there are, 7, 10 and 33; 0 is nothing."""


class MapEncoder(nn.Module):
    """Classes uint8 (B, 3, H, W) -> features (B, matching, H / stride, W / stride), channels last.

    Args:
        sizes: of the networks.

    Raises:
        ValueError: a type, shape or class that is not that of a map, or a size that is no multiple of map_stride.
    """

    rows_before: Tensor

    def __init__(self, sizes: EncoderSizes) -> None:
        super().__init__()
        self.stride = sizes.map_stride
        self.embedding = nn.Embedding(1 + sum(CLASSES), sizes.embedding, padding_idx=0)
        before, padding, self.levels = len(CLASSES) * sizes.embedding, sizes.map_padding, nn.ModuleList()
        for width, count in sizes.map_levels:
            side, stride = (3, 1) if self.levels or self.stride == 1 else (self.stride, self.stride)
            first = _convolution(before, width, padding, side, stride)
            level = [*first, *(layer for _ in range(count - 1) for layer in _convolution(width, width, padding))]
            self.levels.append(nn.Sequential(*([nn.MaxPool2d(2)] if self.levels else []), *level))
            before = width
        self.decoder = nn.ModuleList()
        for (beside, _), width in zip(reversed(sizes.map_levels[:-1]), sizes.map_decoder):
            self.decoder.append(_Up(before, beside, width, padding, sizes.batch_norm))
            before = width
        self.output = Pointwise(before, sizes.matching)
        rows_before = torch.tensor([0, CLASSES[0], CLASSES[0] + CLASSES[1]], dtype=torch.int32)
        self.register_buffer("rows_before", rows_before.view(3, 1, 1), persistent=False)

    def forward(self, classes: Tensor) -> Tensor:
        _check_classes(classes, self.stride)
        rows = (classes.int() + self.rows_before * (classes > 0)).permute(0, 2, 3, 1)
        x = self.embedding(rows.contiguous()).flatten(3).permute(0, 3, 1, 2)  # channels last
        height, width = classes.shape[-2:]
        multiple = self.stride << len(self.decoder)
        right, below = -width % multiple, -height % multiple
        if right or below:
            x = F.pad(x, (0, right, 0, below), mode="replicate")
        levels = []
        for level in self.levels:
            x = level(x)
            levels.append(x)
        for up, beside in zip(self.decoder, reversed(levels[:-1])):
            x = up(x, beside)
        features = self.output(x)[..., : height // self.stride, : width // self.stride]
        return features.contiguous(memory_format=torch.channels_last)


class _Up(nn.Module):
    """One step up: twice the resolution, beside what the way down had there, and a convolution of both."""

    def __init__(self, below: int, beside: int, width: int, padding: Padding, batch_norm: bool) -> None:
        super().__init__()
        convolution, relu = _convolution(below + beside, width, padding)
        self.join = nn.Sequential(convolution, *([nn.BatchNorm2d(width)] if batch_norm else []), relu)

    def forward(self, below: Tensor, beside: Tensor) -> Tensor:
        up = F.interpolate(below, size=beside.shape[-2:], mode="bilinear", align_corners=False)
        return self.join(torch.cat([up, beside], 1))


def _convolution(before: int, width: int, padding: Padding, side: int = 3, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(before, width, side, stride=stride, padding=(side - stride) // 2, padding_mode=padding)
    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")  # nothing normalises what follows
    return [convolution, nn.ReLU(inplace=True)]


def _check_classes(classes: Tensor, stride: int) -> None:
    if classes.dtype != torch.uint8 or classes.dim() != 4 or classes.size(1) != len(CLASSES):
        raise ValueError(f"classes: expected uint8 (B, 3, H, W), got {classes.dtype} {tuple(classes.shape)}")
    if classes.size(2) % stride or classes.size(3) % stride:
        raise ValueError(f"classes: expected height and width to be multiples of {stride}, got {tuple(classes.shape[2:])}")
    largest = classes.amax((0, 2, 3)).tolist()
    if any(largest[i] > CLASSES[i] for i in range(3)):
        raise ValueError(f"classes: expected areas, ways and nodes of at most {CLASSES}, got {tuple(largest)}")
