"""Localization of a camera on a map: encoders, filters and smoothers, and what they are compared with."""

from .batch import Batch as Batch
from .batch import anywhere as anywhere
from .batch import around as around
from .batch import to_batch as to_batch
from .birds_eye import BirdsEyeEncoder as BirdsEyeEncoder
from .birds_eye import Encoders as Encoders
from .errors import RADII as RADII
from .geometry import SPACE as SPACE
from .geometry import BirdsEyeView as BirdsEyeView
from .geometry import Grid as Grid
from .geometry import MapFeatures as MapFeatures
from .geometry import align as align
from .geometry import centred_map as centred_map
from .localizer import Localizer as Localizer
from .map_encoder import MapEncoder as MapEncoder
from .map_smoother import MapSmoother as MapSmoother
from .models import MapLikelihood as MapLikelihood
from .models import MapSmootherLikelihood as MapSmootherLikelihood
from .models import OdometryDynamics as OdometryDynamics
from .models import Scene as Scene
from .models import make_scene as make_scene
from .models import pose_loss as pose_loss
from .models import seeing as seeing
from .sizes import FULL as FULL
from .sizes import SMALL as SMALL
from .sizes import EncoderSizes as EncoderSizes
