"""What the operators on small networks share: checks, transforms and shapes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _arguments as check
from ._layers import MOST_COLUMNS, Layer, described
from ._operator import one_by_one

Given = tuple[Tensor, Tensor | None, Tensor | None, Tensor, list[int]]
"""x, extra, condition, weights and the operator's four integers a layer."""


class Names:
    """What an operator calls x and extra, for the errors."""

    def __init__(self, x: str, extra: str) -> None:
        self.x, self.extra = x, extra
        self.given = (x, "weights"), (x, "weights", "condition"), (x, "weights", extra), (x, "weights", extra, "condition")


def arguments(
    names: Names,
    x: Tensor,
    weights: Tensor,
    layers: Sequence[Layer],
    extra: Tensor | None,
    condition: Tensor | None,
    inputs: int = 0,
) -> Given:
    """Check and return the arguments. `inputs` are those of the first layer if x are poses; otherwise x are the inputs.

    An extra or a condition without columns is none.
    """
    given: tuple[Tensor, ...] = (x, weights) if extra is None else (x, weights, extra)
    given = given if condition is None else (*given, condition)
    given = check.reals(names.given[2 * (extra is not None) + (condition is not None)], *given)
    x, weights = given[:2]
    n_extra = n_condition = 0
    if len(size := x.shape) != 3 or (inputs and size[2] != 3):
        raise ValueError(f"{names.x}: expected shape (B, N, {3 if inputs else 'C'}), got {tuple(size)}")
    rows, particles, columns = size
    if extra is not None:
        extra = given[2]
        if len(size := extra.shape) != 3 or size[0] != rows or size[1] != particles:
            raise ValueError(f"{names.extra}: expected shape (B, N, E) = ({rows}, {particles}, E), got {tuple(size)}")
        n_extra = size[2]
    if condition is not None:
        condition = given[-1]
        if len(size := condition.shape) != 2 or size[0] != rows:
            raise ValueError(f"condition: expected shape (B, K) = ({rows}, K), got {tuple(size)}")
        n_condition = size[1]
    if not 1 <= columns <= MOST_COLUMNS or n_extra > MOST_COLUMNS or n_condition > MOST_COLUMNS:
        least = {names.x: 1, names.extra: 0, "condition": 0}
        for (name, n), width in zip(least.items(), (columns, n_extra, n_condition)):
            if not n <= width <= MOST_COLUMNS:
                raise ValueError(f"{name}: expected {n} to {MOST_COLUMNS} columns, got {width}")
    numbers, n_parameters = described(layers, inputs or columns, n_extra, n_condition)
    size = weights.shape
    if len(size) not in (1, 2) or size[-1] != n_parameters:
        raise ValueError(f"weights: expected shape (P) or (R, P) with P = {n_parameters}, got {tuple(size)}")
    if len(size) == 2 and (size[0] == 0 or rows % size[0]):
        raise ValueError(f"weights: expected R sets, R a divisor of the {rows} rows of {names.x}, got R = {size[0]}")
    return x, extra if n_extra else None, condition if n_condition else None, weights, numbers


def ends_in_shares(layers: Sequence[Layer], out: int) -> None:
    """Check that the last layer returns `out` numbers in [0, 1]."""
    if layers[-1][:2] != (out, "sigmoid"):
        raise ValueError(f'layers: expected the last to be Layer({out}, "sigmoid"), got {layers[-1]}')


def _merge(n, in_dims, tensors):
    """(n, B, ...) -> (n B, ...) for mapped or repeated tensors, the weights being the last: (n R, P)."""
    *moved, sets = (
        t if t is None else t.expand(n, *t.shape) if d is None else t.movedim(d, 0) for t, d in zip(tensors, in_dims)
    )
    assert sets is not None
    return *(t if t is None else t.flatten(0, 1) for t in moved), sets.reshape(-1, sets.size(-1))


def map_network(name: str) -> None:
    """Register vmap for an operator on (x, extra, condition, weights, layers, ...) and for its derivative.

    The mapped dimension is merged with the batch; calls whose further arguments are mapped run one after the other.
    """
    forward, backward = (getattr(torch.ops.mdps, name + way).default for way in ("", "_backward"))

    @torch.library.register_vmap(f"mdps::{name}")
    def _(info, in_dims, *args):
        n = info.batch_size
        if any(d is not None for d in in_dims[5:]):
            return one_by_one(forward, n, in_dims, args), 0
        weights = args[3]
        *inputs, sets = _merge(n, in_dims, args[:4])
        shared = in_dims[3] is None and (weights.dim() == 1 or weights.size(0) == 1)
        y = forward(*inputs, weights if shared else sets, *args[4:])
        return y.unflatten(0, (n, y.size(0) // n)), 0

    @torch.library.register_vmap(f"mdps::{name}_backward")
    def _(info, in_dims, *args):
        n, wanted, extra, condition, weights = info.batch_size, args[-1], *args[2:5]
        if any(d is not None for d in in_dims[6:]):
            return one_by_one(backward, n, in_dims, args), (0,) * 4
        grads = backward(*_merge(n, in_dims, args[:5]), *args[5:])
        shape = weights.shape if in_dims[4] is None else weights.select(in_dims[4], 0).shape
        mapped = bool(wanted & 1), bool(wanted & 2) and extra is not None, condition is not None
        results = [g.unflatten(0, (n, g.size(0) // n)) if m else g for g, m in zip(grads, mapped)]
        return (*results, grads[3].reshape(n, *shape)), (*(0 if m else None for m in mapped), 0)


def gradient_shapes(x, extra, condition, weights, wanted):
    """What the derivative of such an operator returns, with empty memory; wanted: 1 for x + 2 for extra."""
    return (
        x.new_empty(x.shape if wanted & 1 else (0, 0, 0)),
        x.new_empty(extra.shape if wanted & 2 and extra is not None else (0, 0, 0)),
        x.new_empty((0, 0) if condition is None else condition.shape),
        x.new_empty(weights.shape),
    )
