import math

import pytest
import torch
from table import Case, check_errors, checks
from test_small_network import n_parameters, row_by_row

from mdps import ops
from mdps.ops import Layer

E, K, EK = {"extra": True}, {"condition": True}, {"extra": True, "condition": True}
DYNAMICS = (Layer(8), Layer(8), Layer(8), Layer(8, "none"), Layer(8, **E), Layer(8), Layer(8), Layer(4, "sigmoid"))
SCALE = torch.tensor([5.0, 3.0, 2.0, 1.5], dtype=torch.float64)


def moved(poses, weights, noise, condition=None, *, layers):
    return ops.move_poses(poses, noise, weights, layers, SCALE.to(poses.dtype), condition=condition)


def by_hand(poses, weights, noise, condition=None, *, layers):
    x, y, heading = poses.unbind(-1)
    names, rest = ("extra",), (noise,)
    if condition is not None:
        names, rest = ("extra", "condition"), (noise, condition)
    inputs = torch.stack([heading.sin(), heading.cos()], -1)
    shift_x, shift_y, sine, cosine = ((2 * row_by_row(inputs, weights, *rest, layers=layers, names=names) - 1) * SCALE).unbind(
        -1
    )
    angle = torch.atan2(heading.sin() + sine, heading.cos() + cosine)
    return torch.stack([x + shift_x, y + shift_y, torch.where(angle >= math.pi, angle - 2 * math.pi, angle)], -1)


def case(name, layers, batch, noise, condition=0, sets=None, reach=4.0, edit=None, scale=0.4, **kwargs):
    def make(g):
        def normal(*size):
            return torch.randn(*size, generator=g, dtype=torch.float64)

        poses = 4 * normal(*batch, 3)
        poses[..., 2] = (2 * torch.rand(*batch, generator=g, dtype=torch.float64) - 1) * reach
        parameters = scale * normal(*(() if sets is None else (sets,)), n_parameters(layers, 2, noise, condition))
        inputs = [poses, parameters, normal(*batch, noise)]
        if condition:
            inputs.append(normal(batch[0], condition))
        if edit:
            edit(inputs)
        return tuple(inputs)

    kwargs.setdefault("wrt", (0, 1, 2, 3) if condition else (0, 1, 2))
    return Case(name, moved, make, by_hand, {"layers": layers}, **kwargs)


def not_a_number(inputs):
    inputs[0][1, 3, 2] = math.nan
    inputs[0][0, 1, 0] = math.nan
    inputs[2][0, 2, 1] = math.nan
    inputs[0][0, 4, 2] = math.inf


SMALL = (Layer(6, "tanh", **EK), Layer(4, "sigmoid"))
CASES = [
    case("dynamics, two sets", DYNAMICS, (4, 5), 4, sets=2),
    case("one set", DYNAMICS, (2, 7), 4),
    case("one particle", (Layer(4, "sigmoid", **E),), (1, 1), 1),
    case("with an action", SMALL, (3, 4), 2, 3, sets=3),
    case("noise alone has no gradient", DYNAMICS, (2, 7), 4, wrt=(0, 1)),
    case("many turns", DYNAMICS, (2, 7), 4, reach=60.0),
    # float32 knows an angle of 1e4 to 1e-3, and the direction may be as short as a tenth.
    case("angles of any size", DYNAMICS, (2, 7), 4, reach=1e4, atol=2e-2, grad_atol=2e-2, gradcheck=False),
    # A direction of length 0.5 on average that is shortened to anything: its angle and gradient lose as many digits.
    case("rows across chunks", DYNAMICS, (126, 99), 4, sets=3, gradcheck=False, atol=2e-3, grad_atol=1e-3),
    case("rows longer than chunks", SMALL, (2, 5001), 3, 2, gradcheck=False, atol=2e-3, grad_atol=1e-3),
    case("many sets", SMALL, (1040, 9), 2, 3, sets=520, gradcheck=False, atol=2e-3, grad_atol=1e-3),
    case("not a number", DYNAMICS, (2, 7), 4, edit=not_a_number, wrt=()),
]

TestOperator = checks(CASES)


ONE = (Layer(4, "sigmoid", **E),)


