"""Resampling: ancestors of equally weighted particles."""

import torch
from torch import Tensor

from . import _arguments as check
from . import _philox
from ._operator import map_batch, reference_active

INT64, REALS = torch.int64, (torch.float32, torch.float64)  # names of torch cost 20 ns each time
SCHEMES = {"multinomial": 0, "stratified": 1, "systematic": 2, "residual": 3}


def resample(
    log_weights: Tensor, seed: Tensor, n_samples: int | None = None, *, scheme: str = "stratified", stream: int = 0
) -> Tensor:
    """Draw ancestors: indices of particles, each expected n_samples * w times.

    Args:
        log_weights: (..., N), float32 or float64 (half types are computed in float32), normalised or not; -inf is a dead
            particle, which is never drawn. 1 <= N < 2^31.
        seed: int64, () shared by the batch or (...) one for each row, on the device of log_weights (make_seed).
        n_samples: M, 0 <= M < 2^31 - 1; None is N.
        scheme: "multinomial" (independent draws), "stratified" (one draw from each M-th of the weight), "systematic" (the
            same with one offset for all), "residual" (floor(M w) copies, the rest multinomial).
        stream: 0 to 2^32 - 1; other streams of a seed are independent, so that one seed serves all steps of a filter.

    Returns:
        (..., M) int64, without gradient; non-decreasing in each row unless the scheme is multinomial. A row that has
        collapsed (all -inf) or holds NaN or +inf is resampled uniformly: ancestor i is floor(i N / M), or an independent
        uniform draw if the scheme is multinomial. Never out of range. The same bits on every run and number of threads.

    Raises:
        TypeError: not real weights, not an int64 seed, a number that is not an int.
        ValueError: shapes, n_samples, scheme, stream.

    Cost: O(N + M) a row; for M = N in float32 about 4 ns a draw stratified, 3 systematic, 10 multinomial and residual, on one
    core with AVX-512.
    Source: the paper, section 2.2; Douc, Cappe & Moulines 2005. Without a search: kernels/resample.c.
    """
    if (
        scheme in SCHEMES
        and isinstance(log_weights, Tensor)
        and isinstance(seed, Tensor)
        and len(shape := log_weights.shape) == 2
        and log_weights.dtype in REALS
        and seed.dtype is INT64
        and (seed.dim() == 0 or seed.shape == shape[:1])
        and ((log_weights.is_cpu and seed.is_cpu) or seed.device == log_weights.device)
        and (n := shape[1]) > 0
        and type(m := n if n_samples is None else n_samples) is int
        and 0 <= m < 2**31 - 1
        and type(stream) is int
        and 0 <= stream < 2**32
        and not log_weights.requires_grad
        and not reference_active()
    ):
        return _resample(log_weights, seed, m, SCHEMES[scheme], stream)
    return _checked(log_weights, seed, n_samples, scheme, stream)


def _checked(log_weights, seed, n_samples, scheme, stream):
    """Says what is wrong with the arguments, if anything, and brings them into the operator's shapes.

    resample() asks the same of rows (B, N) in one condition, which saves 0.8 us a call.
    """
    (log_weights,) = check.reals(("log_weights",), log_weights)
    number = check.choice("scheme", scheme, SCHEMES)
    shape = log_weights.shape
    if not shape or shape[-1] == 0:
        raise ValueError(f"log_weights: expected shape (..., N) with N >= 1, got {tuple(shape)}")
    lead = shape[:-1]
    _philox.check_seed(seed, lead)
    _philox.check_stream(stream)
    if seed.device != log_weights.device:
        raise ValueError(f"seed: expected the device of log_weights, {log_weights.device}, got {seed.device}")
    n_samples = shape[-1] if n_samples is None else n_samples
    _philox.check_count("n_samples", n_samples)
    if log_weights.requires_grad:
        log_weights = log_weights.detach()
    f = resample_reference if reference_active() else _resample
    if len(lead) == 1:
        return f(log_weights, seed, n_samples, number, stream)
    rows = log_weights.reshape(lead.numel(), shape[-1])
    return f(rows, seed.reshape(-1) if lead and seed.dim() else seed, n_samples, number, stream).view(*lead, n_samples)


def resample_reference(log_weights: Tensor, seed: Tensor, n_samples: int, scheme: int, stream: int) -> Tensor:
    """The same in plain PyTorch: binary search in the cumulative weights, (B, N) -> (B, M)."""
    rows, n = log_weights.shape
    top = log_weights.amax(-1, keepdim=True)
    good = (log_weights < torch.inf).all(-1, keepdim=True) & (top > -torch.inf)
    weights = torch.where(good, (log_weights - top).double().exp(), 1.0)
    weights = weights / weights.sum(-1, keepdim=True)
    if scheme == SCHEMES["multinomial"]:
        return _search(weights, _points(seed, rows, n_samples, stream))
    if scheme == SCHEMES["residual"]:
        ancestors = _residual(weights, seed, n_samples, stream)
    else:
        words = _philox.word_rows(seed, rows, stream, _philox.KIND_RESAMPLE, max(n_samples, 1))
        words = words if scheme == SCHEMES["stratified"] else words[:, :1]
        strata = torch.arange(n_samples, device=seed.device)
        ancestors = _search(weights, (strata + words.double() * 2.0**-32)[:, :n_samples] / max(n_samples, 1))
    uniform = torch.arange(n_samples, device=seed.device) * n // max(n_samples, 1)
    return torch.where(good, ancestors, uniform)


def _points(seed, rows, n_samples, stream):
    """Uniform points of the multinomial draws, 53 bits."""
    words = _philox.word_rows(seed, rows, stream, _philox.KIND_RESAMPLE, 2 * n_samples)
    return _philox.unit(words[:, ::2], words[:, 1::2], torch.float64)


def _search(weights, points):
    """The first component whose cumulative weight exceeds the point; the last one that has weight, if rounding leaves none."""
    cumulative = weights.cumsum(-1)
    cumulative = cumulative / cumulative[:, -1:]
    last = (weights > 0).long().cumsum(-1).argmax(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative, points, right=True), last)


def _residual(weights, seed, n_samples, stream):
    copies = (weights * n_samples).floor()
    left = weights * n_samples - copies
    missing = n_samples - copies.sum(-1, keepdim=True)
    left = torch.where(missing > 0, left, 1.0)  # nothing is drawn from a row that misses nothing
    drawn = _search(left / left.sum(-1, keepdim=True), _points(seed, weights.size(0), n_samples, stream))
    is_drawn = torch.arange(n_samples, device=seed.device) < missing
    counts = copies.long().scatter_add(-1, drawn, is_drawn.long())
    ends, draws = counts.cumsum(-1), torch.arange(n_samples, device=seed.device).expand(weights.size(0), -1)
    return torch.searchsorted(ends, draws.contiguous(), right=True)


_resample = torch.ops.mdps.resample.default
map_batch("resample", seed=1)


@torch.library.register_fake("mdps::resample")
def _(log_weights, seed, n_samples, scheme, stream):
    return seed.new_empty((log_weights.size(0), n_samples))
