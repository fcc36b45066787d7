import copy
import itertools
import math

import pytest
import torch
from linear_gaussian import GaussianLikelihood, model, rauch_tung_striebel, simulate, stationary
from scipy.special import i0e
from test_filters import POSE, Distance, assert_same, names, pose_data, tensors, within
from torch import nn

import mdps
from mdps import ops

REAL = {"dtype": torch.float64}


class Turn(nn.Module):
    """Where a pose goes; an action adds to that."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor([0.9, 0.8, 1.0]))
        self.shift = nn.Parameter(torch.tensor([0.1, -0.2, 0.4]))

    def forward(self, particles, action=None):
        mean = self.rate * particles + self.shift
        return mean if action is None else mean + action.unsqueeze(1)


class LearnedTransition(nn.Module):
    def __init__(self):
        super().__init__()
        self.network, self.bandwidths = Turn(), nn.Parameter(torch.tensor([0.6, 0.9, 0.8]))

    def mean(self, particles, action=None):
        return self.network(particles, action)


def pose_ffbs(N=7):
    dynamics = mdps.KernelDynamics(Turn(), (0.6, 0.9, 0.8), POSE)
    return mdps.ForwardFilterBackwardSmoother(mdps.TruncatedGradientParticleFilter(POSE, dynamics, Distance(), N), dynamics)


def pose_tfs(N=7, gamma=None):
    dynamics, back = (mdps.KernelDynamics(Turn(), (0.6, 0.9, 0.8), POSE) for _ in range(2))
    f = mdps.TruncatedGradientParticleFilter(POSE, dynamics, Distance(), N)
    b = mdps.TruncatedGradientParticleFilter(POSE, back, Distance(), N, reverse=True)
    return mdps.TwoFilterSmoother(f, b, dynamics, gamma)


def wide(x):
    """log of a prior that is not uniform; its normaliser does not matter."""
    return -0.1 * (x**2).sum(-1)


MAKERS = [pose_ffbs, pose_tfs, lambda N=7: pose_tfs(N, wide)]
ids = pytest.mark.parametrize("make", MAKERS, ids=["ffbs", "tfs", "tfs-gamma"])


def smoother_data(smoother, **options):
    data = pose_data(**options)
    if isinstance(smoother, mdps.TwoFilterSmoother):
        data["final"] = pose_data(**(options | {"seed": 1}))["initial"]
    return data


def smoothed_tensors(beliefs):
    yield from (beliefs.smoothed.means, beliefs.smoothed.log_weights, beliefs.collapsed)
    yield from tensors(beliefs.forward)


def beliefs_of(particles, log_weights, predicted=None, bandwidths=None):
    """What a smoother reads of a filter's beliefs: particles (B, T, N, D), filtered and predicted log-weights (B, T, N)."""
    bandwidths = torch.full(particles.shape[-1:], 0.5, dtype=particles.dtype) if bandwidths is None else bandwidths
    space = POSE if particles.size(-1) == 3 else names(particles.size(-1))
    predicted = log_weights if predicted is None else predicted
    mixtures = [mdps.Mixture(particles, w, bandwidths, space) for w in (log_weights, predicted)]
    none = torch.zeros(log_weights.shape[:2], dtype=particles.dtype)
    return mdps.FilterBeliefs(*mixtures, torch.zeros_like(log_weights).long(), none.bool(), none, none)


def kernel(x, mu, bandwidths):
    """p(x | mu) by hand, float64, for poses: x (..., 3), mu (..., 3) -> (...)."""
    delta, kappa = x - mu, bandwidths[2].detach() ** -2
    p = torch.exp(-0.5 * (delta[..., :2] / bandwidths[:2]) ** 2) / (bandwidths[:2] * math.sqrt(2 * math.pi))
    angle = torch.exp(kappa * (torch.cos(delta[..., 2]) - 1)) / (2 * math.pi * i0e(kappa.item()))
    return p[..., 0] * p[..., 1] * angle


# ---- Against the exact smoother -----------------------------------------------------------------------------------------


class Linear(nn.Module):
    def __init__(self, A):
        super().__init__()
        self.register_buffer("A", A.float())

    def forward(self, particles, action=None):
        return particles @ self.A.mT


PRIOR_BANDWIDTH = 0.3


def with_unit_covariance(D):
    """S = I and A = 0.8 times a rotation: Q = 0.36 I is the kernel of a transition model."""
    return model(D)._replace(S=torch.eye(D, **REAL))