def call(layers=ONE, poses=(2, 3, 3), noise=(2, 3, 1), weights=(16,), scale=(4,), dtype=torch.float32, **given):
    given = {k: torch.zeros(v) for k, v in given.items()}
    zeros = (torch.zeros(size) for size in (poses, noise, weights))
    return lambda: ops.move_poses(*zeros, layers, torch.ones(scale, dtype=dtype), **given)


def raw(layers=(1, 0, 4, 3), poses=(2, 3, 3), noise=(2, 3, 1), weights=(16,), scale=4, dtype=torch.float32):
    zeros = torch.zeros(poses), torch.zeros(noise), None, torch.zeros(weights), list(layers), torch.ones(scale, dtype=dtype)
    return lambda: torch.ops.mdps.move_poses(*zeros)


test_errors = check_errors(
    [
        (lambda: ops.move_poses([1.0], *(torch.ones(2),) * 2, ONE, SCALE), TypeError, "poses: expected a tensor, got list"),
        (call(poses=(2, 3, 4)), ValueError, r"poses: expected shape \(B, N, 3\), got \(2, 3, 4\)"),
        (call(noise=(2, 3, 257)), ValueError, "noise: expected 0 to 256 columns, got 257"),
        (call(noise=(2, 4, 1)), ValueError, r"noise: expected shape \(B, N, E\) = \(2, 3, E\), got \(2, 4, 1\)"),
        (call(noise=(2, 3, 2)), ValueError, r"weights: expected shape \(P\) or \(R, P\) with P = 20, got \(16,\)"),
        (call(weights=(3, 16)), ValueError, "weights: expected R sets, R a divisor of the 2 rows of poses, got R = 3"),
        (call((Layer(4, "sigmoid"),)), ValueError, "extra: expected one layer with extra=True for 1 columns, got 0"),
        (call((Layer(3, "sigmoid", **E),), weights=(12,)), ValueError, r'last to be Layer\(4, "sigmoid"\), got Layer\(out=3'),
        (call((Layer(4, "tanh", **E),)), ValueError, r'layers: expected the last to be Layer\(4, "sigmoid"\), got .*tanh'),
        (call(scale=(3,)), ValueError, r"scale: expected shape \(4\) = \(4,\), got \(3,\)"),
        (call(dtype=torch.float64), TypeError, "scale: expected the dtype of poses, torch.float32, got torch.float64"),
        (call(condition=(3, 1)), ValueError, r"condition: expected shape \(B, K\) = \(2, K\), got \(3, 1\)"),
        (
            lambda: ops.move_poses(
                torch.ones(1, 1, 3), torch.ones(1, 1, 1), torch.ones(16), ONE, torch.ones(4).requires_grad_()
            ),
            ValueError,
            "scale: expected a constant, got a tensor that requires a gradient",
        ),
        (raw(poses=(2, 3, 2)), RuntimeError, "poses: expected 3 columns, got 2"),
        (raw(layers=(1, 0, 4, 2)), RuntimeError, "layers: expected the last to return 4 columns after a sigmoid, got 4 and"),
        (raw(layers=(1, 0, 3, 3), weights=(12,)), RuntimeError, "layers: expected the last to return 4 columns"),
        (raw(scale=5), RuntimeError, "scale: expected size 4 in dimension 0, got 5"),
        (raw(dtype=torch.float64), RuntimeError, "scale: expected the dtype of poses"),
        (raw(weights=(15,)), RuntimeError, "weights: expected 16 parameters, got 15"),
        (
            lambda: torch.ops.mdps.move_poses_backward(
                torch.zeros(2, 3, 2),
                torch.zeros(2, 3, 3),
                torch.zeros(2, 3, 1),
                None,
                torch.zeros(16),
                [1, 0, 4, 3],
                torch.ones(4),
                3,
            ),
            RuntimeError,
            "grad_moved: expected size 3 in dimension 2, got 2",
        ),
    ]
)


@pytest.mark.parametrize("batch", [(0, 5), (4, 0)])
def test_empty(batch):
    weights = torch.ones(2, n_parameters(DYNAMICS, 2, 4, 0), requires_grad=True)
    moved = ops.move_poses(torch.ones(*batch, 3), torch.ones(*batch, 4), weights, DYNAMICS, SCALE.float())
    assert moved.shape == (*batch, 3)
    (grad,) = torch.autograd.grad(moved.sum(), weights)
    assert torch.equal(grad, torch.zeros_like(weights))


