"""The Mixture Density Particle Filter: a regularised particle filter that trains end to end.

Idea: the belief is a kernel density mixture. Resampling draws from it, and the importance-weighted sample gradient (IWSG)
gives the draws, which are constants, weights of value 1 whose gradient is that of the mixture's log-density: unbiased
gradients through every resampling, back to the first observation.

Source: "Learning to be Smooth", section 2 (Mixture Density Particle Filters) and figure "The Mixture Density Particle
Filter" of the appendix, here in log space. IWSG: equation (iwsg_2).
Cost of a sequence: T evaluations of each network; resampling O(T N), with gradients O(T N^2) time and O(T N) memory.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from . import ops
from .mixture import Bandwidth, Mixture
from .ops.resample import SCHEMES
from .sequences import Sequences, check_particles, encode, for_sequence, prepare, time_seeds
from .state_space import StateSpace


class Dynamics(Protocol):
    """How particles move by one time step; an nn.Module, or any callable that has `noise_size`.

    It may have a method `for_sequence() -> callable`. A filter then calls that once for a sequence, and its result instead of
    the model for each step: the place for work that is the same at every step, as gathering parameters into one tensor.
    """

    noise_size: int
    """K, the standard normal numbers that one particle takes for one move."""

    def __call__(self, particles: Tensor, noise: Tensor, action: Tensor | None = None) -> Tensor:
        """particles (B, N, D), noise (B, N, K), action (B, ...) or None -> moved particles (B, N, D), angles in any range."""


class Likelihood(Protocol):
    """How well particles explain an observation; an nn.Module, or any callable.

    It may have a method `encode(observations (B, T, ...)) -> (B, T, ...)`. A filter then calls that once for a sequence, and
    hands its result instead of the observation to the calls below. An encoder that filters and smoothers share and that is
    costly runs only once if its user runs it and passes the codes as observations. It may have `for_sequence`, as `Dynamics`.
    """

    def __call__(self, particles: Tensor, observation: Tensor) -> Tensor:
        """particles (B, N, D), observation (B, ...) -> log-likelihoods (B, N), up to a constant; -inf kills a particle."""


class Particles(NamedTuple):
    """Weighted particles."""

    states: Tensor
    """(B, N, D), angles in [-pi, pi)."""
    log_weights: Tensor
    """(B, N), normalised."""


class FilterState(NamedTuple):
    """What a filter knows after one time step. `filter.step` takes it and returns the next."""

    time: int
    """Index t of the step in the sequence."""
    seed: Tensor
    """int64 (B,): the seed of each sequence, the same at all times."""
    predicted: Particles
    """Before the observation of time t; log-weights -log N, which carry the gradient of the resampling."""
    posterior: Particles
    """After it: the same states, weighted by the likelihood."""
    ancestors: Tensor
    """int64 (B, N): the particle of the step before from whose kernel each one was drawn; 0 to N-1 at the first step."""
    collapsed: Tensor
    """bool (B,): every particle had likelihood 0. The weights are then uniform, as if nothing had been observed."""
    log_evidence: Tensor
    """(B,): log of the mean likelihood of the predicted particles, the estimate of log p(y_t | the observations before it).
    0 where nothing was observed, -inf at a collapse."""
    ess: Tensor
    """(B,): effective sample size of the posterior's weights, 1 to N."""


class FilterBeliefs(NamedTuple):
    """What a filter believes at every time of a sequence.

    Where t >= lengths, entries are padding: finite, of no meaning, not collapsed, of log-evidence 0.
    """

    posterior: Mixture
    """Batch shape (B, T): given the observations up to and including time t (of a reverse filter: from t to the end)."""
    predicted: Mixture
    """Batch shape (B, T): the same without the observation of time t; the initial particles at the first step."""
    ancestors: Tensor
    """int64 (B, T, N), as in FilterState; so are the following."""
    collapsed: Tensor
    """bool (B, T)."""
    log_evidence: Tensor
    """(B, T); its sum over time estimates log p(y_1 ... y_T), if the likelihood is normalised."""
    ess: Tensor
    """(B, T)."""


