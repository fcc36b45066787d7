"""The exact product of two mixtures: what a smoother approximates when it combines two filters' predictions.

Idea: a product of two Gaussian kernels is a Gaussian, one of two von Mises kernels a von Mises, so the product of mixtures of
N_a and N_b kernels is a mixture of N_a N_b, each with its own place, weight and bandwidths.

Source: "Learning to be Smooth", equation (tfs_final_form), with a uniform artificial prior. For few components, and as the
standard that samplers of such products are held to.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .mixture import Mixture
from .ops.mixture_log_prob import kernel_log_prob
from .state_space import StateSpace


class MixtureProduct(NamedTuple):
    """A mixture of N kernels, each with bandwidths of its own."""

    means: Tensor
    """(..., N, D), angles in [-pi, pi)."""
    log_weights: Tensor
    """(..., N), normalised."""
    bandwidths: Tensor
    """(..., N, D): standard deviations; for an angle, b means a von Mises kernel of concentration b**-2, inf is uniform."""
    space: StateSpace
    log_normaliser: Tensor
    """(...): log of the integral of a(x) b(x), in nats: how much both agree."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of value (..., D) -> (...), with any sample shape in front. Cost: N kernels, and memory."""
        kernels = kernel_log_prob(value.unsqueeze(-2) - self.means, self.bandwidths, self.space.n_angular)
        return torch.logsumexp(self.log_weights + kernels, -1)

    @property
    def mean(self) -> Tensor:
        """(..., D); of an angle the circular mean, in [-pi, pi]."""
        linear, sine, cosine = self._moments()
        return torch.cat([linear, torch.atan2(sine, cosine)], -1)

    @property
    def variance(self) -> Tensor:
        """(..., D); of a linear dimension in squared units, of an angle the circular variance 1 - |E exp(i angle)|, 0 to 1."""
        centre, sine, cosine = self._moments()
        g = len(self.space.linear)
        squares = (self.means[..., :g] - centre.unsqueeze(-2)) ** 2 + self.bandwidths[..., :g] ** 2
        linear = (self.log_weights.exp().unsqueeze(-1) * squares).sum(-2)
        return torch.cat([linear, (1 - torch.hypot(sine, cosine)).clamp(min=0)], -1)

    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """E x of the linear dimensions; E sin and E cos of the angles."""
        g = len(self.space.linear)
        weights, angles, concentration = (
            self.log_weights.exp().unsqueeze(-1),
            self.means[..., g:],
            self.bandwidths[..., g:] ** -2,
        )
        share = weights * torch.special.i1e(concentration) / torch.special.i0e(concentration)
        return (weights * self.means[..., :g]).sum(-2), (share * angles.sin()).sum(-2), (share * angles.cos()).sum(-2)


def product(a: Mixture | MixtureProduct, b: Mixture | MixtureProduct) -> MixtureProduct:
    """Return the density proportional to a(x) b(x), exactly.

    Gaussian: precisions add; the weight gains Normal(mu_a - mu_b; 0, beta_a^2 + beta_b^2). Von Mises: the vectors kappa
    exp(i mu) add; the weight gains I0(kappa) / (2 pi I0(kappa_a) I0(kappa_b)), in log space.

    Args:
        a, b: over one space, of one batch shape (...), dtype and device. A product can be multiplied again.

    Returns:
        N_a N_b components, component i N_b + j made of a's i and b's j.

    Raises:
        ValueError: different spaces or batch shapes.

    Cost: O(N_a N_b D) time and memory. Gradients to both mixtures.
    """
    if a.space != b.space:
        raise ValueError(f"b: expected {a.space}, got {b.space}")
    if a.means.shape[:-2] != b.means.shape[:-2]:
        raise ValueError(f"b: expected batch shape {tuple(a.means.shape[:-2])}, got {tuple(b.means.shape[:-2])}")
    space, g = a.space, len(a.space.linear)
    mean_a, width_a = a.means.unsqueeze(-2), _widths(a).unsqueeze(-2)
    mean_b, width_b = b.means.unsqueeze(-3), _widths(b).unsqueeze(-3)
    apart = mean_b - mean_a
    linear, linear_width, log_linear = _gaussian(apart[..., :g], width_a[..., :g], width_b[..., :g])
    turn, angular_width, log_angular = _von_mises(apart[..., g:], width_a[..., g:] ** -2, width_b[..., g:] ** -2)
    means = space.wrap(mean_a + torch.cat([linear, turn], -1))
    log_weights = a.log_weights.unsqueeze(-1) + b.log_weights.unsqueeze(-2) + log_linear.sum(-1) + log_angular.sum(-1)
    log_weights, widths = log_weights.flatten(-2), torch.cat([linear_width, angular_width], -1)
    log_normaliser = torch.logsumexp(log_weights, -1)
    log_weights = log_weights - log_normaliser.unsqueeze(-1)
    return MixtureProduct(means.flatten(-3, -2), log_weights, widths.flatten(-3, -2), space, log_normaliser)


def _widths(mixture: Mixture | MixtureProduct) -> Tensor:
    """Of each component, (..., N, D)."""
    if isinstance(mixture, MixtureProduct):
        return mixture.bandwidths
    return mixture.bandwidths.unsqueeze(-2).expand_as(mixture.means)


def _gaussian(apart: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean of the product relative to a's, its standard deviation, and log of its integral; apart = mu_b - mu_a."""
    total = torch.hypot(a, b)
    log_integral = -0.5 * (apart / total) ** 2 - total.log() - 0.5 * math.log(2 * math.pi)
    return apart * (a / total) ** 2, a * b / total, log_integral


def _von_mises(apart: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for angles and concentrations a, b; the width is concentration^-1/2."""
    concentration = torch.hypot(a - b, 2 * (a * b).sqrt() * (0.5 * apart).cos())
    lost = 4 * a * b * (0.5 * apart).sin() ** 2 / (a + b + concentration)  # a + b - concentration, without cancellation
    log_i0e = [torch.special.i0e(k).log() for k in (concentration, a, b)]
    log_integral = log_i0e[0] - log_i0e[1] - log_i0e[2] - lost - math.log(2 * math.pi)
    return torch.atan2(b * apart.sin(), a + b * apart.cos()), concentration**-0.5, log_integral
