import dataclasses
import math

import pytest
import torch

import mdps

POSE = mdps.StateSpace(linear=("x", "y"), angular=("heading",))


def test_names():
    assert POSE.names == ("x", "y", "heading") and POSE.size == 3 and POSE.n_angular == 1
    assert POSE.index("heading") == [2] and POSE.index(("heading", "x")) == [2, 0]
    assert POSE.subspace(("heading", "x")) == mdps.StateSpace(linear=("x",), angular=("heading",))
    assert mdps.StateSpace(linear=["x"]) == mdps.StateSpace(linear=("x",)) and hash(POSE) == hash(dataclasses.replace(POSE))
    with pytest.raises(dataclasses.FrozenInstanceError):
        POSE.linear = ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wrap(dtype):
    angles = torch.linspace(-40, 40, 1001, dtype=torch.float64).to(dtype)
    states = torch.stack([angles, angles, angles], -1).requires_grad_()
    wrapped = POSE.wrap(states)
    assert torch.equal(wrapped[:, :2], states[:, :2])
    eps = torch.finfo(dtype).eps
    assert (wrapped[:, 2].abs() <= math.pi * (1 + eps)).all()
    turns = (angles.double() - wrapped[:, 2].double()) / (2 * math.pi)
    assert (turns - turns.round()).abs().max() < 20 * eps
    assert torch.equal(POSE.wrap(wrapped), wrapped)  # what is in range keeps every bit
    wrapped.sum().backward()
    assert torch.equal(states.grad, torch.ones_like(states))
    ends = torch.tensor([[0.0, 0.0, math.pi], [0.0, 0.0, -math.pi]], dtype=dtype)
    assert (POSE.wrap(ends)[:, 2] < 0).all()


def test_difference_takes_the_shorter_way():
    a, b = torch.tensor([3.0, 1.0, 3.1]), torch.tensor([1.0, 3.0, -3.1])
    torch.testing.assert_close(POSE.difference(a, b), torch.tensor([2.0, -2.0, 6.2 - 2 * math.pi]))
    torch.testing.assert_close(POSE.difference(b, a), torch.tensor([-2.0, 2.0, 2 * math.pi - 6.2]))


def test_mean():
    angles = torch.tensor([3.1, -3.1, 3.0], dtype=torch.float64)
    states = torch.stack([angles, 2 * angles, angles], -1)
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    mean = POSE.mean(states, weights.log())
    want = [(weights * angles).sum(), (weights * 2 * angles).sum(), (weights * torch.exp(1j * angles)).sum().angle()]
    torch.testing.assert_close(mean, torch.stack(want))
    batch = POSE.mean(torch.stack([states, states + 1]), weights.log().expand(2, 3))
    torch.testing.assert_close(batch, torch.stack([mean, POSE.wrap(mean + 1)]))
    torch.testing.assert_close(mdps.StateSpace(("x",)).mean(states[:, :1], weights.log()), mean[:1])


def test_opposite_angles_have_a_finite_mean():
    states = torch.tensor([[0.0], [math.pi]]).requires_grad_()
    space = mdps.StateSpace(angular=("a",))
    space.mean(states, torch.full((2,), -math.log(2.0))).sum().backward()
    assert states.grad.isfinite().all()


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: mdps.StateSpace(), ValueError, "expected states of 1 to 16 dimensions, got 0"),
        (lambda: mdps.StateSpace(tuple("abcdefghijklmnopq")), ValueError, "1 to 16 dimensions, got 17"),
        (lambda: mdps.StateSpace(("x",), ("x",)), ValueError, r"expected names that differ, got \('x', 'x'\)"),
        (lambda: mdps.StateSpace(linear="xy"), TypeError, "linear: expected a tuple of names, got 'xy'"),
        (lambda: POSE.index("z"), ValueError, r"names: expected some of \('x', 'y', 'heading'\), got 'z'"),
    ],
)
def test_errors(make, error, words):
    with pytest.raises(error, match=words):
        make()
