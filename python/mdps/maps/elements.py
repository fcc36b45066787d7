"""What a map draws, in metres: areas with holes, lines and points, each with its group; from OpenStreetMap or anything else.

Idea: the rasteriser and a maker of cities know only these; another source (Overture, a generator) gives them without passing
through OpenStreetMap's files. Extracts are incomplete, and what is missing costs no more than itself: a line breaks where a
node is missing, an area goes on with the nodes that it has, a ring of a multipolygon that does not close is left out, and a
hole is kept only inside of an outer ring that is there.

Cost: one projection of all nodes, and classification, some 10 us an element; for a hole, some 50 ns for each of its points and
each edge of the border at the same height, in a few MB.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .osm import OsmData, Relation
from .osm_classes import classify, is_area
from .projection import Array, Projection

_AT_ONCE = 1 << 17
"""Pairs of a point and an edge that are in memory together, some 50 bytes each."""


class Area(NamedTuple):
    """Rings (n, 2) in metres, the first point not repeated. What lies in an odd number of rings belongs to the area."""

    group: str
    label: str
    outer: tuple[Array, ...]
    inner: tuple[Array, ...]


class Line(NamedTuple):
    """A chain of points (n, 2) in metres, n >= 2; one that returns to its start repeats it."""

    group: str
    label: str
    points: Array


class Point(NamedTuple):
    """One place (2) in metres."""

    group: str
    label: str
    position: Array


@dataclass
class Elements:
    """All that can be drawn; `missing` counts what the source refers to and does not hold."""

    areas: list[Area] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    missing: Counter[str] = field(default_factory=Counter)


def osm_elements(osm: OsmData, projection: Projection) -> Elements:
    """Classify (`mdps.maps.osm_classes`) and project OpenStreetMap's elements; what has no class is left out.

    Nodes more than 60 degrees of arc from the origin count as missing.
    """
    found = Elements()
    places = _Places(osm, projection, found.missing)
    for way in osm.ways.values():
        closed = len(way.nodes) > 3 and way.nodes[0] == way.nodes[-1]
        kind = "area" if closed and is_area(way.tags) else "way"
        classes = classify(kind, way.tags)
        if classes is None:
            continue
        if kind == "way":
            found.lines += [Line(*classes, points) for points in places.pieces(way.nodes)]
        elif len(ring := places.ring(way.nodes)) > 2:
            found.areas.append(Area(*classes, (ring,), ()))
    for relation in osm.relations.values():
        if relation.tags.get("type") == "multipolygon" and (classes := classify("area", relation.tags)):
            outer, inner = _polygon(relation, osm, places, found.missing)
            if outer:
                found.areas.append(Area(*classes, outer, inner))
    for number, node in osm.nodes.items():
        if node.tags and number in places.row and (classes := classify("node", node.tags)):
            found.points.append(Point(*classes, places.xy[places.row[number]]))
    return found


class _Places:
    """Where nodes are in metres."""

    def __init__(self, osm: OsmData, projection: Projection, missing: Counter[str]) -> None:
        degrees = np.array([node[:2] for node in osm.nodes.values()], dtype=np.float64).reshape(-1, 2)
        seen = projection.sees(degrees)
        self.xy = projection.to_metres(degrees[seen])
        numbers = (number for number, see in zip(osm.nodes, seen) if see)
        self.row = {number: row for row, number in enumerate(numbers)}
        self.missing = missing

    def pieces(self, nodes: Sequence[int]) -> Iterator[Array]:
        """The parts of a line that lie between missing nodes."""
        rows = [self.row.get(number, -1) for number in nodes]
        self.missing["nodes of ways"] += rows.count(-1)
        ends = [-1, *(i for i, row in enumerate(rows) if row < 0), len(rows)]
        for first, end in pairwise(ends):
            if end - first > 2:
                yield self.xy[rows[first + 1 : end]]

    def ring(self, nodes: Sequence[int]) -> Array:
        """The points of a closed way that are there."""
        rows = [self.row[number] for number in nodes[:-1] if number in self.row]
        self.missing["nodes of areas"] += len(nodes) - 1 - len(rows)
        return self.xy[rows]


def _polygon(
    relation: Relation, osm: OsmData, places: _Places, missing: Counter[str]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Outer and inner rings of a multipolygon that are complete."""
    chains: dict[bool, list[tuple[int, ...]]] = {False: [], True: []}
    for member in relation.members:
        way = osm.ways.get(member.number) if member.kind == "way" else None
        if way is None:
            missing["members of relations"] += member.kind == "way"
        elif member.role in ("outer", "inner", ""):
            chains[member.role == "inner"].append(way.nodes)
    rings: list[list[Array]] = []
    for ways in chains.values():
        closed, n_open = _glue(ways)
        missing["rings that do not close"] += n_open
        rings.append([ring for nodes in closed if len(ring := places.ring(nodes)) > 2])
    outer, inner = rings
    return tuple(outer), tuple(ring for ring in inner if any(_inside(ring, border) for border in outer))


def _glue(ways: Sequence[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], int]:
    """Join ways at their ends to rings; returns the rings and how many chains stay open."""
    closed: list[tuple[int, ...]] = []
    n_open = 0
    left = [way for way in ways if len(way) > 1]
    while left:
        chain = left.pop()
        flipped = False
        while chain[0] != chain[-1]:
            follower = next((way for way in left if chain[-1] in (way[0], way[-1])), None)
            if follower is not None:
                left.remove(follower)
                chain += follower[1:] if follower[0] == chain[-1] else follower[-2::-1]
            elif not flipped:
                chain, flipped = chain[::-1], True  # grow the other end
            else:
                break
        if chain[0] != chain[-1]:
            n_open += 1
        elif len(chain) > 3:
            closed.append(chain)
    return closed, n_open


def _inside(ring: Array, border: Array) -> bool:
    """Whether most points of a ring lie in another (crossings of a ray to the East): holes may touch their border.

    Only the points in the border's box are looked at, each edge meets those at its height, and at most `_AT_ONCE` pairs of the
    two, or one edge's, are in memory at a time.
    """
    near = ring[((ring >= border.min(0)) & (ring <= border.max(0))).all(1)]
    if 2 * len(near) < len(ring):
        return False
    x, y = near[np.argsort(near[:, 1], kind="stable")].T
    (x0, y0), (x1, y1) = border.T, np.roll(border, -1, 0).T
    first, end = (np.searchsorted(y, height) for height in (np.minimum(y0, y1), np.maximum(y0, y1)))
    rises = first < end
    x0, y0, first, end, dx, dy = (each[rises] for each in (x0, y0, first, end, x1 - x0, y1 - y0))
    n_crossings = np.zeros(len(near), np.int64)
    n_pairs = np.cumsum(end - first)
    start = 0
    while start < len(first):
        done = n_pairs[start] - (end[start] - first[start])
        stop = max(int(np.searchsorted(n_pairs, done + _AT_ONCE, "right")), start + 1)
        n = (end - first)[start:stop]
        edge = np.repeat(np.arange(start, stop), n)
        point = np.arange(n.sum()) + np.repeat(first[start:stop] - np.cumsum(n) + n, n)
        crosses = x[point] < x0[edge] + (y[point] - y0[edge]) * dx[edge] / dy[edge]
        n_crossings += np.bincount(point[crosses], minlength=len(near))
        start = stop
    return bool(2 * (n_crossings % 2).sum() >= len(ring))
