"""A city that a seed invents: streets, blocks of many kinds, and what stands along the streets, as an OpenStreetMap drawing.

Idea. Streets are the lines of a grid with uneven spacing whose crossings are shaken; each block is a convex quadrilateral,
drawn back from its streets, and filled as its kind says (`blocks.py`). At last everything is bent by a smooth field and turned,
so that streets curve and no two cities have the same directions. Tags are those that the classes of maps are made of.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from city import blocks
from city.geometry import along, inset
from city.sketch import Sketch

Doubles = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Street:
    """A kind of street: its tag, half of its width, and the pavement beside it; metres."""

    highway: str
    half_width: float
    pavement: float


STREETS = {
    "avenue": Street("secondary", 5.5, 4.0),
    "collector": Street("tertiary", 4.5, 3.5),
    "street": Street("residential", 3.5, 3.0),
    "lane": Street("service", 2.5, 2.0),
    "walk": Street("footway", 1.2, 2.3),
}

FURNITURE = (
    ("amenity", "bench"), ("amenity", "waste_basket"), ("amenity", "waste_basket"), ("emergency", "fire_hydrant"),
    ("amenity", "post_box"), ("man_made", "street_cabinet"), ("amenity", "bicycle_parking"), ("barrier", "bollard"),
    ("amenity", "vending_machine"), ("amenity", "recycling"), ("amenity", "clock"), ("amenity", "charging_station"),
    ("amenity", "atm"), ("amenity", "toilets"), ("natural", "stone"), ("man_made", "utility_pole"),
)  # fmt: skip

RIM = ("villas", "wood", "meadow", "parcels", "park", "parcels")
"""Kinds of blocks at the edge of the city."""

BEND, WAVE = 9.0, 420.0
"""How far the smooth field moves things, and over what length; metres."""


def draw_city(rng: np.random.Generator, n_blocks: int) -> Sketch:
    """Invent a city of n_blocks x n_blocks blocks around (0, 0), and a rim of narrower ones beyond the last streets."""
    sketch = Sketch()
    n = n_blocks + 2
    crossings = _crossings(rng, n)
    kinds = _kinds(rng, n)
    for (axis, i, j), kind in kinds.items():
        ends = crossings[i, j], crossings[(i + 1, j) if axis == 0 else (i, j + 1)]
        _street(rng, sketch, STREETS[kind], *ends)
    river = int(rng.integers(2, n - 2)) if n > 5 and rng.random() < 0.4 else -1
    fillers = blocks.deck(rng, n * n)
    for i in range(n):
        for j in range(n):
            corners = np.array([crossings[i, j], crossings[i + 1, j], crossings[i + 1, j + 1], crossings[i, j + 1]])
            sides = [kinds.get(key) for key in ((0, i, j), (1, i + 1, j), (0, i, j + 1), (1, i, j))]
            back = [STREETS[k].half_width + STREETS[k].pavement if k else 1.0 for k in sides]
            on_rim = min(i, j) == 0 or max(i, j) == n - 1
            kind = "river" if j == river else RIM[int(rng.integers(len(RIM)))] if on_rim else fillers[i * n + j]
            blocks.fill(rng, sketch, kind, inset(corners, back))
    sketch.moved(_bent(rng, np.array(sketch.places)))
    return sketch


def _crossings(rng: np.random.Generator, n: int) -> Doubles:
    """Where lines of the grid meet: (n + 1, n + 1, 2)."""
    lines = []
    for _ in range(2):
        steps = rng.uniform(64, 108, n)
        steps[[0, -1]] = 52.0
        places = np.concatenate([[0.0], np.cumsum(steps)])
        lines.append(places - places[-1] / 2)
    grid = np.stack(np.meshgrid(*lines, indexing="ij"), -1)
    return grid + rng.uniform(-7, 7, grid.shape)


def _kinds(rng: np.random.Generator, n: int) -> dict[tuple[int, int, int], str]:
    """The kind of each piece of street: (axis, i, j) begins at crossing (i, j) and leads along the axis."""
    kinds: dict[tuple[int, int, int], str] = {}
    for axis in (0, 1):
        avenue = int(rng.integers(2, n - 1))
        for line in range(1, n):
            whole = "avenue" if line == avenue else str(rng.choice(["street", "street", "street", "collector"]))
            for piece in range(1, n - 1):
                kind = whole
                if whole == "street" and line not in (1, n - 1):
                    kind = str(rng.choice(["street", "lane", "walk"], p=[0.76, 0.12, 0.12]))
                kinds[(axis, piece, line) if axis == 0 else (axis, line, piece)] = kind
    return kinds


def _street(rng: np.random.Generator, sketch: Sketch, street: Street, start: Doubles, end: Doubles) -> None:
    """A piece of street between two crossings: the roadway, crossings for walkers, pavements and their furniture."""
    length = float(np.hypot(*(end - start)))
    places = sorted({0.0, length, *np.linspace(0, length, max(2, round(length / 15)) + 1)[1:-1].round(2)})
    crossing_places = [d for d in (11.0, length - 11.0) if street.half_width > 2 and rng.random() < 0.55]
    points = along(start, end, np.array(sorted({*places, *crossing_places})), 0.0)
    sketch.line(points, highway=street.highway)
    for d in crossing_places:
        sketch.node(along(start, end, np.array([d]), 0.0)[0], highway="crossing")
    if street.highway == "footway":
        _row(rng, sketch, start, end, (14.0, length - 14.0, 26.0), (2.4,), highway="street_lamp")
        return
    edge = street.half_width
    inner = np.linspace(edge + 6, length - edge - 6, 5)
    for side in (-1, 1):
        if street.highway != "service":
            sketch.line(along(start, end, inner, side * (edge + 1.7)), highway="footway", footway="sidewalk")
        if street.highway == "secondary":
            sketch.line(along(start, end, inner, side * edge), barrier="kerb")
            sketch.line(along(start, end, inner, side * (edge + 0.9)), highway="cycleway")
    _signals(rng, sketch, street, start, end, length)
    _rows_of_furniture(rng, sketch, street, start, end, length)


def _signals(rng: np.random.Generator, sketch: Sketch, street: Street, start: Doubles, end: Doubles, length: float) -> None:
    """What regulates traffic, beside the roadway."""
    for d, side in ((9.0, -1), (length - 9.0, 1)):
        place = along(start, end, np.array([d]), side * (street.half_width + 0.5))[0]
        if street.highway == "secondary":
            sketch.node(place, highway="traffic_signals")
        elif rng.random() < 0.25:
            sketch.node(place, highway=str(rng.choice(["stop", "give_way"])))
    if street.highway in ("secondary", "tertiary") and rng.random() < 0.5:
        d = float(rng.uniform(0.35, 0.65)) * length
        sketch.node(along(start, end, np.array([d]), street.half_width + 0.8)[0], highway="bus_stop")
        sketch.node(along(start, end, np.array([d]), street.half_width - 1.5)[0], public_transport="stop_position")


def _rows_of_furniture(
    rng: np.random.Generator, sketch: Sketch, street: Street, start: Doubles, end: Doubles, length: float
) -> None:
    edge = street.half_width + 0.7
    first, last = edge + 9, length - edge - 9
    sides = [side for side in (-1, 1) if rng.random() < 0.5]
    _row(rng, sketch, start, end, (first + 4, last, float(rng.uniform(9, 16))), [s * edge for s in sides], natural="tree")
    lamps = [edge if rng.random() < 0.5 else -edge]
    _row(rng, sketch, start, end, (first, last, float(rng.uniform(24, 32))), lamps, highway="street_lamp")
    for _ in range(int(rng.poisson(length / 30))):
        key, value = FURNITURE[int(rng.integers(len(FURNITURE)))]
        aside = float(rng.choice([-1, 1])) * (street.half_width + float(rng.uniform(1.0, street.pavement - 0.6)))
        sketch.node(along(start, end, rng.uniform(first, last, 1), aside)[0], **{key: value})


def _row(
    rng: np.random.Generator,
    sketch: Sketch,
    start: Doubles,
    end: Doubles,
    span: tuple[float, float, float],
    asides: Sequence[float],
    **tags: str,
) -> None:
    """Nodes along a street, from `span[0]` to `span[1]` metres with a step of `span[2]`, that far to the left."""
    for aside in asides:
        places = np.arange(*span)
        for place in along(start, end, places + rng.uniform(-0.8, 0.8, len(places)), aside):
            sketch.node(place, **tags)


def _bent(rng: np.random.Generator, places: Doubles) -> Doubles:
    """Move all places by a smooth field, and turn them."""
    phase = rng.uniform(0, 2 * np.pi, 4)
    x, y = places.T * 2 * np.pi / WAVE
    field = [np.sin(y + phase[0]) + 0.5 * np.sin(x + y + phase[1]), np.sin(x + phase[2]) + 0.5 * np.sin(x - y + phase[3])]
    turn = rng.uniform(0, np.pi / 2)
    c, s = np.cos(turn), np.sin(turn)
    return (places + BEND * np.stack(field, 1)) @ np.array([[c, s], [-s, c]])
