"""OpenStreetMap data: files of three formats in, elements with tags out; nothing here knows what is drawn.

Formats, told apart by their content and not their name: XML (.osm, .xml: API, Overpass, osmium, JOSM), the API's and Overpass'
JSON, and .osm.pbf (through pyosmium, an optional dependency). An extract is never complete: ways refer to nodes and relations
to ways that it lacks, and bounds may be absent; that is normal. A file that is broken or is something else is a DataError of
one line. XML with a document type, the place of "billion laughs", is refused: OpenStreetMap's has none.

Cost: 20 us an element, from PBF 40 us, and about 0.5 kB of memory. Cut whole countries first:
`osmium extract --bbox WEST,SOUTH,EAST,NORTH --strategy smart FILE -o OUT`.
"""

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from xml.parsers import expat

from .errors import DataError

Tags = dict[str, str]


class Node(NamedTuple):
    """A point in degrees."""

    latitude: float
    longitude: float
    tags: Tags


class Way(NamedTuple):
    """A line of nodes, given by their numbers; closed where the last is the first."""

    nodes: tuple[int, ...]
    tags: Tags


class Member(NamedTuple):
    """What a relation holds: kind "node", "way" or "relation", number, and role, such as "outer"."""

    kind: str
    number: int
    role: str


class Relation(NamedTuple):
    """Several elements that are one thing."""

    members: tuple[Member, ...]
    tags: Tags


@dataclass
class OsmData:
    """The elements of a file by their numbers; later versions of one element replace earlier ones.

    `bounds` are south, west, north, east in degrees where the file names them, else None.
    """

    nodes: dict[int, Node] = field(default_factory=dict)
    ways: dict[int, Way] = field(default_factory=dict)
    relations: dict[int, Relation] = field(default_factory=dict)
    bounds: tuple[float, float, float, float] | None = None

    def extent(self) -> tuple[float, float, float, float] | None:
        """South, west, north, east of all nodes, in degrees; None where there is no node."""
        if not self.nodes:
            return None
        latitudes = [node.latitude for node in self.nodes.values()]
        longitudes = [node.longitude for node in self.nodes.values()]
        return min(latitudes), min(longitudes), max(latitudes), max(longitudes)


