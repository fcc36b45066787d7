"""From a map's elements to what the renderer draws: walls, the ground, billboards, and the roads that vehicles take.

Buildings are extruded: `building:levels` or `height` where the file has them, else a height that the seed draws. Fences, walls
and hedges are thin upright walls. What stands at a node is a billboard; where the node lies on a roadway (OpenStreetMap puts
signals and signs there) it is moved to the roadside, and what lies in a building to the nearest front of it.
"""

import dataclasses
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from city.geometry import area, inside, scattered
from city.ground import KINDS, PIXELS_PER_METRE, Canvas, nearest, paint, segments
from city.render import Surroundings, World
from city.sprites import SPRITES, TREES, sprites
from city.textures import BARRIERS, N_FACADES, Pyramid, Sprite, TexturedWalls, facade_atlas, ground_colours, ground_detail
from mdps.maps import Box, Elements, Line, OsmData, Projection, osm_elements

Doubles = NDArray[np.float64]

STOREY = 3.1
LOWEST = 3.2
"""Metres: no building is lower, so that no camera looks onto a roof."""

BARRIER_HEIGHTS = {"fence": (1.1, 1.5), "wall": (1.5, 2.0), "hedge": (1.1, 1.7)}
TREES_APART = 7.0


@dataclasses.dataclass(frozen=True)
class Scene:
    """A city that can be drawn and driven through."""

    world: World
    near: Surroundings
    roads: list[Line]
    canvas: Canvas  # the kinds of ground
    elements: Elements
    box: Box
    projection: Projection


@dataclasses.dataclass
class _Walls:
    """Walls while they are collected."""

    start: list[Doubles] = dataclasses.field(default_factory=list)
    end: list[Doubles] = dataclasses.field(default_factory=list)
    row: list[tuple[float, bool, int, float, Doubles]] = dataclasses.field(default_factory=list)

    def add(self, points: Doubles, height: float, facade: int, tint: Doubles, closed: bool, first: float = 0.0) -> None:
        """A chain of walls; the outside of closed ones is on the right-hand side."""
        following = np.roll(points, -1, 0) if closed else points[1:]
        for a, b in zip(points, following):
            if np.hypot(*(b - a)) > 0.02:
                self.start.append(a)
                self.end.append(b)
                self.row.append((height, closed, facade, first, tint))


def build_scene(osm: OsmData, projection: Projection, box: Box, seed: int) -> Scene:
    """Make the scene of a box of the map."""
    rng = np.random.default_rng([seed, 1])
    elements = _within(osm_elements(osm, projection), box)
    canvas = Canvas(box)
    canvas.image = paint(elements, box)
    walls = _Walls()
    _buildings(rng, walls, elements, _heights(osm, projection))
    _barriers(rng, walls, elements)
    pictures, of_kind = sprites(rng)
    places, kinds = _spots(rng, elements, canvas, walls)
    kinds = [_tree(rng) if kind in TREES else kind for kind in kinds]
    sizes = np.array([SPRITES[kind][:2] for kind in kinds], np.float32).reshape(-1, 2)
    scale = np.array([rng.uniform(0.7, 1.25) if kind in TREES else 1.0 for kind in kinds], np.float32)
    picture = np.array([of_kind[kind][int(rng.integers(len(of_kind[kind])))] for kind in kinds], np.int64)
    colours = ground_colours(rng, canvas.image)
    _tree_shadows(canvas, colours, places, [kind in TREES for kind in kinds])
    ground = Pyramid.of(colours, box.x_min, box.y_max, 1 / PIXELS_PER_METRE, ground_detail(rng))
    world = _world(rng, walls, ground, places, picture, sizes * scale[:, None], pictures)
    roads = [line for line in elements.lines if line.group == "road"]
    return Scene(world, Surroundings(world), roads, canvas, elements, box, projection)


def _within(elements: Elements, box: Box) -> Elements:
    """What touches the box."""

    def touches(points: Doubles) -> bool:
        low, high = points.min(0), points.max(0)
        return bool(low[0] < box.x_max and high[0] > box.x_min and low[1] < box.y_max and high[1] > box.y_min)

    areas = [area for area in elements.areas if any(touches(ring) for ring in area.outer)]
    lines = [line for line in elements.lines if touches(line.points)]
    return Elements(areas, lines, [point for point in elements.points if touches(point.position[None])])


