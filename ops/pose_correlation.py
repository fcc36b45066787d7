"""How well a template, seen from above, fits a map at poses: the score of map-based localization, pose by pose."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _arguments as check
from ._operator import operator, reference_active

_PADDING = {"zeros": 0, "replicate": 1}
_NORMALIZE = {"none": 0, "valid": 1, "cells and valid": 2}


def pose_correlation(
    map: Tensor,
    template: Tensor,
    poses: Tensor,
    valid: Tensor | None = None,
    *,
    origin: tuple[float, float],
    confidence: Tensor | None = None,
    map_index: Tensor | None = None,
    template_index: Tensor | None = None,
    padding: str = "zeros",
    normalize: str = "none",
    half_pixel: bool = False,
) -> Tensor:
    """Sum the products of a template with the map as its cells see it from each pose, over cells and channels.

    Cell (row i, column j) of the template lies at (x, y) = (j - x0, i - y0) from the pose and samples the map, bilinearly, at
    column u + x cos(theta) - y sin(theta) and row v + x sin(theta) + y cos(theta). A pixel's centre is at integers: u = 0 is
    the middle of the first column. v and rows point down, so that theta is clockwise as one looks at the map.

    Args:
        map: (..., C, H, W), float32 or float64 (half types are computed in float32). It is used as it lies in memory where its
            memory format is torch.channels_last; any other is copied in every call, so convert it once.
        template: (..., C, h, w), features around the vehicle.
        poses: (..., N, 3): u and v in pixels of the map, theta in radians, of any size.
        valid: (..., h, w) bool, cells that count; None for all. What a template has elsewhere, NaN included, has no effect.
        origin: (x0, y0), column and row of the template, in cells, that the pose stands for; it may lie outside.
        confidence: (..., h, w), a factor of each cell.
        map_index: int64, of the poses' leading dimensions: which map each row of N poses has, counted through all leading
            dimensions of `map`. None: these dimensions are broadcast to those of `poses`; maps of (B, 1) serve poses of (B, T).
        template_index: the same for `template`; leading dimensions of valid and confidence are broadcast to the template's.
        padding: what lies around the map, "zeros" or "replicate", the nearest pixel.
        normalize: "none"; "valid" divides by the number of valid cells, as OrienterNet does; "cells and valid" by h w as well,
            as the paper's released code does. Without a valid cell the score is 0.
        half_pixel: u = 1/2 is the middle of the first column, as in OrienterNet.

    Returns:
        (..., N) scores. A pose that is not finite has a NaN score, and a NaN gradient, and adds nothing to other gradients.

    Raises:
        TypeError: dtypes. ValueError: shapes, devices, options, indices out of range (on a GPU, where nobody looks, their
            rows are NaN).

    Gradients to map, template, confidence and poses; that to the map is as large as the map, and is left out where the map
    needs none. As the map is bilinear, a pose's gradient jumps where a cell crosses the middle of a pixel.
    Cost: O(N C) a valid cell; one thread takes 2 ns for 8 channels in float32, and 3 ns backward. Memory: a copy of the
    template; nothing grows with N h w.
    Source: the paper, "Global Localization Task"; Sarlin et al. 2023 (OrienterNet), section 3.3.
    """
    given = (map, template, poses) if confidence is None else (map, template, poses, confidence)
    map, template, poses, *factor = check.reals(("map", "template", "poses", "confidence"), *given)
    replicate, how = check.choice("padding", padding, _PADDING), check.choice("normalize", normalize, _NORMALIZE)
    lead = _shapes(map, template, poses)
    x0, y0 = _origin(origin)
    kinds, size = template.shape[:-3], template.shape[-2:]
    if valid is not None:
        valid = _per_cell("valid", valid, kinds, size, torch.bool, template.device)
    if factor:
        weight = _per_cell("confidence", factor[0], kinds, size, template.dtype, template.device)
        template = template * (weight if valid is None else torch.where(valid, weight, 0.0)).unsqueeze(-3)
    maps = _index("map_index", map_index, "map", map.shape[:-3], lead, poses.device)
    templates = _index("template_index", template_index, "template", kinds, lead, poses.device)
    args = (
        map.reshape(-1, *map.shape[-3:]).permute(0, 2, 3, 1),
        template.reshape(-1, *template.shape[-3:]),
        None if valid is None else valid.expand(*kinds, *size).reshape(-1, *size),
        poses.reshape(lead.numel(), *poses.shape[-2:]),
        maps,
        templates,
        x0,
        y0,
        0.5 if half_pixel else 0.0,
        replicate,
    )
    if reference_active():
        scores = pose_correlation_reference(*args)
    else:
        try:
            scores = _correlate(*args)
        except RuntimeError as error:
            raise check.named(error) from None
    scores = scores.view(poses.shape[:-1])
    if how == 0:
        return scores
    count = (
        size.numel()
        if valid is None
        else valid.expand(*kinds, *size).sum((-2, -1)).clamp_min(1).flatten()[templates].view(*lead, 1)
    )
    return scores / (count * size.numel() if how == 2 else count)


def _shapes(map: Tensor, template: Tensor, poses: Tensor) -> torch.Size:
    """Check them; return the leading dimensions of the poses."""
    if map.dim() < 3 or 0 in map.shape[-3:]:
        raise ValueError(f"map: expected shape (..., C, H, W), none of them 0, got {tuple(map.shape)}")
    if template.dim() < 3 or 0 in template.shape[-2:] or template.size(-3) != map.size(-3):
        what = f"(..., C, h, w) with C = {map.size(-3)} as the map has and at least one cell"
        raise ValueError(f"template: expected shape {what}, got {tuple(template.shape)}")
    if poses.dim() < 2 or poses.size(-1) != 3:
        raise ValueError(f"poses: expected shape (..., N, 3), got {tuple(poses.shape)}")
    return poses.shape[:-2]


def _origin(origin: Sequence[float]) -> tuple[float, float]:
    if not isinstance(origin, (tuple, list)) or len(origin) != 2 or not all(isinstance(x, (int, float)) for x in origin):
        raise TypeError(f"origin: expected two numbers (x0, y0), got {origin!r}")
    if not all(abs(x) <= 1e6 for x in origin):
        raise ValueError(f"origin: expected numbers of at most 1e6, got {origin!r}")
    return float(origin[0]), float(origin[1])


def _per_cell(name: str, x: Tensor, kinds: torch.Size, size: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Check a number for each cell of templates."""
    if not isinstance(x, Tensor) or x.dtype != dtype:
        raise TypeError(f"{name}: expected a tensor of {dtype}, got {x.dtype if isinstance(x, Tensor) else type(x).__name__}")
    if x.device != device:
        raise ValueError(f"{name}: expected the device of template, {device}, got {x.device}")
    if x.dim() < 2 or x.shape[-2:] != size or not _broadcasts(x.shape[:-2], kinds):
        raise ValueError(
            f"{name}: expected shape (..., h, w) that goes with the template, {(*kinds, *size)}, got {tuple(x.shape)}"
        )
    return x


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to)))


