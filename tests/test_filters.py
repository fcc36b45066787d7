import copy
import math

import pytest
import torch
from linear_gaussian import (
    GaussianLikelihood,
    LinearDynamics,
    kalman,
    model,
    simulate,
    stationary,
)
from torch import nn

import mdps
from mdps import ops
from mdps.sequences import time_seeds

POSE = mdps.StateSpace(linear=("x", "y"), angular=("heading",))


def names(D):
    return mdps.StateSpace(linear=tuple("xyz"[:D]))


class Drift(nn.Module):
    """Elementwise, so that a row's numbers do not depend on the batch that it is in."""

    noise_size = 3

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor([0.9, 0.8, 1.1]))

    def forward(self, particles, noise, action=None):
        moved = self.rate * particles + 0.3 * noise
        return moved if action is None else moved + action.unsqueeze(1)


class Distance(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 0.5, 0.7]))
        self.encoded = 0

    def encode(self, observations):
        self.encoded += 1
        return 0.5 * observations

    def forward(self, particles, observation):
        squares = (self.scale * (particles - observation.unsqueeze(1))) ** 2
        return -(squares[..., 0] + squares[..., 1] + squares[..., 2])


def pose_filter(N=7, **options):
    return mdps.MixtureDensityParticleFilter(POSE, Drift(), Distance(), N, resampling_bandwidth=0.2, **options)


def pose_data(B=4, T=6, N=7, seed=0):
    g = torch.Generator().manual_seed(seed)
    data = {
        "observations": torch.randn(B, T, 3, generator=g),
        "initial": torch.randn(B, N, 3, generator=g),
    }
    return data | {
        "actions": torch.randn(B, T, 3, generator=g),
        "seed": ops.make_seed(g, B),
    }


def tensors(beliefs):
    yield from (
        beliefs.posterior.means,
        beliefs.posterior.log_weights,
        beliefs.predicted.means,
        beliefs.predicted.log_weights,
    )
    yield from (beliefs.ancestors, beliefs.collapsed, beliefs.log_evidence, beliefs.ess)


def assert_same(got, want):
    """Bit for bit; plain PyTorch, whose sums depend on the batch, is let off that."""
    tolerance = 1e-5 if ops.reference_active() else 0
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance)


def within(samples, exact, errors=4.0, bias=0.0):
    """The mean over the first dimension is the exact value, within so many standard errors."""
    standard_error = samples.std(0) / math.sqrt(samples.size(0))
    assert ((samples.mean(0) - exact).abs() <= errors * standard_error + bias).all(), (
        samples.mean(0),
        exact,
        standard_error,
    )


# ---- Against the Kalman filter ------------------------------------------------------------------------------------------


@torch.no_grad()
def run_linear(
    D,
    N,
    B,
    *,
    first=None,
    T=6,
    bandwidth=0.05,
    reverse=False,
    resampling="stratified",
    observed=None,
):
    m = model(D).reversed() if reverse else model(D)
    y = simulate(model(D), T).float()
    f = mdps.MixtureDensityParticleFilter(
        names(D),
        LinearDynamics(m),
        GaussianLikelihood(m),
        N,
        reverse=reverse,
        resampling=resampling,
        posterior_bandwidth=0.3,
        resampling_bandwidth=bandwidth,
        minimum_bandwidth=0.0,
    )
    observed = None if observed is None else observed.expand(B, T)
    return (
        f(
            y.expand(B, T, -1),
            stationary(m, B, first or N),
            observed=observed,
            seed=torch.tensor(5),
        ),
        m,
        y.double(),
    )


@pytest.mark.parametrize("D", [1, 2, 3])
def test_converges_to_kalman(D):
    errors = []
    for N in (50, 800):
        beliefs, m, y = run_linear(D, N, 1000)
        _, exact, evidence = kalman(m, y, 0.05)
        mean, variance = (
            beliefs.posterior.mean.double(),
            beliefs.posterior.variance.double() - 0.3**2,
        )
        want = exact.means, exact.covariances.diagonal(dim1=-2, dim2=-1), evidence
        got = mean, variance, beliefs.log_evidence.double()
        for g, w in zip(got, want, strict=True):
            within(g, w, bias=10 / N)  # self-normalised weights: biased by O(1 / N)
        errors.append([((g - w) ** 2).mean().sqrt() for g, w in zip(got, want, strict=True)])
        assert not beliefs.collapsed.any()
    for few, many in zip(*errors, strict=True):
        assert 2.9 < few / many < 5.5  # 4 for N^-1/2


