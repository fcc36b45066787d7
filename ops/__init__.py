"""The operators: functions on tensors, each usable alone in a model of one's own."""

from ._operator import reference as reference
from ._operator import reference_active as reference_active
from .mixture_log_prob import mixture_log_prob as mixture_log_prob
from .normalize_log_weights import NormalizedWeights as NormalizedWeights
from .normalize_log_weights import normalize_log_weights as normalize_log_weights
