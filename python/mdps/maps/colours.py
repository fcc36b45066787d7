"""The colours (RGB) in which maps of this kind are drawn in the field: buildings blue, roads red, parks green, void grey."""

Colour = tuple[int, int, int]

VOID: Colour = (229, 229, 229)

AREA_COLOURS: dict[str, Colour] = {
    "building": (84, 155, 255),
    "parking": (255, 229, 145),
    "playground": (150, 133, 125),
    "grass": (188, 255, 143),
    "park": (0, 158, 16),
    "forest": (0, 92, 9),
    "water": (184, 213, 255),
}

WAY_COLOURS: dict[str, Colour] = {
    "fence": (238, 0, 255),
    "wall": (0, 0, 0),
    "hedge": (107, 68, 48),
    "kerb": (255, 234, 0),
    "building_outline": (0, 0, 255),
    "cycleway": (0, 251, 255),
    "path": (8, 237, 0),
    "road": (255, 0, 0),
    "busway": (255, 128, 0),
    "tree_row": (0, 92, 9),
}
