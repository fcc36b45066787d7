"""Particle filters that train end to end: the loop over time that all share, and the Mixture Density Particle Filter.

Idea: the belief is a kernel density mixture around weighted particles. A filter resamples, moves and weighs them; filters
differ in how they resample (`ParticleFilter._resample`), which is where gradients get lost. The Mixture Density Particle Filter
draws from the mixture, and the importance-weighted sample gradient (IWSG) gives the draws, which are constants, weights of
value 1 whose gradient is that of the mixture's log-density: unbiased gradients through every resampling, back to the first
observation. The others are in baseline_filters.py.

Several filters over the same sequences, as the two of a smoother, run as one batch (`filter_together`).

Source: "Learning to be Smooth", section 2 (Mixture Density Particle Filters) and figure "The Mixture Density Particle
Filter" of the appendix, here in log space. IWSG: equation (iwsg_2).
Cost of a sequence: T evaluations of each network; resampling O(T N), with gradients O(T N^2) time and O(T N) memory.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from . import ops, pose_sequence
from .mixture import Bandwidth, Mixture
from .ops.resample import SCHEMES
from .sequences import (
    Sequences,
    check_numbers,
    check_particles,
    encode,
    for_sequence,
    of_each,
    one_step,
    prepare,
    returned,
    stands_for_calls,
    time_seeds,
    whole_number,
)
from .state_space import StateSpace


class Dynamics(Protocol):
    """How particles move by one time step; an nn.Module, or any callable that has `noise_size`.

    It may have a method `for_sequence() -> callable`. A filter then calls that once for a sequence, and its result instead of
    the model for each step: the place for work that is the same at every step, as gathering parameters into one tensor.
    It may have an attribute `wraps_angles`, True if the angles that it returns are in [-pi, pi) already.
    Its class may have a method `stack(models) -> callable or None`, which does the same for R models at once: the rows of what
    the callable is given are those of the first model, then as many of the second, and so on.
    Where a module has hooks, or a subclass overrides `forward` and not these methods, the filter calls the model itself.
    """

    noise_size: int
    """K, the standard normal numbers that one particle takes for one move."""

    def __call__(self, particles: Tensor, noise: Tensor, action: Tensor | None = None) -> Tensor:
        """particles (B, N, D), noise (B, N, K), action (B, ...) or None -> moved particles (B, N, D), angles in any range.

        Half types, as under autocast, are taken as the filter's dtype; so are they of a likelihood.
        """


class Likelihood(Protocol):
    """How well particles explain an observation; an nn.Module, or any callable.

    It may have a method `encode(observations (B, T, ...)) -> (B, T, ...)`. A filter then calls that once for a sequence, and
    hands its result instead of the observation to the calls below. An encoder that filters and smoothers share and that is
    costly runs only once if its user runs it and passes the codes as observations. It may have `for_sequence` and `stack`, as
    `Dynamics`.
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
    """Before the observation of time t; log-weights -log N (of SR-PF in training log w / v, normalised), with the gradient that
    the filter's resampling has, if any."""
    posterior: Particles
    """After it: the same states, weighted by the likelihood."""
    ancestors: Tensor
    """int64 (B, N): the particle of the step before that each one was made from; 0 to N-1 at the first step. Where
    one is made from all: that of the largest share (Concrete), or 0 to N-1 (OT-PF)."""
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


class Models(NamedTuple):
    """What is the same at every step of a sequence."""

    dynamics: Dynamics
    likelihood: Likelihood
    bandwidths: Tensor | None
    """(D), or (B, D) for rows of several filters: of the mixture that is resampled, where a filter has one."""
    wraps_angles: bool
    """Whether the dynamics do."""


class Fields(NamedTuple):
    """What all steps leave, (B, T, ...), in the filter's order."""

    states: Tensor
    predicted: Tensor
    """Log-weights before the observation; then after it."""
    posterior: Tensor
    ancestors: Tensor
    collapsed: Tensor
    log_evidence: Tensor
    ess: Tensor


class _Rows(NamedTuple):
    """Sequences in the order in which their filter goes through them, step by step."""

    codes: Tensor
    """(B, T, ...)."""
    moves: Sequence[Tensor | None]
    observed: Sequence[Tensor | None]
    moving: Sequence[Tensor | None]
    """bool (B,): whether the step moves the particles; None: it moves all."""
    draws: Tensor
    """int64 (T, B): seeds of the resampling."""
    noise: Tensor
    """(T, B, N, K)."""