def _heights(osm: OsmData, projection: Projection) -> dict[tuple[int, int], float]:
    """Heights that the file states, by the middle of the building's ring in decimetres."""
    tagged = [(way.nodes, way.tags) for way in osm.ways.values()]
    for relation in osm.relations.values():
        tagged += [
            (osm.ways[m.number].nodes, relation.tags) for m in relation.members if m.role == "outer" and m.number in osm.ways
        ]
    heights = {}
    for numbers, tags in tagged:
        nodes = [osm.nodes[n][:2] for n in numbers[:-1] if n in osm.nodes]
        height = _height(tags)
        if height is not None and nodes and projection.sees(np.array(nodes)).all():
            heights[_key(projection.to_metres(np.array(nodes)))] = height
    return heights


def _height(tags: dict[str, str]) -> float | None:
    if "building" not in tags:
        return None
    for key, scale in (("height", 1.0), ("building:levels", STOREY)):
        try:
            value = float(tags[key].removesuffix("m")) * scale + (1.2 if scale > 1 else 0.0)
        except (KeyError, ValueError):
            continue
        if 0 < value < 400:
            return value
    return None


def _key(ring: Doubles) -> tuple[int, int]:
    x, y = np.round(ring.mean(0) * 10)
    return int(x), int(y)


def _buildings(rng: np.random.Generator, walls: _Walls, elements: Elements, heights: dict[tuple[int, int], float]) -> None:
    for building in (a for a in elements.areas if a.group == "building"):
        guess = float(rng.integers(2, 7)) * STOREY
        height = max(LOWEST, heights.get(_key(building.outer[0]), guess))
        facade, tint = int(rng.integers(N_FACADES)), rng.uniform(0.82, 1.08) * rng.uniform(0.95, 1.05, 3)
        first = 12.0 * float(rng.integers(2))
        for rings, sign in ((building.outer, 1), (building.inner, -1)):
            for ring in rings:
                turned = ring if area(ring) * sign > 0 else ring[::-1]
                walls.add(turned, height, facade, tint, True, first)


def _barriers(rng: np.random.Generator, walls: _Walls, elements: Elements) -> None:
    chains = [(line.group, line.points) for line in elements.lines]
    chains += [(a.group, np.vstack([ring, ring[:1]])) for a in elements.areas for ring in a.outer]
    for group, points in chains:
        if group in BARRIERS:
            height = float(rng.uniform(*BARRIER_HEIGHTS[group]))
            walls.add(points, height, N_FACADES + BARRIERS.index(group), rng.uniform(0.85, 1.1) * np.ones(3), False)


def _spots(rng: np.random.Generator, elements: Elements, canvas: Canvas, walls: _Walls) -> tuple[Doubles, list[str]]:
    """Where billboards stand, and their kinds."""
    places = [point.position for point in elements.points if point.group in SPRITES]
    kinds = [point.group for point in elements.points if point.group in SPRITES]
    road_start, road_end, widths = segments([line for line in elements.lines if line.group in ("road", "busway")])
    one_sided = np.array([row[1] for row in walls.row], bool)
    starts, ends = np.array(walls.start).reshape(-1, 2)[one_sided], np.array(walls.end).reshape(-1, 2)[one_sided]
    ground = canvas.at(np.array(places).reshape(-1, 2))
    for i, kind in enumerate(ground):
        if kind in (KINDS["road"], KINDS["busway"], KINDS["marking"]) and len(road_start):
            places[i] = _beside(places[i], road_start, road_end, widths)
        elif kind == KINDS["building"] and len(starts):
            wall, foot = nearest(places[i], starts, ends)
            direction = (ends[wall] - starts[wall]) / np.hypot(*(ends[wall] - starts[wall]))
            places[i] = foot + 0.5 * np.array([direction[1], -direction[0]])
    trees = [places[i] for i, kind in enumerate(kinds) if kind == "tree"]
    more = _more_trees(rng, elements, np.array(trees).reshape(-1, 2))
    return np.array(places + more).reshape(-1, 2), kinds + ["tree"] * len(more)


def _beside(place: Doubles, start: Doubles, end: Doubles, widths: Doubles) -> Doubles:
    """The edge of the roadway next to a place on it, on the side where it lies, or on the right."""
    i, foot = nearest(place, start, end)
    direction = (end[i] - start[i]) / max(float(np.hypot(*(end[i] - start[i]))), 1e-9)
    right = np.array([direction[1], -direction[0]])
    side = -1.0 if (place - foot) @ right < -0.2 else 1.0
    return np.asarray(foot + side * (widths[i] + 0.6) * right)


