"""All steps of a filter in one call: the formulas of each step by brute force, and the operators of the steps bit for bit."""

import math

import pytest
import test_mixture_resample
import test_move_poses
import test_normalize_log_weights
import test_weigh_poses
import torch
from table import EMULATED, Case, check_errors, checks
from test_iwsg_log_weights import definition
from test_small_network import n_parameters

from mdps import ops
from mdps.ops import Layer

SCALE = test_move_poses.SCALE
MOVE = (Layer(4), Layer(4, extra=True), Layer(4, "sigmoid"))
STILL = (Layer(4), Layer(4, "sigmoid"))
WEIGH = (Layer(4, condition=True), Layer(1, "sigmoid"))


def filtered(states, codes, seeds, bandwidths, move, weigh, noise=None, *, layers=MOVE, **options):
    scale = SCALE.to(bandwidths.dtype)
    return ops.filter_poses(states, codes, seeds, bandwidths, (move, layers), (weigh, WEIGH), scale, noise=noise, **options)


def by_hand(states, codes, seeds, bandwidths, move, weigh, noise=None, *, layers=MOVE, minimum=1e-5, scheme="stratified"):
    """In float64, from the oracles of what a step is made of."""
    n, steps = states.size(1), []
    predicted, ancestors = torch.full_like(states[..., 0], -math.log(n)), torch.arange(n).expand(states.shape[:2])
    for t in range(codes.size(1)):
        if t > 0:
            belief = states, steps[-1][2], bandwidths
            detached = (x.detach() for x in belief)
            z, ancestors = test_mixture_resample.brute_force(*detached, seeds[:, t], n_angular=1, scheme=scheme)
            predicted = definition(z, *belief, n_angular=1) - math.log(n)
            if noise is None:
                z, given = torch.cat([z, z[..., :0]], -1), z.new_zeros(*z.shape[:2], 1)
                padded = (layers[0]._replace(extra=True), *layers[1:])
                states = test_move_poses.by_hand(z, _with_column(move, layers), given, layers=padded)
            else:
                states = test_move_poses.by_hand(z, move, noise[:, t], layers=layers)
        options = {"layers": WEIGH, "names": ("condition",), "minimum": minimum}
        likelihood = test_weigh_poses.by_hand(states, weigh, codes[:, t], **options)
        posterior, log_sum, ess = test_normalize_log_weights.brute_force(predicted + likelihood)
        steps.append((states, predicted, posterior, ancestors, log_sum, ess))
    return tuple(torch.stack(x, 1) for x in zip(*steps))


def _with_column(weights, layers):
    """Parameters whose first layer has a further input, which it does not use."""
    out, columns = layers[0].out, 2
    matrix = weights[..., : out * columns].unflatten(-1, (out, columns))
    matrix = torch.cat([matrix, torch.zeros_like(matrix[..., :1])], -1)
    return torch.cat([matrix.flatten(-2), weights[..., out * columns :]], -1)


def arguments(B, T, N, noise=2, code=3, sets=None, shared=True, layers=MOVE, edit=None, dtype=torch.float64):
    def make(g):
        def normal(*size):
            return torch.randn(*size, generator=g, dtype=dtype)

        lead = () if sets is None else (sets,)
        states = normal(B, N, 3)
        states[..., 2] = 2 * states[..., 2].tanh()
        codes = normal(B, T, code)
        seeds = torch.arange(7, 7 + B * T).reshape(B, T)
        bandwidths = 0.3 + 0.2 * torch.rand(*(() if shared else (B,)), 3, generator=g, dtype=dtype)
        move, weigh = normal(*lead, n_parameters(layers, 2, noise, 0)), normal(*lead, n_parameters(WEIGH, 4, 0, code))
        given = states, codes, seeds, bandwidths, 0.5 * move, weigh
        if edit:
            edit(*given)
        return (*given, normal(B, T, N, noise)) if noise else given

    return make


