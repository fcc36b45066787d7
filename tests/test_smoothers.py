import copy
import math

import pytest
import torch
from linear_gaussian import (
    GaussianLikelihood,
    Gaussians,
    LinearDynamics,
    SmoothedLikelihood,
    kalman,
    model,
    rauch_tung_striebel,
    simulate,
    stationary,
    two_filters,
)
from test_filters import (
    POSE,
    Distance,
    assert_same,
    names,
    pose_data,
    pose_filter,
    tensors,
    within,
)
from torch import nn
from torch.distributions import MultivariateNormal

import mdps


class Agreement(Distance):
    def forward(self, particles, observation, log_forward, log_backward):
        return super().forward(particles, observation) + 0.5 * (log_forward + log_backward).clamp(min=-30)


def pose_smoother(N=7, **options):
    return mdps.MixtureDensityParticleSmoother(pose_filter(N), pose_filter(N, reverse=True), Agreement(), **options)


def smoother_data(**options):
    return pose_data(**options) | {"final": pose_data(seed=1)["initial"]}


def smoothed_tensors(beliefs):
    yield from (beliefs.smoothed.means, beliefs.smoothed.log_weights, beliefs.collapsed)
    yield from (*tensors(beliefs.forward), *tensors(beliefs.backward))


# ---- Against the exact smoother -----------------------------------------------------------------------------------------


def union_limit(m, y, resampling, predicted):
    """What the union tends to as N grows, by sums over a grid.

    Its particles have the mean density of both filters' particles, without the kernels that m_f, m_b and q add to it.
    """
    D = m.A.size(0)
    x = torch.cartesian_prod(*[torch.linspace(-7, 7, 281, dtype=torch.float64)] * D).view(-1, D)
    f, b = kalman(m, y, resampling)[0], kalman(m.reversed(), y.flip(0), resampling)[0]
    kernels, prior = predicted**2 * torch.eye(D, dtype=torch.float64), MultivariateNormal(torch.zeros_like(x[0]), m.S)
    means, covariances = [], []
    for t in range(y.size(0)):
        sides = [(f.means[t], f.covariances[t]), (b.means[-1 - t], b.covariances[-1 - t])]
        places = sum(MultivariateNormal(mean, cov).log_prob(x).exp() for mean, cov in sides)
        m_f, m_b = (MultivariateNormal(mean, cov + kernels).log_prob(x).exp() for mean, cov in sides)
        likelihood = MultivariateNormal(x @ m.C.mT, m.R).log_prob(y[t]).exp()
        share = places / (m_f + m_b) * likelihood * m_f * m_b / prior.log_prob(x).exp()
        share = share / share.sum()
        means.append(share @ x)
        covariances.append((share * (x - means[-1]).mT) @ (x - means[-1]))
    return Gaussians(torch.stack(means), torch.stack(covariances))


@torch.no_grad()
def run_linear(D, N, B, *, T=5, proposal="mixture"):
    """Returns the mean and variance of the smoothed particles, and what they tend to for kernels of these bandwidths."""
    m, resampling, predicted, smoothed = model(D), 0.1, 0.3, 0.25
    y = simulate(m, T)
    options = {
        "posterior_bandwidth": predicted,
        "resampling_bandwidth": resampling,
        "minimum_bandwidth": 0.0,
    }
    filters = [
        mdps.MixtureDensityParticleFilter(
            names(D),
            LinearDynamics(x),
            GaussianLikelihood(x),
            N,
            reverse=reverse,
            **options,
        )
        for x, reverse in ((m, False), (m.reversed(), True))
    ]
    s = mdps.MixtureDensityParticleSmoother(
        *filters,
        SmoothedLikelihood(m),
        posterior_bandwidth=smoothed,
        proposal=proposal,
        minimum_bandwidth=0.0,
    )
    initial, final = stationary(m, B, N, seed=1), stationary(m, B, N, seed=2)
    belief = s(y.float().expand(B, T, -1), initial, final, seed=torch.tensor(7)).smoothed
    exact = {"mixture": two_filters, "union": union_limit}[proposal](m, y, resampling, predicted)
    got = belief.mean.double(), belief.variance.double() - smoothed**2
    return got, (exact.means, exact.covariances.diagonal(dim1=-2, dim2=-1))