class ParticleFilter(nn.Module):
    """A particle filter, forward or reverse in time; what its kinds share.

    A kind says by `_resample` how particles are drawn, and what gradient the draws carry. Filters of one kind whose `_kind`
    is equal can run as one batch.

    Args:
        space: the state's dimensions.
        dynamics: moves particles (protocol `Dynamics`). A reverse filter's moves them from t+1 to t.
        likelihood: weighs particles (protocol `Likelihood`).
        n_particles: N.
        reverse: run from each sequence's end to its start.
        resampling: "stratified", "multinomial", "systematic" or "residual" choice of the particles.
        posterior_bandwidth: of the beliefs, before training: D numbers or one, standard deviations in the units of the state
            (angles: radians).
        minimum_bandwidth: what it stays above.
    """

    _takes_any_number = False
    """Whether `_resample` draws N particles from any number of them."""

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
        minimum_bandwidth: float | Sequence[float] = 0.01,
    ) -> None:
        super().__init__()
        n_particles = whole_number("n_particles", n_particles, 1)
        if resampling not in SCHEMES:
            raise ValueError(f"resampling: expected one of {list(SCHEMES)}, got {resampling!r}")
        self.space, self.n_particles, self.reverse, self.resampling = space, n_particles, reverse, resampling
        self.dynamics, self.likelihood = dynamics, likelihood
        self.posterior_bandwidth = Bandwidth(posterior_bandwidth, minimum_bandwidth, space, name="posterior_bandwidth")

    def _resample(self, models: Models, posterior: Particles, seed: Tensor) -> tuple[Particles, Tensor]:
        """Draw N particles of the posterior by seed (B,): them, weighted, and their ancestors (B, N)."""
        raise NotImplementedError

    def _kind(self) -> tuple:
        """What filters that run as one batch have in common."""
        dtype = self.posterior_bandwidth.minimum.dtype
        return type(self), self.space, self.n_particles, self.resampling, self.dynamics.noise_size, dtype

    def _bandwidths(self) -> Tensor | None:
        """Those of the mixture that is resampled, (D)."""
        return None

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
                last one of each sequence, lengths - 1. float32 or float64, as the filter's parameters. MDPF, TG-PF and
                SR-PF take any number of them, more than N where the start is uncertain: N are drawn for the next step, and
                beliefs have as many components as the larger number, with log-weight -inf where there is no particle. It has
                to be N where there are lengths.
            actions: (B, T, ...): actions[:, t] led from time t-1 to time t, so actions[:, 0] is never used. A reverse
                filter is given the same tensor, and sees actions[:, t+1] when it moves from t+1 to t.
            lengths: int64 (B,), 1 to T: how many of the T steps each sequence has; what follows is padding. None: all T.
            observed: bool (B, T): False where the observation is missing; the weights then stay as predicted.
            seed: int64 () or (B,) from `mdps.ops.make_seed`; () is split into one for each sequence. Sequence b depends
                on seed[b] alone, whatever else is in the batch and however long the padding. None: torch's generator.
            All on one device, that of the filter's parameters.

        Raises:
            TypeError, ValueError: an argument, or what a model returned, of the wrong type, shape or device, and which. The
                values of `lengths` are checked on the CPU only.

        On a GPU nothing here waits for it; in a CUDA graph (torch.cuda.graph) the calls run as they were captured.
        """
        return filter_together([self], [initial], [observations], actions, lengths, observed, [seed])[0]

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
        sequence = prepare(one_step(observation, B, device), None, None, _one_step(observed), seed, B, device)
        predicted, ancestors = self._begin(initial)
        return self._update_online(_models([self]), time, sequence, predicted, ancestors)

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
        sequence = prepare(one_step(observation, B, device), _one_step(action), None, _one_step(observed), seed, B, device)
        draws, noise = _random([self], [seed], range(time, time + 1), particles)
        move = sequence.actions.squeeze(1) if sequence.actions is not None else None
        models = _models([self])
        predicted, ancestors = self._predict(models, state.posterior, draws[0], noise[0], move)
        return self._update_online(models, time, sequence, predicted, ancestors)

    def check_particles(self, name: str, particles: Tensor) -> None:
        """Raise TypeError or ValueError unless these can be the filter's first particles, (B, N or another number, D)."""
        n = None if self._takes_any_number else self.n_particles
        check_particles(name, particles, n, self.space.size, self.posterior_bandwidth.minimum)

    def posterior(self, state: FilterState) -> Mixture:
        """Return the belief of an online state, batch shape (B,)."""
        return Mixture(*state.posterior, self.posterior_bandwidth(), self.space)

    # ---- The algorithm --------------------------------------------------------------------------------------------------

    def _sequence(self, models: Models, rows: _Rows, states: Tensor, seed: Tensor) -> Fields:
        """All steps, one after the other."""
        steps: list[FilterState] = []
        draws, noise = rows.draws.unbind(), rows.noise.unbind()
        for k, code in enumerate(rows.codes.unbind(1)):
            if k == 0:
                predicted, ancestors = self._begin(states)
            else:
                predicted, ancestors = self._predict(models, steps[-1].posterior, draws[k], noise[k], rows.moves[k])
                if (moving := rows.moving[k]) is not None:
                    predicted, ancestors = self._stay(moving, predicted, ancestors, steps[-1])
            steps.append(self._update(models, k, seed, predicted, ancestors, code, rows.observed[k]))
        n = max(states.size(1), self.n_particles)
        particles = [_filled(n, s.predicted.states, s.predicted.log_weights, s.posterior.log_weights) for s in steps]
        numbers = [(_repeated(s.ancestors, n), s.collapsed, s.log_evidence, s.ess) for s in steps]
        return Fields(*(torch.stack(x, 1) for rows_ in (particles, numbers) for x in zip(*rows_)))

    def _begin(self, initial: Tensor) -> tuple[Particles, Tensor]:
        B, N = initial.shape[:2]
        log_weights = initial.new_full((B, N), -math.log(N))
        return Particles(self.space.wrap(initial), log_weights), torch.arange(N, device=initial.device).expand(B, N)

    def _predict(
        self, models: Models, posterior: Particles, seed: Tensor, noise: Tensor, action: Tensor | None
    ) -> tuple[Particles, Tensor]:
        """Resample, and move what was drawn."""
        drawn, ancestors = self._resample(models, posterior, seed)
        states = models.dynamics(drawn.states, noise, action)
        states = returned("dynamics", states, drawn.states.shape, drawn.states.dtype)
        if not models.wraps_angles:
            states = self.space.wrap(states)
        return Particles(states, drawn.log_weights), ancestors

    def _update(
        self,
        models: Models,
        time: int,
        seed: Tensor,
        predicted: Particles,
        ancestors: Tensor,
        code: Tensor,
        observed: Tensor | None,
    ) -> FilterState:
        """Weigh the predicted particles by the likelihood of the observation."""
        log_likelihood = models.likelihood(predicted.states, code)
        log_likelihood = returned("likelihood", log_likelihood, predicted.log_weights.shape, predicted.log_weights.dtype)
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

    def _update_online(
        self, models: Models, time: int, sequence: Sequences, predicted: Particles, ancestors: Tensor
    ) -> FilterState:
        code = encode(self.likelihood, sequence.observations).squeeze(1)
        observed = sequence.observed.squeeze(1) if sequence.observed is not None else None
        return self._update(models, time, sequence.seed, predicted, ancestors, code, observed)


