import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from table import EMULATED, Case, check_errors, checks

import mdps
from mdps import ops

CONVERGED = {torch.float64: 1e-13, torch.float32: 5e-7}
"""Thresholds that are reached (much regularised: almost), with numbers as exact as the type allows."""


def embedded(particles, n_angular):
    linear = particles.size(-1) - n_angular
    angles = particles[..., linear:]
    return torch.cat([particles[..., :linear], torch.cos(angles), torch.sin(angles)], -1)


def scaled_cost(z):
    """Half the squared distances after division by sqrt(K) times the largest standard deviation."""
    variance = ((z - z.mean(-2, keepdim=True)) ** 2).mean(-2)
    equal = (z == z[..., :1, :]).all(-2)
    largest = torch.where(equal, torch.zeros_like(variance), variance).max(-1).values[..., None, None]
    square = ((z[..., :, None, :] - z[..., None, :, :]) ** 2).sum(-1)
    return square / 2 / torch.where(largest > 0, z.size(-1) * largest, torch.ones_like(largest))


def converged(particles, log_weights, *, epsilon=0.5, n_angular=0, max_iterations=400, **_):
    """Plain alternating Sinkhorn until nothing moves, differentiated step by step; neither annealed nor averaged."""
    n, d = particles.shape[-2:]
    good = particles.isfinite().all(-1).all(-1) & (log_weights < math.inf).all(-1)
    particles = torch.where(good[..., None, None], particles, torch.zeros_like(particles))
    uniform = (log_weights == -math.inf).all(-1) | ~good
    log_w = torch.log_softmax(torch.where(uniform[..., None], torch.zeros_like(log_weights), log_weights), -1)
    z = embedded(particles, n_angular)
    kernel = -scaled_cost(z) / epsilon
    b = torch.zeros_like(log_w)
    for _ in range(max_iterations):
        a = -torch.logsumexp(log_w[..., None, :] + b[..., None, :] + kernel, -1)
        b = math.log(n) - torch.logsumexp(a[..., :, None] + kernel, -2)
    plan = torch.softmax(log_w[..., None, :] + b[..., None, :] + kernel, -1)
    mean = plan @ z
    angles = torch.atan2(mean[..., d:], mean[..., d - n_angular : d])
    out = torch.cat([mean[..., : d - n_angular], angles], -1)
    return (torch.where(good[..., None, None], out, torch.full_like(out, math.nan)),)


def cloud(B, N, D, *, spread=3.0, weight=1.5, edit=None):
    def make(g):
        particles = spread * torch.randn(B, N, D, generator=g, dtype=torch.float64)
        log_weights = weight * torch.randn(B, N, generator=g, dtype=torch.float64)
        if edit:
            edit(particles, log_weights)
        return particles, log_weights

    return make


def transported(particles, log_weights, **options):
    threshold = CONVERGED.get(particles.dtype, CONVERGED[torch.float32])
    return ops.transport_resample(particles, log_weights, threshold=threshold, **options)[0]


def case(name, args, n_angular=0, *, options=None, **kwargs):
    kwargs.setdefault("wrt", (0, 1))
    options = {"n_angular": n_angular, "max_iterations": 260, **(options or {})}
    return Case(name, transported, args, converged, options, **kwargs)


def dead(particles, log_weights):
    log_weights[:, ::3] = -math.inf


def collapse(particles, log_weights):
    log_weights[1] = -math.inf


def alone(particles, log_weights):
    log_weights[:] = -math.inf
    log_weights[:, 2] = 5.0


def equal(particles, log_weights):
    particles[1] = particles[1, :1]


def far(particles, log_weights):
    particles[..., :2] += 5000


def heavy(particles, log_weights):
    log_weights += 1e4
    log_weights[:, 0] += 20


def turned(particles, log_weights):
    particles[..., -1] += 2 * math.pi * torch.arange(-3, 3, dtype=torch.float64).repeat(2)[: particles.size(1)]


def outlier(particles, log_weights):
    particles[:, 0] *= 30


def not_a_number(particles, log_weights):
    particles[1, 2, 0] = math.nan
    log_weights[2, 0] = math.nan
    log_weights[3, 1] = math.inf
    particles[4, 0, -1] = math.inf


