"""The methods that the bearings-only experiment compares, by name: their models, where they start and how they are trained.

All have the networks of the paper (appendix, "Bearings Only Tracking Task"); they differ in the filter or smoother around them.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from configuration import ConfigurationError
from staged import Stage
from torch import Tensor, nn

import mdps
from mdps import bearings_only as task
from mdps import metrics, ops
from mdps.networks import ObservationEncoder, PoseLikelihood, PoseSmootherLikelihood, ResidualDynamics, ResidualMean

SPACE = mdps.StateSpace(linear=("x", "y"), angular=("heading",))
TRANSITION_BANDWIDTHS = (1.0, 1.0, 1.25)
"""Of the classical smoothers: metres and radians, hand-tuned in the paper."""
MINIMUM_BANDWIDTH = (0.1, 0.1, math.sqrt(0.001))
FIRST_HEADING_BANDWIDTH = math.sqrt(0.03)
"""Radians, as our bandwidths are; the authors' numbers are 1 / kappa, and ours their roots."""
FIRST_RESAMPLING_BANDWIDTH = 0.75
"""Metres."""
RELEASED_RESAMPLING_BANDWIDTH = 2.0
"""Metres, of the authors' smoother. Its rates hardly move it: particles are scattered by 2 m in every step of about 1 m."""


@dataclasses.dataclass(frozen=True)
class Method:
    """One method: what it is called in figures, the beliefs that it has, its model and the stages of its training."""

    title: str
    beliefs: tuple[str, ...]
    """Some of "forward", "backward", "smoothed"; the last one is the method's result."""
    build: Callable[[Any], nn.Module]
    """Makes the filter or smoother from the run's configuration."""
    stages: Callable[[Any], list[Stage]]
    learns_likelihood: bool = True
    """False: it knows the true likelihood of a bearing, and sees bearings instead of their codes."""
    resampling_bandwidth: float = 0.0
    """Where the bandwidths begin that it resamples with, in position, metres; 0: it has none of their own."""


def fitting(c: Any, given: dict[str, Any]) -> Any:
    """Return the configuration of a run without what a preset says and the method does not have.

    Raises:
        ConfigurationError: such an option was given.
    """
    if METHODS[c.method].resampling_bandwidth or not c.resampling_bandwidth:
        return c
    if given.get("resampling_bandwidth"):
        what = f"{c.method} has no resampled mixtures with bandwidths of their own"
        raise ConfigurationError(f"resampling_bandwidth: {what}; expected 0, got {c.resampling_bandwidth}")
    return dataclasses.replace(c, resampling_bandwidth=0.0)


