"""Draws from a mixture of kernels around weighted particles."""

import torch
from torch import Tensor

from . import _arguments as check
from . import _philox
from ._operator import map_batch, reference_active
from .philox_normal import philox_normal_reference
from .philox_von_mises import philox_von_mises_reference
from .resample import SCHEMES, resample_reference

_NAMES = ("means", "log_weights", "bandwidths")


def mixture_resample(
    means: Tensor,
    log_weights: Tensor,
    bandwidths: Tensor,
    seed: Tensor,
    n_samples: int | None = None,
    *,
    n_angular: int = 0,
    scheme: str = "stratified",
    stream: int = 0,
) -> tuple[Tensor, Tensor]:
    """Draw from mixtures: ancestors by resampling, then a Gaussian or von Mises draw around each ancestor's mean.

    Args:
        means: (..., N, D), float32 or float64 (half types are computed in float32): components, 1 <= D <= 16, of which the last
            n_angular are angles in radians.
        log_weights: (..., N), normalised or not; -inf is a dead component.
        bandwidths: (D) or (..., D): standard deviations in the units of the state; an angle has a von Mises kernel of
            concentration bandwidth**-2. 0 copies the mean, infinity makes an angle uniform.
        seed: int64, () shared by the batch or (...) one for each row.
        n_samples: M, 0 <= M < 2^31 - 1; None is N.
        n_angular: number of angular dimensions, 0 to D.
        scheme: of resampling: "multinomial", "stratified", "systematic" or "residual"; see `resample`.
        stream: 0 to 2^32 - 1; other streams of a seed are independent.

    Returns:
        samples (..., M, D), angles in [-pi, pi), and ancestors (..., M) int64, those of `resample` with the same seed and
        stream.
        The kernels' numbers are those of philox_normal and philox_von_mises on the same seed and stream: draw other noise on
        another stream, or by a seed of its own (split_seed), or it is the same noise again.
        Samples are fixed draws: no gradient passes through them (see iwsg_log_weights). A row with a NaN or negative
        bandwidth, or NaN or +inf among its log-weights, has NaN samples; a row that is -inf throughout has uniform ancestors.

    Raises:
        TypeError: not real tensors, not an int64 seed, a number that is not an int.
        ValueError: shapes, n_samples, n_angular, scheme, stream.

    Cost: that of `resample`, and 1.5 ns a linear and 12 ns an angular dimension of a sample (float32, one core with AVX-512).
    Source: the paper, section 2.4: resampling from the mixture m(x; phi).
    """
    means, log_weights, bandwidths = check.reals(_NAMES, means, log_weights, bandwidths)
    number = check.choice("scheme", scheme, SCHEMES)
    if means.dim() < 2 or means.size(-2) == 0:
        raise ValueError(f"means: expected shape (..., N, D) with N >= 1, got {tuple(means.shape)}")
    *lead, n, d = means.shape
    check.state_size(d, n_angular)
    check.shape("log_weights", log_weights, "(..., N)", *lead, n)
    check.shape("bandwidths", bandwidths, "(D) or (..., D)", *(() if bandwidths.dim() == 1 else lead), d)
    _philox.check_seed(seed, tuple(lead))
    _philox.check_stream(stream)
    if seed.device != means.device:
        raise ValueError(f"seed: expected the device of means, {means.device}, got {seed.device}")
    n_samples = n if n_samples is None else n_samples
    _philox.check_count("n_samples", n_samples)
    rows = means.shape[:-2].numel()
    f = mixture_resample_reference if reference_active() else torch.ops.mdps.mixture_resample.default
    samples, ancestors = f(
        means.detach().reshape(rows, n, d),
        log_weights.detach().reshape(rows, n),
        bandwidths.detach() if bandwidths.dim() == 1 else bandwidths.detach().reshape(rows, d),
        seed.reshape(-1) if lead and seed.dim() else seed,
        n_samples,
        n_angular,
        number,
        stream,
    )
    return samples.view(*lead, n_samples, d), ancestors.view(*lead, n_samples)


def mixture_resample_reference(
    means: Tensor,
    log_weights: Tensor,
    bandwidths: Tensor,
    seed: Tensor,
    n_samples: int,
    n_angular: int,
    scheme: int,
    stream: int,
) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch."""
    rows, _, d = means.shape
    linear = d - n_angular
    ancestors = resample_reference(log_weights, seed, n_samples, scheme, stream)
    means = means.gather(1, ancestors.unsqueeze(-1).expand(-1, -1, d))
    bandwidths = bandwidths.expand(rows, d).unsqueeze(1)
    noise = philox_normal_reference(seed, rows, n_samples * linear, stream, means.dtype).view(rows, n_samples, linear)
    concentration = bandwidths[..., linear:].expand(-1, n_samples, -1) ** -2
    angles = philox_von_mises_reference(concentration.flatten(1), seed, stream).view(concentration.shape)
    angles = means[..., linear:] + angles
    outside = (angles < -torch.pi) | (angles >= torch.pi)
    angles = torch.where(outside, torch.remainder(angles + torch.pi, 2 * torch.pi) - torch.pi, angles)
    samples = torch.cat([means[..., :linear] + bandwidths[..., :linear] * noise, angles], -1)
    good = (bandwidths >= 0).all(-1, keepdim=True) & (log_weights < torch.inf).all(-1)[:, None, None]
    return torch.where(good, samples, torch.nan), ancestors


map_batch("mixture_resample", shared={2: None}, seed=3)


@torch.library.register_fake("mdps::mixture_resample")
def _(means, log_weights, bandwidths, seed, n_samples, n_angular, scheme, stream):
    rows, _, d = means.shape
    return means.new_empty((rows, n_samples, d)), seed.new_empty((rows, n_samples))