def test_more_particles_at_the_start_against_kalman():
    beliefs, m, y = run_linear(2, 200, 500, first=3000)
    _, exact, evidence = kalman(m, y, 0.05)
    within(beliefs.posterior.mean.double(), exact.means, bias=10 / 200)
    within(beliefs.log_evidence.double(), evidence, bias=10 / 200)
    errors = ((beliefs.posterior.mean - exact.means) ** 2).mean((0, 2)).sqrt()
    assert 3 < errors[1] / errors[0] < 6  # 15 times the particles, times one for what the steps differ in
    assert beliefs.posterior.means.shape == (500, 6, 3000, 2)
    assert (beliefs.posterior.log_weights[:, 0] > -math.inf).all()
    assert (beliefs.posterior.log_weights[:, 1:, 200:] == -math.inf).all()


@pytest.mark.parametrize("resampling", ["stratified", "systematic", "multinomial", "residual"])
def test_evidence_is_unbiased(resampling):
    beliefs, m, y = run_linear(2, 20, 4000, resampling=resampling)
    within((beliefs.log_evidence.double().sum(1) - kalman(m, y, 0.05)[2].sum()).exp(), 1.0)


def test_reverse_filter_against_kalman():
    beliefs, m, y = run_linear(2, 800, 300, reverse=True)
    predicted, filtered, evidence = kalman(m, y.flip(0), 0.05)
    within(beliefs.posterior.mean.double(), filtered.means.flip(0), bias=5 / 800)
    within(beliefs.predicted.mean.double(), predicted.means.flip(0), bias=5 / 800)
    within(beliefs.log_evidence.double(), evidence.flip(0), bias=5 / 800)


def test_missing_observations_against_kalman():
    observed = torch.tensor([True, False, True, False, False, True])
    beliefs, m, y = run_linear(2, 800, 300, observed=observed)
    _, exact, evidence = kalman(m, y, 0.05, observed)
    within(beliefs.posterior.mean.double(), exact.means, bias=5 / 800)
    within(beliefs.log_evidence.double(), evidence, bias=5 / 800)
    assert (beliefs.log_evidence[:, ~observed] == 0).all()


class Turn(nn.Module):
    noise_size = 1

    def forward(self, particles, noise, action=None):
        return particles + 0.9 + 0.2 * noise


class Compass(nn.Module):
    def forward(self, particles, observation):
        return 3 * (torch.cos(particles[..., 0] - observation.unsqueeze(1)) - 1)


