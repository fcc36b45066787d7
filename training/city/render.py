"""Images of a made city: upright walls, flat ground and billboards, seen by a pinhole camera, with exact depth.

Idea. In a frame that shares the camera's position and heading but stands upright, a pixel's ray is (a, s): metres to the right
and metres up for each metre forward. An upright wall is a line of the plan, so 1 / forward distance = p + q a along it, and
between two neighbouring ends of walls (an interval of a) the order of the walls does not change: sort once for each
interval, then each pixel takes the first wall of its interval's list that its ray does not pass over. Roll and pitch only say
which (a, s) a pixel has, so nothing is approximated, whatever the camera's attitude.

Walls must not cross each other (`scene.py` splits them where they do). Walls of buildings are seen from outside alone.

Cost: about 10 ms for 256x256 pixels on one core, most of it in fifty numpy operations on all pixels.
"""

import dataclasses

import cv2
import numpy as np
from numpy.typing import NDArray

from city.textures import Pyramid, Sprite, TexturedWalls, unpacked

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

FAR = 240.0
"""Metres: what is farther away is not drawn but for ground and sky."""

NEAR = 0.05
HAZE = 260.0
"""Metres after which haze has taken 63 % of a colour."""


@dataclasses.dataclass(frozen=True)
class Camera:
    """A pinhole camera: focal length and centre in pixels (integer = centre of a pixel, as OpenCV has it), and its pose."""

    width: int
    height: int
    focal: float
    centre: tuple[float, float]
    position: Doubles  # (3,) x East, y North, z above ground, metres
    rotation: Doubles  # (3, 3) camera to world


@dataclasses.dataclass(frozen=True)
class World:
    """What is drawn. Metres; walls run from `start` to `end` with the outside on the right-hand side."""

    start: Doubles  # (W, 2)
    end: Doubles  # (W, 2)
    top: Floats  # (W,) height
    one_sided: NDArray[np.bool_]  # (W,) a building: not seen from within
    walls: TexturedWalls
    ground: Pyramid
    spots: Doubles  # (S, 2) where billboards stand
    spot_sprite: NDArray[np.int64]  # (S,)
    spot_size: Floats  # (S, 2) width, height
    sprites: tuple[Sprite, ...]


class Surroundings:
    """The part of a world that can be seen from a place; kept for each square of the plan, since cameras move little."""

    CELL = 40.0

    def __init__(self, world: World) -> None:
        self.world = world
        self._parts: dict[tuple[int, int], World] = {}

    def __call__(self, place: Doubles) -> World:
        i, j = (int(v) for v in np.floor(place / self.CELL))
        if (i, j) not in self._parts:
            self._parts[i, j] = self._part((np.array([i, j]) + 0.5) * self.CELL)
        return self._parts[i, j]

    def _part(self, middle: Doubles) -> World:
        w = self.world
        reach = FAR + self.CELL
        half = (w.end - w.start) / 2
        walls = np.flatnonzero(np.hypot(*(w.start + half - middle).T) - np.hypot(*half.T) < reach)
        spots = np.flatnonzero(np.hypot(*(w.spots - middle).T) < reach)
        textured = dataclasses.replace(
            w.walls,
            facade=w.walls.facade[walls],
            start=w.walls.start[walls],
            tint=np.ascontiguousarray(w.walls.tint[:, walls]),
            has_cornice=w.walls.has_cornice[walls],
        )
        return dataclasses.replace(
            w,
            start=w.start[walls],
            end=w.end[walls],
            top=w.top[walls],
            one_sided=w.one_sided[walls],
            walls=textured,
            spots=w.spots[spots],
            spot_sprite=w.spot_sprite[spots],
            spot_size=w.spot_size[spots],
        )


@dataclasses.dataclass(frozen=True)
class Light:
    """Of a recording: where the sun is, the colour of light and sky, the sensor's noise."""

    sun: float = 0.7  # direction in the plan, radians from East
    colour: tuple[float, float, float] = (1.0, 1.0, 1.0)
    sky: tuple[float, float, float] = (120.0, 160.0, 215.0)
    horizon: tuple[float, float, float] = (205.0, 215.0, 225.0)
    noise: float = 2.0  # standard deviation, grey levels


@dataclasses.dataclass(frozen=True)
class Rays:
    """Each pixel's ray in the upright frame: right, up and optical depth for each metre forward; (P,)."""

    a: Floats
    s: Floats
    forward: Floats  # forward metres for each metre of depth
    right: Doubles  # the frame's axes in the plan
    ahead: Doubles


@dataclasses.dataclass(frozen=True)
class Visible:
    """The walls in view, in the upright frame."""

    index: NDArray[np.int64]  # (V,) numbers of the world's walls
    p: Doubles  # 1 / forward distance = p + q a
    q: Doubles
    low: Doubles  # the a of their ends
    high: Doubles