@pytest.mark.parametrize("D", [1, 2, 3])
def test_two_filters_are_the_smoother(D):
    """The oracle of this file, against another: without kernels it is the Rauch-Tung-Striebel smoother."""
    m = model(D)
    torch.testing.assert_close(two_filters(m, simulate(m, 7)), rauch_tung_striebel(m, simulate(m, 7)))


@pytest.mark.parametrize("D", [1, 2])
def test_a_union_without_kernels_is_the_smoother(D):
    """The other oracle: where q has no kernels, particles do not lack them."""
    m = model(D)
    y = simulate(m, 5)
    torch.testing.assert_close(union_limit(m, y, 0.1, 0.0), two_filters(m, y, 0.1, 0.0))


@pytest.mark.parametrize("D, proposal", [(1, "mixture"), (2, "mixture"), (3, "mixture"), (1, "union"), (2, "union")])
def test_converges_to_the_exact_smoother(D, proposal):
    errors = []
    for N in (60, 960):
        got, want = run_linear(D, N, 150, proposal=proposal)
        errors.append([((g - w) ** 2).mean().sqrt() for g, w in zip(got, want, strict=True)])
        if N == 960:
            for g, w in zip(got, want, strict=True):
                within(g, w, bias=5 / N)
    for few, many in zip(*errors, strict=True):
        assert 2.9 < few / many < 5.5  # 4 for N^-1/2


def test_narrow_kernels_approach_rauch_tung_striebel():
    m = model(2)
    y = simulate(m, 5)
    want, near, wide = (
        rauch_tung_striebel(m, y),
        two_filters(m, y, 0.05, 0.05),
        two_filters(m, y, 0.1, 0.3),
    )
    assert (near.means - want.means).abs().max() < 0.02 < (wide.means - want.means).abs().max()


def test_union_finds_the_smoothed_mean():
    """Its particles lack the kernels of q, so only the centre is that of the exact smoother, and loosely."""
    (mean, _), _ = run_linear(1, 400, 100, proposal="union")
    within(mean, two_filters(model(1), simulate(model(1), 5), 0.1, 0.3).means, bias=0.02)


# ---- Weights and gradients ----------------------------------------------------------------------------------------------


def mixture_log_prob(x, mixture, t):
    """Float64 by hand: x (B, M, 3), components of time t."""
    delta = x.double().unsqueeze(2) - mixture.means[:, t].double().unsqueeze(1)
    sigma, kappa = mixture.bandwidths.double()[:2], mixture.bandwidths.double()[2] ** -2
    kernel = (-0.5 * (delta[..., :2] / sigma) ** 2 - sigma.log() - 0.5 * math.log(2 * math.pi)).sum(-1)
    kernel = kernel + kappa * delta[..., 2].cos() - kappa - torch.special.i0e(kappa).log() - math.log(2 * math.pi)
    return torch.logsumexp(mixture.log_weights[:, t].double().unsqueeze(1) + kernel, -1)


