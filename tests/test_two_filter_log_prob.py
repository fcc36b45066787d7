import math

import pytest
import torch
from table import EMULATED, Case, check_errors, checks
from test_mixture_log_prob import brute_force, mixture

from mdps import ops


def definition(x, fm, fl, fb, bm, bl, bb, n_angular=0, mixing=0.5):
    log_f, log_b = brute_force(x, fm, fl, fb, n_angular), brute_force(x, bm, bl, bb, n_angular)
    top = torch.maximum(log_f, log_b).detach()
    top = torch.where(top.isfinite(), top, torch.zeros_like(top))
    q = mixing * torch.exp(log_f - top) + (1 - mixing) * torch.exp(log_b - top)
    dead = q == 0
    log_q = torch.log(torch.where(dead, torch.ones_like(q), q)) + top
    return log_f, log_b, torch.where(dead, torch.full_like(q, -math.inf), log_q)


def two(B, M, N_f, N_b, D, A, *, shared=True, edit=None):
    def make(g):
        x, *ahead = mixture(B, M, N_f, D, A, shared=shared)(g)
        _, *back = mixture(B, M, N_b, D, A, shared=shared)(g)
        if edit:
            edit(x, ahead, back)
        return (x, *ahead, *back)

    return make


def one_dead(x, ahead, back):
    ahead[1][0] = -math.inf


def both_dead(x, ahead, back):
    ahead[1][0] = -math.inf
    back[1][0] = -math.inf


def apart(x, ahead, back):
    x[:, ::2, :2] += 300
    back[0][..., :2] += 300


def not_a_number(x, ahead, back):
    x[0, 0, 0] = math.nan
    ahead[1][1, 0] = math.nan
    back[1][2, 0] = math.nan


def case(name, args, n_angular, mixing=0.5, **kwargs):
    kwargs.setdefault("wrt", tuple(range(7)))
    return Case(name, ops.two_filter_log_prob, args, definition, {"n_angular": n_angular, "mixing": mixing}, **kwargs)


CASES = [
    case("pose", two(3, 20, 7, 5, 3, 1), 1),
    case("own bandwidths", two(2, 17, 7, 5, 3, 1, shared=False), 1, mixing=0.3),
    case("few particles", two(2, 4, 7, 5, 2, 0), 0),
    case("paper size", two(3, 100, 50, 50, 3, 1), 1, gradcheck=False),
    case("forward only", two(2, 17, 7, 5, 3, 1), 1, mixing=1.0),
    case("backward only", two(2, 17, 7, 5, 3, 1), 1, mixing=0.0),
    case("one filter dead", two(2, 17, 7, 5, 3, 1, edit=one_dead), 1, gradcheck=False),
    case("both filters dead", two(2, 17, 7, 5, 3, 1, edit=both_dead), 1, gradcheck=False),
    case("filters far apart", two(2, 30, 7, 5, 3, 1, edit=apart), 1, gradcheck=False),
    case("not a number", two(4, 17, 7, 5, 3, 1, edit=not_a_number), 1, wrt=()),
]

TestOperator = checks(CASES)

ARGS = two(2, 20, 5, 4, 3, 1)(torch.Generator().manual_seed(0))


def test_every_argument_may_be_strided():
    """Each is copied then, and so are the gradients that a sum expands: 28 tensors with the 14 arguments of backward."""
    args = [a.mT.contiguous().mT if a.dim() > 1 else torch.stack([a, a], -1)[..., 0] for a in ARGS]
    args = [a.requires_grad_() for a in args]
    sum(out.sum() for out in ops.two_filter_log_prob(*args, n_angular=1)).backward()
    plain = [a.detach().contiguous().requires_grad_() for a in args]
    sum(out.sum() for out in ops.two_filter_log_prob(*plain, n_angular=1)).backward()
    for a, b in zip(args, plain):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.skipif(EMULATED, reason="on a GPU nothing waits to look at bandwidths")
def test_bandwidths_that_are_not_positive():
    with pytest.raises(ValueError, match="bandwidths: expected positive"):
        ops.two_filter_log_prob(*ARGS[:6], -ARGS[6], n_angular=1)


test_errors = check_errors(
    [
        (lambda: ops.two_filter_log_prob(*ARGS, n_angular=1, mixing=1.5), ValueError, "mixing: expected 0 to 1, got 1.5"),
        (lambda: ops.two_filter_log_prob(*ARGS[:5], ARGS[5][0], ARGS[6]), ValueError, "log_weights: expected shape"),
        (
            lambda: ops.two_filter_log_prob(*ARGS[:6], ARGS[6].float()),
            TypeError,
            "backward_bandwidths: expected the dtype of x",
        ),
    ]
)


@pytest.mark.parametrize("M, N", [(0, 5), (0, 129), (20, 0), (8, 0)])
def test_empty(M, N):
    mixtures = [x.requires_grad_() for _ in range(2) for x in (torch.ones(2, N, 2), torch.zeros(2, N), torch.ones(2))]
    out = ops.two_filter_log_prob(torch.ones(2, M, 2), *mixtures)
    assert all(o.shape == (2, M) and (o == -math.inf).all() for o in out)
    assert all((g == 0).all() for g in torch.autograd.grad(sum(o.sum() for o in out), mixtures))
