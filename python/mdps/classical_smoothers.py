"""The classical particle smoothers, which evaluate the density of the transition p(x_t | x_{t-1}, a_t) between particles.

Idea: neither makes new particles. Forward-filtering backward-smoothing (FFBS) weighs the forward filter's particles again, from
the last time back; two-filter smoothing (TFS) weighs the backward filter's by what the forward filter predicts for them. Both
are as good as the particles that they are given lie where the smoothed belief does; the Mixture Density Particle Smoother
(smoothers.py), which draws from both filters and needs no density, is meant to be free of that.

Every sum over particles is one `mdps.ops.mixture_log_prob`, in log space: nothing underflows and nothing has N x N entries.

Source: "Learning to be Smooth", section 3: equations (ffbs_factorization) to (tfsWeights) and the weights that follow from
them; Doucet & Johansen 2009 for FFBS, Briers, Doucet & Maskell 2010 for TFS.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import ops
from .filters import FilterBeliefs, ParticleFilter, filter_together
from .mixture import Bandwidth, Mixture
from .sequences import check_same_batch, prepare_moves, returned, row_seeds
from .smoothers import SmootherBeliefs
from .transitions import TransitionModel, transition_means


class ForwardFilterBackwardSmootherBeliefs(NamedTuple):
    """What FFBS believes at every time; where t >= lengths, entries are padding: finite, of no meaning."""

    smoothed: Mixture
    """Batch shape (B, T), N components: the filter's particles, given all observations."""
    forward: FilterBeliefs
    """Of the filter."""
    collapsed: Tensor
    """bool (B, T): no smoothed particle of the next time can be reached from any particle; the weights are then uniform. It
    takes distances at which the log-density of the transition overflows."""


