import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.signal import correlate
from table import EMULATED, Case, RawCalls, check_errors, checks

import mdps
from mdps import ops


def spread_to(x, lead, index, own):
    """One x for each row of poses: by index, or by broadcasting its leading dimensions."""
    if index is not None:
        return x.flatten(0, x.dim() - own - 1)[index]
    return x.expand((*lead, *x.shape[x.dim() - own :]))


def by_grid_sample(map, template, poses, *, origin, valid=None, confidence=None, padding="zeros", normalize="none",
                   half_pixel=False, map_index=None, template_index=None):  # fmt: skip
    """Every cell sampled by torch's grid_sample, multiplied and summed."""
    lead, (h, w), (height, width) = poses.shape[:-2], template.shape[-2:], map.shape[-2:]
    kinds = template.shape[:-3]
    seen = torch.ones(h, w, dtype=torch.bool) if valid is None else valid
    seen = seen.expand(*kinds, h, w)
    weighed = template if confidence is None else template * torch.where(seen, confidence, 0.0).unsqueeze(-3)
    weighed = torch.where(seen.unsqueeze(-3), weighed, 0.0)
    maps = spread_to(map, lead, map_index, 3).reshape(-1, *map.shape[-3:])
    weighed = spread_to(weighed, lead, template_index, 3).reshape(-1, *template.shape[-3:])
    count = spread_to(seen.sum((-2, -1)), lead, template_index, 0).clamp_min(1).reshape(*lead, 1)
    good = poses.isfinite().all(-1)
    u, v, theta = torch.where(good.unsqueeze(-1), poses, 0.0).reshape(-1, *poses.shape[-2:])[..., None, None].unbind(-3)
    if half_pixel:
        u, v = u - 0.5, v - 0.5
    y, x = torch.meshgrid(torch.arange(h) - origin[1], torch.arange(w) - origin[0], indexing="ij")
    u, v = u + x * theta.cos() - y * theta.sin(), v + x * theta.sin() + y * theta.cos()
    at = torch.stack([(u + 0.5) * 2 / width - 1, (v + 0.5) * 2 / height - 1], -1).flatten(1, 2)
    mode = {"zeros": "zeros", "replicate": "border"}[padding]
    samples = F.grid_sample(maps, at, padding_mode=mode, align_corners=False).unflatten(2, (-1, h))
    scores = torch.einsum("rcnij,rcij->rn", samples, weighed).view(poses.shape[:-1])
    scores = scores / {"none": 1, "valid": count, "cells and valid": count * h * w}[normalize]
    return torch.where(good, scores, math.nan)


def problem(C, height, width, h, w, n, *, maps=(), kinds=(), lead=(), spread=4.0, more=()):
    """Map, template and poses around its middle, with these leading dimensions; more: further arguments of each name."""

    def make(g):
        def normal(*size):
            return torch.randn(*size, generator=g, dtype=torch.float64)

        middle = torch.tensor([width / 2, height / 2, 0.0], dtype=torch.float64)
        poses = middle + normal(*lead, n, 3) * torch.tensor([spread, spread, 3.0], dtype=torch.float64)
        extra = {
            "valid": lambda: torch.rand(*kinds, h, w, generator=g) < 0.6,
            "confidence": lambda: torch.rand(*kinds, h, w, generator=g, dtype=torch.float64),
            "map_index": lambda: torch.randint(max(1, math.prod(maps)), lead, generator=g),
            "template_index": lambda: torch.randint(max(1, math.prod(kinds)), lead, generator=g),
        }
        return normal(*maps, C, height, width), normal(*kinds, C, h, w), poses, *(extra[name]() for name in more)

    return make


def case(name, args, origin, *, more=(), wrt=(0, 1, 2), **kwargs):
    options = {"origin": origin, **kwargs.pop("options", {})}

    def named(f):
        return lambda map, template, poses, *values, **options: f(map, template, poses, **dict(zip(more, values)), **options)

    return Case(name, named(ops.pose_correlation), args, named(by_grid_sample), options, wrt=wrt, **kwargs)