class MixtureDensityParticleFilter(ParticleFilter):
    """Mixture Density Particle Filter (MDPF), forward or reverse in time; with two bandwidths, A-MDPF.

    Resampling draws from the belief's mixture, and the draws carry its gradient (IWSG).

    Args:
        space, dynamics, likelihood, n_particles, reverse, resampling, posterior_bandwidth, minimum_bandwidth: as for
            `ParticleFilter`.
        resampling_bandwidth: of the mixture that is resampled, before training. None: the posterior's, one parameter (MDPF).

    The parameters are `posterior_bandwidth` and `resampling_bandwidth` (modules `Bandwidth`) and those of the networks.
    """

    _takes_any_number = True

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
        super().__init__(
            space,
            dynamics,
            likelihood,
            n_particles,
            reverse=reverse,
            resampling=resampling,
            posterior_bandwidth=posterior_bandwidth,
            minimum_bandwidth=minimum_bandwidth,
        )
        self.resampling_bandwidth = (
            None
            if resampling_bandwidth is None
            else Bandwidth(resampling_bandwidth, minimum_bandwidth, space, name="resampling_bandwidth")
        )

    def _bandwidths(self) -> Tensor:
        return (self.resampling_bandwidth or self.posterior_bandwidth)()

    def _resample(self, models: Models, posterior: Particles, seed: Tensor) -> tuple[Particles, Tensor]:
        assert models.bandwidths is not None
        mixture, n_angular = (*posterior, models.bandwidths), self.space.n_angular
        z, ancestors = ops.mixture_resample(*mixture, seed, self.n_particles, n_angular=n_angular, scheme=self.resampling)
        if torch.is_grad_enabled():
            log_weights = ops.iwsg_log_weights(z, *mixture, n_angular=n_angular) - math.log(self.n_particles)
        else:
            log_weights = z.new_full(z.shape[:-1], -math.log(self.n_particles))
        return Particles(z, log_weights), ancestors

    def _sequence(self, models: Models, rows: _Rows, states: Tensor, seed: Tensor) -> Fields:
        """As one call, where that can be."""
        general = rows.moves[0] is not None or rows.observed[0] is not None or rows.moving[0] is not None
        general = general or states.size(1) != self.n_particles
        if not general and (len(self.space.linear), self.space.n_angular) == (2, 1) and models.bandwidths is not None:
            wrapped = self.space.wrap(states)
            steps = pose_sequence.run(models, models.bandwidths, wrapped, rows.codes, rows.noise, rows.draws, self.resampling)
            if steps is not None:
                moved, predicted, after, ancestors, log_sum, ess = steps
                return Fields(moved, predicted, after, ancestors, log_sum == -math.inf, log_sum, ess)
        return super()._sequence(models, rows, states, seed)


