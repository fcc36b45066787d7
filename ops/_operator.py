"""How an operator that csrc/ registers becomes a differentiable Python function."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

is_grad_enabled = torch.is_grad_enabled
transforms_active = torch._C._are_functorch_transforms_active

_reference = os.environ.get("MDPS_REFERENCE", "0") == "1"


def reference_active() -> bool:
    """Return whether operators run by their plain-PyTorch references (MDPS_REFERENCE=1, or inside `reference()`)."""
    return _reference


@contextmanager
def reference(active: bool = True) -> Iterator[None]:
    """Within this context every operator of mdps.ops runs by its plain-PyTorch reference: to debug, and to compare."""
    global _reference
    before, _reference = _reference, active
    try:
        yield
    finally:
        _reference = before


def without_autocast(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """A product of tensors in a reference: autocast would round them to half types, which the operators do not."""
    with torch.autocast(args[-1].device.type, enabled=False):
        return function(*args)


def operator(
    name: str, save: Callable[..., None] | None = None, backward: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return a function that calls torch.ops.mdps.<name> and knows its derivative.

    save(ctx, inputs, output) keeps what the derivative needs; backward(ctx, *grads) returns one gradient or None per
    argument. Without `backward` a derivative is refused.

    torch.library.register_autograd would do, but puts Python into every call (6 us without, 22 us with gradients) and
    does not know torch.func.grad. So two Functions: torch.func needs the form with setup_context, which costs 25 us a
    call for inspect.signature; the form with ctx costs 5 us.
    """
    op = getattr(torch.ops.mdps, name).default
    tensors = [i for i, a in enumerate(op._schema.arguments) if "Tensor" in str(a.type)]
    save = save or _save_nothing
    backward = backward or _refuse(name)

    def forward(*args):
        return op(*args)

    forward.__signature__ = Signature([Parameter(a.name, Parameter.POSITIONAL_ONLY) for a in op._schema.arguments])

    class Transformable(torch.autograd.Function):
        generate_vmap_rule = True

    Transformable.forward = staticmethod(forward)
    Transformable.setup_context = staticmethod(save)
    Transformable.backward = staticmethod(backward)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            out = op(*args)
            save(ctx, args, out)
            return out

    Eager.backward = staticmethod(backward)
    eager = super(torch.autograd.Function, Eager).apply  # what Function.apply ends in; 2.5 us cheaper before torch 2.14

    # Without allow_in_graph, torch.compile(torch.func.grad(f)) drops the gradient in silence (torch 2.10 to 2.14).
    @torch.compiler.allow_in_graph
    def call(*args):
        if transforms_active() or forward_ad._current_level >= 0:
            return Transformable.apply(*args)  # torch.func; refuses forward mode
        if is_grad_enabled():
            for i in tensors:
                if (a := args[i]) is not None and a.requires_grad:
                    return eager(*args)
        return op(*args)

    return call


def _save_nothing(ctx, inputs, output):
    pass


def _refuse(name):
    def backward(ctx, *grads):
        raise NotImplementedError(f"mdps.ops: {name} has no derivative")

    return backward


def one_by_one(op: Callable[..., Any], n: int, in_dims: tuple, args: tuple) -> Any:
    """The results of n mapped calls, one after the other, stacked."""
    results = [op(*(a.select(d, i) if isinstance(d, int) else a for a, d in zip(args, in_dims))) for i in range(n)]
    return tuple(torch.stack(r) for r in zip(*results)) if isinstance(results[0], tuple) else torch.stack(results)


def map_one_by_one(name: str) -> None:
    """Register vmap for torch.ops.mdps.<name>, where the batch is not the first dimension: mapped calls run one by one."""
    op = getattr(torch.ops.mdps, name).default

    @torch.library.register_vmap(f"mdps::{name}")
    def rule(info, in_dims, *args):
        out = one_by_one(op, info.batch_size, in_dims, args)
        return out, (0,) * len(out)


def map_batch(name: str, shared: dict[int, int | None] | None = None, seed: int | None = None) -> None:
    """Register vmap for torch.ops.mdps.<name>: the mapped dimension is merged with the batch, the first of every tensor.

    shared = {argument: result} names arguments that may lack the batch dimension (bandwidths) and the result that is such
    an argument's gradient, if any. `seed` is the index of a seed argument: a seed () shared by a batch numbers its rows, so
    mapped calls cannot be merged and run one after the other.
    """
    op = getattr(torch.ops.mdps, name).default
    shared = shared or {}

    @torch.library.register_vmap(f"mdps::{name}")
    def rule(info, in_dims, *args):
        n = info.batch_size
        moved = [
            a if not isinstance(a, Tensor) else a.expand(n, *a.shape) if d is None else a.movedim(d, 0)
            for a, d in zip(args, in_dims)
        ]
        if seed is not None and moved[seed].dim() == 1:
            out = one_by_one(op, n, in_dims, args)
            return out, (0,) * len(out) if isinstance(out, tuple) else 0
        first = next(i for i, a in enumerate(moved) if isinstance(a, Tensor))
        batch = moved[first].size(1)
        was_shared = [i for i in shared if moved[i].dim() == 2]  # (n, D) of (n, B, D)
        for i in was_shared:
            moved[i] = moved[i].unsqueeze(1).expand(n, batch, *moved[i].shape[1:])
        out = op(*(a.flatten(0, 1) if isinstance(a, Tensor) else a for a in moved))
        given = out if isinstance(out, tuple) else (out,)
        results = [o.unflatten(0, (n, batch)) if o.size(0) else o.new_empty(n, *o.shape) for o in given]
        for i in was_shared:
            if (grad := shared[i]) is not None:
                results[grad] = results[grad].sum(1)
        return (tuple(results), (0,) * len(results)) if isinstance(out, tuple) else (results[0], 0)
