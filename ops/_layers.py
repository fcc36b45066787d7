"""The layers of a `small_network`: how they are written, and how they are read off an nn.Sequential."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from . import _arguments as check

MOST_LAYERS, MOST_COLUMNS = 16, 256
ACTIVATIONS = {"none": 0, "relu": 1, "tanh": 2, "sigmoid": 3, "prelu": 4}
_MODULES = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid", nn.PReLU: "prelu"}


class Layer(NamedTuple):
    """One layer: activation(W [previous | extra | condition] + bias)."""

    out: int
    """Values that it returns, 1 to 256."""
    activation: str = "relu"
    """none, relu, tanh, sigmoid or prelu (one slope)."""
    extra: bool = False
    """Whether `extra` is joined to what the layer before returns."""
    condition: bool = False
    """Whether `condition` is joined."""


def layers_of(module: nn.Module, *, extra: bool = False, condition: bool = False) -> tuple[Layer, ...] | None:
    """Return the layers of an nn.Sequential, or None if `small_network` cannot stand for it.

    It has to consist of nn.Linear with bias, each followed by at most one of nn.ReLU, nn.Tanh, nn.Sigmoid and nn.PReLU (one
    slope), nested nn.Sequentials included; no subclasses, no hooks (nor pruning), the limits of `small_network`. `extra` and
    `condition` enter its first layer, so that second(torch.cat([first(x), extra], -1)) is
    layers_of(first) + layers_of(second, extra=True).
    """
    layers: list[Layer] = []
    for leaf in _leaves((module,)):
        if changed(leaf):
            return None
        if type(leaf) is nn.Linear and leaf.bias is not None and leaf.out_features <= MOST_COLUMNS >= leaf.in_features:
            layers.append(Layer(leaf.out_features, "none", extra and not layers, condition and not layers))
        elif type(leaf) in _MODULES and layers and layers[-1].activation == "none" and getattr(leaf, "num_parameters", 1) == 1:
            layers[-1] = layers[-1]._replace(activation=_MODULES[type(leaf)])
        else:
            return None
    return tuple(layers) if 1 <= len(layers) <= MOST_LAYERS else None


def flatten_parameters(*modules: nn.Module) -> Tensor:
    """Return the parameters of nn.Sequentials that `layers_of` knows as one tensor (P), in the order of `small_network`.

    The modules keep their parameters, and gradients flow back into them. Stack the results for several sets (R, P). It costs
    more than a call of the operator at widths of 8: once for a sequence.

    Raises:
        ValueError: another module, or one that is not only its parameters: it has hooks (pruning and the old weight_norm are
            hooks), a parametrization or a forward of its own.
    """
    parts = []
    for leaf in _leaves(modules):
        if changed(leaf):
            expected = "layers without hooks, pruning or a forward of their own, which would be ignored"
            raise ValueError(f"modules: expected {expected}, got a {leaf}")
        if type(leaf) is nn.Linear and leaf.bias is not None:
            parts += [leaf.weight.reshape(-1), leaf.bias]
        elif type(leaf) is nn.PReLU:
            parts.append(leaf.weight)
        elif type(leaf) not in _MODULES:
            raise ValueError(f"modules: expected nn.Sequential of nn.Linear with bias and activations, got a {leaf}")
    if not parts:
        raise ValueError("modules: expected at least one nn.Linear, got none")
    return torch.cat(parts)


def changed(module: nn.Module) -> bool:
    """Return whether a call of this module is more than its class's forward: it has hooks, or a forward of its own."""
    m = module
    hooked = m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
    return bool(hooked) or "forward" in m.__dict__


def _leaves(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        if type(module) is nn.Sequential and not changed(module):
            yield from _leaves(module)
        else:
            yield module


def describe(layers: Sequence[Layer], columns: int, extra: int, condition: int) -> tuple[list[int], int]:
    """Return the operator's four integers a layer, and P."""
    if not isinstance(layers, (tuple, list)) or not all(isinstance(layer, Layer) for layer in layers):
        raise TypeError(f"layers: expected a sequence of Layer, got {layers!r}")
    if not 1 <= len(layers) <= MOST_LAYERS:
        raise ValueError(f"layers: expected 1 to {MOST_LAYERS}, got {len(layers)}")
    numbers: list[int] = []
    n_parameters, entered = 0, [0, 0]
    for layer in layers:
        out, activation, has_extra, has_condition = layer
        if not isinstance(out, int) or not 1 <= out <= MOST_COLUMNS:
            raise ValueError(f"layers: expected out = 1 to {MOST_COLUMNS}, got {out!r}")
        numbers += [int(has_extra), int(has_condition), out, check.choice("activation", activation, ACTIVATIONS)]
        entered = [entered[0] + bool(has_extra), entered[1] + bool(has_condition)]
        n_parameters += out * (columns + extra * has_extra + condition * has_condition + 1) + int(activation == "prelu")
        columns = out
    for name, width, times in (("extra", extra, entered[0]), ("condition", condition, entered[1])):
        if width and times != 1:
            raise ValueError(f"{name}: expected one layer with {name}=True for {width} columns, got {times}")
        if times and not width:
            raise ValueError(f"{name}: expected no layer with {name}=True without such an input, got {times}")
    return numbers, n_parameters


_described = lru_cache(maxsize=1024)(describe)


def described(layers: Sequence[Layer], columns: int, extra: int, condition: int) -> tuple[list[int], int]:
    """The same, remembered; torch.compile traces the plain function."""
    if is_compiling() or type(layers) is not tuple:
        return describe(layers, columns, extra, condition)
    return _described(layers, columns, extra, condition)
