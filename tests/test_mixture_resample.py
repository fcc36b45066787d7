import math

import pytest
import test_philox_normal
import test_philox_von_mises
import test_resample
import torch
from scipy import stats
from table import Case, check_errors, checks

import mdps
from mdps import ops


def brute_force(means, log_weights, bandwidths, seed, n_samples=None, n_angular=0, scheme="stratified", stream=0):
    """float64, from the oracles of resample, philox_normal and philox_von_mises."""
    *lead, n, d = means.shape
    m, linear, rows = n if n_samples is None else n_samples, d - n_angular, math.prod(lead)
    flat = seed.reshape(-1) if seed.dim() else seed
    ancestors = test_resample.brute_force(log_weights, seed, m, scheme, stream)
    noise = test_philox_normal.brute_force(torch.zeros(rows, m, linear), flat, stream)
    b = bandwidths.expand(*lead, d).reshape(rows, 1, d).expand(rows, m, d)
    concentrations = [math.inf if x == 0 else 1 / x**2 for x in b[..., linear:].flatten().tolist()]
    concentrations = torch.tensor(concentrations, dtype=torch.float64)
    angles = test_philox_von_mises.brute_force(concentrations.view(rows, m, n_angular), flat, stream)
    mean = means.reshape(rows, n, d).gather(1, ancestors.reshape(rows, m, 1).expand(-1, -1, d))
    angles = [math.remainder(x, 2 * math.pi) for x in (mean[..., linear:] + angles).flatten().tolist()]
    angles = torch.tensor(angles, dtype=torch.float64).view(rows, m, n_angular)
    samples = torch.cat([mean[..., :linear] + b[..., :linear] * noise, angles], -1)
    bad = ~(log_weights.reshape(rows, n) < math.inf).all(-1) | ~(b[:, 0] >= 0).all(-1) if m else torch.zeros(rows).bool()
    samples[bad] = math.nan
    return samples.reshape(*lead, m, d), ancestors


def mixture(lead, n, d, seed=12345, shared=True, edit=None):
    def make(g):
        means = 3 * torch.randn(*lead, n, d, generator=g, dtype=torch.float64)
        log_weights = torch.randn(*lead, n, generator=g, dtype=torch.float64)
        bandwidths = torch.rand(*(() if shared else lead), d, generator=g, dtype=torch.float64) + 0.1
        if edit:
            edit(means, log_weights, bandwidths)
        return means, log_weights, bandwidths, torch.tensor(seed)

    return make


def strange(means, log_weights, bandwidths):
    log_weights[0, 2] = math.nan
    log_weights[1] = -math.inf
    log_weights[2, 1] = math.inf
    log_weights[3, ::2] = -math.inf
    bandwidths[4, 1] = math.nan
    bandwidths[5, 2] = -0.5
    bandwidths[6] = 0.0


def case(name, args, **kwargs):
    # float32 takes other normal words than the oracle's float64; test_samples_are_made_of_the_other_operators compares them.
    return Case(name, ops.mixture_resample, args, brute_force, atol=100.0, **kwargs)


CASES = [
    case("pose", mixture((3,), 20, 3), options={"n_angular": 1}),
    case("linear", mixture((2,), 9, 2), options={"n_samples": 200}),
    case("angular", mixture((2,), 9, 1), options={"n_angular": 1, "n_samples": 5}),
    case("five angles", mixture((2,), 9, 7), options={"n_angular": 5, "n_samples": 90, "scheme": "multinomial"}),
    case("a bandwidth and seed a row", mixture((3,), 8, 3, [1, 2, 3], shared=False), options={"n_angular": 1, "stream": 9}),
    case("leading dimensions", mixture((2, 2), 8, 3, [[1, 2], [3, 4]], shared=False), options={"n_angular": 2}),
    case("one component", mixture((2,), 1, 2), options={"n_samples": 3, "scheme": "residual"}),
    case("in parts", mixture((2,), 8200, 2), options={"n_samples": 30, "n_angular": 1}),
    case("no draw", mixture((2,), 4, 2), options={"n_samples": 0, "n_angular": 1}),
    case("strange rows", mixture((8,), 6, 3, shared=False, edit=strange), options={"n_angular": 1, "scheme": "systematic"}),
]

TestOperator = checks(CASES)


