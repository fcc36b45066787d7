"""The operators: functions on tensors, each usable alone in a model of one's own."""

from ._operator import reference as reference
from ._operator import reference_active as reference_active
from .log_i0 import log_i0 as log_i0
from .normalize_log_weights import NormalizedWeights as NormalizedWeights
from .normalize_log_weights import normalize_log_weights as normalize_log_weights
from .von_mises_log_prob import von_mises_log_prob as von_mises_log_prob
