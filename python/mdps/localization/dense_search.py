"""Dense search: how well a view from above fits a map at every pixel and every one of K headings.

Idea: at one heading, the scores at all pixels are a correlation of the map with the view, rotated onto the map's pixels:
products of spectra. The map's spectrum is computed once; headings come in chunks, and what is wanted of them, the best poses
or the log-sum-exp, is gathered as they pass (volumes.py), so that K volumes are never in memory. The spectrum of a view
turned by half a turn is the conjugate of its own: each serves two headings.

Deviations from OrienterNet: around the map there is nothing, as in `align`, where OrienterNet repeats the border; a rotated
view keeps its corners; and the valid cells that a score is divided by are counted in fractions at the edge of what is seen,
where OrienterNet leaves out those that are not wholly seen.

Source: Sarlin et al. 2023 (OrienterNet), section 3.3; the paper, "Dense Search" and "Computational Requirements".
Cost: for each heading (C / 2 + 1) FFTs of map and view, O(K C (H + R) (W + R) log), R = the view's reach in pixels.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .geometry import BirdsEyeView, Grid, MapFeatures
from .volumes import Region, SearchResult, best_poses, negative_log_prob

_CHUNK_BYTES = 2**24
"""Of the spectra of the views that are rotated together, unless those of one rotation are larger."""
_KEPT_BYTES = 2**29
"""Of the spectra of all rotated views, if they may be kept for the gradient."""


class DenseSearch(nn.Module):
    """Scores views at every pixel of a map and at K headings. Heading k is 2 pi k / K, counter-clockwise from East.

    At a pixel and a heading that is a multiple of a quarter turn the score is that of `align`; at others the view is
    resampled, bilinearly, where `align` resamples the map. Logits are scores times a learned temperature.

    Args:
        grid: of the views; a cell must be as large as a pixel of the maps.
        n_rotations: K, even. The attribute may be changed at any time: 64 to train and 256 to evaluate, in the paper.

    Raises:
        ValueError: n_rotations, whenever it is set.
    """

    def __init__(self, grid: Grid, n_rotations: int = 64) -> None:
        super().__init__()
        self.grid, self.n_rotations = grid, n_rotations
        self.log_temperature = nn.Parameter(torch.zeros(()))

    @property
    def n_rotations(self) -> int:
        """K."""
        return self._n_rotations

    @n_rotations.setter
    def n_rotations(self, n: int) -> None:
        if n < 2 or n % 2:
            raise ValueError(f"n_rotations: expected an even number, at least 2, got {n}")
        self._n_rotations = n

    def search(self, map: MapFeatures, view: BirdsEyeView, k: int = 3, region: Region | None = None) -> SearchResult:
        """Return the k best poses, no two of them within 5 m (in x and in y) and 30 degrees of each other; no gradient.

        They are exactly those of non-maximum suppression in the whole volume.

        Args:
            map: of B places.
            view: (B, C, depth, width).
            k: at least 1.
            region: where to look, if something is known; what lies outside has probability 0.

        Raises:
            TypeError: dtypes. ValueError: shapes, k, the region, or a map of another resolution.

        Memory beside the map: its spectrum, and a few times that of a rotated view, or 16 MB if that is more.
        """
        with torch.no_grad():
            return best_poses(_Correlation(self, map, view), map, k, region)

    def loss(self, map: MapFeatures, view: BirdsEyeView, truth: Tensor) -> Tensor:
        """Return -log of the probability of true poses (B, 3) -> (B,), in nats.

        The log-probability, normalised over all cells, is interpolated linearly in x, y and heading, which wraps around. A
        position outside of the map counts as the nearest in it; a truth that is not finite has a NaN loss. Gradients reach
        the map, the view and the temperature; for these, slices are kept where the spectra of all K views have at most 512 MB,
        else computed again, so that memory stays that of `search`.

        Raises: as `search`.
        """
        return negative_log_prob(_Correlation(self, map, view), map, truth)

    def volume(self, map: MapFeatures, view: BirdsEyeView) -> Tensor:
        """Return all logits (B, K, H, W): 4 B K H W bytes, and more if gradients are wanted. For small maps."""
        correlation = _Correlation(self, map, view)
        chunks = correlation.chunks()
        back = torch.tensor([r for rotations in chunks for r in rotations]).argsort()
        return torch.cat([correlation.slices(rotations) for rotations in chunks], 1)[:, back.to(map.features.device)]


class _Correlation:
    """The volume of views (B, ...) over maps."""

    def __init__(self, search: DenseSearch, map: MapFeatures, view: BirdsEyeView) -> None:
        self.n_rotations, self.temperature = search.n_rotations, search.log_temperature.exp()
        features, self.template, self.valid = _check(search.grid, map, view)
        self.grid, (self.height, self.width) = search.grid, features.shape[-2:]
        self.reach = math.ceil(math.hypot(self.grid.depth + 1, self.grid.width // 2 + 1)) - 1
        # Pixels farther from each other than the map is large never meet.
        self.reach_v, self.reach_u = min(self.reach, self.height - 1), min(self.reach, self.width - 1)
        self.size = _fast_length(self.height + self.reach_v), _fast_length(self.width + self.reach_u)
        self.spectrum = torch.fft.rfft2(features, s=self.size).mT.contiguous()  # columns first, as all spectra here
        self._bytes = self.spectrum.numel() * self.spectrum.element_size()
        self.is_small = self.n_rotations // 2 * self._bytes <= _KEPT_BYTES

    def chunks(self) -> list[list[int]]:
        half = self.n_rotations // 2
        step = max(1, _CHUNK_BYTES // self._bytes)
        firsts = [range(start, min(start + step, half)) for start in range(0, half, step)]
        return [[*first, *(r + half for r in first)] for first in firsts]

    def slices(self, rotations: Sequence[int], row: int | None = None) -> Tensor:
        half = self.n_rotations // 2
        firsts = sorted({r % half for r in rotations})
        rows = slice(None) if row is None else slice(row, row + 1)
        turns = [self._turn(r) for r in firsts]
        template, valid = self.template[rows].flatten(2), self.valid[rows].flatten(1)
        kernels = _TurnedSpectra.apply(template.flatten(0, 1), turns, (2 * self.reach_v + 1, *self.size))
        kernels = kernels.unflatten(1, template.shape[:2]).transpose(0, 1)
        count = (valid.unsqueeze(1) * torch.stack([turn.total for turn in turns])).sum(-1).clamp_min(1)
        back, ahead = _Products.apply(kernels, self.spectrum[rows])
        back, ahead = self._crop(back, self.reach_v, self.reach_u), self._crop(ahead, -self.reach_v, -self.reach_u)
        places = {r: i for i, r in enumerate([*firsts, *(r + half for r in firsts)])}
        logits = torch.cat([ahead, back], 1) * (self.temperature / count).repeat(1, 2)[..., None, None]
        return logits[:, [places[r] for r in rotations]]

    def _crop(self, product: Tensor, first_v: int, first_u: int) -> Tensor:
        """Signals of spectra (..., Nu, Nv), from this row and column on, which are counted around: (..., H, W)."""
        rows = torch.fft.ifft(product).roll(-first_v, -1)[..., : self.height].mT
        return torch.fft.irfft(rows, n=self.size[1]).roll(-first_u, -1)[..., : self.width]

    def _turn(self, rotation: int) -> "_Turn":
        """How pixels around the vehicle see a view that is turned to a heading: by bilinear interpolation."""
        theta = math.pi / 2 - 2 * math.pi * rotation / self.n_rotations
        cosine, sine = math.cos(theta), math.sin(theta)
        apart = torch.arange(-self.reach, self.reach + 1, dtype=torch.float64)
        u, v = apart, apart.unsqueeze(-1)
        columns, lines = u * cosine + v * sine + self.grid.origin[0], v * cosine - u * sine + self.grid.origin[1]
        near = (columns > -1) & (columns < self.grid.width) & (lines > -1) & (lines < self.grid.depth)
        pixel_v, pixel_u = (x - self.reach for x in near.nonzero(as_tuple=True))
        cells, shares = _cells_around(columns[near], lines[near], self.grid)
        total = torch.zeros(self.grid.depth * self.grid.width, dtype=torch.float64)
        total.index_add_(0, cells.flatten(), shares.flatten())
        meets = (pixel_v.abs() <= self.reach_v) & (pixel_u.abs() <= self.reach_u)
        pixels = (pixel_v + self.reach_v) * self.size[1] + pixel_u + self.reach_u
        place = self.template.device
        return _Turn(
            pixels[meets].to(place), cells[:, meets].to(place), shares[:, meets].to(self.template), total.to(self.template)
        )


class _Turn(NamedTuple):
    """Where P pixels of a plane get their values from, as a view turned to a heading has them there."""

    pixels: Tensor
    """(P), numbers in the plane."""
    cells: Tensor
    """(4, P), of the view."""
    shares: Tensor
    """(4, P), of each of these cells."""
    total: Tensor
    """(depth * width): what each cell has in all pixels, those outside of the plane too."""


def _cells_around(columns: Tensor, lines: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Numbers of the four cells around places (P) in a view, and their weights in bilinear interpolation: (4, P) each."""
    left, top = columns.floor(), lines.floor()
    cells, shares = [], []
    for j, i in ((left, top), (left + 1, top), (left, top + 1), (left + 1, top + 1)):
        inside = (j >= 0) & (j < grid.width) & (i >= 0) & (i < grid.depth)
        cells.append(torch.where(inside, i * grid.width + j, 0).long())
        shares.append(torch.where(inside, (1 - (columns - j).abs()) * (1 - (lines - i).abs()), 0.0))
    return torch.stack(cells), torch.stack(shares)