def render(world: World, camera: Camera, light: Light | None = None, seed: int = 0) -> tuple[NDArray[np.uint8], Floats]:
    """Draw what the camera sees.

    Returns:
        image: (height, width, 3) RGB.
        depth: (height, width) metres along the optical axis; inf is sky.
    """
    light = light or Light()
    rays = rays_of(camera)
    wall, inverse = first_hits(world, camera, rays)
    sky = inverse == 0
    of_wall = wall >= 0
    ground, walls = np.flatnonzero(~(sky | of_wall)), np.flatnonzero(of_wall)
    colours = np.empty((3, wall.size), np.float32)
    pixels = np.flatnonzero(sky)
    colours[:, pixels] = _sky(rays, pixels, light)
    colours[:, ground] = _hazy(_ground(world, camera, rays, inverse, ground), inverse[ground], light)
    colours[:, walls] = _hazy(_walls(world, camera, rays, inverse, wall, walls, light), inverse[walls], light)
    shape = (camera.height, camera.width)
    _billboards(world, camera, rays, colours, inverse.reshape(shape), light)
    colours *= np.asarray(light.colour, np.float32)[:, None]
    if light.noise > 0:
        colours += np.float32(light.noise) * _grain(seed, colours.size).reshape(colours.shape)
    np.clip(colours, 0, 255, out=colours)
    with np.errstate(divide="ignore"):
        depth = np.float32(1) / (inverse * rays.forward)
    image = np.asarray(cv2.merge(list(colours.astype(np.uint8).reshape(3, *shape))), np.uint8)
    return image, depth.reshape(shape)


def _hazy(colours: Floats, inverse: Floats, light: Light) -> Floats:
    """Blend colours (3, P) with the horizon's."""
    clear = np.exp(np.float32(-1 / HAZE) / inverse)
    horizon = np.asarray(light.horizon, np.float32)[:, None]
    colours -= horizon
    colours *= clear
    colours += horizon
    return colours


def rays_of(camera: Camera) -> Rays:
    """The rays of all pixels, row by row."""
    ahead3 = camera.rotation[:, 2]
    ahead = ahead3[:2] / np.hypot(*ahead3[:2])
    right = np.array([ahead[1], -ahead[0]])
    upright = _upright(right, ahead) @ camera.rotation
    x = (np.arange(camera.width) - camera.centre[0]) / camera.focal
    y = ((np.arange(camera.height) - camera.centre[1]) / camera.focal)[:, None]
    r, u, f = (((row[0] * x).astype(np.float32) + (row[1] * y + row[2]).astype(np.float32)).ravel() for row in upright)
    if f.min() <= 0.02:
        raise ValueError("camera: expected every ray to lead forward; its field of view or its tilt is too large")
    return Rays(r / f, u / f, f, right, ahead)


def _upright(right: Doubles, ahead: Doubles) -> Doubles:
    """World to the upright frame: right, up, forward."""
    return np.array([[*right, 0.0], [0.0, 0.0, 1.0], [*ahead, 0.0]])


def first_hits(world: World, camera: Camera, rays: Rays) -> tuple[NDArray[np.int64], Floats]:
    """What each ray meets first: number of the wall (-1: none) and 1 / forward distance (0: sky)."""
    visible = walls_in_view(world, camera, rays)
    eye = np.float32(camera.position[2])
    inverse = np.maximum(-rays.s / eye, 0)  # of the ground
    wall = np.full(rays.a.size, -1)
    events, order = order_of_walls(world, visible, eye, rays)
    if order.shape[1] == 0:
        return wall, inverse
    interval = _interval(rays.a, events)
    n_layers = order.shape[1]
    slope = np.append(visible.q, 0)[order]
    first = np.append(visible.p, 0)[order] + slope * events[:-1, None]  # where the interval begins: nothing cancels in 32 bits
    at_first, slope = first.astype(np.float32).ravel(), slope.astype(np.float32).ravel()
    rise = np.append(world.top[visible.index] - eye, 0)[order].astype(np.float32).ravel()
    rest = np.arange(rays.a.size)
    a, s, ground, cell = rays.a - events.astype(np.float32)[interval], rays.s, inverse, interval * n_layers
    for _ in range(n_layers):
        here = at_first[cell] + slope[cell] * a
        going = here > ground  # else ground or sky comes first, and so it does for farther walls
        hit = going & (s < rise[cell] * here)
        met = rest[hit]
        inverse[met] = here[hit]
        wall[met] = visible.index[order.ravel()[cell[hit]]]
        going &= ~hit
        rest, a, s, ground, cell = rest[going], a[going], s[going], ground[going], cell[going] + 1
        if rest.size == 0:
            break
    return wall, inverse