def exact_with_kernel_prior(m, y):
    """Rauch-Tung-Striebel; at the first time for the prior N(0, S) with kernels, which two-filter smoothing has there."""
    exact = rauch_tung_striebel(m, y)
    eye = torch.eye(m.A.size(0), **REAL)
    mean, cov = exact.means[0], exact.covariances[0]
    precision = torch.linalg.inv(cov) - torch.linalg.inv(m.S) + torch.linalg.inv(m.S + PRIOR_BANDWIDTH**2 * eye)
    first = torch.linalg.inv(precision)
    means, covariances = exact.means.clone(), exact.covariances.clone()
    means[0], covariances[0] = first @ torch.linalg.solve(cov, mean), first
    return exact._replace(means=means, covariances=covariances)


@torch.no_grad()
def run_linear(kind, D, N, B, T=5, resampling="stratified"):
    m = with_unit_covariance(D)
    y = simulate(m, T)
    options = {"posterior_bandwidth": PRIOR_BANDWIDTH, "minimum_bandwidth": 0.0, "resampling": resampling}
    dynamics = [mdps.KernelDynamics(Linear(x.A), 0.6, names(D)) for x in (m, m.reversed())]
    filters = [
        mdps.TruncatedGradientParticleFilter(names(D), d, GaussianLikelihood(m), N, reverse=reverse, **options)
        for d, reverse in zip(dynamics, (False, True), strict=True)
    ]
    data = {"observations": y.float().expand(B, T, -1), "initial": stationary(m, B, N, seed=1), "seed": torch.tensor(7)}
    if kind == "ffbs":
        smoother, exact = mdps.ForwardFilterBackwardSmoother(filters[0], dynamics[0]), rauch_tung_striebel(m, y)
    else:
        gamma = torch.distributions.MultivariateNormal(torch.zeros(D), m.S.float())
        smoother = mdps.TwoFilterSmoother(*filters, dynamics[0], gamma.log_prob)
        data["final"], exact = stationary(m, B, N, seed=2), exact_with_kernel_prior(m, y)
    smoothed = smoother(**data).smoothed
    variance = smoothed.variance.double() - smoothed.bandwidths.double() ** 2
    return (smoothed.mean.double(), variance), (exact.means, exact.covariances.diagonal(dim1=-2, dim2=-1))


@pytest.mark.parametrize("D", [1, 2, 3])
@pytest.mark.parametrize("kind, resampling", [("ffbs", "stratified"), ("ffbs", "multinomial"), ("tfs", "stratified")])
def test_converges_to_rauch_tung_striebel(kind, D, resampling):
    errors = []
    for N in (60, 960):
        got, want = run_linear(kind, D, N, 100, resampling=resampling)
        errors.append([((g - w) ** 2).mean().sqrt() for g, w in zip(got, want, strict=True)])
        if N == 960:
            for g, w in zip(got, want, strict=True):
                within(g, w, bias=5 / N)
    for few, many in zip(*errors, strict=True):
        assert 2.9 < few / many < 5.5, few / many  # 4 for N^-1/2


# ---- Against enumeration ------------------------------------------------------------------------------------------------


def chain(T=4, N=5, B=2, actions=True):
    """A chain over N places in B sequences: places (N, 3) across the seam, prior, likelihood and transition factors."""
    g = torch.Generator().manual_seed(0)
    places = torch.randn(N, 3, generator=g, **REAL)
    places[:, 2] = math.pi + 0.8 * torch.randn(N, generator=g, **REAL)
    places = POSE.wrap(places)
    moves = 0.5 * torch.randn(B, T, 3, generator=g, **REAL) if actions else None
    likelihood = torch.rand(B, T, N, generator=g, **REAL)
    transition = LearnedTransition().double()
    factors = torch.zeros(B, T, N, N, **REAL)  # of the move to time t, from i to j
    with torch.no_grad():
        for t in range(1, T):
            mu = transition.mean(places.expand(B, N, 3), moves[:, t] if actions else None)
            factors[:, t] = kernel(places.view(1, 1, N, 3), mu.unsqueeze(2), transition.bandwidths)
    return places, moves, likelihood, transition, factors