def read_osm(path: str | os.PathLike[str]) -> OsmData:
    """Read a file of OpenStreetMap data: XML, JSON or PBF, whatever its name ends with.

    Deleted elements (`visible="false"`, JOSM's `action="delete"`) and nodes without a position are left out.

    Raises:
        DataError: no such file, empty, truncated, another format, compressed, an error message of a server, no elements at all,
            or an element that is malformed; the line names the file, and the element where it is one.
        ImportError: a .pbf, and pyosmium is missing.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(1024)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    reader = _reader(head, path)
    data = reader(Path(path))
    if not (data.nodes or data.ways or data.relations):
        raise DataError(f"{path}: holds no nodes, ways or relations")
    return data


def _reader(head: bytes, path: object) -> Any:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text:
        raise DataError(f"{path}: empty file")
    if head[4:6] == b"\x0a\x09" and head[6:15] == b"OSMHeader":
        return _read_pbf
    for magic, name in ((b"\x1f\x8b", "gzip"), (b"BZh", "bzip2"), (b"PK\x03\x04", "zip"), (b"\xfd7zXZ", "xz")):
        if head.startswith(magic):
            raise DataError(f"{path}: compressed with {name}: unpack it first")
    if text.lower().startswith((b"<!doctype html", b"<html")):
        raise DataError(f"{path}: a web page (HTML), not OpenStreetMap data: most likely a server's error message")
    if text.startswith(b"<"):
        return _read_xml
    if text[:1] in b"{[":
        return _read_json
    raise DataError(f"{path}: expected OpenStreetMap XML, JSON or PBF, got {text[:20]!r} (convert: osmium cat FILE -o OUT.osm)")


# XML


def _read_xml(path: Path) -> OsmData:
    handler = _XmlHandler(path)
    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = handler.start, handler.end
    parser.StartDoctypeDeclHandler = handler.refuse
    parser.CharacterDataHandler = handler.text
    parser.buffer_text = True
    try:
        with open(path, "rb") as file:
            parser.ParseFile(file)
    except DataError:
        raise
    except (expat.ExpatError, LookupError, ValueError) as error:  # the last two: an encoding that expat does not know
        raise DataError(f"{path}: broken or truncated XML: {error}") from None
    return handler.data


class _XmlHandler:
    """What expat calls: collects one element at a time."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, OsmData()
        self.current: dict[str, Any] | None = None
        self.depth, self.remark = 0, ""
        self.in_remark = False

    def refuse(self, name: str, *_: object) -> None:
        raise DataError(f"{self.path}: XML with a document type ({name[:20]}), which OpenStreetMap's has not: refused")

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.depth += 1
        if self.depth == 1 and tag != "osm":
            raise DataError(f"{self.path}: expected OpenStreetMap XML (<osm>), got <{tag[:40]}>")
        if self.depth == 2 and tag in ("node", "way", "relation"):
            self.current = {**attributes, "type": tag, "tags": {}, "nodes": [], "members": []}
        elif self.depth == 2 and tag == "bounds":
            self.data.bounds = _bounds(attributes, self.path)
        elif self.depth == 3 and self.current is not None:
            self.inside(tag, attributes)
        self.in_remark = tag == "remark"

    def inside(self, tag: str, attributes: dict[str, str]) -> None:
        assert self.current is not None
        if tag == "tag":
            self.current["tags"][attributes.get("k", "")] = attributes.get("v", "")
        elif tag == "nd":
            self.current["nodes"].append(attributes.get("ref"))
        elif tag == "member":
            self.current["members"].append(attributes)

    def text(self, text: str) -> None:
        if self.in_remark:
            _check_remark(text, self.path)

    def end(self, tag: str) -> None:
        self.depth -= 1
        self.in_remark = False
        if self.depth == 1 and self.current is not None:
            _add(self.data, self.current, self.path)
            self.current = None


# JSON


def _read_json(path: Path) -> OsmData:
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: broken or truncated JSON: {str(error)[:100]}") from None
    elements = document.get("elements") if isinstance(document, dict) else None
    if not isinstance(elements, list):
        hint = " (GeoJSON is another format)" if isinstance(document, dict) and "features" in document else ""
        raise DataError(f'{path}: expected JSON of the OpenStreetMap API, {{"elements": [...]}}{hint}')
    _check_remark(document.get("remark"), path)
    data = OsmData()
    if isinstance(document.get("bounds"), dict):
        data.bounds = _bounds(document["bounds"], path)
    for element in elements:
        if isinstance(element, dict):  # null: an element that the server could not give
            _add(data, element, path)
    return data


# PBF


def _read_pbf(path: Path) -> OsmData:
    try:
        import osmium
    except ImportError:
        raise ImportError(f"reading {path} needs pyosmium: pip install osmium (or: osmium cat {path} -o OUT.osm)") from None
    data = OsmData()

    class Handler(osmium.SimpleHandler):  # type: ignore[misc, name-defined, unused-ignore]
        def node(self, node: Any) -> None:
            if node.deleted:
                data.nodes.pop(node.id, None)
            elif node.location.valid():
                data.nodes[node.id] = Node(node.location.lat, node.location.lon, dict(node.tags))

        def way(self, way: Any) -> None:
            if way.deleted:
                data.ways.pop(way.id, None)
            else:
                data.ways[way.id] = Way(tuple(n.ref for n in way.nodes), dict(way.tags))

        def relation(self, relation: Any) -> None:
            if relation.deleted:
                data.relations.pop(relation.id, None)
            else:
                kinds = {"n": "node", "w": "way", "r": "relation"}
                members = tuple(Member(kinds[m.type], m.ref, m.role) for m in relation.members)
                data.relations[relation.id] = Relation(members, dict(relation.tags))

    try:
        source = osmium.io.File(str(path), "pbf")  # whatever its name ends with
        Handler().apply_file(source)
        reader = osmium.io.Reader(source)
        box = reader.header().box()
        reader.close()
    except RuntimeError as error:
        raise DataError(f"{path}: broken or truncated PBF: {' '.join(str(error).split())[:100]}") from None
    if box.valid():
        south_west, north_east = box.bottom_left, box.top_right
        data.bounds = (south_west.lat, south_west.lon, north_east.lat, north_east.lon)
    return data