def predictions(s, beliefs):
    """m_f and m_b, with the bandwidths that the smoother takes."""
    predicted = beliefs.forward.predicted, beliefs.backward.predicted
    if s.density_bandwidths == "posterior":
        return predicted
    widths = s.forward_filter.resampling_bandwidth(), s.backward_filter.resampling_bandwidth()
    return [mdps.Mixture(m.means, m.log_weights, width, POSE) for m, width in zip(predicted, widths)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"proposal": "union"},
        {"n_particles": 9, "mixing": 0.3},
        {"n_particles": 5},
        {"density_bandwidths": "resampling"},
        {"proposal": "union", "density_bandwidths": "resampling"},
    ],
)
def test_weights_are_l_over_q(options):
    s, data = pose_smoother(**options), smoother_data()
    share = {9: 3 / 9, 5: 3 / 5, 14: 0.5}[s.n_particles]
    beliefs = s(**data)
    for t in range(6):
        x = beliefs.smoothed.means[:, t]
        log_f, log_b = (mixture_log_prob(x, m, t) for m in predictions(s, beliefs))
        log_q = torch.logaddexp(log_f + math.log(share), log_b + math.log1p(-share))
        log_l = s.likelihood(x, 0.5 * data["observations"][:, t], log_f.float(), log_b.float()).double()
        want = torch.log_softmax(log_l - log_q, -1)
        torch.testing.assert_close(beliefs.smoothed.log_weights[:, t].double(), want, rtol=1e-4, atol=1e-4)


def test_what_gradients_flow_through():
    s, data = pose_smoother(), smoother_data()
    beliefs = s(**data)
    assert not beliefs.smoothed.means.requires_grad
    loss = -beliefs.smoothed.log_prob(data["observations"]).mean()
    loss.backward()
    for name, p in s.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and (p.grad != 0).any(), name

    def weights():
        """The same weights by hand, q a constant."""
        x = beliefs.smoothed.means
        parts = [mixture_log_prob(x[:, 2], f.predicted, 2) for f in (beliefs.forward, beliefs.backward)]
        log_q = torch.logaddexp(*parts).detach()
        observation = 0.5 * data["observations"][:, 2]
        log_l = Distance.forward(s.likelihood, x[:, 2], observation).double() + 0.5 * (parts[0] + parts[1]).clamp(min=-30)
        return torch.log_softmax(log_l - log_q, -1)

    beliefs = s(**data)
    g = torch.randn(4, 14, generator=torch.Generator().manual_seed(0))
    wrt = list(s.forward_filter.parameters()) + list(s.backward_filter.parameters()) + [s.likelihood.scale]
    want = torch.autograd.grad((weights() * g).sum(), wrt, retain_graph=True)
    got = torch.autograd.grad((beliefs.smoothed.log_weights[:, 2] * g).sum(), wrt)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def leaves(mixture):
    """The same mixture of tensors that have a gradient."""
    parts = mixture.means, mixture.log_weights, mixture.bandwidths
    return mdps.Mixture(*(x.detach().requires_grad_() for x in parts), mixture.space)


def smoothed_by_hand(s, forward, backward, codes, drawn):
    """log-weights and log-density of the smoothed belief at a truth of 0, by time; drawn: the particles, or None: the union."""
    weights, densities = [], []
    for t in range(codes.size(1)):
        x = torch.cat([forward.means[:, t], backward.means[:, t]], 1) if drawn is None else drawn[:, t]
        log_f, log_b = (mixture_log_prob(x, m, t) for m in (forward, backward))
        log_l = s.likelihood(x, codes[:, t], log_f, log_b)
        log_w = (log_l - torch.logaddexp(log_f, log_b).detach()).log_softmax(-1)
        belief = mdps.Mixture(x.unsqueeze(1), log_w.unsqueeze(1), s.posterior_bandwidth(), POSE)
        weights.append(log_w)
        densities.append(mixture_log_prob(x.new_zeros(len(x), 1, 3), belief, 0).squeeze(1))
    return torch.stack(weights, 1), torch.stack(densities, 1)