class _Models(NamedTuple):
    """What is the same at every step of a sequence."""

    dynamics: Dynamics
    likelihood: Likelihood
    bandwidths: Tensor
    """(D), of the mixture that is resampled."""


class MixtureDensityParticleFilter(nn.Module):
    """Mixture Density Particle Filter (MDPF), forward or reverse in time; with two bandwidths, A-MDPF.

    Args:
        space: the state's dimensions.
        dynamics: moves particles (protocol `Dynamics`). A reverse filter's moves them from t+1 to t.
        likelihood: weighs particles (protocol `Likelihood`).
        n_particles: N.
        reverse: run from each sequence's end to its start.
        resampling: "stratified", "multinomial", "systematic" or "residual" choice of the kernels that are drawn from.
        posterior_bandwidth: of the beliefs, before training: D numbers or one, standard deviations in the units of the state
            (angles: radians).
        resampling_bandwidth: of the mixture that is resampled, before training. None: the posterior's, one parameter (MDPF).
        minimum_bandwidth: what both stay above.

    The parameters are `posterior_bandwidth` and `resampling_bandwidth` (modules `Bandwidth`) and those of the networks.
    """

    def __init__(
        self,
        space: StateSpace,
        dynamics: Dynamics,
        likelihood: Likelihood,
        n_particles: int,
        *,
        reverse: bool = False,
        resampling: str = "stratified",
        posterior_bandwidth: float | Sequence[float] = 0.5,
        resampling_bandwidth: float | Sequence[float] | None = None,
        minimum_bandwidth: float | Sequence[float] = 0.01,
    ) -> None:
        super().__init__()
        if n_particles < 1:
            raise ValueError(f"n_particles: expected at least 1, got {n_particles}")
        if resampling not in SCHEMES:
            raise ValueError(f"resampling: expected one of {list(SCHEMES)}, got {resampling!r}")
        self.space, self.n_particles, self.reverse, self.resampling = space, n_particles, reverse, resampling
        self.dynamics, self.likelihood = dynamics, likelihood
        self.posterior_bandwidth = Bandwidth(posterior_bandwidth, minimum_bandwidth, space, name="posterior_bandwidth")
        self.resampling_bandwidth = (
            None
            if resampling_bandwidth is None
            else Bandwidth(resampling_bandwidth, minimum_bandwidth, space, name="resampling_bandwidth")
        )

    def forward(
        self,
        observations: Tensor,
        initial: Tensor,
        actions: Tensor | None = None,
        lengths: Tensor | None = None,
        observed: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> FilterBeliefs:
        """Filter whole sequences.

        Args:
            observations: (B, T, ...). Its values where `observed` is False and in the padding do not matter, NaN included.
            initial: (B, N, D): particles at the first time, before its observation. A reverse filter's first time is the
                last one of each sequence, lengths - 1. float32 or float64, as the filter's parameters.
            actions: (B, T, ...): actions[:, t] led from time t-1 to time t, so actions[:, 0] is never used. A reverse
                filter is given the same tensor, and sees actions[:, t+1] when it moves from t+1 to t.
            lengths: int64 (B,), 1 to T: how many of the T steps each sequence has; what follows is padding. None: all T.
            observed: bool (B, T): False where the observation is missing; the weights then stay as predicted.
            seed: int64 () or (B,) from `mdps.ops.make_seed`; () is split into one for each sequence. Sequence b depends
                on seed[b] alone, whatever else is in the batch and however long the padding. None: torch's generator.
            All on one device, that of the filter's parameters.

        Raises:
            TypeError, ValueError: an argument of the wrong type, shape or device, and which. The values of `lengths` are
                checked on the CPU only.

        On a GPU nothing here waits for it; in a CUDA graph (torch.cuda.graph) the calls run as they were captured.
        """
        self.check_particles("initial", initial)
        sequence = prepare(observations, actions, lengths, observed, seed, initial.size(0), initial.device)
        T = observations.size(1)
        codes = encode(self.likelihood, sequence.observations).unbind(1)
        moves = sequence.actions.unbind(1) if sequence.actions is not None else None
        masks = sequence.observed.unbind(1) if sequence.observed is not None else [None] * T
        draws, noise = self._random(sequence.seed, range(T), initial)
        models, state, steps = self._models(), None, []
        for t in reversed(range(T)) if self.reverse else range(T):
            if state is None:
                predicted, ancestors = self._begin(initial)
            else:
                action = moves[t + self.reverse] if moves is not None else None
                predicted, ancestors = self._predict(models, state.posterior, draws[t], noise[t], action)
                if sequence.lengths is not None:
                    moving = t < sequence.lengths - int(self.reverse)
                    predicted, ancestors = self._stay(moving, predicted, ancestors, state)
            state = self._update(models, t, sequence.seed, predicted, ancestors, codes[t], masks[t])
            steps.append(state)
        return self._beliefs(steps[::-1] if self.reverse else steps)

    def start(
        self,
        initial: Tensor,
        observation: Tensor,
        observed: Tensor | None = None,
        seed: Tensor | None = None,
        *,
        time: int = 0,
    ) -> FilterState:
        """Begin to filter online: the first step of `forward`, and the same numbers.

        Args:
            initial: (B, N, D). observation: (B, ...). observed: bool (B,). seed: int64 () or (B,).
            time: index of this step; for a reverse filter, which counts down, T - 1.
        """
        self.check_particles("initial", initial)
        B, device = initial.size(0), initial.device
        sequence = prepare(observation.unsqueeze(1), None, None, _one_step(observed), seed, B, device)
        predicted, ancestors = self._begin(initial)
        return self._update_online(self._models(), time, sequence, predicted, ancestors)

    def step(
        self, state: FilterState, observation: Tensor, action: Tensor | None = None, observed: Tensor | None = None
    ) -> FilterState:
        """Go on by one time step: the next step of `forward`, and the same numbers.

        Args:
            observation: (B, ...). observed: bool (B,).
            action: (B, ...): what led from the state's time to the new one; of a reverse filter, from the new one to it.

        A step that was captured in a CUDA graph stays that of its time: give the captured state another seed, `seed.copy_()`,
        before it is replayed as another step, or the noise is the same again.
        """
        time = state.time - 1 if self.reverse else state.time + 1
        if time < 0:
            raise ValueError("state: a reverse filter ends at time 0; begin it with start(..., time=T - 1)")
        particles, seed = state.posterior.states, state.seed
        B, device = particles.size(0), particles.device
        sequence = prepare(observation.unsqueeze(1), _one_step(action), None, _one_step(observed), seed, B, device)
        draws, noise = self._random(seed, range(time, time + 1), particles)
        move = sequence.actions.squeeze(1) if sequence.actions is not None else None
        models = self._models()
        predicted, ancestors = self._predict(models, state.posterior, draws[0], noise[0], move)
        return self._update_online(models, time, sequence, predicted, ancestors)

    def check_particles(self, name: str, particles: Tensor) -> None:
        """Raise TypeError or ValueError unless these can be the filter's first particles, (B, N, D)."""
        check_particles(name, particles, self.n_particles, self.space.size, self.posterior_bandwidth.minimum)

    def posterior(self, state: FilterState) -> Mixture:
        """Return the belief of an online state, batch shape (B,)."""
        return Mixture(*state.posterior, self.posterior_bandwidth(), self.space)

    # ---- The algorithm --------------------------------------------------------------------------------------------------

    def _begin(self, initial: Tensor) -> tuple[Particles, Tensor]:
        B, N = initial.shape[:2]
        log_weights = initial.new_full((B, N), -math.log(N))
        return Particles(self.space.wrap(initial), log_weights), torch.arange(N, device=initial.device).expand(B, N)

    def _predict(
        self, models: _Models, posterior: Particles, seed: Tensor, noise: Tensor, action: Tensor | None
    ) -> tuple[Particles, Tensor]:
        """Draw from the resampling mixture, move the draws; their weights are 1 / N and carry its gradient."""
        mixture, n_angular = (*posterior, models.bandwidths), self.space.n_angular
        z, ancestors = ops.mixture_resample(*mixture, seed, n_angular=n_angular, scheme=self.resampling)
        states = self.space.wrap(models.dynamics(z, noise, action))
        if states.shape != z.shape:
            raise ValueError(f"dynamics: expected to return shape {tuple(z.shape)}, got {tuple(states.shape)}")
        if torch.is_grad_enabled():
            log_weights = ops.iwsg_log_weights(z, *mixture, n_angular=n_angular) - math.log(z.size(1))
        else:
            log_weights = torch.full_like(posterior.log_weights, -math.log(z.size(1)))
        return Particles(states, log_weights), ancestors

    def _update(
        self,
        models: _Models,
        time: int,
        seed: Tensor,
        predicted: Particles,
        ancestors: Tensor,
        code: Tensor,
        observed: Tensor | None,
    ) -> FilterState:
        """Weigh the predicted particles by the likelihood of the observation."""
        log_likelihood = models.likelihood(predicted.states, code)
        if log_likelihood.shape != predicted.log_weights.shape:
            expected, got = tuple(predicted.log_weights.shape), tuple(log_likelihood.shape)
            raise ValueError(f"likelihood: expected to return shape {expected}, got {got}")
        if observed is not None:
            log_likelihood = torch.where(observed.unsqueeze(1), log_likelihood, 0)
        log_weights, log_sum, ess = ops.normalize_log_weights(predicted.log_weights + log_likelihood)
        log_evidence = log_sum if observed is None else torch.where(observed, log_sum, 0)
        posterior = Particles(predicted.states, log_weights)
        return FilterState(time, seed, predicted, posterior, ancestors, log_sum == -math.inf, log_evidence, ess)

    def _stay(self, moving: Tensor, predicted: Particles, ancestors: Tensor, state: FilterState) -> tuple[Particles, Tensor]:
        """Rows that have not begun, or have ended: the particles of the step before, with uniform weights."""
        row = moving.unsqueeze(1)
        states = torch.where(row.unsqueeze(2), predicted.states, state.predicted.states)
        log_weights = torch.where(row, predicted.log_weights, -math.log(self.n_particles))
        return Particles(states, log_weights), torch.where(row, ancestors, torch.arange(self.n_particles, device=row.device))

    # ---- What surrounds it ----------------------------------------------------------------------------------------------

    def _models(self) -> _Models:
        bandwidths = (self.resampling_bandwidth or self.posterior_bandwidth)()
        return _Models(for_sequence(self.dynamics), for_sequence(self.likelihood), bandwidths)

    def _random(self, seed: Tensor, times: range, like: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Seeds (B,) of the draws and noise (B, N, K) for each of these times; they depend on seed (B,) and time alone."""
        B, N = like.shape[:2]
        draws = time_seeds(seed, times, 0).mT.contiguous()
        keys = time_seeds(seed, times, 1).mT.flatten()
        noise = ops.philox_normal(keys, (len(times) * B, N, self.dynamics.noise_size), dtype=like.dtype)
        return draws.unbind(0), noise.view(len(times), B, N, self.dynamics.noise_size).unbind(0)

    def _update_online(
        self, models: _Models, time: int, sequence: Sequences, predicted: Particles, ancestors: Tensor
    ) -> FilterState:
        code = encode(self.likelihood, sequence.observations).squeeze(1)
        observed = sequence.observed.squeeze(1) if sequence.observed is not None else None
        return self._update(models, time, sequence.seed, predicted, ancestors, code, observed)

    def _beliefs(self, steps: list[FilterState]) -> FilterBeliefs:
        bandwidths = self.posterior_bandwidth()
        states = torch.stack([s.predicted.states for s in steps], 1)
        return FilterBeliefs(
            posterior=Mixture(states, torch.stack([s.posterior.log_weights for s in steps], 1), bandwidths, self.space),
            predicted=Mixture(states, torch.stack([s.predicted.log_weights for s in steps], 1), bandwidths, self.space),
            ancestors=torch.stack([s.ancestors for s in steps], 1),
            collapsed=torch.stack([s.collapsed for s in steps], 1),
            log_evidence=torch.stack([s.log_evidence for s in steps], 1),
            ess=torch.stack([s.ess for s in steps], 1),
        )


def _one_step(x: Tensor | None) -> Tensor | None:
    return x.unsqueeze(1) if x is not None else None