# ---- Sequences of one filter, or of several as one batch ----------------------------------------------------------------


def filter_together(
    filters: Sequence[ParticleFilter],
    initial: Sequence[Tensor],
    observations: Tensor | Sequence[Tensor],
    actions: Tensor | None = None,
    lengths: Tensor | None = None,
    observed: Tensor | None = None,
    seeds: Sequence[Tensor | None] | None = None,
) -> list[FilterBeliefs]:
    """Filter by several filters, as one batch where all are of one kind: that saves calls.

    Args:
        filters: R filters. Where all are of one kind, number of particles and scheme of resampling they run as one batch, and
            of that batch the networks as one call if their classes have `stack`; where one differs, or the shape of its
            sequences or first particles does, all run one after the other.
        initial: R tensors (B, N, D). seeds: R tensors, () or (B,).
        observations: (B, T, ...), the same sequences for all filters, or R such tensors.
        actions, lengths, observed: as for `ParticleFilter.forward`, for all filters.

    Returns:
        The beliefs of each filter, the same as one by one, up to the rounding of gradients.
    """
    n = len(filters)
    each = of_each(observations, n)
    check_numbers("filters", n, initial=initial, observations=each, seeds=seeds)
    seeds = [None] * n if seeds is None else seeds
    given = list(zip(filters, initial, each, seeds, strict=True))
    for f, particles, _, _ in given:
        f.check_particles("initial", particles)
    first = filters[0]._kind(), each[0].shape, initial[0].shape
    alike = all((f._kind(), o.shape, i.shape) == first for f, i, o, _ in given)
    if not alike:
        return [f(o, i, actions, lengths, observed, s) for f, i, o, s in given]
    sequences = []
    for f, particles, o, seed in given:
        if lengths is not None and particles.size(1) != f.n_particles:
            raise ValueError(f"initial: expected N = {f.n_particles} particles beside lengths, got {particles.size(1)}")
        sequences.append(prepare(o, actions, lengths, observed, seed, particles.size(0), particles.device))
    codes = [encode(f.likelihood, s.observations) for f, s in zip(filters, sequences)]
    if any(c.shape != codes[0].shape or c.dtype != codes[0].dtype for c in codes):
        return [_run([f], [i], [s], [c])[0] for f, i, s, c in zip(filters, initial, sequences, codes)]
    return _run(filters, initial, sequences, codes)


def _run(
    filters: Sequence[ParticleFilter], initial: Sequence[Tensor], sequences: Sequence[Sequences], codes: Sequence[Tensor]
) -> list[FilterBeliefs]:
    """As one batch; `codes` are those of the observations."""
    first, states, seed = filters[0], torch.cat(list(initial)), torch.cat([s.seed for s in sequences])
    rows, models = _rows(filters, sequences, codes, states), _models(filters, states.size(0))
    return _beliefs(filters, first._sequence(models, rows, states, seed))