@pytest.mark.parametrize("proposal", ["mixture", "union"])
def test_gradients_by_the_formula(proposal):
    """To both predictions and to the smoother; the union's particles are places that have a gradient, and q never has one."""
    s, data = pose_smoother(proposal=proposal).double(), smoother_data()
    data |= {k: data[k].double() for k in ("observations", "actions", "initial", "final")}
    beliefs = [f._replace(predicted=leaves(f.predicted)) for f in s.filter(**data)]
    smoothed = s.smooth(*beliefs, data["observations"], seed=data["seed"]).smoothed
    assert smoothed.means.requires_grad == (proposal == "union")
    predicted = [f.predicted for f in beliefs]
    drawn = smoothed.means if proposal == "mixture" else None
    got = smoothed.log_weights, smoothed.log_prob(torch.zeros(3, dtype=torch.float64))
    want = smoothed_by_hand(s, *predicted, 0.5 * data["observations"], drawn)
    torch.testing.assert_close(got, want)
    wrt = [x for m in predicted for x in (m.means, m.log_weights, m.bandwidths)]
    wrt += [s.likelihood.scale, s.posterior_bandwidth.log_excess]
    direction = torch.randn(got[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = ((log_w * direction).sum() + log_p.sum() for log_w, log_p in (got, want))
    torch.testing.assert_close(*(torch.autograd.grad(loss, wrt) for loss in losses), rtol=1e-8, atol=1e-9)


# ---- Sequences ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proposal", ["mixture", "union"])
def test_a_padded_batch_is_its_sequences_alone(proposal):
    s, data = pose_smoother(proposal=proposal), smoother_data()
    lengths = torch.tensor([6, 3, 1, 5])
    observed = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    hidden = ~(observed & (torch.arange(6) < lengths[:, None]))
    data["observations"][hidden] = math.nan
    data["actions"][torch.arange(6) >= lengths[:, None]] = math.nan
    together = s(**data, lengths=lengths, observed=observed)
    for b, n in enumerate(lengths.tolist()):
        row = {k: v[b : b + 1] if k in ("initial", "final", "seed") else v[b : b + 1, :n] for k, v in data.items()}
        alone = s(**row, observed=observed[b : b + 1, :n])
        assert_same(
            [t[b : b + 1, :n] for t in smoothed_tensors(together)],
            list(smoothed_tensors(alone)),
        )
    assert all(t.isfinite().all() for t in smoothed_tensors(together)) and not together.collapsed.any()
    loss = together.smoothed.log_prob(torch.zeros(4, 6, 3)).sum()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, list(s.parameters())))


def test_ends_are_the_particles_that_were_given():
    s, data = pose_smoother(), smoother_data()
    lengths = torch.tensor([6, 3, 1, 5])
    beliefs = s(**data, lengths=lengths)
    rows = torch.arange(4)
    torch.testing.assert_close(beliefs.forward.predicted.means[:, 0], POSE.wrap(data["initial"]))
    torch.testing.assert_close(beliefs.backward.predicted.means[rows, lengths - 1], POSE.wrap(data["final"]))


def test_where_nothing_was_observed_the_filters_decide():
    """The weights are m_f m_b / q there, by hand, whatever the likelihood makes of a code of zeros."""

    class Spy(Agreement):
        def forward(self, particles, observation, log_forward, log_backward):
            self.seen = observation
            return super().forward(particles, observation, log_forward, log_backward)

        def encode(self, observations):
            return 0.5 * observations + 1

    s, data = pose_smoother(), smoother_data()
    s.likelihood = Spy()
    observed = torch.ones(4, 6, dtype=torch.bool)
    observed[1, 2] = False
    data["observations"][1, 2] = math.nan
    beliefs = s(**data, observed=observed)
    assert (s.likelihood.seen.view(4, 6, 3)[1, 2] == 0).all()
    assert (s.likelihood.seen.view(4, 6, 3)[observed] != 0).all()
    log_f, log_b = (mixture_log_prob(beliefs.smoothed.means[:, 2], m.predicted, 2) for m in beliefs[1:3])
    want = (log_f + log_b - torch.logaddexp(log_f, log_b)).log_softmax(-1)[1]
    torch.testing.assert_close(beliefs.smoothed.log_weights[1, 2].double(), want, rtol=1e-4, atol=1e-4)
    zero = s(**data | {"observations": torch.where(observed[..., None], data["observations"], 0.0)})
    assert (beliefs.smoothed.log_weights[1, 2] - zero.smoothed.log_weights[1, 2]).abs().max() > 0.1


