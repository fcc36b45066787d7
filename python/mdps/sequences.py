"""The arguments that filters and smoothers share: checked, and masked so that nothing missing can reach a network."""

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import ops
from .ops._layers import changed

_BLOCK = 1024
_METHODS = "forward", "__call__", "for_sequence", "stack"


class Sequences(NamedTuple):
    """Observations and what goes with them, B sequences of T steps."""

    observations: Tensor
    """(B, T, ...), 0 where not observed: NaN there would reach the networks' gradients, even multiplied by 0."""
    actions: Tensor | None
    """(B, T, ...), 0 in the padding."""
    observed: Tensor | None
    """bool (B, T), False in the padding; None: everything is observed."""
    lengths: Tensor | None
    """int64 (B,); None: every sequence has T steps."""
    seed: Tensor
    """int64 (B,)."""


def of_each(observations: Tensor | Sequence[Tensor], n: int) -> list[Tensor]:
    """The observations of each of n filters or smoothers, from those of all or from a sequence of theirs.

    Raises:
        TypeError: something else than tensors.
    """
    each: list[Any] = [*observations] if isinstance(observations, (list, tuple)) else [observations] * n
    for one in each:
        _tensor("observations", one)
    return each


def check_numbers(kind: str, n: int, **lists: Sequence[Any] | None) -> None:
    """Raise ValueError unless each of these lists has an item for each of n filters or smoothers."""
    if n == 0:
        raise ValueError(f"{kind}: expected at least one, got none")
    for name, items in lists.items():
        if items is not None and len(items) != n:
            raise ValueError(f"{name}: expected R = {n}, one for each of {kind}, got {len(items)}")


def one_step(observation: Tensor, batch: int, device: torch.device) -> Tensor:
    """Check the observation of a step, (B, ...) -> (B, 1, ...)."""
    _tensor("observation", observation, device)
    if observation.dim() < 1 or observation.size(0) != batch:
        expected = f"(B, ...) with B = {batch}, that of the particles"
        raise ValueError(f"observation: expected shape {expected}, got {tuple(observation.shape)}")
    return observation.unsqueeze(1)


def prepare(
    observations: Tensor,
    actions: Tensor | None,
    lengths: Tensor | None,
    observed: Tensor | None,
    seed: Tensor | None,
    batch: int,
    device: torch.device,
) -> Sequences:
    """Check the arguments of a sequence call, of `batch` sequences on `device`, and apply the masks.

    On a GPU the values of `lengths` are not looked at, which would wait for it: nothing here does, so that it can be captured
    into a CUDA graph.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _tensor("observations", observations, device)
    if observations.dim() < 2 or observations.size(0) != batch or observations.size(1) == 0:
        expected = f"(B, T, ...) with B = {batch}, that of the particles, and T >= 1"
        raise ValueError(f"observations: expected shape {expected}, got {tuple(observations.shape)}")
    T = observations.size(1)
    if observed is not None:
        _tensor("observed", observed, device, torch.bool, (batch, T), "(B, T)")
    actions, real = prepare_moves(actions, lengths, batch, T, device)
    if real is not None:
        observed = real if observed is None else observed & real
    if observed is not None:
        observations = masked(observations, observed)
    return Sequences(observations, actions, observed, lengths, row_seeds(seed, batch, device))


def prepare_moves(
    actions: Tensor | None, lengths: Tensor | None, batch: int, T: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Check actions and lengths, as `prepare` does: return actions, 0 in the padding, and bool (B, T), False there, or None."""
    if actions is not None:
        _tensor("actions", actions, device)
        if actions.shape[:2] != (batch, T):
            raise ValueError(f"actions: expected shape (B, T, ...) with (B, T) = {(batch, T)}, got {tuple(actions.shape)}")
    if lengths is None:
        return actions, None
    _tensor("lengths", lengths, device, torch.int64, (batch,), "(B,)")
    known = lengths.device.type == "cpu" and not torch.compiler.is_compiling()
    if known and not ((lengths >= 1) & (lengths <= T)).all():
        raise ValueError(f"lengths: expected 1 to T = {T}, got {lengths.tolist()}")
    real = torch.arange(T, device=device) < lengths.unsqueeze(1)
    return masked(actions, real) if actions is not None else None, real


def check_particles(name: str, particles: Tensor, n_particles: int | None, size: int, parameter: Tensor) -> None:
    """Check particles (B, N, D), N = None for any number; `parameter` is one of the filter's."""
    _tensor(name, particles)
    if particles.dtype != parameter.dtype:
        raise TypeError(f"{name}: expected dtype {parameter.dtype}, that of the filter's parameters, got {particles.dtype}")
    if particles.device != parameter.device:
        raise ValueError(f"{name}: expected device {parameter.device}, that of the filter's parameters, got {particles.device}")
    n = particles.size(1) if n_particles is None and particles.dim() == 3 else n_particles
    if particles.dim() != 3 or particles.shape[1:] != (n, size) or n == 0:
        expected = f"(B, N, D) with {'N >= 1' if n_particles is None else f'N = {n_particles}'} and D = {size}"
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(particles.shape)}")


