"""Maps for localization: OpenStreetMap data as small pictures of classes, in metres around a place.

    osm = maps.read_osm("berlin.osm")
    projection = maps.Projection(52.4732, 13.4396)
    city = maps.rasterise(osm, projection, maps.Box(-200.0, -200.0, 200.0, 200.0))
    city.save("berlin.npz")

From the shell: `python -m mdps.maps raster --help`. OpenCV is needed for drawing and for MGL's tiles, pyosmium for .osm.pbf.
"""

from .elements import Area as Area
from .elements import Elements as Elements
from .elements import Line as Line
from .elements import Point as Point
from .elements import osm_elements as osm_elements
from .errors import DataError as DataError
from .osm import OsmData as OsmData
from .osm import read_osm as read_osm
from .osm_classes import AREAS as AREAS
from .osm_classes import NODES as NODES
from .osm_classes import WAYS as WAYS
from .projection import Box as Box
from .projection import Projection as Projection
from .raster_map import RasterMap as RasterMap
from .rasterise import rasterise as rasterise
from .tiles_pickle import read_tiles_pickle as read_tiles_pickle
from .tiles_pickle import write_tiles_pickle as write_tiles_pickle
