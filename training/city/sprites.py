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
Shape = tuple[str, Colour, tuple[float, ...]]  # "box": x, y, width, height; "disc": x, y, radius; shares of the picture's height

GREY, DARK, WHITE = (150, 152, 155), (58, 60, 64), (238, 238, 235)
WOOD, RED, BLUE = (140, 100, 62), (200, 42, 38), (40, 90, 180)
GREEN, YELLOW = (40, 120, 66), (236, 190, 40)


def _tree(rng: np.random.Generator, image: Bytes) -> None:
    height, width = image.shape[:2]
    hue = np.array([rng.uniform(50, 95), rng.uniform(95, 135), rng.uniform(35, 60)])
    cv2.rectangle(image, (int(0.46 * width), int(0.55 * height)), (int(0.54 * width), height), (*_colour(hue * 0 + 82), 255), -1)
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


def _shapes(*shapes: Shape) -> Callable[[np.random.Generator, Bytes], None]:
    """A picture of boxes and discs; places and sizes are shares of the height, x from the middle, y from the ground."""

    def draw(rng: np.random.Generator, image: Bytes) -> None:
        height, width = image.shape[:2]
        for kind, colour, values in shapes:
            x, y, *size = (v * height for v in values)
            middle = (round(width / 2 + x), round(height - y))
            if kind == "disc":
                cv2.circle(image, middle, round(size[0]), (*colour, 255), -1)
            else:
                half, up = size[0] / 2, size[1]
                corner = (round(width / 2 + x - half), round(height - y - up))
                cv2.rectangle(image, corner, (round(width / 2 + x + half) - 1, middle[1] - 1), (*colour, 255), -1)

    return draw


def _sign(letter: str, colour: Colour) -> Callable[[np.random.Generator, Bytes], None]:
    """A board on a pole."""
    board = _shapes(("box", GREY, (0, 0, 0.03, 0.7)), ("box", WHITE, (0, 0.62, 0.36, 0.38)), ("box", colour, (0, 0.64, 0.32, 0.34)))

    def draw(rng: np.random.Generator, image: Bytes) -> None:
        board(rng, image)
        height, width = image.shape[:2]
        scale = height / 128
        (w, h), _ = cv2.getTextSize(letter, cv2.FONT_HERSHEY_SIMPLEX, scale, 2)
        place = (int(width / 2 - w / 2), int(height * 0.19 + h / 2))
        cv2.putText(image, letter, place, cv2.FONT_HERSHEY_SIMPLEX, scale, (*WHITE, 255), max(1, round(2 * scale)))

    return draw


