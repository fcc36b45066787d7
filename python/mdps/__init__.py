"""Differentiable particle filters and smoothers.

Three levels, each usable alone: operators (`mdps.ops`), filters and smoothers around one's own networks (here), and the
paper's experiments (the folder training/ of the repository).
"""

from mdps import _library as _library  # first: hands the operators to torch
from mdps import ops as ops
from mdps._library import __version__ as __version__
from mdps._library import build_info as build_info
from mdps.baseline_filters import ConcreteParticleFilter as ConcreteParticleFilter
from mdps.baseline_filters import OptimalTransportParticleFilter as OptimalTransportParticleFilter
from mdps.baseline_filters import SoftResamplingParticleFilter as SoftResamplingParticleFilter
from mdps.baseline_filters import TruncatedGradientParticleFilter as TruncatedGradientParticleFilter
from mdps.classical_smoothers import ForwardFilterBackwardSmoother as ForwardFilterBackwardSmoother
from mdps.classical_smoothers import ForwardFilterBackwardSmootherBeliefs as ForwardFilterBackwardSmootherBeliefs
from mdps.classical_smoothers import TwoFilterSmoother as TwoFilterSmoother
from mdps.filters import Dynamics as Dynamics
from mdps.filters import FilterBeliefs as FilterBeliefs
from mdps.filters import FilterState as FilterState
from mdps.filters import Likelihood as Likelihood
from mdps.filters import MixtureDensityParticleFilter as MixtureDensityParticleFilter
from mdps.filters import ParticleFilter as ParticleFilter
from mdps.filters import Particles as Particles
from mdps.filters import filter_together as filter_together
from mdps.mixture import Bandwidth as Bandwidth
from mdps.mixture import Mixture as Mixture
from mdps.mixture_product import MixtureProduct as MixtureProduct
from mdps.mixture_product import product as product
from mdps.smoothers import MixtureDensityParticleSmoother as MixtureDensityParticleSmoother
from mdps.smoothers import SmootherBeliefs as SmootherBeliefs
from mdps.smoothers import SmootherLikelihood as SmootherLikelihood
from mdps.smoothers import filter_both as filter_both
from mdps.smoothers import smooth_together as smooth_together
from mdps.state_space import StateSpace as StateSpace
from mdps.transitions import KernelDynamics as KernelDynamics
from mdps.transitions import TransitionModel as TransitionModel
from mdps.transitions import transition_loss as transition_loss
