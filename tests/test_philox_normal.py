import math

import pytest
import torch
from scipy import stats
from table import Case, check_errors, checks
from test_philox_uniform import philox_rows

from mdps import ops


def normal_like(like, seed, stream=0):
    return ops.philox_normal(seed, like.shape, dtype=torch.promote_types(like.dtype, torch.float32), stream=stream)


def box_muller(u, v):
    radius = math.sqrt(-2 * math.log(u))
    return radius * math.cos(2 * math.pi * v), radius * math.sin(2 * math.pi * v)


def brute_force(like, seed, stream=0):
    """float64, number by number, from Python's Philox and libm."""
    rows, n = like.size(0), like[:1].numel()
    out = []
    for w in philox_rows(seed, rows, (n + 1) // 2 * 4, kind=1, stream=stream):
        numbers = []
        for x, y, z, t in zip(*[iter(w)] * 4):
            u = ((x >> 1) * 2**22 + (y >> 10) + 0.5) / 2**53
            v = ((z - (z >> 31 << 32)) * 2**21 + (t >> 11) + 0.5) / 2**53
            numbers += box_muller(u, v)
        out.append(numbers[:n])
    return torch.tensor(out, dtype=torch.float64).reshape(like.shape)


def case(name, shape, seed, **options):
    def args(g):
        return torch.zeros(shape, dtype=torch.float64), torch.tensor(seed)

    # float32 takes other words than the oracle's float64; test_float32_words compares them.
    return Case(name, normal_like, args, brute_force, options=options, atol=20.0)


CASES = [
    case("shared seed", (3, 17), 1234567890123456789),
    case("a seed a row", (3, 4, 5), [5, -6, 2**63 - 1]),
    case("stream", (2, 9), -1, stream=2**32 - 1),
    case("more than one tile", (2, 2100), 7),
    case("one number", (1, 1), 0),
    case("empty rows", (2, 0), 0),
]

TestOperator = checks(CASES)

test_errors = check_errors(
    [
        (lambda: ops.philox_normal(3, (2,)), TypeError, "seed: expected an int64 tensor"),
        (lambda: ops.philox_normal(torch.zeros(2).long(), (3, 1)), ValueError, "shape: expected 2 rows, one for each seed"),
        (
            lambda: torch.ops.mdps.philox_normal(torch.tensor(1), -2, 3, 0, 0),
            RuntimeError,
            "rows: expected 0 to 2.31 - 1, got -2",
        ),
    ]
)


def test_float32_words():
    for seed in (torch.tensor(99), torch.tensor([3, 4, 2**40])):
        want = []
        for w in philox_rows(seed, 3, 12, kind=1, stream=6):
            pairs = zip(w[::2], w[1::2])
            want.append(
                [r for x, y in pairs for r in box_muller(((x >> 1) + 0.5) / 2**31, (y - (y >> 31 << 32) + 0.5) / 2**32)]
            )
        got = ops.philox_normal(seed, (3, 12), stream=6)
        torch.testing.assert_close(got, torch.tensor(want)[:, :12], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distribution(dtype):
    n = 1_000_000
    x = ops.philox_normal(ops.make_seed(torch.Generator().manual_seed(5)), (4, n // 4), dtype=dtype).double().flatten()
    assert stats.kstest(x[: n // 4].numpy(), "norm").pvalue > 1e-3
    # Moments 1 to 6, whose variances are the moments of twice the order.
    for order, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (5, 0), (6, 15)):
        variance = math.prod(range(1, 2 * order, 2)) - moment**2
        assert abs((x**order).mean() - moment) < 5 * math.sqrt(variance / n)
    # Chi-square over bins of equal probability, then the tails.
    edges = torch.tensor(stats.norm.ppf([i / 200 for i in range(1, 200)]))
    counts = torch.bincount(torch.bucketize(x, edges), minlength=200)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3
    for sigma in (3.0, 4.0):
        expected = 2 * n * stats.norm.sf(sigma)
        assert abs((x.abs() > sigma).sum() - expected) < 5 * math.sqrt(expected)
    pairs = x.view(-1, 2)
    assert abs((pairs[:, 0] * pairs[:, 1]).mean()) < 5 / math.sqrt(n / 2)
    assert abs((pairs[:, 0] ** 2 * pairs[:, 1] ** 2).mean() - 1) < 5 * math.sqrt(8 / (n / 2))


def test_far_tail():
    """60 million numbers: beyond 5 there are as many as there should be, and the largest is beyond 5.3."""
    count, largest = 0, 0.0
    for stream in range(12):
        x = ops.philox_normal(torch.tensor(11), (1, 5_000_000), stream=stream).abs()
        count += int((x > 5).sum())
        largest = max(largest, float(x.max()))
    expected = 2 * 60e6 * stats.norm.sf(5)
    assert abs(count - expected) < 5 * math.sqrt(expected)
    assert 5.3 < largest < 6.7
