import math

import pytest
import torch
from test_filters import POSE, names

import mdps

REAL = {"dtype": torch.float64}


def mixture(space, N, seed, *batch, bandwidths=0.6, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    means = spread * torch.randn(*batch, N, space.size, generator=g, **REAL)
    log_weights = torch.log_softmax(torch.randn(*batch, N, generator=g, **REAL), -1)
    return mdps.Mixture(means, log_weights, torch.full((space.size,), bandwidths, **REAL), space)


def grid(space, n=160, extent=9.0):
    """Points (n^D, D) and the volume of a cell: sums over them are integrals, to rounding for smooth functions."""
    axes = [torch.linspace(-extent, extent, n + 1, **REAL)[:-1]] * len(space.linear)
    axes += [torch.linspace(-math.pi, math.pi, n + 1, **REAL)[:-1]] * space.n_angular
    volume = math.prod((a[1] - a[0]).item() for a in axes)
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, space.size), volume


SPACES = [names(1), names(2), mdps.StateSpace(angular=("a",)), mdps.StateSpace(linear=("x",), angular=("a",))]


@pytest.mark.parametrize("space", SPACES, ids=lambda s: "".join(s.names))
def test_against_integrals(space):
    a, b = mixture(space, 3, 0, bandwidths=0.9), mixture(space, 4, 1, bandwidths=0.7)
    x, volume = grid(space)
    product = mdps.product(a, b)
    assert product.means.shape == product.bandwidths.shape == (12, space.size)
    density = (a.log_prob(x) + b.log_prob(x)).exp()
    integral = density.sum() * volume
    torch.testing.assert_close(product.log_normaliser, integral.log(), atol=1e-9, rtol=0)
    torch.testing.assert_close(product.log_prob(x), (density / integral).log(), atol=1e-9, rtol=1e-9)
    g, share = len(space.linear), (density / density.sum()).unsqueeze(-1)
    linear, turns = x[:, :g], torch.polar(torch.ones_like(x[:, g:]), x[:, g:])
    mean, vector = (share * linear).sum(0), (share * turns).sum(0)
    torch.testing.assert_close(product.mean, torch.cat([mean, vector.angle()]), atol=1e-9, rtol=1e-9)
    variance = torch.cat([(share * (linear - mean) ** 2).sum(0), 1 - vector.abs()])
    torch.testing.assert_close(product.variance, variance, atol=1e-9, rtol=1e-9)


def test_batches_and_products_of_products():
    """Pointwise a b c / (their integral): equal up to one constant a batch element, which the normalisers give."""
    a, b, c = (mixture(POSE, n, n, 2, 3) for n in (2, 3, 4))
    ab, bc = mdps.product(a, b), mdps.product(b, c)
    one, other = mdps.product(ab, c), mdps.product(a, bc)
    x = 2 * torch.randn(5, 2, 3, 3, **REAL)
    want = a.log_prob(x) + b.log_prob(x) + c.log_prob(x) - ab.log_normaliser - one.log_normaliser
    assert one.means.shape == (2, 3, 24, 3)
    torch.testing.assert_close(one.log_prob(x), want)
    torch.testing.assert_close(other.log_prob(x), want)
    torch.testing.assert_close(one.mean, other.mean)
    torch.testing.assert_close(bc.log_normaliser + other.log_normaliser, ab.log_normaliser + one.log_normaliser)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bandwidth", [1e-4, 1e-2, 1.0, 1e4])
def test_extreme_concentrations(bandwidth, dtype):
    """Narrow kernels are Gaussians; wide ones are uniform; opposite ones agree nowhere and stay finite."""
    space = mdps.StateSpace(angular=("a",))

    def at(angle, width):
        return mdps.Mixture(
            torch.tensor([[angle]], dtype=dtype), torch.zeros(1, dtype=dtype), torch.tensor([width], dtype=dtype), space
        )

    a, b = at(math.pi - bandwidth * 0.5, bandwidth), at(-math.pi + bandwidth * 0.25, 2 * bandwidth)
    p = mdps.product(a, b)
    if bandwidth <= 1e-2:
        line = mdps.product(
            *(
                mdps.Mixture(m, x.log_weights, x.bandwidths, names(1))
                for m, x in ((torch.zeros(1, 1, dtype=dtype), a), (torch.full((1, 1), 0.75 * bandwidth, dtype=dtype), b))
            )
        )
        torch.testing.assert_close(p.bandwidths, line.bandwidths, rtol=1e-3, atol=0)
        torch.testing.assert_close(p.log_normaliser, line.log_normaliser, rtol=0, atol=5e-3)
        want = space.wrap(a.means + line.means)
        assert (space.difference(p.means, want).abs() < 1e-2 * bandwidth + 1e-6).all()
    if bandwidth == 1e4:
        torch.testing.assert_close(p.log_normaliser, torch.tensor(-math.log(2 * math.pi), dtype=dtype), atol=1e-6, rtol=0)
    opposite = mdps.product(at(0.0, bandwidth), at(-math.pi, bandwidth))
    assert all(t.isfinite().all() for t in (opposite.means, opposite.log_weights, opposite.log_normaliser, opposite.variance))
    assert opposite.log_prob(torch.tensor([1.0], dtype=dtype)).isfinite()