Draw = Callable[[np.random.Generator, Bytes], None]
SPRITES: dict[str, tuple[float, float, Draw]] = {
    "tree": (5.0, 8.0, _tree),
    "conifer": (4.0, 9.0, _conifer),
    "stone": (1.2, 0.8, _shapes(("disc", (140, 136, 128), (0, 0.3, 0.5)))),
    "lamp": (1.5, 6.0, _shapes(("box", DARK, (0, 0, 0.025, 0.96)), ("box", DARK, (0.06, 0.95, 0.14, 0.02)), ("box", (250, 240, 190), (0.1, 0.915, 0.08, 0.035)))),
    "traffic_signal": (1.0, 3.4, _shapes(("box", DARK, (0, 0, 0.03, 0.8)), ("box", (30, 32, 34), (0, 0.68, 0.14, 0.32)), ("disc", RED, (0, 0.94, 0.04)), ("disc", YELLOW, (0, 0.84, 0.04)), ("disc", (60, 190, 90), (0, 0.74, 0.04)))),
    "bus_stop": (1.2, 3.0, _shapes(("box", GREY, (0, 0, 0.03, 1)), ("disc", YELLOW, (0, 0.85, 0.14)), ("disc", GREEN, (0, 0.85, 0.09)))),
    "stop_sign": (1.0, 2.6, _shapes(("box", GREY, (0, 0, 0.03, 0.8)), ("disc", WHITE, (0, 0.84, 0.15)), ("disc", RED, (0, 0.84, 0.135)), ("box", WHITE, (0, 0.81, 0.18, 0.05)))),
    "give_way": (1.0, 2.6, _shapes(("box", GREY, (0, 0, 0.03, 0.8)), ("disc", RED, (0, 0.84, 0.14)), ("disc", WHITE, (0, 0.84, 0.08)))),
    "gate": (3.0, 1.4, _shapes(*[("box", DARK, (x, 0, 0.05, 1)) for x in (-1.0, -0.5, 0.0, 0.5, 1.0)], ("box", DARK, (0, 0.75, 2.1, 0.1)), ("box", DARK, (0, 0.2, 2.1, 0.1)))),
    "bollard": (0.3, 0.9, _shapes(("box", DARK, (0, 0, 0.22, 1)), ("box", WHITE, (0, 0.75, 0.22, 0.12)))),
    "fire_hydrant": (0.6, 0.9, _shapes(("box", RED, (0, 0, 0.34, 0.85)), ("disc", RED, (0, 0.82, 0.17)), ("box", RED, (0, 0.5, 0.6, 0.16)))),
    "bench": (1.8, 0.9, _shapes(("box", DARK, (-0.8, 0, 0.12, 0.5)), ("box", DARK, (0.8, 0, 0.12, 0.5)), ("box", WOOD, (0, 0.42, 2, 0.12)), ("box", WOOD, (0, 0.66, 2, 0.3)))),
    "waste_basket": (0.6, 1.0, _shapes(("box", GREEN, (0, 0.1, 0.5, 0.8)), ("box", DARK, (0, 0.8, 0.54, 0.1)))),
    "post_box": (0.8, 1.5, _shapes(("box", DARK, (0, 0, 0.06, 0.5)), ("box", YELLOW, (0, 0.45, 0.46, 0.55)), ("box", DARK, (0, 0.8, 0.3, 0.05)))),
    "fountain": (3.5, 2.2, _shapes(("box", GREY, (0, 0, 1.5, 0.28)), ("box", (120, 170, 210), (0, 0.2, 1.36, 0.06)), ("box", (200, 225, 240), (0, 0.26, 0.1, 0.6)), ("disc", (200, 225, 240), (0, 0.84, 0.14)))),
    "artwork": (2.0, 4.0, _shapes(("box", GREY, (0, 0, 0.34, 0.35)), ("box", (96, 116, 100), (0, 0.35, 0.16, 0.42)), ("disc", (96, 116, 100), (0, 0.84, 0.08)), ("box", (96, 116, 100), (0.09, 0.62, 0.22, 0.06)))),
    "recycling": (2.0, 1.6, _shapes(("box", GREEN, (-0.32, 0, 0.5, 0.95)), ("box", BLUE, (0.32, 0, 0.5, 0.95)), ("disc", DARK, (-0.32, 0.6, 0.1)), ("disc", DARK, (0.32, 0.6, 0.1)))),
    "clock": (1.0, 4.0, _shapes(("box", DARK, (0, 0, 0.04, 0.8)), ("disc", DARK, (0, 0.87, 0.12)), ("disc", WHITE, (0, 0.87, 0.1)), ("box", DARK, (0, 0.87, 0.01, 0.08)))),
    "pole": (0.4, 8.0, _shapes(("box", WOOD, (0, 0, 0.03, 1)))),
    "street_cabinet": (1.4, 1.3, _shapes(("box", (120, 128, 120), (0, 0, 0.95, 0.95)), ("box", DARK, (0, 0.05, 0.02, 0.85)))),
    "bicycle_parking": (2.4, 1.0, _shapes(*[("box", GREY, (x, 0, 0.05, 0.85)) for x in (-0.9, -0.5, -0.1, 0.3, 0.7)], *[("disc", DARK, (x, 0.35, 0.18)) for x in (-0.7, 0.1, 0.9)], ("box", RED, (0, 0.55, 1.6, 0.08)))),
    "shop": (1.4, 3.4, _sign("S", (150, 60, 150))),
    "restaurant": (1.4, 3.4, _sign("R", (190, 90, 30))),
    "bar": (1.4, 3.4, _sign("B", (120, 80, 40))),
    "pharmacy": (1.4, 3.4, _sign("+", (30, 150, 70))),
    "fuel": (1.4, 3.4, _sign("F", RED)),
    "atm": (1.4, 3.4, _sign("$", BLUE)),
    "toilets": (1.4, 3.4, _sign("WC", BLUE)),
    "vending_machine": (1.0, 1.9, _shapes(("box", RED, (0, 0, 0.5, 1)), ("box", (190, 215, 230), (-0.05, 0.35, 0.32, 0.55)))),
    "charging_station": (1.4, 3.4, _sign("E", GREEN)),
    "parking_entrance": (1.4, 3.4, _sign("P", BLUE)),
}  # fmt: skip
"""Width and height in metres, and what is drawn. Classes that lie flat (crossings, stop positions) are not here."""

TREES = ("tree", "conifer")
N_TREES = 4
"""Trees have as many pictures for each kind."""

TEXELS = 128
"""Rows of a picture at its finest."""


def sprites(rng: np.random.Generator) -> tuple[tuple[Sprite, ...], dict[str, list[int]]]:
    """All pictures, and which of them a kind may have."""
    pictures: list[Sprite] = []
    of_kind: dict[str, list[int]] = {}
    for kind, (width, height, draw) in SPRITES.items():
        for _ in range(N_TREES if kind in TREES else 1):
            columns = max(8, round(TEXELS * width / height))
            image = np.zeros((TEXELS, columns, 4), np.uint8)
            draw(rng, image)
            covered = image[..., 3] > 0
            grain = rng.normal(0, 7, (TEXELS, columns, 1))
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
