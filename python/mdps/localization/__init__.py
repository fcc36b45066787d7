"""Localization of a camera on a map: encoders, filters and smoothers, and what they are compared with."""

from .geometry import SPACE as SPACE
from .geometry import BirdsEyeView as BirdsEyeView
from .geometry import Grid as Grid
from .geometry import MapFeatures as MapFeatures
from .geometry import align as align
from .geometry import centred_map as centred_map
