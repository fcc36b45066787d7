"""All steps of a Mixture Density Particle Filter over poses as one call, where its models are the networks of `mdps.networks`.

Called step by step, autograd, Python and memory take as long between a step's operators as the operators themselves at a few
thousand particles. `ops.filter_poses` has all steps in C. The numbers are those of the steps (filters.py), bit for bit;
gradients differ by rounding.
"""

from typing import Any

import torch
from torch import Tensor

from . import ops
from .networks import PoseMove, PoseWeigh
from .ops._operator import reference_active, transforms_active


def run(
    models: Any, bandwidths: Tensor, states: Tensor, codes: Tensor, noise: Tensor, draws: Tensor, scheme: str
) -> ops.FilteredPoses | None:
    """Run all steps from particles (B, N, 3), or return None where the models are others or something else has to be general.

    Args:
        models: `dynamics` and `likelihood`, what the models' `for_sequence` or `stack` returned.
        bandwidths: of the resampled mixtures, (3) or (B, 3).
        codes: (B, T, K). noise: (T, B, N, E). draws: seeds (T, B).
    """
    move, weigh = models.dynamics, models.likelihood
    if not (isinstance(move, PoseMove) and isinstance(weigh, PoseWeigh)):
        return None
    if reference_active() or transforms_active() or torch.compiler.is_compiling() or codes.dim() != 3:
        return None
    if codes.dtype != states.dtype:
        return None
    return ops.filter_poses(
        states,
        codes,
        draws.T,
        bandwidths,
        (move.weights, move.layers),
        (weigh.weights, weigh.layers),
        move.scale,
        noise=noise.transpose(0, 1),
        minimum=weigh.minimum,
        scheme=scheme,
    )
