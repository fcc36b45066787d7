"""Checks of arguments: one clear error that names the argument, what was expected and what came."""

import torch
from torch import Tensor

_REAL = (torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)


def reals(names: tuple[str, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, half types cast to float32; they share one dtype, float32 or float64, and one device."""
    first = tensors[0]
    if isinstance(first, Tensor):
        dtype, device = first.dtype, first.device
        if dtype in _REAL:
            for t in tensors[1:]:  # not all(...), whose generator costs 0.4 us
                if not isinstance(t, Tensor) or t.dtype is not dtype or t.device != device:
                    break
            else:
                return tensors
    for name, t in zip(names, tensors):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(t).__name__}")
        if t.dtype not in _REAL and t.dtype not in _HALF:
            raise TypeError(f"{name}: expected dtype float32 or float64, got {t.dtype}")
    tensors = tuple(t.float() if t.dtype in _HALF else t for t in tensors)
    for name, t in zip(names[1:], tensors[1:]):
        if t.dtype != tensors[0].dtype:
            raise TypeError(f"{name}: expected the dtype of {names[0]}, {tensors[0].dtype}, got {t.dtype}")
        if t.device != tensors[0].device:
            raise ValueError(f"{name}: expected the device of {names[0]}, {tensors[0].device}, got {t.device}")
    return tensors


def shape(name: str, tensor: Tensor, letters: str, *sizes: int) -> None:
    """Check the shape; `letters` says it in words, as in "(B, N, D)"."""
    if tensor.shape != sizes:
        raise ValueError(f"{name}: expected shape {letters} = {sizes}, got {tuple(tensor.shape)}")


def choice(name: str, value: str, values: dict[str, int]) -> int:
    """Return the number of a named option."""
    if value not in values:
        raise ValueError(f"{name}: expected one of {list(values)}, got {value!r}")
    return values[value]


def state_size(n_dim: int, n_angular: int) -> None:
    """Check a state of n_dim dimensions of which the last n_angular are angles."""
    if not 1 <= n_dim <= 16:
        raise ValueError(f"expected states of 1 to 16 dimensions, got {n_dim}")
    if not isinstance(n_angular, int):
        raise TypeError(f"n_angular: expected an int, got {type(n_angular).__name__}")
    if not 0 <= n_angular <= n_dim:
        raise ValueError(f"n_angular: expected 0 to {n_dim}, the number of state dimensions, got {n_angular}")


def whole(name: str, value: int) -> None:
    """Check a number that has to be an int: Python's, numpy's or a symbolic one."""
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an int, got {value!r}")


def named(error: RuntimeError) -> Exception:
    """The ValueError that "mdps.<operator>: bandwidths: ..." means, or one of an index: values that the shim alone looks at.

    Any other error stays: what is left after the checks here is the machine's (memory, threads, CUDA).
    """
    what = str(error).partition("\n")[0].partition(": ")[2]
    is_value = what.startswith(("bandwidths: ", "map_index: ", "template_index: "))
    return ValueError(what) if str(error).startswith("mdps.") and is_value else error
