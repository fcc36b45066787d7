"""From an image to features and to scores of each pixel's depth: a residual network and a feature pyramid.

Depth is scored as a scale, log2(f / z), of which an image tells more than of depth itself: a door of so many pixels is as far
away as the focal length makes it. The features of all resolutions are brought to the finest one, half of the image's, and
added up.

Source: Sarlin et al. 2023 (OrienterNet), section 3.1; the paper, "Measurement Models".
Deviation: the narrow network, and its input of rays, are our own (see `sizes.SMALL`).
Cost: FULL 43.2 million parameters.
"""

import socket
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .sizes import EncoderSizes

STRIDE = 2
"""Pixels of the image to one of its features, along each side."""
MEAN = (0.485, 0.456, 0.406)
STANDARD_DEVIATION = (0.229, 0.224, 0.225)
"""Of ImageNet's images, which pretrained networks know."""
RESNETS = {name: f"ResNet{name.removeprefix('resnet')}_Weights" for name in ("resnet18", "resnet34", "resnet50", "resnet101")}
"""Networks of torchvision and the names of their weights."""
TIMEOUT = 30.0
"""Seconds that a download may be silent."""


class ImageEncoder(nn.Module):
    """Images uint8 (N, 3, H, W) -> features (N, latent, ceil(H / 2), ceil(W / 2)) and scores of scales (N, scale_bins, ...).

    Args:
        sizes: of the networks.
        pretrained: start torchvision's network with weights trained on ImageNet.

    Raises:
        ImportError: the sizes name a network of torchvision, which cannot be imported.
        RuntimeError: pretrained weights cannot be had; the message names file and address.
        ValueError: pretrained weights for a narrow network, or images of another type or shape.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, sizes: EncoderSizes, *, pretrained: bool = False) -> None:
        super().__init__()
        n_inputs = 5 if sizes.rays else 3
        self.rays = sizes.rays
        if isinstance(sizes.image_backbone, str):
            self.levels, widths = _resnet_levels(sizes.image_backbone, pretrained)
        elif pretrained:
            raise ValueError("pretrained: expected False for a narrow image network, which has no pretrained weights")
        else:
            self.levels, widths = _narrow_levels(sizes.image_backbone, n_inputs, sizes.batch_norm), sizes.image_backbone
        self.laterals = nn.ModuleList(Pointwise(width, sizes.latent) for width in widths)
        self.output = nn.Conv2d(sizes.latent, sizes.latent, 3, padding=1)
        self.scales = Pointwise(sizes.latent, sizes.scale_bins)
        self.register_buffer("mean", 255 * torch.tensor(MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", 255 * torch.tensor(STANDARD_DEVIATION).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor, camera: Tensor) -> tuple[Tensor, Tensor]:
        x = (images - self.mean) / self.deviation
        if self.rays:
            x = torch.cat([x, ray_directions(camera, *images.shape[-2:])], 1)
        x = x.contiguous(memory_format=torch.channels_last)
        levels = []
        for level, lateral in zip(self.levels, self.laterals):
            x = level(x)
            levels.append(lateral(x))
        x = levels.pop()
        while levels:
            finer = levels.pop()
            x = finer + F.interpolate(x, size=finer.shape[-2:], mode="bilinear", align_corners=False)
        features = self.output(x)
        return features, self.scales(features)


class Pointwise(nn.Linear):
    """A 1 x 1 convolution, (N, C, H, W) -> (N, C', H, W): one matrix product where memory is channels last, as it is here."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut; ResNet-18's."""

    def __init__(self, before: int, width: int, stride: int, batch_norm: bool) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False),
            normalisation(width, batch_norm),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            normalisation(width, batch_norm),
        )
        same = stride == 1 and before == width
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, width, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


def normalisation(width: int, batch_norm: bool) -> nn.Module:
    """BatchNorm, or GroupNorm of eight channels each."""
    return nn.BatchNorm2d(width) if batch_norm else nn.GroupNorm(max(width // 8, 1), width)


def ray_directions(camera: Tensor, height: int, width: int) -> Tensor:
    """Where each pixel looks, (N, 2, height, width): x / z to the right and y / z down, of cameras (N, 4) = fx, fy, cx, cy."""
    fx, fy, cx, cy = camera[:, :, None, None].unbind(1)
    u = torch.arange(width, dtype=camera.dtype, device=camera.device)
    v = torch.arange(height, dtype=camera.dtype, device=camera.device)[:, None]
    x, y = (u - cx) / fx, (v - cy) / fy
    return torch.stack([x.expand(-1, height, -1), y.expand(-1, -1, width)], 1)


def torchvision_models() -> Any:
    """Return the module torchvision.models.

    Raises:
        ImportError: torchvision is not there, or was built for another torch.
    """
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # RuntimeError: its operators do not fit this torch
        raise ImportError(
            f"this image network needs torchvision as built for torch {torch.__version__}: "
            f"pip install torchvision, from where torch came ({error})"
        ) from error
    return models


def _narrow_levels(widths: tuple[int, ...], n_inputs: int, batch_norm: bool) -> nn.ModuleList:
    """One block at each resolution, each half of that before, beginning with half of the image's."""
    stem = nn.Sequential(
        nn.Conv2d(n_inputs, widths[0], 3, stride=2, padding=1, bias=False),
        normalisation(widths[0], batch_norm),
        nn.ReLU(inplace=True),
        ResidualBlock(widths[0], widths[0], 1, batch_norm),
    )
    return nn.ModuleList([stem, *(ResidualBlock(before, width, 2, batch_norm) for before, width in pairwise(widths))])


def _resnet_levels(name: str, pretrained: bool) -> tuple[nn.ModuleList, tuple[int, ...]]:
    """torchvision's network, cut where its resolution halves, and the widths there."""
    if name not in RESNETS:
        raise ValueError(f"image_backbone: expected one of {', '.join(RESNETS)}, or widths, got {name!r}")
    models = torchvision_models()
    make = getattr(models, name)
    network = _load(make, getattr(models, RESNETS[name]).DEFAULT) if pretrained else make()
    stem = nn.Sequential(network.conv1, network.bn1, network.relu)
    second = nn.Sequential(network.maxpool, network.layer1)
    expansion = network.fc.in_features // 512
    widths = (64, *(expansion * width for width in (64, 128, 256, 512)))
    return nn.ModuleList([stem, second, network.layer2, network.layer3, network.layer4]), widths


def _load(make: Any, weights: Any) -> Any:
    """Make a network with these weights, downloaded unless they are in torch's cache."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        return make(weights=weights)
    except (OSError, RuntimeError) as error:  # no network; a broken file
        folder = f"{torch.hub.get_dir()}/checkpoints"
        raise RuntimeError(
            f"pretrained: cannot load {weights.url.rsplit('/', 1)[1]} ({error}); get {weights.url} "
            f"and put it into {folder}, or train from scratch with pretrained=False"
        ) from error
    finally:
        socket.setdefaulttimeout(before)
