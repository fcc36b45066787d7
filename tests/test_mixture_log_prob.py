import math

import pytest
import torch
from table import EMULATED, Case, check_errors, checks

import mdps
from mdps import ops


def brute_force(x, means, log_weights, bandwidths, n_angular=0):
    """The definition, pair by pair in float64, with scipy-grade Bessel functions from torch; logsumexp by hand."""
    d = x.size(-1)
    beta = bandwidths.expand(*x.shape[:-2], d) if bandwidths.dim() == 1 else bandwidths
    total = log_weights.unsqueeze(-2).expand(*x.shape[:-1], means.size(-2))
    for k in range(d):
        delta = x[..., k].unsqueeze(-1) - means[..., k].unsqueeze(-2)
        b = beta[..., k, None, None]
        if k < d - n_angular:
            total = total - 0.5 * (delta / b) ** 2 - torch.log(b) - 0.5 * math.log(2 * math.pi)
        else:
            kappa = 1 / b**2
            total = total - 2 * kappa * torch.sin(delta / 2) ** 2 - math.log(2 * math.pi) - torch.log(torch.special.i0e(kappa))
    top = total.detach().max(-1, keepdim=True).values
    shift = torch.where(top == -math.inf, torch.zeros_like(top), top)
    dead = (total == -math.inf).all(-1)
    alive = torch.where(dead[..., None], torch.zeros_like(total), total - shift)
    out = torch.log(torch.exp(alive).sum(-1)) + shift.squeeze(-1)
    return torch.where(dead, torch.full_like(out, -math.inf), out)


def mixture(B, M, N, D, A, *, spread=4.0, width=0.8, shared=True, edit=None):
    """Queries and means around three modes, bandwidths about `width`, angles about a fifth of it."""

    def make(g):
        def states(n):
            mode = torch.randint(3, (B, n, 1), generator=g) - 1.0
            return mode * spread + torch.randn(B, n, D, generator=g, dtype=torch.float64) * spread / 3

        x, means = states(M), states(N)
        log_weights = torch.randn(B, N, generator=g, dtype=torch.float64).log_softmax(-1)
        bandwidths = width * (0.7 + 0.6 * torch.rand(D if shared else (B, D), generator=g, dtype=torch.float64))
        bandwidths[..., D - A :] *= 0.3
        args = [x, means, log_weights, bandwidths]
        if edit:
            edit(*args)
        return tuple(args)

    return make


def case(name, args, n_angular, **kwargs):
    kwargs.setdefault("wrt", (0, 1, 2, 3))
    return Case(name, ops.mixture_log_prob, args, brute_force, {"n_angular": n_angular}, **kwargs)


def far_away(x, means, log_weights, bandwidths):
    x[:, ::3, 0] += 3000 * bandwidths[..., 0]
    x[:, 1::7, :] -= 40.0


def far_offset(x, means, log_weights, bandwidths):
    x[..., :2] += 5000
    means[..., :2] += 5000


def dead_components(x, means, log_weights, bandwidths):
    log_weights[:, ::2] = -math.inf


def collapse(x, means, log_weights, bandwidths):
    log_weights[0] = -math.inf


def turns(x, means, log_weights, bandwidths):
    x[..., -1] += 2 * math.pi * (torch.arange(x[..., -1].numel()).reshape(x.shape[:-1]) % 101 - 50)
    means[..., -1] = math.pi * (1 - 1e-3 * means[..., -1])


def narrow(x, means, log_weights, bandwidths):
    bandwidths[..., -1] = 1e-4  # concentration 1e8
    x[..., -1] = means[..., : x.size(-2), -1] + 1e-4 * x[..., -1]
    x[..., :-1] = means[..., : x.size(-2), :-1]


def wide(x, means, log_weights, bandwidths):
    bandwidths[..., -1] = 1e4  # concentration 1e-8: uniform


def heavy(x, means, log_weights, bandwidths):
    log_weights += 1e4
    log_weights[:, 0] += 200


def not_a_number(x, means, log_weights, bandwidths):
    x[0, 1, 0] = math.nan
    means[1, 2, -1] = math.nan
    x[2, 0, 0] = math.inf


