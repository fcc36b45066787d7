import torch
from table import Case, check_errors, checks
from test_philox_uniform import philox_rows

from mdps import ops


def brute_force(seed, n=4, stream=0):
    """Words 4 i and 4 i + 1 of kind 3, as one number of 64 bits."""
    rows = philox_rows(seed, max(1, seed.numel()) if seed.dim() == 0 else seed.size(0), 4 * n, kind=3, stream=stream)
    signed = [[(y << 32 | x) - (y >> 31 << 64) for x, y in zip(w[::4], w[1::4])] for w in rows]
    out = torch.tensor(signed, dtype=torch.int64)
    return out if seed.dim() else out[0]


def case(name, seed, n, **options):
    return Case(name, ops.split_seed, lambda g: (torch.tensor(seed),), brute_force, options={"n": n, **options})


CASES = [
    case("shared seed", 1234567890123456789, 5),
    case("a seed a row", [5, -6, 2**63 - 1], 9),
    case("stream", -1, 3, stream=2**32 - 1),
    case("none", 3, 0),
]

TestOperator = checks(CASES)

test_errors = check_errors(
    [
        (lambda: ops.split_seed(3, 2), TypeError, "seed: expected an int64 tensor"),
        (lambda: ops.split_seed(torch.zeros(2, 2).long(), 2), ValueError, r"seed: expected shape \(\) or \(B,\)"),
        (lambda: ops.split_seed(torch.tensor(3), -1), ValueError, "n: expected 0 to"),
        (lambda: ops.split_seed(torch.tensor(3), 2.0), TypeError, "n: expected an int, got 2.0"),
        (
            lambda: torch.ops.mdps.split_seed(torch.tensor(3), -1, 0),
            RuntimeError,
            "^mdps.split_seed: n: expected a number >= 0, got -1$",
        ),
        (lambda: ops.make_seed(batch=-1), ValueError, "batch: expected a number >= 0, got -1"),
    ]
)


def test_make_seed():
    a, b = (ops.make_seed(torch.Generator().manual_seed(4)) for _ in range(2))
    assert a.shape == () and a.dtype == torch.int64 and a == b
    assert ops.make_seed(batch=3).unique().numel() == 3
    torch.manual_seed(1)
    a = ops.make_seed()
    torch.manual_seed(1)
    assert a == ops.make_seed()
    assert torch.compile(ops.make_seed, fullgraph=True, backend="aot_eager")().dtype == torch.int64
    many = ops.make_seed(torch.Generator().manual_seed(4), 1000, device="cpu")
    assert 400 < (many < 0).sum() < 600 and many.abs().max() > 2**62  # all 64 bits


def test_split_seeds_do_not_depend_on_n_and_differ():
    seed = ops.make_seed(torch.Generator().manual_seed(4), 2)
    many = ops.split_seed(seed, 5000)
    assert torch.equal(ops.split_seed(seed, 7), many[:, :7])
    assert many.unique().numel() == 10000
    assert torch.equal(ops.split_seed(seed[1:], 7)[0], many[1, :7])
