import math

import mpmath
import numpy as np
import scipy.special
import torch
from table import Case, check_errors, checks

from mdps import ops


class LogI0(torch.autograd.Function):
    """scipy in float64; its gradient is written out."""

    @staticmethod
    def forward(ctx, k):
        ctx.save_for_backward(k)
        return torch.as_tensor(np.log(scipy.special.ive(0, k.numpy())) + np.abs(k.numpy()))

    @staticmethod
    def backward(ctx, grad):
        (k,) = ctx.saved_tensors
        return grad * torch.as_tensor(scipy.special.ive(1, k.numpy()) / scipy.special.ive(0, k.numpy()))


def oracle(k):
    return LogI0.apply(k)


def concentrations(*shape, low=-3.0, high=6.0, sign=1):
    def make(g):
        return (sign * 10.0 ** (low + (high - low) * torch.rand(shape, generator=g, dtype=torch.float64)),)

    return make


def special(g):
    return (torch.tensor([0.0, 8.0, math.nan, -8.0, 1e8], dtype=torch.float64),)


def case(name, args, **kwargs):
    kwargs.setdefault("wrt", (0,))
    return Case(name, ops.log_i0, args, oracle, **kwargs)


CASES = [
    case("ordinary", concentrations(40, low=-1.0, high=1.5)),
    case("wide", concentrations(3, 50), gradcheck=False),
    case("negative", concentrations(7, low=-1.0, high=1.5, sign=-1)),
    case("no dimension", concentrations(low=0.0, high=0.1)),
    case("many", concentrations(5000), gradcheck=False),
    case("special", special, gradcheck=False),
]

TestOperator = checks(CASES)

test_errors = check_errors(
    [
        (lambda: ops.log_i0(1.0), TypeError, "concentration: expected a tensor, got float"),
        (lambda: ops.log_i0(torch.tensor([1])), TypeError, "concentration: expected dtype float32 or float64, got torch.int64"),
        (
            lambda: torch.ops.mdps.log_i0(torch.ones(2, 2)),
            RuntimeError,
            "^mdps.log_i0: concentration: expected 1 dimensions, got 2$",
        ),
    ]
)


def test_relative_error_from_tiny_to_huge():
    k = torch.tensor([1e-30, 1e-9, 1e-4, 0.5, 7.999, 8.001, 100.0, 1e5, 1e12, 1e30], requires_grad=True)
    y = ops.log_i0(k)
    y.sum().backward()
    for k_i, y_i, g_i in zip(k.tolist(), y.tolist(), k.grad.tolist()):
        with mpmath.workdps(100):
            if k_i < 1e5:
                want = mpmath.log(mpmath.besseli(0, k_i)), mpmath.besseli(1, k_i) / mpmath.besseli(0, k_i)
            else:
                want = k_i - mpmath.log(2 * mpmath.pi * k_i) / 2, 1 - mpmath.mpf(1) / (2 * k_i)
        assert abs(y_i - want[0]) <= 1e-6 * want[0] + 1e-44
        assert abs(g_i - want[1]) <= 1e-6 * want[1]


def test_even_and_infinite():
    k = torch.tensor([0.0, 1e-3, 5.0, 50.0, math.inf])
    assert torch.equal(ops.log_i0(-k), ops.log_i0(k))
    assert ops.log_i0(k)[[0, -1]].tolist() == [0.0, math.inf]


def test_empty():
    assert ops.log_i0(torch.ones(0, 3)).shape == (0, 3)