def case(name, args, **kwargs):
    """float32 draws other deviates than the oracle's float64: what it computes is compared with the steps below."""
    kwargs = {"outputs": (0, 1, 2, 4, 5), "atol": 100.0, "grad_rtol": 0.0, "grad_atol": 1e3, **kwargs}
    return Case(name, filtered, args, by_hand, wrt=(0, 1, 3, 4, 5), gradcheck=False, **kwargs)


CASES = [
    case("two sets", arguments(4, 4, 5, sets=2, shared=False)),
    case("shared", arguments(3, 3, 6)),
    case("one step", arguments(2, 1, 4)),
    case("one particle", arguments(2, 3, 1)),
    case("residual", arguments(3, 3, 6), options={"scheme": "residual", "minimum": 0.1}),
    case("without noise", arguments(3, 3, 5, noise=0, layers=STILL), options={"layers": STILL}),
    case("many particles", arguments(2, 3, 140)),
]

TestOperator = checks(CASES)


def by_steps(states, codes, seeds, bandwidths, move, weigh, noise=None, *, layers=MOVE, scheme="stratified", minimum=1e-5):
    """The same from the operators of a step, each differentiable."""
    n, steps = states.size(1), []
    predicted, ancestors = torch.full_like(states[..., 0], -math.log(n)), torch.arange(n).expand(states.shape[:2])
    for t in range(codes.size(1)):
        if t > 0:
            belief = states, steps[-1][2], bandwidths
            z, ancestors = ops.mixture_resample(*belief, seeds[:, t].contiguous(), n_angular=1, scheme=scheme)
            predicted = ops.iwsg_log_weights(z, *belief, n_angular=1) - math.log(n)
            states = ops.move_poses(z, None if noise is None else noise[:, t], move, layers, SCALE.to(z.dtype))
        likelihood = ops.weigh_poses(states, weigh, WEIGH, condition=codes[:, t], minimum=minimum)
        posterior, log_sum, ess = ops.normalize_log_weights(predicted + likelihood)
        steps.append((states, predicted, posterior, ancestors, log_sum, ess))
    return tuple(torch.stack(x, 1) for x in zip(*steps))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("scheme", ["multinomial", "stratified", "systematic", "residual"])
@pytest.mark.parametrize("size", [(4, 7, 50), (2, 3, 140), (3, 4, 1), (130, 2, 33)])
def test_values_and_gradients_of_the_steps(size, scheme, dtype, tolerance):
    args = arguments(*size, sets=2 if size[0] % 2 == 0 else None, dtype=dtype)(torch.Generator().manual_seed(1))
    wrt = (0, 1, 3, 4, 5)
    results = []
    for f in (filtered, by_steps):
        given = [a.clone().requires_grad_(i in wrt) for i, a in enumerate(args)]
        out = f(*given, scheme=scheme)
        weights = [torch.linspace(-1, 2, o.numel(), dtype=dtype).sin().reshape(o.shape) for o in out]
        loss = sum((w * o).sum() for w, o in zip(weights, out) if o.is_floating_point())
        results.append((out, torch.autograd.grad(loss, [given[i] for i in wrt])))
    for got, want in zip(*(r[0] for r in results), strict=True):
        assert torch.equal(got, want)
    for got, want in zip(*(r[1] for r in results), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * max(1.0, want.abs().max().item()))