def _more_trees(rng: np.random.Generator, elements: Elements, known: Doubles) -> list[Doubles]:
    """Trees of rows, and of woods whose trees the map does not have one by one."""
    more: list[Doubles] = []
    for line in elements.lines:
        if line.group == "tree_row":
            places = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(line.points, axis=0).T))])
            steps = np.arange(0.0, places[-1] + 0.1, TREES_APART)
            more += list(np.stack([np.interp(steps, places, line.points[:, k]) for k in (0, 1)], 1))
    for wood in (a for a in elements.areas if a.group == "forest"):
        for ring in wood.outer:
            if not inside(known, ring).any():
                more += list(scattered(rng, ring, min(200, int(abs(area(ring)) / 40)), 3.0))
    return more


def _tree(rng: np.random.Generator) -> str:
    return "conifer" if rng.random() < 0.15 else "tree"


def _tree_shadows(canvas: Canvas, colours: NDArray[np.uint8], places: Doubles, is_tree: list[bool]) -> None:
    """Darken the ground under trees."""
    height, width = colours.shape[:2]
    radius = 2 * PIXELS_PER_METRE
    grid = np.hypot(*np.mgrid[-radius : radius + 1, -radius : radius + 1]) / radius
    shade = (1 - 0.4 * np.clip(1.2 - grid, 0, 1))[..., None]
    for x, y in np.floor((places[np.array(is_tree, bool)] - canvas.corner) * [PIXELS_PER_METRE, -PIXELS_PER_METRE]).astype(int):
        if radius <= x < width - radius and radius <= y < height - radius:
            part = colours[y - radius : y + radius + 1, x - radius : x + radius + 1]
            part[:] = part * shade


def _world(
    rng: np.random.Generator,
    walls: _Walls,
    ground: Pyramid,
    places: Doubles,
    picture: NDArray[np.int64],
    sizes: NDArray[np.float32],
    pictures: tuple[Sprite, ...],
) -> World:
    start, end = np.array(walls.start).reshape(-1, 2), np.array(walls.end).reshape(-1, 2)
    owner, begin, stop = split_crossings(start, end)
    length = np.hypot(*(end - start).T)
    height, one_sided, facade, first = (np.array([row[k] for row in walls.row])[owner] for k in range(4))
    tint = np.array([row[4] for row in walls.row]).reshape(-1, 3)[owner].T.astype(np.float32)
    textured = TexturedWalls(
        facade_atlas(rng), facade.astype(np.int32), (first + begin * length[owner]).astype(np.float32), tint, facade < N_FACADES
    )
    d = (end - start)[owner]
    return World(
        start[owner] + begin[:, None] * d, start[owner] + stop[:, None] * d, height.astype(np.float32), one_sided.astype(bool),
        textured, ground, places, picture, sizes, pictures,
    )  # fmt: skip


def split_crossings(start: Doubles, end: Doubles) -> tuple[NDArray[np.int64], Doubles, Doubles]:
    """Cut segments where they cross each other.

    Returns:
        owner, begin, stop: (Q,) the segment that each piece is of, and the shares of its length where it begins and ends.
    """
    cuts: list[list[float]] = [[0.0, 1.0] for _ in start]
    cell = 40.0
    low, high = np.floor(np.minimum(start, end) / cell).astype(int), np.floor(np.maximum(start, end) / cell).astype(int)
    cells: dict[tuple[int, int], list[int]] = {}
    for i in range(len(start)):
        for x in range(low[i, 0], high[i, 0] + 1):
            for y in range(low[i, 1], high[i, 1] + 1):
                cells.setdefault((x, y), []).append(i)
    for members in cells.values():
        m = np.array(members)
        a, d = start[m], (end - start)[m]
        cross = d[:, None, 0] * d[None, :, 1] - d[:, None, 1] * d[None, :, 0]
        between = a[None] - a[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            t = (between[..., 0] * d[None, :, 1] - between[..., 1] * d[None, :, 0]) / cross
        t_other = np.where(np.isfinite(t), t, -1.0).T
        inner = (t > 1e-6) & (t < 1 - 1e-6) & (t_other > 1e-6) & (t_other < 1 - 1e-6)
        for i, j in zip(*np.nonzero(inner)):
            cuts[m[i]].append(float(t[i, j]))
    pieces = [(i, p, q) for i, c in enumerate(cuts) for p, q in pairwise(sorted(set(c)))]
    owner, begin, stop = (np.array(x) for x in zip(*pieces)) if pieces else (np.empty(0), np.empty(0), np.empty(0))
    return owner.astype(np.int64), begin.astype(np.float64), stop.astype(np.float64)
