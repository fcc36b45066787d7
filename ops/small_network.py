"""A small multilayer perceptron on every particle.

nn.Sequential pays for every layer a call and a pass through memory; at widths of 8 that is nearly all of its time. This
operator keeps 128 particles in the cache through all layers: tests/bench/small_network.py prints the ratios.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._layers import ACTIVATIONS, Layer
from ._networks import Names, arguments, gradient_shapes, map_network
from ._operator import operator, reference_active, without_autocast

_NAMES = Names("x", "extra")


def small_network(
    x: Tensor, weights: Tensor, layers: Sequence[Layer], *, extra: Tensor | None = None, condition: Tensor | None = None
) -> Tensor:
    """Apply a multilayer perceptron to every particle.

    Args:
        x: (B, N, C), what the first layer reads; float32 or float64 (half types are computed in float32). 1 <= C <= 256.
        weights: (P) or (R, P), R >= 1 a divisor of B: R sets of parameters, row b uses set b // (B / R). A set holds for each
            layer the matrix (out, columns) row by row, the bias (out) and, with "prelu", the slope: `flatten_parameters`.
            Make it once for a sequence, not once for a step.
        layers: 1 to 16 `Layer`s, best as a tuple (a list is read anew at every call); the columns of a layer's matrix are those
            of torch.cat([previous, extra, condition]).
        extra: (B, N, E), further values of each particle; they enter the one layer that has extra=True. E <= 256; 0 is as none.
        condition: (B, K), values that the particles of a row share; likewise, K <= 256. Their share of the layer is computed
            once a row.

    Returns:
        (B, N, out of the last layer). NaN passes through every activation, as in torch, and stays in its particle.

    Raises:
        TypeError: not real tensors of one dtype. ValueError: shapes, devices or layers that do not fit each other.

    Cost: P multiply-adds a particle, three times as many backward, which computes the activations again: only the inputs are
    kept. Gradients to x, extra, condition and weights, the same bits for any number of threads.
    Source: the paper's dynamics, measurement and smoother networks (Additional Experiment Details, Model Architectures).
    """
    given = arguments(_NAMES, x, weights, layers, extra, condition)
    return small_network_reference(*given) if reference_active() else _network(*given)


def small_network_reference(
    x: Tensor, extra: Tensor | None, condition: Tensor | None, weights: Tensor, layers: list[int]
) -> Tensor:
    """The same in plain PyTorch; layers are the operator's four integers each."""
    sets = weights.reshape(-1, weights.size(-1))
    batch = (sets.size(0), x.size(0) // sets.size(0) * x.size(1))
    functions = (lambda h: h), torch.relu, torch.tanh, torch.sigmoid
    h, at = x.reshape(*batch, x.size(2)), 0
    for has_extra, has_condition, out, activation in zip(*(layers[i::4] for i in range(4))):
        if has_extra and extra is not None:
            h = torch.cat([h, extra.reshape(*batch, extra.size(2))], -1)
        if has_condition and condition is not None:
            shared = condition[:, None].expand(-1, x.size(1), -1)
            h = torch.cat([h, shared.reshape(*batch, condition.size(1))], -1)
        matrix, bias = sets[:, at : at + out * h.size(-1)], sets[:, None, at + out * h.size(-1) :][..., :out]
        at += out * (h.size(-1) + 1)
        h = without_autocast(torch.matmul, h, matrix.reshape(-1, out, h.size(-1)).mT) + bias
        if activation == ACTIVATIONS["prelu"]:
            h = torch.where(h < 0, sets[:, None, at : at + 1] * h, h)
            at += 1
        else:
            h = functions[activation](h)
    return h.reshape(x.size(0), x.size(1), layers[-2])


def _save(ctx, args, out):
    x, extra, condition, weights, ctx.layers = args
    ctx.save_for_backward(x, extra, condition, weights)


def _gradients(ctx, grad_y):
    need = ctx.needs_input_grad
    grads = _backward(grad_y, *ctx.saved_tensors, ctx.layers, need[0] + 2 * need[1])
    return *(g if n else None for g, n in zip(grads, need)), None


_backward = operator("small_network_backward")
_network = operator("small_network", _save, _gradients)
map_network("small_network")


@torch.library.register_fake("mdps::small_network")
def _(x, extra, condition, weights, layers):
    return x.new_empty(x.size(0), x.size(1), layers[-2])


@torch.library.register_fake("mdps::small_network_backward")
def _(grad_y, x, extra, condition, weights, layers, wanted):
    return gradient_shapes(x, extra, condition, weights, wanted)