def enumerate_paths(prior, likelihood, factors, lengths):
    """Smoothed weights (B, T, N) by summing over all N^T paths; 0 in the padding."""
    B, T, N = likelihood.shape
    smoothed = torch.zeros(B, T, N, **REAL)
    for b in range(B):
        for path in itertools.product(range(N), repeat=lengths[b]):
            p = prior[b, path[0]] * likelihood[b, 0, path[0]]
            for t in range(1, lengths[b]):
                p = p * factors[b, t, path[t - 1], path[t]] * likelihood[b, t, path[t]]
            for t, i in enumerate(path):
                smoothed[b, t, i] += p
    return smoothed / smoothed.sum(-1, keepdim=True).clamp_min(1e-300)


def forward_weights(prior, likelihood, factors):
    steps = [prior * likelihood[:, 0]]
    for t in range(1, likelihood.size(1)):
        steps.append(torch.einsum("bi,bij->bj", steps[-1], factors[:, t]) * likelihood[:, t])
    weights = torch.stack(steps, 1)
    return weights / weights.sum(-1, keepdim=True)


def backward_weights(gamma, likelihood, factors, lengths):
    """gamma(x_t) p(y_{t:T} | x_t), normalised; uniform in the padding."""
    B, T, N = likelihood.shape
    weights = torch.ones(B, T, N, **REAL)
    for b in range(B):
        future = torch.ones(N, **REAL)
        for t in range(lengths[b] - 1, -1, -1):
            evidence = likelihood[b, t] * future
            weights[b, t] = gamma * evidence
            future = factors[b, t] @ evidence
    return weights / weights.sum(-1, keepdim=True)


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[4, 4], [4, 2], [3, 1]])
@pytest.mark.parametrize("actions", [True, False])
@pytest.mark.parametrize("kind", ["ffbs", "tfs", "tfs-gamma"])
def test_on_a_discrete_chain_it_is_exact(kind, actions, lengths):
    places, moves, likelihood, transition, factors = chain(actions=actions)
    B, T, N = likelihood.shape
    particles, n = places.expand(B, T, N, 3), torch.tensor(lengths)
    data = {"actions": moves, "lengths": None if lengths == [4, 4] else n}
    for_prior = torch.rand(B, N, generator=torch.Generator().manual_seed(1), **REAL)
    if kind == "ffbs":
        prior = for_prior
        forward = beliefs_of(particles, forward_weights(prior, likelihood, factors).log())
        smoother = mdps.ForwardFilterBackwardSmoother(_nothing(), transition).double()
        got = smoother.smooth(forward, **data)
        assert got.forward is forward
    else:
        log_initial = torch.log_softmax(for_prior, -1).unsqueeze(1).expand(B, T, N)
        bandwidths = torch.tensor([0.7, 0.8, 0.9], **REAL)
        around = kernel(places.view(1, N, 1, 3), places.view(1, 1, N, 3), bandwidths)
        prior = (around * log_initial[:, :1].exp()).sum(-1)  # the kernel density of the initial particles
        log_gamma = wide if kind == "tfs-gamma" else None
        gamma = wide(places).exp() if log_gamma else torch.ones(N, **REAL)
        forward = beliefs_of(particles, forward_weights(prior, likelihood, factors).log(), log_initial, bandwidths)
        backward = beliefs_of(particles, backward_weights(gamma, likelihood, factors, lengths).log())
        smoother = mdps.TwoFilterSmoother(_nothing(), _nothing(reverse=True), transition, log_gamma).double()
        got = smoother.smooth(forward, backward, **data)
        assert got.forward is forward and got.backward is backward
    want = enumerate_paths(prior, likelihood, factors, lengths)
    real = torch.arange(T) < n.unsqueeze(1)
    tolerance = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(got.smoothed.log_weights.exp()[real], want[real], **tolerance)
    assert got.smoothed.log_weights.isfinite().all() and not got.collapsed.any()
    assert torch.equal(got.smoothed.means, particles)


def _nothing(N=5, reverse=False, space=POSE):
    """A filter that is not called."""

    def dynamics(): ...

    dynamics.noise_size = 1
    return mdps.TruncatedGradientParticleFilter(space, dynamics, dynamics, N, reverse=reverse)


# ---- Against the formulas -----------------------------------------------------------------------------------------------