def test_on_the_circle_against_a_grid():
    """A Bayes filter on 512 points of the circle, kernels applied as products of Fourier coefficients."""
    K, B, N, bandwidth, posterior = 512, 1000, 400, 0.3, 0.4
    y = torch.tensor([2.5, -2.6, -2.0, -0.8, 0.0, 1.1, 2.0, 3.0])  # turns past pi twice
    grid = 2 * math.pi * torch.arange(K, dtype=torch.float64) / K
    order = torch.arange(K // 2 + 1, dtype=torch.float64)

    def kernel(b):
        return torch.fft.rfft(torch.softmax(b**-2 * (grid.cos() - 1), 0))

    move = kernel(bandwidth) * torch.exp(-0.5 * (0.2 * order) ** 2 - 0.9j * order)
    p, exact = torch.full((K,), 1 / K, dtype=torch.float64), []
    for t in range(len(y)):
        p = torch.fft.irfft(torch.fft.rfft(p) * move, K) if t > 0 else p
        p = p * torch.exp(3 * torch.cos(grid - y[t]))
        p = p / p.sum()
        exact.append((torch.fft.rfft(p) * kernel(posterior))[1].conj())
    exact = torch.stack(exact)
    space = mdps.StateSpace(angular=("heading",))
    f = mdps.MixtureDensityParticleFilter(
        space,
        Turn(),
        Compass(),
        N,
        posterior_bandwidth=posterior,
        resampling_bandwidth=bandwidth,
    )
    initial = 2 * math.pi * torch.rand(B, N, 1, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        belief = f(y.expand(B, -1), initial, seed=torch.tensor(0)).posterior
    assert (belief.means.abs() <= math.pi + 1e-6).all()
    within(
        space.difference(belief.mean, exact.angle().float().unsqueeze(-1)),
        0.0,
        bias=2 / N,
    )
    within(belief.variance[..., 0].double(), 1 - exact.abs(), bias=2 / N)


# ---- Resampling and gradients -------------------------------------------------------------------------------------------


class Still(nn.Module):
    noise_size = 1

    def forward(self, particles, noise, action=None):
        return 0.9 * particles + 0.5 * noise


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, particles, observation):
        return self.slope * particles[..., 0]


def two_steps(B, resampling="stratified", N=8):
    """The same N particles in every row, weighed, resampled, moved: E sum w x^2 is known."""
    f = mdps.MixtureDensityParticleFilter(
        names(1),
        Still(),
        Slope(),
        N,
        resampling=resampling,
        posterior_bandwidth=0.3,
        minimum_bandwidth=0.0,
    ).double()
    x = torch.linspace(-0.5, 2.0, N, dtype=torch.float64)
    w = torch.softmax(f.likelihood.slope * x, 0)
    exact = (w * 0.81 * (x**2 + f.posterior_bandwidth() ** 2)).sum() + 0.25
    beliefs = f(x.new_zeros(B, 2), x.expand(B, N).unsqueeze(-1), seed=torch.tensor(1))
    predicted = beliefs.predicted
    squares = (predicted.log_weights[:, 1].exp() * predicted.means[:, 1, :, 0] ** 2).sum(-1)
    return f, squares, exact, beliefs


def test_stratified_resampling_is_unbiased_and_varies_less():
    variance = {}
    for resampling in ("stratified", "multinomial"):
        with torch.no_grad():
            _, squares, exact, beliefs = two_steps(4000, resampling)
        within(squares, exact)
        chosen = beliefs.predicted.means[:, 0].gather(1, beliefs.ancestors[:, 1, :, None]).mean((1, 2))
        variance[resampling] = chosen.var()
    assert variance["stratified"] < 0.25 * variance["multinomial"]


@pytest.mark.parametrize("resampling", ["stratified", "systematic", "multinomial", "residual"])
def test_gradient_is_unbiased(resampling):
    """The gradient of the expectation, and that of the kernels, whatever N; without IWSG the first would be 0."""
    B = 4000
    f, squares, exact, _ = two_steps(B, resampling)
    wrt = [f.likelihood.slope, f.posterior_bandwidth.log_excess]
    want = [w.item() for w in torch.autograd.grad(exact, wrt)]
    assert abs(want[0]) > 0.1 and abs(want[1]) > 0.1
    within(per_row(f, squares, wrt), torch.tensor(want, dtype=torch.float64))


def per_row(f, squares, wrt):
    """Gradients of 40 groups of rows, (40, number of parameters)."""
    groups = [torch.autograd.grad(g.mean(), wrt, retain_graph=True) for g in squares.chunk(40)]
    return torch.stack([torch.stack([x.sum() for x in g]) for g in groups])


def test_gradient_of_the_evidence_against_kalman(monkeypatch):
    """d log p(y_1 ... y_T) through all resamplings; the truncated gradient, without IWSG, is far from it."""
    m, B, N, runs = model(1), 40, 800, 30
    y = simulate(m, 6)
    exact = m._replace(**{k: getattr(m, k).clone().requires_grad_() for k in ("A", "C", "R")})
    want = torch.stack(torch.autograd.grad(kalman_evidence(exact, m.Q, y), [exact.A, exact.C, exact.R])).flatten()

    def gradient(run):
        f = mdps.MixtureDensityParticleFilter(
            names(1),
            LinearDynamics(m),
            GaussianLikelihood(m),
            N,
            posterior_bandwidth=0.1,
            minimum_bandwidth=0.0,
        )
        evidence = f(
            y.float().expand(B, -1, -1),
            stationary(m, B, N, seed=run),
            seed=torch.tensor(run),
        ).log_evidence
        grads = torch.autograd.grad(evidence.sum(1).mean(), [f.dynamics.A, f.likelihood.C, f.likelihood.R])
        return torch.cat([g.flatten() for g in grads]).double()

    within(torch.stack([gradient(run) for run in range(runs)]), want, bias=5 / N)
    monkeypatch.setattr(
        ops,
        "iwsg_log_weights",
        lambda z, means, log_weights, *_, **__: torch.zeros_like(log_weights),
    )
    truncated = torch.stack([gradient(run) for run in range(runs)])
    assert ((truncated.mean(0) - want).abs() > 10 * truncated.std(0) / math.sqrt(runs)).all()


def kalman_evidence(m, Q, y):
    """Of the model whose dynamics' noise does not follow A; one dimension, kernels of bandwidth 0.1."""
    mean, var, total = torch.zeros(()), m.S[0, 0], 0.0
    A, C, R = m.A[0, 0], m.C[0, 0], m.R[0, 0]
    for t in range(y.size(0)):
        if t > 0:
            mean, var = A * mean, A**2 * (var + 0.01) + Q[0, 0].detach()
        F, e = C**2 * var + R, y[t, 0] - C * mean
        total = total - 0.5 * (e**2 / F + F.log() + math.log(2 * math.pi))
        mean, var = mean + var * C / F * e, var - (var * C) ** 2 / F
    return total


def test_inference_computes_no_importance_weights(monkeypatch):
    f, data = pose_filter(), pose_data()
    want = f(**data)
    calls = []
    monkeypatch.setattr(ops, "iwsg_log_weights", lambda *_, **__: calls.append(1))
    with torch.no_grad():
        assert_same(tensors(f(**data)), tensors(want))
    assert not calls


# ---- Sequences ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_a_padded_batch_is_its_sequences_alone(reverse):
    check_a_padded_batch(pose_filter(reverse=reverse))


def check_a_padded_batch(f):
    data = pose_data()
    lengths = torch.tensor([6, 3, 1, 5])
    observed = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    hidden = ~(observed & (torch.arange(6) < lengths[:, None]))
    data["observations"][hidden] = math.nan
    data["actions"][torch.arange(6) >= lengths[:, None]] = math.inf
    together = f(**data, lengths=lengths, observed=observed)
    for b, n in enumerate(lengths.tolist()):
        row = {k: v[b : b + 1] if k in ("initial", "seed") else v[b : b + 1, :n] for k, v in data.items()}
        alone = f(**row, observed=observed[b : b + 1, :n])
        assert_same([t[b : b + 1, :n] for t in tensors(together)], tensors(alone))
        assert not together.collapsed[b].any() and (together.log_evidence[b, n:] == 0).all()
    assert all(t.isfinite().all() for t in tensors(together))
    loss = together.posterior.log_prob(torch.zeros(4, 6, 3)).sum() + together.log_evidence.sum()
    for p, g in zip(f.parameters(), torch.autograd.grad(loss, list(f.parameters())), strict=True):
        assert g.isfinite().all() and (g != 0).any(), p


@pytest.mark.parametrize("reverse", [False, True])
def test_online_is_the_sequence(reverse):
    f, data = pose_filter(reverse=reverse), pose_data()
    observed = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    want = f(**data, observed=observed)
    times = list(range(6))[:: -1 if reverse else 1]
    t = times[0]
    states = [
        f.start(
            data["initial"],
            data["observations"][:, t],
            observed[:, t],
            data["seed"],
            time=t,
        )
    ]
    for t in times[1:]:
        action = data["actions"][:, t + reverse]
        states.append(f.step(states[-1], data["observations"][:, t], action, observed[:, t]))
    for s in states:
        t = s.time
        assert_same(
            (*s.predicted, s.posterior.log_weights),
            [x[:, t] for x in (*list(tensors(want))[2:4], want.posterior.log_weights)],
        )
        assert_same(
            (s.ancestors, s.collapsed, s.log_evidence, s.ess),
            [x[:, t] for x in list(tensors(want))[4:]],
        )
        torch.testing.assert_close(f.posterior(s).mean, want.posterior.mean[:, t])
    if reverse:
        with pytest.raises(ValueError, match="a reverse filter ends at time 0"):
            f.step(states[-1], data["observations"][:, 0])


@pytest.mark.parametrize("first", [3, 20])
@pytest.mark.parametrize("reverse", [False, True])
def test_another_number_of_first_particles(reverse, first):
    """Online, where nothing is filled up, with the same numbers; gradients are finite and pass the change."""
    f, data = pose_filter(reverse=reverse), pose_data() | {"initial": pose_data(N=first)["initial"].requires_grad_()}
    want, times = f(**data), list(range(6))[:: -1 if reverse else 1]
    state = f.start(data["initial"], data["observations"][:, times[0]], seed=data["seed"], time=times[0])
    assert state.posterior.states.shape == (4, first, 3)
    for t in times:
        if t != times[0]:
            state = f.step(state, data["observations"][:, t], data["actions"][:, t + reverse])
        n = first if t == times[0] else 7
        assert_same(state.posterior, (want.posterior.means[:, t, :n], want.posterior.log_weights[:, t, :n]))
        assert_same([state.ancestors], [want.ancestors[:, t, :n]])
        assert (want.posterior.log_weights[:, t, n:] == -math.inf).all()
    last = want.posterior.log_prob(torch.zeros(4, 6, 3))[:, times[-1]]
    gradients = torch.autograd.grad(last.sum(), [data["initial"], *f.parameters()])
    assert all(g.isfinite().all() for g in gradients) and gradients[0].abs().sum() > 0


def test_unobserved_steps_keep_the_weights():
    f, data = pose_filter(), pose_data()
    observed = torch.ones(4, 6, dtype=torch.bool)
    observed[1, 2] = False
    beliefs = f(**data, observed=observed)
    torch.testing.assert_close(beliefs.posterior.log_weights[1, 2], torch.full((7,), -math.log(7)))
    assert beliefs.log_evidence[1, 2] == 0 and not beliefs.collapsed.any()
    before = f(**data)
    assert_same([x[:, :2] for x in tensors(beliefs)], [x[:, :2] for x in tensors(before)])
    assert_same(
        [x[[0, 2, 3]] for x in tensors(beliefs)],
        [x[[0, 2, 3]] for x in tensors(before)],
    )


@pytest.mark.parametrize("reverse", [False, True])
def test_which_action_moves_which_step(reverse):
    class Shift(nn.Module):
        noise_size = 1

        def forward(self, particles, noise, action=None):
            return particles + (-action if reverse else action).unsqueeze(1)

    class Flat(nn.Module):
        def forward(self, particles, observation):
            return particles[..., 0] * 0

    f = mdps.MixtureDensityParticleFilter(
        names(1),
        Shift(),
        Flat(),
        5,
        reverse=reverse,
        posterior_bandwidth=1e-4,
        minimum_bandwidth=0.0,
    )
    path = torch.tensor([3.0, 4.0, 6.0, 10.0, 18.0])
    actions = path.diff(prepend=torch.zeros(1)).view(1, 5, 1)  # the first is never used
    lengths = torch.tensor([4]) if reverse else None
    initial = torch.full((1, 5, 1), 10.0 if reverse else 3.0)
    mean = f(torch.zeros(1, 5), initial, actions, lengths).posterior.mean[0, :, 0]
    torch.testing.assert_close(mean[:4], path[:4], atol=1e-2, rtol=0)


def test_angles_stay_wrapped_and_collapse_is_seen():
    class Blind(Distance):
        def forward(self, particles, observation):
            return torch.where(
                observation[:, :1] > 0,
                super().forward(particles, observation),
                -math.inf,
            )

    f = mdps.MixtureDensityParticleFilter(POSE, Drift(), Blind(), 7)
    data = pose_data()
    data["initial"] = data["initial"] + 40
    data["observations"][..., 0] = 1.0
    data["observations"][2, 3, 0] = -1.0
    beliefs = f(**data)
    assert (beliefs.posterior.means[..., 2].abs() <= math.pi + 1e-6).all()
    collapsed = torch.zeros(4, 6, dtype=torch.bool)
    collapsed[2, 3] = True
    assert torch.equal(beliefs.collapsed, collapsed)
    assert torch.equal(beliefs.log_evidence == -math.inf, collapsed) and (beliefs.ess[2, 3] - 7).abs() < 1e-4
    g = torch.autograd.grad(beliefs.posterior.log_prob(torch.zeros(4, 6, 3)).sum(), list(f.parameters()))
    assert all(x.isfinite().all() for x in g)


def test_seeds():
    f, data = pose_filter(), pose_data()
    seed = torch.tensor(11)
    data["seed"] = seed
    want = f(**data)
    assert_same(tensors(f(**data)), tensors(want))
    data["seed"] = ops.split_seed(seed, 4)
    assert_same(tensors(f(**data)), tensors(want))
    data["seed"] = None
    torch.manual_seed(0)
    drawn = f(**data)
    assert not torch.equal(drawn.posterior.means, want.posterior.means)
    torch.manual_seed(0)
    assert_same(tensors(f(**data)), tensors(drawn))
    rows = f(data["observations"], data["initial"][:1].expand(4, -1, -1), seed=seed).posterior.means[:, 1]
    assert not torch.equal(rows[0], rows[1])


def test_seeds_of_times():
    seed = ops.split_seed(torch.tensor(0), 3)
    every = time_seeds(seed, range(2500), 0)
    assert every.shape == (3, 2500) and every.unique().numel() == 7500
    for times in (range(1), range(1023, 1024), range(1024, 1025), range(1000, 1030), range(2100, 2500)):
        assert torch.equal(time_seeds(seed, times, 0), every[:, times.start : times.stop])
    assert torch.equal(time_seeds(seed[1:2], range(7), 0), every[1:2, :7])
    assert not torch.isin(time_seeds(seed, range(2500), 1), every).any()


# ---- As a module --------------------------------------------------------------------------------------------------------


def test_module():
    f, data = pose_filter(), pose_data()
    want = list(tensors(f(**data)))
    assert f.likelihood.encoded == 1
    other = pose_filter(posterior_bandwidth=2.0)
    other.load_state_dict(f.state_dict())
    assert_same(tensors(other(**data)), want)
    assert_same(tensors(copy.deepcopy(f)(**data)), want)
    assert len(list(mdps.MixtureDensityParticleFilter(POSE, Drift(), Distance(), 3).parameters())) == 3
    torch.testing.assert_close(f.posterior_bandwidth(), torch.full((3,), 0.5))
    torch.testing.assert_close(f.resampling_bandwidth(), torch.full((3,), 0.2))


@pytest.mark.skipif(ops.reference_active(), reason="references are not made for it")
def test_compiles_in_one_graph():
    f, data = pose_filter(), pose_data(T=3)

    def loss(lengths):
        beliefs = f(**data, lengths=lengths)
        return -beliefs.posterior.log_prob(data["observations"]).mean() - beliefs.log_evidence.mean()

    lengths, parameters = torch.tensor([3, 2, 3, 1]), list(f.parameters())
    torch._dynamo.reset()
    got, want = (
        torch.compile(loss, fullgraph=True, backend="aot_eager")(lengths),
        loss(lengths),
    )
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, parameters), torch.autograd.grad(want, parameters))