class ForwardFilterBackwardSmoother(nn.Module):
    """Forward-filtering backward-smoothing (FFBS), the marginal form, around any particle filter.

        w_{t|T}^i = w_t^i sum_j w_{t+1|T}^j p(x_{t+1}^j | x_t^i) / sum_k w_t^k p(x_{t+1}^j | x_t^k),   w_{T|T} = w_T

    Gradients are those of this formula: to the filter's weights, to the transition's mean and bandwidths, and to the particles
    where the filter's have gradients.

    Args:
        forward_filter: a filter with reverse=False. The formula takes its particles to be drawn by the transition; a Mixture
            Density Particle Filter also adds the kernels that it resamples from, which is not accounted for.
        transition: p(x_t | x_{t-1}, a_t) (protocol `TransitionModel`), over the filter's space.
        posterior_bandwidth: of the smoothed belief, before training: D numbers or one, standard deviations in the units of the
            state (angles: radians). minimum_bandwidth: what it stays above.

    Raises:
        ValueError: a reverse filter, or a transition over another number of dimensions.

    Cost: that of the filter, one call of the transition's mean, 2 (T-1) B N^2 kernels, memory O(B T N), with gradients too.
    """

    def __init__(
        self,
        forward_filter: ParticleFilter,
        transition: TransitionModel,
        *,
        posterior_bandwidth: float | Sequence[float] = 0.5,
        minimum_bandwidth: float | Sequence[float] = 0.01,
    ) -> None:
        super().__init__()
        if forward_filter.reverse:
            raise ValueError("forward_filter: expected a filter with reverse=False")
        self.space = forward_filter.space
        _check_transition(transition, self.space.size)
        self.forward_filter, self.transition = forward_filter, transition
        self.posterior_bandwidth = Bandwidth(posterior_bandwidth, minimum_bandwidth, self.space, name="posterior_bandwidth")

    def forward(
        self,
        observations: Tensor,
        initial: Tensor,
        actions: Tensor | None = None,
        lengths: Tensor | None = None,
        observed: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> ForwardFilterBackwardSmootherBeliefs:
        """Smooth whole sequences: filter, then `smooth`. Arguments and errors as of `ParticleFilter.forward`."""
        return self.smooth(self.forward_filter(observations, initial, actions, lengths, observed, seed), actions, lengths)

    def smooth(
        self, forward: FilterBeliefs, actions: Tensor | None = None, lengths: Tensor | None = None
    ) -> ForwardFilterBackwardSmootherBeliefs:
        """Weigh the particles of a filter again, by what comes after them; arguments as for `forward`.

        A stage that trains the smoothed bandwidth alone calls the filter under torch.no_grad(), then this.
        """
        particles, filtered = forward.posterior.means, forward.posterior.log_weights
        B, T, N, _ = particles.shape
        actions, real = prepare_moves(actions, lengths, B, T, particles.device)
        bandwidths, n_angular = self.transition.bandwidths, self.space.n_angular
        moved = transition_means(self.transition, particles[:, :-1], actions)
        # The kernel is symmetric in place and centre, so sums over either are mixtures around the other.
        log_predicted = ops.mixture_log_prob(
            particles[:, 1:].flatten(0, 1), moved.flatten(0, 1), filtered[:, :-1].flatten(0, 1), bandwidths, n_angular=n_angular
        ).view(B, T - 1, N)
        weights, collapsed = [filtered[:, -1]], [torch.zeros_like(forward.collapsed[:, -1])]
        for t in range(T - 2, -1, -1):
            reachable = log_predicted[:, t] > -math.inf
            log_ratio = torch.where(reachable, weights[-1] - log_predicted[:, t], -math.inf)
            log_future = ops.mixture_log_prob(moved[:, t], particles[:, t + 1], log_ratio, bandwidths, n_angular=n_angular)
            log_weights, log_sum, _ = ops.normalize_log_weights(filtered[:, t] + log_future)
            dead = log_sum == -math.inf
            if real is not None:  # a sequence's last time, and the padding, have no future
                log_weights = torch.where(real[:, t + 1, None], log_weights, filtered[:, t])
                dead = dead & real[:, t + 1]
            weights.append(log_weights)
            collapsed.append(dead)
        smoothed = Mixture(particles, torch.stack(weights[::-1], 1), self.posterior_bandwidth(), self.space)
        return ForwardFilterBackwardSmootherBeliefs(smoothed, forward, torch.stack(collapsed[::-1], 1))


class TwoFilterSmoother(nn.Module):
    """Two-filter smoothing (TFS): the particles of a backward filter, weighed by what a forward filter predicts for them.

        w_{t|T}^j = w_b,t^j [sum_i w_f,t-1^i p(x_b,t^j | x_f,t-1^i)] / gamma_t(x_b,t^j)

    gamma_t is the artificial prior that the backward filter's belief contains, gamma_t(x_t) p(y_{t:T} | x_t) up to a constant;
    its dynamics move from t+1 to t by gamma_t(x_t) p(x_{t+1} | x_t) / gamma_{t+1}(x_{t+1}). At the first time, the bracket is
    the forward filter's predicted mixture: the kernel density of the initial particles, by its posterior bandwidth.

    Gradients are those of this formula: to both filters' weights, to the transition's mean and bandwidths, and to the particles
    where the filters' have gradients.

    Args:
        forward_filter: any filter with reverse=False.
        backward_filter: any filter with reverse=True, over the same space.
        transition: p(x_t | x_{t-1}, a_t) forward in time (protocol `TransitionModel`).
        artificial_prior: log gamma_t up to a constant, as a function of the backward particles (B, T, N, D) -> (B, T, N), as
            the `log_prob` of a distribution over states; particles where it is -inf have weight 0. None: uniform.
        posterior_bandwidth, minimum_bandwidth: of the smoothed belief, as for `ForwardFilterBackwardSmoother`.

    Raises:
        ValueError: filters of different spaces or of the wrong direction, or a transition over another number of dimensions.

    Cost: that of both filters, one call of the transition's mean, B T N_f N_b kernels in one call, memory O(B T (N_f + N_b)).
    """

    def __init__(
        self,
        forward_filter: ParticleFilter,
        backward_filter: ParticleFilter,
        transition: TransitionModel,
        artificial_prior: Callable[[Tensor], Tensor] | None = None,
        *,
        posterior_bandwidth: float | Sequence[float] = 0.5,
        minimum_bandwidth: float | Sequence[float] = 0.01,
    ) -> None:
        super().__init__()
        if forward_filter.reverse or not backward_filter.reverse:
            raise ValueError("expected a forward_filter with reverse=False and a backward_filter with reverse=True")
        self.space = forward_filter.space
        if backward_filter.space != self.space:
            raise ValueError(f"backward_filter: expected {self.space}, got {backward_filter.space}")
        _check_transition(transition, self.space.size)
        self.forward_filter, self.backward_filter = forward_filter, backward_filter
        self.transition, self.artificial_prior = transition, artificial_prior
        self.posterior_bandwidth = Bandwidth(posterior_bandwidth, minimum_bandwidth, self.space, name="posterior_bandwidth")

    def forward(
        self,
        observations: Tensor,
        initial: Tensor,
        final: Tensor,
        actions: Tensor | None = None,
        lengths: Tensor | None = None,
        observed: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> SmootherBeliefs:
        """Smooth whole sequences: both filters, then `smooth`.

        Args:
            initial: (B, N_f, D): particles at time 0, drawn from the prior.
            final: (B, N_b, D): particles at each sequence's last time, lengths - 1, drawn from the artificial prior.
            observations, actions, lengths, observed, seed: as for `ParticleFilter.forward`.
        """
        self.forward_filter.check_particles("initial", initial)
        self.backward_filter.check_particles("final", final)
        check_same_batch(initial, final)
        seeds = ops.split_seed(row_seeds(seed, initial.size(0), initial.device), 2)
        filters, particles = (self.forward_filter, self.backward_filter), (initial, final)
        each = [s.contiguous() for s in seeds.unbind(1)]
        forward, backward = filter_together(filters, particles, observations, actions, lengths, observed, each)
        return self.smooth(forward, backward, actions, lengths)

    def smooth(
        self,
        forward: FilterBeliefs,
        backward: FilterBeliefs,
        actions: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> SmootherBeliefs:
        """Weigh the backward filter's particles by the forward filter's; arguments as for `forward`."""
        particles, filtered = backward.posterior.means, backward.posterior.log_weights
        before = forward.posterior
        B, T, N, _ = particles.shape
        if before.batch_shape != (B, T):
            raise ValueError(f"backward: expected batch shape (B, T) = {tuple(before.batch_shape)}, got {(B, T)}")
        actions, real = prepare_moves(actions, lengths, B, T, particles.device)
        moved = transition_means(self.transition, before.means[:, :-1], actions).flatten(0, 1)
        log_later = ops.mixture_log_prob(
            particles[:, 1:].flatten(0, 1),
            moved,
            before.log_weights[:, :-1].flatten(0, 1),
            self.transition.bandwidths,
            n_angular=self.space.n_angular,
        ).view(B, T - 1, N)
        prior = forward.predicted
        first = Mixture(prior.means[:, 0], prior.log_weights[:, 0], prior.bandwidths, self.space)
        log_predicted = torch.cat([first.log_prob_many(particles[:, 0]).unsqueeze(1), log_later], 1)
        log_weights, log_sum, _ = ops.normalize_log_weights(filtered + log_predicted - self._log_gamma(particles))
        collapsed = log_sum == -math.inf
        if real is not None:
            collapsed = collapsed & real
        smoothed = Mixture(particles, log_weights, self.posterior_bandwidth(), self.space)
        return SmootherBeliefs(smoothed, forward, backward, collapsed)

    def _log_gamma(self, particles: Tensor) -> Tensor:
        """log gamma, +inf where gamma is 0 (what is divided by it then has weight 0)."""
        if self.artificial_prior is None:
            return particles.new_zeros(())
        log_gamma = self.artificial_prior(particles)
        log_gamma = returned("artificial_prior", log_gamma, particles.shape[:-1], particles.dtype)
        return torch.where(log_gamma > -math.inf, log_gamma, math.inf)


def _check_transition(transition: TransitionModel, size: int) -> None:
    if transition.bandwidths.shape != (size,):
        raise ValueError(f"transition: expected bandwidths of shape (D) = {(size,)}, got {tuple(transition.bandwidths.shape)}")
