"""Where a picture of a map lies, for GIS programs.

The plane of `Projection` is the ellipsoidal orthographic projection (EPSG method 9840) of WGS84 around the map's origin:
`+proj=ortho +lat_0=... +lon_0=... +datum=WGS84`. A PNG gets a world file (.pgw: size of a pixel, and the centre of the
north-west one), the reference system for GDAL and QGIS (.png.aux.xml) and for others (.prj); a GeoTIFF holds both itself.
PROJ 7.2 and newer follow the ellipsoid; programs that take "Orthographic" as spherical are off by up to 0.4 % of the distance
from the origin.
"""

from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from .projection import Projection
from .raster_map import RasterMap
from .rasterise import opencv


def write_png(raster: RasterMap, path: Path) -> list[Path]:
    """Write the coloured map and the files that lay it over a GIS; returns the files' paths.

    Raises:
        OSError: a file cannot be written. ValueError: a side is too long for a PNG. ImportError: OpenCV is missing.
    """
    cv2 = opencv()
    texts = {
        path.with_suffix(".pgw"): world_file(raster),
        path.with_suffix(".prj"): wkt1(raster.projection) + "\n",
        path.with_name(path.name + ".aux.xml"): f"<PAMDataset><SRS>{escape(wkt2(raster.projection))}</SRS></PAMDataset>\n",
    }
    picture = np.ascontiguousarray(raster.colour()[..., ::-1])
    drawn, content = cv2.imencode(".png", picture)
    if not drawn:
        raise ValueError(
            f"{path}: expected at most 1000000 pixels a side for a PNG, got {picture.shape[1]} x {picture.shape[0]}"
        )
    path.write_bytes(content.tobytes())
    for target, text in texts.items():
        target.write_text(text)
    return [path, *texts]


def write_geotiff(raster: RasterMap, path: Path) -> list[Path]:
    """Write the coloured map as a GeoTIFF; returns the file's path.

    Raises:
        OSError: the file cannot be written. ImportError: rasterio is missing.
    """
    try:
        import rasterio
    except ImportError:
        raise ImportError("a GeoTIFF needs rasterio: pip install rasterio (or write a .png, with a world file)") from None
    bands = raster.colour().transpose(2, 0, 1)
    pixel = 1.0 / raster.pixels_per_metre
    place = rasterio.Affine(pixel, 0.0, raster.box.x_min, 0.0, -pixel, raster.box.y_max)
    size = {"count": 3, "height": bands.shape[1], "width": bands.shape[2], "dtype": "uint8"}
    look = {"photometric": "RGB", "compress": "deflate"}
    try:
        with rasterio.open(path, "w", driver="GTiff", crs=wkt2(raster.projection), transform=place, **size, **look) as file:
            file.write(bands)
    except rasterio.errors.RasterioIOError as error:
        raise OSError(f"{path}: {error}") from None
    return [path]


def world_file(raster: RasterMap) -> str:
    """Six lines: size of a pixel to the East, two rotations, size to the North (negative), centre of the north-west pixel."""
    pixel = 1.0 / raster.pixels_per_metre
    x, y = raster.to_metres((0.0, 0.0))
    return "".join(f"{value!r}\n" for value in (pixel, 0.0, 0.0, -pixel, float(x), float(y)))


def wkt1(projection: Projection) -> str:
    """The plane's reference system in the form of .prj files."""
    return (
        'PROJCS["Local tangent plane",GEOGCS["GCS_WGS_1984",DATUM["D_WGS_1984",SPHEROID["WGS_1984",6378137.0,298.257223563]],'
        'PRIMEM["Greenwich",0.0],UNIT["Degree",0.0174532925199433]],PROJECTION["Orthographic"],'
        f'PARAMETER["latitude_of_origin",{projection.latitude!r}],PARAMETER["central_meridian",{projection.longitude!r}],'
        'PARAMETER["false_easting",0.0],PARAMETER["false_northing",0.0],UNIT["Meter",1.0]]'
    )


def wkt2(projection: Projection) -> str:
    """The plane's reference system as ISO 19162 well-known text, which names the ellipsoidal method."""
    degree, metre = 'ANGLEUNIT["degree",0.0174532925199433]', 'LENGTHUNIT["metre",1]'
    return (
        'PROJCRS["Local tangent plane",BASEGEOGCRS["WGS 84",DATUM["World Geodetic System 1984",'
        f'ELLIPSOID["WGS 84",6378137,298.257223563,{metre}],ID["EPSG",6326]],PRIMEM["Greenwich",0,{degree}]],'
        'CONVERSION["Orthographic",METHOD["Orthographic",ID["EPSG",9840]],'
        f'PARAMETER["Latitude of natural origin",{projection.latitude!r},{degree},ID["EPSG",8801]],'
        f'PARAMETER["Longitude of natural origin",{projection.longitude!r},{degree},ID["EPSG",8802]],'
        f'PARAMETER["False easting",0,{metre},ID["EPSG",8806]],PARAMETER["False northing",0,{metre},ID["EPSG",8807]]],'
        f'CS[Cartesian,2],AXIS["(E)",east,ORDER[1]],AXIS["(N)",north,ORDER[2]],{metre}]'
    )
