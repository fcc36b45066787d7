"""The particle filters that the Mixture Density Particle Filter is compared with: other ways to resample, other gradients.

All share the loop and the options of `mdps.filters.ParticleFilter`; their beliefs are kernel density mixtures too, so that one
loss fits all. They differ in what the resampled particles and weights tell their gradients:

| filter | draws | gradient through resampling |
|---|---|---|
| TruncatedGradientParticleFilter | particles by their weights | none |
| SoftResamplingParticleFilter | particles by weights mixed with uniform ones | of importance weights; biased |
| ConcreteParticleFilter | convex combinations, Gumbel-softmax | through them; the particles are blurred |
| OptimalTransportParticleFilter | the optimal transport to uniform weights | through it; regularised, biased |

Source: "Learning to be Smooth", section 2, where each is described, and what it names there.
"""

import math
from typing import Any

import torch
from torch import Tensor

from . import ops
from .filters import Dynamics, Likelihood, Models, ParticleFilter, Particles
from .state_space import StateSpace


class TruncatedGradientParticleFilter(ParticleFilter):
    """Particle filter whose gradients end at every resampling (TG-PF).

    Args:
        space, dynamics, likelihood, n_particles, reverse, resampling, posterior_bandwidth, minimum_bandwidth: as for
            `ParticleFilter`.
        detach_particles: True: nothing passes a resampling (the paper's TG-PF). False: gradients pass through the places of the
            particles that were chosen, not through the choice.

    Source: Jonschkowski et al., "Differentiable Particle Filters" (2018). Cost of a step: O(N) beside the networks.
    """

    _takes_any_number = True

    def __init__(
        self,
        space: StateSpace,
        dynamics: Dynamics,
        likelihood: Likelihood,
        n_particles: int,
        *,
        detach_particles: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(space, dynamics, likelihood, n_particles, **options)
        self.detach_particles = detach_particles

    def _kind(self) -> tuple:
        return *super()._kind(), self.detach_particles

    def _resample(self, models: Models, posterior: Particles, seed: Tensor) -> tuple[Particles, Tensor]:
        ancestors = ops.resample(posterior.log_weights.detach(), seed, self.n_particles, scheme=self.resampling)
        states = _chosen(posterior.states.detach() if self.detach_particles else posterior.states, ancestors)
        return Particles(states, states.new_full(ancestors.shape, -math.log(self.n_particles))), ancestors


class SoftResamplingParticleFilter(ParticleFilter):
    """Particle filter with soft resampling (SR-PF): particles are drawn from v = (1 - softness) w + softness / N, and keep
    w / v as their weights, which have a gradient.

    Args:
        space, dynamics, likelihood, n_particles, reverse, resampling, posterior_bandwidth, minimum_bandwidth: as for
            `ParticleFilter`.
        softness: lambda in [0, 1), 0.1 in the paper. In `eval()` mode it is 0: plain resampling.
        detach_particles: True: gradients pass through the weights alone (the authors' program). False: through the places of
            the chosen particles too (the original).

    Source: paper, equations (soft_resampling_1) and (sr_weight_2); Karkus et al., "Particle Filter Networks" (2018).
    Cost of a step: O(N) beside the networks.
    """

    _takes_any_number = True

    def __init__(
        self,
        space: StateSpace,
        dynamics: Dynamics,
        likelihood: Likelihood,
        n_particles: int,
        *,
        softness: float = 0.1,
        detach_particles: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(space, dynamics, likelihood, n_particles, **options)
        if not 0 <= softness < 1:
            raise ValueError(f"softness: expected at least 0 and below 1, got {softness}")
        self.softness, self.detach_particles = softness, detach_particles

    def _kind(self) -> tuple:
        return *super()._kind(), self.softness, self.detach_particles, self.training

    def _resample(self, models: Models, posterior: Particles, seed: Tensor) -> tuple[Particles, Tensor]:
        log_w = posterior.log_weights
        softness = self.softness if self.training else 0.0
        log_v = log_w
        if softness:
            uniform = torch.full_like(log_w, math.log(softness / log_w.size(-1)))
            log_v = torch.logaddexp(log_w + math.log1p(-softness), uniform)
        ancestors = ops.resample(log_v.detach(), seed, self.n_particles, scheme=self.resampling)
        states = _chosen(posterior.states.detach() if self.detach_particles else posterior.states, ancestors)
        if not softness:
            return Particles(states, states.new_full(ancestors.shape, -math.log(self.n_particles))), ancestors
        log_ratio = (log_w - log_v).gather(-1, ancestors)
        return Particles(states, ops.normalize_log_weights(log_ratio)[0]), ancestors


class ConcreteParticleFilter(ParticleFilter):
    """Particle filter whose draws are relaxed: convex combinations of all particles, by a Gumbel-softmax (Concrete) for each.

    Angles are combined as unit vectors. Draws are independent ("multinomial"); the ancestor that is reported is the particle
    of largest share. As the temperature falls, draws become single particles and gradients grow.

    Args:
        space, dynamics, likelihood, n_particles, reverse, posterior_bandwidth, minimum_bandwidth: as for `ParticleFilter`.
        temperature: above 0.

    Source: paper, section 2, "Relaxations of Discrete Resampling"; Maddison et al., "The Concrete Distribution" (2017).
    Cost of a step: O(N^2) time and memory.
    """

    def __init__(
        self,
        space: StateSpace,
        dynamics: Dynamics,
        likelihood: Likelihood,
        n_particles: int,
        *,
        temperature: float = 0.1,
        **options: Any,
    ) -> None:
        _refuse_scheme(options)
        super().__init__(space, dynamics, likelihood, n_particles, resampling="multinomial", **options)
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature: expected a positive number, got {temperature}")
        self.temperature = temperature

    def _kind(self) -> tuple:
        return *super()._kind(), self.temperature

    def _resample(self, models: Models, posterior: Particles, seed: Tensor) -> tuple[Particles, Tensor]:
        states, log_weights = posterior
        B, N = log_weights.shape
        gumbel = -torch.log(-torch.log(ops.philox_uniform(seed, (B, N, N), dtype=log_weights.dtype)))
        shares = torch.softmax((log_weights.unsqueeze(1) + gumbel) / self.temperature, -1)
        g = len(self.space.linear)
        linear, angles = states[..., :g], states[..., g:]
        with torch.autocast(states.device.type, enabled=False):  # products there would round places to half types
            mean = [shares @ linear]
            if self.space.angular:
                mean.append(torch.atan2(shares @ angles.sin(), shares @ angles.cos()))
        return Particles(torch.cat(mean, -1), torch.full_like(log_weights, -math.log(N))), shares.argmax(-1)


class OptimalTransportParticleFilter(ParticleFilter):
    """Particle filter that moves its particles by regularised optimal transport to uniform weights (OT-PF): no random choice.

    The ancestors that are reported are 0 to N-1: each particle is transported.

    Args:
        space, dynamics, likelihood, n_particles, reverse, posterior_bandwidth, minimum_bandwidth: as for `ParticleFilter`.
        epsilon, scaling, threshold, max_iterations: as for `mdps.ops.transport_resample`.

    Source: Corenflos et al., "Differentiable Particle Filtering via Entropy-Regularized Optimal Transport" (2021).
    Cost of a step: that of `mdps.ops.transport_resample`, O(N^2) an iteration.
    """

    def __init__(
        self,
        space: StateSpace,
        dynamics: Dynamics,
        likelihood: Likelihood,
        n_particles: int,
        *,
        epsilon: float = 0.5,
        scaling: float = 0.9,
        threshold: float = 1e-3,
        max_iterations: int = 500,
        **options: Any,
    ) -> None:
        _refuse_scheme(options)
        super().__init__(space, dynamics, likelihood, n_particles, **options)
        self.epsilon, self.scaling, self.threshold, self.max_iterations = epsilon, scaling, threshold, max_iterations

    def _kind(self) -> tuple:
        return *super()._kind(), self.epsilon, self.scaling, self.threshold, self.max_iterations

    def _resample(self, models: Models, posterior: Particles, seed: Tensor) -> tuple[Particles, Tensor]:
        states, *_ = ops.transport_resample(
            *posterior,
            epsilon=self.epsilon,
            scaling=self.scaling,
            threshold=self.threshold,
            max_iterations=self.max_iterations,
            n_angular=self.space.n_angular,
        )
        ancestors = torch.arange(self.n_particles, device=states.device).expand(states.shape[:2])
        return Particles(states, torch.full_like(posterior.log_weights, -math.log(self.n_particles))), ancestors


def _refuse_scheme(options: dict[str, Any]) -> None:
    if "resampling" in options:
        raise ValueError(f"resampling: this filter has no scheme to choose, got {options['resampling']!r}")


def _chosen(states: Tensor, ancestors: Tensor) -> Tensor:
    return states.gather(1, ancestors.unsqueeze(-1).expand(-1, -1, states.size(-1)))