def check_same_batch(initial: Tensor, final: Tensor) -> None:
    """Raise ValueError unless a smoother's first and last particles are of as many sequences."""
    if final.size(0) != initial.size(0):
        raise ValueError(f"final: expected B = {initial.size(0)} sequences, those of initial, got {final.size(0)}")


def returned(name: str, value: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Check what the model `name` returned, and return it in the filter's dtype: under autocast, models return half types."""
    if value.shape != shape:
        raise ValueError(f"{name}: expected to return shape {tuple(shape)}, got {tuple(value.shape)}")
    if value.dtype != dtype:
        if torch.promote_types(value.dtype, dtype) != dtype:
            raise TypeError(f"{name}: expected to return dtype {dtype}, that of the filter's parameters, got {value.dtype}")
        value = value.to(dtype)
    return value


def whole_number(name: str, value: int, least: int) -> int:
    """Return an option that has to be an integer, of Python or numpy, and at least this."""
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    return number


def row_seeds(seed: Tensor | None, batch: int, device: torch.device) -> Tensor:
    """Return a seed for each sequence, int64 (B,), from a seed (), (B,) or torch's generator (None)."""
    if seed is None:
        seed = ops.make_seed(device=device)
    _tensor("seed", seed, device, torch.int64)
    if seed.dim() == 0:
        return ops.split_seed(seed, batch)
    if seed.shape != (batch,):
        raise ValueError(f"seed: expected shape () or (B,) = {(batch,)}, got {tuple(seed.shape)}")
    return seed


def time_seeds(seed: Tensor, times: range, stream: int) -> Tensor:
    """Return a seed for each of these times (one after the other), int64 (B, len(times)), from seed (B,).

    Those of a time are the same in whatever range it occurs. A block of 1024 times has a seed, from which those of its times
    are split, so that even a late time on its own costs no more than some 10 us.
    """
    first, last = times.start // _BLOCK, (times.stop - 1) // _BLOCK
    offset = first * _BLOCK
    blocks = ops.split_seed(seed, last + 1, stream=stream)[:, first:].flatten()
    n = _BLOCK if first < last else times.stop - offset
    seeds = ops.split_seed(blocks, n).view(seed.size(0), (last + 1 - first) * n)
    return seeds[:, times.start - offset : times.stop - offset]


def encode(network: Any, observations: Tensor) -> Tensor:
    """Return network.encode(observations), (B, T, ...), or the observations where the network has no such method."""
    if not hasattr(network, "encode"):
        return observations
    codes = network.encode(observations)
    if codes.shape[:2] != observations.shape[:2]:
        expected = f"(B, T, ...) with (B, T) = {tuple(observations.shape[:2])}"
        raise ValueError(f"encode: expected to return shape {expected}, got {tuple(codes.shape)}")
    return codes


def for_sequence(models: Sequence[Any]) -> Any:
    """Return one function for the steps of a sequence: it takes the rows of all the models, in equal shares, one after another.

    It is model.for_sequence(), or the model where it has no such method. Several models become one by the `stack` of their
    class; where there is none, or it returns None, each is given its share. A model whose calls are more than what such a
    method knows, as it has hooks or a subclass has another `forward`, is called itself.
    """
    first = models[0]
    if len(models) > 1 and all(type(m) is type(first) and stands_for_calls(m, "stack") for m in models):
        together = type(first).stack(models)
        if together is not None:
            return together
    functions = [m.for_sequence() if stands_for_calls(m, "for_sequence") else m for m in models]
    if len(functions) == 1:
        return functions[0]

    def each(*rows: Tensor | None) -> Tensor:
        shares = [[None] * len(functions) if r is None else r.chunk(len(functions)) for r in rows]
        return torch.cat([f(*share) for f, share in zip(functions, zip(*shares))])

    return each


def stands_for_calls(model: Any, method: str) -> bool:
    """Whether the model has this method, for_sequence or stack, and nothing that its result would not know: hooks, or a
    subclass's `forward`."""
    is_module = isinstance(model, nn.Module)
    if not hasattr(model, method) or (is_module and changed(model)):
        return False
    return _is_current(type(model), method, "forward" if is_module else "__call__")


def _is_current(kind: type, method: str, call: str) -> bool:
    """Whether no class overrides `call`, or for_sequence, that is derived from the one whose method stands for it.

    Where the class that has the method has no `call`, the method stands for the first one among those derived from it.
    """
    at = {name: [i for i, c in enumerate(kind.__mro__) if c is not nn.Module and name in c.__dict__] for name in _METHODS}
    if not at[method]:
        return method != "stack"
    owner = at[method][0]
    known = [at[name] for name in (call, "for_sequence") if at[name]]
    return all(places[0] >= owner if places[-1] >= owner else len(places) == 1 for places in known)


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """Return x (B, T, ...) with 0 where mask (B, T) is False, whatever x holds there."""
    return torch.where(mask.reshape(mask.shape + (1,) * (x.dim() - 2)), x, 0)


def _tensor(
    name: str,
    value: Any,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
    letters: str = "",
) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if dtype is not None and value.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {value.dtype}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: expected device {device}, that of the particles, got {value.device}")
    if shape is not None and value.shape != shape:
        raise ValueError(f"{name}: expected shape {letters} = {shape}, got {tuple(value.shape)}")
