import math

import pytest
import torch
from table import Case, check_errors, checks
from test_small_network import n_parameters, row_by_row

from mdps import ops
from mdps.ops import Layer

E, K, EK = {"extra": True}, {"condition": True}, {"extra": True, "condition": True}
MEASUREMENT = (Layer(8), Layer(8), Layer(8), Layer(8, **K), Layer(8), Layer(1, "sigmoid"))
SMOOTHER = (Layer(8), Layer(8), Layer(8), Layer(8), Layer(8, **EK), Layer(8), Layer(8), Layer(1, "sigmoid"))


def weighed(poses, weights, *rest, layers, names=(), **options):
    return ops.weigh_poses(poses, weights, layers, **dict(zip(names, rest, strict=True)), **options)


def by_hand(poses, weights, *rest, layers, names=(), minimum=1e-5, least_extra=-math.inf):
    x, y, heading = poses.unbind(-1)
    inputs = torch.stack([x, y, heading.sin(), heading.cos()], -1)
    rest = [r.clamp_min(least_extra) if name == "extra" else r for name, r in zip(names, rest)]
    share = row_by_row(inputs, weights, *rest, layers=layers, names=names)[..., 0]
    return torch.log(minimum + (1 - minimum) * share)


def case(name, layers, batch, extra=0, condition=0, sets=None, reach=4.0, edit=None, options=None, **kwargs):
    names = ("extra",) * (extra > 0) + ("condition",) * (condition > 0)

    def make(g):
        def normal(*size):
            return torch.randn(*size, generator=g, dtype=torch.float64)

        poses = normal(*batch, 3)
        poses[..., 2] = (2 * torch.rand(*batch, generator=g, dtype=torch.float64) - 1) * reach
        inputs = [poses, 0.5 * normal(*(() if sets is None else (sets,)), n_parameters(layers, 4, extra, condition))]
        if extra:
            inputs.append(3 * normal(*batch, extra))
        if condition:
            inputs.append(normal(batch[0], condition))
        if edit:
            edit(inputs)
        return tuple(inputs)

    kwargs.setdefault("wrt", tuple(range(2 + len(names))))
    return Case(name, weighed, make, by_hand, {"layers": layers, "names": names, **(options or {})}, **kwargs)


def not_a_number(inputs):
    inputs[0][1, 3, 2] = inputs[0][0, 1, 0] = math.nan
    inputs[0][0, 4, 2] = math.inf
    inputs[2][0, 2, 1] = math.nan
    inputs[2][0, 3] = -math.inf


CUT = {"least_extra": -1.5}
CASES = [
    case("smoother, two sets", SMOOTHER, (4, 5), 2, 8, sets=2, options=CUT),
    case("measurement", MEASUREMENT, (3, 5), 0, 8),
    case("one particle", (Layer(1, "sigmoid"),), (1, 1)),
    case("many turns", MEASUREMENT, (2, 7), 0, 8, reach=60.0),
    # float32 knows an angle of 1e4 to 1e-3.
    case("angles of any size", MEASUREMENT, (2, 7), 0, 8, reach=1e4, atol=5e-3, grad_atol=1e-2, gradcheck=False),
    case("another minimum", MEASUREMENT, (2, 7), 0, 3, options={"minimum": 0.25}),
    case("rows across chunks", SMOOTHER, (126, 99), 2, 8, sets=3, options=CUT, gradcheck=False),
    case("rows longer than chunks", (Layer(8, **K), Layer(1, "sigmoid")), (2, 5001), 0, 4, gradcheck=False),
    case("many sets", (Layer(5, "prelu", **EK), Layer(1, "sigmoid")), (1040, 9), 1, 3, sets=520, options=CUT, gradcheck=False),
    case("not a number", SMOOTHER, (2, 7), 2, 8, options=CUT, edit=not_a_number, wrt=()),
]

TestOperator = checks(CASES)


ONE = (Layer(1, "sigmoid"),)


def call(layers=ONE, poses=(2, 3, 3), weights=(5,), **given):
    given = {k: torch.zeros(v) if isinstance(v, tuple) else v for k, v in given.items()}
    return lambda: ops.weigh_poses(torch.zeros(poses), torch.zeros(weights), layers, **given)


def raw(layers=(0, 0, 1, 3), poses=(2, 3, 3), weights=(5,), minimum=1e-5, least_extra=-math.inf):
    zeros = torch.zeros(poses), None, None, torch.zeros(weights), list(layers), minimum, least_extra
    return lambda: torch.ops.mdps.weigh_poses(*zeros)


