import math
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from table import EMULATED, Case, check_errors, checks
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import mdps
from mdps import ops
from mdps.ops import Layer

ACTIVATIONS = {"none": lambda z, s: z, "relu": lambda z, s: F.relu(z), "tanh": lambda z, s: F.tanh(z)}
ACTIVATIONS |= {"sigmoid": lambda z, s: F.sigmoid(z), "prelu": lambda z, s: F.prelu(z, s)}


def network(x, weights, *rest, layers, names=()):
    return ops.small_network(x, weights, layers, **dict(zip(names, rest, strict=True)))


def row_by_row(x, weights, *rest, layers, names=()):
    """Layer by layer with torch's own linear, one batch row after the other."""
    given = dict(zip(names, rest, strict=True))
    sets = weights if weights.dim() == 2 else weights[None]
    rows = []
    for b in range(x.size(0)):
        parameters = sets[b // (x.size(0) // sets.size(0))]
        h, at = x[b], 0
        for layer in layers:
            parts = [h]
            if layer.extra:
                parts.append(given["extra"][b])
            if layer.condition:
                parts.append(given["condition"][b].repeat(x.size(1), 1))
            h = torch.cat(parts, -1)
            size = layer.out * h.size(-1)
            matrix = parameters[at : at + size].view(layer.out, h.size(-1))
            bias = parameters[at + size : at + size + layer.out]
            at += size + layer.out
            slope = parameters[at : at + 1] if layer.activation == "prelu" else None
            at += layer.activation == "prelu"
            h = ACTIVATIONS[layer.activation](F.linear(h, matrix, bias), slope)
        assert at == parameters.numel()
        rows.append(h)
    return torch.stack(rows)


def n_parameters(layers, columns, extra, condition):
    total = 0
    for layer in layers:
        total += layer.out * (columns + extra * layer.extra + condition * layer.condition + 1) + (layer.activation == "prelu")
        columns = layer.out
    return total


def case(name, layers, batch, columns, extra=0, condition=0, sets=None, edit=None, scale=0.4, **kwargs):
    names = ("extra",) * (extra > 0) + ("condition",) * (condition > 0)

    def make(g):
        def normal(*size):
            return torch.randn(*size, generator=g, dtype=torch.float64)

        inputs = [normal(*batch, columns)]
        parameters = scale * normal(*(() if sets is None else (sets,)), n_parameters(layers, columns, extra, condition))
        if extra:
            inputs.append(normal(*batch, extra))
        if condition:
            inputs.append(normal(batch[0], condition))
        if edit:
            edit(inputs)
        return inputs[0], parameters, *inputs[1:]

    kwargs.setdefault("wrt", tuple(range(2 + len(names))))
    return Case(name, network, make, row_by_row, {"layers": layers, "names": names}, **kwargs)


def not_a_number(inputs):
    inputs[0][1, 3] = math.nan
    inputs[1][0, 2, 1] = math.nan
    inputs[0][0, 1, 0] = math.inf


E, K, EK = {"extra": True}, {"condition": True}, {"extra": True, "condition": True}
DYNAMICS = (Layer(8), Layer(8), Layer(8), Layer(8, "none"), Layer(8, **E), Layer(8), Layer(8), Layer(4, "none"))
MEASUREMENT = (Layer(8), Layer(8), Layer(8), Layer(8, **K), Layer(8), Layer(1, "none"))
SMOOTHER = (Layer(8), Layer(8), Layer(8), Layer(8), Layer(8, **EK), Layer(8), Layer(8), Layer(1, "none"))
DEEP = (Layer(64),) * 6 + (Layer(200, "prelu"), Layer(64, **EK), Layer(64, "tanh")) + (Layer(64),) * 6 + (Layer(3, "none"),)

CASES = [
    case("smoother, two sets", SMOOTHER, (4, 5), 4, 2, 8, sets=2),
    case("dynamics", DYNAMICS, (2, 7), 2, 4),
    case("measurement", MEASUREMENT, (3, 5), 4, 0, 8),
    case("one particle", (Layer(1, "none"),), (1, 1), 1),
    case("all joined at once", (Layer(3, "tanh", **EK), Layer(2, "sigmoid")), (3, 4), 2, 1, 3, sets=3),
    case("tanh", (Layer(6, "tanh"), Layer(3, "tanh")), (2, 5), 3),
    case("sigmoid", (Layer(6, "sigmoid"), Layer(3, "sigmoid")), (2, 5), 3),
    case("prelu", (Layer(6, "prelu"), Layer(3, "prelu", **K), Layer(5, "prelu")), (2, 5), 3, 0, 2, sets=2),
    case("relu at the end", (Layer(9, "relu"), Layer(7, "relu")), (2, 5), 3),
    case("odd widths", (Layer(13), Layer(7, "tanh", **E), Layer(3)), (3, 131), 5, 6, gradcheck=False),
    case("rows longer than chunks", (Layer(8, **K), Layer(8), Layer(2, "none")), (2, 5001), 3, 0, 4, gradcheck=False),
    case("rows across chunks", SMOOTHER, (126, 99), 4, 2, 8, sets=3, gradcheck=False),
    # A GPU's block has several tiles when sets are many; the deep network's tile is too large for its shared memory.
    case("many sets", (Layer(5, "prelu", **K), Layer(3)), (1040, 9), 2, 0, 3, sets=520, gradcheck=False),
    case("sixteen layers", DEEP, (4, 9), 6, 5, 4, sets=2, scale=0.17, gradcheck=False),
    # Sums of 257 terms: n eps sum |w x| is 1.5e-4 here; the build for sanitizers, without fused multiply-add, has 3.4e-5.
    case("wide", (Layer(256), Layer(65, "prelu"), Layer(2, "none")), (2, 70), 70, gradcheck=False, atol=1e-4, grad_atol=3e-4),
    case("not a number", DYNAMICS, (2, 7), 2, 4, edit=not_a_number, wrt=()),
]

TestOperator = checks(CASES)


ONE = (Layer(2),)


def call(layers=ONE, x=(2, 3, 4), weights=(10,), **given):
    given = {k: torch.zeros(v) for k, v in given.items()}
    return lambda: ops.small_network(torch.zeros(x), torch.zeros(weights), layers, **given)


def raw(*layers, x=(2, 3, 4), weights=(10,), extra=None):
    extra = None if extra is None else torch.zeros(extra)
    return lambda: torch.ops.mdps.small_network(torch.zeros(x), extra, None, torch.zeros(weights), layers)


test_errors = check_errors(
    [
        (lambda: ops.small_network([1.0], torch.ones(2), (Layer(1),)), TypeError, "x: expected a tensor, got list"),
        (
            lambda: ops.small_network(torch.ones(1, 1, 1), torch.ones(2).int(), (Layer(1),)),
            TypeError,
            "weights: expected dtype",
        ),
        (call(x=(3, 4)), ValueError, r"x: expected shape \(B, N, C\), got \(3, 4\)"),
        (call(x=(2, 3, 257)), ValueError, "x: expected 1 to 256 columns, got 257"),
        (call(x=(2, 3, 0)), ValueError, "x: expected 1 to 256 columns, got 0"),
        (call(extra=(2, 3, 257)), ValueError, "extra: expected 0 to 256 columns, got 257"),
        (call(condition=(2, 257)), ValueError, "condition: expected 0 to 256 columns, got 257"),
        (call(weights=(11,)), ValueError, r"weights: expected shape \(P\) or \(R, P\) with P = 10, got \(11,\)"),
        (call(weights=(3, 10)), ValueError, "weights: expected R sets, R a divisor of the 2 rows of x, got R = 3"),
        (call(weights=(0, 10)), ValueError, "weights: expected R sets, R a divisor of the 2 rows of x, got R = 0"),
        (call(extra=(2, 4, 1)), ValueError, r"extra: expected shape \(B, N, E\) = \(2, 3, E\), got \(2, 4, 1\)"),
        (call(condition=(3, 1)), ValueError, r"condition: expected shape \(B, K\) = \(2, K\), got \(3, 1\)"),
        (call(extra=(2, 3, 5)), ValueError, "extra: expected one layer with extra=True for 5 columns, got 0"),
        (call((Layer(2, **K),)), ValueError, "condition: expected no layer with condition=True without such an input, got 1"),
        (
            call((Layer(2, **E), Layer(2, **E)), extra=(2, 3, 5)),
            ValueError,
            "extra: expected one layer .* for 5 columns, got 2",
        ),
        (call(((2, "relu"),)), TypeError, r"layers: expected a sequence of Layer, got \(\(2, 'relu'\),\)"),
        (call(None), TypeError, "layers: expected a sequence of Layer, got None"),
        (call(()), ValueError, "layers: expected 1 to 16, got 0"),
        (call((Layer(2),) * 17), ValueError, "layers: expected 1 to 16, got 17"),
        (call((Layer(257),)), ValueError, "layers: expected out = 1 to 256, got 257"),
        (call((Layer(2, "gelu"),)), ValueError, "activation: expected one of .*'tanh'.*, got 'gelu'"),
        (raw(0, 0, 2), RuntimeError, "layers: expected 4 integers for each of 1 to 16 layers, got 3"),
        (raw(0, 0, 2, 9), RuntimeError, r"layers: expected an activation in \[0, 5\), got 9"),
        (raw(0, 2, 2, 0), RuntimeError, "layers: expected 0 or 1 for whether extra and condition enter"),
        (raw(0, 0, 999, 0), RuntimeError, "layers: expected 1 to 256 columns, got 999"),
        (raw(1, 0, 2, 0), RuntimeError, "extra: expected it to enter one layer if it is given and none if not, got 1"),
        (raw(0, 0, 2, 0, weights=(9,)), RuntimeError, "weights: expected 10 parameters, got 9"),
        (raw(0, 0, 2, 0, weights=(3, 10)), RuntimeError, "weights: expected a number of sets that divides the 2 rows"),
        (raw(1, 0, 2, 0, extra=(2, 4, 1)), RuntimeError, "extra: expected size 3 in dimension 1, got 4"),
        (raw(1, 0, 2, 0, extra=(2, 4)), RuntimeError, "extra: expected 3 dimensions, got 2"),
        (
            lambda: torch.ops.mdps.small_network_backward(
                torch.zeros(2, 3, 3), torch.zeros(2, 3, 4), None, None, torch.zeros(10), [0, 0, 2, 0], 3
            ),
            RuntimeError,
            "grad_y: expected size 2 in dimension 2, got 3",
        ),
    ]
)


@pytest.mark.parametrize("batch", [(0, 5), (4, 0)])
def test_empty(batch):
    weights = torch.ones(2, n_parameters(SMOOTHER, 4, 2, 8), requires_grad=True)
    x, extra, condition = torch.ones(*batch, 4), torch.ones(*batch, 2), torch.ones(batch[0], 8, requires_grad=True)
    y = ops.small_network(x, weights, SMOOTHER, extra=extra, condition=condition)
    assert y.shape == (*batch, 1)
    for g, t in zip(torch.autograd.grad(y.sum(), (weights, condition)), (weights, condition)):
        assert torch.equal(g, torch.zeros_like(t))
    with ops.reference():
        assert ops.small_network(x, weights, SMOOTHER, extra=extra, condition=condition).shape == (*batch, 1)


def test_nan_stays_in_its_particle():
    x, extra, weights = torch.randn(2, 70, 2), torch.randn(2, 70, 4), torch.randn(n_parameters(DYNAMICS, 2, 4, 0))
    spoilt = x.clone()
    spoilt[0, 3] = math.nan
    results = []
    for t in (x, spoilt):
        t.requires_grad_()
        y = ops.small_network(t, weights, DYNAMICS, extra=extra)
        results += [y, *torch.autograd.grad(y.sum(), t)]
    assert results[2].isnan().any(-1).nonzero().tolist() == [[0, 3]]
    for clean, got in zip(results[:2], results[2:]):
        clean[0, 3] = got[0, 3] = 0
        assert torch.equal(clean, got)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_nan_passes_every_activation(activation):
    patterns = torch.tensor([0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0x7F800001, -1, -0x400000], dtype=torch.int32).view(
        torch.float32
    )
    layers, weights = (Layer(1, activation),), torch.tensor([1.0, 0.0] + [0.5] * (activation == "prelu"))
    for x in (patterns, patterns.double()):
        assert ops.small_network(x.view(1, -1, 1), weights.to(x.dtype), layers).isnan().all()


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 3e-7), (torch.float64, 6e-16)])
def test_tanh_and_sigmoid_hold_their_relative_error(dtype, error):
    x = torch.cat([torch.linspace(-30, 30, 60001), torch.linspace(-1e-3, 1e-3, 2001), torch.tensor([-1e4, 1e4])]).to(dtype)
    for activation, exact in (("tanh", torch.tanh), ("sigmoid", torch.sigmoid)):
        weights = torch.tensor([1.0, 0.0], dtype=dtype)
        y = ops.small_network(x.view(1, -1, 1), weights, (Layer(1, activation),)).view(-1)
        want = exact(x.double())
        assert (
            (y.double() - want).abs() <= error * (1 + x.double().abs()) * want.abs()
        ).all()  # as exp: it rounds its argument