def walls_in_view(world: World, camera: Camera, rays: Rays) -> Visible:
    """Walls that the field of view contains a part of, cut at the near plane."""
    frame = np.stack([rays.right, rays.ahead], 1)
    p0, p1 = (world.start - camera.position[:2]) @ frame, (world.end - camera.position[:2]) @ frame
    normal = np.stack([p1[:, 1] - p0[:, 1], p0[:, 0] - p1[:, 0]], 1)  # to the right-hand side of the wall
    offset = (normal * p0).sum(1)
    inside = offset > 0  # the camera is on the left of it
    closest = np.minimum(np.hypot(*p0.T), np.hypot(*p1.T)) - np.hypot(*normal.T)
    keep = (np.maximum(p0[:, 1], p1[:, 1]) > NEAR) & (np.abs(offset) > 1e-9) & ~(inside & world.one_sided) & (closest < FAR)
    index = np.flatnonzero(keep)
    p0, p1, normal, offset = p0[index], p1[index], normal[index], offset[index]
    for p, other in ((p0, p1), (p1, p0)):
        behind = p[:, 1] < NEAR
        t = (NEAR - p[behind, 1]) / (other[behind, 1] - p[behind, 1])
        p[behind] += t[:, None] * (other[behind] - p[behind])
    ends = np.stack([p0[:, 0] / p0[:, 1], p1[:, 0] / p1[:, 1]])
    low, high = ends.min(0), ends.max(0)
    seen = (high > float(rays.a.min())) & (low < float(rays.a.max())) & (high > low)
    q, p = (normal[seen] / offset[seen, None]).T
    return Visible(index[seen], p, q, low[seen], high[seen])


def order_of_walls(world: World, visible: Visible, eye: np.float32, rays: Rays) -> tuple[Doubles, NDArray[np.int64]]:
    """For each interval of a between ends of walls, the walls that can be seen in it, nearest first.

    Returns:
        events: (I + 1,) the limits of the intervals.
        order: (I, L) positions in `visible`; V where there is none.
    """
    low, high = float(rays.a.min()), float(rays.a.max())
    inner = np.concatenate([visible.low, visible.high])
    events = np.unique(np.concatenate([inner[(inner > low) & (inner < high)], [low, high]]))
    middle = (events[1:] + events[:-1]) / 2
    covers = (visible.low <= middle[:, None]) & (middle[:, None] < visible.high)
    inverse = np.where(covers, visible.p + visible.q * middle[:, None], 0)
    n_layers = int(covers.sum(1).max(initial=0))
    order = np.argsort(-inverse, axis=1)[:, :n_layers]
    none = np.take_along_axis(inverse, order, 1) <= 0
    p, q = visible.p[order], visible.q[order]
    rise = world.top[visible.index][order] - eye
    at_ends = [rise * (p + q * edge[:, None]) for edge in (events[:-1], events[1:])]
    highest, lowest = np.maximum(*at_ends), np.minimum(*at_ends)
    nearer = np.maximum.accumulate(np.where(none, -np.inf, lowest), axis=1)
    hidden = np.zeros_like(none)
    hidden[:, 1:] = highest[:, 1:] <= nearer[:, :-1]
    gone = hidden | none
    order = np.where(gone, len(visible.index), order)
    n_layers = int((~gone).sum(1).max(initial=0))
    return events, np.take_along_axis(order, np.argsort(gone, axis=1, kind="stable"), 1)[:, : n_layers + 1]


def _interval(a: Floats, events: Doubles) -> NDArray[np.int64]:
    """Number of the interval that each a lies in: by a table of fine bins, and by a search where a bin has an event."""
    n_bins = 4096
    scale = np.float32(n_bins / (events[-1] - events[0]))
    bins = ((events - events[0]) * scale).astype(np.int64)
    table = np.searchsorted(bins, np.arange(n_bins + 2), side="left") - 1  # events in earlier bins
    has_event = np.zeros(n_bins + 2, bool)
    for shift in (-1, 0, 1):  # rounding
        has_event[np.clip(bins + shift, 0, n_bins + 1)] = True
    where = ((a - np.float32(events[0])) * scale).astype(np.int64)
    interval = table[where]
    unsure = np.flatnonzero(has_event[where])
    interval[unsure] = np.searchsorted(events, a[unsure], side="right") - 1
    return np.clip(interval, 0, len(events) - 2)


def _sky(rays: Rays, pixels: NDArray[np.int64], light: Light) -> Floats:
    height = np.sqrt(np.clip(rays.s[pixels], 0, 1))
    horizon, zenith = np.asarray([light.horizon, light.sky], np.float32)[:, :, None]
    return horizon + (zenith - horizon) * height