class Tracker(nn.Module):
    """A method with its observation encoder and its random start."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.c, self.method = c, METHODS[c.method]
        self.encoder = ObservationEncoder() if self.method.learns_likelihood else nn.Identity()
        self.estimator = self.method.build(c)

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """The parameters by what the stages call them; every parameter is in one group, "untrained" in no stage."""
        names = "filters", "resampling", "posterior", "smoother", "output", "untrained"
        groups: dict[str, list[nn.Parameter]] = {name: [] for name in names}
        for name, parameter in self.named_parameters():
            filter_ = "_filter." in name or "encoder." in name or "transition." in name or "smoothed" not in self.method.beliefs
            if ".choice." in name:
                groups["untrained"].append(parameter)
            elif "resampling_bandwidth" in name:
                groups["resampling"].append(parameter)
            elif "posterior_bandwidth" in name:
                groups["posterior" if filter_ else "output"].append(parameter)
            else:
                groups["filters" if filter_ else "smoother"].append(parameter)
        return groups

    def beliefs(
        self, states: Tensor, observations: Tensor, seed: int, names: tuple[str, ...] | None = None
    ) -> dict[str, mdps.Mixture]:
        """Run the filters, and the smoother if `names` asks for it, on sequences with true starts and seeded particles.

        states (B, T, 3), observations (B, T); the result has mixtures of batch shape (B, T).
        """
        return beliefs_together([self], [states], [observations], [seed], names)[0]

    def losses(self, batch: tuple[Tensor, Tensor], names: tuple[str, ...], seed: int) -> dict[str, Tensor]:
        """-log m(truth) of the named beliefs, averaged over the labelled steps of a batch (states, observations)."""
        return self.losses_together([self], [batch], names, [seed])[0]

    @staticmethod
    def losses_together(
        trackers: "Sequence[Tracker]",
        batches: Sequence[tuple[Tensor, Tensor]],
        names: tuple[str, ...],
        seeds: Sequence[int],
        rows: slice = slice(None),
    ) -> list[dict[str, Tensor]]:
        """The losses of several trackers of one method, each with its batch and seed; `rows`: of these sequences alone."""
        if names == ("transition",):
            return [{"transition": t.transition_loss(states[rows])} for t, (states, _) in zip(trackers, batches, strict=True)]
        states, observations = zip(*batches)
        labelled = slice(None, None, trackers[0].c.label_every)
        return [
            {
                n: metrics.negative_log_likelihood(
                    at_times(beliefs[n], labelled), truth[rows, labelled], density_floor=tracker.c.density_floor
                ).mean()
                for n in names
            }
            for tracker, beliefs, truth in zip(
                trackers, beliefs_together(trackers, states, observations, seeds, names, rows), states, strict=True
            )
        ]

    def transition_loss(self, states: Tensor) -> Tensor:
        """The squared error of the transition models on all pairs of true states (B, T, 3), labelled or not."""
        e, flipped = self.estimator, states.flip(1)
        loss = mdps.transition_loss(e.transition, states, SPACE).mean()
        if "backward" in self.method.beliefs:
            loss = loss + mdps.transition_loss(e.backward_filter.dynamics, flipped, SPACE).mean()
        return loss


def beliefs_together(
    trackers: Sequence[Tracker],
    states: Sequence[Tensor],
    observations: Sequence[Tensor],
    seeds: Sequence[int],
    names: tuple[str, ...] | None = None,
    rows: slice = slice(None),
) -> list[dict[str, mdps.Mixture]]:
    """`Tracker.beliefs` of several trackers of one method, each with its sequences and seed, as one batch.

    With `rows` the beliefs about these sequences alone, the same as among all.
    """
    method, estimators = trackers[0].method, [t.estimator for t in trackers]
    keys = [_row_keys(s, x)[rows].unbind(1) for s, x in zip(seeds, states, strict=True)]
    states, codes = [x[rows] for x in states], [t.encoder(o[rows]) for t, o in zip(trackers, observations, strict=True)]
    run_keys = [key[2].contiguous() for key in keys]
    initial, final = [], []
    for t, x, (start_key, final_key, _) in zip(trackers, states, keys):
        if "forward" in method.beliefs:
            initial.append(around(x[:, 0], t.c.n_particles, t.c.position_noise, t.c.heading_concentration, start_key))
        if "backward" in method.beliefs:
            final.append(anywhere(len(x), t.c.n_particles, final_key.contiguous()).to(x))
    if len(method.beliefs) == 1:
        beliefs = mdps.filter_together(estimators, initial or final, codes, seeds=run_keys)
        return [{method.beliefs[0]: b.posterior} for b in beliefs]
    if not method.learns_likelihood:
        starts = zip(initial, final, strict=True) if final else zip(initial)
        return [_classical(e, code, start, key) for e, code, start, key in zip(estimators, codes, starts, run_keys)]
    if names is None or "smoothed" in names:
        both = mdps.smooth_together(estimators, initial, final, codes, seeds=run_keys)
        return [{"forward": b.forward.posterior, "backward": b.backward.posterior, "smoothed": b.smoothed} for b in both]
    pairs = mdps.filter_both(estimators, initial, final, codes, seeds=run_keys)
    return [{"forward": f.posterior, "backward": b.posterior} for f, b in pairs]


def _row_keys(seed: int, states: Tensor) -> Tensor:
    """Seeds of each sequence's initial particles, final particles and run, (B, 3)."""
    return ops.split_seed(ops.split_seed(torch.tensor(seed, device=states.device), len(states)), 3)


def _classical(estimator: nn.Module, bearings: Tensor, start: Sequence[Tensor], seed: Tensor) -> dict[str, mdps.Mixture]:
    beliefs = estimator(bearings, *start, seed=seed)
    named = {"forward": beliefs.forward.posterior, "smoothed": beliefs.smoothed}
    return named | {"backward": beliefs.backward.posterior} if len(start) > 1 else named


def at_times(belief: mdps.Mixture, times: slice) -> mdps.Mixture:
    """The mixtures of some of the time steps."""
    return mdps.Mixture(belief.means[:, times], belief.log_weights[:, times], belief.bandwidths, belief.space)


def around(states: Tensor, n: int, position_noise: float, heading_concentration: float, seed: Tensor) -> Tensor:
    """N particles around each true state (B, 3), by seed (B,): Gaussian positions, von Mises headings -> (B, N, 3)."""
    position_key, heading_key = (key.contiguous() for key in ops.split_seed(seed.contiguous(), 2).unbind(-1))
    position = states[:, None, :2] + position_noise * ops.philox_normal(position_key, (len(states), n, 2))
    kappa = torch.full((len(states), n), heading_concentration, device=states.device)
    heading = states[:, None, 2] + ops.philox_von_mises(heading_key, kappa)
    return SPACE.wrap(torch.cat([position, heading[..., None]], -1))


