"""Maps from the shell: `python -m mdps.maps raster --osm FILE --bbox SOUTH,WEST,NORTH,EAST --out map.png`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .elements import osm_elements
from .georeference import write_geotiff, write_png
from .osm import OsmData, read_osm
from .osm_classes import AREAS, NODES, WAYS
from .projection import Projection
from .raster_map import RasterMap
from .rasterise import rasterise

Bounds = tuple[float, float, float, float]

_WRITERS = {".png": write_png, ".tif": write_geotiff, ".tiff": write_geotiff}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 1 after one line on stderr."""
    options = _parser().parse_args(joined(list(sys.argv[1:] if arguments is None else arguments)))
    try:
        return _raster(options)
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _raster(options: argparse.Namespace) -> int:
    out = Path(options.out)
    if out.suffix.lower() not in _WRITERS:
        raise ValueError(f"--out: expected a name that ends with .png or .tif, got {options.out!r}")
    asked = None if options.bbox is None else _bounds(options.bbox)
    osm = read_osm(options.osm)
    south, west, north, east = _chosen(asked, osm, options.osm)
    projection = Projection(round((south + north) / 2, 9), round((west + east) / 2, 9))
    elements = osm_elements(osm, projection)
    raster = rasterise(elements, projection, projection.to_box(south, west, north, east), options.ppm)
    files = _WRITERS[out.suffix.lower()](raster, out)
    raster.save(out.with_suffix(".npz"))
    _report(raster, {what: n for what, n in elements.missing.items() if n}, [*files, out.with_suffix(".npz")])
    return 0


def _report(raster: RasterMap, missing: dict[str, int], files: Sequence[Path]) -> None:
    _, height, width = raster.classes.shape
    origin = raster.projection
    print(f"{width} x {height} pixels, {raster.pixels_per_metre:g} a metre")
    print(f"coordinates: +proj=ortho +lat_0={origin.latitude!r} +lon_0={origin.longitude!r} +datum=WGS84 +units=m")
    for title, names, channel in zip(("areas", "ways", "nodes"), (AREAS, WAYS, NODES), raster.classes):
        counts = np.bincount(channel.ravel(), minlength=len(names) + 1)[1:]
        found = ", ".join(f"{name} {n}" for name, n in zip(names, counts) if n)
        print(f"{title} (pixels): {found or 'none'}")
    if missing:
        print("not in the file: " + ", ".join(f"{n} {what}" for what, n in missing.items()))
    print("wrote " + ", ".join(str(file) for file in files))


def _chosen(asked: Bounds | None, osm: OsmData, path: str) -> Bounds:
    """The bounds to draw: those that were asked for, which must meet the data, or the file's own."""
    extent = osm.extent()
    if extent is None:
        raise ValueError(f"{path}: holds no nodes, so nothing has a place")
    data = ",".join(f"{value:.5f}" for value in extent)
    if asked is None:
        if osm.bounds is None:
            raise ValueError(f"{path}: names no bounds; give --bbox; its nodes lie in {data}")
        return osm.bounds
    if not _meet(asked, extent):
        swapped = (asked[1], asked[0], asked[3], asked[2])
        hint = " (latitude and longitude are swapped?)" if _meet(swapped, extent) else ""
        raise ValueError(f"--bbox: meets no data, the nodes of {path} lie in {data}{hint}")
    return asked


def _meet(a: Bounds, b: Bounds) -> bool:
    return a[0] <= b[2] and b[0] <= a[2] and a[1] <= b[3] and b[1] <= a[3]


def _bounds(text: str) -> Bounds:
    expected = "expected LAT,LON,LAT,LON in degrees, the south-west, then the north-east corner"
    try:
        south, west, north, east = (float(value) for value in text.split(","))
    except ValueError:
        raise ValueError(f"--bbox: {expected}, got {text!r}") from None
    if not (-90 <= south < north <= 90 and -360 <= west < east <= 360):
        raise ValueError(f"--bbox: {expected}, got {text!r}")
    return south, west, north, east


def joined(arguments: list[str]) -> list[str]:
    """`--bbox -33.9,...` as `--bbox=-33.9,...`: argparse takes a leading minus for an option."""
    if "--bbox" in arguments[:-1]:
        i = arguments.index("--bbox")
        arguments[i : i + 2] = [f"--bbox={arguments[i + 1]}"]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mdps.maps", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    raster = commands.add_parser(
        "raster",
        help="draw OpenStreetMap data as a map of classes",
        description="Draws OpenStreetMap data as a map of classes: a picture that GIS programs can place, and beside it, "
        "with the ending .npz, the map itself for mdps.maps.RasterMap.load.",
    )
    raster.add_argument("--osm", required=True, metavar="FILE", help="XML (.osm), the API's JSON, or .osm.pbf (pyosmium)")
    raster.add_argument("--bbox", metavar="LAT,LON,LAT,LON", help="south-west, then north-east corner; default: the file's own")
    raster.add_argument("--out", required=True, metavar="FILE", help=".png (with world file and .prj) or .tif (needs rasterio)")
    raster.add_argument("--ppm", type=float, default=2.0, metavar="N", help="pixels a metre, default 2")
    return parser


if __name__ == "__main__":
    sys.exit(main())
