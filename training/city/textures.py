"""What a made city is painted with: facades, barriers, billboards and the ground, each at several resolutions.

All are drawn with OpenCV from a generator, so that another seed has other facades. Colours are RGB.
"""

import dataclasses

import cv2
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Colour = tuple[float, float, float]

FACADE_PIXELS = 16  # for each metre, at the finest level
FACADE_WIDTH = 24  # metres; repeated along a wall
GROUND_FLOOR, FLOORS, CORNICE = 4, 9, 1  # metres: drawn once, repeated, at the top
FACADE_HEIGHT = GROUND_FLOOR + FLOORS + CORNICE
FACADE_LEVELS = 5

PLASTER: tuple[Colour, ...] = (
    (222, 205, 170), (205, 186, 160), (196, 150, 120), (170, 90, 75), (226, 222, 212), (188, 192, 196),
    (214, 190, 120), (160, 175, 160), (150, 160, 180), (205, 165, 150), (140, 120, 105), (235, 214, 190),
)  # fmt: skip

BARRIERS = ("fence", "wall", "hedge")
N_FACADES = 24


@dataclasses.dataclass(frozen=True)
class Pyramid:
    """The ground: colours at resolutions that halve; row 0 is north, as in a map."""

    finest: Bytes  # (H, W, 3)
    texels: NDArray[np.uint32]  # all levels, packed
    starts: NDArray[np.int32]  # of each level in texels
    widths: NDArray[np.int32]
    heights: NDArray[np.int32]
    west: float  # edge of the first column
    north: float  # edge of the first row
    size: float  # metres of a texel at the finest level
    detail: Floats  # (256, 256) a brightness around 1 that repeats every 8 m

    @classmethod
    def of(cls, image: Bytes, west: float, north: float, size: float, detail: Floats, n_levels: int = 6) -> "Pyramid":
        levels = _halved(image, n_levels)
        starts = np.cumsum([0] + [level.shape[0] * level.shape[1] for level in levels[:-1]]).astype(np.int32)
        shapes = np.array([level.shape[:2] for level in levels], np.int32)
        texels = np.concatenate([packed(level) for level in levels])
        return cls(image, texels, starts, shapes[:, 1], shapes[:, 0], west, north, size, detail)

    def look_up(self, x: Floats, y: Floats, footprint: Floats) -> Floats:
        """Colours (3, P) at places (P,) in metres, each for a pixel that covers about `footprint` metres."""
        level = _log2(footprint * np.float32(1 / self.size))
        near = np.flatnonzero(level < 0)
        level = np.minimum(np.maximum(level, 0), len(self.starts) - 1)
        column, row = (
            (x - np.float32(self.west)) * np.float32(1 / self.size),
            (np.float32(self.north) - y) * np.float32(1 / self.size),
        )
        width = self.widths[level]
        i = np.minimum(np.maximum(column.astype(np.int32) >> level, 0), width - 1)
        j = np.minimum(np.maximum(row.astype(np.int32) >> level, 0), self.heights[level] - 1)
        colour = unpacked(self.texels[self.starts[level] + j * width + i])
        colour[:, near] = self._interpolated(column[near], row[near])
        fine = self.detail[(y[near] * 32).astype(np.int32) & 255, (x[near] * 32).astype(np.int32) & 255]
        colour[:, near] *= 1 + (fine - 1) * np.exp(footprint[near] * np.float32(-6))
        return colour

    def _interpolated(self, column: Floats, row: Floats) -> Floats:
        """Colours (3, P) of the finest level between texels."""
        n = len(column)
        if n == 0:
            return np.empty((3, 0), np.float32)
        places = np.zeros((2, -(-n // 1024) * 1024), np.float32)  # OpenCV's pictures have less than 32768 columns
        places[0, :n], places[1, :n] = column - 0.5, row - 0.5
        x, y = places.reshape(2, -1, 1024)
        found = np.asarray(cv2.remap(self.finest, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE))
        return found.reshape(-1, 3)[:n].T.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class TexturedWalls:
    """Facade and tint of each wall, and the atlas that the facades are in."""

    atlas: NDArray[np.uint32]
    facade: NDArray[np.int32]  # (W,)
    start: Floats  # (W,) metres along the facade at the wall's start
    tint: Floats  # (3, W)
    has_cornice: NDArray[np.bool_]  # (W,)

    def look_up(self, wall: NDArray[np.int64], along: Floats, height: Floats, below_top: Floats, footprint: Floats) -> Floats:
        """Colours (3, P) at metres along the walls, above ground and below the top."""
        from_base = np.where(height < GROUND_FLOOR, height, GROUND_FLOOR + _modulo(height - GROUND_FLOOR, FLOORS))
        at_top = self.has_cornice[wall] & (below_top < CORNICE)
        from_top = np.where(at_top, below_top, FACADE_HEIGHT - from_base)
        level = np.minimum(np.maximum(_log2(footprint * np.float32(FACADE_PIXELS)), 0), FACADE_LEVELS - 1)
        pixels = FACADE_PIXELS >> level
        width = FACADE_WIDTH * pixels
        column = (_modulo(along + self.start[wall], FACADE_WIDTH) * pixels.astype(np.float32)).astype(np.int32)
        row = (from_top * pixels.astype(np.float32)).astype(np.int32)
        np.minimum(np.maximum(row, 0), FACADE_HEIGHT * pixels - 1, out=row)  # rounding
        np.minimum(column, width - 1, out=column)
        first = self.facade[wall] * np.int32(_FACADE_SIZE) + _FACADE_STARTS[level]
        return unpacked(self.atlas[first + row * width + column]) * self.tint[:, wall]


def _modulo(x: Floats, period: int) -> Floats:
    """Remainder in [0, period], much faster than numpy's."""
    return x - np.floor(x * np.float32(1 / period)) * np.float32(period)


_LEVEL_SIZES = [FACADE_WIDTH * FACADE_HEIGHT * (FACADE_PIXELS >> i) ** 2 for i in range(FACADE_LEVELS)]
_FACADE_STARTS = np.cumsum([0, *_LEVEL_SIZES[:-1]]).astype(np.int32)
_FACADE_SIZE = sum(_LEVEL_SIZES)


@dataclasses.dataclass(frozen=True)
class Sprite:
    """A billboard's picture, packed, at resolutions that halve; 0 where nothing is."""

    levels: tuple[NDArray[np.uint32], ...]

    @classmethod
    def of(cls, image: Bytes) -> "Sprite":
        """From RGBA, whose alpha is whether something is there."""
        levels = []
        for level in _halved(image, 5):
            level[..., 3] = np.where(level[..., 3] > 100, 255, 0)
            levels.append(np.where(level[..., 3] > 0, np.ascontiguousarray(level).view(np.uint32)[..., 0], np.uint32(0)))
        return cls(tuple(levels))

    def look_up(self, across: Floats, down: Floats, n_pixels: float) -> NDArray[np.uint32]:
        """Packed colours at places (P,) of [0, 1) in the picture, drawn about `n_pixels` high; 0 where nothing is."""
        finest = len(self.levels[0])
        level = self.levels[min(max(int(finest / max(n_pixels, 1)).bit_length() - 1, 0), len(self.levels) - 1)]
        rows, columns = level.shape
        row = np.minimum((down * np.float32(rows)).astype(np.int32), rows - 1)
        column = np.minimum((across * np.float32(columns)).astype(np.int32), columns - 1)
        return level[row, column]


def _halved(image: Bytes, n_levels: int) -> list[Bytes]:
    levels = [image]
    for _ in range(n_levels - 1):
        height, width = levels[-1].shape[:2]
        size = (max(1, width // 2), max(1, height // 2))
        levels.append(np.asarray(cv2.resize(levels[-1], size, interpolation=cv2.INTER_AREA), np.uint8))
    return levels


def packed(image: Bytes) -> NDArray[np.uint32]:
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2RGBA)).view(np.uint32).ravel()


def unpacked(texels: NDArray[np.uint32]) -> Floats:
    """Planes (3, P) of red, green and blue."""
    planes = np.empty((3, len(texels)), np.float32)
    mask = np.uint32(255)
    for k, plane in enumerate(planes):
        plane[:] = (texels >> np.uint32(8 * k)) & mask
    return planes


def _log2(x: Floats) -> NDArray[np.int32]:
    """Floor of the logarithm of positive numbers: the exponent of their binary form."""
    return (np.ascontiguousarray(x, dtype=np.float32).view(np.int32) >> 23) - 127


def facade_atlas(rng: np.random.Generator) -> NDArray[np.uint32]:
    """N_FACADES facades of buildings, then the BARRIERS."""
    images = [_facade(rng, PLASTER[i % len(PLASTER)]) for i in range(N_FACADES)]
    images += [_fence(rng), _masonry(rng), _hedge(rng)]
    return np.concatenate([packed(level) for image in images for level in _halved(image, FACADE_LEVELS)])


def _noisy(rng: np.random.Generator, image: Floats, fine: float, coarse: float) -> Bytes:
    """Add noise of texels and of patches."""
    height, width = image.shape[:2]
    patches = cv2.resize(rng.normal(0, coarse, (height // 16 + 1, width // 16 + 1)).astype(np.float32), (width, height))
    grain = rng.normal(0, fine, (height, width)).astype(np.float32)
    return np.asarray(np.clip(image + (patches + grain)[..., None], 0, 255), np.uint8)


def _rectangle(image: Floats, x: float, y: float, width: float, height: float, colour: Colour) -> None:
    """Fill metres from the left and from the top."""
    x0, y0, x1, y1 = (round(v * FACADE_PIXELS) for v in (x, y, x + width, y + height))
    image[max(y0, 0) : y1, max(x0, 0) : x1] = colour


def _facade(rng: np.random.Generator, plaster: Colour) -> Bytes:
    image = np.empty((FACADE_HEIGHT * FACADE_PIXELS, FACADE_WIDTH * FACADE_PIXELS, 3), np.float32)
    base: Colour = tuple(0.72 * c for c in plaster)  # type: ignore[assignment]
    trim: Colour = (236, 232, 224) if rng.random() < 0.6 else (90, 78, 70)
    image[:] = plaster
    image[(CORNICE + FLOORS) * FACADE_PIXELS :] = base
    if rng.random() < 0.35:  # bricks
        image[CORNICE * FACADE_PIXELS :: 4] *= 0.9
    _rectangle(image, 0, 0, FACADE_WIDTH, CORNICE, (118, 70, 58) if rng.random() < 0.6 else (88, 90, 96))
    _rectangle(image, 0, CORNICE - 0.25, FACADE_WIDTH, 0.25, trim)
    cell = float(rng.choice([2.4, 3.0, 4.0]))
    width, height = cell * float(rng.uniform(0.38, 0.6)), float(rng.uniform(1.4, 2.0))
    balconies, lines = rng.random() < 0.3, rng.random() < 0.5
    n_cells = round(FACADE_WIDTH / cell)
    for storey in range(FLOORS // 3):
        top = CORNICE + 3 * storey + 0.6
        if lines:
            _rectangle(image, 0, top + 2.2, FACADE_WIDTH, 0.14, trim)
        for i in range(n_cells):
            x = i * cell + (cell - width) / 2
            _window(rng, image, x, top, width, height, trim)
            if balconies and i % 2 == 1:
                _rectangle(image, x - 0.3, top + height - 0.5, width + 0.6, 0.9, (100, 100, 104))
    _street_level(rng, image, cell, n_cells, width, trim)
    return _noisy(rng, image, 4, 5)


def _window(rng: np.random.Generator, image: Floats, x: float, y: float, width: float, height: float, trim: Colour) -> None:
    glass = rng.choice(np.array([[52, 62, 78], [70, 84, 104], [40, 44, 52], [128, 146, 168], [178, 170, 150]]))
    _rectangle(image, x - 0.12, y - 0.12, width + 0.24, height + 0.24, trim)
    _rectangle(image, x, y, width, height, tuple(glass))
    _rectangle(image, x + width / 2 - 0.04, y, 0.08, height, trim)


def _street_level(rng: np.random.Generator, image: Floats, cell: float, n_cells: int, width: float, trim: Colour) -> None:
    top = CORNICE + FLOORS
    shop = rng.random() < 0.4
    _rectangle(image, 0, top, FACADE_WIDTH, 0.2, trim)
    door: Colour = tuple(rng.uniform(40, 130, 3))
    awning: Colour = tuple(rng.uniform(60, 220, 3))
    for i in range(n_cells):
        x = i * cell
        if i % 4 == 1:
            _rectangle(image, x + cell / 2 - 0.75, top + 1.4, 1.5, 2.6, trim)
            _rectangle(image, x + cell / 2 - 0.6, top + 1.55, 1.2, 2.45, door)
        elif shop:
            _rectangle(image, x + 0.15, top + 0.7, cell - 0.3, 0.5, awning)
            _rectangle(image, x + 0.25, top + 1.2, cell - 0.5, 2.2, (66, 78, 92))
        else:
            _window(rng, image, x + (cell - width) / 2, top + 1.2, width, 1.5, trim)


def _fence(rng: np.random.Generator) -> Bytes:
    image = np.full((FACADE_HEIGHT * FACADE_PIXELS, FACADE_WIDTH * FACADE_PIXELS, 3), (150, 112, 72), np.float32)
    image[:, ::4] = (84, 60, 38)
    image *= np.repeat(rng.uniform(0.85, 1.1, (1, image.shape[1] // 4, 1)), 4, 1)  # planks
    for height in (0.35, 0.95):
        _rectangle(image, 0, FACADE_HEIGHT - height, FACADE_WIDTH, 0.1, (112, 82, 52))
    return _noisy(rng, image, 6, 4)


def _masonry(rng: np.random.Generator) -> Bytes:
    image = np.full((FACADE_HEIGHT * FACADE_PIXELS, FACADE_WIDTH * FACADE_PIXELS, 3), (150, 140, 128), np.float32)
    rows, columns = image.shape[0] // 8, image.shape[1] // 12
    stones = rng.normal(0, 14, (rows, columns)).astype(np.float32)
    image += np.kron(stones, np.ones((8, 12), np.float32))[..., None]
    image[::8] *= 0.75
    image[:, ::12] *= 0.85
    return _noisy(rng, image, 5, 4)


def _hedge(rng: np.random.Generator) -> Bytes:
    image = np.full((FACADE_HEIGHT * FACADE_PIXELS, FACADE_WIDTH * FACADE_PIXELS, 3), (52, 92, 38), np.float32)
    return _noisy(rng, image, 18, 14)


GROUND: dict[str, tuple[Colour, float]] = {
    "paving": ((164, 158, 148), 5), "building": ((120, 116, 112), 3), "parking": ((108, 108, 112), 4),
    "playground": ((196, 150, 104), 7), "grass": ((104, 146, 62), 12), "park": ((84, 128, 56), 15),
    "forest": ((66, 82, 44), 16), "water": ((72, 108, 142), 5), "road": ((84, 84, 88), 4), "path": ((188, 172, 146), 7),
    "cycleway": ((158, 86, 74), 4), "busway": ((112, 84, 80), 4), "kerb": ((206, 204, 198), 3), "marking": ((236, 236, 232), 3),
}  # fmt: skip
"""Colour of each kind of ground and how much it varies."""


def ground_colours(rng: np.random.Generator, kinds: Bytes) -> Bytes:
    """Colours (H, W, 3) of a raster of kinds: value = place in GROUND."""
    height, width = kinds.shape
    noise = rng.normal(0, 16, (512, 512)) * 0.6
    for cell in (8, 32):
        noise += cv2.resize(rng.normal(0, 16, (512 // cell, 512 // cell)), (512, 512), interpolation=cv2.INTER_CUBIC) * 0.7
    noise = np.clip(noise + 48, 0, 96).astype(np.int16)
    change = (np.arange(97) - 48)[:, None] / 16
    shades = np.stack(
        [np.clip(np.array(colour) + change * spread, 0, 255).astype(np.uint8) for colour, spread in GROUND.values()]
    )
    image = np.empty((height, width, 3), np.uint8)
    for top in range(0, height, 512):
        for left in range(0, width, 512):
            part = kinds[top : top + 512, left : left + 512]
            image[top : top + 512, left : left + 512] = shades[part, noise[: part.shape[0], : part.shape[1]]]
    return image


def ground_detail(rng: np.random.Generator) -> Floats:
    """A brightness (256, 256) around 1 that repeats."""
    noise = rng.normal(0, 1, (256, 256)).astype(np.float32)
    noise = 0.5 * noise + 0.5 * np.asarray(cv2.GaussianBlur(np.tile(noise, (3, 3)), (0, 0), 1.5))[256:512, 256:512] * 4
    return np.clip(1 + 0.09 * noise, 0.7, 1.3).astype(np.float32)
