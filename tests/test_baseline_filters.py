import math

import pytest
import torch
from linear_gaussian import GaussianLikelihood, LinearDynamics, kalman, model, simulate, stationary
from test_filters import POSE, Distance, Drift, check_a_padded_batch, names, pose_data, within
from test_transport_resample import converged

import mdps

KINDS = {
    "truncated": (mdps.TruncatedGradientParticleFilter, {}),
    "soft": (mdps.SoftResamplingParticleFilter, {}),
    "concrete": (mdps.ConcreteParticleFilter, {"temperature": 0.05}),
    "transport": (mdps.OptimalTransportParticleFilter, {"epsilon": 0.02, "threshold": 1e-4}),
}


SCHEMES = ("stratified", "multinomial", "systematic", "residual")
DRAWN = [(kind, scheme) for kind in ("truncated", "soft") for scheme in SCHEMES]


def by_default(kind, N=7, **options):
    return KINDS[kind][0](POSE, Drift(), Distance(), N, **options)


def make(kind, N=7, **options):
    return by_default(kind, N, **KINDS[kind][1] | options)


def pieces(beliefs):
    return torch.cat([beliefs.posterior.means, beliefs.posterior.log_weights.unsqueeze(-1)], -1)


# ---- Against the Kalman filter ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, scheme", [*DRAWN, ("concrete", None), ("transport", None)])
@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_against_kalman(kind, scheme, training):
    """Means and evidence; the relaxed kinds shrink the cloud at every step, so theirs are off by what is allowed here."""
    m, B, N, T = model(2), 64, 256, 5
    y = simulate(m, T)
    cls, own = KINDS[kind]
    own = own | ({"resampling": scheme} if scheme else {})
    f = cls(names(2), LinearDynamics(m), GaussianLikelihood(m), N, **own).train(training)
    beliefs = f(y.float().expand(B, T, -1), stationary(m, B, N), seed=torch.tensor(3))
    _, filtered, evidence = kalman(m, y)
    bias = {"truncated": 0.01, "soft": 0.01, "concrete": 0.05, "transport": 0.05}[kind]
    within(beliefs.posterior.mean.double(), filtered.means, bias=bias)
    within(beliefs.log_evidence.double(), evidence, bias=2 * bias)