def changed(make, edit):
    def args(g):
        made = make(g)
        edit(*made)
        return made

    return args


def far(map, template, poses, *_):
    poses[..., 0, 0] += 1e4
    poses[..., 1, 1] -= 3e6
    poses[..., 2, 2] += 200.0
    poses[..., 3, 0] = -1e30


def not_a_number(map, template, poses, *_):
    poses[0, 1, 0], poses[0, 3, 1], poses[1, 0, 2] = math.nan, math.inf, -math.inf


def nothing_valid(map, template, poses, valid):
    valid[0] = False
    template[0] = math.nan


REPLICATE, HALF = {"padding": "replicate"}, {"half_pixel": True}
BATCH = {"maps": (2,), "kinds": (2,), "lead": (2,)}
CASES = [
    case("one map each", problem(3, 9, 8, 4, 5, 6, **BATCH, more=("valid",)), (2.0, 3.5), more=("valid",)),
    case("replicate", problem(3, 9, 8, 4, 5, 6, **BATCH, spread=6.0), (2.0, 3.5), options=REPLICATE),
    case("all of a template valid", problem(2, 7, 7, 3, 4, 5, **BATCH), (1.5, 3.0)),
    case("eight channels", problem(8, 12, 10, 5, 6, 5, **BATCH), (2.5, 5.0)),
    case("nine channels", problem(9, 12, 10, 3, 4, 5, **BATCH), (2.5, 5.0), options=REPLICATE),
    case("one channel", problem(1, 12, 10, 5, 6, 7, **BATCH), (2.5, 5.0)),
    case(
        "confidence and validity",
        problem(2, 8, 9, 4, 5, 6, **BATCH, more=("valid", "confidence")),
        (2.0, 4.0),
        more=("valid", "confidence"),
        options={"normalize": "valid"},
        wrt=(0, 1, 2, 4),
    ),
    case(
        "normalised twice",
        problem(2, 8, 9, 4, 5, 6, **BATCH, more=("valid", "confidence")),
        (2.0, 4.0),
        more=("valid", "confidence"),
        options={"normalize": "cells and valid", **HALF},
        wrt=(1, 2, 4),
    ),
    case("half pixels", problem(2, 8, 9, 4, 5, 6, **BATCH), (2.0, 4.0), options={**HALF, **REPLICATE}),
    case("no leading dimension", problem(3, 9, 8, 4, 5, 6), (2.0, 3.5)),
    case("one map for steps", problem(2, 9, 8, 3, 4, 3, maps=(2, 1), kinds=(2, 3), lead=(2, 3)), (2.0, 3.5)),
    case("one template", problem(2, 9, 8, 3, 4, 3, maps=(2,), kinds=(), lead=(3, 2)), (2.0, 3.5)),
    case(
        "indices",
        problem(2, 9, 8, 3, 4, 3, maps=(3,), kinds=(2, 2), lead=(5,), more=("map_index", "template_index", "valid")),
        (2.0, 3.5),
        more=("map_index", "template_index", "valid"),
    ),
    case("one pixel", problem(2, 1, 1, 3, 4, 6, **BATCH, spread=1.5), (1.5, 1.0)),
    case("one pixel, replicate", problem(2, 1, 1, 3, 4, 6, **BATCH, spread=1.5), (1.5, 1.0), options=REPLICATE),
    case("one row", problem(2, 1, 9, 3, 4, 6, **BATCH, spread=2.0), (1.5, 1.0), options=REPLICATE),
    case("one column", problem(2, 9, 1, 3, 4, 6, **BATCH, spread=2.0), (1.5, 1.0)),
    case("two by three", problem(2, 2, 3, 3, 4, 6, **BATCH, spread=2.0), (1.5, 1.0), options=REPLICATE),
    case("far away", changed(problem(2, 9, 8, 3, 4, 6, **BATCH), far), (2.0, 3.5), gradcheck=False),
    case(
        "far away, replicate", changed(problem(2, 9, 8, 3, 4, 6, **BATCH), far), (2.0, 3.5), options=REPLICATE, gradcheck=False
    ),
    case("origin outside", problem(2, 9, 8, 3, 4, 6, **BATCH, spread=8.0), (-7.5, 11.25)),
    case("not a number", changed(problem(2, 9, 8, 3, 4, 6, **BATCH), not_a_number), (2.0, 3.5), wrt=()),
    case(
        "no valid cell",
        changed(problem(2, 9, 8, 3, 4, 6, **BATCH, more=("valid",)), nothing_valid),
        (2.0, 3.5),
        more=("valid",),
        options={"normalize": "valid"},
        gradcheck=False,
    ),
    case(  # tiles inside of the map, on its border and outside, and several chunks of them
        "several tiles",
        problem(2, 50, 45, 24, 26, 5 if EMULATED else 40, maps=(), kinds=(2,), lead=(2,), spread=25.0, more=("valid",)),
        (12.0, 23.5),
        more=("valid",),
        gradcheck=False,
        vmap=False,
        rtol=1e-4,
        atol=1e-4,
    ),
    case(  # one template for rows of more poses than a block has, several bands of the map
        "several bands",
        problem(8, 150, 40, 20, 30, 4 if EMULATED else 70, maps=(2,), kinds=(), lead=(2,), spread=30.0),
        (14.5, 19.5),
        options=REPLICATE,
        gradcheck=False,
        vmap=False,
        rtol=1e-4,
        atol=1e-4,
    ),
]