CASES = [
    case("pose", mixture(3, 20, 7, 3, 1), 1),
    case("pose, own bandwidths", mixture(3, 20, 7, 3, 1, shared=False), 1),
    case("paper size", mixture(4, 100, 50, 3, 1), 1, gradcheck=False),
    case("few queries", mixture(5, 1, 50, 3, 1), 1),
    case("one component", mixture(2, 18, 1, 3, 1), 1),
    case("one dimension", mixture(2, 33, 9, 1, 0), 0),
    case("two dimensions", mixture(2, 33, 9, 2, 0), 0),
    case("three dimensions", mixture(2, 33, 9, 3, 0), 0),
    case("one angle", mixture(2, 33, 9, 1, 1), 1),
    case("two angles", mixture(2, 33, 9, 4, 2), 2),
    case("five dimensions", mixture(2, 17, 9, 5, 1, spread=2.0), 1),
    case("sixteen dimensions", mixture(1, 17, 4, 16, 7, spread=1.0, width=2.0), 7),
    case("several tiles and chunks", mixture(1, 1300, 37, 3, 1, shared=False), 1, gradcheck=False, vmap=False),
    case("many components", mixture(2, 70, 1030, 3, 1), 1, gradcheck=False, vmap=False),
    case(
        "no leading dimension", lambda g: tuple(a[0] if a.dim() > 1 else a for a in mixture(1, 20, 7, 3, 1)(g)), 1, vmap=False
    ),
    case(
        "two leading dimensions",
        lambda g: tuple(a.unflatten(0, (2, 2)) if a.dim() > 1 else a for a in mixture(4, 20, 7, 3, 1)(g)),
        1,
    ),
    case("far away", mixture(3, 50, 30, 3, 1, edit=far_away), 1, gradcheck=False),
    case("far away, few queries", mixture(3, 5, 30, 3, 1, edit=far_away), 1, gradcheck=False),
    case("coordinates of 5 km", mixture(2, 40, 30, 3, 1, edit=far_offset, shared=False), 1, gradcheck=False),
    case("dead components", mixture(3, 20, 7, 3, 1, edit=dead_components), 1, gradcheck=False),
    case("collapse", mixture(3, 20, 7, 3, 1, edit=collapse), 1, gradcheck=False),
    case("many turns", mixture(3, 20, 7, 3, 1, edit=turns), 1, gradcheck=False, atol=2e-4, grad_rtol=1e-3, grad_atol=1e-3),
    case("concentration 1e8", mixture(2, 20, 30, 3, 1, edit=narrow), 1, gradcheck=False),
    case("concentration 1e-8", mixture(2, 20, 30, 3, 1, edit=wide), 1, gradcheck=False),
    case("heavy and uneven weights", mixture(2, 20, 30, 3, 1, edit=heavy), 1, gradcheck=False, atol=1e-3),
    case("not a number", mixture(4, 20, 7, 3, 1, edit=not_a_number), 1, wrt=()),
]

TestOperator = checks(CASES)

X, MEANS, WEIGHTS, BANDWIDTHS = mixture(2, 20, 5, 3, 1)(torch.Generator().manual_seed(0))


def call(x=X, means=MEANS, log_weights=WEIGHTS, bandwidths=BANDWIDTHS, n_angular=1):
    return lambda: ops.mixture_log_prob(x, means, log_weights, bandwidths, n_angular=n_angular)


