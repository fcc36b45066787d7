"""Billboards of a made city: what stands at a node of the map, drawn with OpenCV.

A kind is a name of the map's classes of nodes; `SPRITES` says how large it is and what it looks like. Shops and the like
are signs on a pole, each kind with its own colour and letter, so that the image tells what the map tells.
"""

from collections.abc import Callable

import cv2
import numpy as np
from numpy.typing import NDArray

from city.textures import Sprite

Bytes = NDArray[np.uint8]
Colour = tuple[int, int, int]
Draw = Callable[[np.random.Generator, Bytes], None]

PAINTS: dict[str, Colour] = {
    "grey": (150, 152, 155), "dark": (58, 60, 64), "white": (238, 238, 235), "wood": (140, 100, 62), "red": (200, 42, 38),
    "blue": (40, 90, 180), "green": (40, 120, 66), "yellow": (236, 190, 40), "stone": (140, 136, 128), "light": (250, 240, 190),
    "water": (120, 170, 210), "spray": (200, 225, 240), "bronze": (96, 116, 100), "glass": (190, 215, 230),
    "violet": (150, 60, 150), "orange": (190, 90, 30), "brown": (120, 80, 40),
}  # fmt: skip


def _tree(rng: np.random.Generator, image: Bytes) -> None:
    height, width = image.shape[:2]
    hue = np.array([rng.uniform(50, 95), rng.uniform(95, 135), rng.uniform(35, 60)])
    cv2.rectangle(
        image, (int(0.46 * width), int(0.55 * height)), (int(0.54 * width), height), (*_colour(hue * 0 + 82), 255), -1
    )
    for share in np.linspace(0, 1, 90):
        angle, radius = rng.uniform(0, 2 * np.pi), rng.uniform(0, 1) ** 0.5
        x = width * (0.5 + 0.34 * radius * np.cos(angle))
        y = height * (0.36 + 0.26 * radius * np.sin(angle))
        light = 0.65 + 0.5 * (1 - y / height) * share + rng.uniform(-0.1, 0.1)
        cv2.circle(image, (int(x), int(y)), int(rng.uniform(0.05, 0.12) * width), (*_colour(hue * light), 255), -1)


def _conifer(rng: np.random.Generator, image: Bytes) -> None:
    height, width = image.shape[:2]
    cv2.rectangle(image, (int(0.46 * width), int(0.85 * height)), (int(0.54 * width), height), (84, 66, 50, 255), -1)
    for i in range(7):
        top, bottom = height * i * 0.11, height * (0.3 + 0.1 * i)
        half = width * (0.14 + 0.05 * i)
        points = np.array([[width / 2, top], [width / 2 - half, bottom], [width / 2 + half, bottom]], np.int32)
        shade = np.array([40, 84, 52]) * rng.uniform(0.75, 1.15)
        cv2.fillPoly(image, [points], (*_colour(shade), 255))


def _colour(values: NDArray[np.float64]) -> Colour:
    r, g, b = (int(np.clip(v, 0, 255)) for v in values)
    return r, g, b


def _shapes(text: str) -> Draw:
    """A picture of boxes "paint x y width height" and discs "paint x y radius", one over the other.

    Places and sizes are shares of the height; x counts from the middle, y from the ground: to a box's lower side, or a disc's
    middle.
    """

    def draw(rng: np.random.Generator, image: Bytes) -> None:
        height, width = image.shape[:2]
        for shape in text.split("; "):
            paint, *numbers = shape.split()
            x, y, *size = (float(v) * height for v in numbers)
            colour = (*PAINTS[paint], 255)
            if len(size) == 1:
                cv2.circle(image, (round(width / 2 + x), round(height - y)), round(size[0]), colour, -1)
            else:
                low = round(width / 2 + x - size[0] / 2), round(height - y - size[1])
                high = round(width / 2 + x + size[0] / 2) - 1, round(height - y) - 1
                cv2.rectangle(image, low, high, colour, -1)

    return draw


def _sign(letter: str, paint: str) -> Draw:
    """A board on a pole."""
    board = _shapes(f"grey 0 0 0.03 0.7; white 0 0.62 0.36 0.38; {paint} 0 0.64 0.32 0.34")

    def draw(rng: np.random.Generator, image: Bytes) -> None:
        board(rng, image)
        height, width = image.shape[:2]
        scale = height / 128
        (w, h), _ = cv2.getTextSize(letter, cv2.FONT_HERSHEY_SIMPLEX, scale, 2)
        place = (int(width / 2 - w / 2), int(height * 0.19 + h / 2))
        colours = np.ascontiguousarray(image[..., :3])
        cv2.putText(colours, letter, place, cv2.FONT_HERSHEY_SIMPLEX, scale, PAINTS["white"], max(1, round(2 * scale)))
        image[..., :3] = colours

    return draw


