"""Which class of the map an OpenStreetMap element belongs to: tables, and three short functions that apply them.

An element's tags become a label "key:value" (LABEL_KEYS); the first pattern that matches the *beginning* of the label names the
group, so that `amenity:parking` also takes `amenity:parking_space`, and the `natural:tree` of nodes a `natural:tree_row`. Where no
pattern of an element's own kind matches, those of the other kinds are tried (FALLBACKS): the group names the raster's channel, the
element keeps its shape, so that a shop drawn as an area fills pixels of the channel of nodes.

Groups, their order (value in the raster = place + 1, and the first listed wins a pixel) and the choice of tags are those with which
the maps of Mapillary Geo-Localization and KITTI were made (Sarlin et al., OrienterNet, CVPR 2023, supplement B), so that models
trained on such maps can be used.
"""

import re

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
    "pole": r"man_made:(flagpole|utility_pole)|power:pole",
    "street_cabinet": r"man_made:street_cabinet",
}

AREAS, WAYS, NODES = tuple(AREA_PATTERNS), tuple(WAY_PATTERNS), tuple(NODE_PATTERNS)
"""Names in order: value in the raster = index + 1."""