TestOperator = checks(CASES)

MAP, TEMPLATE, POSES, VALID, CONFIDENCE = problem(2, 9, 8, 3, 4, 3, **BATCH, more=("valid", "confidence"))(
    torch.Generator().manual_seed(0)
)
INDEX = torch.tensor([0, 1])


def call(map=MAP, template=TEMPLATE, poses=POSES, valid=VALID, origin=(2, 3), **options):
    return lambda: ops.pose_correlation(map, template, poses, valid, origin=origin, **options)


def raw(*changes, shift=0.0):
    args = [MAP.permute(0, 2, 3, 1), TEMPLATE, VALID, POSES, INDEX, INDEX, 2.0, 3.0, shift, 0]
    for i, value in changes:
        args[i] = value
    return lambda: torch.ops.mdps.pose_correlation(*args)


test_errors = check_errors(
    [
        (call(map=[1.0]), TypeError, "map: expected a tensor, got list"),
        (call(template=TEMPLATE.long()), TypeError, "template: expected dtype float32 or float64, got torch.int64"),
        (call(poses=POSES.float()), TypeError, "poses: expected the dtype of map"),
        (call(template=TEMPLATE.to("meta")), ValueError, "template: expected the device of map, cpu, got meta"),
        (call(map=MAP[0, 0]), ValueError, r"map: expected shape \(..., C, H, W\), none of them 0, got \(9, 8\)"),
        (call(map=MAP[..., :0]), ValueError, "map: expected shape"),
        (call(template=TEMPLATE[:, :1]), ValueError, r"template: expected shape \(..., C, h, w\) with C = 2 as the map has"),
        (call(template=TEMPLATE[..., :0]), ValueError, "and at least one cell, got"),
        (call(poses=POSES[..., :2]), ValueError, r"poses: expected shape \(..., N, 3\), got \(2, 3, 2\)"),
        (call(map=MAP[[0, 0, 0]]), ValueError, r"map: expected leading dimensions that broadcast .* \(2,\), got \(3,\)"),
        (call(template=TEMPLATE[[0, 0, 0]], valid=None), ValueError, "template: expected leading dimensions that broadcast"),
        (call(valid=VALID.long()), TypeError, "valid: expected a tensor of torch.bool, got torch.int64"),
        (call(valid=[True]), TypeError, "valid: expected a tensor of torch.bool, got list"),
        (call(valid=VALID[:, 1:]), ValueError, r"valid: expected shape \(..., h, w\) that goes with the template, \(2, 3, 4\)"),
        (call(valid=VALID.to("meta")), ValueError, "valid: expected the device of template, cpu, got meta"),
        (call(confidence=CONFIDENCE[..., 1:]), ValueError, "confidence: expected shape"),
        (call(confidence=CONFIDENCE.float()), TypeError, "confidence: expected the dtype of map"),
        (call(origin=3.0), TypeError, r"origin: expected two numbers \(x0, y0\), got 3.0"),
        (call(origin=(1, math.nan)), ValueError, "origin: expected numbers of at most 1e6"),
        (call(padding="wrap"), ValueError, "padding: expected one of"),
        (call(normalize=True), ValueError, "normalize: expected one of"),
        (call(map_index=INDEX.int()), TypeError, "map_index: expected an int64 tensor, got torch.int32"),
        (call(map_index=INDEX.to("meta")), ValueError, "map_index: expected the device of poses"),
        (call(template_index=INDEX[:1]), ValueError, r"template_index: expected shape \(...\) of poses = \(2,\), got \(1,\)"),
        (raw((1, TEMPLATE[:, :1])), RuntimeError, "^mdps.pose_correlation: template: expected size 2 in dimension 1, got 1$"),
        (raw((2, VALID[1:])), RuntimeError, "^mdps.pose_correlation: valid: expected size 2 in dimension 0, got 1$"),
        (raw((2, VALID.long())), RuntimeError, "^mdps.pose_correlation: valid: expected dtype bool$"),
        (raw((6, 1e7)), RuntimeError, "^mdps.pose_correlation: map: too large, or the template, or the origin too far"),
        (raw((0, MAP.permute(0, 2, 3, 1)[:, :0])), RuntimeError, "^mdps.pose_correlation: map: expected at least one pixel"),
    ]
    + [
        (call(map_index=INDEX + 1), ValueError, "^map_index: expected 0 to 1, got 2$"),
        (call(template_index=INDEX - 1), ValueError, "^template_index: expected 0 to 1, got -1$"),
    ]
    * (not EMULATED)
)


