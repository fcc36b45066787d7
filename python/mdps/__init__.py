"""Differentiable particle filters and smoothers.

Three levels, each usable alone: operators (`mdps.ops`), filters and smoothers around one's own networks (here), and the
paper's experiments (the folder training/ of the repository).
"""

import torch  # before _C: the loader takes libtorch.so from it

_version = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
if _version < (2, 10):
    raise ImportError(f"mdps needs torch 2.10 or newer, and this is torch {torch.__version__}: pip install 'torch>=2.10'")
try:
    from mdps import _C
except ImportError as error:
    raise ImportError(
        f"mdps has no compiled library for this Python and torch ({error}): reinstall it with pip install ."
    ) from error
_C.register()

from mdps import ops as ops
from mdps.filters import Dynamics as Dynamics
from mdps.filters import FilterBeliefs as FilterBeliefs
from mdps.filters import FilterState as FilterState
from mdps.filters import Likelihood as Likelihood
from mdps.filters import MixtureDensityParticleFilter as MixtureDensityParticleFilter
from mdps.filters import Particles as Particles
from mdps.mixture import Bandwidth as Bandwidth
from mdps.mixture import Mixture as Mixture
from mdps.smoothers import MixtureDensityParticleSmoother as MixtureDensityParticleSmoother
from mdps.smoothers import SmootherBeliefs as SmootherBeliefs
from mdps.smoothers import SmootherLikelihood as SmootherLikelihood
from mdps.state_space import StateSpace as StateSpace

__version__: str = _C.build_info()["version"]


def build_info() -> dict[str, str]:
    """Return how the compiled library was made: version, compiler, python, cuda ("" without), and the torch it runs under."""
    return dict(_C.build_info())
