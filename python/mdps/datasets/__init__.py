"""Data sets for localization, in the formats in which they are distributed: Mapillary (MGL) and KITTI.

`mapillary.read_scene` and `kitti.read_drives` read folders to scenes; `sequences` cuts and deals them; `SequenceDataset` makes
tensors of them. `python -m mdps.datasets check PATH` says what is there, `show` draws a sequence.
"""

from . import kitti as kitti
from . import mapillary as mapillary
from .camera import Camera as Camera
from .errors import DataError as DataError
from .loading import FreshDraws as FreshDraws
from .loading import ImageFormat as ImageFormat
from .loading import SequenceDataset as SequenceDataset
from .odometry import OdometryNoise as OdometryNoise
from .odometry import noisy_odometry as noisy_odometry
from .scene import Frame as Frame
from .scene import Scene as Scene
from .scene import Track as Track
from .scene import fingerprint as fingerprint
from .sequences import Run as Run
from .sequences import Splits as Splits