SPRITES: dict[str, tuple[float, float, Draw]] = {
    "tree": (5.0, 8.0, _tree),
    "conifer": (4.0, 9.0, _conifer),
    "stone": (1.2, 0.8, _shapes("stone 0 0.3 0.5")),
    "lamp": (1.5, 6.0, _shapes("dark 0 0 0.025 0.96; dark 0.06 0.95 0.14 0.02; light 0.1 0.915 0.08 0.035")),
    "traffic_signal": (
        1.0,
        3.4,
        _shapes("dark 0 0 0.03 0.8; dark 0 0.68 0.14 0.32; red 0 0.94 0.04; yellow 0 0.84 0.04; green 0 0.74 0.04"),
    ),
    "bus_stop": (1.2, 3.0, _shapes("grey 0 0 0.03 1; yellow 0 0.85 0.14; green 0 0.85 0.09")),
    "stop_sign": (1.0, 2.6, _shapes("grey 0 0 0.03 0.8; white 0 0.84 0.15; red 0 0.84 0.135; white 0 0.81 0.18 0.05")),
    "give_way": (1.0, 2.6, _shapes("grey 0 0 0.03 0.8; red 0 0.84 0.14; white 0 0.84 0.08")),
    "gate": (
        3.0,
        1.4,
        _shapes(
            "dark -1 0 0.05 1; dark -0.5 0 0.05 1; dark 0 0 0.05 1; dark 0.5 0 0.05 1; dark 1 0 0.05 1; "
            "dark 0 0.75 2.1 0.1; dark 0 0.2 2.1 0.1"
        ),
    ),
    "bollard": (0.3, 0.9, _shapes("dark 0 0 0.22 1; white 0 0.75 0.22 0.12")),
    "fire_hydrant": (0.6, 0.9, _shapes("red 0 0 0.34 0.85; red 0 0.82 0.17; red 0 0.5 0.6 0.16")),
    "bench": (1.8, 0.9, _shapes("dark -0.8 0 0.12 0.5; dark 0.8 0 0.12 0.5; wood 0 0.42 2 0.12; wood 0 0.66 2 0.3")),
    "waste_basket": (0.6, 1.0, _shapes("green 0 0.1 0.5 0.8; dark 0 0.8 0.54 0.1")),
    "post_box": (0.8, 1.5, _shapes("dark 0 0 0.06 0.5; yellow 0 0.45 0.46 0.55; dark 0 0.8 0.3 0.05")),
    "fountain": (3.5, 2.2, _shapes("grey 0 0 1.5 0.28; water 0 0.2 1.36 0.06; spray 0 0.26 0.1 0.6; spray 0 0.84 0.14")),
    "artwork": (
        2.0,
        4.0,
        _shapes("grey 0 0 0.34 0.35; bronze 0 0.35 0.16 0.42; bronze 0 0.84 0.08; bronze 0.09 0.62 0.22 0.06"),
    ),
    "recycling": (2.0, 1.6, _shapes("green -0.32 0 0.5 0.95; blue 0.32 0 0.5 0.95; dark -0.32 0.6 0.1; dark 0.32 0.6 0.1")),
    "clock": (1.0, 4.0, _shapes("dark 0 0 0.04 0.8; dark 0 0.87 0.12; white 0 0.87 0.1; dark 0 0.87 0.01 0.08")),
    "pole": (0.4, 8.0, _shapes("wood 0 0 0.03 1")),
    "street_cabinet": (1.4, 1.3, _shapes("grey 0 0 0.95 0.95; dark 0 0.05 0.02 0.85")),
    "bicycle_parking": (
        2.4,
        1.0,
        _shapes(
            "grey -0.9 0 0.05 0.85; grey -0.5 0 0.05 0.85; grey -0.1 0 0.05 0.85; grey 0.3 0 0.05 0.85; "
            "grey 0.7 0 0.05 0.85; dark -0.7 0.35 0.18; dark 0.1 0.35 0.18; dark 0.9 0.35 0.18; "
            "red 0 0.55 1.6 0.08"
        ),
    ),
    "shop": (1.4, 3.4, _sign("S", "violet")),
    "restaurant": (1.4, 3.4, _sign("R", "orange")),
    "bar": (1.4, 3.4, _sign("B", "brown")),
    "pharmacy": (1.4, 3.4, _sign("+", "green")),
    "fuel": (1.4, 3.4, _sign("F", "red")),
    "atm": (1.4, 3.4, _sign("$", "blue")),
    "toilets": (1.4, 3.4, _sign("WC", "blue")),
    "vending_machine": (1.0, 1.9, _shapes("red 0 0 0.5 1; glass -0.05 0.35 0.32 0.55")),
    "charging_station": (1.4, 3.4, _sign("E", "green")),
    "parking_entrance": (1.4, 3.4, _sign("P", "blue")),
}
"""Width and height in metres, and what is drawn. Classes that lie flat (crossings, stop positions) are not here."""

TREES = ("tree", "conifer")
N_TREES = 4
"""Trees have as many pictures for each kind."""

TEXELS, TREE_TEXELS = 128, 256
"""Rows of a picture at its finest."""


def sprites(rng: np.random.Generator) -> tuple[tuple[Sprite, ...], dict[str, list[int]]]:
    """All pictures, and which of them a kind may have."""
    pictures: list[Sprite] = []
    of_kind: dict[str, list[int]] = {}
    for kind, (width, height, draw) in SPRITES.items():
        is_tree = kind in TREES
        rows = TREE_TEXELS if is_tree else TEXELS
        for _ in range(N_TREES if is_tree else 1):
            columns = max(8, round(rows * width / height))
            image = np.zeros((rows, columns, 4), np.uint8)
            draw(rng, image)
            covered = image[..., 3] > 0
            grain = rng.normal(0, 7, (rows, columns, 1))
            image[..., :3] = np.where(covered[..., None], np.clip(image[..., :3] + grain, 0, 255), 0)
            of_kind.setdefault(kind, []).append(len(pictures))
            pictures.append(Sprite.of(_spread(image)))
    return tuple(pictures), of_kind


def _spread(image: Bytes) -> Bytes:
    """Give the colours around a picture's edge to the empty texels beside it, which smaller pictures average."""
    covered = image[..., 3:] > 0
    blurred = cv2.blur(image[..., :3] * covered, (9, 9)).astype(np.float32)
    weight = cv2.blur(covered.astype(np.float32), (9, 9))[..., None]
    filled = np.where(covered, image[..., :3], blurred / np.maximum(weight, 1e-3))
    return np.concatenate([np.clip(filled, 0, 255).astype(np.uint8), image[..., 3:]], 2)
