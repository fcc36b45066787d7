"""How well a template, seen from above, fits a map at poses: the score of map-based localization, pose by pose."""

import math

import torch
from torch import Tensor

from . import _arguments as check
from . import _cells as cells
from ._operator import operator, reference_active, without_autocast

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
    lead = cells.shapes(map, template, poses)
    x0, y0 = cells.origin(origin)
    kinds, size = template.shape[:-3], template.shape[-2:]
    if valid is not None:
        valid = cells.values("valid", valid, kinds, size, torch.bool, template.device)
    if factor:
        weight = cells.values("confidence", factor[0], kinds, size, template.dtype, template.device)
        template = template * (weight if valid is None else torch.where(valid, weight, 0.0)).unsqueeze(-3)
    maps = cells.rows_index("map_index", map_index, "map", map.shape[:-3], lead, poses.device)
    templates = cells.rows_index("template_index", template_index, "template", kinds, lead, poses.device)
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
        cells.check_index("map_index", maps, args[0].size(0))
        cells.check_index("template_index", templates, args[1].size(0))
        scores = pose_correlation_reference(*args)
    else:
        try:
            scores = _correlate(*args)
        except RuntimeError as error:
            raise check.named(error) from None
    scores = scores.view(poses.shape[:-1])
    if how == 0:
        return scores
    by_area = size.numel() if how == 2 else 1
    if valid is None:
        return scores / (size.numel() * by_area)
    count = valid.expand(*kinds, *size).sum((-2, -1)).clamp_min(1).flatten()
    return scores / (count.index_select(0, templates.clamp(0, kinds.numel() - 1)) * by_area).view(*lead, 1)


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
    scores = without_autocast(torch.einsum, "rnijc,rcij->rn", samples, templates[template_index])
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


@torch.library.register_vmap("mdps::pose_correlation")
def _(info, in_dims, *args):
    out = torch.ops.mdps.pose_correlation(*cells.stack(info.batch_size, in_dims, args, (False, False)), *args[6:])
    return out.unflatten(0, (info.batch_size, out.size(0) // info.batch_size)), 0


@torch.library.register_vmap("mdps::pose_correlation_backward")
def _(info, in_dims, grad, *args):
    n, wanted = info.batch_size, args[-1]
    grad = grad.expand(n, *grad.shape) if in_dims[0] is None else grad.movedim(in_dims[0], 0)
    stacked = cells.stack(n, in_dims[1:], args, (bool(wanted & 1), bool(wanted & 2)))
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