def test_networks_of_other_numbers_of_sets():
    """Blocks of rows are within the sets of both."""
    g, (B, T, N) = torch.Generator().manual_seed(5), (12, 3, 600)
    states, codes, seeds, bandwidths, move, _, noise = arguments(B, T, N, sets=2, shared=False)(g)
    weigh = torch.randn(3, n_parameters(WEIGH, 4, 0, 3), generator=g, dtype=torch.float64)
    results = []
    for f in (filtered, by_steps):
        given = [x.clone().requires_grad_() for x in (states, codes, bandwidths, move, weigh)]
        out = ops.FilteredPoses(*f(*given[:2], seeds, *given[2:], noise))
        results.append((out.posterior, *torch.autograd.grad(out.log_sum.sin().sum(), given)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.skipif(EMULATED, reason="the CPU's blocks")
@pytest.mark.parametrize("shared", [False, True])
def test_the_same_bits_with_any_number_of_threads(shared):
    """With fewer threads than blocks, with more, and, in one large row, with threads within each step."""
    size = (130, 4, 33) if not shared else (2, 2, 20000)
    args = arguments(*size, sets=2, shared=shared, dtype=torch.float32)(torch.Generator().manual_seed(6))
    before, results = torch.get_num_threads(), []
    try:
        for n in (1, 3, 8, 64):
            torch.set_num_threads(n)
            given = [a.clone().requires_grad_(i in (0, 1, 3, 4, 5)) for i, a in enumerate(args)]
            out = filtered(*given)
            wrt = [a for a in given if a.requires_grad]
            results.append((*out, *torch.autograd.grad(out.log_sum.sin().sum() + out.states.sum(), wrt)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("result", ["states", "predicted", "posterior", "log_sum", "ess"])
def test_gradient_of_each_result_alone(result):
    """What a loss does not use has no gradient to begin with."""
    args = arguments(3, 4, 6, sets=3)(torch.Generator().manual_seed(2))
    grads = []
    for f in (filtered, by_steps):
        given = [a.clone().requires_grad_(a.is_floating_point() and i < 6) for i, a in enumerate(args)]
        out = ops.FilteredPoses(*f(*given))
        loss, wrt = getattr(out, result)[:, 1:].sin().sum(), [g for g in given if g.requires_grad]
        grads.append(torch.autograd.grad(loss, wrt, allow_unused=True, materialize_grads=True))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert any(g.abs().sum() > 0 for g in grads[0])


def test_a_row_that_is_not_a_number_stays_alone():
    args = list(arguments(3, 4, 6)(torch.Generator().manual_seed(3)))
    want = filtered(*args)
    args[1] = args[1].clone()
    args[1][1, 1] = math.nan
    got = filtered(*args)
    for g, w in zip(got, want):
        assert torch.equal(g[[0, 2]], w[[0, 2]])
    assert got.posterior[1, 1].isnan().all() and got.states[1, 2].isnan().all()


def test_second_call_gives_the_same_and_seeds_matter():
    args = list(arguments(2, 3, 8)(torch.Generator().manual_seed(4)))
    first, second = filtered(*args), filtered(*args)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    args[2] = args[2].clone()
    args[2][:, 0] += 1  # never used
    assert all(torch.equal(a, b) for a, b in zip(first, filtered(*args)))
    args[2][:, 2] += 1
    assert torch.equal(first.states[:, :2], filtered(*args).states[:, :2])
    assert not torch.equal(first.states[:, 2], filtered(*args).states[:, 2])


def test_empty():
    args = arguments(0, 3, 5)(torch.Generator().manual_seed(0))
    given = [a.requires_grad_(i in (0, 1, 3, 4, 5)) for i, a in enumerate(args)]
    out = filtered(*given)
    assert out.states.shape == (0, 3, 5, 3) and out.ess.shape == (0, 3)
    wrt = [a for a in given if a.requires_grad]
    for g, a in zip(torch.autograd.grad(out.log_sum.sum(), wrt), wrt):
        assert torch.equal(g, torch.zeros_like(a))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_ancestors_against_the_oracle(case):
    args = case.make()
    want = by_hand(*args, **case.options)[3]
    assert torch.equal(filtered(*args, **case.options).ancestors, want)
    with ops.reference():
        assert torch.equal(filtered(*args, **case.options).ancestors, want)


GIVEN = dict(zip(("states", "codes", "seeds", "bandwidths", "move", "weigh", "noise"), arguments(2, 3, 4)(torch.Generator())))


def call(**given):
    return lambda: filtered(**{**GIVEN, **given})


def raw(index, value, backward=False):
    """The operator with one other argument."""
    g, weights = GIVEN, {"move": [0, 0, 4, 1, 1, 0, 4, 1, 0, 0, 4, 3], "weigh": [0, 1, 4, 1, 0, 0, 1, 3]}
    models = [
        g["bandwidths"], g["codes"].transpose(0, 1), g["noise"].transpose(0, 1), g["move"], weights["move"], SCALE, g["weigh"],
        weights["weigh"], 1e-5,
    ]  # fmt: skip
    if not backward:
        args = [g["states"], *models, g["seeds"].T, 1]
        args[index] = value
        return lambda: torch.ops.mdps.filter_poses(*args)
    size = (3, 2, 4)
    steps = [torch.zeros(*size, 3), torch.zeros(size), torch.zeros(size[:2]), torch.zeros(size[:2]), torch.zeros(2, 2, 4, 3)]
    args = [None, None, None, torch.ones(3, 2).double(), None, *(x.double() for x in steps), *models]
    args[index] = value
    return lambda: torch.ops.mdps.filter_poses_backward(*args)


Z = torch.zeros
test_errors = check_errors(
    [
        (call(states=[1.0]), TypeError, "states: expected a tensor, got list"),
        (call(states=Z(2, 4, 2).double()), ValueError, r"states: expected shape \(B, N, 3\) = \(2, 4, 3\), got \(2, 4, 2\)"),
        (call(states=Z(2, 0, 3).double()), ValueError, "expected at least one step and one particle, got T = 3 and N = 0"),
        (call(codes=Z(2, 3).double()), ValueError, r"codes: expected shape \(B, T, K\) = \(2, T, K\), got \(2, 3\)"),
        (call(codes=Z(2, 0, 3).double()), ValueError, "expected at least one step and one particle, got T = 0 and N = 4"),
        (call(codes=GIVEN["codes"].float()), TypeError, "codes: expected the dtype of states"),
        (call(seeds=Z(2, 3)), TypeError, "seeds: expected int64 on cpu, got torch.float32 on cpu"),
        (call(seeds=Z(2).long()), ValueError, r"seeds: expected shape \(B, T\) = \(2, 3\), got \(2,\)"),
        (call(bandwidths=Z(2).double()), ValueError, r"bandwidths: expected shape \(3\) or \(B, 3\)"),
        (
            call(noise=Z(2, 3, 4).double()),
            ValueError,
            r"noise: expected shape \(B, T, N, E\) = \(2, 3, 4, E\), got \(2, 3, 4\)",
        ),
        (call(noise=Z(2, 3, 5, 2).double()), ValueError, r"noise: expected shape .*, got \(2, 3, 5, 2\)"),
        (call(noise=Z(2, 3, 4, 2).double().requires_grad_()), ValueError, "noise: expected a constant"),
        (call(noise=None), ValueError, "move: extra: expected no layer with extra=True"),
        (call(move=Z(5).double()), ValueError, r"move: weights: expected shape \(P\) or \(R, P\)"),
        (call(weigh=Z(5).double()), ValueError, r"weigh: weights: expected shape \(P\) or \(R, P\)"),
        (call(weigh=Z(3, 37).double()), ValueError, "weigh: weights: expected R sets, R a divisor of the 2 rows of states"),
        (call(layers=WEIGH), ValueError, "move: "),
        (call(minimum=0.0), ValueError, r"minimum: expected a number in \[1e-30, 1\), got 0.0"),
        (call(scheme="none"), ValueError, "scheme: expected one of"),
        (
            lambda: ops.filter_poses(*list(GIVEN.values())[:4], GIVEN["move"], (GIVEN["weigh"], WEIGH), SCALE),
            TypeError,
            r"move: expected a pair \(weights, layers\), got Tensor",
        ),
        (raw(0, Z(2, 4, 2).double()), RuntimeError, "states: expected 3 columns, got 2"),
        (raw(0, Z(2, 0, 3).double()), RuntimeError, "states: expected at least one particle, got 0"),
        (raw(1, Z(1, 3).double()), RuntimeError, "bandwidths: expected size 2 in dimension 0, got 1"),
        (raw(2, Z(3, 2, 257).double()), RuntimeError, "codes: expected 1 to 256 columns, got 257"),
        (raw(5, [1, 0, 4, 9]), RuntimeError, "move_layers: expected an activation"),
        (raw(6, Z(37).double()), RuntimeError, "scale: expected size 4 in dimension 0, got 37"),
        (raw(7, Z(38).double()), RuntimeError, "weigh_weights: expected 37 parameters, got 38"),
        (raw(7, Z(3, 37).double()), RuntimeError, "weigh_weights: expected a number of sets that divides the 2 rows of states"),
        (raw(1, Z(4).double()), RuntimeError, "bandwidths: expected size 3 in dimension 0, got 4"),
        (raw(2, Z(0, 2, 3).double()), RuntimeError, "codes: expected at least one step, got 0"),
        (raw(2, Z(3, 3, 3).double()), RuntimeError, "codes: expected size 2 in dimension 1, got 3"),
        (raw(3, Z(3, 2, 4, 3).double()), RuntimeError, "move_weights: expected .* parameters"),
        (raw(3, None), RuntimeError, "noise: expected it to enter one layer if it is given and none if not, got 1"),
        (raw(6, Z(4)), RuntimeError, "scale: expected the dtype of states"),
        (raw(9, 0.0), RuntimeError, r"minimum: expected a number in \[1e-30, 1\), got 0"),
        (raw(10, Z(3, 3).long()), RuntimeError, "seeds: expected size 2 in dimension 1, got 3"),
        (raw(11, 9), RuntimeError, "scheme: expected 0 to 3, got 9"),
        (raw(3, Z(3, 3).double(), backward=True), RuntimeError, "grad_log_sum: expected size 2 in dimension 1, got 3"),
        (raw(5, Z((1,) * 9).double(), backward=True), RuntimeError, "states: expected 4 dimensions, got 9"),
        (raw(5, Z(()).double(), backward=True), RuntimeError, "states: expected 4 dimensions, got 0"),
        (raw(5, Z(0, 2, 4, 3).double(), backward=True), RuntimeError, "states: expected at least one step, got 0"),
        (raw(0, Z(3, 2, 4).double(), backward=True), RuntimeError, "grad_states: expected 4 dimensions, got 3"),
        (raw(9, Z(3, 2, 4, 3).double(), backward=True), RuntimeError, "drawn: expected size 2 in dimension 0, got 3"),
        (raw(6, Z(3, 2, 4), backward=True), RuntimeError, "posterior: expected the dtype of states"),
        (raw(11, Z(2, 2, 3).double(), backward=True), RuntimeError, "expected (size 2 in dimension 0, got 3|3 steps, got 2)"),
    ]
)


@pytest.mark.skipif(EMULATED, reason="a GPU does not look at bandwidths: their gradients are NaN")
@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan])
def test_bad_bandwidths_are_told_in_backward(bad):
    bandwidths = GIVEN["bandwidths"].clone()
    bandwidths[1] = bad
    out = filtered(**{**GIVEN, "bandwidths": bandwidths.requires_grad_()})
    with pytest.raises(ValueError, match="^bandwidths: expected positive finite numbers"):
        out.log_sum.nan_to_num().sum().backward()


@pytest.mark.skipif(EMULATED, reason="as above")
def test_a_bad_bandwidth_is_told_with_its_row():
    args = arguments(130, 3, 33, sets=2, shared=False)(torch.Generator().manual_seed(7))
    args[3][100, 1] = -1.0
    out = filtered(*(a.requires_grad_() if i == 3 else a for i, a in enumerate(args)))
    with pytest.raises(ValueError, match="bandwidths: expected positive finite numbers, got another one in row 100"):
        out.log_sum.nan_to_num().sum().backward()