def test_idle_lanes_do_not_overflow_into_gradients():
    """One particle of a tile of 128: at x = 0 the second layer would be infinite, at this particle's x = 1 it is not."""
    layers = (Layer(1), Layer(1), Layer(1))
    weights = torch.tensor([-3e38, 3e38, 10.0, 1.0, 1.0, 1.0], requires_grad=True)
    y = ops.small_network(torch.ones(1, 1, 1), weights, layers)
    (grad,) = torch.autograd.grad(y.sum(), weights)
    assert y.item() == 2 and grad.isfinite().all()


def test_gradients_that_nobody_wants_are_not_computed():
    x, extra = torch.randn(2, 3, 2, requires_grad=True), torch.randn(2, 3, 4)
    weights = torch.randn(n_parameters(DYNAMICS, 2, 4, 0), requires_grad=True)
    want = torch.autograd.grad(ops.small_network(x, weights, DYNAMICS, extra=extra.requires_grad_()).sum(), (x, weights))
    got = torch.autograd.grad(ops.small_network(x, weights, DYNAMICS, extra=extra.detach()).sum(), (x, weights))
    (alone,) = torch.autograd.grad(ops.small_network(x.detach(), weights, DYNAMICS, extra=extra.detach()).sum(), weights)
    assert all(torch.equal(g, w) for g, w in zip(got, want)) and torch.equal(alone, want[1])


