"""Transition models: dynamics whose density p(x_t | x_{t-1}, a_t) can be evaluated, as classical smoothers need it.

Idea: a network says where a particle goes, a kernel of fixed bandwidths around that is the transition's density, Gaussian in
linear dimensions and von Mises in angles: the kernel of `mdps.Mixture`, so sums over particles are `mdps.ops.mixture_log_prob`.
`KernelDynamics` draws from exactly that kernel, and so serves filters (protocol `mdps.Dynamics`) too.

Source: "Learning to be Smooth", section 3, and the FFBS dynamics of its appendix, "Bearings Only Tracking Task". Deviation: the
paper has a normal distribution for the angle, here it is von Mises, which knows no seam.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from .sequences import for_sequence, returned
from .state_space import StateSpace

_NODES, _WEIGHTS = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(64))
_LARGEST_NOISE = 9.0
_INTERVALS = 64 * 9
"""Of the table from normal numbers to von Mises angles; its cubics are off by less than 1e-8 radians."""


class TransitionModel(Protocol):
    """A transition density: a kernel around where a particle is expected to go; an nn.Module, or any object like it."""

    bandwidths: Tensor
    """(D), positive: standard deviations in the units of the state; for an angle b radians means a von Mises kernel of
    concentration b**-2. Of the dtype and on the device of the states."""

    def mean(self, particles: Tensor, action: Tensor | None = None) -> Tensor:
        """particles (B, N, D) at time t-1, action (B, ...) that leads to t, or None -> centres of the kernels at t (B, N, D),
        angles in any range."""


class KernelDynamics(nn.Module):
    """Moves particles to a network's prediction plus kernel noise: x_t = network(x_{t-1}, a_t) + noise (protocols `Dynamics`
    and `TransitionModel`).

    The density of x_t is prod_g Normal(x_g; mu_g, b_g^2) prod_a VonMises(x_a; mu_a, b_a^-2), mu = network(x_{t-1}, a_t). An
    angle's noise is F^-1(Phi(z)), z the normal number that it is made from, Phi the normal and F the von Mises distribution
    function; F^-1(Phi(.)) is tabulated once. Gradients reach the network through the particles.

    Args:
        network: called as network(particles (B, N, D), action or None) -> (B, N, D), angles in any range. It may have
            `for_sequence`, as `mdps.Dynamics`.
        bandwidths: D numbers or one, positive, fixed: standard deviations in the units of the state (angles: radians).
        space: the state's dimensions.

    Raises:
        ValueError: bandwidths that are not D positive finite numbers.

    Cost of a move: the network, and O(B N D).
    """

    bandwidths: Tensor
    cubics: Tensor

    def __init__(self, network: nn.Module, bandwidths: float | Sequence[float], space: StateSpace) -> None:
        super().__init__()
        widths = torch.as_tensor(bandwidths, dtype=torch.float64)
        if widths.shape not in ((), (space.size,)) or not ((widths > 0) & (widths < math.inf)).all():
            raise ValueError(f"bandwidths: expected one positive number or {space.size}, for {space.names}, got {bandwidths}")
        widths = widths.expand(space.size)
        self.network, self.noise_size, self.n_linear = network, space.size, len(space.linear)
        tables = [_cubics(*von_mises_table(b**-2)) for b in widths[self.n_linear :].tolist()]
        dtype = torch.get_default_dtype()
        self.register_buffer("bandwidths", widths.to(dtype).contiguous(), persistent=False)
        self.register_buffer("cubics", torch.stack(tables).to(dtype) if tables else torch.empty(0), persistent=False)

    def mean(self, particles: Tensor, action: Tensor | None = None) -> Tensor:
        """particles (B, N, D), action (B, ...) or None -> centres of the transition's kernels (B, N, D)."""
        return self.network(particles, action)

    def forward(self, particles: Tensor, noise: Tensor, action: Tensor | None = None) -> Tensor:
        """particles (B, N, D), noise (B, N, D) from N(0, 1) -> particles drawn from the transition's density (B, N, D)."""
        return self.network(particles, action) + self.spread(noise)

    def for_sequence(self) -> Callable[..., Tensor]:
        """Return `forward` with what the network prepares for a sequence."""
        network = for_sequence([self.network])

        def move(particles: Tensor, noise: Tensor, action: Tensor | None = None) -> Tensor:
            return network(particles, action) + self.spread(noise)

        return move

    def spread(self, noise: Tensor) -> Tensor:
        """Turn numbers from N(0, 1) into draws of the kernel around 0: (..., D) -> (..., D), the angles in [-pi, pi]."""
        g = self.n_linear
        draws = [self.bandwidths[:g] * noise[..., :g]]
        for i, z in enumerate(noise[..., g:].unbind(-1)):
            draws.append(_interpolate(z, self.cubics[i]).unsqueeze(-1))
        return torch.cat(draws, -1)


