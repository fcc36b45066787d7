"""Data sets for localization, in the formats in which they are distributed: Mapillary (MGL) and KITTI.

`mapillary.read_scene` and `kitti.read_drives` read folders to scenes; `sequences` cuts and deals them; `SequenceDataset` makes
tensors of them; `MapillaryDataModule` and `KittiDataModule` do all of it, for training. `python -m mdps.datasets check PATH`
says what is there, `show` draws a sequence.
"""

from typing import TYPE_CHECKING, Any

from ..maps.errors import DataError as DataError
from . import kitti as kitti
from . import mapillary as mapillary
from .camera import Camera as Camera
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

if TYPE_CHECKING:
    from .modules import KittiDataModule as KittiDataModule
    from .modules import MapillaryDataModule as MapillaryDataModule


def __getattr__(name: str) -> Any:
    """The data modules come when they are asked for: they import Lightning, which takes seconds."""
    if name in ("KittiDataModule", "MapillaryDataModule"):
        from . import modules

        return getattr(modules, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