def anywhere(batch: int, n: int, seed: Tensor) -> Tensor:
    """N particles uniform in the arena for each sequence, by seed (B,): (B, N, 3)."""
    extent = torch.tensor([task.ARENA, task.ARENA, math.pi], device=seed.device)
    return (2 * ops.philox_uniform(seed, (batch, n, 3)) - 1) * extent


# ---- Models -------------------------------------------------------------------------------------------------------------


def _options(c: Any, resampling: str) -> dict[str, Any]:
    return {
        "resampling": resampling if c.resampling == "method" else c.resampling,
        "posterior_bandwidth": first_bandwidths(c)["posterior"],
        "minimum_bandwidth": MINIMUM_BANDWIDTH,
    }


def _networks() -> tuple[ResidualDynamics, PoseLikelihood]:
    return ResidualDynamics(), PoseLikelihood(nn.Identity())  # the tracker encodes


def _baseline(kind: type[mdps.ParticleFilter], resampling: str | None, **more: Any) -> Callable[[Any], nn.Module]:
    """A filter of this kind; `resampling` None: it has no scheme."""

    def build(c: Any) -> nn.Module:
        options = _options(c, resampling or "stratified") | more
        if resampling is None:
            del options["resampling"]
            if c.resampling != "method":
                raise ConfigurationError(f"resampling: {c.method} has no scheme; expected method, got {c.resampling!r}")
        return kind(SPACE, *_networks(), c.n_particles, **options)

    return build


def first_bandwidths(c: Any) -> dict[str, tuple[float, float, float] | None]:
    """Where the bandwidths of a run begin, metres and radians: of its beliefs, and of its resampled mixtures, None where these
    have none of their own."""
    posterior, own = c.posterior_bandwidth, METHODS[c.method].resampling_bandwidth
    resampling = c.resampling_bandwidth or own
    return {
        "posterior": (posterior, posterior, FIRST_HEADING_BANDWIDTH),
        "resampling": (resampling, resampling, FIRST_HEADING_BANDWIDTH) if own else None,
    }


def _mdpf(c: Any, resampling: str, reverse: bool = False) -> mdps.MixtureDensityParticleFilter:
    options, own = _options(c, resampling), first_bandwidths(c)["resampling"]
    if own is not None:
        if own[0] <= MINIMUM_BANDWIDTH[0]:
            raise ConfigurationError(f"resampling_bandwidth: expected 0 or more than {MINIMUM_BANDWIDTH[0]}, got {own[0]}")
        options["resampling_bandwidth"] = own
    return mdps.MixtureDensityParticleFilter(SPACE, *_networks(), c.n_particles, reverse=reverse, **options)


def _mdps(**more: Any) -> Callable[[Any], nn.Module]:
    def build(c: Any) -> nn.Module:
        options = _options(c, "stratified")
        return mdps.MixtureDensityParticleSmoother(
            _mdpf(c, "stratified"),
            _mdpf(c, "stratified", reverse=True),
            PoseSmootherLikelihood(nn.Identity()),
            **more,
            posterior_bandwidth=options["posterior_bandwidth"],
            minimum_bandwidth=MINIMUM_BANDWIDTH,
        )

    return build


class TrueLikelihood(nn.Module):
    """The likelihood that the simulator draws bearings from (protocol `mdps.Likelihood`)."""

    def forward(self, particles: Tensor, bearing: Tensor) -> Tensor:
        return task.observation_log_likelihood(particles, bearing.unsqueeze(1))