def test_functional_gradient():
    f, data = pose_filter(), pose_data(T=3)
    parameters = dict(f.named_parameters())

    def loss(parameters):
        beliefs = torch.func.functional_call(f, parameters, kwargs=data)
        return -beliefs.posterior.log_prob(data["observations"]).mean()

    got = torch.func.grad(loss)(parameters)
    for name, want in zip(
        parameters,
        torch.autograd.grad(loss(parameters), list(parameters.values())),
        strict=True,
    ):
        torch.testing.assert_close(got[name], want)


@pytest.mark.parametrize("B, T, N", [(0, 3, 2), (2, 1, 3), (1, 4, 1)])
def test_small_sizes(B, T, N):
    beliefs = pose_filter(N)(**pose_data(B, T, N))
    assert beliefs.posterior.log_prob(torch.zeros(B, T, 3)).shape == (B, T)
    assert beliefs.ancestors.shape == (B, T, N) and beliefs.posterior.mean.isfinite().all()


def test_functions_will_do():
    def dynamics(particles, noise, action=None):
        return particles + noise

    dynamics.noise_size = 3
    f = mdps.MixtureDensityParticleFilter(POSE, dynamics, lambda particles, observation: -particles[..., 0].abs(), 1)
    assert f(torch.zeros(2, 3), torch.zeros(2, 1, 3)).posterior.mean.shape == (2, 3, 3)


