"""The Mixture Density Particle Smoother: two filters, one from each end, and a network that weighs where they agree.

Idea: the smoothed belief is p(y_t | x) m_f(x) m_b(x) / gamma_t(x), where m_f is what the forward filter predicts from the
past and m_b what the backward filter predicts from the future. Particles are drawn from q, a mixture of both predictions, and
weighed by l(x; y_t, log m_f(x), log m_b(x)) / q(x); the network l stands for that whole product.

Source: "Learning to be Smooth", section 4, equations (mdps_resampling_for_combination) to (smoothed_posterior), and figure
"The Mixture Density Particle Smoother" of the appendix, here in log space. Deviations: the draws from q are stratified, a
fixed number from each prediction (what the paper's experiments do). m_f and m_b have the filters' posterior bandwidths, beta in
equation (mdps_mixture_posteriors), which the smoother's loss so reaches; the authors' program and the appendix's figure have
those of resampling (`density_bandwidths`).
Cost: that of both filters, and for all T steps together one evaluation of l and O(T M N) kernels.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from . import ops
from .filters import FilterBeliefs, MixtureDensityParticleFilter, filter_together
from .mixture import Bandwidth, Mixture
from .sequences import (
    check_numbers,
    check_same_batch,
    encode,
    for_sequence,
    masked,
    of_each,
    prepare,
    returned,
    row_seeds,
    whole_number,
)

Components = tuple[Tensor, Tensor, Tensor]


class SmootherLikelihood(Protocol):
    """The weight network l; an nn.Module, or any callable. It may have `encode` and more, as `mdps.Likelihood`."""

    def __call__(self, particles: Tensor, observation: Tensor, log_forward: Tensor, log_backward: Tensor) -> Tensor:
        """particles (B, M, D), observation (B, ...), log m_f (B, M), log m_b (B, M) -> log l (B, M), up to a constant.

        B is the number of sequences times that of steps. Far from every particle the log-densities are finite but may be
        as low as -1e6: a network should squash them. With true models, log l = log p(y | x) + log m_f + log m_b - log gamma.
        What is returned for a step at which nothing was observed is not used.
        """


class SmootherBeliefs(NamedTuple):
    """What a smoother believes at every time; where t >= lengths, entries are padding: finite, of no meaning."""

    smoothed: Mixture
    """Batch shape (B, T), M components: given all observations."""
    forward: FilterBeliefs
    """Of the forward filter."""
    backward: FilterBeliefs
    """Of the backward filter."""
    collapsed: Tensor
    """bool (B, T): every smoothed particle had weight 0; the weights are then uniform."""


class MixtureDensityParticleSmoother(nn.Module):
    """Mixture Density Particle Smoother (MDPS).

    Args:
        forward_filter: an MDPF.
        backward_filter: an MDPF with reverse=True, over the same space.
        likelihood: the weight network (protocol `SmootherLikelihood`).
        n_particles: M, at least 2; None: as many as both filters have together.
        proposal: "mixture" draws the particles from q = mixing m_f + (1 - mixing) m_b, ceil(M mixing) of them from m_f; they
            are constants, and gradients flow through l and its log-density inputs. "union" takes the predicted particles of
            both filters as they are, M = N_f + N_b: gradients then flow through their places too, and q, which they are
            divided by, stays the density of the mixture.
        posterior_bandwidth: of the smoothed belief, before training: D numbers or one, standard deviations in the units of
            the state (angles: radians). minimum_bandwidth: what it stays above.
        density_bandwidths: "posterior": m_f and m_b have the bandwidths of the filters' beliefs; "resampling": those that the
            filters resample with.
        mixing: share of m_f in q, in (0, 1). The share that is realised, ceil(M mixing) / M, is the one that log q uses.
        divide_by_proposal: False is an ablation: weights l in place of l / q. The particles' crowding then counts as evidence.

    Raises:
        ValueError: filters of different spaces or of the wrong direction, or an option out of its range.
    """

    def __init__(
        self,
        forward_filter: MixtureDensityParticleFilter,
        backward_filter: MixtureDensityParticleFilter,
        likelihood: SmootherLikelihood,
        *,
        n_particles: int | None = None,
        proposal: str = "mixture",
        posterior_bandwidth: float | Sequence[float] = 0.5,
        minimum_bandwidth: float | Sequence[float] = 0.01,
        density_bandwidths: str = "posterior",
        mixing: float = 0.5,
        divide_by_proposal: bool = True,
    ) -> None:
        super().__init__()
        if forward_filter.reverse or not backward_filter.reverse:
            raise ValueError("expected a forward_filter with reverse=False and a backward_filter with reverse=True")
        if forward_filter.space != backward_filter.space:
            raise ValueError(f"backward_filter: expected {forward_filter.space}, got {backward_filter.space}")
        if proposal not in ("mixture", "union"):
            raise ValueError(f"proposal: expected 'mixture' or 'union', got {proposal!r}")
        if density_bandwidths not in ("posterior", "resampling"):
            raise ValueError(f"density_bandwidths: expected 'posterior' or 'resampling', got {density_bandwidths!r}")
        union = forward_filter.n_particles + backward_filter.n_particles
        n_particles = whole_number("n_particles", union if n_particles is None else n_particles, 2)
        if proposal == "union" and n_particles != union:
            raise ValueError(f"n_particles: expected {union}, the particles of both filters, got {n_particles}")
        if not 0 < mixing < 1:
            raise ValueError(f"mixing: expected a number between 0 and 1, got {mixing}")
        self.space, self.n_particles, self.proposal = forward_filter.space, n_particles, proposal
        self.divide_by_proposal, self.density_bandwidths = divide_by_proposal, density_bandwidths
        share = math.ceil(n_particles * mixing - 1e-9)
        self.n_forward = forward_filter.n_particles if proposal == "union" else min(share, n_particles - 1)
        self.forward_filter, self.backward_filter, self.likelihood = forward_filter, backward_filter, likelihood
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
        """Smooth whole sequences: `filter`, then `smooth`.

        Args:
            initial: (B, N_f, D): particles at time 0; they are also what the forward filter predicts there.
            final: (B, N_b, D): particles at each sequence's last time, lengths - 1; what the backward filter predicts there.
                Of both there may be other numbers than of the filters' particles, but not with proposal="union".
            observations, actions, lengths, observed, seed: as for `MixtureDensityParticleFilter.forward`. Where nothing was
                observed, the weight network has no say: l = m_f m_b, which is exact where gamma is uniform.
        """
        return smooth_together([self], [initial], [final], [observations], actions, lengths, observed, [seed])[0]

    def filter(
        self,
        observations: Tensor,
        initial: Tensor,
        final: Tensor,
        actions: Tensor | None = None,
        lengths: Tensor | None = None,
        observed: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> tuple[FilterBeliefs, FilterBeliefs]:
        """Return the beliefs of the forward and the backward filter alone, as a stage that trains only those needs them."""
        return filter_both([self], [initial], [final], [observations], actions, lengths, observed, [seed])[0]

    def smooth(
        self,
        forward: FilterBeliefs,
        backward: FilterBeliefs,
        observations: Tensor,
        lengths: Tensor | None = None,
        observed: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> SmootherBeliefs:
        """Combine both filters' predictions into the smoothed beliefs; arguments as for `forward`.

        A stage that trains the weight network alone calls `filter` under torch.no_grad(), then this.
        """
        return _smooth([self], [(forward, backward)], [observations], lengths, observed, [seed])[0]

    def _predictions(self, beliefs: tuple[FilterBeliefs, FilterBeliefs]) -> list[Mixture]:
        """m_f and m_b."""
        if self.density_bandwidths == "posterior":
            return [b.predicted for b in beliefs]
        filters, predicted = (self.forward_filter, self.backward_filter), [b.predicted for b in beliefs]
        return [Mixture(m.means, m.log_weights, f._bandwidths(), m.space) for f, m in zip(filters, predicted)]

    def _kind(self) -> tuple:
        """What smoothers that run as one batch have in common."""
        options = self.n_particles, self.n_forward, self.proposal, self.divide_by_proposal, self.density_bandwidths
        return type(self), *options, self.forward_filter._kind(), self.backward_filter._kind()


def smooth_together(
    smoothers: Sequence[MixtureDensityParticleSmoother],
    initial: Sequence[Tensor],
    final: Sequence[Tensor],
    observations: Tensor | Sequence[Tensor],
    actions: Tensor | None = None,
    lengths: Tensor | None = None,
    observed: Tensor | None = None,
    seeds: Sequence[Tensor | None] | None = None,
) -> list[SmootherBeliefs]:
    """Smooth by several smoothers, as one batch where they differ in nothing but parameters: that saves calls.

    Args: as for `mdps.filter_together`, with `initial` and `final` for each of R smoothers. Where shapes or kinds differ, all
    run one after the other.

    Returns:
        The beliefs of each smoother, the same as one by one, up to the rounding of gradients.
    """
    n = len(smoothers)
    each = of_each(observations, n)
    check_numbers("smoothers", n, initial=initial, final=final, observations=each, seeds=seeds)
    seeds = [None] * n if seeds is None else seeds
    given = list(zip(smoothers, initial, final, each, seeds, strict=True))
    rows = [_row_seeds(s, i, f, seed) for s, i, f, _, seed in given]
    first = smoothers[0]._kind(), each[0].shape, initial[0].shape, final[0].shape
    if any((s._kind(), o.shape, i.shape, f.shape) != first for s, i, f, o, _ in given):
        return [s(o, i, f, actions, lengths, observed, row) for (s, i, f, o, _), row in zip(given, rows)]
    beliefs = filter_both(smoothers, initial, final, each, actions, lengths, observed, rows)
    return _smooth(smoothers, beliefs, each, lengths, observed, rows)


def filter_both(
    smoothers: Sequence[MixtureDensityParticleSmoother],
    initial: Sequence[Tensor],
    final: Sequence[Tensor],
    observations: Tensor | Sequence[Tensor],
    actions: Tensor | None = None,
    lengths: Tensor | None = None,
    observed: Tensor | None = None,
    seeds: Sequence[Tensor | None] | None = None,
) -> list[tuple[FilterBeliefs, FilterBeliefs]]:
    """Return the beliefs of the forward and the backward filter of each smoother, all filters as one batch.

    Args: as for `smooth_together`, which goes on from here.
    """
    check_numbers("smoothers", len(smoothers), initial=initial, final=final, seeds=seeds)
    given = zip(smoothers, initial, final, [None] * len(smoothers) if seeds is None else seeds)
    keys = [ops.split_seed(_row_seeds(*g), 3).unbind(1) for g in given]
    filters = [s.forward_filter for s in smoothers] + [s.backward_filter for s in smoothers]
    each = [*of_each(observations, len(smoothers))] * 2
    beliefs = filter_together(
        filters, [*initial, *final], each, actions, lengths, observed, [k[i].contiguous() for i in range(2) for k in keys]
    )
    return list(zip(beliefs[: len(smoothers)], beliefs[len(smoothers) :]))


def _smooth(
    smoothers: Sequence[MixtureDensityParticleSmoother],
    beliefs: Sequence[tuple[FilterBeliefs, FilterBeliefs]],
    observations: Sequence[Tensor],
    lengths: Tensor | None,
    observed: Tensor | None,
    seeds: Sequence[Tensor | None],
) -> list[SmootherBeliefs]:
    """All steps of all sequences of all smoothers as the rows of one batch."""
    first, n = smoothers[0], len(smoothers)
    batch, T = beliefs[0][0].predicted.batch_shape
    sequences, codes = [], []
    for smoother, (forward, _), o, seed in zip(smoothers, beliefs, observations, seeds):
        if o.shape[:2] != (batch, T):
            expected = f"(B, T, ...) with (B, T) = {(batch, T)}, that of the beliefs"
            raise ValueError(f"observations: expected shape {expected}, got {tuple(o.shape)}")
        sequences.append(prepare(o, None, lengths, observed, seed, batch, forward.predicted.means.device))
        code = encode(smoother.likelihood, sequences[-1].observations)
        codes.append(code if sequences[-1].observed is None else masked(code, sequences[-1].observed))
    if any(code.shape != codes[0].shape or code.dtype != codes[0].dtype for code in codes):
        each = zip(smoothers, beliefs, observations, seeds)
        return [_smooth([s], [pair], [o], lengths, observed, [seed])[0] for s, pair, o, seed in each]
    m_f, m_b = map(_components, zip(*(s._predictions(pair) for s, pair in zip(smoothers, beliefs))))
    x = _propose(first, m_f, m_b, torch.cat([s.seed for s in sequences]), T)
    log_f, log_b, log_q = ops.two_filter_log_prob(
        x, *m_f, *m_b, n_angular=first.space.n_angular, mixing=first.n_forward / first.n_particles
    )
    log_l = for_sequence([s.likelihood for s in smoothers])(x, torch.cat(codes).flatten(0, 1), log_f, log_b)
    log_l = returned("likelihood", log_l, log_q.shape, log_q.dtype)
    if sequences[0].observed is not None:
        seen = torch.cat([s.observed for s in sequences if s.observed is not None]).view(-1, 1)
        log_l = torch.where(seen, log_l, log_f + log_b)
    log_weights, log_sum, _ = ops.normalize_log_weights(log_l - log_q.detach() if first.divide_by_proposal else log_l)
    collapsed = (log_sum == -math.inf).view(n, batch, T)
    if lengths is not None:
        collapsed = collapsed & (torch.arange(T, device=x.device) < lengths.unsqueeze(1))
    x, log_weights = x.unflatten(0, (n, batch, T)), log_weights.unflatten(0, (n, batch, T))
    return [
        SmootherBeliefs(Mixture(means, logs, s.posterior_bandwidth(), s.space), *pair, c)
        for s, pair, c, means, logs in zip(smoothers, beliefs, collapsed.unbind(), x.unbind(), log_weights.unbind())
    ]


def _row_seeds(smoother: MixtureDensityParticleSmoother, initial: Tensor, final: Tensor, seed: Tensor | None) -> Tensor:
    smoother.forward_filter.check_particles("initial", initial)
    smoother.backward_filter.check_particles("final", final)
    check_same_batch(initial, final)
    if smoother.proposal == "union":
        for name, filter_, particles in (
            ("initial", smoother.forward_filter, initial),
            ("final", smoother.backward_filter, final),
        ):
            if particles.size(1) != filter_.n_particles:
                expected = f"N = {filter_.n_particles} particles, those of the filter, beside proposal='union'"
                raise ValueError(f"{name}: expected {expected}, got {particles.size(1)}")
    return row_seeds(seed, initial.size(0), initial.device)


def _propose(s: MixtureDensityParticleSmoother, m_f: Components, m_b: Components, seed: Tensor, T: int) -> Tensor:
    """Particles (B T, M, D) from q: the first n_forward from m_f, the others from m_b."""
    if s.proposal == "union":
        for name, filter_, (means, logs, _) in (("forward", s.forward_filter, m_f), ("backward", s.backward_filter, m_b)):
            n, known = means.size(1), logs.device.type == "cpu" and not torch.compiler.is_compiling()
            if n != filter_.n_particles or (known and (logs == -math.inf).any()):
                expected = f"{filter_.n_particles} predicted particles at every time beside proposal='union'"
                raise ValueError(f"{name}: expected {expected}, got other numbers of first particles")
        return torch.cat([m_f[0], m_b[0]], 1)
    seed = ops.split_seed(seed, 3)[:, 2]
    n_angular, counts = s.space.n_angular, (s.n_forward, s.n_particles - s.n_forward)
    draws = [
        ops.mixture_resample(*m, ops.split_seed(seed, T, stream=i).flatten(), counts[i], n_angular=n_angular)[0]
        for i, m in enumerate((m_f, m_b))
    ]
    return torch.cat(draws, 1)


def _components(mixtures: Sequence[Mixture]) -> Components:
    """Means (B T, N, D), log-weights (B T, N), bandwidths (D), of several mixtures (B T, D)."""
    first = mixtures[0]
    if len(mixtures) == 1:
        return first.means.flatten(0, 1), first.log_weights.flatten(0, 1), first.bandwidths
    means, log_weights = (torch.cat(x).flatten(0, 1) for x in zip(*((m.means, m.log_weights) for m in mixtures)))
    bandwidths = torch.stack([m.bandwidths for m in mixtures]).repeat_interleave(len(means) // len(mixtures), 0)
    return means, log_weights, bandwidths
