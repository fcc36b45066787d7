"""A small multilayer perceptron on every particle.

nn.Sequential pays for every layer a call and a pass through memory; at widths of 8 that is nearly all of its time. This
operator keeps 128 particles in the cache through all layers: tests/bench/small_network.py prints the ratios.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _arguments as check
from ._layers import ACTIVATIONS, Layer, described
from ._operator import operator, reference_active

_NAMES = ("x", "weights"), ("x", "weights", "condition"), ("x", "weights", "extra"), ("x", "weights", "extra", "condition")


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
        extra: (B, N, E), further values of each particle; they enter the one layer that has extra=True. 1 <= E <= 256.
        condition: (B, K), values that the particles of a row share; likewise. Their share of the layer is computed once a row.

    Returns:
        (B, N, out of the last layer). NaN passes through every activation, as in torch, and stays in its particle.

    Raises:
        TypeError: not real tensors of one dtype. ValueError: shapes, devices or layers that do not fit each other.

    Cost: P multiply-adds a particle, three times as many backward, which computes the activations again: only the inputs are
    kept. Gradients to x, extra, condition and weights, the same bits for any number of threads.
    Source: the paper's dynamics, measurement and smoother networks (Additional Experiment Details, Model Architectures).
    """
    given = (x, weights) if extra is None else (x, weights, extra)
    given = given if condition is None else (*given, condition)
    given = check.reals(_NAMES[2 * (extra is not None) + (condition is not None)], *given)
    x, weights = given[:2]
    n_extra = n_condition = 0
    if len(size := x.shape) != 3:
        raise ValueError(f"x: expected shape (B, N, C), got {tuple(size)}")
    rows, particles, columns = size
    if extra is not None:
        extra = given[2]
        if len(size := extra.shape) != 3 or size[0] != rows or size[1] != particles:
            raise ValueError(f"extra: expected shape (B, N, E) = ({rows}, {particles}, E), got {tuple(size)}")
        n_extra = size[2]
    if condition is not None:
        condition = given[-1]
        if len(size := condition.shape) != 2 or size[0] != rows:
            raise ValueError(f"condition: expected shape (B, K) = ({rows}, K), got {tuple(size)}")
        n_condition = size[1]
    numbers, n_parameters = described(layers, columns, n_extra, n_condition)
    size = weights.shape
    if len(size) not in (1, 2) or size[-1] != n_parameters:
        raise ValueError(f"weights: expected shape (P) or (R, P) with P = {n_parameters}, got {tuple(size)}")
    if len(size) == 2 and (size[0] == 0 or rows % size[0]):
        raise ValueError(f"weights: expected R sets, R a divisor of the {rows} rows of x, got R = {size[0]}")
    if reference_active():
        return small_network_reference(x, extra, condition, weights, numbers)
    return _network(x, extra, condition, weights, numbers)


def small_network_reference(
    x: Tensor, extra: Tensor | None, condition: Tensor | None, weights: Tensor, layers: list[int]
) -> Tensor:
    """The same in plain PyTorch; layers are the operator's four integers each."""
    sets = weights.reshape(-1, weights.size(-1))
    batch = (sets.size(0), x.size(0) // sets.size(0) * x.size(1))
    functions = (lambda h: h), torch.relu, torch.tanh, torch.sigmoid
    h, at = x.reshape(*batch, x.size(2)), 0
    for has_extra, has_condition, out, activation in zip(*(layers[i::4] for i in range(4))):
        if has_extra:
            h = torch.cat([h, extra.reshape(*batch, extra.size(2))], -1)
        if has_condition:
            shared = condition[:, None].expand(-1, x.size(1), -1)
            h = torch.cat([h, shared.reshape(*batch, condition.size(1))], -1)
        matrix, bias = sets[:, at : at + out * h.size(-1)], sets[:, None, at + out * h.size(-1) :][..., :out]
        at += out * (h.size(-1) + 1)
        h = torch.matmul(h, matrix.reshape(-1, out, h.size(-1)).mT) + bias
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


def _merge(n, in_dims, tensors):
    """(n, B, ...) -> (n B, ...) for mapped or repeated tensors, the weights being the last: (n R, P)."""
    moved = [t if t is None else t.expand(n, *t.shape) if d is None else t.movedim(d, 0) for t, d in zip(tensors, in_dims)]
    return *(t if t is None else t.flatten(0, 1) for t in moved[:-1]), moved[-1].reshape(-1, moved[-1].size(-1))


@torch.library.register_vmap("mdps::small_network")
def _(info, in_dims, x, extra, condition, weights, layers):
    n = info.batch_size
    *inputs, sets = _merge(n, in_dims, (x, extra, condition, weights))
    shared = in_dims[3] is None and (weights.dim() == 1 or weights.size(0) == 1)
    y = torch.ops.mdps.small_network(*inputs, weights if shared else sets, layers)
    return y.unflatten(0, (n, y.size(0) // n)), 0


@torch.library.register_vmap("mdps::small_network_backward")
def _(info, in_dims, grad_y, x, extra, condition, weights, layers, wanted):
    n = info.batch_size
    merged = _merge(n, in_dims, (grad_y, x, extra, condition, weights))
    grads = torch.ops.mdps.small_network_backward(*merged, layers, wanted)
    shape = weights.shape if in_dims[4] is None else weights.select(in_dims[4], 0).shape
    mapped = bool(wanted & 1), bool(wanted & 2) and extra is not None, condition is not None
    results = [g.unflatten(0, (n, g.size(0) // n)) if m else g for g, m in zip(grads, mapped)]
    return (*results, grads[3].reshape(n, *shape)), (*(0 if m else None for m in mapped), 0)


@torch.library.register_fake("mdps::small_network")
def _(x, extra, condition, weights, layers):
    return x.new_empty(x.size(0), x.size(1), layers[-2])


@torch.library.register_fake("mdps::small_network_backward")
def _(grad_y, x, extra, condition, weights, layers, wanted):
    return (
        x.new_empty(x.shape if wanted & 1 else (0, 0, 0)),
        x.new_empty(extra.shape if wanted & 2 and extra is not None else (0, 0, 0)),
        x.new_empty((0, 0) if condition is None else condition.shape),
        x.new_empty(weights.shape),
    )