@pytest.mark.skipif(not EMULATED, reason="the CPU looks at indices")
def test_rows_without_a_map_or_template_are_nan():
    wanted = [MAP.clone().requires_grad_(), TEMPLATE.clone().requires_grad_(), POSES.clone().requires_grad_()]
    for index in ({"map_index": INDEX + 1}, {"template_index": INDEX + 1}, {"map_index": INDEX - 2}):
        out = ops.pose_correlation(*wanted, origin=(2, 3), **index)
        row = (next(iter(index.values())) == 1).nonzero()
        assert (out.isnan().all(-1).sum() == 2 - len(row)) and out.isfinite().all(-1).sum() == len(row)
        grads = torch.autograd.grad(out.sum(), wanted)
        assert grads[0].isfinite().all() and grads[1].isfinite().all()


def quarter_turned(template, valid, origin, quarters):
    """The template as a kernel of odd size around the pose, turned."""
    c, h, w = template.shape
    r = max(origin[0], origin[1], w - 1 - origin[0], h - 1 - origin[1])
    kernel = np.zeros((c, 2 * r + 1, 2 * r + 1))
    kernel[:, r - origin[1] : r - origin[1] + h, r - origin[0] : r - origin[0] + w] = np.where(valid, template, 0)
    return np.rot90(kernel, -quarters, (1, 2)), r  # clockwise as one sees it