def _index(name: str, index: Tensor | None, of: str, kinds: torch.Size, lead: torch.Size, device: torch.device) -> Tensor:
    """Which of the maps or templates each row of poses has: (rows)."""
    if index is None:
        if not _broadcasts(kinds, lead):
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


def _taps(position: Tensor, size: int, replicate: int) -> list[tuple[Tensor, Tensor]]:
    """Pixels and weights of the two taps on an axis."""
    below = position.detach().floor().clamp(-2, size)
    share = position - below
    if replicate:  # weights without slope at and beyond the first and last pixel
        share = torch.where((position <= 0) | (position >= size - 1), 0.0, share)
        below = torch.where(position >= size - 1, size - 1.0, below)
    pixels = [below.long(), below.long() + 1]
    weights = [1 - share, share]
    if not replicate:
        weights = [torch.where((p >= 0) & (p < size), w, 0.0) for p, w in zip(pixels, weights)]
    return [(p.clamp(0, size - 1), w) for p, w in zip(pixels, weights)]


def pose_correlation_reference(
    map: Tensor,
    templates: Tensor,
    valid: Tensor | None,
    poses: Tensor,
    map_index: Tensor,
    template_index: Tensor,
    x0: float,
    y0: float,
    shift: float,
    padding: int,
) -> Tensor:
    """The same in plain PyTorch, with all samples in memory; the map is (M, H, W, C), the rows are one dimension."""
    _, height, width, _ = map.shape
    good = poses.isfinite().all(-1)
    u, v, theta = torch.where(good.unsqueeze(-1), poses, 0.0)[..., None, None].unbind(-3)
    u, v = (u - shift).clamp(-(2.0**22), width + 2.0**22), (v - shift).clamp(-(2.0**22), height + 2.0**22)
    x = torch.arange(templates.size(-1), dtype=poses.dtype, device=poses.device) - x0
    y = (torch.arange(templates.size(-2), dtype=poses.dtype, device=poses.device) - y0).unsqueeze(-1)
    cosine, sine = theta.cos(), theta.sin()
    columns = _taps(u + x * cosine - y * sine, width, padding)
    rows = _taps(v + x * sine + y * cosine, height, padding)
    if valid is not None:
        templates = torch.where(valid.unsqueeze(1), templates, 0.0)
    pixels = map.reshape(-1, map.size(-1))
    first = (map_index * height * width).view(-1, 1, 1, 1)
    samples = sum((a * b).unsqueeze(-1) * pixels[first + i * width + j] for i, a in rows for j, b in columns)
    scores = torch.einsum("rnijc,rcij->rn", samples, templates[template_index])
    return torch.where(good, scores, math.nan)


