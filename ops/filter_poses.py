"""All steps of a Mixture Density Particle Filter over poses, with small networks as its models."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _arguments as check
from . import _networks
from ._layers import Layer
from ._operator import map_one_by_one, operator, reference_active
from .iwsg_log_weights import iwsg_log_weights_reference
from .mixture_resample import mixture_resample_reference
from .move_poses import move_poses_reference
from .normalize_log_weights import normalize_log_weights_reference
from .resample import SCHEMES
from .weigh_poses import weigh_poses_reference


class FilteredPoses(NamedTuple):
    """What a filter believed at each of T steps."""

    states: Tensor
    """(B, T, N, 3), headings in [-pi, pi) from the second step on."""
    predicted: Tensor
    """(B, T, N), log-weights before the observation: -log N, with the gradient of the draws (IWSG)."""
    posterior: Tensor
    """(B, T, N), normalised log-weights after it."""
    ancestors: Tensor
    """(B, T, N) int64, particles of the step before."""
    log_sum: Tensor
    """(B, T), log of the mean likelihood of the particles."""
    ess: Tensor
    """(B, T), effective sample size of the posterior."""


def filter_poses(
    states: Tensor,
    codes: Tensor,
    seeds: Tensor,
    bandwidths: Tensor,
    move: tuple[Tensor, Sequence[Layer]],
    weigh: tuple[Tensor, Sequence[Layer]],
    scale: Tensor,
    *,
    noise: Tensor | None = None,
    minimum: float = 1e-5,
    scheme: str = "stratified",
) -> FilteredPoses:
    """Filter T observations: weigh the particles, and for each further step draw from their mixture, move, weigh.

    The steps are those of `mixture_resample` (with `iwsg_log_weights`), `move_poses`, `weigh_poses` and
    `normalize_log_weights`: the same numbers bit for bit, gradients up to rounding, in one call and one node of the graph.

    Args:
        states: (B, N, 3), the first particles: x, y, heading in radians; float32 or float64 (half types: computed in float32).
        codes: (B, T, K), of the observations, T >= 1: the condition of `weigh_poses`. K <= 256.
        seeds: int64 (B, T), of the draws; the first of a row is not used. Best transposed from (T, B), as codes and noise.
        bandwidths: (3) or (B, 3), of the mixture that is drawn from: two standard deviations, and the heading's.
        move: weights (P) or (R, P) and layers, as for `move_poses`.
        weigh: weights (P) or (R, P) and layers, as for `weigh_poses`.
        scale: (4), as for `move_poses`. A constant.
        noise: (B, T, N, E), as for `move_poses`; the first of a row is not used. A constant. None: steps are not random.
        minimum: as for `weigh_poses`.
        scheme: of resampling: "multinomial", "stratified", "systematic" or "residual"; see `resample`.

    Returns:
        `FilteredPoses`. Gradients flow to states, codes, bandwidths and both weights.

    Raises:
        TypeError: not real tensors of one dtype, not int64 seeds. ValueError: shapes, devices, layers, minimum or scheme; in
            backward, bandwidths that are not positive and finite (on a GPU they make the gradients NaN).

    Cost: that of the operators, O(T B N) forward and O(T B N^2) backward; O(T B N) memory for what backward needs.
    Source: the paper, sections 2.3 and 2.4.
    """
    names = ("states", "codes", "bandwidths", "move", "weigh", "scale")
    for name, model in (("move", move), ("weigh", weigh)):
        if not isinstance(model, tuple) or len(model) != 2:
            raise TypeError(f"{name}: expected a pair (weights, layers), got {type(model).__name__}")
    real = states, codes, bandwidths, move[0], weigh[0], scale
    given = check.reals(names, *real) if noise is None else check.reals((*names, "noise"), *real, noise)
    states, codes, bandwidths, move_weights, weigh_weights, scale = given[:6]
    B, N, T = _sizes(states, codes, bandwidths, seeds)
    if noise is not None:
        noise = given[6]
        if noise.dim() != 4 or noise.shape[:3] != (B, T, N):
            raise ValueError(f"noise: expected shape (B, T, N, E) = ({B}, {T}, {N}, E), got {tuple(noise.shape)}")
    first = None if noise is None else noise.select(1, 0)
    move_layers = _layers("move", _networks.Names("states", "noise"), (states, move_weights, move[1], first, None), 2, 4)
    weigh_layers = _layers(
        "weigh", _networks.Names("states", "extra"), (states, weigh_weights, weigh[1], None, codes.select(1, 0)), 4, 1
    )
    check.shape("scale", scale, "(4)", 4)
    if not 1e-30 <= minimum < 1:
        raise ValueError(f"minimum: expected a number in [1e-30, 1), got {minimum}")
    for name, constant in (("scale", scale), ("noise", noise)):
        if constant is not None and constant.requires_grad:
            raise ValueError(f"{name}: expected a constant, got a tensor that requires a gradient")
    number = check.choice("scheme", scheme, SCHEMES)
    by_step = None if noise is None or noise.size(3) == 0 else noise.transpose(0, 1)
    models = codes.transpose(0, 1), by_step, move_weights, move_layers, scale, weigh_weights, weigh_layers, minimum
    f = filter_poses_reference if reference_active() else _filter
    return FilteredPoses(*(x.transpose(0, 1) for x in f(states, bandwidths, *models, seeds.T, number)[:6]))


def _sizes(states: Tensor, codes: Tensor, bandwidths: Tensor, seeds: Tensor) -> tuple[int, int, int]:
    """Check shapes; B, N and T."""
    check.shape("states", states, "(B, N, 3)", *states.shape[:2], 3)
    B, N = states.shape[:2]
    if codes.dim() != 3 or codes.size(0) != B:
        raise ValueError(f"codes: expected shape (B, T, K) = ({B}, T, K), got {tuple(codes.shape)}")
    T = codes.size(1)
    if T == 0 or N == 0:
        raise ValueError(f"codes, states: expected at least one step and one particle, got T = {T} and N = {N}")
    check.shape("bandwidths", bandwidths, "(3) or (B, 3)", *(() if bandwidths.dim() == 1 else (B,)), 3)
    if not isinstance(seeds, Tensor) or seeds.dtype != torch.int64 or seeds.device != states.device:
        got = f"{seeds.dtype} on {seeds.device}" if isinstance(seeds, Tensor) else type(seeds).__name__
        raise TypeError(f"seeds: expected int64 on {states.device}, got {got}")
    check.shape("seeds", seeds, "(B, T)", B, T)
    return B, N, T


def _layers(name: str, names: _networks.Names, given: tuple[Any, ...], inputs: int, out: int) -> list[int]:
    """Check a step's arguments of a model; the operator's integers of its layers."""
    x, weights, described, extra, condition = given
    try:
        *_, layers = _networks.arguments(names, x, weights, described, extra, condition, inputs)
        _networks.ends_in_shares(described, out)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    return layers


def filter_poses_reference(
    states: Tensor, bandwidths: Tensor, codes: Tensor, noise: Tensor | None, *models: Any
) -> tuple[Tensor, ...]:
    """The same in plain PyTorch; codes, noise, seeds and the results have their steps first, as the operator's."""
    move_weights, move_layers, scale, weigh_weights, weigh_layers, minimum, seeds, scheme = models
    B, N = states.shape[:2]
    predicted = states.new_full((B, N), -math.log(N))
    ancestors = torch.arange(N, device=states.device).expand(B, N)
    steps: list[tuple[Tensor, ...]] = []
    for t, code in enumerate(codes):
        if t > 0:
            mixture = states, steps[-1][2], bandwidths
            with torch.no_grad():
                drawn, ancestors = mixture_resample_reference(*mixture, seeds[t], N, 1, scheme, 0)
            predicted = iwsg_log_weights_reference(drawn, *mixture, 1) - math.log(N)
            states = move_poses_reference(drawn, None if noise is None else noise[t], None, move_weights, move_layers, scale)
        likelihood = weigh_poses_reference(states, None, code, weigh_weights, weigh_layers, minimum, -math.inf)
        posterior, log_sum, ess = normalize_log_weights_reference(predicted + likelihood)
        steps.append((states, predicted, posterior, ancestors, log_sum, ess))
    return tuple(torch.stack(x) for x in zip(*steps))


