"""Small files of OpenStreetMap data, written by the tests: a square of streets with one of everything."""

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

Place = tuple[float, float]


def town() -> list[dict[str, Any]]:
    """Elements of the API's form, around latitude 50, longitude 8: a block of about 70 x 110 m.

    Way 20 is a building, relation 30 one with a courtyard whose border is two open ways (21, 22), 23 a road that leaves the
    town, 24 a closed road (no area), 25 a park; node 9 a tree, 10 a shop on the second floor.
    """
    places = {
        **dict(zip(range(1, 9), rectangle(50.0002, 8.0002, 50.0004, 8.0006) + rectangle(50.0005, 8.0002, 50.0008, 8.0012))),
        **dict(zip(range(11, 15), rectangle(50.0006, 8.0004, 50.0007, 8.0010))),
        **dict(zip(range(15, 19), rectangle(50.0001, 8.0008, 50.0004, 8.0013))),
        9: (50.00045, 8.0007),
        10: (50.0003, 8.0007),
        19: (49.9, 8.0007),
    }
    tags: dict[int, dict[str, str]] = {9: {"natural": "tree"}, 10: {"shop": "bakery", "level": "2"}}
    nodes = [_node(number, place, tags.get(number)) for number, place in places.items()]
    ways = [
        _way(20, (1, 2, 3, 4, 1), {"building": "yes", "amenity": "school"}),
        _way(21, (5, 6, 7), {}),
        _way(22, (5, 8, 7), {}),
        _way(23, (9, 19), {"highway": "residential"}),
        _way(24, (15, 16, 17, 18, 15), {"highway": "service"}),
        _way(25, (15, 16, 17, 18, 15), {"leisure": "park"}),
        _way(26, (11, 12, 13, 14, 11), {}),
    ]
    members = [{"type": "way", "ref": ref, "role": role} for ref, role in ((21, "outer"), (22, ""), (26, "inner"))]
    return nodes + ways + [relation(30, members, {"type": "multipolygon", "building": "apartments"})]


def rectangle(south: float, west: float, north: float, east: float) -> list[Place]:
    return [(south, west), (south, east), (north, east), (north, west)]


def _node(number: int, place: Place, tags: dict[str, str] | None = None) -> dict[str, Any]:
    return {"type": "node", "id": number, "lat": place[0], "lon": place[1], "tags": tags or {}}


def _way(number: int, nodes: tuple[int, ...], tags: dict[str, str]) -> dict[str, Any]:
    return {"type": "way", "id": number, "nodes": list(nodes), "tags": tags}


def relation(number: int, members: list[dict[str, Any]], tags: dict[str, str]) -> dict[str, Any]:
    return {"type": "relation", "id": number, "members": members, "tags": tags}


def write_json(path: Path, elements: list[Any], **more: Any) -> Path:
    path.write_text(json.dumps({"version": "0.6", **more, "elements": elements}))
    return path


def write_xml(path: Path, elements: list[dict[str, Any]], head: str = "") -> Path:
    """The same elements as XML; `head` goes before the first one."""
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', '<osm version="0.6" generator="a test">', head]
    for element in elements:
        own = {key: value for key, value in element.items() if key not in ("type", "tags", "nodes", "members")}
        lines.append(f"<{element['type']} {_attributes(own)}>")
        lines += [f'<nd ref="{ref}"/>' for ref in element.get("nodes", ())]
        lines += [f"<member {_attributes(member)}/>" for member in element.get("members", ())]
        lines += [f"<tag k={quoteattr(k)} v={quoteattr(v)}/>" for k, v in element.get("tags", {}).items()]
        lines.append(f"</{element['type']}>")
    path.write_text("\n".join([*lines, "</osm>\n"]))
    return path


def _attributes(values: dict[str, Any]) -> str:
    return " ".join(f"{key}={quoteattr(str(value))}" for key, value in values.items())
