"""Which class of the map an OpenStreetMap element belongs to: tables, and three short functions that apply them.

An element's tags become a label "key:value" (LABEL_KEYS); the first pattern that matches the *beginning* of the label names
the group, so that `amenity:parking` also takes `amenity:parking_space`, and the `natural:tree` of nodes a `natural:tree_row`.
Where no pattern of an element's own kind matches, those of the other kinds are tried (KINDS): the group names the raster's
channel, the element keeps its shape, so that a shop drawn as an area fills pixels of the channel of nodes.

Groups, their order (value in the raster = place + 1, and the first listed wins a pixel) and the choice of tags are those with
which the maps of Mapillary Geo-Localization and KITTI were made (Sarlin et al., OrienterNet, CVPR 2023), so that models trained
on such maps can be used.
"""

import re
from collections.abc import Mapping

AREA_PATTERNS: dict[str, str] = {
    "building": r"building",
    "parking": r"amenity:parking",
    "playground": r"leisure:(playground|pitch)",
    "grass": r"landuse:(grass|meadow|flowerbed)|landcover:grass|natural:grassland",
    "park": r"leisure:(park|garden|dog_park)",
    "forest": r"landuse:forest|natural:wood",
    "water": r"natural:water|waterway:",
}

WAY_PATTERNS: dict[str, str] = {
    "fence": r"barrier:(fence|yes)",
    "wall": r"barrier:(wall|retaining_wall)",
    "hedge": r"barrier:hedge",
    "kerb": r"barrier:kerb",
    "building_outline": r"(?!)",  # no tag: drawn around every building
    "cycleway": r"highway:cycleway",
    "path": r"highway:(pedestrian|footway|steps|path|corridor)",
    "road": r"highway:(motorway|trunk|primary|secondary|tertiary|service|construction|track|unclassified|residential|\w*_link)",
    "busway": r"highway:busway",
    "tree_row": r"natural:tree_row",
}

NODE_PATTERNS: dict[str, str] = {
    "tree": r"natural:tree",
    "stone": r"natural:stone",
    "crossing": r"highway:crossing",
    "lamp": r"highway:street_lamp",
    "traffic_signal": r"highway:traffic_signals",
    "bus_stop": r"highway:bus_stop",
    "stop_sign": r"highway:stop",
    "junction": r"highway:motorway_junction",
    "bus_stop_position": r"public_transport:stop_position",
    "gate": r"barrier:(gate|lift_gate|swing_gate)",
    "bollard": r"barrier:bollard",
    "shop": r"shop|amenity:bank",
    "restaurant": r"amenity:(restaurant|fast_food)",
    "bar": r"amenity:(cafe|bar|pub|biergarten)",
    "pharmacy": r"amenity:pharmacy",
    "fuel": r"amenity:fuel",
    "bicycle_parking": r"amenity:(bicycle_parking|bicycle_rental)",
    "charging_station": r"amenity:charging_station",
    "parking_entrance": r"amenity:parking_entrance",
    "atm": r"amenity:atm",
    "toilets": r"amenity:toilets",
    "vending_machine": r"amenity:vending_machine",
    "fountain": r"amenity:(fountain|drinking_water)",
    "waste_basket": r"amenity:(waste_basket|waste_disposal)",
    "bench": r"amenity:bench",
    "post_box": r"amenity:post_box",
    "artwork": r"tourism:artwork",
    "recycling": r"amenity:recycling",
    "give_way": r"highway:give_way",
    "clock": r"amenity:clock",
    "fire_hydrant": r"emergency:fire_hydrant",
    "pole": r"man_made:(flagpole|utility_pole)",
    "street_cabinet": r"man_made:street_cabinet",
}

AREAS, WAYS, NODES = tuple(AREA_PATTERNS), tuple(WAY_PATTERNS), tuple(NODE_PATTERNS)
"""Names in order: value in the raster = index + 1."""

LABEL_KEYS: dict[str, tuple[str, ...]] = {
    "area": ("amenity", "landcover", "leisure", "shop", "highway", "tourism", "natural", "waterway", "landuse"),
    "way": ("highway", "barrier", "natural"),
    "node": ("amenity", "natural", "highway", "barrier", "shop", "tourism", "public_transport", "emergency", "man_made"),
}
"""The first of these keys that an element has gives its label; areas look for `building` and `area:highway` before. An element
with none of them, such as one that has only `name`, `note`, `source`, `entrance`, `phone` or `inscription`, is nothing."""

KINDS: dict[str, tuple[dict[str, str], ...]] = {
    "area": (AREA_PATTERNS, WAY_PATTERNS, NODE_PATTERNS),
    "way": (WAY_PATTERNS, NODE_PATTERNS),
    "node": (NODE_PATTERNS, WAY_PATTERNS),
}
"""Where an element of a kind looks for its label, in this order."""

AREA_KEYS = ("area", "building", "amenity", "indoor", "landuse", "landcover", "leisure", "public_transport", "shop")
AREA_NATURAL = frozenset({"wood", "grassland", "water"})
"""A closed way with one of these keys, its value not "no", or with one of these values of `natural`, is an area (`is_area`)."""

GROUND_LEVELS = (0.0, 1.0)
"""What has a `level`, and none between these, is not on the ground; 1, because some countries count from it."""

Tags = Mapping[str, str]


def is_area(tags: Tags) -> bool:
    """Whether a closed way is the border of an area, not a way that returns to its start (a roundabout)."""
    if tags.get("area") == "no":
        return False
    return any(tags.get(key, "no") != "no" for key in AREA_KEYS) or tags.get("natural") in AREA_NATURAL


def is_on_ground(tags: Tags) -> bool:
    """Whether a camera in the street can meet it: neither on a higher or lower floor nor below ground."""
    if tags.get("location") == "underground" or tags.get("parking") == "underground":
        return False
    levels, layers = _numbers(tags.get("level", "")), _numbers(tags.get("layer", ""))
    if levels and not any(low <= GROUND_LEVELS[1] and high >= GROUND_LEVELS[0] for low, high in levels):
        return False
    return not layers or max(high for _, high in layers) >= 0.0


def classify(kind: str, tags: Tags) -> tuple[str, str] | None:
    """Group and label of an element of a kind, "area", "way" or "node", by its tags; None where it is not drawn."""
    label = _label(kind, tags)
    if label is None or not is_on_ground(tags):
        return None
    for patterns in KINDS[kind]:
        for group, pattern in patterns.items():
            if re.match(pattern, label):
                return group, label
    return None


def _label(kind: str, tags: Tags) -> str | None:
    if kind == "area" and tags.get("building", "no") != "no":
        use = tags["building"]
        if use == "yes":
            use = tags.get("amenity", tags.get("tourism", "yes"))
        return "building" if use == "yes" else f"building:{use}"
    if kind == "area" and "area:highway" in tags:
        return f"highway:{tags['area:highway']}"
    for key in LABEL_KEYS[kind]:
        if key in tags and not (kind == "node" and "disused" in tags[key]):
            return f"{key}:{tags[key]}"
    return None


def _numbers(text: str) -> list[tuple[float, float]]:
    """Ranges in a value such as "0", "-1;0", "0,1" or "0-2"; nothing where it is none of these."""
    found = re.findall(r"(-?\d+(?:\.\d+)?)(?:\s*-\s*(-?\d+(?:\.\d+)?))?", text)
    ranges = [(float(low), float(high or low)) for low, high in found]
    return [(min(pair), max(pair)) for pair in ranges]