test_errors = check_errors(
    [
        (lambda: ops.weigh_poses([1.0], torch.ones(5), ONE), TypeError, "poses: expected a tensor, got list"),
        (call(poses=(2, 3, 4)), ValueError, r"poses: expected shape \(B, N, 3\), got \(2, 3, 4\)"),
        (call(extra=(2, 4, 1)), ValueError, r"extra: expected shape \(B, N, E\) = \(2, 3, E\), got \(2, 4, 1\)"),
        (call(weights=(6,)), ValueError, r"weights: expected shape \(P\) or \(R, P\) with P = 5, got \(6,\)"),
        (call(weights=(3, 5)), ValueError, "weights: expected R sets, R a divisor of the 2 rows of poses, got R = 3"),
        (call((Layer(2, "sigmoid"),), weights=(10,)), ValueError, r'last to be Layer\(1, "sigmoid"\), got Layer\(out=2'),
        (call((Layer(1),)), ValueError, r'layers: expected the last to be Layer\(1, "sigmoid"\), got .*relu'),
        (call(minimum=1.0), ValueError, r"minimum: expected a number in \[1e-30, 1\), got 1.0"),
        (call(minimum=0.0), ValueError, r"minimum: expected a number in \[1e-30, 1\), got 0.0"),
        (call(minimum=math.nan), ValueError, "minimum: expected a number in .*, got nan"),
        (call(least_extra=math.nan), ValueError, "least_extra: expected a number, got nan"),
        (raw(poses=(2, 3, 2)), RuntimeError, "poses: expected 3 columns, got 2"),
        (raw(layers=(0, 0, 1, 2)), RuntimeError, "layers: expected the last to return 1 columns after a sigmoid, got 1 and"),
        (raw(layers=(0, 0, 2, 3), weights=(10,)), RuntimeError, "layers: expected the last to return 1 columns"),
        (raw(minimum=0.0), RuntimeError, r"minimum: expected a number in \[1e-30, 1\), got 0"),
        (raw(least_extra=math.nan), RuntimeError, "least_extra: expected a number, got"),
        (raw(weights=(4,)), RuntimeError, "weights: expected 5 parameters, got 4"),
        (
            lambda: torch.ops.mdps.weigh_poses_backward(
                torch.zeros(2, 4), torch.zeros(2, 3, 3), None, None, torch.zeros(5), [0, 0, 1, 3], 1e-5, -1.0, 1
            ),
            RuntimeError,
            "grad: expected size 3 in dimension 1, got 4",
        ),
    ]
)


@pytest.mark.parametrize("batch", [(0, 5), (4, 0)])
def test_empty(batch):
    weights = torch.ones(2, n_parameters(SMOOTHER, 4, 2, 8), requires_grad=True)
    extra, condition = torch.ones(*batch, 2), torch.ones(batch[0], 8, requires_grad=True)
    y = ops.weigh_poses(torch.ones(*batch, 3), weights, SMOOTHER, extra=extra, condition=condition)
    assert y.shape == batch
    for g, t in zip(torch.autograd.grad(y.sum(), (weights, condition)), (weights, condition)):
        assert torch.equal(g, torch.zeros_like(t))


def test_nan_stays_in_its_particle():
    poses, code, weights = torch.randn(2, 70, 3), torch.randn(2, 8), torch.randn(n_parameters(MEASUREMENT, 4, 0, 8))
    spoilt = poses.clone()
    spoilt[0, 3, 2] = math.nan
    results = []
    for t in (poses, spoilt):
        t.requires_grad_()
        y = ops.weigh_poses(t, weights, MEASUREMENT, condition=code)
        results += [y[..., None], *torch.autograd.grad(y.sum(), t)]
    assert results[2].isnan().any(-1).nonzero().tolist() == [[0, 3]]
    for clean, got in zip(results[:2], results[2:]):
        clean[0, 3] = got[0, 3] = 0
        assert torch.equal(clean, got)


@pytest.mark.parametrize("minimum", [1e-30, 1e-5, 0.5])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_weights_have_their_bounds(dtype, tolerance, minimum):
    """The network's output alone, of a bias from far below to far above: log[e + (1 - e) / (1 + exp(-z))] in Python floats."""
    z = torch.tensor([-1e30, -100.0, -11.5, 0.0, 20.0, 1e30], dtype=dtype)
    weights = torch.cat([torch.zeros(6, 4, dtype=dtype), z[:, None]], 1).requires_grad_()
    got = ops.weigh_poses(torch.zeros(6, 1, 3, dtype=dtype), weights, ONE, minimum=minimum)[:, 0]
    want = [math.log(minimum + (1 - minimum) * (1 / (1 + math.exp(-v)) if v > -700 else 0.0)) for v in z.tolist()]
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), rtol=tolerance, atol=tolerance)
    assert torch.autograd.grad(got.sum(), weights)[0].isfinite().all()


def test_extra_is_not_seen_below_its_bound():
    poses, weights = torch.randn(1, 4, 3), torch.randn(n_parameters(SMOOTHER, 4, 2, 8))
    extra = torch.tensor([[[-1e30, -20.0], [-20.0, -math.inf], [-20.001, -25.0], [-19.0, 3.0]]], requires_grad=True)
    y = ops.weigh_poses(poses, weights, SMOOTHER, extra=extra, condition=torch.ones(1, 8), least_extra=-20.0)
    at_bound = torch.where(extra.detach() < -20, -20.0, extra.detach())
    assert torch.equal(y, ops.weigh_poses(poses, weights, SMOOTHER, extra=at_bound, condition=torch.ones(1, 8)))
    (grad,) = torch.autograd.grad(y.sum(), extra)
    assert (grad[0, :3] == 0).all() and (grad[0, 3] != 0).all()