def random_beliefs(N, seed, B=2, T=4):
    g = torch.Generator().manual_seed(seed)
    particles = 2 * torch.randn(B, T, N, 3, generator=g, **REAL)
    log_weights = torch.log_softmax(torch.randn(B, T, N, generator=g, **REAL), -1)
    log_weights[:, :, 1] = -math.inf  # a dead particle stays dead, and changes nothing
    log_weights = log_weights - log_weights.logsumexp(-1, keepdim=True)
    return beliefs_of(POSE.wrap(particles), log_weights, bandwidths=torch.tensor([0.5, 0.6, 0.7], **REAL))


@torch.no_grad()
def test_weights_by_loops():
    """The formulas term by term for particles anywhere on the circle; in TFS both filters have their own number."""
    transition = LearnedTransition().double()
    bandwidths, actions = transition.bandwidths, torch.randn(2, 4, 3, **REAL)
    f, b = random_beliefs(6, 0), random_beliefs(9, 1)
    ffbs = mdps.ForwardFilterBackwardSmoother(_nothing(6), transition).double().smooth(f, actions)
    tfs = mdps.TwoFilterSmoother(_nothing(6), _nothing(9, True), transition, wide).double().smooth(f, b, actions)
    for row in range(2):
        x, w = f.posterior.means[row], f.posterior.log_weights[row].exp()
        mu = torch.stack([transition.mean(x[t : t + 1], actions[row : row + 1, min(t + 1, 3)])[0] for t in range(4)])
        after = w[3]
        for t in (2, 1, 0):
            now = torch.zeros(6, **REAL)
            for i in range(6):
                for j in range(6):
                    below = sum(w[t, k] * kernel(x[t + 1, j], mu[t, k], bandwidths) for k in range(6))
                    now[i] += w[t, i] * after[j] * kernel(x[t + 1, j], mu[t, i], bandwidths) / below
            torch.testing.assert_close(now.sum(), torch.ones((), **REAL))
            torch.testing.assert_close(ffbs.smoothed.log_weights[row, t].exp(), now, rtol=1e-9, atol=1e-14)
            after = now
        z, v = b.posterior.means[row], b.posterior.log_weights[row].exp()
        for t in range(4):
            weights = torch.zeros(9, **REAL)
            for j in range(9):
                centres, widths = (x[0], f.predicted.bandwidths) if t == 0 else (mu[t - 1], bandwidths)
                share = w[max(t - 1, 0)]
                predicted = sum(share[i] * kernel(z[t, j], centres[i], widths) for i in range(6))
                weights[j] = v[t, j] * predicted / wide(z[t, j]).exp()
            got = tfs.smoothed.log_weights[row, t].exp()
            torch.testing.assert_close(got, weights / weights.sum(), rtol=1e-9, atol=1e-14)


def test_gradients():
    """To the weights, the places and the transition, of every output."""
    transition = LearnedTransition().double()
    parameters = list(transition.parameters())
    actions = torch.randn(2, 3, 3, **REAL)
    f, b = (random_beliefs(3, s, T=3) for s in (0, 1))
    alive = [torch.log_softmax(torch.randn(2, 3, 3, **REAL), -1) for _ in range(2)]
    ffbs = mdps.ForwardFilterBackwardSmoother(_nothing(3), transition).double()
    tfs = mdps.TwoFilterSmoother(_nothing(3), _nothing(3, True), transition, wide).double()
    lengths = torch.tensor([3, 2])

    def backward_smoothing(x, w, *_):
        return ffbs.smooth(beliefs_of(x, w), actions, lengths).smoothed.log_weights

    def two_filters(x, w, z, v, *_):
        return tfs.smooth(beliefs_of(x, w), beliefs_of(z, v), actions).smoothed.log_weights

    x, w, z, v = (t.clone().requires_grad_() for t in (f.posterior.means, alive[0], b.posterior.means, alive[1]))
    assert torch.autograd.gradcheck(backward_smoothing, (x, w, *parameters))
    assert torch.autograd.gradcheck(two_filters, (x, w, z, v, *parameters))


@ids
def test_gradients_reach_the_filters_and_the_transition(make):
    smoother = make()
    data = smoother_data(smoother)
    loss = -smoother(**data).smoothed.log_prob(data["observations"]).mean()
    loss.backward()
    assert loss.isfinite()
    for name, p in smoother.named_parameters():
        if "filter.posterior_bandwidth" not in name:  # only TFS has that of the forward filter, in its first prediction
            assert p.grad is not None and p.grad.isfinite().all() and (p.grad != 0).any(), name


