import math

import numpy as np
import pytest
import torch
from scipy import stats
from table import Case, check_errors, checks
from test_philox_uniform import MASK, philox_block

import mdps
from mdps import ops


def draws(concentration, seed, stream=0):
    return ops.philox_von_mises(seed, concentration, stream=stream)


def best_fisher(k, element, key, stream, row):
    """The sampler as Best and Fisher wrote it, with r and f, on the same uniforms."""
    if math.isnan(k) or k < 0:
        return math.nan
    if k == math.inf:
        return 0.0
    for attempt in range(64):
        x, y, z, w = philox_block((element, 2 << 24 | attempt, stream, row), key)
        v = ((x - (x >> 31 << 32)) * 2**21 + (y >> 11) + 0.5) / 2**53
        u = ((z >> 1) * 2**22 + (w >> 10) + 0.5) / 2**53
        if k == 0:
            return 2 * math.pi * v
        tau = 1 + math.sqrt(1 + 4 * k * k)
        rho = (tau - math.sqrt(2 * tau)) / (2 * k)
        r = (1 + rho * rho) / (2 * rho)
        cosine = math.cos(2 * math.pi * v)
        f = (1 + r * cosine) / (r + cosine)
        c = k * (r - f)
        if math.log(c / u) + 1 - c >= 0:
            return math.copysign(math.acos(f), v)
    return math.nan


def brute_force(concentration, seed, stream=0):
    rows = []
    for b, row in enumerate(concentration.flatten(1).tolist()):
        s = int(seed if seed.dim() == 0 else seed[b]) % 2**64
        key, number = (s & MASK, s >> 32), b if seed.dim() == 0 else 0
        rows.append([best_fisher(k, i, key, stream, number) for i, k in enumerate(row)])
    return torch.tensor(rows, dtype=torch.float64).reshape(concentration.shape)


def concentrations(*shape, seed=17, scale=1.5, edit=None):
    def make(g):
        k = (scale * torch.randn(*shape, generator=g, dtype=torch.float64)).exp()
        if edit:
            edit(k)
        return k, torch.tensor(seed)

    return make


def strange(k):
    k[0, :6] = torch.tensor([0.0, math.inf, math.nan, -1.0, -math.inf, 3.0])


def case(name, args, **kwargs):
    return Case(name, draws, args, brute_force, **kwargs)


CASES = [
    case("shared seed", concentrations(3, 9)),
    case("a seed a row", concentrations(2, 3, 5, seed=[5, -6])),
    case("stream", concentrations(2, 9), options={"stream": 2**32 - 1}),
    case("more than one tile", concentrations(2, 600)),
    case("strange concentrations", concentrations(2, 9, edit=strange)),
    case("wide range", concentrations(2, 40, scale=3.0)),
    case("empty rows", concentrations(2, 0)),
]

TestOperator = checks(CASES)

test_errors = check_errors(
    [
        (lambda: draws([1.0], torch.tensor(1)), TypeError, "concentration: expected a tensor, got list"),
        (lambda: draws(torch.tensor(1.0), torch.tensor(1)), ValueError, r"concentration: expected shape \(B, ...\)"),
        (lambda: draws(torch.ones(3), 7), TypeError, "seed: expected an int64 tensor"),
        (lambda: draws(torch.ones(3), torch.zeros(2).long()), ValueError, "concentration: expected 2 rows, one for each seed"),
        (lambda: draws(torch.ones(3), torch.tensor(1), stream=2**32), ValueError, "stream: expected 0 to"),
        (
            lambda: torch.ops.mdps.philox_von_mises(torch.ones(3, 1), torch.zeros(2).long(), 0),
            RuntimeError,
            "^mdps.philox_von_mises: seed: expected size 3 in dimension 0, got 2$",
        ),
    ]
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [0, 1e-6, 0.1, 1, 10, 100, 1e4, 1e8, 1e16, 1e30])
def test_distribution(k, dtype):
    n = 40_000
    x = ops.philox_von_mises(torch.tensor(8), torch.full((2, n // 2), k, dtype=dtype)).double().flatten().numpy()
    assert (x >= -math.pi).all() and (x < math.pi).all()
    k = float(torch.tensor(k, dtype=dtype))
    if k < 1e-5:  # differs from uniform by k / pi
        law = stats.uniform(-math.pi, 2 * math.pi).cdf
    elif k > 1e5:  # differs from normal by 1 / (8 k)
        law = stats.norm(0, k**-0.5).cdf
    else:
        law = stats.vonmises(k).cdf
    assert stats.kstest(x, law).pvalue > 1e-3
    assert abs(np.sign(x).mean()) < 5 / n**0.5
    if k > 1e5:
        z = x * math.sqrt(k)
        assert abs((z**2).mean() - 1) < 5 * (2 / n) ** 0.5 and abs((z**4).mean() - 3) < 5 * (96 / n) ** 0.5


def test_both_types_draw_the_same_deviates():
    k = torch.logspace(-6, 8, 5000).view(2, -1)
    a, b = draws(k, torch.tensor(3)), draws(k.double(), torch.tensor(3))
    torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


def test_largest_concentrations():
    k = torch.tensor([[1e36, 3e38, math.inf]])
    assert draws(k, torch.tensor(3)).abs().max() < 1e-17
    assert draws(torch.tensor([[1e300, 1e308]], dtype=torch.float64), torch.tensor(3)).abs().max() < 1e-149


def test_row_alone_and_no_gradient():
    k, seeds = torch.rand(4, 700).mul(5).requires_grad_(), ops.make_seed(torch.Generator().manual_seed(0), 4)
    whole = draws(k, seeds)
    assert not whole.requires_grad
    for b in range(4):
        assert torch.equal(draws(k[b : b + 1], seeds[b : b + 1]), whole[b : b + 1])
    assert mdps._C.live_handles() == 0
