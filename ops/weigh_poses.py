"""Log-weights of poses (x, y, heading) by a small network: a learned measurement model.

As in `move_poses`, what stands around the network (sine, cosine, the logarithm) is done on the tile of particles that the
layers work on.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _networks
from ._layers import Layer
from ._operator import operator, reference_active
from .small_network import small_network_reference

_NAMES = _networks.Names("poses", "extra")


def weigh_poses(
    poses: Tensor,
    weights: Tensor,
    layers: Sequence[Layer],
    *,
    extra: Tensor | None = None,
    condition: Tensor | None = None,
    minimum: float = 1e-5,
    least_extra: float = -math.inf,
) -> Tensor:
    """Weigh every pose: log[minimum + (1 - minimum) u] with u = network(x, y, sin heading, cos heading) in [0, 1].

    Args:
        poses: (B, N, 3), x, y and heading in radians, of any size; float32 or float64 (half types are computed in float32).
        weights: (P) or (R, P), as for `small_network`.
        layers: 1 to 16 `Layer`s, best as a tuple, for 4 inputs; the last is Layer(1, "sigmoid").
        extra: (B, N, E), further values of each particle (log-densities), as for `small_network`.
        condition: (B, K), values that the particles of a row share (an observation's code), as for `small_network`.
        minimum: the smallest weight, in [1e-30, 1): no particle is killed for good, and the gradient is finite.
        least_extra: a number in `extra` that is not above it becomes it, with gradient 0.

    Returns:
        (B, N), in [log minimum, 0]. NaN stays in its particle.

    Raises:
        TypeError: not real tensors of one dtype. ValueError: shapes, devices or layers that do not fit each other; a minimum
            out of range, a least_extra that is NaN.

    Cost: that of `small_network`, and a quarter more at widths of 8. Gradients to poses, extra, condition and weights.
    Source: the paper's measurement models of the bearings-only task (Additional Experiment Details).
    """
    given = _networks.arguments(_NAMES, poses, weights, layers, extra, condition, inputs=4)
    _networks.ends_in_shares(layers, 1)
    if not 1e-30 <= minimum < 1:
        raise ValueError(f"minimum: expected a number in [1e-30, 1), got {minimum}")
    if math.isnan(least_extra):
        raise ValueError(f"least_extra: expected a number, got {least_extra}")
    return weigh_poses_reference(*given, minimum, least_extra) if reference_active() else _weigh(*given, minimum, least_extra)


def weigh_poses_reference(
    poses: Tensor,
    extra: Tensor | None,
    condition: Tensor | None,
    weights: Tensor,
    layers: list[int],
    minimum: float,
    least_extra: float,
) -> Tensor:
    """The same in plain PyTorch; layers are the operator's four integers each."""
    position, heading = poses.split((2, 1), -1)
    features = torch.cat([position, heading.sin(), heading.cos()], -1)
    if extra is not None:
        extra = torch.where(extra <= least_extra, least_extra, extra)
    share = small_network_reference(features, extra, condition, weights, layers).squeeze(-1)
    return torch.log(minimum + (1 - minimum) * share)


def _save(ctx, args, out):
    ctx.save_for_backward(*args[:4])
    ctx.options = args[4:]


def _gradients(ctx, grad):
    need = ctx.needs_input_grad
    grads = _backward(grad, *ctx.saved_tensors, *ctx.options, need[0] + 2 * need[1])
    return *(g if n else None for g, n in zip(grads, need)), None, None, None


_backward = operator("weigh_poses_backward")
_weigh = operator("weigh_poses", _save, _gradients)
_networks.map_network("weigh_poses")


@torch.library.register_fake("mdps::weigh_poses")
def _(poses, extra, condition, weights, layers, minimum, least_extra):
    return poses.new_empty(poses.shape[:2])


@torch.library.register_fake("mdps::weigh_poses_backward")
def _(grad, poses, extra, condition, weights, layers, minimum, least_extra, wanted):
    return _networks.gradient_shapes(poses, extra, condition, weights, wanted)