def test_vmap_over_inputs_shares_two_sets():
    x, weights = torch.randn(3, 4, 5, 2), torch.randn(2, 9)
    got = torch.vmap(lambda x: ops.small_network(x, weights, (Layer(3),)))(x)
    assert torch.equal(got, torch.stack([ops.small_network(r, weights, (Layer(3),)) for r in x]))
    per_sample = torch.vmap(torch.func.grad(lambda w, x: ops.small_network(x, w, (Layer(3),)).sum()), (None, 0))(weights, x)
    for g, row in zip(per_sample, x):
        w = weights.clone().requires_grad_()
        torch.testing.assert_close(g, torch.autograd.grad(ops.small_network(row, w, (Layer(3),)).sum(), w)[0])


def test_vmap_over_weights_alone_and_within_vmap_over_inputs():
    x, weights = torch.randn(3, 2, 4, 2), torch.randn(5, 9)
    got = torch.vmap(lambda x: torch.vmap(lambda w: ops.small_network(x, w, (Layer(3),)))(weights))(x)
    for i in range(3):
        for j in range(5):
            assert torch.equal(got[i, j], ops.small_network(x[i], weights[j], (Layer(3),)))


def test_compiles_with_what_is_read_off_a_module():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def f(x):
        return ops.small_network(x, ops.flatten_parameters(module), ops.layers_of(module))

    for size in ((2, 5, 3), (4, 7, 3)):
        torch.testing.assert_close(f(torch.ones(size)), module(torch.ones(size)))
    f(torch.ones(2, 5, 3)).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in module.parameters())


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.PReLU])
def test_stands_for_two_sequentials(activation):
    first = nn.Sequential(nn.Linear(3, 8), activation(), nn.Sequential(nn.Linear(8, 5)))
    second = nn.Sequential(nn.Linear(5 + 2 + 4, 8), activation(), nn.Linear(8, 2))
    first, second = first.double(), second.double()
    x, extra, condition = (torch.randn(*s, dtype=torch.float64) for s in ((4, 9, 3), (4, 9, 2), (4, 4)))
    layers = ops.layers_of(first) + ops.layers_of(second, extra=True, condition=True)
    y = ops.small_network(x, ops.flatten_parameters(first, second), layers, extra=extra, condition=condition)
    want = second(torch.cat([first(x), extra, condition[:, None].expand(-1, 9, -1)], -1))
    torch.testing.assert_close(y, want)
    parameters = [*first.parameters(), *second.parameters()]
    got = torch.autograd.grad(y.square().sum(), parameters)
    torch.testing.assert_close(got, torch.autograd.grad(want.square().sum(), parameters))


