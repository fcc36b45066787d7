"""From a map of classes to features that can be compared with a view from above: embeddings and a U-Net.

Each pixel's area, way and node is replaced by a learned vector; a convolutional network with shortcuts at every resolution
makes features of them. The paper's network is that of VGG-19 down to an eighth of the resolution, with replicated borders. The
narrow one starts with squares of map_stride x map_stride pixels and has no normalisation: what it says about a place must not
depend on how large a piece of map lies around it, as it would with GroupNorm; batches are too small for BatchNorm.

Source: Sarlin et al. 2023 (OrienterNet), section 3.2; the paper, "Measurement Models".
Cost: FULL about 11.7 million parameters, and 64 channels at full resolution several times, 1.5 GB each at 2456 x 2456 pixels.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .image_encoder import Pointwise, torchvision_models
from .sizes import EncoderSizes

CLASSES = (7, 10, 33)
"""How many areas, ways and nodes there are; 0 is nothing."""


class MapEncoder(nn.Module):
    """Classes uint8 (B, 3, H, W) -> features (B, matching, H / stride, W / stride), channels last.

    Args:
        sizes: of the networks.

    Raises:
        ValueError: a type, shape or class that is not that of a map, or a size that is no multiple of map_stride.
    """

    before: Tensor

    def __init__(self, sizes: EncoderSizes) -> None:
        super().__init__()
        self.stride = sizes.map_stride
        self.embedding = nn.Embedding(1 + sum(CLASSES), sizes.embedding, padding_idx=0)
        n_inputs = len(CLASSES) * sizes.embedding
        if isinstance(sizes.map_backbone, str):
            self.levels, widths = _vgg_levels(sizes.map_backbone, n_inputs, len(sizes.map_decoder) + 1)
        else:
            self.levels, widths = _narrow_levels(sizes.map_backbone, n_inputs, sizes.map_stride), sizes.map_backbone
        up = _Concatenate if isinstance(sizes.map_backbone, str) else _Add
        steps = zip((widths[-1], *sizes.map_decoder), reversed(widths[:-1]), sizes.map_decoder)
        self.decoder = nn.ModuleList(up(*step) for step in steps)
        before = torch.tensor([0, CLASSES[0], CLASSES[0] + CLASSES[1]], dtype=torch.int32)
        self.register_buffer("before", before.view(3, 1, 1), persistent=False)
        self.output = Pointwise(sizes.map_decoder[-1], sizes.matching)

    def forward(self, classes: Tensor) -> Tensor:
        _check_classes(classes, self.stride)
        rows = (classes.int() + self.before * (classes > 0)).permute(0, 2, 3, 1)
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


class _Concatenate(nn.Module):
    """One step up, VGG's: twice the resolution, beside what the way down had there, and a convolution of both."""

    def __init__(self, below: int, beside: int, width: int) -> None:
        super().__init__()
        self.join = nn.Sequential(
            nn.Conv2d(below + beside, width, 3, padding=1, padding_mode="replicate", bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )

    def forward(self, below: Tensor, beside: Tensor) -> Tensor:
        return self.join(torch.cat([_twice(below, beside), beside], 1))


class _Add(nn.Module):
    """One step up, the narrow network's: as above, but added, which leaves half of the channels to the convolution."""

    def __init__(self, below: int, beside: int, width: int) -> None:
        super().__init__()
        self.lateral = Pointwise(below, beside)
        self.join = nn.Sequential(*_convolution(beside, width))

    def forward(self, below: Tensor, beside: Tensor) -> Tensor:
        return self.join(beside + _twice(self.lateral(below), beside))


def _twice(below: Tensor, beside: Tensor) -> Tensor:
    return F.interpolate(below, size=beside.shape[-2:], mode="bilinear", align_corners=False)


def _narrow_levels(widths: tuple[int, ...], n_inputs: int, stride: int) -> nn.ModuleList:
    """Squares of pixels and a convolution; then, at half the resolution each, two."""
    levels = [nn.Sequential(*_convolution(n_inputs, widths[0], stride, stride), *_convolution(widths[0], widths[0]))]
    for before, width in zip(widths, widths[1:]):
        levels.append(nn.Sequential(nn.MaxPool2d(2), *_convolution(before, width), *_convolution(width, width)))
    return nn.ModuleList(levels)


def _convolution(before: int, width: int, side: int = 3, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(before, width, side, stride=stride, padding=(side - stride) // 2)
    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")  # nothing normalises what follows
    return [convolution, nn.ReLU(inplace=True)]


def _vgg_levels(name: str, n_inputs: int, n_levels: int) -> tuple[nn.ModuleList, tuple[int, ...]]:
    """The first levels of a VGG network, all its convolutions between two poolings, and their widths."""
    if name != "vgg19":
        raise ValueError(f"map_backbone: expected 'vgg19' or widths, got {name!r}")
    layers = list(torchvision_models().vgg19(weights=None).features)
    first = layers[0]
    layers[0] = nn.Conv2d(n_inputs, first.out_channels, 3, padding=1)
    levels: list[list[nn.Module]] = [[]]
    for layer in layers:
        if isinstance(layer, nn.MaxPool2d):
            levels.append([])
        if isinstance(layer, nn.Conv2d):
            layer.padding_mode = "replicate"
        levels[-1].append(layer)
    used = levels[:n_levels]
    widths = tuple(next(layer.out_channels for layer in reversed(level) if isinstance(layer, nn.Conv2d)) for level in used)
    return nn.ModuleList(nn.Sequential(*level) for level in used), widths


def _check_classes(classes: Tensor, stride: int) -> None:
    if classes.dtype != torch.uint8 or classes.dim() != 4 or classes.size(1) != len(CLASSES):
        raise ValueError(f"classes: expected uint8 (B, 3, H, W), got {classes.dtype} {tuple(classes.shape)}")
    if classes.size(2) % stride or classes.size(3) % stride:
        raise ValueError(f"classes: expected height and width to be multiples of {stride}, got {tuple(classes.shape[2:])}")
    largest = classes.amax((0, 2, 3)).tolist()
    if any(largest[i] > CLASSES[i] for i in range(3)):
        raise ValueError(f"classes: expected areas, ways and nodes of at most {CLASSES}, got {tuple(largest)}")