# ---- Far and dead -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distance", [1e2, 1e4])
def test_far_particles_have_finite_weights(distance, dtype):
    """Every transition density underflows; the weights are those of the log-densities, in float64 by hand."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, 6, 2, generator=g, **REAL).mul(100).round() / 100  # exact in either type, as are the distances
    x[:, 1] += distance
    x[:, :, :, 1] = 0
    x = x.to(dtype).double()
    w = torch.full((1, 3, 6), -math.log(6), **REAL)
    dynamics = mdps.KernelDynamics(_Stay(), 1.0, names(2))
    smoother = mdps.ForwardFilterBackwardSmoother(_nothing(6, space=names(2)), dynamics).to(dtype)
    particles = x.to(dtype).requires_grad_()
    beliefs = smoother.smooth(beliefs_of(particles, w.to(dtype)))
    after, want = w[:, 2], [w[:, 2]]
    for t in (1, 0):
        log_p = -0.5 * ((x[:, t, :, None] - x[:, t + 1, None]) ** 2).sum(-1)
        log_ratio = after - torch.logsumexp(log_p + w[:, t, :, None], 1)
        after = torch.log_softmax(w[:, t] + torch.logsumexp(log_p + log_ratio[:, None], 2), -1)
        want.append(after)
    want = torch.stack(want[::-1], 1)
    got = beliefs.smoothed.log_weights
    largest = 0.5 * (distance + 4) ** 2  # what the log-densities round at
    tolerance = 16 * largest * torch.finfo(dtype).eps
    assert want.min() < -100 and not beliefs.collapsed.any() and got.isfinite().all()
    torch.testing.assert_close(got.exp().sum(-1), torch.ones(1, 3, dtype=dtype))
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=1e-5)
    (gradient,) = torch.autograd.grad(beliefs.smoothed.log_prob(torch.zeros(2, dtype=dtype)).sum(), particles)
    assert gradient.isfinite().all()


class _Stay(nn.Module):
    def forward(self, particles, action=None):
        return particles


def test_collapse_is_seen():
    """Distances whose log-density overflows; padding does not collapse."""
    x = torch.randn(3, 4, 5, 2)
    x[1:, 2:] += 1e25
    w = torch.full((3, 4, 5), -math.log(5))
    dynamics = mdps.KernelDynamics(_Stay(), 1.0, names(2))
    lengths = torch.tensor([4, 4, 2])
    want = torch.zeros(3, 4, dtype=torch.bool)
    want[1, 1] = True
    particles = x.clone().requires_grad_()
    ffbs = mdps.ForwardFilterBackwardSmoother(_nothing(5, space=names(2)), dynamics)
    beliefs = ffbs.smooth(beliefs_of(particles, w), lengths=lengths)
    assert torch.equal(beliefs.collapsed, want)
    torch.testing.assert_close(beliefs.smoothed.log_weights[1, 1], w[1, 1])
    assert beliefs.smoothed.log_weights.isfinite().all()
    (gradient,) = torch.autograd.grad(beliefs.smoothed.log_weights[:, :2].sum(), particles)
    assert gradient.isfinite().all()
    filters = _nothing(5, space=names(2)), _nothing(5, True, names(2))
    tfs = mdps.TwoFilterSmoother(*filters, dynamics).smooth(beliefs_of(x, w), beliefs_of(x, w), lengths=lengths)
    want = torch.zeros(3, 4, dtype=torch.bool)
    want[1, 2] = True
    assert torch.equal(tfs.collapsed, want) and tfs.smoothed.log_weights.isfinite().all()


def test_particles_outside_the_artificial_prior_are_dead():
    f, b = random_beliefs(6, 0), random_beliefs(6, 1)
    filters = _nothing(6), _nothing(6, True)

    def arena(x):
        return torch.where(x[..., 0].abs() < 2, 0.0, -math.inf)

    inside = mdps.TwoFilterSmoother(*filters, LearnedTransition(), arena).double().smooth(f, b).smoothed
    anywhere = mdps.TwoFilterSmoother(*filters, LearnedTransition()).double().smooth(f, b).smoothed
    outside = b.posterior.means[..., 0].abs() >= 2
    assert outside.any() and (inside.log_weights[outside] == -math.inf).all()
    want = torch.log_softmax(torch.where(outside, -math.inf, anywhere.log_weights), -1)
    torch.testing.assert_close(inside.log_weights, want)


@pytest.mark.skipif(ops.reference_active(), reason="plain PyTorch has N x N entries")
@pytest.mark.parametrize("kind", ["ffbs", "tfs"])
def test_memory_is_linear(kind):
    """N = 5000, T = 3, with gradients: less than 24 MB (an N x N array has 100 MB)."""
    N, T = 5000, 3
    x = torch.randn(1, T, N, 3, requires_grad=True)
    beliefs = beliefs_of(x, torch.zeros(1, T, N) - math.log(N))
    transition = LearnedTransition()
    if kind == "ffbs":
        smoother, arguments = mdps.ForwardFilterBackwardSmoother(_nothing(N), transition), (beliefs,)
    else:
        smoother, arguments = mdps.TwoFilterSmoother(_nothing(N), _nothing(N, True), transition), (beliefs, beliefs)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        smoother.smooth(*arguments).smoothed.mean.sum().backward()
    allocated = sum(max(0, e.self_cpu_memory_usage) for e in profile.key_averages())
    assert allocated < 24 * 2**20, allocated
    assert mdps._C.live_handles() == 0


# ---- Sequences ----------------------------------------------------------------------------------------------------------


@ids
def test_a_padded_batch_is_its_sequences_alone(make):
    smoother = make()
    data = smoother_data(smoother)
    lengths = torch.tensor([6, 3, 1, 5])
    observed = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    hidden = ~(observed & (torch.arange(6) < lengths[:, None]))
    data["observations"][hidden] = math.nan
    data["actions"][torch.arange(6) >= lengths[:, None]] = math.nan
    together = smoother(**data, lengths=lengths, observed=observed)
    for b, n in enumerate(lengths.tolist()):
        row = {k: v[b : b + 1] if k in ("initial", "final", "seed") else v[b : b + 1, :n] for k, v in data.items()}
        alone = smoother(**row, observed=observed[b : b + 1, :n])
        assert_same([t[b : b + 1, :n] for t in smoothed_tensors(together)], list(smoothed_tensors(alone)))
    assert all(t.isfinite().all() for t in smoothed_tensors(together)) and not together.collapsed.any()
    loss = together.smoothed.log_prob(torch.zeros(4, 6, 3)).sum()
    gradients = torch.autograd.grad(loss, list(smoother.parameters()), allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in gradients)


def test_the_last_time_of_ffbs_is_filtered():
    smoother = pose_ffbs()
    beliefs = smoother(**pose_data(), lengths=(lengths := torch.tensor([6, 3, 1, 5])))
    last = torch.arange(4), lengths - 1
    assert torch.equal(beliefs.smoothed.log_weights[last], beliefs.forward.posterior.log_weights[last])
    before = torch.arange(2), lengths[:2] - 2
    assert not torch.equal(beliefs.smoothed.log_weights[before], beliefs.forward.posterior.log_weights[before])


@ids
def test_module(make):
    smoother = make()
    data = smoother_data(smoother)
    want = list(smoothed_tensors(smoother(**data)))
    other = make()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.1)
    other.load_state_dict(smoother.state_dict())
    assert_same(smoothed_tensors(other(**data)), want)
    assert_same(smoothed_tensors(copy.deepcopy(smoother)(**data)), want)
    data["seed"] = torch.tensor(3)
    again = list(smoothed_tensors(smoother(**data)))
    assert_same(smoothed_tensors(smoother(**data)), again)
    assert not torch.equal(again[0], want[0])
    with torch.no_grad():
        assert_same(smoothed_tensors(smoother(**data)), again)


@ids
def test_stages(make):
    """Filter without gradients, then learn the smoothed bandwidth alone."""
    smoother = make()
    data = smoother_data(smoother)
    with torch.no_grad():
        beliefs = smoother(**data)
        filtered = [beliefs.forward, *([beliefs.backward] if "final" in data else [])]
        got = smoother.smooth(*filtered, data["actions"])
    assert_same(smoothed_tensors(got), smoothed_tensors(beliefs))
    smoother.transition.requires_grad_(False)
    smoother.smooth(*filtered, data["actions"]).smoothed.log_prob(data["observations"]).mean().backward()
    learned = [n for n, p in smoother.named_parameters() if p.grad is not None]
    assert learned == ["posterior_bandwidth.log_excess"]


@ids
@pytest.mark.parametrize("B, T, N", [(0, 3, 2), (2, 1, 3), (1, 4, 1)])
def test_small_sizes(make, B, T, N):
    smoother = make(N)
    beliefs = smoother(**smoother_data(smoother, B=B, T=T, N=N))
    assert beliefs.smoothed.log_prob(torch.zeros(B, T, 3)).shape == (B, T)
    assert beliefs.smoothed.mean.isfinite().all() and beliefs.collapsed.shape == (B, T)


@pytest.mark.skipif(ops.reference_active(), reason="references are not made for it")
@ids
def test_compiles_in_one_graph(make):
    smoother = make()
    data = smoother_data(smoother, T=3)

    def loss(lengths):
        return -smoother(**data, lengths=lengths).smoothed.log_prob(data["observations"]).mean()

    lengths = torch.tensor([3, 2, 3, 1])
    torch._dynamo.reset()
    got, want = torch.compile(loss, fullgraph=True, backend="aot_eager")(lengths), loss(lengths)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "kind",
    [
        mdps.MixtureDensityParticleFilter,
        mdps.TruncatedGradientParticleFilter,
        mdps.SoftResamplingParticleFilter,
        mdps.ConcreteParticleFilter,
    ],
)
def test_any_filter_will_do(kind):
    dynamics = mdps.KernelDynamics(Turn(), (0.6, 0.9, 0.8), POSE)
    smoother = mdps.ForwardFilterBackwardSmoother(kind(POSE, dynamics, Distance(), 7), dynamics)
    beliefs = smoother(**pose_data())
    assert beliefs.smoothed.log_weights.isfinite().all() and beliefs.smoothed.means.shape == (4, 6, 7, 3)


def test_errors():
    transition = LearnedTransition()
    flat = mdps.KernelDynamics(_Stay(), 1.0, names(2))
    with pytest.raises(ValueError, match="forward_filter: expected a filter with reverse=False"):
        mdps.ForwardFilterBackwardSmoother(_nothing(reverse=True), transition)
    for make in (
        lambda: mdps.ForwardFilterBackwardSmoother(_nothing(), flat),
        lambda: mdps.TwoFilterSmoother(_nothing(), _nothing(reverse=True), flat),
    ):
        with pytest.raises(ValueError, match=r"transition: expected bandwidths of shape \(D\) = \(3,\), got \(2,\)"):
            make()
    with pytest.raises(ValueError, match="reverse=False and a backward_filter with reverse=True"):
        mdps.TwoFilterSmoother(_nothing(), _nothing(), transition)
    with pytest.raises(ValueError, match="backward_filter: expected StateSpace"):
        mdps.TwoFilterSmoother(_nothing(), _nothing(reverse=True, space=names(3)), transition)
    f, b = random_beliefs(5, 0), random_beliefs(5, 1)
    tfs = mdps.TwoFilterSmoother(_nothing(), _nothing(reverse=True), transition, lambda x: x).double()
    with pytest.raises(ValueError, match=r"artificial_prior: expected to return shape \(2, 4, 5\), got \(2, 4, 5, 3\)"):
        tfs.smooth(f, b)
    with pytest.raises(ValueError, match=r"backward: expected batch shape \(B, T\) = \(2, 4\), got \(2, 3\)"):
        tfs.smooth(f, random_beliefs(5, 1, T=3))
    first, last = (torch.zeros(n, tfs.forward_filter.n_particles, 3).double() for n in (2, 3))
    with pytest.raises(ValueError, match="final: expected B = 2 sequences, those of initial, got 3"):
        tfs(torch.zeros(2, 4, 1).double(), first, last)
    ffbs = mdps.ForwardFilterBackwardSmoother(_nothing(), transition).double()
    with pytest.raises(ValueError, match=r"actions: expected shape \(B, T, ...\) with \(B, T\) = \(2, 4\), got \(2, 3, 3\)"):
        ffbs.smooth(f, torch.zeros(2, 3, 3))
    with pytest.raises(ValueError, match="lengths: expected 1 to T = 4"):
        ffbs.smooth(f, lengths=torch.tensor([5, 1]))
    transition.network.forward = lambda particles, action: particles[..., :2]
    with pytest.raises(ValueError, match=r"transition.mean: expected to return shape \(6, 5, 3\), got \(6, 5, 2\)"):
        ffbs.smooth(f)