def test_inputs_without_columns_are_none():
    x, weights, layers = torch.randn(2, 4, 3), torch.randn(8), (Layer(2),)
    want = ops.small_network(x, weights, layers)
    empty = {"extra": torch.empty(2, 4, 0), "condition": torch.empty(2, 0)}
    assert torch.equal(ops.small_network(x, weights, layers, **empty), want)
    with pytest.raises(ValueError, match="extra: expected no layer with extra=True without such an input"):
        ops.small_network(x, weights, (Layer(2, extra=True),), **empty)


class MyLinear(nn.Linear):
    pass


def hooked():
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_forward_hook(lambda *a: None)
    return module


def hooked_sequential(register):
    module = nn.Sequential(nn.Linear(2, 2))
    getattr(module, register)(lambda *a: None)
    return module


def pruned():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    prune.l1_unstructured(module[0], "weight", 0.5)
    return module


def old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)))


def own_forward():
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].forward = torch.sin
    return module


CHANGED = [
    hooked(),
    *(hooked_sequential(f"register_{way}_hook") for way in ("forward", "forward_pre", "full_backward", "full_backward_pre")),
    pruned(),
    old_weight_norm(),
    own_forward(),
]


@pytest.mark.parametrize(
    "module",
    [
        *CHANGED,
        nn.Sequential(),
        nn.Sequential(nn.ReLU(), nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Tanh()),
        nn.Sequential(nn.Linear(2, 2, bias=False)),
        nn.Sequential(nn.Linear(2, 2), nn.GELU()),
        nn.Sequential(nn.Linear(2, 2), nn.PReLU(2)),
        nn.Sequential(nn.Linear(2, 300)),
        nn.Sequential(nn.Linear(300, 2)),
        nn.Sequential(*(nn.Linear(2, 2) for _ in range(17))),
        nn.Sequential(nn.Linear(2, 2), nn.Dropout()),
        nn.Sequential(MyLinear(2, 2)),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    ],
    ids=str,
)
def test_what_is_no_small_network(module):
    assert ops.layers_of(module) is None


