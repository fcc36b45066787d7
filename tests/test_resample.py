import math

import pytest
import torch
from table import Case, check_errors, checks
from test_philox_uniform import philox_rows

import mdps
from mdps import ops

SCHEMES = ["multinomial", "stratified", "systematic", "residual"]
ORDERED = SCHEMES[1:]


def walk(weights, points):
    """First component whose cumulative weight exceeds each point, by walking along the components."""
    ends, total = [], 0.0
    for w in weights:
        total += w
        ends.append(total)
    out = []
    for p in points:
        j = 0
        while ends[j] <= p * total:
            j += 1
        out.append(j)
    return out


def brute_force_row(log_weights, words, m, scheme):
    n, top = len(log_weights), max(log_weights)
    collapsed = any(math.isnan(x) or x == math.inf for x in log_weights) or top == -math.inf
    if collapsed and scheme != "multinomial":
        return [i * n // m for i in range(m)]
    weights = [1.0 if collapsed else math.exp(x - top) for x in log_weights]
    points = [((a << 32 | b) >> 11) / 2**53 for a, b in zip(words[::2], words[1::2])][:m]
    if scheme == "multinomial":
        return walk(weights, points)
    if scheme == "stratified":
        return walk(weights, [(i + words[i] / 2**32) / m for i in range(m)])
    if scheme == "systematic":
        return walk(weights, [(i + words[0] / 2**32) / m for i in range(m)])
    shares = [w * m / sum(weights) for w in weights]
    copies = [math.floor(s) for s in shares]
    missing = m - sum(copies)
    drawn = walk([s - c for s, c in zip(shares, copies)], points[:missing]) if missing else []
    return sorted([j for j, c in enumerate(copies) for _ in range(c)] + drawn)


def brute_force(log_weights, seed, n_samples=None, scheme="stratified", stream=0):
    """float64 Python on the same random words, which tests/test_philox_uniform.py makes by the definition of Philox."""
    lead, n = log_weights.shape[:-1], log_weights.size(-1)
    m = n if n_samples is None else n_samples
    flat = log_weights.reshape(-1, n).tolist()
    words = philox_rows(seed.reshape(-1) if seed.dim() else seed, len(flat), 2 * m + 2, kind=4, stream=stream)
    out = [brute_force_row(row, w, m, scheme) for row, w in zip(flat, words)]
    return torch.tensor(out, dtype=torch.int64).reshape(*lead, m)


def weights(*shape, scale=2.0, seed=12345, edit=None):
    def make(g):
        x = scale * torch.randn(*shape, generator=g, dtype=torch.float64)
        if edit:
            edit(x)
        return x, torch.tensor(seed)

    return make


def dead(x):
    x[:, ::3] = -math.inf
    x[:, -5:] = -math.inf


def strange(x):
    x[0] = -math.inf
    x[1, 2] = math.nan
    x[2, 3] = math.inf
    x[3] = -math.inf
    x[3, 4] = 0.0


def adversarial(x):
    x[0] = math.log(2.0**-52)
    x[0, 0] = 0.0
    x[1] = -690.0
    x[1, 3] = 0.0
    x[2] = 1e30
    x[2, ::2] = -1e30
    x[3] = -80.0 + x[3]
    x[4] = 0.0
    x[5] = -700.0
    x[5, 6] = -699.0


CASES = [
    Case(f"{scheme}, {name}", ops.resample, args, brute_force, options={"scheme": scheme, **options})
    for scheme in ["stratified", "systematic", "multinomial", "residual"]
    for name, args, options in [
        ("ordinary", weights(4, 50), {}),
        ("a seed a row", weights(3, 20, seed=[1, -2, 2**62]), {"stream": 2**32 - 1}),
        ("leading dimensions", weights(2, 3, 9, seed=[[1, 2, 3], [4, 5, 6]]), {}),
        ("more draws", weights(2, 7), {"n_samples": 1200}),
        ("many more draws", weights(2, 3), {"n_samples": 9000}),
        ("fewer draws", weights(2, 1300), {"n_samples": 11}),
        ("long", weights(2, 1100), {}),
        ("very long", weights(1, 4500, scale=4.0), {}),
        ("in parts", weights(2, 8200), {"n_samples": 30}),
        ("one particle", weights(3, 1), {"n_samples": 5}),
        ("no draw", weights(3, 4), {"n_samples": 0}),
        ("dead particles", weights(3, 40, edit=dead), {}),
        ("strange rows", weights(5, 8, edit=strange), {"n_samples": 21}),
        ("adversarial", weights(6, 30, edit=adversarial), {}),
    ]
]

TestOperator = checks(CASES)


def call(log_weights, seed=0, **kwargs):
    return lambda: ops.resample(log_weights, torch.tensor(seed), **kwargs)


def raw(log_weights, seed, *args):
    return lambda: torch.ops.mdps.resample(log_weights, torch.tensor(seed), *args)


test_errors = check_errors(
    [
        (call([1.0]), TypeError, "log_weights: expected a tensor, got list"),
        (call(torch.tensor(1.0)), ValueError, r"log_weights: expected shape \(..., N\)"),
        (call(torch.ones(2, 0)), ValueError, r"log_weights: expected shape \(..., N\) with N >= 1"),
        (call(torch.ones(2, 3), scheme="best"), ValueError, r"scheme: expected one of \['multinomial', .*, got 'best'"),
        (call(torch.ones(2, 3), [1, 2, 3]), ValueError, r"seed: expected shape \(\) or \(...\) = \(2,\), got \(3,\)"),
        (call(torch.ones(2, 3), 1.0), TypeError, "seed: expected dtype int64"),
        (call(torch.ones(2, 3), n_samples=-1), ValueError, "n_samples: expected 0 to 2..31 - 2, got -1"),
        (call(torch.ones(2, 3), n_samples=2**31 - 1), ValueError, "n_samples: expected 0 to 2..31 - 2, got 2147483647"),
        (call(torch.ones(2, 3), stream=2**32), ValueError, "stream: expected 0 to"),
        (call(torch.ones(2, 3), n_samples=2.5), TypeError, "n_samples: expected an int, got 2.5"),
        (call(torch.ones(2, 3), n_samples="2"), TypeError, "n_samples: expected an int, got '2'"),
        (call(torch.ones(2, 3), stream=1.0), TypeError, "stream: expected an int, got 1.0"),
        (raw(torch.ones(2), 0, 3, 1, 0), RuntimeError, "^mdps.resample: log_weights: expected 2 dimensions, got 1$"),
        (raw(torch.ones(2, 0), 0, 3, 1, 0), RuntimeError, "log_weights: expected 1 to 2.31 - 1 particles, got 0"),
        (raw(torch.ones(2, 3), 0, -4, 1, 0), RuntimeError, "^mdps.resample: n_samples: expected 0 to 2.31 - 2, got -4$"),
        (raw(torch.ones(2, 3), 0, 2**31 - 1, 1, 0), RuntimeError, "n_samples: expected 0 to 2.31 - 2, got 2147483647"),
        (raw(torch.ones(2, 3), 0, 3, 4, 0), RuntimeError, "scheme: expected 0 to 3, got 4"),
        (raw(torch.ones(2, 3), [0, 1, 2], 3, 1, 0), RuntimeError, "seed: expected size 2 in dimension 0, got 3"),
    ]
)


def offspring(log_weights, m, scheme, rows=20000, dtype=torch.float32):
    """Offspring counts of many independent resamplings of one set of weights, (rows, N), and its normalised weights."""
    x = torch.as_tensor(log_weights, dtype=dtype)
    a = ops.resample(x.expand(rows, -1), torch.tensor(77), m, scheme=scheme)
    counts = torch.zeros(rows, x.numel(), dtype=torch.float64)
    return counts.scatter_add_(1, a, torch.ones_like(a, dtype=torch.float64)), x.double().softmax(0)


WEIGHTS = torch.tensor([0.4, -1.2, 0.3, 2.0, -4.0, 1.1, -math.inf, 0.0, -0.5])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("m", [1, 5, 9, 40])
def test_unbiased(scheme, m):
    counts, w = offspring(WEIGHTS, m, scheme)
    assert torch.equal(counts.sum(1), torch.full((len(counts),), float(m), dtype=torch.float64))
    error = (counts.mean(0) - m * w).abs()
    assert (error <= 5 * (m * w * (1 - w) / len(counts)).sqrt() + 1e-12).all()  # multinomial's variance is the largest
    assert counts[:, 6].sum() == 0


@pytest.mark.parametrize("m", [5, 9, 40])
def test_variances_and_bounds(m):
    counts = {}
    for s in SCHEMES:
        counts[s], w = offspring(WEIGHTS, m, s)
    multinomial = m * w * (1 - w)
    torch.testing.assert_close(counts["multinomial"].var(0), multinomial, rtol=0.08, atol=1e-3)
    for s in ORDERED:
        assert (counts[s].var(0) <= multinomial * 1.08 + 1e-3).all()
    share = m * w
    # 1e-5: float32 weights that make m w an integer may lie on either side of it.
    assert (counts["systematic"] >= (share - 1e-5).floor()).all() and (counts["systematic"] <= (share + 1e-5).ceil()).all()
    assert (counts["residual"] >= (share - 1e-5).floor()).all()
    assert ((counts["stratified"] - share).abs() < 2).all()


def test_stratified_strata_are_independent():
    """Two equal weights and 1001 strata: the boundary cuts stratum 500 in half, so that one draw is random; rows differ."""
    counts, _ = offspring(torch.zeros(2), 1001, "stratified")
    assert set(counts[:, 0].tolist()) == {500.0, 501.0}
    assert abs(counts[:, 0].mean() - 500.5) < 5 * 0.5 / 20000**0.5
    assert abs(torch.corrcoef(counts[:, 0].view(2, -1))[0, 1]) < 5 / 10000**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_100000_equal_weights(scheme, dtype):
    n = 100_000
    for value in (0.0, -1e4, 3e38 if dtype == torch.float32 else 1e308):
        a = ops.resample(torch.full((1, n), value, dtype=dtype), torch.tensor(3), scheme=scheme)[0]
        if scheme in ("systematic", "residual", "stratified"):
            assert torch.equal(a, torch.arange(n))
        assert a.min() >= 0 and a.max() < n


@pytest.mark.parametrize("scheme", SCHEMES)
def test_random_rows_against_float64(scheme):
    """Hundreds of rows of all kinds of spread, float32 weights: in range, no dead ancestor, order, shares."""
    g = torch.Generator().manual_seed(1)
    for n, m in ((1, 1), (2, 3), (17, 1000), (700, 64), (513, 513), (1024, 2049)):
        x = torch.randn(64, n, generator=g) * torch.logspace(-6, 4, 64)[:, None]
        x[torch.rand(64, n, generator=g) < 0.3] = -math.inf
        x[:, n // 2] = 0.0
        a = ops.resample(x, torch.tensor(5), m, scheme=scheme)
        assert a.min() >= 0 and a.max() < n
        assert (x.gather(1, a) > -math.inf).all()
        counts = torch.zeros(64, n).scatter_add_(1, a, torch.ones(64, m))
        share = m * x.double().softmax(1)
        if scheme != "multinomial":
            assert (a.diff() >= 0).all()
        if scheme in ("stratified", "systematic"):
            assert ((counts.cumsum(1) - share.cumsum(1)).abs() < 1 + 1e-6 * m).all()
        if scheme == "residual":
            assert (counts >= (share - 1e-6 * m).floor()).all()


def test_no_gradient_no_warning(recwarn):
    x = torch.randn(3, 8, requires_grad=True)
    assert not ops.resample(x, torch.tensor(1)).requires_grad

    def f(x):
        return (x.gather(1, ops.resample(x, torch.tensor(1))) ** 2).sum()

    torch.testing.assert_close(torch.func.grad(f)(x), torch.autograd.grad(f(x), x)[0])
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x))
    assert not [w for w in recwarn if "mdps" in str(w.message)]


def test_rows_are_independent_and_numbered():
    x, seeds = torch.randn(4, 600), ops.make_seed(torch.Generator().manual_seed(0), 4)
    for scheme in SCHEMES:
        whole = ops.resample(x, seeds, scheme=scheme)
        for b in range(4):
            assert torch.equal(ops.resample(x[b], seeds[b], scheme=scheme), whole[b])
        shared = ops.resample(x[:1].expand(4, -1), seeds[0], scheme=scheme)
        assert torch.equal(shared[0], whole[0]) and shared.unique(dim=0).size(0) == 4
    assert [tuple(ops.resample(torch.ones(*s, 3), torch.tensor(0)).shape) for s in ((), (0,), (2, 0))] == [
        (3,),
        (0, 3),
        (2, 0, 3),
    ]
    assert mdps._C.live_handles() == 0


def test_dynamic_shapes_compile():
    f = torch.compile(ops.resample, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, m in ((3, 5), (50, 40), (7, 9)):
        x = torch.randn(2, n)
        assert torch.equal(f(x, torch.tensor(1), m), ops.resample(x, torch.tensor(1), m))