@pytest.mark.parametrize("padding", ["zeros", "replicate"])
def test_dense_search(padding):
    """At every pixel and four headings: the score of a search by Fourier transforms."""
    g = torch.Generator().manual_seed(1)
    size, origin = (8, 9) if EMULATED else (40, 33), (3, 6)
    of_map, template = torch.randn(8, *size, generator=g), torch.randn(8, 6, 8, generator=g)
    valid = torch.rand(6, 8, generator=g) < 0.7
    v, u = torch.meshgrid(*(torch.arange(s, dtype=torch.float32) for s in size), indexing="ij")
    for quarters in range(4):
        kernel, r = quarter_turned(template.double().numpy(), valid.numpy(), origin, quarters)
        mode = {"zeros": "constant", "replicate": "edge"}[padding]
        padded = np.pad(of_map.double().numpy(), ((0, 0), (r, r), (r, r)), mode=mode)
        want = torch.from_numpy(
            sum(correlate(m, k, mode="valid", method="fft") for m, k in zip(padded, kernel)) / valid.sum().item()
        )
        poses = torch.stack([u.flatten(), v.flatten(), torch.full((u.numel(),), quarters * math.pi / 2)], -1)
        got = ops.pose_correlation(of_map, template, poses, valid, origin=origin, padding=padding, normalize="valid")
        torch.testing.assert_close(got.view(size).double(), want, rtol=0, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("padding", ["zeros", "replicate"])
@pytest.mark.parametrize("C", [8, 3])
def test_on_the_edge_the_slope_is_the_right_hand_one(padding, C):
    """Whole pixels, heading 0: every cell is on an edge. With `replicate` there is none at and beyond the last pixels."""
    of_map, template, _ = problem(C, 12, 14, 5, 6, 1)(torch.Generator().manual_seed(2))
    poses = torch.tensor([[6.0, 5.0, 0.0], [0.0, 0.0, 0.0], [13.0, 11.0, 0.0], [-3.0, 14.0, 0.0]], dtype=torch.float64)
    poses = poses.requires_grad_()
    (got,) = torch.autograd.grad(ops.pose_correlation(of_map, template, poses, origin=(3, 2), padding=padding).sum(), poses)
    mode = {"zeros": "constant", "replicate": "edge"}[padding]
    around = torch.from_numpy(np.pad(of_map.numpy(), ((0, 0), (20, 20), (20, 20)), mode=mode))
    for n, (u, v, _) in enumerate(poses.tolist()):
        rows, columns = torch.arange(5)[:, None] + int(v) - 2, torch.arange(6) + int(u) - 3
        here = around[:, rows + 20, columns + 20]
        slopes = around[:, rows + 20, columns + 21] - here, around[:, rows + 21, columns + 20] - here
        if padding == "replicate":
            slopes = slopes[0] * ((columns > 0) & (columns < 13)), slopes[1] * ((rows > 0) & (rows < 11))
        want = torch.stack([(template * s).sum() for s in slopes])
        torch.testing.assert_close(got[n, :2], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("padding", ["zeros", "replicate"])
def test_half_pixels_and_quarter_turns(padding):
    """Where no cell is on an edge whatever the rounding of sine and cosine: gradients in float32, to all arguments."""
    of_map, template, poses = (x.float() for x in problem(8, 20, 22, 6, 7, 8, spread=6.0)(torch.Generator().manual_seed(3)))
    poses[:, :2] = poses[:, :2].round() + 0.5
    poses[:, 2] = torch.arange(8) * (math.pi / 2)
    narrow = [x.requires_grad_() for x in (of_map, template, poses)]
    wide = [x.detach().double().requires_grad_() for x in narrow]
    options = {"origin": (3, 2), "padding": padding}
    out, want = ops.pose_correlation(*narrow, **options), by_grid_sample(*wide, **options)
    torch.testing.assert_close(out.double(), want, rtol=2e-5, atol=2e-5)
    for g, w in zip(torch.autograd.grad(out.sum(), narrow), torch.autograd.grad(want.sum(), wide)):
        torch.testing.assert_close(g.double(), w, rtol=2e-5, atol=2e-5 * w.abs().max().item())


def test_as_exact_far_from_the_corner_of_a_large_map():
    of_map, template, poses = problem(2, 30, 3000, 8, 9, 20, spread=3.0)(torch.Generator().manual_seed(4))
    poses[:, 0] += 1490.0
    narrow = [x.float() for x in (of_map, template, poses)]
    want = by_grid_sample(*(x.double() for x in narrow), origin=(4, 4))
    got = ops.pose_correlation(*narrow, origin=(4, 4))
    torch.testing.assert_close(got.double(), want, rtol=0, atol=3e-6 * want.abs().max().item())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bad_pose_affects_its_row_alone(bad, dtype):
    of_map, template, poses = (x.to(dtype) for x in problem(8, 20, 22, 6, 7, 8)(torch.Generator().manual_seed(5)))
    for place in ([2, 0], [2, 1], [2, 2]):
        away, broken = poses.clone(), poses.clone()
        away[2] = torch.tensor([1e6, 1e6, 0.0])
        broken[tuple(place)] = bad
        results = []
        for given in (away, broken):
            wanted = [x.clone().requires_grad_() for x in (of_map, template, given)]
            out = ops.pose_correlation(*wanted, origin=(3, 2))
            results.append((out.detach(), torch.autograd.grad(out, wanted, torch.ones_like(out))))
        (want, grads), (got, broken_grads) = results
        others = torch.arange(8) != 2
        if bad == 3e38 and place[1] == 2:
            assert got.isfinite().all()
            continue
        assert torch.equal(got[others], want[others]) and torch.equal(broken_grads[2][others], grads[2][others])
        assert torch.equal(broken_grads[0], grads[0]) and torch.equal(broken_grads[1], grads[1])
        if bad == 3e38:
            assert got[2] == 0 and (broken_grads[2][2] == 0).all()
        else:
            assert got[2].isnan() and broken_grads[2][2].isnan().all()


def test_what_is_not_valid_has_no_effect():
    wanted = [x.clone() for x in (MAP, TEMPLATE, POSES, CONFIDENCE)]
    poisoned = [x.clone() for x in wanted]
    poisoned[1].masked_fill_(~VALID.unsqueeze(1), math.nan)
    poisoned[3].masked_fill_(~VALID, math.inf)
    results = []
    for of_map, template, poses, confidence in (wanted, poisoned):
        given = [x.requires_grad_() for x in (of_map, template, poses, confidence)]
        out = ops.pose_correlation(of_map, template, poses, VALID, origin=(2, 3), confidence=confidence)
        results.append((out, *torch.autograd.grad(out.sum(), given)))
    for got, want in zip(*results):
        assert torch.equal(got, want)
    assert (results[1][2][(~VALID).unsqueeze(1).expand_as(TEMPLATE)] == 0).all() and (results[1][4][~VALID] == 0).all()


def test_a_cell_without_confidence_has_a_gradient():
    confidence = torch.zeros_like(CONFIDENCE).requires_grad_()
    out = ops.pose_correlation(MAP, TEMPLATE, POSES, origin=(2, 3), confidence=confidence)
    (grad,) = torch.autograd.grad(out.sum(), confidence)
    assert (out == 0).all() and (grad != 0).any()


def test_only_what_is_wanted_is_computed():
    """A frozen map has no gradient and costs nothing; nothing but the arguments is kept."""
    wanted = {(2,): 2, (1,): 2, (0,): 1, (0, 1, 2): 3}
    for with_gradient, number in wanted.items():
        args = [x.clone().requires_grad_(i in with_gradient) for i, x in enumerate((MAP, TEMPLATE, POSES))]
        kept = []
        with RawCalls() as calls, torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            ops.pose_correlation(*args, VALID, origin=(2, 3)).sum().backward()
        (_, given) = next((op, a) for op, a in calls.calls if op._schema.name.endswith("_backward"))
        assert given[-1] == number
        assert [a.grad is not None for a in args] == [i in with_gradient for i in range(3)]
        assert sum(x.numel() for x in kept) == MAP.numel() + TEMPLATE.numel() + VALID.numel() + POSES.numel() + 2 * 2
        shapes = [tuple(o.shape) for o in torch.ops.mdps.pose_correlation_backward(*given)]
        assert (shapes[0] == (0, 0, 0, 0)) == (number == 2) and (shapes[1] == (0, 0, 0, 0)) == (number == 1)


def test_a_map_with_channels_last_is_not_copied():
    of_map = torch.randn(2, 8, 9, 10).contiguous(memory_format=torch.channels_last).requires_grad_()
    seen = []

    class Looks(RawCalls):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "mdps" and not func._schema.name.endswith("_backward"):
                seen.append((args[0].data_ptr(), args[0].is_contiguous()))
            return func(*args, **(kwargs or {}))

    with Looks():
        out = ops.pose_correlation(of_map, torch.randn(2, 8, 3, 4), torch.randn(2, 3, 3), origin=(2, 3))
    assert seen == [(of_map.data_ptr(), True)]
    (grad,) = torch.autograd.grad(out.sum(), of_map)
    assert grad.is_contiguous(memory_format=torch.channels_last)


def test_an_index_does_not_reach_another_mapped_call():
    """What vmap puts in a row behind each other stays each call's own."""
    maps = torch.stack([MAP, MAP + 1])
    for index in (INDEX + 1, INDEX - 1):
        mapped = torch.vmap(lambda m, i: ops.pose_correlation(m, TEMPLATE, POSES, origin=(2, 3), map_index=i))
        if EMULATED:
            wrong = (index < 0) | (index > 1)
            assert mapped(maps, index.expand(2, 2))[:, wrong].isnan().all()
        else:
            with pytest.raises(ValueError, match="^map_index: expected 0 to"):
                mapped(maps, index.expand(2, 2))
            with ops.reference(), pytest.raises(ValueError, match="^map_index: expected 0 to 1, got"):
                ops.pose_correlation(MAP, TEMPLATE, POSES, origin=(2, 3), map_index=index)


def test_views_of_one_map():
    """Two cameras of different headings, in one call, weigh the same particles."""
    particles, offset = POSES[0], torch.tensor([0.0, 0.0, math.pi / 2], dtype=torch.float64)
    views = torch.stack([particles, particles + offset])
    together = ops.pose_correlation(MAP[0], TEMPLATE, views, VALID, origin=(2, 3))
    for i in range(2):
        assert torch.equal(together[i], ops.pose_correlation(MAP[0], TEMPLATE[i], views[i], VALID[i], origin=(2, 3)))


@pytest.mark.parametrize("n, rows, kinds", [(0, 2, 1), (3, 0, 1), (3, 0, 0)])
def test_empty(n, rows, kinds):
    poses = torch.ones(rows, n, 3, dtype=torch.float64)
    wanted = [x.clone().requires_grad_() for x in (MAP[:kinds], TEMPLATE[:kinds], poses)]
    out = ops.pose_correlation(*wanted, origin=(2, 3))
    assert out.shape == (rows, n)
    grads = torch.autograd.grad(out.sum(), wanted)
    assert [g.shape for g in grads] == [x.shape for x in wanted] and all((g == 0).all() for g in grads)
    assert mdps._C.live_handles() == 0


@pytest.mark.skipif(EMULATED, reason="about threads")
@pytest.mark.parametrize("C, n", [(8, 300), (29, 70)])
@pytest.mark.parametrize("padding", ["zeros", "replicate"])
def test_gradients_have_the_same_bits_with_any_number_of_threads(padding, C, n):
    args = [x.float() for x in problem(C, 300, 120, 40, 50, n, spread=60.0, lead=(2,))(torch.Generator().manual_seed(6))]
    threads, results = torch.get_num_threads(), []
    for number in (1, 2, 3, 5):
        torch.set_num_threads(number)
        wanted = [x.clone().requires_grad_() for x in args]
        out = ops.pose_correlation(*wanted, origin=(24.5, 39.5), padding=padding)
        results.append((out, *torch.autograd.grad(out.cos().sum(), wanted)))
    torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0]))