class HalfDrift(Drift):
    def forward(self, particles, noise, action=None):
        return super().forward(particles, noise, action).to(self.dtype)


class HalfDistance(Distance):
    def forward(self, particles, observation):
        return super().forward(particles, observation).to(self.dtype)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_half_types_of_models_are_taken_as_the_filters(half, dtype):
    f, data = pose_filter().to(dtype), pose_data()
    f.dynamics, f.likelihood = HalfDrift().to(dtype), HalfDistance().to(dtype)
    f.dynamics.dtype = f.likelihood.dtype = half
    data = {k: v.to(dtype) if v.is_floating_point() else v for k, v in data.items()}
    beliefs = f(**data)
    assert all(x.dtype in (dtype, torch.int64, torch.bool) for x in tensors(beliefs))
    state = f.start(data["initial"], data["observations"][:, 0], seed=data["seed"])
    for t in range(1, 6):
        state = f.step(state, data["observations"][:, t], data["actions"][:, t])
        assert torch.equal(state.posterior.states, beliefs.posterior.means[:, t])
        assert torch.equal(state.posterior.log_weights, beliefs.posterior.log_weights[:, t])
    assert torch.equal(POSE.wrap(state.posterior.states), state.posterior.states)


def test_online_under_autocast():
    class Linear(nn.Module):
        """Its products are half types there."""

        noise_size = 3

        def __init__(self):
            super().__init__()
            self.matrix = nn.Linear(3, 3)

        def forward(self, particles, noise, action=None):
            return self.matrix(particles) + noise.to(torch.bfloat16)

    class Weight(Linear):
        def forward(self, particles, observation):
            return -self.matrix(particles).square().sum(-1)

    f, data = mdps.MixtureDensityParticleFilter(POSE, Linear(), Weight(), 7), pose_data()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        beliefs = f(**data)
        state = f.start(data["initial"], data["observations"][:, 0], seed=data["seed"])
        for t in range(1, 6):
            state = f.step(state, data["observations"][:, t])
            assert torch.equal(state.posterior.states, beliefs.posterior.means[:, t])


