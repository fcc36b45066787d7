"""The operators: functions on tensors, each usable alone in a model of one's own."""

from ._layers import Layer as Layer
from ._layers import flatten_parameters as flatten_parameters
from ._layers import layers_of as layers_of
from ._operator import reference as reference
from ._operator import reference_active as reference_active
from .find_modes import find_modes as find_modes
from .iwsg_log_weights import iwsg_log_weights as iwsg_log_weights
from .log_i0 import log_i0 as log_i0
from .make_seed import make_seed as make_seed
from .mixture_log_prob import mixture_log_prob as mixture_log_prob
from .mixture_resample import mixture_resample as mixture_resample
from .move_poses import move_poses as move_poses
from .normalize_log_weights import NormalizedWeights as NormalizedWeights
from .normalize_log_weights import normalize_log_weights as normalize_log_weights
from .philox_normal import philox_normal as philox_normal
from .philox_uniform import philox_uniform as philox_uniform
from .philox_von_mises import philox_von_mises as philox_von_mises
from .pose_correlation import pose_correlation as pose_correlation
from .resample import resample as resample
from .small_network import small_network as small_network
from .split_seed import split_seed as split_seed
from .transport_resample import Transported as Transported
from .transport_resample import transport_resample as transport_resample
from .two_filter_log_prob import two_filter_log_prob as two_filter_log_prob
from .von_mises_log_prob import von_mises_log_prob as von_mises_log_prob
from .weigh_poses import weigh_poses as weigh_poses
