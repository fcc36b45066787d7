import math

import pytest
import torch
from table import Case, check_errors, checks

import mdps
from mdps import ops


def brute_force(log_weights):
    """Row by row, number by number; a collapsed row by its definition."""
    normalized, log_sums, ess = [], [], []
    n = log_weights.size(-1)
    for row in log_weights.reshape(-1, n):
        if (row == -math.inf).all():
            normalized.append(torch.full_like(row, -math.log(n)))
            log_sums.append(row.new_tensor(-math.inf))
            ess.append(row.new_tensor(float(n)))
            continue
        top = row.detach().max()
        w = (row - top).exp()
        normalized.append(row - top - w.sum().log())
        log_sums.append(top + w.sum().log())
        ess.append(w.sum() ** 2 / (w**2).sum())
    lead = log_weights.shape[:-1]
    return (
        torch.stack(normalized).reshape(log_weights.shape),
        torch.stack(log_sums).reshape(lead),
        torch.stack(ess).reshape(lead),
    )


def weights(*shape, scale=3.0, edit=None):
    def make(g):
        x = scale * torch.randn(*shape, generator=g, dtype=torch.float64)
        if edit:
            edit(x)
        return (x,)

    return make


def dead(x):
    x[:, ::3] = -math.inf


def collapse(x):
    x[1] = -math.inf


def half_dead(x):
    x[0, :4600] = -math.inf
    x[1] = -math.inf


def half_dead_with_nan(x):
    x[0, :4600] = -math.inf
    x[0, 7] = math.nan


def not_a_number(x):
    x[1, 2] = math.nan
    x[2] = -math.inf
    x[2, 0] = math.nan


def infinite(x):
    x[0, 1] = math.inf


def case(name, args, **kwargs):
    kwargs.setdefault("wrt", (0,))
    return Case(name, ops.normalize_log_weights, args, brute_force, **kwargs)


CASES = [
    case("ordinary", weights(4, 50)),
    case("one particle", weights(3, 1)),
    case("one row", weights(1, 7)),
    case("long", weights(2, 5000), gradcheck=False),
    case("long, half dead", weights(3, 9200, edit=half_dead), gradcheck=False),
    case("long, half dead, not a number", weights(2, 9200, edit=half_dead_with_nan), wrt=()),
    case("leading dimensions", weights(2, 3, 5)),
    case("far apart", weights(3, 9, scale=1e4), gradcheck=False, atol=2e-3),
    case("dead particles", weights(3, 9, edit=dead), gradcheck=False),
    case("collapse", weights(3, 9, edit=collapse), gradcheck=False),
    case("not a number", weights(4, 9, edit=not_a_number), wrt=()),
    case("infinite weight", weights(2, 3, edit=infinite), wrt=()),
]

TestOperator = checks(CASES)


def backward(**change):
    matrices, rows = ("grad_normalized", "normalized"), ("grad_log_sum", "grad_ess", "log_sum", "ess")
    args = {n: torch.ones(2, 3) for n in matrices} | {n: torch.ones(2) for n in rows} | change
    return lambda: torch.ops.mdps.normalize_log_weights_backward(**args)


test_errors = check_errors(
    [
        (lambda: ops.normalize_log_weights([1.0]), TypeError, "log_weights: expected a tensor, got list"),
        (
            lambda: ops.normalize_log_weights(torch.ones(2, dtype=torch.int64)),
            TypeError,
            "log_weights: expected dtype float32 or",
        ),
        (lambda: ops.normalize_log_weights(torch.tensor(1.0)), ValueError, r"log_weights: expected shape \(..., N\)"),
        (
            lambda: ops.normalize_log_weights(torch.ones(2, 0)),
            ValueError,
            r"log_weights: expected shape \(..., N\) with N >= 1",
        ),
        (
            lambda: torch.ops.mdps.normalize_log_weights(torch.ones(2)),
            RuntimeError,
            "^mdps.normalize_log_weights: log_weights: expected 2 dimensions, got 1$",
        ),
        *(
            (backward(**{name: torch.ones(1)}), RuntimeError, f"{name}: expected size 2 in dimension 0, got 1")
            for name in ("grad_log_sum", "grad_ess", "log_sum", "ess")
        ),
        (backward(ess=torch.ones(2).double()), RuntimeError, "ess: expected the dtype of normalized"),
    ]
)


def test_empty_batch():
    out = ops.normalize_log_weights(torch.ones(0, 4))
    assert [tuple(o.shape) for o in out] == [(0, 4), (0,), (0,)]


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF])
def test_nan_stays_in_its_row(bits):
    x = torch.randn(3, 8)
    want = ops.normalize_log_weights(x)
    x[1, 0] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    got = ops.normalize_log_weights(x)
    for g, w in zip(got, want):
        assert torch.equal(g[[0, 2]], w[[0, 2]]) and g[1].isnan().all()
    assert mdps._C.live_handles() == 0
