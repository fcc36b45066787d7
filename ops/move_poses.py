"""Poses (x, y, heading) moved by a small network: one step of a learned random walk.

Sine and cosine, the joining and splitting of columns, and the arctangent around `small_network` cost more as calls of torch
than the network. Here they are the first and the last thing that is done to a tile of particles in the cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _arguments as check
from . import _networks
from ._layers import Layer
from ._operator import operator, reference_active
from .small_network import small_network_reference

_NAMES = _networks.Names("poses", "noise")


def move_poses(
    poses: Tensor,
    noise: Tensor | None,
    weights: Tensor,
    layers: Sequence[Layer],
    scale: Tensor,
    *,
    condition: Tensor | None = None,
) -> Tensor:
    """Move every pose by a bounded random step that depends on its heading.

    With u = network(sin heading, cos heading; noise), four numbers in [0, 1], and s = scale (2 u - 1), x and y change by the
    first two entries of s, and the new heading is the angle of (sin heading, cos heading) + the last two.

    Args:
        poses: (B, N, 3), x, y and heading in radians, of any size; float32 or float64 (half types are computed in float32).
        noise: (B, N, E), the `extra` of `small_network`: it enters the one layer that has extra=True. E <= 256; 0, or
            None: the step is not random.
        weights: (P) or (R, P), as for `small_network`.
        layers: 1 to 16 `Layer`s, best as a tuple, for 2 inputs; the last is Layer(4, "sigmoid").
        scale: (4), the largest change of x and y, in their units, and of sine and cosine. A constant.
        condition: (B, K), values that the particles of a row share (an action), as for `small_network`; K <= 256.

    Returns:
        (B, N, 3); headings in [-pi, pi). NaN stays in its particle.

    Raises:
        TypeError: not real tensors of one dtype. ValueError: shapes, devices or layers that do not fit each other; a scale
            that requires a gradient.

    Cost: that of `small_network`, and a quarter more at widths of 8. Gradients to poses, noise, condition and weights; none
    flows through the angle of (0, 0).
    Source: the paper's dynamics of the bearings-only task (Additional Experiment Details).
    """
    given = _networks.arguments(_NAMES, poses, weights, layers, noise, condition, inputs=2)
    _networks.ends_in_shares(layers, 4)
    _, scale = check.reals(("poses", "scale"), given[0], scale)
    check.shape("scale", scale, "(4)", 4)
    if scale.requires_grad:
        raise ValueError("scale: expected a constant, got a tensor that requires a gradient")
    return move_poses_reference(*given, scale) if reference_active() else _move(*given, scale)


def move_poses_reference(
    poses: Tensor, noise: Tensor | None, condition: Tensor | None, weights: Tensor, layers: list[int], scale: Tensor
) -> Tensor:
    """The same in plain PyTorch; layers are the operator's four integers each."""
    position, heading = poses.split((2, 1), -1)
    direction = torch.cat([heading.sin(), heading.cos()], -1)
    step = scale * (2 * small_network_reference(direction, noise, condition, weights, layers) - 1)
    sine, cosine = (direction + step[..., 2:]).split(1, -1)
    nowhere = (sine == 0) & (cosine == 0)
    angle = torch.atan2(sine.detach(), cosine.detach())
    angle = torch.where(nowhere, angle, torch.atan2(torch.where(nowhere, 1, sine), torch.where(nowhere, 1, cosine)))
    top = 3.1415925 if angle.dtype == torch.float32 else torch.pi  # the largest number below pi, which torch.pi is
    with torch.no_grad():
        turn = torch.where((angle >= top) | (angle < -top), -top - angle, 0)
    return torch.cat([position + step[..., :2], angle + turn], -1)


def _save(ctx, args, out):
    *tensors, ctx.layers, scale = args
    ctx.save_for_backward(*tensors, scale)


def _gradients(ctx, grad_moved):
    need, (*tensors, scale) = ctx.needs_input_grad, ctx.saved_tensors
    grads = _backward(grad_moved, *tensors, ctx.layers, scale, need[0] + 2 * need[1])
    return *(g if n else None for g, n in zip(grads, need)), None, None


_backward = operator("move_poses_backward")
_move = operator("move_poses", _save, _gradients)
_networks.map_network("move_poses")


@torch.library.register_fake("mdps::move_poses")
def _(poses, noise, condition, weights, layers, scale):
    return poses.new_empty(poses.shape)


@torch.library.register_fake("mdps::move_poses_backward")
def _(grad_moved, poses, noise, condition, weights, layers, scale, wanted):
    return _networks.gradient_shapes(poses, noise, condition, weights, wanted)