class _TurnedSpectra(torch.autograd.Function):
    """Spectra (R, N, Nu / 2 + 1, Nv), columns first, of views (N, depth * width), turned and put into the first lines of planes
    of zeros; size is the number of these lines, Nv and Nu.

    Only pixels that see something are touched, and lines that see nothing at any heading are not transformed. The derivative
    is a transform from spectra to real numbers, half of autograd's, which goes over complex ones.
    """

    @staticmethod
    def forward(ctx: Any, views: Tensor, turns: Sequence[_Turn], size: tuple[int, int, int]) -> Tensor:
        ctx.size, ctx.n_cells = size, views.size(1)
        ctx.save_for_backward(*(x for turn in turns for x in turn[:3]))
        n_lines, n_v, n_u = size
        planes = views.new_zeros(len(turns), len(views), n_lines * n_u)
        for plane, turn in zip(planes, turns):
            values = views.new_zeros(len(views), len(turn.pixels))
            for cells, share in zip(turn.cells, turn.shares):
                values.addcmul_(views.index_select(1, cells), share)
            plane.index_copy_(1, turn.pixels, values)
        lines = torch.fft.rfft(planes.unflatten(2, (n_lines, n_u)))
        columns = lines.new_zeros(*lines.shape[:2], lines.size(3), n_v)
        columns[..., :n_lines] = lines.mT
        return torch.fft.fft(columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (n_lines, _, n_u), saved = ctx.size, ctx.saved_tensors
        once = torch.full((grad.size(2),), 0.5, dtype=grad.real.dtype, device=grad.device)
        once[0] = once[-1] = 1.0  # the transform counts all others twice
        lines = torch.fft.ifft(grad, norm="forward")[..., :n_lines].mT * once
        of_planes = torch.fft.irfft(lines, n=n_u, norm="forward").flatten(2)
        of_views = of_planes.new_zeros(of_planes.size(1), ctx.n_cells)
        for of_plane, pixels, cells, shares in zip(of_planes, saved[::3], saved[1::3], saved[2::3]):
            of_values = of_plane.index_select(1, pixels)
            for these, share in zip(cells, shares):
                of_views.index_add_(1, these, of_values * share)
        return of_views, None, None


class _Products(torch.autograd.Function):
    """Products of views' spectra (B, R, C, ...) and of their conjugates with maps' spectra (B, C, ...), summed over C.

    Twice as fast as autograd's, which keeps the products of all channels.
    """

    @staticmethod
    def forward(ctx: Any, kernels: Tensor, spectrum: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(kernels, spectrum)
        return _sum_of_products(kernels, spectrum), _sum_of_products(kernels, spectrum.conj()).conj()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, back: Tensor, ahead: Tensor) -> tuple[Tensor | None, Tensor | None]:
        kernels, spectrum = ctx.saved_tensors
        of_kernels = of_spectrum = None
        if ctx.needs_input_grad[0]:
            of_kernels = torch.empty_like(kernels)
            for c, there in enumerate(spectrum.unsqueeze(1).unbind(2)):
                torch.mul(back, there.conj(), out=of_kernels[:, :, c]).addcmul_(ahead.conj(), there)
        if ctx.needs_input_grad[1]:
            pairs = (back * k.conj() + ahead * k for k in kernels.unbind(2))
            of_spectrum = torch.stack([pair.sum(1) for pair in pairs], 1)
        return of_kernels, of_spectrum


def _sum_of_products(kernels: Tensor, spectrum: Tensor) -> Tensor:
    """(B, R, C, ...), (B, C, ...) -> (B, R, ...)."""
    total = kernels[:, :, 0] * spectrum[:, :1]
    for c in range(1, spectrum.size(1)):
        total.addcmul_(kernels[:, :, c], spectrum[:, c : c + 1])
    return total


def _check(grid: Grid, map: MapFeatures, view: BirdsEyeView) -> tuple[Tensor, Tensor, Tensor]:
    """Features of the map, and of the views with confidence and 0 where nothing is seen, and what is seen, as numbers."""
    features, seen = map.features, view.features
    for name, x in (("map", features), ("view", seen)):
        if not x.is_floating_point():
            raise TypeError(f"{name}: expected floating-point features, got {x.dtype}")
    if abs(grid.cell * map.pixels_per_metre - 1) > 1e-6:
        raise ValueError(f"map: expected pixels of {grid.cell} m, the view's cells, got {1 / map.pixels_per_metre} m")
    if features.dim() != 4 or 0 in features.shape:
        raise ValueError(f"map: expected features (B, C, H, W), got {tuple(features.shape)}")
    expected = (*features.shape[:2], grid.depth, grid.width)
    if seen.shape != expected:
        raise ValueError(f"view: expected features {expected}, got {tuple(seen.shape)}")
    for name, x in (("confidence", view.confidence), ("valid", view.valid)):
        if x.shape != (expected[0], *expected[2:]):
            raise ValueError(f"view: expected {name} {(expected[0], *expected[2:])}, got {tuple(x.shape)}")
    dtype = torch.promote_types(torch.promote_types(features.dtype, seen.dtype), torch.float32)
    valid = view.valid.unsqueeze(1)
    confidence = torch.where(valid, view.confidence.unsqueeze(1), 0.0)
    return features.to(dtype), torch.where(valid, seen, 0.0).to(dtype) * confidence.to(dtype), view.valid.to(dtype)


def _fast_length(n: int) -> int:
    """The smallest even number from n on whose only prime factors are 2, 3, 5 and 7."""
    while True:
        n += n % 2
        rest = n
        for prime in (2, 3, 5, 7):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return n
        n += 2