@pytest.mark.parametrize("module", CHANGED, ids=str)
def test_flatten_parameters_refuses_what_would_be_ignored(module):
    with pytest.raises(ValueError, match="modules: expected layers without hooks, pruning or a forward of their own"):
        ops.flatten_parameters(module)


def test_flatten_parameters_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="modules: expected nn.Sequential of nn.Linear .*got a ParametrizedLinear"):
        ops.flatten_parameters(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))))
    with pytest.raises(ValueError, match=r"modules: expected nn.Sequential of nn.Linear with bias and activations, got a GELU"):
        ops.flatten_parameters(nn.Sequential(nn.Linear(2, 2), nn.GELU()))
    with pytest.raises(ValueError, match="modules: expected at least one nn.Linear, got none"):
        ops.flatten_parameters(nn.Sequential())


SANITIZERS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DMDPS_NO_CLONES"]


@pytest.mark.skipif(EMULATED, reason="about the CPU's kernels")
@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")
@pytest.mark.parametrize("flags", [["-O3"], SANITIZERS], ids=["targets", "sanitizers"])
def test_every_instruction_set(flags, tmp_path):
    tests = Path(__file__).parent
    flags = [*flags, "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", f"-I{tests.parent / 'kernels'}"]
    subprocess.run(["gcc", *flags, tests / "small_network_targets.c", "-lm", "-o", tmp_path / "targets"], check=True)
    done = subprocess.run([tmp_path / "targets"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_left():
    assert mdps._C.live_handles() == 0