def test_nan_stays_in_its_particle():
    poses, noise, weights = torch.randn(2, 70, 3), torch.randn(2, 70, 4), torch.randn(n_parameters(DYNAMICS, 2, 4, 0))
    spoilt = poses.clone()
    spoilt[0, 3, 2] = math.nan
    results = []
    for t in (poses, spoilt):
        t.requires_grad_()
        y = ops.move_poses(t, noise, weights, DYNAMICS, SCALE.float())
        results += [y, *torch.autograd.grad(y.sum(), t)]
    assert results[2].isnan().any(-1).nonzero().tolist() == [[0, 3]]
    for clean, got in zip(results[:2], results[2:]):
        clean[0, 3] = got[0, 3] = 0
        assert torch.equal(clean, got)


def chosen(shares, heading, scale=SCALE, **kwargs):
    """One pose at (0, 0) whose shares are given: the layer's weights are 0, its bias their logits."""
    poses = torch.tensor([[[0.0, 0.0, heading]]], dtype=torch.float64, requires_grad=True)
    weights = torch.cat([torch.zeros(12, dtype=torch.float64), torch.logit(torch.tensor(shares, dtype=torch.float64))])
    return poses, ops.move_poses(poses, torch.zeros(1, 1, 1, dtype=torch.float64), weights, ONE, scale, **kwargs)[0, 0]


def test_shares_are_steps():
    """At the ends of the sigmoid a whole step, in the middle none."""
    _, y = chosen([1.0, 0.0, 0.5, 0.5], 0.3)
    torch.testing.assert_close(y, torch.tensor([5.0, -3.0, 0.3], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_headings_are_in_the_half_open_circle(dtype):
    """With a scale of 0 the heading is wrapped alone; behind us it is -pi, as `StateSpace.wrap` has it."""
    headings = torch.cat([torch.tensor([math.pi, -math.pi, 3 * math.pi, 0.0]), torch.linspace(-20, 20, 4001)]).to(dtype)
    poses = torch.zeros(1, headings.numel(), 3, dtype=dtype)
    poses[0, :, 2] = headings
    noise, weights = torch.zeros(1, headings.numel(), 1, dtype=dtype), torch.zeros(16, dtype=dtype)
    got = ops.move_poses(poses, noise, weights, ONE, torch.zeros(4, dtype=dtype))[0, :, 2]
    assert got.double().min() >= -math.pi and got.double().max() < math.pi
    away = torch.polar(torch.ones_like(got), got) - torch.polar(torch.ones_like(got), headings)
    assert away.abs().max() <= 40 * torch.finfo(dtype).eps


def test_no_direction_has_no_gradient():
    """Heading 0 and a step of (0, -1): neither sine nor cosine is left."""
    for context in (ops.reference(False), ops.reference()):
        with context:
            poses, y = chosen([0.5, 0.5, 0.5, 0.0], 0.0, torch.tensor([1.0, 1, 1, 1], dtype=torch.float64))
            assert y.isfinite().all()
            (grad,) = torch.autograd.grad(y.sum(), poses)
            torch.testing.assert_close(grad, torch.tensor([[[1.0, 1.0, 0.0]]], dtype=torch.float64))


def test_a_mapped_scale():
    poses, noise, weights = torch.randn(2, 5, 3), torch.randn(2, 5, 4), torch.randn(n_parameters(DYNAMICS, 2, 4, 0))
    scales = torch.rand(3, 4)
    got = torch.vmap(lambda s: ops.move_poses(poses, noise, weights, DYNAMICS, s))(scales)
    assert torch.equal(got, torch.stack([ops.move_poses(poses, noise, weights, DYNAMICS, s) for s in scales]))
    grads = torch.vmap(torch.func.grad(lambda p, s: ops.move_poses(p, noise, weights, DYNAMICS, s).sum()), (None, 0))(
        poses, scales
    )
    for grad, s in zip(grads, scales):
        p = poses.clone().requires_grad_()
        torch.testing.assert_close(grad, torch.autograd.grad(ops.move_poses(p, noise, weights, DYNAMICS, s).sum(), p)[0])