class UntrainedChoice(mdps.TruncatedGradientParticleFilter):
    """TG-PF as the authors' program has it: a second measurement network chooses the particles.

    No gradient passes the choice, and none of the loss needs that network, so it stays as it was made.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.choice = PoseLikelihood(nn.Identity())

    def _kind(self) -> tuple:
        return *super()._kind(), id(self)  # each has its own choice

    def _update(
        self, models: Any, time: int, seed: Tensor, predicted: Any, ancestors: Tensor, code: Tensor, observed: Any
    ) -> Any:
        with torch.no_grad():
            self._chosen_by = predicted.log_weights + self.choice(predicted.states, code)
        return super()._update(models, time, seed, predicted, ancestors, code, observed)

    def _resample(self, models: Any, posterior: Any, seed: Tensor) -> tuple[Any, Tensor]:
        return super()._resample(models, posterior._replace(log_weights=self._chosen_by), seed)


def _classical_filter(c: Any, resampling: str, reverse: bool = False) -> mdps.ParticleFilter:
    """A bootstrap filter whose dynamics' density can be evaluated: a learned mean, and the paper's hand-tuned deviations."""
    dynamics = mdps.KernelDynamics(ResidualMean(), TRANSITION_BANDWIDTHS, SPACE)
    options = _options(c, resampling)
    return mdps.TruncatedGradientParticleFilter(SPACE, dynamics, TrueLikelihood(), c.n_particles, reverse=reverse, **options)


def _ffbs(resampling: str) -> Callable[[Any], nn.Module]:
    def build(c: Any) -> nn.Module:
        filter_, options = _classical_filter(c, resampling), _options(c, resampling)
        del options["resampling"]
        return mdps.ForwardFilterBackwardSmoother(filter_, filter_.dynamics, **options)

    return build


def _tfs(c: Any) -> nn.Module:
    """Particles of the backward filter start uniformly, which is the artificial prior that the smoother divides by."""
    forward, backward = (_classical_filter(c, "stratified", reverse) for reverse in (False, True))
    options = _options(c, "stratified")
    del options["resampling"]
    return mdps.TwoFilterSmoother(forward, backward, forward.dynamics, **options)


# ---- Stages -------------------------------------------------------------------------------------------------------------


def _filter_stages(belief: str) -> Callable[[Any], list[Stage]]:
    """Everything but the posterior bandwidth, then that alone: wide kernels would hide models that have learned nothing."""

    def stages(c: Any) -> list[Stage]:
        return [
            Stage("filter", {"filters": 1e-3, "resampling": 1e-4}, {belief: 1.0}),
            Stage("posterior bandwidth", {"posterior": 2.5e-4}, {belief: 1.0}),
        ]

    return stages


def _shared_bandwidth_stages(c: Any) -> list[Stage]:
    return [Stage("filter", {"filters": 1e-3, "posterior": 1e-4}, {"forward": 1.0})]


def _classical_stages(c: Any) -> list[Stage]:
    """The transition by squared error, outside of the smoother, which has no gradient to learn it; then the bandwidths."""
    return [
        Stage("transition", {"filters": 1e-3}, {"transition": 1.0}),
        Stage("posterior bandwidths", {"posterior": 1e-3, "output": 1e-3}, {"forward": 0.5, "smoothed": 0.5}),
    ]


def _two_filter_stages(c: Any) -> list[Stage]:
    transition, bandwidths = _classical_stages(c)
    return [transition, dataclasses.replace(bandwidths, losses={"forward": 0.5, "backward": 0.5, "smoothed": 0.5})]


def _smoother_stages(c: Any) -> list[Stage]:
    """The paper's three stages, or the four of the authors' program, which learns the filters' posterior bandwidths apart."""
    both, smoothed = {"forward": 0.5, "backward": 0.5}, {"smoothed": 1.0}
    everything = {"filters": 1e-4, "smoother": 1e-4, "resampling": 1e-5, "posterior": 1e-5, "output": 1e-5}
    if c.stages == "code":
        return [
            Stage("filters", {"filters": 1e-3, "resampling": 1e-5}, both),
            Stage("posterior bandwidths", {"posterior": 1e-3}, both),
            Stage("smoother", {"smoother": 1e-3, "output": 1e-4}, smoothed),
            Stage("everything", everything, smoothed),
        ]
    return [
        Stage("filters", {"filters": 1e-3, "resampling": 1e-5, "posterior": 1e-3}, both),
        Stage("smoother", {"smoother": 1e-3, "output": 1e-3}, smoothed),
        Stage("everything", everything, smoothed),
    ]


def _released_stages(c: Any) -> list[Stage]:
    """The same, but the smoother's loss has no gradient to the filters' posterior bandwidths: m_f and m_b have others."""
    *before, last = _smoother_stages(c)
    return [*before, dataclasses.replace(last, rates={name: rate for name, rate in last.rates.items() if name != "posterior"})]


# ---- The table ----------------------------------------------------------------------------------------------------------

_TG, _SR = mdps.TruncatedGradientParticleFilter, mdps.SoftResamplingParticleFilter
_FORWARD, _BACKWARD, _ALL = ("forward",), ("backward",), ("forward", "backward", "smoothed")