def transition_loss(transition: TransitionModel, states: Tensor, space: StateSpace, actions: Tensor | None = None) -> Tensor:
    """Return the squared errors of a transition's mean on true pairs of states; train it by the average of those that count.

    error_t = sum_g (mu_g - x_g)^2 + sum_a [(sin mu_a - sin x_a)^2 + (cos mu_a - cos x_a)^2], mu = mean(x_{t-1}, a_t): for an
    angle 2 - 2 cos(mu_a - x_a), which is the squared difference where that is small, and knows no seam.

    Args:
        states: (B, T, D), T >= 2: true states, one for each time step.
        actions: (B, T, ...): actions[:, t] led from time t-1 to t, as for `mdps.ParticleFilter.forward`.

    Returns:
        (B, T-1), >= 0: of time 1 to T-1.

    Raises:
        ValueError: shapes.
    """
    if states.dim() != 3 or states.size(1) < 2 or states.size(2) != space.size:
        raise ValueError(f"states: expected shape (B, T, D) with T >= 2 and D = {space.size}, got {tuple(states.shape)}")
    if actions is not None and actions.shape[:2] != states.shape[:2]:
        expected = f"(B, T, ...) with (B, T) = {tuple(states.shape[:2])}"
        raise ValueError(f"actions: expected shape {expected}, got {tuple(actions.shape)}")
    g = len(space.linear)
    error = transition_means(transition, states[:, :-1].unsqueeze(2), actions).squeeze(2) - states[:, 1:]
    return (error[..., :g] ** 2).sum(-1) + (4 * (0.5 * error[..., g:]).sin() ** 2).sum(-1)


def transition_means(transition: TransitionModel, states: Tensor, actions: Tensor | None) -> Tensor:
    """Where particles of times 0 to T-2 go, by one call: states (B, T-1, N, D), actions (B, T, ...) -> (B, T-1, N, D)."""
    rows = states.flatten(0, 1)
    means = transition.mean(rows, actions[:, 1:].flatten(0, 1) if actions is not None else None)
    return returned("transition.mean", means, rows.shape, rows.dtype).view(states.shape)


# ---- Von Mises draws from normal numbers --------------------------------------------------------------------------------


def von_mises_table(concentration: float) -> tuple[Tensor, Tensor]:
    """Return the angles F^-1(Phi(z)) in [0, pi] of a von Mises distribution and their derivatives, for z from 0 to 9, float64.

    The upper tail S(angle) = 1 - F(angle) is integrated, so that it keeps its digits however small it is, and S(angle) =
    Phi(-z) is solved by bisection. The derivative is phi(z) / p(angle).
    """
    z = torch.linspace(0, _LARGEST_NOISE, _INTERVALS + 1, dtype=torch.float64)
    target = torch.special.log_ndtr(-z)
    low, high = torch.zeros_like(z), torch.full_like(z, math.pi)
    for _ in range(60):
        middle = 0.5 * (low + high)
        below = _log_upper_tail(middle, concentration) > target
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    low[0] = 0
    return low, (-0.5 * (z**2 + math.log(2 * math.pi)) - _log_density(low, concentration)).exp()


def _log_density(angle: Tensor, concentration: float) -> Tensor:
    log_norm = math.log(2 * math.pi) + torch.special.i0e(torch.tensor(concentration, dtype=torch.float64)).log()
    return -2 * concentration * (0.5 * angle).sin() ** 2 - log_norm


def _log_upper_tail(angle: Tensor, concentration: float) -> Tensor:
    """log of the integral of the density from the angle to pi; it stops where the density has fallen by exp(-40)."""
    end = 2 * torch.asin(((0.5 * angle).sin() ** 2 + 20 / concentration).sqrt().clamp(max=1))
    half = 0.5 * (end - angle)
    t = angle + half * (1 + _NODES.unsqueeze(1))
    relative = (_log_density(t, concentration) - _log_density(angle, concentration)).exp()
    return _log_density(angle, concentration) + (half * (_WEIGHTS @ relative)).log()


def _cubics(values: Tensor, slopes: Tensor) -> Tensor:
    """Coefficients (intervals, 4), from the constant on, of the cubics that have these values and slopes at their ends."""
    rise, slope = values.diff(), slopes * (_LARGEST_NOISE / _INTERVALS)
    before, after = slope[:-1], slope[1:]
    return torch.stack([values[:-1], before, 3 * rise - 2 * before - after, before + after - 2 * rise], -1)


def _interpolate(z: Tensor, cubics: Tensor) -> Tensor:
    """The odd function that these cubics are from 0 to 9."""
    place = (z.abs() * (_INTERVALS / _LARGEST_NOISE)).clamp(max=_INTERVALS - 0.001)
    interval = place.long()
    t = place - interval
    a, b, c, d = cubics[interval].unbind(-1)
    return torch.copysign(a + t * (b + t * (c + t * d)), z)
