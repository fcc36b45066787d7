"""The arguments of pose_correlation: checked, and those of mapped calls as those of one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _arguments as check


def shapes(map: Tensor, template: Tensor, poses: Tensor) -> torch.Size:
    """Check them; return the leading dimensions of the poses."""
    if map.dim() < 3 or 0 in map.shape[-3:]:
        raise ValueError(f"map: expected shape (..., C, H, W), none of them 0, got {tuple(map.shape)}")
    if template.dim() < 3 or 0 in template.shape[-2:] or template.size(-3) != map.size(-3):
        what = f"(..., C, h, w) with C = {map.size(-3)} as the map has and at least one cell"
        raise ValueError(f"template: expected shape {what}, got {tuple(template.shape)}")
    if poses.dim() < 2 or poses.size(-1) != 3:
        raise ValueError(f"poses: expected shape (..., N, 3), got {tuple(poses.shape)}")
    return poses.shape[:-2]


def origin(given: Sequence[float]) -> tuple[float, float]:
    if not isinstance(given, (tuple, list)) or len(given) != 2 or not all(isinstance(x, (int, float)) for x in given):
        raise TypeError(f"origin: expected two numbers (x0, y0), got {given!r}")
    if not all(abs(x) <= 1e6 for x in given):
        raise ValueError(f"origin: expected numbers of at most 1e6, got {given!r}")
    return float(given[0]), float(given[1])


def values(name: str, x: Tensor, kinds: torch.Size, size: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Check a number for each cell of templates."""
    if not isinstance(x, Tensor) or x.dtype != dtype:
        raise TypeError(f"{name}: expected a tensor of {dtype}, got {x.dtype if isinstance(x, Tensor) else type(x).__name__}")
    if x.device != device:
        raise ValueError(f"{name}: expected the device of template, {device}, got {x.device}")
    if x.dim() < 2 or x.shape[-2:] != size or not broadcasts(x.shape[:-2], kinds):
        raise ValueError(
            f"{name}: expected shape (..., h, w) that goes with the template, {(*kinds, *size)}, got {tuple(x.shape)}"
        )
    return x


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to)))


def rows_index(name: str, index: Tensor | None, of: str, kinds: torch.Size, lead: torch.Size, device: torch.device) -> Tensor:
    """Which of the maps or templates each row of poses has: (rows)."""
    if index is None:
        if not broadcasts(kinds, lead):
            raise ValueError(
                f"{of}: expected leading dimensions that broadcast to those of poses, {tuple(lead)}, got {tuple(kinds)}"
            )
        return torch.arange(kinds.numel(), device=device).view(kinds).expand(lead).reshape(-1)
    if not isinstance(index, Tensor) or index.dtype != torch.int64:
        raise TypeError(
            f"{name}: expected an int64 tensor, got {index.dtype if isinstance(index, Tensor) else type(index).__name__}"
        )
    if index.device != device:
        raise ValueError(f"{name}: expected the device of poses, {device}, got {index.device}")
    check.shape(name, index, "(...) of poses", *lead)
    return index.reshape(-1)


def check_index(name: str, index: Tensor, n: int) -> None:
    """What the compiled operator looks at itself: in plain PyTorch a negative index would count from the end."""
    if index.numel() and (bad := index[(index < 0) | (index >= n)]).numel():
        raise ValueError(f"{name}: expected 0 to {n - 1}, got {int(bad[0])}")


def stack(n: int, in_dims: tuple, args: tuple, alone: tuple[bool, bool]) -> tuple:
    """The arguments from map to template_index of n mapped calls as those of one. What is mapped stands in a row behind each
    other; maps and templates that are shared stay shared, unless `alone` asks for copies (their gradients are the calls' own).
    """

    def flat(i: int) -> Tensor:
        moved = args[i].expand(n, *args[i].shape) if in_dims[i] is None else args[i].movedim(in_dims[i], 0)
        return moved.flatten(0, 1)

    def counted(i: int, of: Tensor, mapped: bool) -> Tensor:
        index = flat(i)
        calls = torch.arange(n, device=of.device).repeat_interleave(index.size(0) // n)
        if not mapped:
            return index
        own = of.size(0) // n  # what is not one of a call's own must not become another call's: -1 is refused
        return torch.where((index >= 0) & (index < own), index + calls * own, -1)

    maps_mapped = alone[0] or in_dims[0] is not None
    templates_mapped = alone[1] or in_dims[1] is not None or in_dims[2] is not None
    maps = flat(0) if maps_mapped else args[0]
    templates = flat(1) if templates_mapped else args[1]
    valid = flat(2) if templates_mapped and args[2] is not None else args[2]
    return maps, templates, valid, flat(3), counted(4, maps, maps_mapped), counted(5, templates, templates_mapped)