test_errors = check_errors(
    [
        (call(x=X.float()), TypeError, "means: expected the dtype of x, torch.float32, got torch.float64"),
        (call(x=X.long()), TypeError, "x: expected dtype float32 or float64, got torch.int64"),
        (call(means=[1]), TypeError, "means: expected a tensor, got list"),
        (call(x=X[0]), ValueError, r"x: expected shape \(..., M, D\) = \(2, 20, 3\), got \(20, 3\)"),
        (call(x=X[..., :2]), ValueError, r"x: expected shape"),
        (call(log_weights=WEIGHTS[:, 1:]), ValueError, r"log_weights: expected shape \(..., N\) = \(2, 5\), got \(2, 4\)"),
        (
            call(bandwidths=BANDWIDTHS[:2]),
            ValueError,
            r"bandwidths: expected shape \(D,\) or \(..., D\) = \(2, 3\), got \(2,\)",
        ),
        (call(n_angular=4), ValueError, "n_angular: expected 0 to 3"),
        (call(n_angular=-1), ValueError, "n_angular: expected 0 to 3"),
        (call(n_angular=1.0), TypeError, "n_angular: expected an int, got float"),
        (
            call(X[..., :0], MEANS[..., :0], WEIGHTS, BANDWIDTHS[:0], 0),
            ValueError,
            "expected states of 1 to 16 dimensions, got 0",
        ),
        (
            lambda: torch.ops.mdps.mixture_log_prob_backward(X[..., 0], X, MEANS, WEIGHTS, BANDWIDTHS, X[..., 0].float(), 1),
            RuntimeError,
            "^mdps.mixture_log_prob_backward: log2_sum: expected the dtype of x",
        ),
        (call(x=X.to("meta")), ValueError, "means: expected the device of x, meta, got cpu"),
    ]
)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_bandwidths_that_are_not_positive(bad):
    """Refused on the CPU. On a GPU nothing waits to look at them: their row is NaN, and no other."""
    args = [a.float().requires_grad_() for a in mixture(3, 20, 7, 3, 1, shared=False)(torch.Generator().manual_seed(0))]
    want = ops.mixture_log_prob(*args, n_angular=1)
    for d in range(3):
        bandwidths = args[3].detach().clone()
        bandwidths[1, d] = bad
        if not EMULATED:
            with pytest.raises(ValueError, match="bandwidths: expected positive finite numbers, got another one in row 1"):
                ops.mixture_log_prob(*args[:3], bandwidths, n_angular=1)
            continue
        got = ops.mixture_log_prob(*args[:3], bandwidths, n_angular=1)
        assert got[1].isnan().all() and torch.equal(got[::2], want[::2])
        for g, w in zip(torch.autograd.grad(got.sum(), args[:3]), torch.autograd.grad(want.sum(), args[:3], retain_graph=True)):
            assert torch.equal(g[::2], w[::2]) and g[1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("B, M, N", [(1, 150, 5000), (9, 1024, 1900), (2, 3000, 200)])
def test_larger_sizes(B, M, N, dtype):
    """Splits, parts of rows and several items a thread on a GPU; several chunks on the CPU."""
    made = mixture(B, M, N, 3, 1)(torch.Generator().manual_seed(0))
    args = [a.to(dtype).requires_grad_() for a in made]
    weights = torch.arange(M, dtype=dtype).mul(1.7).cos().expand(B, M)
    got = ops.mixture_log_prob(*args, n_angular=1)
    grads = torch.autograd.grad((got * weights).sum(), args)
    wide = [a.detach().double().requires_grad_() for a in args]
    want, sums = [], [torch.zeros_like(a) for a in wide]
    for x, w in zip(wide[0].split(100, 1), weights.double().split(100, 1)):  # the M x N arrays, part by part
        part = brute_force(x, *wide[1:], n_angular=1)
        want.append(part.detach())
        for s, g in zip(sums, torch.autograd.grad((part * w).sum(), wide)):
            s += g
    bound = 2e-5 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(got.detach().double(), torch.cat(want, 1), rtol=bound, atol=bound)
    for g, s in zip(grads, sums):
        torch.testing.assert_close(g.double(), s, rtol=10 * bound, atol=bound * s.abs().max().item())


@pytest.mark.parametrize("B, M, N", [(0, 4, 3), (2, 0, 3), (2, 0, 129), (2, 0, 700), (2, 4, 0), (2, 20, 0), (2, 600, 0)])
def test_empty(B, M, N):
    args = [torch.ones(B, M, 3), torch.ones(B, N, 3), torch.zeros(B, N), torch.ones(3)]
    args = [a.requires_grad_() for a in args]
    out = ops.mixture_log_prob(*args, n_angular=1)
    assert out.shape == (B, M) and (N > 0 or (out == -math.inf).all())
    grads = torch.autograd.grad(out.sum(), args)
    assert all((g == 0).all() for g in grads)


def test_nan_stays_in_its_row_and_query():
    x, means, log_weights, bandwidths = (a.float() for a in mixture(4, 20, 7, 3, 1)(torch.Generator().manual_seed(0)))
    want = ops.mixture_log_prob(x, means, log_weights, bandwidths, n_angular=1)
    x[0, 3, 1] = math.nan
    means[1, 0, 2] = math.nan
    log_weights[2, 4] = math.nan
    payload = torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32)
    x[0, 7, 2] = payload
    got = ops.mixture_log_prob(x, means, log_weights, bandwidths, n_angular=1)
    assert got[0, 7].isnan()
    x[0, 7, 2], got[0, 7] = 0.0, want[0, 7]
    assert torch.equal(got[3], want[3]) and got[1].isnan().all() and got[2].isnan().all()
    assert got[0, 3].isnan()
    torch.testing.assert_close(got[0, torch.arange(20) != 3], want[0, torch.arange(20) != 3])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("N", [7, 128, 130, 259])
