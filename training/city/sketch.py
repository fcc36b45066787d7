"""A drawing in metres that becomes an .osm file: nodes, ways and multipolygons with tags.

Points closer than a centimetre are one node, so that streets that meet share it, as OpenStreetMap's do.
"""

from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import quoteattr

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mdps.maps import Projection

Doubles = NDArray[np.float64]


class Sketch:
    """Elements in the order in which they were drawn; numbers count from 1."""

    def __init__(self) -> None:
        self.places: list[tuple[float, float]] = []
        self.node_tags: dict[int, dict[str, str]] = {}
        self.ways: list[tuple[list[int], dict[str, str]]] = []
        self.relations: list[tuple[list[tuple[int, str]], dict[str, str]]] = []
        self._known: dict[tuple[int, int], int] = {}

    def node(self, xy: ArrayLike, **tags: str) -> int:
        """The node at a place, with these tags added."""
        x, y = (float(v) for v in np.asarray(xy, np.float64))
        key = round(x * 100), round(y * 100)
        number = self._known.get(key)
        if number is None:
            self.places.append((x, y))
            number = self._known[key] = len(self.places)
        if tags:
            self.node_tags.setdefault(number, {}).update(_colons(tags))
        return number

    def line(self, points: ArrayLike, **tags: str) -> int:
        """A way through points (P, 2). `building__levels` stands for `building:levels`."""
        return self._way([self.node(p) for p in np.asarray(points, np.float64)], tags)

    def area(self, points: ArrayLike, **tags: str) -> int:
        """A closed way around points (P, 2)."""
        numbers = [self.node(p) for p in np.asarray(points, np.float64)]
        return self._way(numbers + numbers[:1], tags)

    def multipolygon(self, outer: ArrayLike, inner: Iterable[ArrayLike], **tags: str) -> None:
        """An area with holes."""
        members = [(self.area(outer), "outer")] + [(self.area(ring), "inner") for ring in inner]
        self.relations.append((members, {"type": "multipolygon", **_colons(tags)}))

    def _way(self, numbers: list[int], tags: dict[str, str]) -> int:
        self.ways.append((numbers, _colons(tags)))
        return len(self.ways)

    def moved(self, points: Doubles) -> None:
        """Give all nodes new places (N, 2), in their order."""
        self.places = [(float(x), float(y)) for x, y in points]

    def write(self, path: Path, projection: Projection, bounds: tuple[float, float, float, float]) -> None:
        """Write the file; `bounds` are south, west, north, east in degrees."""
        south, west, north, east = bounds
        lines = ["<?xml version='1.0' encoding='UTF-8'?>", '<osm version="0.6" generator="mdps make_city">']
        lines.append(f' <bounds minlat="{south:.7f}" minlon="{west:.7f}" maxlat="{north:.7f}" maxlon="{east:.7f}"/>')
        for number, (latitude, longitude) in enumerate(projection.to_degrees(np.array(self.places)), 1):
            head = f' <node id="{number}" version="1" lat="{latitude:.7f}" lon="{longitude:.7f}"'
            lines += _element("node", head, [], self.node_tags.get(number, {}))
        for number, (nodes, tags) in enumerate(self.ways, 1):
            inner = [f'  <nd ref="{node}"/>' for node in nodes]
            lines += _element("way", f' <way id="{number}" version="1"', inner, tags)
        for number, (members, tags) in enumerate(self.relations, 1):
            inner = [f'  <member type="way" ref="{way}" role="{role}"/>' for way, role in members]
            lines += _element("relation", f' <relation id="{number}" version="1"', inner, tags)
        path.write_text("\n".join([*lines, "</osm>", ""]), encoding="utf-8")


def _colons(tags: dict[str, str]) -> dict[str, str]:
    return {key.replace("__", ":"): value for key, value in tags.items()}


def _element(name: str, head: str, inner: list[str], tags: dict[str, str]) -> list[str]:
    inner = inner + [f"  <tag k={quoteattr(key)} v={quoteattr(value)}/>" for key, value in tags.items()]
    return [head + ">", *inner, f" </{name}>"] if inner else [head + "/>"]