def _save(ctx, args, out):
    ctx.save_for_backward(*args[:6])
    ctx.options = args[6:]


def _gradients(ctx, grad):
    need = ctx.needs_input_grad
    wanted = need[0] + 2 * (need[1] or need[3])
    of_map, of_templates, of_poses = _backward(grad, *ctx.saved_tensors, *ctx.options, wanted)
    grads = of_map if need[0] else None, of_templates if need[1] else None, None, of_poses if need[3] else None
    return *grads, None, None, None, None, None, None


_backward = operator("pose_correlation_backward")
_correlate = operator("pose_correlation", _save, _gradients)


def _stack(n: int, in_dims: tuple, args: tuple, alone: tuple[bool, bool]) -> tuple:
    """The arguments from map to template_index of n mapped calls as those of one. What is mapped stands in a row behind each
    other; maps and templates that are shared stay shared, unless `alone` asks for copies (their gradients are the calls' own).
    """

    def flat(i: int, mapped: bool = True) -> Tensor | None:
        if args[i] is None or not mapped:
            return args[i]
        moved = args[i].expand(n, *args[i].shape) if in_dims[i] is None else args[i].movedim(in_dims[i], 0)
        return moved.flatten(0, 1)

    def counted(i: int, of: Tensor, mapped: bool) -> Tensor:
        calls = torch.arange(n, device=of.device).repeat_interleave(rows)
        return flat(i) + (calls * (of.size(0) // n) if mapped else 0)

    poses = flat(3)
    rows = poses.size(0) // n
    map_mapped = alone[0] or in_dims[0] is not None
    template_mapped = alone[1] or in_dims[1] is not None or in_dims[2] is not None
    map, templates, valid = flat(0, map_mapped), flat(1, template_mapped), flat(2, template_mapped)
    return map, templates, valid, poses, counted(4, map, map_mapped), counted(5, templates, template_mapped)


@torch.library.register_vmap("mdps::pose_correlation")
def _(info, in_dims, *args):
    out = torch.ops.mdps.pose_correlation(*_stack(info.batch_size, in_dims, args, (False, False)), *args[6:])
    return out.unflatten(0, (info.batch_size, out.size(0) // info.batch_size)), 0


@torch.library.register_vmap("mdps::pose_correlation_backward")
def _(info, in_dims, grad, *args):
    n, wanted = info.batch_size, args[-1]
    grad = grad.expand(n, *grad.shape) if in_dims[0] is None else grad.movedim(in_dims[0], 0)
    stacked = _stack(n, in_dims[1:], args, (bool(wanted & 1), bool(wanted & 2)))
    out = torch.ops.mdps.pose_correlation_backward(grad.flatten(0, 1), *stacked, *args[6:])
    given = (wanted & 1, wanted & 2, wanted & 2)
    results = tuple(o.unflatten(0, (n, o.size(0) // n)) if g else o for o, g in zip(out, given))
    return results, tuple(0 if g else None for g in given)


@torch.library.register_fake("mdps::pose_correlation")
def _(map, templates, valid, poses, map_index, template_index, x0, y0, shift, padding):
    return poses.new_empty(poses.shape[:2])


@torch.library.register_fake("mdps::pose_correlation_backward")
def _(grad, map, templates, valid, poses, map_index, template_index, x0, y0, shift, padding, wanted):
    return (
        poses.new_empty(map.shape if wanted & 1 else (0, 0, 0, 0)),
        poses.new_empty(templates.shape if wanted & 2 else (0, 0, 0, 0)),
        poses.new_empty(poses.shape if wanted & 2 else (0, 0, 0)),
    )
