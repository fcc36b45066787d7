"""Maps for localization: OpenStreetMap data as small pictures of classes, in metres around a place."""

from .errors import DataError as DataError
from .osm_classes import AREAS as AREAS
from .osm_classes import NODES as NODES
from .osm_classes import WAYS as WAYS
from .projection import Box as Box
from .projection import Projection as Projection
from .raster_map import RasterMap as RasterMap
