"""All steps of a Mixture Density Particle Filter over poses as one node of the gradient's graph.

Idea: with the networks of `mdps.networks`, a step is four operators, resample, move, weigh and normalise, whose derivatives are
operators too. Called step by step, autograd and Python take as long between them as the operators themselves at a few thousand
particles. Here a sequence is one torch.autograd.Function: forward calls the operators, backward calls their derivatives from
the last step to the first. The numbers are those of the steps (filters.py), bit for bit; gradients differ by rounding.

Cost: that of the operators; memory O(T B N) for what backward needs.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .networks import PoseMove, PoseWeigh
from .ops._arguments import named
from .ops._layers import described
from .ops._operator import reference_active, transforms_active
from .ops.resample import SCHEMES

_RESAMPLE, _NORMALIZE = torch.ops.mdps.mixture_resample.default, torch.ops.mdps.normalize_log_weights.default
_MOVE, _WEIGH = torch.ops.mdps.move_poses.default, torch.ops.mdps.weigh_poses.default
_NORMALIZE_BACKWARD = torch.ops.mdps.normalize_log_weights_backward.default
_MOVE_BACKWARD, _WEIGH_BACKWARD = torch.ops.mdps.move_poses_backward.default, torch.ops.mdps.weigh_poses_backward.default
_IWSG_BACKWARD = torch.ops.mdps.iwsg_log_weights_backward.default


class _Options(NamedTuple):
    """What is no tensor."""

    move_layers: list[int]
    weigh_layers: list[int]
    bounds: tuple[float, float]
    """Least weight, and least of the further inputs, of which there are none."""
    scheme: int


def run(
    models: Any,
    bandwidths: Tensor,
    states: Tensor,
    codes: Sequence[Tensor],
    noise: Sequence[Tensor],
    draws: Sequence[Tensor],
    scheme: str,
) -> tuple[Tensor, ...] | None:
    """Run all steps from particles (B, N, 3), or return None where the models are others or something else has to be general.

    Bandwidths that are not positive and finite raise ValueError in backward, as those of `ops.iwsg_log_weights`.

    Args:
        models: `dynamics` and `likelihood`, what the models' `for_sequence` or `stack` returned.
        bandwidths: of the resampled mixtures, (3) or (B, 3).
        codes: T codes (B, K). noise: T times (B, N, E). draws: T seeds (B,).

    Returns:
        states (B, T, N, 3), log-weights before and after the observations, ancestors (B, T, N), log_sum and ess (B, T).
    """
    move, weigh = models.dynamics, models.likelihood
    if not (isinstance(move, PoseMove) and isinstance(weigh, PoseWeigh)):
        return None
    if reference_active() or transforms_active() or torch.compiler.is_compiling() or codes[0].dim() != 2:
        return None
    if codes[0].dtype != states.dtype:
        return None
    move_layers, n_move = described(move.layers, 2, noise[0].size(-1), 0)
    weigh_layers, n_weigh = described(weigh.layers, 4, 0, codes[0].size(-1))
    if (n_move, n_weigh) != (move.weights.size(-1), weigh.weights.size(-1)):
        return None
    options = _Options(move_layers, weigh_layers, (weigh.minimum, -math.inf), SCHEMES[scheme])
    given = states, bandwidths, torch.stack(list(codes)), move.weights, weigh.weights
    extra = noise if noise[0].size(-1) else [None] * len(noise)
    return _Sequence.apply(*given, move.scale, extra, draws, options)


class _Sequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        bandwidths: Tensor,
        codes: Tensor,
        move_weights: Tensor,
        weigh_weights: Tensor,
        scale: Tensor,
        noise: Sequence[Tensor | None],
        draws: Sequence[Tensor],
        o: _Options,
    ) -> tuple[Tensor, ...]:
        B, N = states.shape[:2]
        uniform = states.new_full((B, N), -math.log(N))
        ancestors = torch.arange(N, device=states.device).expand(B, N)
        steps: list[tuple[Tensor, ...]] = []
        drawn = states
        for t, code in enumerate(codes.unbind()):
            if t > 0:
                drawn, ancestors = _RESAMPLE(states, steps[-1][1], bandwidths, draws[t], N, 1, o.scheme, 0)
                states = _MOVE(drawn, noise[t], None, move_weights, o.move_layers, scale)
            log_likelihood = _WEIGH(states, None, code, weigh_weights, o.weigh_layers, *o.bounds)
            steps.append((states, *_NORMALIZE(uniform + log_likelihood), ancestors, drawn))
        ctx.options = o
        by_step = (x for s, n in zip(steps, noise) for x in (*s[:4], s[5], n))
        ctx.save_for_backward(bandwidths, codes, move_weights, weigh_weights, scale, *by_step)
        ctx.set_materialize_grads(False)
        moved, posterior, log_sum, ess, ancestors = (torch.stack([s[i] for s in steps], 1) for i in range(5))
        ctx.mark_non_differentiable(ancestors)
        return moved, uniform.unsqueeze(1).repeat(1, len(steps), 1), posterior, ancestors, log_sum, ess

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (bandwidths, codes, move_weights, weigh_weights, scale, *by_step), o = ctx.saved_tensors, ctx.options
        steps = [by_step[i : i + 6] for i in range(0, len(by_step), 6)]
        to_states, to_predicted, to_posterior, _, to_log_sum, to_ess = (_by_step(g, len(steps)) for g in grads)
        nothing = torch.zeros_like(steps[0][2])
        to_codes, to_move, to_weigh = torch.empty_like(codes), torch.zeros_like(move_weights), torch.zeros_like(weigh_weights)
        to_bandwidths = torch.zeros_like(bandwidths)
        before: Tensor | None = None  # what the next step asks of these states, and of their weights
        weight_before: Tensor | None = None
        for t in range(len(steps) - 1, -1, -1):
            states, posterior, log_sum, ess, drawn, noise = steps[t]
            to_weights = _add(to_posterior[t], weight_before)
            to_weights = torch.zeros_like(posterior) if to_weights is None else to_weights
            others = (nothing if g is None else g for g in (to_log_sum[t], to_ess[t]))
            to_likelihood = _NORMALIZE_BACKWARD(to_weights, *others, posterior, log_sum, ess)
            by_weigh, _, to_codes[t], part = _WEIGH_BACKWARD(
                to_likelihood, states, None, codes[t], weigh_weights, o.weigh_layers, *o.bounds, 1
            )
            to_weigh += part
            to_moved = _add(_add(to_states[t], before), by_weigh)
            if t == 0:
                return to_moved, to_bandwidths, to_codes, to_move, to_weigh, None, None, None, None
            to_move += _MOVE_BACKWARD(to_moved, drawn, noise, None, move_weights, o.move_layers, scale, 0)[3]
            to_drawn = _add(to_predicted[t], to_likelihood)
            mixture = steps[t - 1][0], steps[t - 1][1], bandwidths
            try:
                before, weight_before, part = _IWSG_BACKWARD(to_drawn, drawn, *mixture, 1)
            except RuntimeError as error:
                raise named(error) from None
            to_bandwidths += part
        raise AssertionError("a sequence has a step")


def _by_step(grad: Tensor | None, T: int) -> Sequence[Tensor | None]:
    """The steps of a gradient (B, T, ...), each contiguous."""
    return [None] * T if grad is None else grad.transpose(0, 1).contiguous().unbind()


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
