"""Search in windows of a large map: how dense search and retrieval follow a sequence.

Idea: a whole city is too large, and too full of places that look alike, for a search of every frame. A sliding window lies
around where the last frame was found, moved by the action; a window around the truth shows what a search could do that knew
its neighbourhood (the paper calls this cheating); around a guess of known error is where published work searches. A window
that would reach over the map's border is moved back into the map, so that all have one size.

Source: the paper, "Applying baselines to city-scale environments". Cost: that of a search of one window a frame.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dense_search import DenseSearch
from .geometry import SPACE, BirdsEyeView, MapFeatures
from .retrieval import Retrieval
from .volumes import Region, Searcher, SearchResult

WINDOW = 256.0
"""Metres, of a side of the paper's windows."""


def crop(map: MapFeatures, centres: Tensor, size: float, rows: Tensor | None = None) -> MapFeatures:
    """Cut square windows out of maps, in the frames of these.

    Args:
        map: of B places.
        centres: (N, 2) or (N, 3), x and y first, metres: finite. A window's middle is the nearest that the pixels allow
            and that keeps the window inside of the map.
        size: metres, rounded to pixels; where the map is smaller, the window is as small.
        rows: int64 (N): the map that each window is of; None: there is one of each.

    Raises:
        ValueError: shape or values of centres or rows, or a size that is not positive.

    Cost: a copy of the windows; for gradients, one map of B places more. A GPU is waited for.
    """
    B, _, height, width = map.features.shape
    N = B if rows is None else len(rows)
    if centres.dim() != 2 or centres.size(0) != N or centres.size(1) not in (2, 3):
        raise ValueError(f"centres: expected shape ({N}, 2) or ({N}, 3), got {tuple(centres.shape)}")
    if not 0 < size < float("inf"):
        raise ValueError(f"size: expected a positive number of metres, got {size}")
    if not centres[:, :2].isfinite().all():
        raise ValueError(f"centres: expected finite positions, got {centres[:, :2].tolist()}")
    of = list(range(B)) if rows is None else rows.tolist()
    if not all(0 <= row < B for row in of):
        raise ValueError(f"rows: expected numbers of {B} maps, got {of}")
    first = map.first if rows is None else map.first[rows]
    pixels = max(1, round(size * map.pixels_per_metre))
    shape = min(pixels, height), min(pixels, width)
    middle = (centres[:, :2] - first).double() * map.pixels_per_metre
    u = (middle[:, 0] - 0.5 * (shape[1] - 1)).round().clamp(0, width - shape[1])
    v = (-middle[:, 1] - 0.5 * (shape[0] - 1)).round().clamp(0, height - shape[0])
    corners = list(zip(of, v.long().tolist(), u.long().tolist()))
    moved = first + (torch.stack([u, -v], -1) / map.pixels_per_metre).to(first)
    return MapFeatures(_Cut.apply(map.features, corners, shape), moved, map.pixels_per_metre)