def test_gradients():
    def f(means, log_weights, bandwidths, other):
        a = mdps.Mixture(means, log_weights, bandwidths, POSE)
        p = mdps.product(a, mdps.Mixture(other, torch.zeros(2, **REAL), torch.full((3,), 0.5, **REAL), POSE))
        return p.log_normaliser, p.mean, p.log_prob(torch.ones(3, **REAL))

    m = mixture(POSE, 3, 0)
    inputs = m.means, m.log_weights, m.bandwidths, mixture(POSE, 2, 1).means
    assert torch.autograd.gradcheck(f, [t.clone().requires_grad_() for t in inputs])


def test_errors():
    with pytest.raises(ValueError, match="b: expected StateSpace"):
        mdps.product(mixture(POSE, 2, 0), mixture(names(3), 2, 0))
    with pytest.raises(ValueError, match=r"b: expected batch shape \(2,\), got \(3,\)"):
        mdps.product(mixture(POSE, 2, 0, 2), mixture(POSE, 2, 0, 3))


# ---- The smoother against it --------------------------------------------------------------------------------------------


def beliefs(predicted):
    """What a smoother reads of a filter's beliefs."""
    batch = predicted.batch_shape
    nothing = torch.zeros(batch)
    return mdps.FilterBeliefs(predicted, predicted, torch.zeros(*batch, 1).long(), nothing.bool(), nothing, nothing)


class TrueLikelihood(torch.nn.Module):
    """log p(y | x) + log m_f + log m_b, p a kernel around the observation; the artificial prior is uniform."""

    def forward(self, particles, observation, log_forward, log_backward):
        log_p = mdps.ops.mixture_log_prob(
            particles, observation.unsqueeze(1), torch.zeros_like(observation[:, :1]), OBSERVATION_BANDWIDTHS, n_angular=1
        )
        return log_p + log_forward + log_backward


OBSERVATION_BANDWIDTHS = torch.tensor([0.8, 1.1, 0.7])


@torch.no_grad()
def smoothed_by_particles(M, runs, options):
    """Smoothed particles of mixtures that differ in time, and the exact answer: (runs, T, 6) and (T, 6), mean and variance."""
    T = 3
    m_f, m_b = (mixture(POSE, n, n, T, bandwidths=0.6) for n in (4, 5))
    y = torch.randn(T, 3, generator=torch.Generator().manual_seed(9), **REAL)
    y[1, 2] = math.pi
    observation = mdps.Mixture(y.unsqueeze(1), torch.zeros(T, 1, **REAL), OBSERVATION_BANDWIDTHS.double(), POSE)
    exact = mdps.product(mdps.product(m_f, m_b), observation)
    smoother = mdps.MixtureDensityParticleSmoother(
        *_filters(), TrueLikelihood(), n_particles=M, posterior_bandwidth=1e-3, minimum_bandwidth=0.0, **options
    )

    def many(m):
        return beliefs(
            mdps.Mixture(
                m.means.float().expand(runs, -1, -1, -1),
                m.log_weights.float().expand(runs, -1, -1),
                m.bandwidths.float(),
                POSE,
            )
        )

    got = smoother.smooth(many(m_f), many(m_b), y.float().expand(runs, -1, -1), seed=torch.tensor(3)).smoothed
    return torch.cat([got.mean, got.variance], -1).double(), torch.cat([exact.mean, exact.variance], -1)


def _filters():
    class Nothing:
        noise_size = 1

    return [mdps.MixtureDensityParticleFilter(POSE, Nothing(), Nothing(), 4, reverse=r) for r in (False, True)]


@pytest.mark.parametrize("options", [{}, {"mixing": 0.3}])
def test_smoother_converges_to_the_product(options):
    """At the rate M^-1/2; the bias of self-normalised weights is O(1 / M)."""
    errors = []
    for M in (100, 1600):
        got, want = smoothed_by_particles(M, 200, options)
        difference = torch.cat([POSE.difference(got[..., :3], want[..., :3]), got[..., 3:] - want[..., 3:]], -1)
        errors.append((difference**2).mean((0, 1)).sqrt())
        standard_error = difference.std(0) / math.sqrt(200)
        assert (difference.mean(0).abs() < 4 * standard_error + 5 / M).all()
    ratio = errors[0] / errors[1]
    assert ((ratio > 3) & (ratio < 5.5)).all(), ratio  # 4 for M^-1/2


def test_without_the_division_it_does_not():
    got, want = smoothed_by_particles(1600, 50, {"divide_by_proposal": False})
    assert ((got.mean(0) - want).abs() > 20 * got.std(0) / math.sqrt(50)).any()