CASES = [
    case("pose", cloud(3, 12, 3, spread=1.0), 1),
    case("two dimensions", cloud(3, 20, 2)),
    case("one dimension", cloud(2, 9, 1)),
    case("one angle", cloud(2, 9, 1, spread=0.5), 1),
    case("sixteen dimensions", cloud(1, 9, 16, spread=1.0), 7),
    case("one particle", cloud(3, 1, 3, spread=0.5), 1),
    case("two particles", cloud(3, 2, 3, spread=0.5), 1),
    case(
        "several tiles",
        cloud(1 if EMULATED else 2, 130, 3, spread=0.7),
        1,
        options={"max_iterations": 100},
        gradcheck=False,
        vmap=False,
    ),
    case("no leading dimension", lambda g: tuple(a[0] for a in cloud(1, 7, 3)(g)), 1, vmap=False),
    case("two leading dimensions", lambda g: tuple(a.unflatten(0, (2, 2)) for a in cloud(4, 7, 2)(g))),
    case("much regularised", cloud(2, 9, 2), options={"epsilon": 20.0, "max_iterations": 60}),
    case(
        "little regularised",
        cloud(2, 9, 2),
        options={"epsilon": 0.1, "max_iterations": 1000},
        atol=1e-4,
        grad_rtol=2e-3,
        grad_atol=2e-3,
    ),
    case("dead particles", cloud(3, 10, 3, spread=0.7, edit=dead), 1, gradcheck=False),
    case("collapse", cloud(3, 9, 2, edit=collapse), gradcheck=False),
    case("one alive", cloud(3, 9, 3, spread=0.7, edit=alone), 1, gradcheck=False),
    case("equal particles", cloud(3, 9, 2, edit=equal), gradcheck=False),
    case("coordinates of 5 km", cloud(2, 9, 3, edit=far, spread=0.7), 1, gradcheck=False, grad_rtol=1e-3, grad_atol=1e-3),
    case("heavy and uneven weights", cloud(2, 9, 2, edit=heavy), gradcheck=False, rtol=2e-3, grad_rtol=2e-2, grad_atol=2e-2),
    case("many turns", cloud(2, 12, 3, spread=0.7, edit=turned), 1),
    case("outlier", cloud(2, 30, 2, edit=outlier), options={"max_iterations": 700}, gradcheck=False),
    case("not a number", cloud(6, 9, 3, edit=not_a_number), 1, wrt=()),
]

TestOperator = checks(CASES)

X, WEIGHTS = cloud(2, 5, 3)(torch.Generator().manual_seed(0))


def call(x=X, w=WEIGHTS, **options):
    return lambda: ops.transport_resample(x, w, **options)


test_errors = check_errors(
    [
        (call(x=[1.0]), TypeError, "particles: expected a tensor, got list"),
        (call(x=X.long()), TypeError, "particles: expected dtype float32 or float64, got torch.int64"),
        (call(w=WEIGHTS.float()), TypeError, "log_weights: expected the dtype of particles"),
        (call(w=WEIGHTS.to("meta")), ValueError, "log_weights: expected the device of particles, cpu, got meta"),
        (call(x=X[0, 0]), ValueError, r"particles: expected shape \(..., N, D\) with N >= 1, got \(3,\)"),
        (call(x=X[:, :0], w=WEIGHTS[:, :0]), ValueError, "particles: expected shape .* with N >= 1"),
        (call(x=X[..., :0]), ValueError, "expected states of 1 to 16 dimensions, got 0"),
        (call(w=WEIGHTS[:, 1:]), ValueError, r"log_weights: expected shape \(..., N\) = \(2, 5\), got \(2, 4\)"),
        (call(n_angular=4), ValueError, "n_angular: expected 0 to 3"),
        (call(epsilon=0.0), ValueError, "epsilon: expected a positive finite number, got 0.0"),
        (call(epsilon=math.nan), ValueError, "epsilon: expected a positive finite number, got nan"),
        (call(epsilon=math.inf), ValueError, "epsilon: expected a positive finite number, got inf"),
        (call(epsilon="1"), TypeError, "epsilon: expected a number, got str"),
        (call(scaling=1.0), ValueError, r"scaling: expected a number in \[0, 1\), got 1.0"),
        (call(scaling=-0.1), ValueError, r"scaling: expected a number in \[0, 1\), got -0.1"),
        (call(threshold=-1e-3), ValueError, "threshold: expected a finite number >= 0, got -0.001"),
        (call(threshold=math.nan), ValueError, "threshold: expected a finite number >= 0, got nan"),
        (call(max_iterations=0), ValueError, "max_iterations: expected 1 to 2\\^31 - 1, got 0"),
        (call(max_iterations=2.5), TypeError, "max_iterations: expected an int, got float"),
        (
            lambda: torch.ops.mdps.transport_resample(X, WEIGHTS[:, 1:], 0.5, 0.9, 1e-3, 10, 0),
            RuntimeError,
            "^mdps.transport_resample: log_weights: expected size 5 in dimension 1, got 4$",
        ),
        (
            lambda: torch.ops.mdps.transport_resample(X, WEIGHTS, -0.5, 0.9, 1e-3, 10, 0),
            RuntimeError,
            "^mdps.transport_resample: epsilon: expected a positive number, got -0.5$",
        ),
    ]
)