def _models(filters: Sequence[ParticleFilter], n_rows: int = 1) -> Models:
    bandwidths = filters[0]._bandwidths()
    if bandwidths is not None and len(filters) > 1:
        each = torch.stack([bandwidths, *(f._bandwidths() for f in filters[1:])])  # type: ignore[list-item]
        bandwidths = each.repeat_interleave(n_rows // len(filters), 0)
    dynamics, likelihood = for_sequence([f.dynamics for f in filters]), for_sequence([f.likelihood for f in filters])
    wraps = all(_wraps_angles(f.dynamics) for f in filters)
    return Models(dynamics, likelihood, bandwidths, wraps)


def _wraps_angles(dynamics: Dynamics) -> bool:
    """What the dynamics say; a hook, or a subclass's `forward`, need not keep to it."""
    overridden = hasattr(dynamics, "for_sequence") and not stands_for_calls(dynamics, "for_sequence")
    return getattr(dynamics, "wraps_angles", False) and not overridden


def _rows(filters: Sequence[ParticleFilter], sequences: Sequence[Sequences], coded: Sequence[Tensor], states: Tensor) -> _Rows:
    """Everything by step, the sequences of a reverse filter from their ends on."""
    T = sequences[0].observations.size(1)
    codes, moves, observed, moving = [], [], [], []
    for f, s, code in zip(filters, sequences, coded):
        order = _backwards if f.reverse else _as_it_is
        codes.append(order(code))
        if s.actions is not None:  # a reverse filter's step to t takes actions[:, t + 1]
            moves.append(order(s.actions).roll(1, 1) if f.reverse else s.actions)
        if s.observed is not None:
            observed.append(order(s.observed))
        if s.lengths is not None:
            last = s.lengths.unsqueeze(1) - int(f.reverse)
            moving.append(order(torch.arange(T, device=states.device) < last))
    draws, noise = _random(filters, [s.seed for s in sequences], range(T), states)
    return _Rows(torch.cat(codes), _steps(moves, T), _steps(observed, T), _steps(moving, T), draws, noise)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _backwards(x: Tensor) -> Tensor:
    return x.flip(1)


def _steps(tensors: list[Tensor], T: int) -> Sequence[Tensor | None]:
    """The steps of all filters' tensors (B, T, ...) together, or as often None."""
    return torch.cat(tensors).unbind(1) if tensors else [None] * T


def _random(filters: Sequence[ParticleFilter], seeds: Sequence[Tensor], times: range, like: Tensor) -> tuple[Tensor, Tensor]:
    """Seeds (T, B) of the draws and noise (T, B, N, K) for these T times, in the filters' order; they depend on a sequence's
    seed and time alone."""
    keys = []
    for stream in range(2):
        by_filter = [(f, time_seeds(seed, times, stream)) for f, seed in zip(filters, seeds)]
        keys.append(torch.cat([_backwards(k) if f.reverse else k for f, k in by_filter]).mT.contiguous())
    shape = (like.size(0), filters[0].n_particles, filters[0].dynamics.noise_size)
    noise = ops.philox_normal(keys[1].flatten(), (len(times) * shape[0], *shape[1:]), dtype=like.dtype)
    return keys[0], noise.unflatten(0, (len(times), shape[0]))


def _beliefs(filters: Sequence[ParticleFilter], fields: Fields) -> list[FilterBeliefs]:
    """Those of each filter, from the steps of all."""
    beliefs = []
    for f, *own in zip(filters, *(x.chunk(len(filters)) for x in fields)):  # one gradient of each field, not one a filter
        states, predicted, posterior, *numbers = (_backwards(x) for x in own) if f.reverse else own
        bandwidths = f.posterior_bandwidth()
        after, before = (Mixture(states, w, bandwidths, f.space) for w in (posterior, predicted))
        beliefs.append(FilterBeliefs(after, before, *numbers))
    return beliefs


def _filled(n: int, states: Tensor, *log_weights: Tensor) -> tuple[Tensor, ...]:
    """Particles (B, N, D) and log-weights (B, N) as n components; those that there are not have log-weight -inf."""
    dead = n - states.size(1)
    if not dead:
        return states, *log_weights
    return _repeated(states, n), *(torch.nn.functional.pad(w, (0, dead), value=-math.inf) for w in log_weights)


def _repeated(x: Tensor, n: int) -> Tensor:
    """x (B, N, ...) as (B, n, ...), filled up with the first entry, which passes no gradient there."""
    missing = n - x.size(1)
    return torch.cat([x, x[:, :1].detach().expand(-1, missing, *x.shape[2:])], 1) if missing else x


def _one_step(x: Tensor | None) -> Tensor | None:
    return x.unsqueeze(1) if x is not None else None
