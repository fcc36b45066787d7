"""What fills the blocks of an invented city: closed perimeters around courtyards, rows of houses, villas in gardens, parks ...

A block is a convex quadrilateral (4, 2), counter-clockwise, between the pavements of its streets. Each kind of block is a
function that draws into the sketch; all tags fall into classes of the map.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from city.geometry import along, distances, ellipse, inset, inside, scattered, subdivided
from city.sketch import Sketch

Doubles = NDArray[np.float64]

SHOPS = (
    ("shop", "bakery"), ("shop", "clothes"), ("shop", "supermarket"), ("amenity", "restaurant"), ("amenity", "fast_food"),
    ("amenity", "cafe"), ("amenity", "bar"), ("amenity", "pharmacy"), ("amenity", "atm"), ("shop", "books"),
)  # fmt: skip

LONGEST_WALL = 14.0
"""Metres; longer walls get points in between, so that they can bend with the streets."""


def deck(rng: np.random.Generator, n: int) -> list[str]:
    """The kinds of n blocks: in a fixed mixture, shuffled."""
    mixture = ["perimeter", "parcels", "villas", "parcels", "park", "villas", "court", "parking", "perimeter", "plaza",
               "parcels", "school", "villas", "wood", "parcels", "meadow"]  # fmt: skip
    kinds = (mixture * (n // len(mixture) + 1))[:n]
    return [kinds[i] for i in rng.permutation(n)]


def fill(rng: np.random.Generator, sketch: Sketch, kind: str, block: Doubles) -> None:
    """Fill a block as its kind says."""
    FILLERS[kind](rng, sketch, block)


def _building(rng: np.random.Generator, sketch: Sketch, ring: Doubles, kind: str, levels: int) -> None:
    sketch.area(subdivided(ring, LONGEST_WALL), building=kind, building__levels=str(levels))


def _sides(block: Doubles) -> list[tuple[Doubles, Doubles, float]]:
    """Start, end and length of each side."""
    return [(a, b, float(np.hypot(*(b - a)))) for a, b in zip(block, np.roll(block, -1, 0))]


def _trees(sketch: Sketch, places: Doubles, conifers: bool = False) -> None:
    for place in places:
        sketch.node(place, natural="tree", **({"leaf_type": "needleleaved"} if conifers else {}))


def _shops(rng: np.random.Generator, sketch: Sketch, block: Doubles, each: float) -> None:
    """Shops along the fronts, half a metre before the wall, one for about `each` metres."""
    for start, end, length in _sides(block):
        for d in rng.uniform(5, length - 5, int(rng.poisson(length / each))):
            key, value = SHOPS[int(rng.integers(len(SHOPS)))]
            sketch.node(along(start, end, np.array([d]), -0.5)[0], **{key: value})


def _perimeter(rng: np.random.Generator, sketch: Sketch, block: Doubles) -> None:
    """One large building around a courtyard."""
    outer = inset(block, [0.5] * 4)
    court = inset(outer, [float(rng.uniform(11, 14))] * 4)
    rings = [subdivided(court, LONGEST_WALL)]
    levels = int(rng.integers(4, 7))
    sketch.multipolygon(subdivided(outer, LONGEST_WALL), rings, building="apartments", building__levels=str(levels))
    _courtyard(rng, sketch, inset(court, [1.0] * 4))
    _shops(rng, sketch, outer, 30)


def _courtyard(rng: np.random.Generator, sketch: Sketch, court: Doubles) -> None:
    if rng.random() < 0.7:
        sketch.area(court, landuse="grass")
        _trees(sketch, scattered(rng, inset(court, [2.0] * 4), 6, 4.0))
    else:
        sketch.area(court, amenity="parking")


def _parcels(rng: np.random.Generator, sketch: Sketch, block: Doubles) -> None:
    """Houses side by side, each with its own height, some missing; gardens behind them."""
    outer = inset(block, [0.5] * 4)
    depth = float(rng.uniform(10, 13))
    inner = inset(outer, [depth] * 4)
    _courtyard(rng, sketch, inset(inner, [0.8] * 4))
    usual = int(rng.integers(3, 6))
    for i, (start, end, length) in enumerate(_sides(outer)):
        n = max(2, round(length / float(rng.uniform(13, 20))))
        cuts = np.linspace(0, 1, n + 1)
        cuts[1:-1] += rng.uniform(-0.12, 0.12, n - 1) / n
        front = start + cuts[:, None] * (end - start)
        back = inner[i] + cuts[:, None] * (inner[(i + 1) % 4] - inner[i])
        for k in range(n):
            if 0 < k < n - 1 and rng.random() < 0.13:
                kind = str(rng.choice(["fence", "wall", "gate"]))
                if kind == "gate":
                    sketch.node((front[k] + front[k + 1]) / 2, barrier="gate")
                else:
                    sketch.line(np.stack([front[k], front[k + 1]]), barrier=kind)
                continue
            levels = max(2, usual + int(rng.integers(-1, 2)))
            kind = str(rng.choice(["residential", "apartments", "retail"]))
            ring = np.stack([front[k], front[k + 1], back[k + 1], back[k]])
            _building(rng, sketch, ring, kind, levels)
    _shops(rng, sketch, outer, 35)


def _court(rng: np.random.Generator, sketch: Sketch, block: Doubles) -> None:
    """A large building with two courtyards."""
    outer = inset(block, [1.0] * 4)
    middle = (outer[0] + outer[1]) / 2, (outer[2] + outer[3]) / 2
    halves = [np.stack([outer[0], middle[0], middle[1], outer[3]]), np.stack([middle[0], outer[1], outer[2], middle[1]])]
    courts = [inset(half, [12.0, 6.0, 12.0, 12.0] if i == 0 else [12.0, 12.0, 12.0, 6.0]) for i, half in enumerate(halves)]
    rings = [subdivided(court, LONGEST_WALL) for court in courts]
    tags = {"building": "public", "building__levels": str(int(rng.integers(3, 6)))}
    sketch.multipolygon(subdivided(outer, LONGEST_WALL), rings, **tags)
    sketch.area(inset(courts[0], [1.0] * 4), leisure="garden")
    sketch.node(courts[1].mean(0), amenity="fountain")
    sketch.area(inset(courts[1], [1.0] * 4), landuse="flowerbed")


def _villas(rng: np.random.Generator, sketch: Sketch, block: Doubles) -> None:
    """Single houses in gardens behind hedges and fences."""
    sketch.area(block, landuse="grass")
    houses: list[Doubles] = []
    for start, end, length in _sides(block):
        barrier = str(rng.choice(["hedge", "fence", "wall", "hedge"]))
        step = float(rng.uniform(17, 22))
        n = max(1, int((length - 14) / step))
        for k in range(n):
            middle = length / 2 + (k - (n - 1) / 2) * step
            left, right = middle - step / 2, middle + step / 2
            gate = middle + 5.5
            sketch.line(along(start, end, np.array([left, gate - 1.5]), 0.3), barrier=barrier)
            sketch.line(along(start, end, np.array([gate + 1.5, right]), 0.3), barrier=barrier)
            house = _villa(rng, start, end, middle)
            if all(np.hypot(*(house.mean(0) - other.mean(0))) > 15 for other in houses):
                houses.append(house)
                _building(rng, sketch, house, "house", int(rng.integers(1, 4)))
                path = np.concatenate([along(start, end, np.array([gate]), -0.8), along(start, end, np.array([gate]), 3.0)])
                sketch.line(path, highway="path")
                if rng.random() < 0.4:
                    sketch.node(along(start, end, np.array([gate]), 0.3)[0], barrier="gate")
    places = scattered(rng, inset(block, [3.0] * 4), 16, 5.0)
    clear = [all(np.hypot(*(p - house.mean(0))) > 9.5 for house in houses) for p in places]
    _trees(sketch, places[np.array(clear, bool)], conifers=rng.random() < 0.3)


def _villa(rng: np.random.Generator, start: Doubles, end: Doubles, middle: float) -> Doubles:
    """The ring of a house, an L for some."""
    width, depth, back = rng.uniform([9, 8, 4], [12, 10.5, 7])
    x = np.array([middle - width / 2, middle + width / 2])
    near, far = along(start, end, x, back), along(start, end, x, back + depth)
    if rng.random() < 0.4:
        knee = along(start, end, np.array([middle]), back + depth), along(start, end, np.array([middle]), back + depth * 0.6)
        return np.stack([near[0], near[1], along(start, end, x[1:], back + depth * 0.6)[0], knee[1][0], knee[0][0], far[0]])
    return np.stack([near[0], near[1], far[1], far[0]])


def _park(rng: np.random.Generator, sketch: Sketch, block: Doubles) -> None:
    """Paths that cross, a pond, a playground, trees, benches."""
    sketch.area(block, leisure="park")
    a, b = rng.uniform(0.3, 0.7, 2)
    middle = block.mean(0)
    ends = [block[i] + t * (block[(i + 1) % 4] - block[i]) for i, t in enumerate((a, b, a, b))]
    paths = [np.stack([ends[0], middle, ends[2]]), np.stack([ends[1], middle, ends[3]])]
    for path in paths:
        sketch.line(path, highway="path" if rng.random() < 0.5 else "footway")
        for side in (-1, 1):
            place = along(path[0], path[1], np.array([8.0, 9.8]), 1.8 * side)
            sketch.node(place[0], amenity="bench")
            if side > 0:
                sketch.node(place[1], amenity="waste_basket")
    sketch.node(middle, **({"amenity": "fountain"} if rng.random() < 0.5 else {"tourism": "artwork"}))
    quarter = np.stack([block[0], ends[0], middle, ends[3]])
    pond = ellipse(quarter.mean(0), (float(rng.uniform(6, 9)), float(rng.uniform(4, 7))), float(rng.uniform(0, 3)))
    pond = pond[inside(pond, inset(quarter, [1.5] * 4))]
    if len(pond) > 8:
        sketch.area(pond, natural="water")
    ground = inset(np.stack([middle, ends[1], block[2], ends[2]]), [5.0] * 4)
    sketch.area(ground, leisure="playground")
    start, end, length = _sides(inset(block, [1.5] * 4))[int(rng.integers(4))]
    sketch.line(along(start, end, np.linspace(4, length - 4, 4), 0.0), natural="tree_row")
    if rng.random() < 0.5:
        side = int(rng.integers(4))
        start, end, length = _sides(block)[side]
        sketch.line(along(start, end, np.array([3.0, length * 0.3]), 0.2), barrier="hedge")
    trees = scattered(rng, inset(block, [2.0] * 4), 34, 4.5)
    lines = np.concatenate([path[:-1] for path in paths]), np.concatenate([path[1:] for path in paths])
    clear = (distances(trees, *lines) > 3) & ~inside(trees, pond if len(pond) > 8 else quarter[:1]) & ~inside(trees, ground)
    _trees(sketch, trees[clear])


def _wood(rng: np.random.Generator, sketch: Sketch, block: Doubles) -> None:
    sketch.area(block, landuse="forest")
    start, end, _ = _sides(block)[int(rng.integers(4))]
    other = block.mean(0) * 2 - (start + end) / 2
    path = np.stack([(start + end) / 2, block.mean(0) + rng.uniform(-5, 5, 2), other])
    sketch.line(path, highway="path")
    trees = scattered(rng, inset(block, [1.5] * 4), 80, 3.5)
    _trees(sketch, trees[distances(trees, path[:-1], path[1:]) > 2.2], conifers=rng.random() < 0.5)


def _meadow(rng: np.random.Generator, sketch: Sketch, block: Doubles) -> None:
    sketch.area(block, **({"landuse": "meadow"} if rng.random() < 0.5 else {"natural": "grassland"}))
    for start, end, length in _sides(block):
        gap = length * float(rng.uniform(0.3, 0.6))
        sketch.line(along(start, end, np.array([0.5, gap]), 0.4), barrier="fence")
        sketch.line(along(start, end, np.array([gap + 3, length - 0.5]), 0.4), barrier="fence")
    _trees(sketch, scattered(rng, inset(block, [6.0] * 4), 4, 12.0))


def _parking(rng: np.random.Generator, sketch: Sketch, block: Doubles) -> None:
    """A market hall and its car park."""
    side = int(rng.integers(4))
    quad = np.roll(block, -side, 0)
    t = float(rng.uniform(0.42, 0.58))
    cut = quad[1] + t * (quad[2] - quad[1]), quad[0] + t * (quad[3] - quad[0])
    lot, hall = np.stack([quad[0], quad[1], cut[0], cut[1]]), np.stack([cut[1], cut[0], quad[2], quad[3]])
    sketch.area(inset(lot, [1.0] * 4), amenity="parking")
    _building(rng, sketch, inset(hall, [4.0, 3.0, 3.0, 3.0]), "retail", 2)
    for place in along(lot[0], lot[1], np.arange(6, np.hypot(*(lot[1] - lot[0])) - 4, 9.0), 0.2):
        sketch.node(place, barrier="bollard")
    spots = scattered(rng, inset(lot, [3.0] * 4), 7, 7.0)
    _trees(sketch, spots[3:])
    for spot, (key, value) in zip(
        spots, (("amenity", "charging_station"), ("amenity", "recycling"), ("highway", "street_lamp"))
    ):
        sketch.node(spot, **{key: value})
    sketch.node(cut[0] + 0.5 * (cut[1] - cut[0]), shop="supermarket")


def _plaza(rng: np.random.Generator, sketch: Sketch, block: Doubles) -> None:
    """A square with a church, trees around it."""
    sketch.area(block, highway="pedestrian", area="yes")
    middle = block.mean(0)
    turn = np.arctan2(*(block[1] - block[0])[::-1])
    c, s = np.cos(turn), np.sin(turn)
    plan = np.array([[-16, -6], [4, -6], [4, -10], [11, -10], [11, 10], [4, 10], [4, 6], [-16, 6]], np.float64)
    church = middle + plan @ np.array([[c, s], [-s, c]])
    _building(rng, sketch, church, "church", 6)
    around = inset(block, [4.0] * 4)
    for start, end, length in _sides(around):
        _trees(sketch, along(start, end, np.arange(5, length - 4, 9.0), 0.0))
        sketch.node(along(start, end, np.array([length / 2]), 1.5)[0], amenity="bench")
    place = middle + np.array([c, s]) * -22
    sketch.node(place if inside(place[None], around)[0] else around[0] + 1.0, tourism="artwork")
    corner = inset(block, [9.0] * 4)
    sketch.node(corner[1], amenity="fountain")
    sketch.node(corner[3], amenity="bicycle_parking")
    sketch.node(corner[2], amenity="clock")


def _school(rng: np.random.Generator, sketch: Sketch, block: Doubles) -> None:
    """An L-shaped school, a pitch, a wall around them."""
    yard = inset(block, [3.0] * 4)
    a, b = yard[0] + 0.3 * (yard[3] - yard[0]), yard[1] + 0.3 * (yard[2] - yard[1])
    p, q = a + 0.3 * (b - a), yard[3] + 0.3 * (yard[2] - yard[3])
    _building(rng, sketch, np.stack([yard[0], yard[1], b, p, q, yard[3]]), "school", int(rng.integers(2, 5)))
    sketch.area(inset(np.stack([p, b, yard[2], q]), [5.0] * 4), leisure="pitch")
    for start, end, length in _sides(block)[1:3]:
        sketch.line(along(start, end, np.array([0.5, length / 2 - 2]), 0.3), barrier="wall")
        sketch.line(along(start, end, np.array([length / 2 + 2, length - 0.5]), 0.3), barrier="wall")
        sketch.node(along(start, end, np.array([length / 2]), 0.3)[0], barrier="gate")
    _trees(sketch, along(p, q, np.arange(4, np.hypot(*(q - p)) - 3, 8.0), -2.5))


def _river(rng: np.random.Generator, sketch: Sketch, block: Doubles) -> None:
    """Water between embankments."""
    water = inset(block, [5.0, 0.5, 5.0, 0.5])
    sketch.area(subdivided(water, LONGEST_WALL), natural="water")
    for side in (0, 2):
        start, end, length = _sides(block)[side]
        sketch.line(along(start, end, np.linspace(1, length - 1, 5), 3.8), barrier="retaining_wall")
        _trees(sketch, along(start, end, np.arange(6, length - 5, 11.0), 1.6))


FILLERS: dict[str, Callable[[np.random.Generator, Sketch, Doubles], None]] = {
    "perimeter": _perimeter, "parcels": _parcels, "court": _court, "villas": _villas, "park": _park, "wood": _wood,
    "meadow": _meadow, "parking": _parking, "plaza": _plaza, "school": _school, "river": _river,
}  # fmt: skip