def _save(ctx, args, out):
    _, bandwidths, codes, noise, move_weights, ctx.move_layers, scale, weigh_weights, ctx.weigh_layers, ctx.minimum, *_ = args
    states, _, posterior, ancestors, log_sum, ess, drawn = out
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(ancestors, drawn)
    models = bandwidths, codes, noise, move_weights, scale, weigh_weights
    ctx.save_for_backward(states, posterior, log_sum, ess, drawn, *models)


def _gradients(ctx, states, predicted, posterior, _, log_sum, ess, __):
    *steps, bandwidths, codes, noise, move_weights, scale, weigh_weights = ctx.saved_tensors
    models = bandwidths, codes, noise, move_weights, ctx.move_layers, scale, weigh_weights, ctx.weigh_layers, ctx.minimum
    try:
        grads = _backward(states, predicted, posterior, log_sum, ess, *steps, *models)
    except RuntimeError as error:
        raise check.named(error) from None
    to_states, to_bandwidths, to_codes, to_move, to_weigh = grads
    by_argument = (to_states, to_bandwidths, to_codes, None, to_move, None, None, to_weigh, None, None, None, None)
    return tuple(g if n else None for g, n in zip(by_argument, ctx.needs_input_grad))


_backward = operator("filter_poses_backward")
_filter = operator("filter_poses", _save, _gradients)


map_one_by_one("filter_poses")
map_one_by_one("filter_poses_backward")


@torch.library.register_fake("mdps::filter_poses")
def _(states, bandwidths, codes, noise, move_weights, move_layers, scale, weigh_weights, weigh_layers, minimum, seeds, scheme):
    (T, B), N = codes.shape[:2], states.size(1)
    row = states.new_empty(T, B, N)
    ancestors, number = seeds.new_empty(T, B, N), states.new_empty(T, B)
    drawn = states.new_empty(T - 1, B, N, 3)
    return states.new_empty(T, B, N, 3), row, torch.empty_like(row), ancestors, number, torch.empty_like(number), drawn


@torch.library.register_fake("mdps::filter_poses_backward")
def _(grad_states, grad_predicted, grad_posterior, grad_log_sum, grad_ess, states, posterior, log_sum, ess, drawn, *models):
    bandwidths, codes, _, move_weights, _, _, weigh_weights, *_ = models
    return states.new_empty(states.shape[1:]), *(x.new_empty(x.shape) for x in (bandwidths, codes, move_weights, weigh_weights))
