import pytest
import torch
from scipy import stats
from table import Case, check_errors, checks

import mdps
from mdps import ops

MASK = 0xFFFFFFFF


def philox_block(counter, key):
    """Philox4x32-10 in Python integers, by its definition."""
    x, y, z, w = counter
    k0, k1 = key
    for _ in range(10):
        p, q = 0xD2511F53 * x, 0xCD9E8D57 * z
        x, y, z, w = (q >> 32) ^ y ^ k0, q & MASK, (p >> 32) ^ w ^ k1, p & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return x, y, z, w


def philox_rows(seed, rows, n, *, kind=0, stream=0):
    """The first n words of each row, by the layout that kernels/philox.h documents."""
    out = []
    for b in range(rows):
        s = int(seed if seed.dim() == 0 else seed[b]) % 2**64
        row = b if seed.dim() == 0 else 0
        blocks = [philox_block((i, kind << 24, stream, row), (s & MASK, s >> 32)) for i in range((n + 3) // 4)]
        out.append([w for block in blocks for w in block][:n])
    return out


def uniform_like(like, seed, stream=0):
    return ops.philox_uniform(seed, like.shape, dtype=torch.promote_types(like.dtype, torch.float32), stream=stream)


def brute_force(like, seed, stream=0):
    """float64, as the checks give it."""
    rows, n = like.size(0), like[:1].numel()
    w = torch.tensor(philox_rows(seed, rows, 2 * n, stream=stream), dtype=torch.float64).reshape(rows, n, 2)
    return (((w[..., 0] * 2**21) + (w[..., 1] / 2**11).floor()) / 2**53).reshape(like.shape)


def case(name, shape, seed, **options):
    def args(g):
        return torch.zeros(shape, dtype=torch.float64), torch.tensor(seed)

    # float32 takes other words than the oracle's float64; test_float32_words compares them.
    return Case(name, uniform_like, args, brute_force, options=options, atol=1.0)


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
        (lambda: ops.philox_uniform(3, (2,)), TypeError, "seed: expected an int64 tensor"),
        (lambda: ops.philox_uniform(torch.tensor(1.0), (2,)), TypeError, "seed: expected dtype int64, got torch.float32"),
        (lambda: ops.philox_uniform(torch.zeros(2, 2).long(), (2,)), ValueError, r"seed: expected shape \(\) or \(B,\)"),
        (lambda: ops.philox_uniform(torch.zeros(2).long(), (3, 1)), ValueError, "shape: expected 2 rows, one for each seed"),
        (lambda: ops.philox_uniform(torch.tensor(1), ()), ValueError, r"shape: expected \(B, ...\), got \(\)"),
        (lambda: ops.philox_uniform(torch.tensor(1), (2,), stream=-1), ValueError, "stream: expected 0 to"),
        (lambda: ops.philox_uniform(torch.tensor(1), (2,), dtype=torch.float16), TypeError, "dtype: expected float32 or"),
        (
            lambda: torch.ops.mdps.philox_uniform(torch.tensor(1), 2, 3, 2**32, 0),
            RuntimeError,
            "^mdps.philox_uniform: stream: expected 0 to 2.32 - 1, got 4294967296$",
        ),
        (lambda: torch.ops.mdps.philox_uniform(torch.tensor(1), 2, -3, 0, 0), RuntimeError, "n: expected a number >= 0"),
    ]
)


def test_float32_words():
    for seed in (torch.tensor(99), torch.tensor([3, 4, 2**40])):
        want = torch.tensor(philox_rows(seed, 3, 11, stream=6)) >> 8
        assert torch.equal(ops.philox_uniform(seed, (3, 11), stream=6), want.float() * 2.0**-24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distribution(dtype):
    u = ops.philox_uniform(ops.make_seed(torch.Generator().manual_seed(3)), (4, 50000), dtype=dtype)
    assert u.min() >= 0 and u.max() < 1
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-3
    assert abs(torch.corrcoef(u.double())).triu(1).max() < 5 / 50000**0.5
    assert abs(((u[:, 1:].double() - 0.5) * (u[:, :-1].double() - 0.5)).mean()) < 5 / 12 / 200000**0.5


def test_a_row_alone_has_the_bits_it_has_in_the_batch():
    seeds = ops.make_seed(torch.Generator().manual_seed(0), 4)
    for f in (ops.philox_uniform, ops.philox_normal):
        whole = f(seeds, (4, 33))
        for b in range(4):
            assert torch.equal(f(seeds[b : b + 1], (1, 33)), whole[b : b + 1])
        assert torch.equal(f(seeds[0], (1, 20))[0], whole[0, :20])
    assert mdps._C.live_handles() == 0


def test_dynamic_shapes_compile():
    f = torch.compile(lambda seed, x: ops.philox_uniform(seed, x.shape), fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (3, 5, 1030):
        assert torch.equal(f(torch.tensor(1), torch.ones(2, n)), ops.philox_uniform(torch.tensor(1), (2, n)))
