import math

import mpmath
import pytest
import scipy.special
import scipy.stats
import torch
from table import Case, check_errors, checks

from mdps import ops


class LogI0e(torch.autograd.Function):
    """log(e^-k I0(k)) by scipy in float64; its gradient, A(k) - 1, by mpmath: it cancels in float64."""

    @staticmethod
    def forward(ctx, k):
        ctx.save_for_backward(k)
        return torch.as_tensor(scipy.special.i0e(k.numpy())).log()

    @staticmethod
    def backward(ctx, grad):
        (k,) = ctx.saved_tensors
        with mpmath.workdps(40):
            ratio = [
                float(mpmath.besseli(1, k_i) / mpmath.besseli(0, k_i) - 1) if k_i >= 0 else math.nan
                for k_i in map(mpmath.mpf, k.flatten().tolist())
            ]
        return grad * torch.tensor(ratio, dtype=k.dtype).reshape(k.shape)


def oracle(x, mean, concentration):
    k = torch.where(concentration < 0, math.nan, concentration)
    return -2 * k * ((x - mean) / 2).sin() ** 2 - math.log(2 * math.pi) - LogI0e.apply(k)


def angles(x_shape, mean_shape, concentration_shape, low=-1.0, high=2.0, near=False, edit=None):
    def make(g):
        mean = 2 * torch.randn(mean_shape, generator=g, dtype=torch.float64)
        x = 2 * torch.randn(x_shape, generator=g, dtype=torch.float64)
        k = 10 ** (low + (high - low) * torch.rand(concentration_shape, generator=g, dtype=torch.float64))
        if near:
            x = mean + x / k.sqrt()
        if edit:
            edit(x, mean, k)
        return x, mean, k

    return make


def uniform(x, mean, k):
    k[::2] = 0


def bad_concentrations(x, mean, k):
    k[1], k[3] = math.nan, -1.0


def case(name, args, **kwargs):
    kwargs.setdefault("wrt", (0, 1, 2))
    return Case(name, ops.von_mises_log_prob, args, oracle, **kwargs)


CASES = [
    case("ordinary", angles(30, 30, 30)),
    case("broadcast", angles((3, 4, 5), (4, 1), (5,))),
    case("one concentration", angles((3, 50), (3, 50), ())),
    case("one of each", angles((), (), ())),
    case("uniform", angles(9, 9, 9, edit=uniform), gradcheck=False),
    case("narrow", angles(50, 50, 50, low=3.0, high=8.0, near=True), gradcheck=False, atol=2e-6, rtol=2e-6),
    case("wide range", angles(500, 500, 500, low=-8.0, high=8.0), gradcheck=False, rtol=2e-6, atol=2e-6),
    case("bad concentrations", angles(6, 6, 6, edit=bad_concentrations), wrt=()),
]

TestOperator = checks(CASES)

ones = torch.ones(3)
test_errors = check_errors(
    [
        (lambda: ops.von_mises_log_prob(ones, 0.0, ones), TypeError, "mean: expected a tensor, got float"),
        (lambda: ops.von_mises_log_prob(ones, ones, ones.double()), TypeError, "concentration: expected the dtype of x"),
        (
            lambda: ops.von_mises_log_prob(ones, ones, torch.ones(2)),
            ValueError,
            r"concentration: expected a shape that broadcasts with \(3,\), got \(2,\)",
        ),
        (
            lambda: torch.ops.mdps.von_mises_log_prob(ones, ones, torch.ones(2)),
            RuntimeError,
            "^mdps.von_mises_log_prob: concentration: expected size 3 in dimension 0, got 2$",
        ),
    ]
)


@pytest.mark.parametrize("k", [0.0, 0.3, 7.0, 9.0, 400.0])
def test_is_the_density_of_scipy_and_integrates_to_one(k):
    x = torch.linspace(-math.pi, math.pi, 2001, dtype=torch.float64)
    log_p = ops.von_mises_log_prob(x, x.new_tensor(0.7), x.new_tensor(k))
    torch.testing.assert_close(torch.trapezoid(log_p.exp(), x), x.new_tensor(1.0))
    if k > 0:
        torch.testing.assert_close(log_p, torch.from_numpy(scipy.stats.vonmises.logpdf(x.numpy(), k, loc=0.7)))


@pytest.mark.parametrize("k", [1e4, 1e8, 1e12, 1e30])
def test_is_normal_far_out(k):
    """With t = (x - mean) sqrt(k), the density is that of a standard normal times sqrt(k), to order 1 / k."""
    t = torch.linspace(-3, 3, 7)
    x, k32 = t / math.sqrt(k), torch.tensor(k, requires_grad=True)
    log_p = ops.von_mises_log_prob(x, torch.tensor(0.0), k32)
    z = x.double() * math.sqrt(k32.item())
    want = -(z**2) / 2 - 0.5 * math.log(2 * math.pi) + 0.5 * math.log(k32.item())
    torch.testing.assert_close(log_p.double(), want, rtol=2e-6 + 10 / k, atol=10 / k)
    log_p.sum().backward()
    want_grad = ((1 - z**2) / (2 * k32.item())).sum()
    torch.testing.assert_close(k32.grad.double(), want_grad.double(), rtol=1e-6 + 10 / k, atol=0)


def test_the_circle_closes():
    x = torch.tensor([3.1415, -3.1415, 9.0, -40.0], dtype=torch.float64)
    mean = torch.tensor(-3.1415, dtype=torch.float64)
    k = torch.tensor(1e6, dtype=torch.float64)
    got = ops.von_mises_log_prob(x, mean, k)
    torch.testing.assert_close(ops.von_mises_log_prob(x + 2 * math.pi, mean, k), got, rtol=1e-12, atol=1e-2)
    torch.testing.assert_close(got, oracle(x, mean, k), rtol=1e-12, atol=1e-9)


def test_not_a_number_stays_where_it_is():
    x, k = torch.randn(5), torch.tensor([1.0, math.nan, -1.0, math.inf, 2.0])
    x[4] = math.nan
    assert ops.von_mises_log_prob(x, torch.zeros(5), k).isnan().tolist() == [False, True, True, True, True]


def test_empty():
    assert ops.von_mises_log_prob(torch.ones(2, 0), torch.ones(2, 1), torch.ones(())).shape == (2, 0)
