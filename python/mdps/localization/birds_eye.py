"""From an image to a view from above that can be laid on a map, and both encoders together.

A column of a level image shows a vertical plane through the camera: a ray, seen from above. For each depth plane, z = cell,
2 cell, ..., the column's pixels are averaged, weighted by how well their depth scores fit z; that gives a view in columns and
depths. It is resampled to a grid of squares with the camera's focal length and centre, and passes a small network that knows
where the camera sees. Interpolation between scales and between columns is a product with a matrix of hat functions,
max(0, 1 - distance): no indices, deterministic on every device, and cheap beside the image network.

Source: Sarlin et al. 2023 (OrienterNet), sections 3.1 and 3.2; the paper, "Measurement Models".
Cost: time O(N h w (bins + C) depth), h x w pixels of features with C channels; memory O(N h w depth), 4 MB an image in FULL.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .geometry import BirdsEyeView, Grid, MapFeatures, centred_map
from .image_encoder import STRIDE, ImageEncoder, Pointwise, normalisation
from .map_encoder import MapEncoder
from .sizes import EncoderSizes

EDGE = 1e-3
"""Pixels beyond the outermost pixels' middles that still count as seen, so that rounding decides nothing."""


class BirdsEyeEncoder(nn.Module):
    """Images uint8 (N, 3, H, W), cameras (N, 4) = fx, fy, cx, cy in pixels -> `BirdsEyeView` of (N, ..., depth, width).

    Images are level (without roll and pitch); pixels have their middles at integers.

    Args:
        sizes: of the networks.
        pretrained: start the image network with weights trained on ImageNet.

    Raises:
        ImportError, RuntimeError, ValueError: see `ImageEncoder`.
        ValueError: images or cameras of another type or shape.
    """

    def __init__(self, sizes: EncoderSizes, *, pretrained: bool = False) -> None:
        super().__init__()
        self.grid, self.scale_range = sizes.grid, sizes.scale_range
        self.network = ImageEncoder(sizes, pretrained=pretrained)
        self.blocks = nn.Sequential(*(_Bottleneck(sizes.latent, sizes.batch_norm) for _ in range(sizes.birds_eye_blocks)))
        self.features = Pointwise(sizes.latent, sizes.matching)
        self.confidence = Pointwise(sizes.latent, 1)

    def forward(self, images: Tensor, camera: Tensor) -> BirdsEyeView:
        features, scores, camera = self._encode(images, camera)
        with torch.autocast(images.device.type, enabled=False):
            planes = plane_scores(scores, camera[:, 1], self.depths(camera), self.scale_range)
            cells, valid = resample_columns(project_columns(features, planes), camera[:, 0], camera[:, 2], self.grid)
        x = self.blocks(cells.permute(0, 3, 1, 2))
        return BirdsEyeView(self.features(x), self.confidence(x).squeeze(1).sigmoid(), valid)

    def depth(self, images: Tensor, camera: Tensor) -> Tensor:
        """Return what the encoder believes of each pixel's depth, (N, ceil(H / 2), ceil(W / 2)) in metres.

        z = f / 2^scale at the expected scale, over the scales that the view from above has planes for: only these are trained.
        """
        _, scores, camera = self._encode(images, camera)
        scales = torch.linspace(*self.scale_range, scores.size(-1), dtype=scores.dtype, device=scores.device)
        focal_length, z, step = camera[:, 1, None], self.depths(camera), scales[1] - scales[0]
        used = (scales > torch.log2(focal_length / z[0]) - step) & (scales < torch.log2(focal_length / z[-1]) + step)
        shares = scores.masked_fill(~used[:, None, None], -torch.inf).softmax(-1)
        return focal_length[..., None] * torch.exp2(-(shares * scales).sum(-1))

    def depths(self, like: Tensor) -> Tensor:
        """How many metres ahead each row of the view lies, (depth), of the type of this tensor: the farthest first."""
        return self.grid.cell * torch.arange(self.grid.depth, 0, -1, dtype=like.dtype, device=like.device)

    def _encode(self, images: Tensor, camera: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features (N, h, w, C), scores of scales (N, h, w, S), and the camera in pixels of the features.

        The middle of such a pixel is that of 2 x 2 pixels of the image. All are of the parameters' type, also under autocast.
        """
        _check_images(images, camera)
        features, scores = self.network(images, camera)
        focal_length, centre = camera.to(self.features.weight).split(2, -1)
        camera = torch.cat([focal_length / STRIDE, (centre + 0.5) / STRIDE - 0.5], -1)
        return features.permute(0, 2, 3, 1).to(camera), scores.permute(0, 2, 3, 1).to(camera), camera


def plane_scores(scores: Tensor, focal_length: Tensor, depths: Tensor, scale_range: tuple[float, float]) -> Tensor:
    """Interpolate scores of scales (N, h, w, S) linearly at the scales of depths (D) -> (N, h, w, D).

    focal_length (N): fy in pixels of the features. Scales outside of the range score as its ends do.
    """
    first, last = scale_range
    n_scales = scores.size(-1)
    scale = torch.log2(focal_length[:, None] / depths)
    position = ((scale - first) * ((n_scales - 1) / (last - first))).clamp(0, n_scales - 1)
    return (scores.flatten(1, 2) @ _hats(position, n_scales).mT).unflatten(1, scores.shape[1:3])


def project_columns(features: Tensor, scores: Tensor) -> Tensor:
    """Average features (N, h, w, C) over each column's rows, weighted by softmax of scores (N, h, w, D) -> (N, D, w, C)."""
    weights = scores.softmax(1).transpose(1, 2)
    return (weights.mT @ features.transpose(1, 2)).transpose(1, 2)


def resample_columns(polar: Tensor, focal_length: Tensor, centre: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Resample columns (N, depth, w, C) to cells (N, depth, width, C), linearly in each row; with what is seen.

    A cell x metres to the right and z ahead appears in the column u = centre + focal_length * x / z; fx and cx (N) in pixels
    of the features. Cells that appear outside of the image are 0; seen, (N, depth, width), is False for them.
    """
    x = torch.arange(grid.width, dtype=polar.dtype, device=polar.device) - grid.width // 2  # in cells, as z
    z = torch.arange(grid.depth, 0, -1, dtype=polar.dtype, device=polar.device)[:, None]
    u = centre[:, None, None] + focal_length[:, None, None] * x / z
    n_columns = polar.size(2)
    seen = (u > -EDGE) & (u < n_columns - 1 + EDGE)
    return _hats(torch.where(seen, u, -2.0), n_columns) @ polar, seen


def _hats(position: Tensor, n: int) -> Tensor:
    """Weights (..., n) of linear interpolation at positions (...) between n values at 0, 1, ...; at most two are not 0."""
    at, weights = position.unsqueeze(-1), position.new_zeros(*position.shape, n)
    low = at.floor().nan_to_num().clamp(0, max(n - 2, 0))
    for place in (low, low + 1)[:n]:
        weights.scatter_(-1, place.long(), (1 - (at - place).abs()).clamp(min=0))
    return weights


class _Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions at a quarter of the width, beside a shortcut; ResNet-101's."""

    def __init__(self, width: int, batch_norm: bool) -> None:
        super().__init__()
        inner = width // 4
        self.branch = nn.Sequential(
            Pointwise(width, inner, bias=False),
            normalisation(inner, batch_norm),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False),
            normalisation(inner, batch_norm),
            nn.ReLU(inplace=True),
            Pointwise(inner, width, bias=False),
            normalisation(width, batch_norm),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.branch(x))


class Encoders(nn.Module):
    """Both encoders: `map` (`MapEncoder`) and `image` (`BirdsEyeEncoder`).

    Args:
        sizes: `FULL`, `SMALL`, or others.
        pretrained: start the image network with weights trained on ImageNet.

    Raises:
        ImportError, RuntimeError, ValueError: see `ImageEncoder`.
    """

    def __init__(self, sizes: EncoderSizes, *, pretrained: bool = False) -> None:
        super().__init__()
        self.sizes = sizes
        self.map = MapEncoder(sizes)
        self.image = BirdsEyeEncoder(sizes, pretrained=pretrained)

    def encode_map(self, classes: Tensor, pixels_per_metre: float) -> MapFeatures:
        """Encode pieces of map, classes uint8 (B, 3, H, W), in the frame whose origin is the middle of each."""
        return centred_map(self.map(classes), pixels_per_metre / self.sizes.map_stride)

    def encode_images(self, images: Tensor, camera: Tensor, *, chunk: int | None = None) -> BirdsEyeView:
        """Encode images uint8 (B, T, 3, H, W) of cameras (B, T, 4) -> BirdsEyeView of (B, T, ...).

        chunk: how many images at once; None: all. Without gradients it bounds the memory, whatever T is.
        """
        if images.dim() != 5 or camera.shape != (*images.shape[:2], 4):
            raise ValueError(
                f"images, camera: expected (B, T, 3, H, W) and (B, T, 4), got {tuple(images.shape)} and {tuple(camera.shape)}"
            )
        n = images.size(0) * images.size(1) if chunk is None else chunk
        if n < 1:
            raise ValueError(f"chunk: expected at least 1, got {chunk}")
        pieces = zip(images.flatten(0, 1).split(n), camera.flatten(0, 1).split(n))
        views = [self.image(some, cameras) for some, cameras in pieces]
        return BirdsEyeView(*(torch.cat(parts).unflatten(0, images.shape[:2]) for parts in zip(*views)))


def _check_images(images: Tensor, camera: Tensor) -> None:
    if images.dtype != torch.uint8 or images.dim() != 4 or images.size(1) != 3:
        raise ValueError(f"images: expected uint8 (N, 3, H, W), got {images.dtype} {tuple(images.shape)}")
    if camera.shape != (images.size(0), 4) or not camera.is_floating_point():
        raise ValueError(f"camera: expected floating point ({images.size(0)}, 4), got {camera.dtype} {tuple(camera.shape)}")
