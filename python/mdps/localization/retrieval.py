"""Retrieval: one vector for an image, vectors for every pixel of a map and four directions, compared by their cosines.

Idea: a network sees the whole map at once and gives each pixel a vector for each of four headings; the image's one vector is
sought among them. Search and loss are those of dense search (volumes.py). The scores between two directions are interpolated
linearly, around the circle. As a filter's likelihood, with dynamics that are the action and noise, it is Retrieval (PF): no
training, nothing learned but the vectors.

Between two directions no score is above both of theirs: the best pose always lies on a quarter turn, however many headings are
looked at, and its heading is off by up to 45 degrees.

Deviation: the authors' program interpolates four directions to 256 as if they lay on a line, without a way from the last to
the first.

Source: the paper, "Retrieval" and "Retrieval (PF)"; Zhu et al. 2021 and Sarlin et al. 2023 (OrienterNet) for the maps.
Cost: 64 products a pixel, and as much for each heading as it has pixels.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .geometry import MapFeatures, centred_map
from .volumes import Region, SearchResult, best_poses, negative_log_prob

DIRECTIONS = 4
"""Direction d is d quarter turns from East, counter-clockwise."""
VECTOR_SIZE = 16
"""Of a vector."""
SCALE = 32.0
"""Logits are cosines times this."""
_CHUNK_BYTES = 2**26
"""Of the slices that are looked at together, unless one is larger."""


class Retrieval(nn.Module):
    """Seeks images on maps by their vectors.

    Args:
        map_trunk: (B, 3, H, W) class indices -> (B, map_channels, H / s, W / s), with any s.
        image_trunk: (B, 3, h, w) -> (B, image_channels, h', w').
        map_channels, image_channels: what the trunks give.
        n_rotations: K, headings that `search` looks at: heading k is 2 pi k / K, counter-clockwise from East.

    Raises:
        ValueError: n_rotations.
    """

    def __init__(
        self,
        map_trunk: nn.Module,
        image_trunk: nn.Module,
        map_channels: int,
        image_channels: int,
        n_rotations: int = 256,
    ) -> None:
        super().__init__()
        if n_rotations < 1:
            raise ValueError(f"n_rotations: expected at least 1, got {n_rotations}")
        self.n_rotations = n_rotations
        self.map_trunk, self.image_trunk = map_trunk, image_trunk
        self.map_head = nn.Sequential(
            nn.Conv2d(map_channels, map_channels, 3, padding=1, padding_mode="replicate"),
            nn.ReLU(),
            nn.Conv2d(map_channels, DIRECTIONS * VECTOR_SIZE, 1),
        )
        self.image_head = nn.Sequential(
            _AverageOfPixels(image_channels, 512), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, VECTOR_SIZE)
        )

    def encode_map(self, classes: Tensor, pixels_per_metre: float) -> MapFeatures:
        """Return the vectors of maps (B, 3, H, W), in the frame whose origin is the maps' middle.

        Returns:
            features (B, 4 * 16, H / s, W / s), four vectors of norm 1 one after the other, at pixels_per_metre / s.

        Raises:
            ValueError: the trunk shrinks height and width by different factors.
        """
        vectors = self.map_head(self.map_trunk(classes))
        height, width = classes.shape[-2:]
        rows, columns = vectors.shape[-2:]
        if height * columns != width * rows:
            shapes = f"{height, width} -> {rows, columns}"
            raise ValueError(f"map_trunk: expected height and width divided by one number, got {shapes}")
        unit = F.normalize(vectors.unflatten(1, (DIRECTIONS, VECTOR_SIZE)), dim=2).flatten(1, 2)
        return centred_map(unit, pixels_per_metre * rows / height)

    def encode_images(self, images: Tensor, *, chunk: int | None = None) -> Tensor:
        """images (..., 3, h, w) -> vectors (..., 16) of norm 1; at most `chunk` images are encoded at once, None: all."""
        flat = images.flatten(0, -4)
        codes = torch.cat([self.image_head(self.image_trunk(part)) for part in flat.split(chunk or max(len(flat), 1))])
        return F.normalize(codes, dim=-1).unflatten(0, images.shape[:-3])

    def search(self, map: MapFeatures, view: Tensor, k: int = 3, region: Region | None = None) -> SearchResult:
        """Return the k best poses, exactly those of non-maximum suppression in the volume of all pixels and K headings.

        Args:
            map: of B places, from `encode_map`, or windows of it.
            view: (B, 16), from `encode_images`.
            k: at least 1. Poses are within 5 m (in x and in y) and 30 degrees of no better one.
            region: where to look, if something is known; what lies outside has probability 0.

        Raises:
            ValueError: shapes, k, the region.
        """
        with torch.no_grad():
            return best_poses(_Directions(map, view, self.n_rotations), map, k, region)

    def loss(self, map: MapFeatures, view: Tensor, truth: Tensor) -> Tensor:
        """Return -log of the probability of true poses (B, 3) among all pixels and the four directions -> (B,), in nats.

        Log-probabilities are interpolated linearly in x, y and heading, which wraps around. A position outside of the map
        counts as the nearest in it; a truth that is not finite has a NaN loss.

        Raises: as `search`.
        """
        return negative_log_prob(_Directions(map, view, DIRECTIONS), map, truth)

    def volume(self, map: MapFeatures, view: Tensor) -> Tensor:
        """Return all logits (B, K, H, W). For small maps."""
        return _Directions(map, view, self.n_rotations).slices(range(self.n_rotations))


class _AverageOfPixels(nn.Linear):
    """A 1 x 1 convolution and ReLU, averaged over all pixels: (N, C, h, w) -> (N, C'), of the parameters' type."""

    def forward(self, x: Tensor) -> Tensor:
        return _MeanActivation.apply(x.flatten(2).mT.to(self.weight.dtype), self.weight, self.bias)


class _MeanActivation(torch.autograd.Function):
    """The mean over P of relu(x weight^T + bias), x (N, P, C) -> (N, C').

    One image at a time, and again for the gradient: activations of all images would go through memory five times, which took a
    third of a training step.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        activations, means = x.new_empty(x.size(1), len(bias)), x.new_empty(len(x), len(bias))
        for image, mean in zip(x, means):
            torch.mean(torch.addmm(bias, image, weight.mT, out=activations).relu_(), 0, out=mean)
        return means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight, bias = ctx.saved_tensors
        of_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        of_weight, of_bias, of_sum = torch.zeros_like(weight), torch.zeros_like(bias), x.new_empty(x.size(1), len(bias))
        for i, out in enumerate(grad.to(x) / x.size(1)):
            torch.addmm(bias, x[i], weight.mT, out=of_sum).gt_(0).mul_(out)
            if of_x is not None:
                torch.mm(of_sum, weight, out=of_x[i])
            of_weight.addmm_(of_sum.mT, x[i])
            of_bias += of_sum.sum(0)
        return of_x, of_weight, of_bias


class RetrievalLikelihood:
    """Weighs particles by how well their places' vectors fit an image's: log w = d / (2 sigma^2), d the logit (protocol
    `mdps.Likelihood`).

    Vectors' products are interpolated bilinearly in position and linearly around the circle of directions. Outside of the
    map there is nothing: d = 0. Observations are vectors of images (B, 16); a filter's are (B, T, 16). The paper writes -d
    for d, which then is a distance.

    Args:
        map: of the B sequences, from `Retrieval.encode_map`.
        sigma: 2 in the paper.

    Raises:
        ValueError: sigma, or the map's shape.
    """

    def __init__(self, map: MapFeatures, sigma: float = 2.0) -> None:
        if not 0 < sigma < math.inf:
            raise ValueError(f"sigma: expected a positive number, got {sigma}")
        _check_map(map)
        self.map, self.sigma = map, sigma

    def __call__(self, particles: Tensor, observation: Tensor) -> Tensor:
        """particles (B, N, 3), observation (B, 16) -> (B, N)."""
        height, width = self.map.features.shape[-2:]
        pixels = self.map.to_pixels(particles)
        scaled = [(2 * pixels[..., i] + 1) / size - 1 for i, size in enumerate((width, height))]
        vectors = F.grid_sample(self.map.features, torch.stack(scaled, -1).unsqueeze(1), align_corners=False).squeeze(2)
        logits = _logits(vectors, observation)
        turn = particles[..., 2] * (DIRECTIONS / (2 * math.pi))
        below = turn.detach().floor()
        share = turn - below
        low, high = (logits.gather(1, ((below.long() + i) % DIRECTIONS).unsqueeze(1)).squeeze(1) for i in range(2))
        return ((1 - share) * low + share * high) / (2 * self.sigma**2)


class GaussianDynamics(nn.Module):
    """Moves particles by the action and Gaussian noise (protocol `mdps.Dynamics`): x_t = x_{t-1} + a_t + noise.

    Args:
        std: of the noise in x, y (metres) and heading (radians): 2.5 m and 15 degrees in the paper.

    Raises:
        ValueError: std.
    """

    std: Tensor
    noise_size = 3

    def __init__(self, std: Sequence[float] = (2.5, 2.5, math.radians(15))) -> None:
        super().__init__()
        if len(std) != 3 or not all(0 <= s < math.inf for s in std):
            raise ValueError(f"std: expected 3 finite numbers, at least 0, got {std}")
        self.register_buffer("std", torch.tensor(std, dtype=torch.get_default_dtype()), persistent=False)

    def forward(self, particles: Tensor, noise: Tensor, action: Tensor | None = None) -> Tensor:
        """particles (B, N, 3), noise (B, N, 3) from N(0, 1), action (B, 3), None for no motion -> (B, N, 3)."""
        moved = particles if action is None else particles + action.unsqueeze(1)
        return moved + noise * self.std


class _Directions:
    """The volume of images' vectors (B, 16) over maps, headings between the four directions interpolated."""

    def __init__(self, map: MapFeatures, codes: Tensor, n_rotations: int) -> None:
        _check_map(map)
        expected = (map.features.size(0), VECTOR_SIZE)
        if codes.shape != expected:
            raise ValueError(f"view: expected vectors {expected}, got {tuple(codes.shape)}")
        self.n_rotations = n_rotations
        self.logits = _logits(map.features, codes)
        self.is_small = True  # the logits of four directions are in memory anyhow

    def chunks(self) -> list[range]:
        slice_bytes = self.logits.numel() * self.logits.element_size() // DIRECTIONS
        step = max(1, _CHUNK_BYTES // slice_bytes)
        return [range(start, min(start + step, self.n_rotations)) for start in range(0, self.n_rotations, step)]

    def slices(self, rotations: Sequence[int], row: int | None = None) -> Tensor:
        logits = self.logits if row is None else self.logits[row : row + 1]
        quarters = [divmod(r * DIRECTIONS, self.n_rotations) for r in rotations]
        low = [d for d, _ in quarters]
        share = torch.tensor([rest / self.n_rotations for _, rest in quarters]).to(logits).view(-1, 1, 1)
        return torch.lerp(logits[:, low], logits[:, [(d + 1) % DIRECTIONS for d in low]], share)


def _logits(vectors: Tensor, codes: Tensor) -> Tensor:
    """Vectors (B, 4 * 16, ...) and those of images (B, 16) -> (B, 4, ...); half types are computed in float32."""
    dtype = torch.promote_types(torch.promote_types(vectors.dtype, codes.dtype), torch.float32)
    with torch.autocast(vectors.device.type, enabled=False):
        apart = vectors.to(dtype).unflatten(1, (DIRECTIONS, VECTOR_SIZE))
        return SCALE * torch.einsum("bde...,be->bd...", apart, codes.to(dtype))


def _check_map(map: MapFeatures) -> None:
    shape = map.features.shape
    if len(shape) != 4 or shape[1] != DIRECTIONS * VECTOR_SIZE or 0 in shape:
        raise ValueError(f"map: expected features (B, {DIRECTIONS * VECTOR_SIZE}, H, W), got {tuple(shape)}")
