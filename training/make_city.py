"""A city of your own: a map, and street images that show it, in the layout of MGL or KITTI. No download, exact poses.

    python training/make_city.py --out data/made --seed 0           # MGL's layout, scene "made_0", half a minute
    python training/make_city.py --out data/made --seed 1 2         # two others beside it: train on some, test on the others
    python training/make_city.py --out data/kitti --seed 2 --format kitti
    python training/make_city.py --out data/made --osm berlin.osm --bbox 52.4712,13.4360,52.4752,13.4432
    python training/make_city.py --seed 0 --preview city.png        # image, depth and map side by side; writes no data

A seed invents streets, blocks, buildings with courtyards, parks, water, trees and street furniture, writes them as an .osm file
and draws images from that file alone, as it does from a real extract (--osm). So the images show what the map shows, up to what
no map has: facades, colours, heights. One seed gives the same bytes again, another seed another city.

Needs OpenCV (`pip install '.[localization]'`). An image of 256 x 256 pixels takes about 15 ms of one core.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from city import kitti_files, mapillary_files, preview
from city.plan import draw_city
from city.recording import SIZES
from city.scene import Scene, build_scene

from mdps.maps import Projection, RasterMap, rasterise, read_osm
from mdps.maps.__main__ import joined

MARGIN = 30.0
"""Metres of map around an invented city."""
LARGEST = 3000.0
"""Metres: a larger city does not fit a usual memory, 0.2 m for each texel of the ground."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(joined(list(sys.argv[1:] if arguments is None else arguments)))
    try:
        make(options)
    except (ValueError, OSError, ImportError) as error:
        print(f"make_city: {error}", file=sys.stderr)
        return 2
    return 0


def make(options: argparse.Namespace) -> None:
    """Make what the command line asks for, a city after the other."""
    if not (options.out or options.preview):
        raise ValueError("expected --out DIR, --preview FILE.png, or both")
    if options.preview and options.preview.suffix.lower() not in (".png", ".jpg", ".jpeg"):
        raise ValueError(f"--preview: expected a name that ends with .png or .jpg, got {options.preview}")
    if options.bbox and not options.osm:
        raise ValueError("--bbox: expected together with --osm FILE; an invented city has its own size")
    alone = "--preview" if options.preview else "--format kitti" if options.format == "kitti" else ""
    if alone and len(options.seed) > 1:
        raise ValueError(f"--seed: expected one beside {alone}, got {len(options.seed)}")
    for seed in options.seed:
        _make_one(argparse.Namespace(**vars(options) | {"seed": seed}))


def _make_one(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    name = f"{options.osm.stem if options.osm else 'made'}_{options.seed}"
    if options.out:
        taken = options.out / (f"{name}/dump.json" if options.format == "mgl" else "train_files.txt")  # what is written last
        if taken.exists():
            raise ValueError(f"{taken}: there is a city already; expected another --out or --seed")
    with tempfile.TemporaryDirectory() as folder:
        source = options.osm or _invent(options, Path(folder) / f"{name}.osm")
        scene, raster = read_city(source, options.bbox, options.seed)
        if options.preview:
            preview.draw(scene, raster, options.seed, options.preview)
        if options.out:
            n = _write(options, name, source, scene, raster)
            width, height = scene.box.size
            took = time.perf_counter() - began
            print(f"{options.out}: {n} images of {width:.0f} x {height:.0f} m in {took:.0f} s", flush=True)


def read_city(source: Path, bbox: tuple[float, float, float, float] | None, seed: int) -> tuple[Scene, RasterMap]:
    """Read OpenStreetMap data as a city; bbox is south, west, north, east in degrees, by default what the file says."""
    osm = read_osm(source)
    south, west, north, east = bbox or osm.bounds or osm.extent() or (0.0, 0.0, 0.0, 0.0)
    projection = Projection((south + north) / 2, (west + east) / 2)
    box = projection.to_box(south, west, north, east)
    if max(box.size) > LARGEST:
        size = " x ".join(f"{v:.0f}" for v in box.size)
        raise ValueError(f"{source}: expected a box of at most {LARGEST:.0f} m, got {size} m; name a part with --bbox")
    return build_scene(osm, projection, box, seed), rasterise(osm, projection, box)


def _invent(options: argparse.Namespace, path: Path) -> Path:
    rng = np.random.default_rng([options.seed, 0])
    sketch = draw_city(rng, SIZES[options.size].blocks)
    reach = np.abs(sketch.places).max(0) + MARGIN
    projection = Projection(*rng.uniform([40.0, -5.0], [55.0, 25.0]).round(4))
    (south, west), (north, east) = projection.to_degrees([-reach, reach])
    sketch.write(path, projection, (south, west, north, east))
    return path


def _write(options: argparse.Namespace, name: str, source: Path, scene: Scene, raster: RasterMap) -> int:
    size = SIZES[options.size]
    if options.format == "mgl":
        n = mapillary_files.write(options.out, name, scene, raster, size, options.image_size, options.seed)
        target = options.out / "osm" / f"{name}{''.join(source.suffixes)}"
        target.parent.mkdir(exist_ok=True)
    else:
        n = kitti_files.write(options.out, scene, raster, size, options.seed)
        target = options.out / source.name
    if not (target.exists() and target.samefile(source)):
        shutil.copyfile(source, target)
    return n


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the data set; cities are added to it (MGL)")
    parser.add_argument("--seed", type=_whole, nargs="+", default=[0], help="which cities, which drives [0]")
    parser.add_argument("--format", choices=("mgl", "kitti"), default="mgl", help="layout of the files [mgl]")
    parser.add_argument("--size", choices=tuple(SIZES), default="small", help="of the city and of what is recorded [small]")
    parser.add_argument("--osm", type=Path, metavar="FILE", help="take this OpenStreetMap extract as the city")
    parser.add_argument(
        "--bbox", type=_bbox, metavar="LAT,LON,LAT,LON", help="two opposite corners of the part of it to take [all]"
    )
    parser.add_argument(
        "--image-size", type=_pixels, default=256, metavar="PIXELS", help="width of MGL's images; MGL's own is 512 [256]"
    )
    parser.add_argument("--preview", type=Path, metavar="FILE.png", help="draw image, depth and map of some places")
    return parser


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) >= 10**6:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 999999, got {text}")
    return int(text)


def _pixels(text: str) -> int:
    if not text.isdecimal() or not 16 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"expected 16 to 4096 pixels, got {text}")
    return int(text)


def _bbox(text: str) -> tuple[float, float, float, float]:
    try:
        a, b, c, d = (float(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected LAT,LON,LAT,LON, got {text!r}") from None
    return min(a, c), min(b, d), max(a, c), max(b, d)


if __name__ == "__main__":
    sys.exit(main())