@pytest.mark.parametrize("name", ["dynamics", "likelihood"])
def test_models_of_a_larger_type_are_told_by_name(name):
    f, data = pose_filter(), pose_data()
    setattr(f, name, HalfDrift() if name == "dynamics" else HalfDistance())
    getattr(f, name).dtype = torch.float64
    words = f"{name}: expected to return dtype torch.float32, that of the filter's parameters, got torch.float64"
    with pytest.raises(TypeError, match=words):
        f(**data)
    with pytest.raises(TypeError, match=words):
        f.step(f.start(data["initial"], data["observations"][:, 0]), data["observations"][:, 1])


@pytest.mark.parametrize(
    "change, error, words",
    [
        (
            {"initial": torch.zeros(4, 7, 2)},
            ValueError,
            r"initial: expected shape \(B, N, D\) with N >= 1 and D = 3, got \(4, 7, 2\)",
        ),
        ({"initial": torch.zeros(4, 0, 3)}, ValueError, "N >= 1"),
        (
            {"initial": torch.zeros(4, 8, 3), "lengths": torch.tensor([6, 2, 3, 3])},
            ValueError,
            "initial: expected N = 7 particles beside lengths, got 8",
        ),
        ({"initial": torch.zeros(4, 7, 3).double()}, TypeError, "initial: expected dtype torch.float32, that of the filter's"),
        ({"initial": [1.0]}, TypeError, "initial: expected a tensor, got list"),
        (
            {"observations": torch.zeros(3, 6, 3)},
            ValueError,
            r"observations: expected shape .* B = 4.*, got \(3, 6, 3\)",
        ),
        ({"observations": torch.zeros(4, 0, 3)}, ValueError, "T >= 1"),
        (
            {"actions": torch.zeros(4, 5, 3)},
            ValueError,
            r"actions: expected shape .* = \(4, 6\), got \(4, 5, 3\)",
        ),
        (
            {"observed": torch.ones(4, 5, dtype=torch.bool)},
            ValueError,
            r"observed: expected shape \(B, T\) = \(4, 6\), got \(4, 5\)",
        ),
        (
            {"observed": torch.ones(4, 6)},
            TypeError,
            "observed: expected dtype torch.bool, got torch.float32",
        ),
        (
            {"lengths": torch.ones(3, dtype=torch.int64)},
            ValueError,
            r"lengths: expected shape \(B,\) = \(4,\), got \(3,\)",
        ),
        ({"lengths": torch.ones(4)}, TypeError, "lengths: expected dtype torch.int64"),
        (
            {"lengths": torch.tensor([1, 2, 7, 3])},
            ValueError,
            r"lengths: expected 1 to T = 6, got \[1, 2, 7, 3\]",
        ),
        (
            {"lengths": torch.tensor([1, 2, 0, 3])},
            ValueError,
            "lengths: expected 1 to T = 6",
        ),
        (
            {"seed": torch.ones(3, dtype=torch.int64)},
            ValueError,
            r"seed: expected shape \(\) or \(B,\) = \(4,\), got \(3,\)",
        ),
        ({"seed": 3}, TypeError, "seed: expected a tensor, got int"),
        ({"observations": [torch.zeros(4, 6, 2)]}, TypeError, "observations: expected a tensor, got list"),
        ({"observations": None}, TypeError, "observations: expected a tensor, got NoneType"),
        ({"initial": [[0.0] * 3]}, TypeError, "initial: expected a tensor, got list"),
    ],
)
def test_errors(change, error, words):
    with pytest.raises(error, match=words):
        pose_filter()(**(pose_data() | change))


