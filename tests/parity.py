"""Two builds, or two devices, compute the same: every raw call of the case tables, recorded on one and replayed on the other.

    python tests/parity.py record FILE              the CPU's results
    python tests/parity.py check FILE [--device cuda]

Integers (ancestors, seeds) and uniform deviates are equal bit for bit, NaN stands where NaN stood; other numbers agree within
the tolerances of their case, deviates within those below. A row of bandwidths <= 0 gives NaN on a GPU where the CPU may raise:
no case has a call that raises.
"""

import argparse
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from table import RawCalls, _grad
from torch import Tensor

ROOT = Path(__file__).parents[1]
EXACT = {"philox_uniform"}
DRAWS = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Of normal deviates in standard deviations, of angles in radians: both come from the same words."""

FILTER = {torch.float32: 1e-4, torch.float64: 1e-11}
"""Of what a few steps of a filter leave, each of which rounds."""

SAVED = {"mixture_log_prob": (1,), "two_filter_log_prob": (3, 4), "transport_resample": (2, 3)}
"""Outputs that nobody sees: log2_sum also says which pass made it, and the two do not choose alike. Backward takes either. And
numbers of steps, where float32 cannot reach the threshold, with the potentials that these end in."""


class Call(NamedTuple):
    name: str
    args: tuple
    outputs: tuple[Tensor, ...]
    rtol: float
    atol: float
    """Of a gradient: relative to its largest number."""


def operators() -> list[str]:
    """All that are computed by kernels."""
    return sorted(p.stem for p in (ROOT / "ops").glob("*.py") if (ROOT / f"csrc/{p.stem}.c").exists())


def call(name: str, args: tuple) -> tuple[Tensor, ...]:
    out = getattr(torch.ops.mdps, name).default(*args)
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _raw_calls(case, dtype):
    args = _grad(case.make(dtype), case.wrt)
    with RawCalls() as raw:
        out = case.run(*args)
        if case.wrt:
            case.loss(out).backward()
    for op, op_args in raw.calls:
        is_double, is_gradient = dtype == torch.float64, op._schema.name.endswith("_backward")
        tolerance = (case.grad_rtol, case.grad_atol) if is_gradient else (case.rtol, case.atol)
        if is_double:
            tolerance = (1e-8, 1e-10) if is_gradient else (case.rtol64, case.rtol64)
        yield op._schema.name.partition("::")[2], op_args, tolerance


def _key(name, args):
    """Equal for calls that are the same bit for bit."""
    return name, *((a.dtype, a.shape, a.contiguous().numpy().tobytes()) if isinstance(a, Tensor) else repr(a) for a in args)


def collect(names: Iterable[str] | None = None) -> list[Call]:
    """The calls that the cases of these operators (None: of all) make, each once, with what the CPU computes."""
    calls = {}
    for operator in operators() if names is None else names:
        for case in importlib.import_module(f"test_{operator}").CASES:
            for dtype in (torch.float32, torch.float64):
                for name, args, tolerance in _raw_calls(case, dtype):
                    key = _key(name, args)
                    if key not in calls:
                        calls[key] = Call(name, args, call(name, args), *tolerance)
    return list(calls.values())


def replay(calls: Iterable[Call], device: str = "cpu") -> list[tuple[Tensor, ...]]:
    """What this build computes from the same arguments on the device, brought to the CPU; () where a call raises, after its
    message is printed."""

    def run(c):
        try:
            return tuple(o.cpu() for o in call(c.name, tuple(a.to(device) if isinstance(a, Tensor) else a for a in c.args)))
        except RuntimeError as error:
            print(f"{c.name}: {error}")
            return ()

    return [run(c) for c in calls]


def _bound(c: Call, want: Tensor) -> Tensor:
    """How far an output may be from what was recorded, element by element."""
    size = torch.where(want.isfinite(), want.abs(), 0.0)
    if c.name == "mixture_resample":  # mean + bandwidth * deviate
        bandwidths = c.args[2] if c.args[2].dim() == 1 else c.args[2][:, None]
        return DRAWS[want.dtype] * (size + bandwidths.abs().nan_to_num(posinf=0.0))
    if c.name.startswith("philox_"):
        return DRAWS[want.dtype] * (1 + size)
    if c.name.startswith("filter_poses"):  # all steps of a filter, from the same words
        scale = max(size.max().item(), 1e-2) if want.numel() else 1.0
        return FILTER[want.dtype] * (scale if c.name.endswith("_backward") else 1 + size)
    scale = max(size.max().item(), 1e-3) if c.name.endswith("_backward") and want.numel() else 1.0
    return c.atol * scale + c.rtol * size


def _distance(c: Call, got: Tensor, want: Tensor) -> Tensor:
    """Of numbers; around the circle where they are angles."""
    distance = (got - want).abs()
    if c.name == "philox_von_mises":
        return torch.minimum(distance, 2 * torch.pi - distance)
    places = {"mixture_resample": 5, "transport_resample": 6}
    if c.name == "move_poses" or (c.name == "filter_poses" and want.dim() == 4) or (c.name in places and want.dim() == 3):
        dims, n_angular = want.shape[-1], c.args[places[c.name]] if c.name in places else 1
        return torch.where(torch.arange(dims) < dims - n_angular, distance, torch.minimum(distance, 2 * torch.pi - distance))
    return distance


def _error(c: Call, got: Tensor, want: Tensor) -> float:
    if got.dtype != want.dtype or got.shape != want.shape:
        return torch.inf
    same = (got == want) | (got.isnan() & want.isnan())
    if same.all():
        return 0.0
    if not want.is_floating_point() or c.name in EXACT or (~same & ~(got.isfinite() & want.isfinite())).any():
        return torch.inf
    return torch.where(same, 0.0, _distance(c, got, want) / _bound(c, want)).max().item()


def _seen(c: Call, got: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    return [x for i, x in enumerate(zip(got, c.outputs, strict=True)) if i not in SAVED.get(c.name, ())]


def compare(calls: Iterable[Call], results: Iterable[tuple[Tensor, ...]]) -> dict[str, tuple[int, float]]:
    """For each operator how many calls it has, and their largest error in units of its bound (infinite where something
    that must be equal is not)."""
    report: dict[str, tuple[int, float]] = {}
    for c, got in zip(calls, results, strict=True):
        errors = [_error(c, g, w) for g, w in _seen(c, got)] if got else [torch.inf]
        n, largest = report.get(c.name, (0, 0.0))
        report[c.name] = n + 1, max(largest, *errors)
    return report


def main() -> bool:
    """Whether everything is within its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cpu", help="where check computes")
    options = parser.parse_args()
    if options.what == "record":
        calls = collect()
        torch.save([tuple(c) for c in calls], options.file)
        print(f"{len(calls)} calls of {len({c.name for c in calls})} operators")
        return True
    calls = [Call(*c) for c in torch.load(options.file)]
    report = compare(calls, replay(calls, options.device))
    for name, (n, error) in sorted(report.items()):
        print(f"{name:32} {n:4} calls, largest error {error:8.2g} of its bound{'' if error <= 1 else '  WRONG'}")
    return all(error <= 1 for _, error in report.values())


if __name__ == "__main__":
    sys.exit(not main())