@pytest.mark.parametrize("kind", ["truncated", "soft"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("first", [64, 1024])
@torch.no_grad()
def test_another_number_of_first_particles_against_kalman(kind, training, first):
    m, B, N, T = model(2), 64, 256, 4
    y = simulate(m, T)
    cls, own = KINDS[kind]
    f = cls(names(2), LinearDynamics(m), GaussianLikelihood(m), N, **own).train(training)
    beliefs = f(y.float().expand(B, T, -1), stationary(m, B, first), seed=torch.tensor(3))
    _, filtered, evidence = kalman(m, y)
    within(beliefs.posterior.mean.double(), filtered.means, bias=4 / first)
    within(beliefs.log_evidence.double(), evidence, bias=8 / first)
    assert beliefs.posterior.means.shape == (B, T, max(first, N), 2)
    dead = beliefs.posterior.log_weights == -math.inf
    assert dead[:, 0, first:].all() and dead[:, 1:, N:].all() and not dead[:, 0, :first].any() and not dead[:, 1:, :N].any()


@pytest.mark.parametrize("kind", ["concrete", "transport"])
def test_kinds_that_take_their_own_number_only(kind):
    with pytest.raises(ValueError, match=r"initial: expected shape \(B, N, D\) with N = 7 and D = 3, got \(4, 8, 3\)"):
        make(kind)(**pose_data(N=8))


# ---- What each kind draws, and its gradients ----------------------------------------------------------------------------


def step(kind, posterior, seed=0, training=True, made=make, **options):
    f = made(kind, posterior.states.size(1), **options).train(training).double()
    return f._resample(None, posterior, torch.full((posterior.states.size(0),), seed))


def particles(B=3, N=7, seed=0):
    g = torch.Generator().manual_seed(seed)
    states, w = torch.randn(B, N, 3, generator=g, dtype=torch.float64), torch.randn(B, N, generator=g, dtype=torch.float64)
    return mdps.Particles(states.requires_grad_(), w.log_softmax(-1).detach().requires_grad_())


@pytest.mark.parametrize("detach", [False, True])
def test_truncated_gradient(detach):
    posterior = particles()
    (z, log_w), a = step("truncated", posterior, detach_particles=detach)
    rows = torch.arange(3).unsqueeze(1)
    torch.testing.assert_close(z, posterior.states[rows, a], rtol=0, atol=0)
    torch.testing.assert_close(log_w, torch.full_like(log_w, -math.log(7)))
    assert z.requires_grad is not detach and not log_w.requires_grad
    if not detach:
        (g,) = torch.autograd.grad(z[..., 0].sum(), posterior.states)
        counts = torch.stack([torch.bincount(row, minlength=7) for row in a]).double()
        torch.testing.assert_close(g[..., 0], counts, rtol=0, atol=0)


def test_a_truncated_gradient_ends_at_the_resampling():
    """The last loss has no gradient to the models of earlier steps, so to none that only they have."""
    data, f = pose_data(T=3), make("truncated")
    actions = data.pop("actions").requires_grad_()
    loss = f(**data, actions=actions).posterior.log_prob(torch.zeros(4, 3, 3))[:, 2].sum()
    (g,) = torch.autograd.grad(loss, actions)
    assert (g[:, :2] == 0).all() and g[:, 2].abs().sum() > 0


@pytest.mark.parametrize("softness", [0.1, 0.7])
@pytest.mark.parametrize("detach", [False, True])
def test_soft_resampling_by_its_formula(softness, detach):
    """Equation (sr_weight_2), in linear space."""
    posterior = particles()
    (z, log_w), a = step("soft", posterior, softness=softness, detach_particles=detach)
    w = posterior.log_weights.exp()
    want = (w / ((1 - softness) * w + softness / 7)).gather(1, a)
    torch.testing.assert_close(log_w.exp(), want / want.sum(1, keepdim=True))
    direction = torch.randn_like(want)
    inputs = posterior.log_weights
    (got,) = torch.autograd.grad((log_w.exp() * direction).sum(), inputs)
    (expected,) = torch.autograd.grad((want / want.sum(1, keepdim=True) * direction).sum(), inputs)
    torch.testing.assert_close(got, expected)
    assert z.requires_grad is not detach


def test_soft_resampling_draws_from_the_softened_weights():
    """Shares of 20,000 rows' draws against (1 - softness) w + softness / N, within four standard errors."""
    log_w = torch.tensor([0.7, 0.2, 0.1, 0.0], dtype=torch.float64).log().expand(20000, 4)
    states = torch.arange(4.0, dtype=torch.float64).reshape(1, 4, 1).expand(20000, 4, 3)
    f = make("soft", 4, softness=0.4, resampling="multinomial")
    _, a = f._resample(None, mdps.Particles(states, log_w), mdps.ops.split_seed(torch.tensor(0), 20000))
    share = torch.bincount(a.flatten(), minlength=4) / a.numel()
    want = 0.6 * log_w[0].exp() + 0.1
    assert ((share - want).abs() < 4 * (want * (1 - want) / a.numel()).sqrt()).all()


def test_soft_resampling_is_plain_in_evaluation():
    posterior = particles()
    (z, log_w), a = step("soft", posterior, training=False, softness=0.5)
    (plain, _), b = step("truncated", posterior)
    assert torch.equal(a, b) and torch.equal(z, plain)
    torch.testing.assert_close(log_w, torch.full_like(log_w, -math.log(7)))


class Quiet(Drift):
    """Takes no noise, so that a run is a formula of what it is given."""

    def forward(self, particles, noise, action=None):
        return super().forward(particles, 0 * noise, action)


def filtered_by_hand(f, initial, observations, actions, ancestors):
    """Places and weights after every observation, for these ancestors, in linear space."""
    x, steps = POSE.wrap(initial), []
    w = torch.full_like(x[..., 0], 1 / 7)
    for t in range(observations.size(1)):
        if t > 0:
            a, v = ancestors[:, t], 0.7 * w + 0.3 / 7
            w = (w / v if isinstance(f, mdps.SoftResamplingParticleFilter) else torch.ones_like(w)).gather(1, a)
            x = x.gather(1, a.unsqueeze(-1).expand_as(x))
            x = POSE.wrap(f.dynamics(x.detach() if f.detach_particles else x, torch.zeros_like(x), actions[:, t]))
        w = w * f.likelihood(x, 0.5 * observations[:, t]).exp()
        w = w / w.sum(1, keepdim=True)
        steps.append((x, w))
    return [torch.stack(field, 1) for field in zip(*steps)]


@pytest.mark.parametrize("kind, options", [("truncated", {}), ("soft", {"softness": 0.3})])
@pytest.mark.parametrize("detach", [False, True])
def test_gradients_through_places_and_weights_by_hand(kind, options, detach):
    """Of four steps, to all that they are made from: attached, through the places of the particles that were chosen too."""
    f = KINDS[kind][0](POSE, Quiet(), Distance(), 7, detach_particles=detach, **options).double()
    data = {k: x.double() if x.is_floating_point() else x for k, x in pose_data(T=4).items()}
    wrt = [data["initial"].requires_grad_(), data["actions"].requires_grad_(), f.dynamics.rate, f.likelihood.scale]
    beliefs = f(**data)
    assert (beliefs.ancestors[:, 1:] != torch.arange(7)).any()
    got = [beliefs.posterior.means, beliefs.posterior.log_weights.exp()]
    want = filtered_by_hand(f, data["initial"], data["observations"], data["actions"], beliefs.ancestors)
    torch.testing.assert_close(got, want)
    g = torch.Generator().manual_seed(0)
    directions = [torch.randn(x.shape, generator=g, dtype=torch.float64) for x in want]
    losses = (sum((x * d).sum() for x, d in zip(fields, directions)) for fields in (got, want))
    torch.testing.assert_close(*(torch.autograd.grad(loss, wrt) for loss in losses), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("made, temperature", [(make, 0.05), (by_default, 0.1)])
def test_concrete_by_its_formula(made, temperature):
    """A Gumbel-softmax, in linear space; angles as unit vectors."""
    posterior = particles()
    (z, _), a = step("concrete", posterior, seed=4, made=made)
    u = mdps.ops.philox_uniform(torch.full((3,), 4), (3, 7, 7), dtype=torch.float64)
    weights = posterior.log_weights.exp()[:, None]
    powers = (weights / -torch.log(u)) ** (1 / temperature)
    shares = powers / powers.sum(-1, keepdim=True)
    turned = torch.polar(torch.ones(3, 7, dtype=torch.float64), posterior.states[..., 2])
    angle = torch.einsum("bij,bj->bi", shares.to(turned.dtype), turned).angle()
    want = torch.cat([torch.einsum("bij,bjd->bid", shares, posterior.states[..., :2]), angle.unsqueeze(-1)], -1)
    torch.testing.assert_close(z, want, rtol=1e-8, atol=1e-8)
    assert torch.equal(a, shares.argmax(-1))
    direction = torch.randn(z.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got, expected = (torch.autograd.grad((x * direction).sum(), [*posterior]) for x in (z, want))
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-8)
    torch.autograd.gradcheck(
        lambda *p: step("concrete", mdps.Particles(*p), seed=4, made=made)[0].states, (posterior.states, posterior.log_weights)
    )


@pytest.mark.parametrize("options, temperature", [({}, 0.1), ({"temperature": 1.0}, 1.0)])
def test_mean_of_concrete_draws(options, temperature):
    """Of two particles the share of one is the sigmoid of (log-odds + logistic noise) / temperature: its mean by midpoints."""
    log_w = torch.tensor([0.2, 0.8], dtype=torch.float64).log().expand(20000, 2)
    states = torch.tensor([0.0, 1.0], dtype=torch.float64).reshape(1, 2, 1).expand(20000, 2, 3)
    f = by_default("concrete", 2, **options)
    (z, _), _ = f._resample(None, mdps.Particles(states, log_w), mdps.ops.split_seed(torch.tensor(0), 20000))
    u = (torch.arange(100000, dtype=torch.float64) + 0.5) / 100000
    want = torch.sigmoid((math.log(4) + u.logit()) / temperature)
    within(z[..., 0].flatten(), want.mean())
    within((z[..., 0].flatten() - want.mean()).square(), want.var())


def test_concrete_draws_by_the_weights():
    """argmax of log w + Gumbel noise is a categorical draw."""
    log_w = torch.tensor([0.7, 0.2, 0.1, 0.0], dtype=torch.float64).log().expand(5000, 4)
    f = make("concrete", 4)
    states = torch.zeros(5000, 4, 3, dtype=torch.float64)
    _, a = f._resample(None, mdps.Particles(states, log_w), mdps.ops.split_seed(torch.tensor(0), 5000))
    share, want = torch.bincount(a.flatten(), minlength=4) / a.numel(), log_w[0].exp()
    assert ((share - want).abs() <= 4 * (want * (1 - want) / a.numel()).sqrt()).all()


@pytest.mark.parametrize("options, epsilon", [({"epsilon": 0.3}, 0.3), ({}, 0.5)])
def test_transport_by_its_plan(options, epsilon):
    """Every particle moved by the plan of its row, as the oracle in float64 finds it, headings by their direction."""
    posterior = particles()
    (z, log_w), a = step("transport", posterior, made=by_default, threshold=1e-12, **options)
    want = converged(*posterior, epsilon=epsilon, n_angular=1)
    torch.testing.assert_close(z, want[0], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(log_w, torch.full_like(log_w, -math.log(7)))
    assert torch.equal(a, torch.arange(7).expand(3, 7))
    got, expected = (torch.autograd.grad((x * x.detach().cos()).sum(), [*posterior]) for x in (z, want[0]))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)


def transport(space, N, states, log_weights, **options):
    f = mdps.OptimalTransportParticleFilter(space, Drift(), Distance(), N, **options).double()
    return f._resample(None, mdps.Particles(states, log_weights), torch.zeros(len(states), dtype=torch.int64))[0].states


@pytest.mark.parametrize("options, error", [({}, math.expm1(4e-3 / 0.5)), ({"threshold": 1e-13}, 1e-11)])
def test_marginals_of_the_transport_plan_by_default(options, error):
    """Particles at the unit vectors become N times the plan: rows sum to 1, columns to N w, up to what the threshold allows."""
    space, log_w = mdps.StateSpace(linear=tuple("abcdefg")), particles().log_weights.detach()
    plan = transport(space, 7, torch.eye(7, dtype=torch.float64).expand(3, 7, 7), log_w, **options)
    torch.testing.assert_close(plan.sum(2), torch.ones(3, 7, dtype=torch.float64))
    assert (plan > 0).all() and ((plan.mean(1) - log_w.exp()).abs().sum(1) <= error).all()


def test_transport_keeps_the_weighted_mean_by_default():
    """However much it is regularised; so has the mean of the new particles the gradients of the weighted mean."""
    posterior = particles()
    got = transport(names(3), 7, *posterior, threshold=1e-13).mean(1)
    want = (posterior.log_weights.softmax(-1).unsqueeze(-1) * posterior.states).sum(1)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    direction = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients = (torch.autograd.grad((x * direction).sum(), [*posterior]) for x in (got, want))
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_padded_batch_is_its_sequences_alone(kind, reverse):
    check_a_padded_batch(make(kind, reverse=reverse))


@pytest.mark.parametrize("kind", KINDS)
def test_learns_and_keeps_its_interface(kind):
    data, f = pose_data(), make(kind)
    lengths, observed = torch.tensor([6, 3, 5, 1]), torch.rand(4, 6) < 0.7
    beliefs = f(**data, lengths=lengths, observed=observed)
    assert pieces(beliefs).isfinite().all() and beliefs.posterior.batch_shape == (4, 6)
    (-beliefs.posterior.log_prob(torch.zeros(4, 6, 3)).mean()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in f.parameters())
    state = f.start(data["initial"], data["observations"][:, 0], seed=data["seed"])
    state = f.step(state, data["observations"][:, 1], data["actions"][:, 1])
    want = f(**data)
    torch.testing.assert_close(state.posterior.states, want.posterior.means[:, 1])
    torch.testing.assert_close(state.posterior.log_weights, want.posterior.log_weights[:, 1])


def test_options_are_checked():
    for kind in ("concrete", "transport"):
        with pytest.raises(ValueError, match="resampling: this filter has no scheme to choose, got 'systematic'"):
            KINDS[kind][0](POSE, Drift(), Distance(), 7, resampling="systematic")
    for kind, options, words in (
        ("soft", {"softness": 1.0}, "softness: expected at least 0 and below 1, got 1.0"),
        ("concrete", {"temperature": 0.0}, "temperature: expected a positive number, got 0.0"),
        ("truncated", {"resampling": "best"}, "resampling: expected one of"),
    ):
        cls = KINDS[kind][0]
        with pytest.raises(ValueError, match=words):
            cls(POSE, Drift(), Distance(), 7, **options)


@pytest.mark.parametrize("kind", ["truncated", "soft"])
@pytest.mark.parametrize("n_first", [4, 12])
def test_the_first_step_may_have_another_number_of_particles(kind, n_first):
    """Later steps draw 7 of them; with gradients."""
    initial = torch.randn(2, n_first, 3).requires_grad_()
    belief = make(kind).train()(torch.randn(2, 5, 3), initial, seed=torch.tensor(1)).posterior
    assert belief.means.shape[-2] == max(n_first, 7)
    belief.log_prob(torch.zeros(2, 5, 3)).sum().backward()
    assert initial.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_leaves_places_exact(kind):
    """No model here computes products, so autocast changes nothing; what a filter combines by itself keeps its digits."""
    f, data = make(kind, N=50).train(), pose_data(N=50)
    want = pieces(f(**data))
    with torch.autocast("cpu", torch.bfloat16):
        got = pieces(f(**data))
        state = f.start(data["initial"], data["observations"][:, 0], seed=data["seed"])
        state = f.step(state, data["observations"][:, 1], data["actions"][:, 1])
    assert torch.equal(got, want) and torch.equal(state.posterior.states, want[:, 1, :, :3])