def test_stages():
    s, data = pose_smoother(), smoother_data()
    want = s(**data)
    assert s.likelihood.encoded == 1
    forward, backward = s.filter(**data)
    assert_same(
        [*tensors(forward), *tensors(backward)],
        [*tensors(want.forward), *tensors(want.backward)],
    )
    assert s.likelihood.encoded == 1
    with torch.no_grad():
        beliefs = s.filter(**data)
    got = s.smooth(*beliefs, data["observations"], seed=data["seed"])
    assert_same(smoothed_tensors(got), smoothed_tensors(want))
    got.smoothed.log_prob(data["observations"]).mean().backward()
    assert s.likelihood.scale.grad is not None and s.forward_filter.dynamics.rate.grad is None
    other = pose_smoother(posterior_bandwidth=2.0)
    other.load_state_dict(s.state_dict())
    assert_same(smoothed_tensors(other(**data)), smoothed_tensors(want))
    assert_same(smoothed_tensors(copy.deepcopy(s)(**data)), smoothed_tensors(want))
    data["seed"] = torch.tensor(3)
    want = s(**data)
    got = s.smooth(*s.filter(**data), data["observations"], seed=data["seed"])
    assert_same(smoothed_tensors(got), smoothed_tensors(want))


def test_collapse_is_seen():
    class Dead(Agreement):
        def forward(self, particles, observation, log_forward, log_backward):
            log_l = super().forward(particles, observation, log_forward, log_backward)
            return torch.where(observation[:, :1] == 50, -math.inf, log_l)

    s, data = pose_smoother(), smoother_data()
    s.likelihood = Dead()
    data["observations"][2, 3, 0] = 100
    data["observations"][1, 5, 0] = 100
    collapsed = torch.zeros(4, 6, dtype=torch.bool)
    collapsed[2, 3] = True
    beliefs = s(**data, lengths=torch.tensor([6, 5, 6, 6]))
    assert torch.equal(beliefs.collapsed, collapsed)
    torch.testing.assert_close(beliefs.smoothed.log_weights[2, 3], torch.full((14,), -math.log(14)))


def test_different_numbers_of_particles():
    s = mdps.MixtureDensityParticleSmoother(pose_filter(7), pose_filter(4, reverse=True), Agreement())
    data = smoother_data()
    data["final"] = data["final"][:, :4]
    assert s(**data).smoothed.means.shape == (4, 6, 11, 3)
    assert pose_smoother(n_particles=3)(**smoother_data()).smoothed.log_weights.shape == (4, 6, 3)


def test_more_particles_at_both_ends():
    """Both predictions at an end are the particles that were given, however many; the smoother has as many as ever."""
    s, data = pose_smoother(), smoother_data()
    data["initial"], data["final"] = data["initial"].repeat(1, 5, 1), data["final"].repeat(1, 3, 1)
    beliefs = s(**data)
    assert beliefs.smoothed.means.shape == (4, 6, 14, 3)
    assert beliefs.forward.predicted.means.shape == (4, 6, 35, 3) and beliefs.backward.predicted.means.shape == (4, 6, 21, 3)
    loss = beliefs.smoothed.log_prob(torch.zeros(4, 6, 3)).sum()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, list(s.parameters())))
    assert_same([s(**data).smoothed.means], [beliefs.smoothed.means])


@pytest.mark.parametrize("end", ["initial", "final"])
@pytest.mark.parametrize("n", [3, 9])
def test_a_union_has_the_particles_of_both_filters(end, n):
    """Fewer first particles would be filled up with copies of one, which take part in no mixture."""
    s, data = pose_smoother(proposal="union"), smoother_data()
    ordinary = s.filter(**data)
    data[end] = data[end].repeat(1, 2, 1)[:, :n]
    with pytest.raises(ValueError, match=f"{end}: expected N = 7 particles, those of the filter, .*got {n}"):
        s(**data)
    start = {k: v for k, v in data.items() if k not in ("initial", "final")} | {"initial": data[end]}
    if end == "initial":
        name, beliefs = "forward", (s.forward_filter(**start), ordinary[1])
    else:
        name, beliefs = "backward", (ordinary[0], s.backward_filter(**start))
    with pytest.raises(ValueError, match=f"{name}: expected 7 predicted particles at every time"):
        s.smooth(*beliefs, data["observations"], seed=data["seed"])