def _ground(world: World, camera: Camera, rays: Rays, inverse: Floats, pixels: NDArray[np.int64]) -> Floats:
    distance = 1 / np.maximum(inverse[pixels], np.float32(1e-5))  # at the horizon: whole numbers of texels
    a = rays.a[pixels]
    x = np.float32(camera.position[0]) + distance * (a * np.float32(rays.right[0]) + np.float32(rays.ahead[0]))
    y = np.float32(camera.position[1]) + distance * (a * np.float32(rays.right[1]) + np.float32(rays.ahead[1]))
    footprint = distance * distance * np.float32(0.5 / (camera.position[2] * camera.focal))
    return world.ground.look_up(x, y, footprint)


def _walls(
    world: World, camera: Camera, rays: Rays, inverse: Floats, wall: NDArray[np.int64], pixels: NDArray[np.int64], light: Light
) -> Floats:
    w, distance, a = wall[pixels], 1 / inverse[pixels], rays.a[pixels]
    tangent = world.end - world.start
    tangent /= np.hypot(*tangent.T)[:, None]
    relative = camera.position[:2] - world.start
    along = (tangent @ rays.right).astype(np.float32)[w] * a + (tangent @ rays.ahead).astype(np.float32)[w]
    along = along * distance + (tangent * relative).sum(1).astype(np.float32)[w]
    height = np.float32(camera.position[2]) + rays.s[pixels] * distance
    lit = tangent[:, 1] * np.cos(light.sun) - tangent[:, 0] * np.sin(light.sun)  # outside is on the right-hand side
    shade = (0.72 + 0.28 * lit).astype(np.float32)[w]
    return world.walls.look_up(w, along, height, world.top[w] - height, distance / np.float32(camera.focal)) * shade


def _billboards(world: World, camera: Camera, rays: Rays, colours: Floats, inverse: Floats, light: Light) -> None:
    """Draw trees, lamps and the like into the image (3, P) and its inverse distances (H, W), nearest first."""
    relative = world.spots - camera.position[:2]
    distance, aside = relative @ rays.ahead, relative @ rays.right
    width, height = world.spot_size.T
    keep = (distance > 0.7) & (distance < FAR) & (height * camera.focal > 4 * distance)
    chosen = np.flatnonzero(keep & (np.abs(aside) - width < distance * np.abs(rays.a).max()))
    chosen = chosen[np.argsort(distance[chosen])]
    d = distance[chosen]
    left, bottom = (aside[chosen] - width[chosen] / 2) / d, -camera.position[2] / d
    right, top = left + width[chosen] / d, bottom + height[chosen] / d
    low, high = _extents(camera, rays, np.stack([left, right]), np.stack([bottom, top]))
    a_plane, s_plane = rays.a.reshape(inverse.shape), rays.s.reshape(inverse.shape)
    texels = np.zeros(inverse.shape, np.uint32)
    for k in np.flatnonzero((low < high).all(1)):
        window = slice(low[k, 1], high[k, 1]), slice(low[k, 0], high[k, 0])
        free = inverse[window] < 1 / d[k]
        if not free.any():
            continue
        across = (a_plane[window] - np.float32(left[k])) * np.float32(1 / (right[k] - left[k]))
        down = (np.float32(top[k]) - s_plane[window]) * np.float32(1 / (top[k] - bottom[k]))
        free &= (across >= 0) & (across < 1) & (down >= 0) & (down < 1)
        i = chosen[k]
        texel = world.sprites[world.spot_sprite[i]].look_up(across[free], down[free], camera.focal * height[i] / d[k])
        free[free] = texel != 0
        texels[window][free] = texel[texel != 0]
        inverse[window][free] = 1 / d[k]
    drawn = np.flatnonzero(texels)
    colours[:, drawn] = _hazy(unpacked(texels.ravel()[drawn]), inverse.ravel()[drawn], light)


def _extents(camera: Camera, rays: Rays, a: Doubles, s: Doubles) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Windows of pixels (column, row) that hold upright rectangles between a (2, B) and s (2, B): (B, 2) from and to."""
    corners = np.stack([np.stack([x, y, np.ones_like(x)], -1) for x in a for y in s])
    seen = corners @ (_upright(rays.right, rays.ahead) @ camera.rotation)
    places = camera.focal * seen[..., :2] / seen[..., 2:] + np.array(camera.centre)
    size = np.array([camera.width, camera.height])
    low = np.clip(np.floor(places.min(0)), 0, size).astype(np.int64)
    return low, np.clip(np.ceil(places.max(0)) + 1, 0, size).astype(np.int64)


_GRAIN = np.random.default_rng(0).standard_normal(1 << 19).astype(np.float32)


def _grain(seed: int, size: int) -> Floats:
    """Noise of a sensor: a stretch of a fixed long row of normal numbers, more than once where it is too short."""
    start = seed * 7919 % (len(_GRAIN) // 2)
    return _GRAIN[start : start + size] if start + size <= len(_GRAIN) else np.resize(_GRAIN, size)
