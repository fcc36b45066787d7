"""The operators: functions on tensors, each usable alone in a model of one's own."""

from ._operator import reference as reference
from ._operator import reference_active as reference_active
from .normalize_log_weights import NormalizedWeights as NormalizedWeights
from .normalize_log_weights import normalize_log_weights as normalize_log_weights
from .make_seed import make_seed as make_seed
from .mixture_resample import mixture_resample as mixture_resample
from .philox_normal import philox_normal as philox_normal
from .philox_uniform import philox_uniform as philox_uniform
from .philox_von_mises import philox_von_mises as philox_von_mises
from .resample import resample as resample
from .split_seed import split_seed as split_seed