class _Cut(torch.autograd.Function):
    """Windows (N, C, h, w) of maps (B, C, H, W) at corners (map, row, column). autograd's own slices would each make a map."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, corners: Sequence[tuple[int, int, int]], shape: tuple[int, int]) -> Tensor:
        ctx.whole, ctx.corners, (height, width) = features.shape, corners, shape
        return torch.stack([features[b, :, v : v + height, u : u + width] for b, v, u in corners])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, windows: Tensor) -> tuple[Tensor, None, None]:
        features = windows.new_zeros(ctx.whole)
        for (b, v, u), window in zip(ctx.corners, windows):
            features[b, :, v : v + window.size(1), u : u + window.size(2)] += window
        return features, None, None


def search_sliding_window(
    searcher: Searcher,
    map: MapFeatures,
    views: Iterable[Tensor | BirdsEyeView],
    start: Tensor,
    actions: Tensor,
    observed: Tensor | None = None,
    *,
    size: float = WINDOW,
    k: int = 3,
) -> SearchResult:
    """Search each frame in a window around the best pose of the last one, moved by the action.

    Args:
        searcher: `DenseSearch`, `Retrieval`, or anything with their `search(map, view, k)`.
        map: of B places, features as the searcher takes them.
        views: T views (B, ...), as the searcher takes them; an iterator may make each as it is wanted.
        start: (B, 3): around what the first window lies; the paper takes the true pose.
        actions: (B, T, 3): actions[:, t] led from time t-1 to t, in the map's frame: metres and radians.
        observed: bool (B, T): where False the one pose is the window's middle, with log-probability -inf until a frame of
            the sequence was observed; a frame that no sequence observes is not searched. None: all are observed.
        size: side of the windows in metres.
        k: poses a frame.

    Returns:
        poses (B, T, k, 3), log_probs (B, T, k) and log_normalizer (B, T), within each window.

    Raises:
        ValueError: shapes, or another number of views than T; and what the searcher raises.
    """
    _check_sequence("actions", actions, map, observed)
    if start.shape != (map.features.size(0), 3):
        raise ValueError(f"start: expected shape {(map.features.size(0), 3)}, got {tuple(start.shape)}")

    def centre(t: int, last: SearchResult | None) -> Tensor:
        return start if last is None else SPACE.wrap(last.poses[:, 0] + actions[:, t])

    return _search_windows(_windowed(searcher, map, size, k), views, centre, actions.size(1), observed, k, moves=True)


def search_true_window(
    searcher: Searcher,
    map: MapFeatures,
    views: Iterable[Tensor | BirdsEyeView],
    truth: Tensor,
    observed: Tensor | None = None,
    *,
    size: float = WINDOW,
    k: int = 3,
) -> SearchResult:
    """Search each frame in a window around its true pose (B, T, 3), which makes the task easier than it is.

    Other arguments, results and errors are those of `search_sliding_window`, but that a frame which was not observed has no
    estimate: log-probabilities of -inf.
    """
    _check_sequence("truth", truth, map, observed)
    find = _windowed(searcher, map, size, k)
    return _search_windows(find, views, lambda t, _: truth[:, t], truth.size(1), observed, k, moves=False)


def search_near(
    searcher: DenseSearch | Retrieval,
    map: MapFeatures,
    views: Iterable[Tensor | BirdsEyeView],
    guesses: Tensor,
    observed: Tensor | None = None,
    *,
    metres: float,
    turn: float,
    margin: float = 0.0,
    k: int = 3,
) -> SearchResult:
    """Search each frame near a guess of its pose (B, T, 3): no farther than `metres`, and than `turn` radians, from it.

    margin: metres of map around that, for views to lie on: of dense search as far as they reach.

    Other arguments, results and errors are those of `search_true_window`, and `metres` and `turn` those of `Region`; the
    searcher's `search` takes a region. Where no pixel of the map is near, log-probabilities are -inf.
    """
    _check_sequence("guesses", guesses, map, observed)
    size = 2 * (metres + margin) + 2 / map.pixels_per_metre

    def find(view: Any, middle: Tensor) -> SearchResult:
        return searcher.search(crop(map, middle, size), view, k, Region(middle, metres, turn))

    return _search_windows(find, views, lambda t, _: guesses[:, t], guesses.size(1), observed, k, moves=False)


def _windowed(searcher: Searcher, map: MapFeatures, size: float, k: int) -> Callable[[Any, Tensor], SearchResult]:
    """A search of views in windows around middles."""
    return lambda view, middle: searcher.search(crop(map, middle, size), view, k)


def _check_sequence(name: str, poses: Tensor, map: MapFeatures, observed: Tensor | None) -> None:
    B = map.features.size(0)
    if poses.dim() != 3 or poses.size(0) != B or poses.size(1) < 1 or poses.size(2) != 3:
        raise ValueError(f"{name}: expected shape ({B}, T, 3) with T >= 1, got {tuple(poses.shape)}")
    if observed is not None and (observed.shape != poses.shape[:2] or observed.dtype != torch.bool):
        raise ValueError(f"observed: expected bool {tuple(poses.shape[:2])}, got {observed.dtype} {tuple(observed.shape)}")


@torch.no_grad()
def _search_windows(
    find: Callable[[Any, Tensor], SearchResult],
    views: Iterable[Tensor | BirdsEyeView],
    centre: Callable[[int, SearchResult | None], Tensor],
    T: int,
    observed: Tensor | None,
    k: int,
    *,
    moves: bool,
) -> SearchResult:
    """`find`: searches a view in the window around a middle. `moves`: whether windows follow the estimates, so that their
    middles are estimates once something was seen."""
    results: list[SearchResult] = []
    for t, view in enumerate(views):
        if t == T:
            raise ValueError(f"views: expected {T}, got more")
        middle = centre(t, results[-1] if results else None)
        if observed is None:
            results.append(find(view, middle))
            continue
        result = _middles(middle, observed[:, :t].any(1) if moves else torch.zeros_like(observed[:, t]), k)
        if observed[:, t].any():
            result = _only_where(observed[:, t], find(view, middle), result)
        results.append(result)
    if len(results) < T:
        raise ValueError(f"views: expected {T}, got {len(results)}")
    return SearchResult(*(torch.stack(x, 1) for x in zip(*results)))


def _middles(middle: Tensor, known: Tensor, k: int) -> SearchResult:
    """What is said where nothing is seen: the windows' middles (B, 3), which are estimates where they are `known` (B)."""
    log_probs = middle.new_full((len(middle), k), -torch.inf)
    log_probs[:, 0].masked_fill_(known, 0)
    return SearchResult(middle.unsqueeze(1).expand(-1, k, 3), log_probs, middle.new_zeros(len(middle)))


def _only_where(observed: Tensor, found: SearchResult, other: SearchResult) -> SearchResult:
    """The search's result where a frame was observed, elsewhere the other."""
    return SearchResult(
        torch.where(observed.view(-1, 1, 1), found.poses, other.poses),
        torch.where(observed.unsqueeze(-1), found.log_probs, other.log_probs),
        torch.where(observed, found.log_normalizer, other.log_normalizer),
    )