def test_a_bad_gradient_stays_in_its_row(N, bad):
    args = [a.float() for a in mixture(4, 40, N, 3, 1, shared=False)(torch.Generator().manual_seed(0))]
    gradient = torch.ones(4, 40)
    want = gradients(args, gradient)
    gradient[1, 3] = bad
    for got, w in zip(gradients(args, gradient), want):
        assert not got[1].isfinite().all()
        assert torch.equal(got[[0, 2, 3]], w[[0, 2, 3]])


def gradients(args, gradient):
    args = [a.clone().requires_grad_() for a in args]
    return torch.autograd.grad(ops.mixture_log_prob(*args, n_angular=1), args, gradient)


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0])
def test_rounding_does_not_grow_with_the_number_of_components(spread):
    """float32 beside float64, of 100,000 components; one accumulator of them had errors of 3e-4 and, in gradients, 1e-3."""
    random = torch.Generator().manual_seed(0)
    means, x = spread * torch.randn(1, 100_000, 3, generator=random), 0.3 * torch.randn(1, 20, 3, generator=random)
    results = []
    for dtype in (torch.float32, torch.float64):
        at = x.to(dtype).requires_grad_()
        log_p = ops.mixture_log_prob(at, means.to(dtype), torch.zeros(1, 100_000, dtype=dtype), torch.ones(3).to(dtype))
        results.append((log_p.detach().double(), torch.autograd.grad(log_p.sum(), at)[0].double()))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_responsibilities_of_far_queries_sum_to_one(dtype):
    """One stored number a query would make them sum to 1.12 at 1000 units (float32); getkeops/keops #216 saw 1e70.

    The tolerance, in base 2: a pair's exponent has four roundings, of half its last place. Where tiles compute it, it is below
    2^7 (float64: 2^10), and its last place 2^-17 (2^-43); elsewhere it is a float64 whatever the dtype.
    """
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        means = torch.randn(1, 40, 3, generator=random, dtype=dtype)
        log_weights = torch.zeros(1, 40, dtype=dtype, requires_grad=True)
        for distance in (10, 100, 1e3, 1e4, 1e6):
            x = torch.randn(1, 30, 3, generator=random, dtype=dtype)
            x[..., 0] += distance
            log_p = ops.mixture_log_prob(x, means, log_weights, torch.ones(3, dtype=dtype), n_angular=1)
            (g,) = torch.autograd.grad(log_p.sum(), log_weights)
            largest = log_p.abs().max().item() / math.log(2)
            tolerance = 2**-16 if dtype == torch.float32 else max(2**-42, 2**-51 * largest)
            assert log_p.isfinite().all() and abs(g.double().sum().item() / 30 - 1) < tolerance * math.log(2)


def test_memory_is_linear():
    """M = N = 10,000 forward and backward allocate less than 32 MB beside the arguments (an M x N array has 400 MB)."""
    n = 10_000
    args = [torch.randn(1, n, 3), torch.randn(1, n, 3), torch.zeros(1, n), torch.ones(3)]
    args = [a.requires_grad_() for a in args]
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        ops.mixture_log_prob(*args, n_angular=1).sum().backward()
    allocated = sum(max(0, e.self_cpu_memory_usage) for e in profile.key_averages())
    assert allocated < 32 * 2**20, allocated
    assert mdps._C.live_handles() == 0
