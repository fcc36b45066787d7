import math

import pytest
import torch
from table import EMULATED, Case, check_errors, checks
from test_mixture_log_prob import brute_force, collapse, far_away, mixture

from mdps import ops


def definition(samples, means, log_weights, bandwidths, n_angular=0):
    """log of m(z; phi) / m(z; phi_0) with phi_0 the value of phi."""
    phi = (means, log_weights, bandwidths)
    log_p = brute_force(samples.detach(), *phi, n_angular=n_angular)
    log_p = torch.where(log_p == -math.inf, torch.zeros_like(log_p), log_p)
    return log_p - log_p.detach()


def case(name, args, n_angular, **kwargs):
    return Case(
        name, ops.iwsg_log_weights, args, definition, {"n_angular": n_angular}, wrt=(1, 2, 3), gradcheck=False, atol=0, **kwargs
    )


CASES = [
    case("pose", mixture(3, 20, 7, 3, 1), 1),
    case("own bandwidths", mixture(3, 50, 50, 3, 1, shared=False), 1),
    case("few samples", mixture(3, 5, 7, 2, 0), 0),
    case("no angle", mixture(3, 70, 7, 3, 0), 0),
    case("far away", mixture(2, 40, 7, 3, 1, edit=far_away), 1),
    case("collapse", mixture(3, 20, 7, 3, 1, edit=collapse), 1),
]

TestOperator = checks(CASES)

Z, MEANS, WEIGHTS, BANDWIDTHS = mixture(2, 20, 5, 3, 1)(torch.Generator().manual_seed(0))

test_errors = check_errors(
    [
        (lambda: ops.iwsg_log_weights(Z, MEANS[0], WEIGHTS, BANDWIDTHS), ValueError, "samples|x: expected shape"),
        (
            lambda: ops.iwsg_log_weights(Z.float(), MEANS, WEIGHTS, BANDWIDTHS),
            TypeError,
            "means: expected the dtype of samples",
        ),
        (lambda: ops.iwsg_log_weights(Z, MEANS, WEIGHTS, BANDWIDTHS, n_angular=9), ValueError, "n_angular"),
    ]
)


def test_value_is_exactly_zero_and_costs_nothing_at_inference():
    out = ops.iwsg_log_weights(Z, MEANS, WEIGHTS, BANDWIDTHS, n_angular=1)
    assert (out == 0).all() and not out.requires_grad


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_bad_bandwidths_are_told_in_backward(bad, lead):
    bandwidths = torch.tensor([0.3, bad, 0.2], dtype=torch.float64)
    given = [Z, MEANS, WEIGHTS] if lead else [Z[0], MEANS[0], WEIGHTS[0]]
    out = ops.iwsg_log_weights(*given, bandwidths.requires_grad_(), n_angular=1)
    if ops.reference_active():
        return
    if EMULATED:  # a GPU is not waited for: the row is NaN
        assert torch.autograd.grad(out.sum(), bandwidths)[0].isnan().any()
        return
    with pytest.raises(ValueError, match="^bandwidths: expected positive finite numbers, got another one in row 0"):
        out.sum().backward()


@pytest.mark.parametrize("M, N", [(0, 5), (0, 129), (20, 0), (8, 0)])
def test_empty(M, N):
    args = [x.requires_grad_() for x in (torch.ones(2, N, 2), torch.zeros(2, N), torch.ones(2))]
    out = ops.iwsg_log_weights(torch.ones(2, M, 2), *args)
    assert out.shape == (2, M)
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), args))


def test_no_gradient_to_samples():
    z = Z.clone().requires_grad_()
    out = ops.iwsg_log_weights(z, MEANS.clone().requires_grad_(), WEIGHTS, BANDWIDTHS, n_angular=1)
    assert torch.autograd.grad(out.sum(), z, allow_unused=True)[0] is None
