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

from .image_encoder import torchvision_models
from .sizes import EncoderSizes

CLASSES = (8, 11, 34)
"""Areas, ways and nodes, each with 0 for nothing."""
CLASS_NAMES = ("areas", "ways", "nodes")


class MapEncoder(nn.Module):
    """Classes uint8 (B, 3, H, W) -> features (B, matching, H / stride, W / stride), channels last.

    Args:
        sizes: of the networks.

    Raises:
        ValueError: a type, shape or class that is not that of a map, or a size that is no multiple of map_stride.
    """

    def __init__(self, sizes: EncoderSizes) -> None:
        super().__init__()
        self.stride = sizes.map_stride
        self.embeddings = nn.ModuleList(nn.Embedding(n, sizes.embedding) for n in CLASSES)
        n_inputs = len(CLASSES) * sizes.embedding
        if isinstance(sizes.map_backbone, str):
            self.levels, widths = _vgg_levels(sizes.map_backbone, n_inputs, len(sizes.map_decoder) + 1)
        else:
            self.levels, widths = _narrow_levels(sizes.map_backbone, n_inputs, sizes.map_stride), sizes.map_backbone
        padding, norm = ("replicate", True) if isinstance(sizes.map_backbone, str) else ("zeros", False)
        steps = zip((widths[-1], *sizes.map_decoder), reversed(widths[:-1]), sizes.map_decoder)
        self.decoder = nn.ModuleList(_Up(below, beside, width, padding, norm) for below, beside, width in steps)
        self.output = nn.Conv2d(sizes.map_decoder[-1], sizes.matching, 1)

    def forward(self, classes: Tensor) -> Tensor:
        _check_classes(classes, self.stride)
        embedded = [embed(group.int()) for embed, group in zip(self.embeddings, classes.unbind(1))]
        x = torch.cat(embedded, -1).permute(0, 3, 1, 2)  # channels last
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
    """One step up: twice the resolution, joined with what the way down had there."""

    def __init__(self, below: int, beside: int, width: int, padding: str, norm: bool) -> None:
        super().__init__()
        self.join = nn.Sequential(
            nn.Conv2d(below + beside, width, 3, padding=1, padding_mode=padding, bias=not norm),
            *([nn.BatchNorm2d(width)] if norm else []),
            nn.ReLU(inplace=True),
        )

    def forward(self, below: Tensor, beside: Tensor) -> Tensor:
        up = F.interpolate(below, size=beside.shape[-2:], mode="bilinear", align_corners=False)
        return self.join(torch.cat([up, beside], 1))


def _narrow_levels(widths: tuple[int, ...], n_inputs: int, stride: int) -> nn.ModuleList:
    """Squares of pixels and a convolution; then, at half the resolution each, two."""
    first = nn.Conv2d(n_inputs, widths[0], stride, stride=stride)
    levels = [nn.Sequential(first, nn.ReLU(inplace=True), *_convolution(widths[0], widths[0]))]
    for before, width in zip(widths, widths[1:]):
        levels.append(nn.Sequential(nn.MaxPool2d(2), *_convolution(before, width), *_convolution(width, width)))
    network = nn.ModuleList(levels)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    return network


def _convolution(before: int, width: int) -> list[nn.Module]:
    return [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]


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