METHODS: dict[str, Method] = {
    "tg-pf-multinomial": Method("TG-PF\nmultinomial", _FORWARD, _baseline(_TG, "multinomial"), _filter_stages("forward")),
    "tg-pf": Method("TG-PF\nstratified", _FORWARD, _baseline(_TG, "stratified"), _filter_stages("forward")),
    "tg-pf-untrained-choice": Method(
        "TG-PF\nuntrained choice", _FORWARD, _baseline(UntrainedChoice, "stratified"), _filter_stages("forward")
    ),
    "sr-pf-multinomial": Method(
        "SR-PF\nmultinomial", _FORWARD, _baseline(_SR, "multinomial", detach_particles=True), _filter_stages("forward")
    ),
    "sr-pf": Method(
        "SR-PF\nstratified", _FORWARD, _baseline(_SR, "stratified", detach_particles=True), _filter_stages("forward")
    ),
    "sr-pf-attached": Method("SR-PF\nattached", _FORWARD, _baseline(_SR, "stratified"), _filter_stages("forward")),
    "concrete-pf": Method("Concrete\nPF", _FORWARD, _baseline(mdps.ConcreteParticleFilter, None), _filter_stages("forward")),
    "ot-pf": Method("OT-PF", _FORWARD, _baseline(mdps.OptimalTransportParticleFilter, None), _filter_stages("forward")),
    "mdpf-multinomial": Method(
        "MDPF\nmultinomial",
        _FORWARD,
        lambda c: _mdpf(c, "multinomial"),
        _filter_stages("forward"),
        resampling_bandwidth=FIRST_RESAMPLING_BANDWIDTH,
    ),
    "mdpf-residual": Method(
        "MDPF\nresidual",
        _FORWARD,
        lambda c: _mdpf(c, "residual"),
        _filter_stages("forward"),
        resampling_bandwidth=FIRST_RESAMPLING_BANDWIDTH,
    ),
    "mdpf": Method(
        "MDPF\nstratified",
        _FORWARD,
        lambda c: _mdpf(c, "stratified"),
        _filter_stages("forward"),
        resampling_bandwidth=FIRST_RESAMPLING_BANDWIDTH,
    ),
    "mdpf-shared-bandwidth": Method(
        "MDPF\none bandwidth", _FORWARD, lambda c: _mdpf(c, "stratified"), _shared_bandwidth_stages
    ),
    "mdpf-backward": Method(
        "MDPF\nBackward",
        _BACKWARD,
        lambda c: _mdpf(c, "stratified", reverse=True),
        _filter_stages("backward"),
        resampling_bandwidth=FIRST_RESAMPLING_BANDWIDTH,
    ),
    "ffbs-multinomial": Method(
        "FFBS\nmultinomial", ("forward", "smoothed"), _ffbs("multinomial"), _classical_stages, learns_likelihood=False
    ),
    "ffbs": Method(
        "FFBS\nstratified", ("forward", "smoothed"), _ffbs("stratified"), _classical_stages, learns_likelihood=False
    ),
    "tfs": Method("TFS\nstratified", _ALL, _tfs, _two_filter_stages, learns_likelihood=False),
    "mdps": Method("MDPS", _ALL, _mdps(), _smoother_stages, resampling_bandwidth=FIRST_RESAMPLING_BANDWIDTH),
    "mdps-union": Method(
        "MDPS\nunion",
        _ALL,
        _mdps(proposal="union"),
        _smoother_stages,
        resampling_bandwidth=FIRST_RESAMPLING_BANDWIDTH,
    ),
    "mdps-released": Method(
        "MDPS\nas released",
        _ALL,
        _mdps(proposal="union", density_bandwidths="resampling"),
        _released_stages,
        resampling_bandwidth=RELEASED_RESAMPLING_BANDWIDTH,
    ),
    "mdps-without-proposal": Method(
        "MDPS\nwithout 1/q",
        _ALL,
        _mdps(divide_by_proposal=False),
        _smoother_stages,
        resampling_bandwidth=FIRST_RESAMPLING_BANDWIDTH,
    ),
}
"""In the order of the figure. "mdpf" has two bandwidths, as in the authors' program (called A-MDPF elsewhere);
"mdpf-shared-bandwidth" resamples from the belief itself. "mdps-union" draws as the authors' program does; "mdps-released"
also begins to resample as wide as that, and takes m_f and m_b with those bandwidths; "mdps-without-proposal" is an ablation,
whose weights are not divided by q. "tg-pf-untrained-choice" explains the paper's TG-PF. FFBS and TFS know the true
likelihood."""


def stages(c: Any) -> list[Stage]:
    """The stages of training of the configuration's method; groups of parameters are those of `Tracker.groups`."""
    all_ = METHODS[c.method].stages(c)
    all_[0] = dataclasses.replace(all_[0], max_epochs=c.first_stage_epochs)
    return [dataclasses.replace(s, rates={k: r * c.rate_factor for k, r in s.rates.items()}) for s in all_]