def poses(B, N, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    particles = torch.randn(B, N, 3, generator=g, dtype=torch.float64) * torch.tensor([4.0, 2.0, 0.7])
    return particles.to(dtype), (2 * torch.randn(B, N, generator=g, dtype=torch.float64)).to(dtype)


def plan_of(particles, log_weights, n_angular=0, **options):
    """T and the cost, from the potentials that the operator ends with."""
    o = {"epsilon": 0.5, "scaling": 0.9, "threshold": 1e-3, "max_iterations": 500, **options}
    potentials = torch.ops.mdps.transport_resample(particles, log_weights, *o.values(), n_angular)[3]
    f, g = potentials.unbind(1)
    cost = scaled_cost(embedded(particles, n_angular))
    log_w = torch.log_softmax(log_weights, -1)
    return torch.exp(log_w[:, None, :] + (f[:, :, None] + g[:, None, :] - cost) / o["epsilon"]), cost


def test_linear_programme():
    """With little regularisation: the cost, and where the plan of least cost sends the particles."""
    particles, log_weights = poses(4, 7)
    options = {"epsilon": 2e-4, "threshold": 1e-10, "max_iterations": 200_000}
    got = ops.transport_resample(particles, log_weights, n_angular=1, **options)
    plan, cost = plan_of(particles, log_weights, 1, **options)
    n = particles.size(1)
    for b in range(4):
        to_rows, to_columns = np.kron(np.eye(n), np.ones(n)), np.kron(np.ones(n), np.eye(n))
        weights = torch.softmax(log_weights[b], 0).numpy()
        solved = linprog(
            cost[b].numpy().ravel(), A_eq=np.vstack([to_rows, to_columns]), b_eq=np.concatenate([np.ones(n) / n, weights])
        )
        assert solved.status == 0
        regularised = (plan[b] * cost[b]).sum().item() / n
        error = got.marginal_error[b].item() * cost[b].max().item()
        assert abs(regularised - solved.fun) <= error + 2e-4 * math.log(n * n)  # the entropy is at most log N^2
        mean = torch.from_numpy(n * solved.x.reshape(n, n)) @ embedded(particles[b], 1)
        want = torch.cat([mean[:, :2], torch.atan2(mean[:, 3:], mean[:, 2:3])], -1)
        torch.testing.assert_close(got.particles[b], want, rtol=0, atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threshold", [1e-2, 1e-3, 1e-5])
def test_marginals_and_mean(threshold, dtype):
    """|log R_j| <= 2 threshold / epsilon at the last step, and f moves by twice the threshold after it."""
    particles, log_weights = poses(8, 60, dtype)
    out = ops.transport_resample(particles, log_weights, threshold=threshold)
    rounding = 1e-5 if dtype == torch.float32 else 1e-12
    assert (out.iterations < 500).all()
    assert (out.marginal_error <= math.expm1(4 * threshold / 0.5) + rounding).all()
    plan, _ = plan_of(particles, log_weights, threshold=threshold)
    torch.testing.assert_close(plan.sum(-1), torch.ones_like(log_weights), rtol=0, atol=10 * rounding)
    weights = torch.softmax(log_weights, -1)
    error = (plan.mean(-2) - weights).abs().sum(-1)
    torch.testing.assert_close(out.marginal_error, error, rtol=0, atol=rounding)
    mean = weights.unsqueeze(-2) @ particles
    away = (particles - mean).abs().amax((-2, -1))
    difference = (out.particles.mean(-2, keepdim=True) - mean).abs().amax((-2, -1))
    assert (difference <= out.marginal_error * away + 10 * rounding).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_moves_with_the_particles(dtype):
    particles, log_weights = poses(3, 40, dtype)
    bound = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-10}
    options = {"threshold": 1e-6, "epsilon": 0.3}
    linear = particles[..., :2]
    want = ops.transport_resample(linear, log_weights, **options).particles
    moved = ops.transport_resample(linear * 3 + torch.tensor([10.0, -2.0], dtype=dtype), log_weights - 7, **options)
    torch.testing.assert_close(moved.particles, want * 3 + torch.tensor([10.0, -2.0], dtype=dtype), **bound)
    turn = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    permuted = ops.transport_resample(linear[:, turn], log_weights[:, turn], **options)
    torch.testing.assert_close(permuted.particles, want[:, turn], **bound)
    pose = ops.transport_resample(particles, log_weights, n_angular=1, **options).particles
    quarter = particles + torch.tensor([0, 0, math.pi / 2], dtype=dtype)  # the cosine becomes the sine
    turned = ops.transport_resample(quarter, log_weights, n_angular=1, **options).particles
    away = torch.remainder(turned - pose - torch.tensor([0, 0, math.pi / 2], dtype=dtype) + 1, 2 * math.pi) - 1
    torch.testing.assert_close(away, torch.zeros_like(away), **bound)
    assert (pose[..., 2] >= -math.pi).all() and (pose[..., 2] < math.pi).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_weight(dtype):
    """All particles go to the one that has all the weight; gradients are finite."""
    particles, log_weights = poses(2, 20, dtype)
    for others in (-math.inf, -1e4):
        log_weights = torch.full_like(log_weights, others)
        log_weights[:, 3] = 0.0
        args = particles.clone().requires_grad_(), log_weights.clone().requires_grad_()
        out = ops.transport_resample(*args, n_angular=1)
        torch.testing.assert_close(out.particles, particles[:, 3:4].expand(-1, 20, -1), rtol=1e-5, atol=1e-5)
        grads = torch.autograd.grad(out.particles.sum(), args)
        assert grads[1].abs().max() < 1e-3
        torch.testing.assert_close(grads[0][:, 3], torch.full_like(grads[0][:, 3], 20.0), rtol=1e-4, atol=1e-4)
        assert grads[0].isfinite().all() and grads[1].isfinite().all()


def test_opposite_headings_have_no_direction():
    particles = torch.tensor([[[0.0], [math.pi]]], dtype=torch.float64, requires_grad=True)
    out = ops.transport_resample(particles, torch.zeros(1, 2, dtype=torch.float64), epsilon=1e9, n_angular=1).particles
    (grad,) = torch.autograd.grad(out.sum(), particles)
    assert out.isfinite().all() and grad.isfinite().all()


def test_all_dead_is_uniform():
    particles, log_weights = poses(3, 9)
    log_weights[1] = -math.inf
    flat = log_weights.clone()
    flat[1] = 0.0
    flat.requires_grad_(), log_weights.requires_grad_()
    got, want = ops.transport_resample(particles, log_weights), ops.transport_resample(particles, flat)
    assert torch.equal(got.particles, want.particles)
    (g,) = torch.autograd.grad((got.particles**2).sum(), log_weights)
    (w,) = torch.autograd.grad((want.particles**2).sum(), flat)
    assert (g[1] == 0).all() and torch.equal(g[::2], w[::2]) and (w[1] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_on_their_own(dtype):
    """Rows that need more steps do not move those that have ended: the same bits alone and in a batch."""
    particles, log_weights = poses(6, 70, dtype)
    log_weights *= torch.tensor([0.0, 0.1, 1.0, 2.0, 4.0, 20.0], dtype=dtype).unsqueeze(-1)
    particles[3, 0] *= 100
    args = particles.requires_grad_(), log_weights.requires_grad_()
    out = ops.transport_resample(*args, n_angular=1)
    grads = torch.autograd.grad(out.particles.sum(), args)
    assert out.iterations.unique().numel() >= 3
    for b in range(6):
        row = tuple(a[b].detach().requires_grad_() for a in args)
        alone = ops.transport_resample(*row, n_angular=1)
        for g, w in zip(alone, out):
            assert torch.equal(g, w[b])
        for g, w in zip(torch.autograd.grad(alone.particles.sum(), row), grads):
            assert torch.equal(g, w[b])


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0x7F800000])
def test_nan_stays_in_its_row(bits):
    bad = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    for i in range(2):
        args = poses(3, 9, torch.float32)
        want = ops.transport_resample(*args)
        args[i][1].view(-1)[4] = bad
        args = tuple(a.requires_grad_() for a in args)
        got = ops.transport_resample(*args)
        for g, w in zip(got[:2], want[:2]):
            assert torch.equal(g[::2], w[::2]) and g[1].isnan().all()
        assert got.iterations[1] == 0 and torch.equal(got.iterations[::2], want.iterations[::2])
        for g in torch.autograd.grad(got.particles[::2].sum(), args):
            assert g[::2].isfinite().all()
    assert mdps._C.live_handles() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_iterations": 1},
        {"max_iterations": 5, "epsilon": 0.1},
        {"epsilon": 0.01, "scaling": 0.0, "max_iterations": 6},  # steep: sums overflow and are taken again with maxima
        {"epsilon": 0.02, "scaling": 0.3, "max_iterations": 30},
        {"threshold": 0.5},
    ],
    ids=str,
)
def test_reference_step_by_step(options, dtype):
    """The same number of steps, values and gradients as the reference in float64, converged or not."""
    args = tuple(a.requires_grad_() for a in poses(3, 70, dtype))
    wide = tuple(a.detach().double().requires_grad_() for a in args)
    out = ops.transport_resample(*args, n_angular=1, **options)
    with ops.reference():
        want = ops.transport_resample(*wide, n_angular=1, **options)
    direction = torch.randn(want.particles.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    grads = torch.autograd.grad((out.particles * direction).sum(), args)
    expected = torch.autograd.grad((want.particles * direction).sum(), wide)
    assert torch.equal(out.iterations, want.iterations)
    loose = 1e-3 / options.get("epsilon", 0.5) ** 0.5
    bound = loose if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(out.particles.double(), want.particles, rtol=bound, atol=bound)
    torch.testing.assert_close(out.marginal_error.double(), want.marginal_error, rtol=bound, atol=bound)
    for g, w in zip(grads, expected):
        size = w.abs().max().item()
        torch.testing.assert_close(g.double(), w, rtol=10 * bound, atol=min(1.0, 10 * bound) * size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_larger_size(dtype):
    """More particles than a block's shared memory holds on a GPU."""
    options = {"max_iterations": 3, "n_angular": 1}
    args = tuple(a.requires_grad_() for a in poses(1, 1500 if dtype == torch.float32 else 800, dtype))
    out = ops.transport_resample(*args, **options)
    wide = tuple(a.detach().double() for a in args)
    with ops.reference():
        want = ops.transport_resample(*wide, **options)
    bound = 1e-3 if dtype == torch.float32 else 1e-10
    for g, w in zip(out, want):
        torch.testing.assert_close(g.to(w.dtype), w, rtol=bound, atol=bound)
    # A shift of all particles moves all of them by as much, and one of all log-weights none.
    grads = torch.autograd.grad(out.particles[..., 0].sum(), args)
    assert abs(grads[0][..., 0].sum().item() / args[1].size(1) - 1) < 1e-4 and abs(grads[1].sum().item()) < 1e-2


def test_empty_batch():
    args = torch.ones(0, 4, 2, requires_grad=True), torch.ones(0, 4, requires_grad=True)
    out = ops.transport_resample(*args)
    assert [tuple(o.shape) for o in out] == [(0, 4, 2), (0,), (0,)]
    assert [tuple(g.shape) for g in torch.autograd.grad(out.particles.sum(), args)] == [(0, 4, 2), (0, 4)]