@pytest.mark.parametrize("ends", [("initial",), ("final",), ("initial", "final")])
def test_smoothers_of_different_first_particles_run_one_by_one(ends):
    smoothers, data, other = [pose_smoother(), pose_smoother()], smoother_data(), smoother_data()
    for end in ends:
        other[end] = other[end].repeat(1, 2, 1)
    both = [data, other]
    rest = {"observations": data["observations"], "actions": data["actions"], "seeds": [data["seed"]] * 2}
    got = mdps.smooth_together(smoothers, *([d[end] for d in both] for end in ("initial", "final")), **rest)
    for beliefs, s, d in zip(got, smoothers, both, strict=True):
        assert_same(smoothed_tensors(beliefs), smoothed_tensors(s(**d)))


def test_errors():
    with pytest.raises(ValueError, match="reverse=False and a backward_filter with reverse=True"):
        mdps.MixtureDensityParticleSmoother(pose_filter(), pose_filter(), Agreement())
    other = mdps.MixtureDensityParticleFilter(names(3), nn.Identity(), nn.Identity(), 7, reverse=True)
    with pytest.raises(ValueError, match="backward_filter: expected StateSpace"):
        mdps.MixtureDensityParticleSmoother(pose_filter(), other, Agreement())
    for options, words in (
        (
            {"proposal": "product"},
            "proposal: expected 'mixture' or 'union', got 'product'",
        ),
        (
            {"proposal": "union", "n_particles": 13},
            "n_particles: expected 14, the particles of both filters, got 13",
        ),
        ({"n_particles": 1}, "n_particles: expected at least 2, got 1"),
        ({"mixing": 1.0}, "mixing: expected a number between 0 and 1, got 1.0"),
        ({"density_bandwidths": "own"}, "density_bandwidths: expected 'posterior' or 'resampling', got 'own'"),
    ):
        with pytest.raises(ValueError, match=words):
            pose_smoother(**options)
    s, data = pose_smoother(), smoother_data()
    for name in ("observations", "initial", "final"):
        for call in (s, s.filter):
            with pytest.raises(TypeError, match=f"{name}: expected a tensor, got list"):
                call(**(data | {name: [data[name]]}))
    for call in (s, s.filter):
        with pytest.raises(ValueError, match="final: expected B = 4 sequences, those of initial, got 3"):
            call(**(data | {"final": data["final"][:3]}))
    with pytest.raises(ValueError, match="final: expected R = 1, one for each of smoothers, got 2"):
        mdps.smooth_together([s], [data["initial"]], [data["final"]] * 2, data["observations"])
    with pytest.raises(ValueError, match=r"final: expected shape \(B, N, D\)"):
        s(**(data | {"final": data["final"][:, :, :2]}))
    with pytest.raises(
        ValueError,
        match=r"observations: expected shape .* \(4, 6\), that of the beliefs",
    ):
        s.smooth(*s.filter(**data), data["observations"][:, :5])
    s.likelihood.forward = lambda particles, *_: particles[..., 0].double()
    with pytest.raises(TypeError, match="likelihood: expected to return dtype torch.float32, .* got torch.float64"):
        s(**data)
    with pytest.raises(TypeError, match="n_particles: expected an int, got 7.0"):
        pose_smoother(n_particles=7.0)
    s.likelihood.forward = lambda particles, *_: particles
    with pytest.raises(
        ValueError,
        match=r"likelihood: expected to return shape \(24, 14\), got \(24, 14, 3\)",
    ):
        s(**data)