# One element of XML or JSON, which have the same names


def _add(data: OsmData, element: Mapping[str, Any], path: Path) -> None:
    """Put an element into the data; raise DataError where it is malformed."""
    kind = element.get("type")
    if kind not in ("node", "way", "relation"):
        return  # Overpass' areas and counts
    number = _number(element.get("id"), f"{path}: {kind} without a number (id)")
    if str(element.get("visible", "true")).lower() == "false" or element.get("action") == "delete":
        there: dict[int, Any] = getattr(data, f"{kind}s")
        there.pop(number, None)
        return
    where = f"{path}: {kind} {number}"
    tags = _tags(element.get("tags"), where)
    if kind == "node":
        if element.get("lat") is not None and element.get("lon") is not None:
            data.nodes[number] = Node(*_position(element["lat"], element["lon"], where), tags)
    elif kind == "way":
        nodes = _list(element.get("nodes"), f"{where}: nodes")
        data.ways[number] = Way(tuple(_number(n, f"{where}: a node's number") for n in nodes), tags)
    else:
        members = _list(element.get("members"), f"{where}: members")
        data.relations[number] = Relation(tuple(_member(member, where) for member in members), tags)


def _member(member: Any, where: str) -> Member:
    if not isinstance(member, Mapping):
        raise DataError(f"{where}: expected members with type, ref and role, got {_short(member)}")
    number = _number(member.get("ref"), f"{where}: a member's number")
    return Member(str(member.get("type")), number, str(member.get("role") or ""))


def _tags(tags: Any, where: str) -> Tags:
    if tags is None:
        return {}
    if not isinstance(tags, Mapping):
        raise DataError(f"{where}: expected tags as key: value, got {_short(tags)}")
    return {sys.intern(str(key)): str(value) for key, value in tags.items() if value is not None}


def _list(value: Any, where: str) -> Iterable[Any]:
    """The list without its nulls."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise DataError(f"{where}: expected a list, got {_short(value)}")
    return (entry for entry in value if entry is not None)


def _number(value: Any, where: str) -> int:
    try:
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            return int(value)
    except ValueError:
        pass
    raise DataError(f"{where}: expected a whole number, got {_short(value)}")


def _position(latitude: Any, longitude: Any, where: str) -> tuple[float, float]:
    try:
        position = float(latitude), float(longitude)
    except (TypeError, ValueError, OverflowError):
        position = math.nan, math.nan
    if not (abs(position[0]) <= 90.0 and abs(position[1]) <= 360.0):
        raise DataError(f"{where}: expected lat and lon in degrees, got {_short(latitude)} and {_short(longitude)}")
    return position


def _bounds(bounds: Mapping[str, Any], path: Path) -> tuple[float, float, float, float]:
    south, west = _position(bounds.get("minlat"), bounds.get("minlon"), f"{path}: bounds")
    north, east = _position(bounds.get("maxlat"), bounds.get("maxlon"), f"{path}: bounds")
    return south, west, north, east


def _check_remark(remark: Any, path: Path) -> None:
    """Overpass answers with what it has got so far, and says so in a remark."""
    if isinstance(remark, str) and "error" in remark.lower():
        raise DataError(f"{path}: incomplete, the server says: {' '.join(remark.split())[:100]}")


def _short(value: Any) -> str:
    """A value in an error's line."""
    return repr(value)[:40] if isinstance(value, (str, int, float, type(None))) else type(value).__name__