def test_errors_of_an_online_step():
    f, data = pose_filter(), pose_data()
    state = f.start(data["initial"], data["observations"][:, 0])
    for call in (lambda x: f.start(data["initial"], x), lambda x: f.step(state, x)):
        with pytest.raises(ValueError, match=r"^observation: expected shape \(B, ...\) with B = 4, .*, got \(3, 3\)"):
            call(torch.zeros(3, 3))
        with pytest.raises(TypeError, match="^observation: expected a tensor, got list"):
            call([0.0])


def test_errors_of_networks_and_options():
    with pytest.raises(ValueError, match="n_particles: expected at least 1, got 0"):
        pose_filter(0)
    for n in (7.0, "7", None):
        with pytest.raises(TypeError, match=f"n_particles: expected an int, got {n!r}"):
            pose_filter(n)
    with pytest.raises(ValueError, match="resampling: expected one of .*, got 'optimal'"):
        pose_filter(resampling="optimal")
    with pytest.raises(ValueError, match="bandwidth: expected more than the minimum"):
        pose_filter(minimum_bandwidth=0.6)
    with pytest.raises(ValueError, match="posterior_bandwidth: expected one number or 3"):
        pose_filter(posterior_bandwidth=(0.1, 0.2))
    f = pose_filter()
    f.likelihood.forward = lambda particles, observation: particles
    with pytest.raises(
        ValueError,
        match=r"likelihood: expected to return shape \(4, 7\), got \(4, 7, 3\)",
    ):
        f(**pose_data())
    f = pose_filter()
    f.dynamics.forward = lambda particles, noise, action: particles[..., :2]
    with pytest.raises(
        ValueError,
        match=r"dynamics: expected to return shape \(4, 7, 3\), got \(4, 7, 2\)",
    ):
        f(**pose_data())
