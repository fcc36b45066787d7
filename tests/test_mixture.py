import math

import pytest
import torch
from scipy import stats
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

import mdps
from mdps import ops

POSE = mdps.StateSpace(linear=("x", "y"), angular=("heading",))
PLANE = mdps.StateSpace(linear=("x", "y"))


def mixture(space=POSE, B=3, T=4, N=5, per_row=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    means = torch.randn(B, T, N, space.size, generator=g, dtype=torch.float64)
    log_weights = torch.randn(B, T, N, generator=g, dtype=torch.float64).log_softmax(-1)
    widths = 0.3 + torch.rand(*((B, T) if per_row else ()), space.size, generator=g, dtype=torch.float64)
    return mdps.Mixture(means, log_weights, widths, space)


def density(m, value, index):
    """By scipy, of one value (3) under the mixture at batch index (b, t)."""
    widths = (m.bandwidths if m.bandwidths.dim() == 1 else m.bandwidths[index]).tolist()
    total = 0.0
    for mean, log_weight in zip(m.means[index].tolist(), m.log_weights[index].tolist(), strict=True):
        kernel = stats.norm.pdf(value[:2], mean[:2], widths[:2]).prod()
        total += math.exp(log_weight) * kernel * stats.vonmises.pdf(value[2] - mean[2], widths[2] ** -2)
    return math.log(total)


@pytest.mark.parametrize("per_row", [False, True])
def test_log_prob(per_row):
    m = mixture(per_row=per_row)
    assert m.batch_shape == (3, 4) and m.event_shape == (3,) and m.n_components == 5
    value = torch.randn(3, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = m.log_prob(value)
    want = torch.tensor([[density(m, value[b, t], (b, t)) for t in range(4)] for b in range(3)], dtype=torch.float64)
    torch.testing.assert_close(got, want)
    prefixed = m.log_prob(torch.stack([value, value + 1]).unsqueeze(1))
    assert prefixed.shape == (2, 1, 3, 4)
    torch.testing.assert_close(prefixed[:, 0], torch.stack([got, m.log_prob(value + 1)]))
    torch.testing.assert_close(m.log_prob(value[0, 0]), m.log_prob(value[0, 0].expand(3, 4, 3)))
    many = m.log_prob_many(torch.stack([value, value + 1], -2))
    torch.testing.assert_close(many, prefixed[:, 0].movedim(0, -1))


def test_log_prob_against_torch():
    m = mixture(PLANE)
    parts = Independent(Normal(m.means, m.bandwidths.expand_as(m.means)), 1)
    want = MixtureSameFamily(Categorical(logits=m.log_weights), parts)
    value = torch.randn(7, 3, 4, 2, dtype=torch.float64)
    torch.testing.assert_close(m.log_prob(value), want.log_prob(value))
    torch.testing.assert_close(m.mean, want.mean)
    torch.testing.assert_close(m.variance, want.variance)


def test_moments_against_draws():
    m = mixture(B=1, T=2)
    draws = m.sample((40000,), seed=torch.tensor(4))
    assert draws.shape == (40000, 1, 2, 3) and (draws[..., 2].abs() <= math.pi + 1e-6).all()
    linear, turns = draws[..., :2], torch.exp(1j * draws[..., 2]).mean(0)
    torch.testing.assert_close(m.mean[..., :2], linear.mean(0), atol=0.03, rtol=0)
    torch.testing.assert_close(m.variance[..., :2], linear.var(0), atol=0, rtol=0.04)
    torch.testing.assert_close(m.mean[..., 2], turns.angle(), atol=0.05, rtol=0)
    torch.testing.assert_close(m.variance[..., 2], 1 - turns.abs(), atol=0.015, rtol=0)


def test_sample():
    m = mixture()
    a, b = m.sample((2, 3), seed=torch.tensor(4)), m.sample((2, 3), seed=torch.tensor(4))
    assert a.shape == (2, 3, 3, 4, 3) and torch.equal(a, b)
    assert m.sample().shape == (3, 4, 3)
    g = torch.Generator().manual_seed(3)
    first, second = m.sample(generator=g), m.sample(generator=g)
    assert not torch.equal(first, second)
    assert torch.equal(first, m.sample(generator=g.manual_seed(3)))
    dead = mdps.Mixture(m.means, m.log_weights.new_tensor([0.0] + [-math.inf] * 4).expand(3, 4, 5), m.bandwidths * 1e-3, POSE)
    offset = POSE.difference(dead.sample((9,), seed=torch.tensor(0)), m.means[..., 0, :])
    assert offset.abs().max() < 0.01
    m.means.requires_grad_()
    assert not m.sample().requires_grad


def test_marginal_integrates_the_rest_out():
    m = mixture(B=1, T=1)
    x = m.marginal("x")
    assert x.space == mdps.StateSpace(linear=("x",)) and m.marginal(("heading", "x")).space.names == ("x", "heading")
    heading = torch.linspace(-math.pi, math.pi, 201, dtype=torch.float64)[:-1]
    y = torch.linspace(-9, 9, 301, dtype=torch.float64)
    grid = torch.cartesian_prod(torch.tensor([0.3], dtype=torch.float64), y, heading)
    total = m.log_prob_many(grid.expand(1, 1, -1, -1)).exp().sum() * (18 / 300) * (2 * math.pi / 200)
    torch.testing.assert_close(x.log_prob(torch.tensor([0.3], dtype=torch.float64)).exp().squeeze(), total, rtol=1e-6, atol=0)


def test_variance_of_narrow_and_wide_angles():
    space = mdps.StateSpace(angular=("a",))
    for width, want in ((1e-3, 0.5e-6), (1e3, 1.0)):
        one = torch.zeros(1, 1, dtype=torch.float64)
        m = mdps.Mixture(one, one[0], torch.tensor([width], dtype=torch.float64), space)
        assert m.variance.item() == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("per_row", [False, True])
def test_modes(per_row):
    """Narrow kernels: the modes are the means of the heaviest components, in the order of their weights."""
    wide = mixture(per_row=per_row)
    m = mdps.Mixture(wide.means, wide.log_weights, wide.bandwidths * 1e-4, POSE)
    modes, log_densities = m.modes(2, 1e-3)
    assert modes.shape == (3, 4, 2, 3) and log_densities.shape == (3, 4, 2)
    best = m.log_weights.topk(2).indices[..., None].expand(3, 4, 2, 3)
    torch.testing.assert_close(POSE.difference(modes, m.means.gather(-2, best)), torch.zeros_like(modes), rtol=0, atol=1e-9)
    torch.testing.assert_close(log_densities, m.log_prob_many(modes))
    modes, log_densities = m.modes(2, (100.0, 100.0, math.pi + 0.1))
    assert (log_densities[..., 1] == -math.inf).all() and torch.equal(modes[..., 1, :], modes[..., 0, :])
    assert mixture(PLANE).modes(1, (0.5, 0.5))[0].shape == (3, 4, 1, 2)
    one = mdps.Mixture(m.means[0, 0], m.log_weights[0, 0], m.bandwidths[0, 0] if per_row else m.bandwidths, POSE)
    torch.testing.assert_close(one.modes(2, 1e-3)[0], m.modes(2, 1e-3)[0][0, 0])


@pytest.mark.parametrize("what", ["log_prob", "mean", "variance"])
def test_gradients(what):
    m = mixture()
    inputs = [m.means.requires_grad_(), m.log_weights.requires_grad_(), m.bandwidths.requires_grad_()]
    value = torch.randn(3, 4, 3, dtype=torch.float64)

    def f(*args):
        result = getattr(mdps.Mixture(*args, POSE), what)
        return result(value) if what == "log_prob" else result

    torch.autograd.gradcheck(f, inputs)


def test_as_a_distribution():
    m = mixture()
    assert m.stddev.shape == (3, 4, 3)
    assert m.expand((2, 3, 4)).log_prob(torch.zeros(2, 3, 4, 3).double()).shape == (2, 3, 4)
    assert repr(m) == "Mixture(batch_shape=(3, 4), n_components=5, names=('x', 'y', 'heading'))"
    checked = mdps.Mixture(m.means, m.log_weights, m.bandwidths, POSE, validate_args=True)
    with pytest.raises(ValueError, match="within the support"):
        checked.log_prob(torch.full((3, 4, 3), math.nan, dtype=torch.float64))
    with pytest.raises(NotImplementedError):
        m.rsample()


def test_bandwidth():
    b = mdps.Bandwidth((2.0, 2.0, 0.173), (0.1, 0.1, 0.032), POSE)
    torch.testing.assert_close(b(), torch.tensor([2.0, 2.0, 0.173]))
    with torch.no_grad():
        b.log_excess.fill_(-100.0)
    torch.testing.assert_close(b(), torch.tensor([0.1, 0.1, 0.032]))
    assert [n for n, _ in b.named_parameters()] == ["log_excess"]


def test_a_batch_of_one_is_broadcast():
    """As of torch's own distributions: where a size is 1, the mixture is the same for all values."""
    generator = torch.Generator().manual_seed(0)
    one = mdps.Mixture(torch.randn(1, 4, 3, generator=generator), torch.zeros(1, 4) - math.log(4), torch.ones(3), POSE)
    value = torch.randn(5, 3, generator=generator)
    want = torch.stack([one.log_prob(v) for v in value]).squeeze(1)
    torch.testing.assert_close(one.log_prob(value), want)
    column = one.expand((2, 1))
    torch.testing.assert_close(column.log_prob(value.expand(2, 5, 3)), want.expand(2, 5))
    torch.testing.assert_close(column.log_prob(value.expand(7, 2, 5, 3)), want.expand(7, 2, 5))


@pytest.mark.parametrize(
    "make, error, words",
    [
        (
            lambda m: mdps.Mixture(m.means, m.log_weights, m.bandwidths, PLANE),
            ValueError,
            r"means: .* D = 2, got \(3, 4, 5, 3\)",
        ),
        (
            lambda m: mdps.Mixture(m.means, m.log_weights[0], m.bandwidths, POSE),
            ValueError,
            r"log_weights: expected shape \(3, 4, 5\), got \(4, 5\)",
        ),
        (
            lambda m: mdps.Mixture(m.means, m.log_weights, m.bandwidths[:2], POSE),
            ValueError,
            r"bandwidths: expected shape \(3,\) or \(3, 4, 3\), got \(2,\)",
        ),
        (lambda m: m.log_prob(torch.zeros(2, 1)), ValueError, r"value: expected shape \(..., D\) with D = 3, got \(2, 1\)"),
        (lambda m: m.log_prob(torch.zeros(())), ValueError, r"value: expected shape \(..., D\) with D = 3, got \(\)"),
        (
            lambda m: mdps.Mixture(m.means, m.log_weights + 1, m.bandwidths, POSE, validate_args=True),
            ValueError,
            "log_weights: expected normalised ones, .*mdps.ops.normalize_log_weights.*, got 1 to 1",
        ),
        (
            lambda m: mdps.Mixture(m.means, m.log_weights * math.nan, m.bandwidths, POSE, validate_args=True),
            ValueError,
            "log_weights: expected normalised ones",
        ),
        (lambda m: m.log_prob(0.0), TypeError, "value: expected a tensor, got float"),
        (
            lambda m: m.log_prob(torch.zeros(7, 3)),
            ValueError,
            r"value: expected a shape that broadcasts with \(.*3\), .* got \(7, 3\)",
        ),
        (lambda m: m.marginal("z"), ValueError, "names: expected some of"),
        (lambda m: m.modes(0, 1.0), ValueError, "n_modes: expected 1 to"),
        (lambda m: m.modes(2, (1.0, 2.0)), ValueError, "radii: expected 3 numbers"),
        (lambda m: mdps.Bandwidth(0.1, -1.0, POSE), ValueError, "bandwidth: expected more than the minimum"),
    ],
)
def test_errors(make, error, words):
    with pytest.raises(error, match=words):
        make(mixture())


def test_validated_weights_may_be_as_far_from_normalised_as_float32_leaves_them():
    log_weights = torch.log_softmax(torch.randn(2, 100_000), -1)
    log_weights[0, 1:] = -math.inf
    log_weights[0, 0] = 0
    m = mdps.Mixture(torch.zeros(2, 100_000, 3), log_weights, torch.ones(3), POSE, validate_args=True)
    assert m.marginal("x").expand((5, 2)).batch_shape == (5, 2)


def test_one_operator_call(monkeypatch):
    calls = []
    real = ops.mixture_log_prob
    monkeypatch.setattr(ops, "mixture_log_prob", lambda *a, **k: calls.append(1) or real(*a, **k))
    mixture().log_prob(torch.zeros(6, 3, 4, 3, dtype=torch.float64))
    assert len(calls) == 1
