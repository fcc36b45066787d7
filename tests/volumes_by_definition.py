"""Maps and views to search, and what searches must find, by its definition."""

import math

import torch

from mdps.localization import BirdsEyeView, Grid, MapFeatures

F64 = torch.float64
SMALL = Grid(0.5, 4, 5)


def places(B=2, C=3, height=13, width=9, grid=SMALL, dtype=F64, seed=0, seen=0.7):
    """Maps and views of noise, what is not seen NaN."""
    g = torch.Generator().manual_seed(seed)
    features = torch.randn(B, C, height, width, generator=g, dtype=dtype)
    view = torch.randn(B, C, grid.depth, grid.width, generator=g, dtype=dtype)
    confidence = torch.rand(B, grid.depth, grid.width, generator=g, dtype=dtype)
    valid = torch.rand(B, grid.depth, grid.width, generator=g) < seen
    nothing = torch.where(valid, 0.0, math.nan).to(dtype)
    first = torch.tensor([[3.25, -7.5], [-100.0, 40.0]], dtype=dtype)[:B]
    map = MapFeatures(features, first, 1 / grid.cell)
    return grid, map, BirdsEyeView(view + nothing.unsqueeze(1), confidence + nothing, valid)


def hat(x):
    return max(0.0, 1 - abs(x))


def pose_at(map, b, k, K, v, u):
    x, y = map.first[b].tolist()
    return [x + u / map.pixels_per_metre, y - v / map.pixels_per_metre, 2 * math.pi * k / K]


def suppressed(volume, map, k, radii):
    """Non-maximum suppression in whole volumes (B, K, H, W), on copies."""
    B, K, height, width = volume.shape
    headings, v, u = torch.meshgrid(torch.arange(K), torch.arange(height), torch.arange(width), indexing="ij")
    poses, logits = [], []
    for b in range(B):
        rest, chosen = volume[b].clone(), []
        for _ in range(k):
            place = rest.flatten().argmax()
            best = [int(x.flatten()[place]) for x in (headings, v, u)]
            chosen.append((best, float(rest.flatten()[place])))
            turned = (headings - best[0]).abs()
            near = torch.minimum(turned, K - turned) * 360 / K < math.degrees(radii[2]) - 1e-9
            near &= (v - best[1]).abs() / map.pixels_per_metre < radii[1] - 1e-9
            near &= (u - best[2]).abs() / map.pixels_per_metre < radii[0] - 1e-9
            rest[near] = -math.inf
        poses.append([pose_at(map, b, c[0], K, c[1], c[2]) for c, _ in chosen])
        logits.append([logit for _, logit in chosen])
    return torch.tensor(poses, dtype=F64), torch.tensor(logits, dtype=F64)