def call(means=None, log_weights=None, bandwidths=None, seed=None, **kwargs):
    def default(x, y):
        return y if x is None else x

    return lambda: ops.mixture_resample(
        default(means, torch.zeros(2, 3, 4)),
        default(log_weights, torch.zeros(2, 3)),
        default(bandwidths, torch.ones(4)),
        default(seed, torch.tensor(0)),
        **kwargs,
    )


def raw(means, log_weights, bandwidths, seed, *args):
    return lambda: torch.ops.mdps.mixture_resample(means, log_weights, bandwidths, torch.tensor(seed), *args)


test_errors = check_errors(
    [
        (call(means=[1.0]), TypeError, "means: expected a tensor, got list"),
        (call(bandwidths=torch.ones(4).double()), TypeError, "bandwidths: expected the dtype of means"),
        (call(means=torch.zeros(2, 0, 4)), ValueError, r"means: expected shape \(..., N, D\) with N >= 1"),
        (call(log_weights=torch.zeros(2, 4)), ValueError, r"log_weights: expected shape \(..., N\) = \(2, 3\), got \(2, 4\)"),
        (call(bandwidths=torch.ones(3)), ValueError, r"bandwidths: expected shape \(D\) or \(..., D\) = \(4,\), got \(3,\)"),
        (call(bandwidths=torch.ones(3, 4)), ValueError, r"bandwidths: expected shape .* = \(2, 4\), got \(3, 4\)"),
        (call(n_angular=5), ValueError, "n_angular: expected 0 to 4"),
        (call(scheme="best"), ValueError, "scheme: expected one of"),
        (call(n_samples=2.0), TypeError, "n_samples: expected an int, got 2.0"),
        (call(n_samples=-1), ValueError, "n_samples: expected 0 to"),
        (call(seed=torch.zeros(3).long()), ValueError, r"seed: expected shape \(\) or \(...\) = \(2,\), got \(3,\)"),
        (
            raw(torch.zeros(2, 3, 4), torch.zeros(2, 2), torch.ones(4), 0, 3, 1, 1, 0),
            RuntimeError,
            "^mdps.mixture_resample: log_weights: expected size 3 in dimension 1, got 2$",
        ),
        (
            raw(torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.ones(3, 4), 0, 3, 1, 1, 0),
            RuntimeError,
            "bandwidths: expected size 2 in dimension 0, got 3",
        ),
        (
            raw(torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.ones(4), 0, 3, 5, 1, 0),
            RuntimeError,
            "n_angular: expected 0 to 4, got 5",
        ),
        (
            raw(torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.ones(4), 0, -4, 1, 1, 0),
            RuntimeError,
            "^mdps.mixture_resample: n_samples: expected 0 to 2.31 - 2, got -4$",
        ),
    ]
)


