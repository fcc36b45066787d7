"""Localization of a camera on a map: encoders of images and maps, filters and smoothers on them, and what they are compared with."""

from .geometry import SPACE as SPACE
from .geometry import BirdsEyeView as BirdsEyeView
from .geometry import Grid as Grid
from .geometry import MapFeatures as MapFeatures
from .geometry import align as align
from .geometry import centred_map as centred_map