@pytest.mark.parametrize("scheme", ["multinomial", "stratified", "systematic", "residual"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_are_made_of_the_other_operators(scheme, dtype):
    g = torch.Generator().manual_seed(2)
    means, log_weights = torch.randn(3, 300, 5, generator=g, dtype=dtype), torch.randn(3, 300, generator=g, dtype=dtype)
    bandwidths = torch.tensor([0.3, 2.0, 5.0, 0.01, 1.0], dtype=dtype)
    seed = ops.make_seed(g, 3)
    samples, ancestors = ops.mixture_resample(means, log_weights, bandwidths, seed, 700, n_angular=2, scheme=scheme, stream=4)
    assert torch.equal(ancestors, ops.resample(log_weights, seed, 700, scheme=scheme, stream=4))
    mean = means.gather(1, ancestors[..., None].expand(-1, -1, 5))
    noise = ops.philox_normal(seed, (3, 700, 3), stream=4, dtype=dtype)
    torch.testing.assert_close(samples[..., :3], mean[..., :3] + bandwidths[:3] * noise, rtol=1e-6, atol=1e-6)
    turn = ops.philox_von_mises(seed, (bandwidths[3:] ** -2).expand(3, 700, 2), stream=4)
    difference = torch.remainder(samples[..., 3:] - mean[..., 3:] - turn + math.pi, 2 * math.pi) - math.pi
    assert difference.abs().max() < 3e-6
    assert samples[..., 3:].min() >= -math.pi and samples[..., 3:].max() < math.pi


def two_normals(x):
    return stats.norm([0.0, 4.0], 0.5).cdf(x[:, None]) @ [0.25, 0.75]


def test_distribution():
    """Two components: a linear and an angular marginal against their exact laws."""
    m = 40000
    means = torch.tensor([[[0.0, 3.0], [4.0, -1.0]]])
    log_weights, bandwidths = torch.tensor([[0.25, 0.75]]).log(), torch.tensor([0.5, 0.4])
    for scheme in ("multinomial", "stratified"):
        x, a = ops.mixture_resample(means, log_weights, bandwidths, torch.tensor(6), m, n_angular=1, scheme=scheme)
        assert stats.kstest(x[0, :, 0].numpy(), two_normals).pvalue > 1e-3
        for j in range(2):
            turn = x[0, a[0] == j, 1] - means[0, j, 1]
            turn = torch.remainder(turn + math.pi, 2 * math.pi) - math.pi
            assert stats.kstest(turn.double().numpy(), stats.vonmises(1 / 0.4**2).cdf).pvalue > 1e-3


def test_bandwidths_zero_and_infinite():
    means = torch.randn(2, 50, 2)
    x, a = ops.mixture_resample(means, torch.zeros(2, 50), torch.zeros(2), torch.tensor(6), n_angular=1)
    mean = means.gather(1, a[..., None].expand(-1, -1, 2))
    inside = mean[..., 1].abs() < math.pi
    assert torch.equal(x[..., 0], mean[..., 0]) and torch.equal(x[..., 1][inside], mean[..., 1][inside])
    wide = torch.tensor([1.0, math.inf])
    x, _ = ops.mixture_resample(means, torch.zeros(2, 50), wide, torch.tensor(6), 20000, n_angular=1)
    assert stats.kstest(x[..., 1].flatten().numpy(), stats.uniform(-math.pi, 2 * math.pi).cdf).pvalue > 1e-3


def test_no_gradient_no_warning(recwarn):
    means, log_weights = torch.randn(2, 5, 3, requires_grad=True), torch.randn(2, 5, requires_grad=True)
    bandwidths, seed = torch.ones(3, requires_grad=True), torch.tensor(1)

    def f(means, log_weights, bandwidths):
        x, a = ops.mixture_resample(means, log_weights, bandwidths, seed, n_angular=1)
        assert not x.requires_grad and not a.requires_grad
        return (x * bandwidths).sum() + (means**2).sum()

    assert not ops.mixture_resample(means, log_weights, bandwidths, seed)[0].requires_grad
    args = means, log_weights, bandwidths
    want = torch.autograd.grad(f(*args), (means, bandwidths))
    torch.testing.assert_close(torch.func.grad(f, (0, 2))(*args), want)
    torch.testing.assert_close(torch.vmap(torch.func.grad(f, (0, 2)))(*(torch.stack([a, a]) for a in args))[0][1], want[0])
    compiled = torch.compile(lambda *a: f(*a), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*args), (means, bandwidths)), want)
    assert not [w for w in recwarn if "mdps" in str(w.message)]


def test_nan_stays_in_its_row():
    means, log_weights, bandwidths = torch.randn(3, 8, 2), torch.randn(3, 8), torch.ones(3, 2)
    want = ops.mixture_resample(means, log_weights, bandwidths, torch.tensor(0), n_angular=1)
    for spoiled in ("log_weights", "bandwidths"):
        args = {"means": means, "log_weights": log_weights.clone(), "bandwidths": bandwidths.clone()}
        args[spoiled][1, 0] = math.nan
        x, a = ops.mixture_resample(**args, seed=torch.tensor(0), n_angular=1)
        assert torch.equal(x[[0, 2]], want[0][[0, 2]]) and torch.equal(a[[0, 2]], want[1][[0, 2]])
        assert x[1].isnan().all() and (a[1] >= 0).all() and (a[1] < 8).all()
    assert mdps._C.live_handles() == 0


def test_kernels_take_the_numbers_of_the_philox_operators():
    """As the docstrings say: who wants others gives another stream."""
    seed, (B, M) = torch.tensor([3, 4]), (2, 9)
    zero, widths = torch.zeros(B, 1, 3), torch.tensor([1.0, 1.0, 0.5])
    samples, _ = ops.mixture_resample(zero, torch.zeros(B, 1), widths, seed, M, n_angular=1)
    normal, angle = ops.philox_normal(seed, (B, M, 2)), ops.philox_von_mises(seed, torch.full((B, M), 4.0))
    torch.testing.assert_close(samples, torch.cat([normal, angle[..., None]], -1))
    other = ops.mixture_resample(zero, torch.zeros(B, 1), widths, seed, M, n_angular=1, stream=1)[0]
    assert not (other[..., :2] == normal).any()
