"""One table of cases drives every check of an operator.

A test file lists its cases and takes the checks: `TestOperator = checks(CASES)`. A new case adds a row to all of them:
values and gradients against a float64 oracle, reference, gradcheck, opcheck, compile, export, vmap, grad, refusals, memory
layouts, half types, threads, leaked handles.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mdps
from mdps import ops

EMULATED = mdps.build_info()["emulated"]  # the CUDA kernels run in place of the CPU's


@dataclass(frozen=True)
class Case:
    name: str
    function: Callable[..., Any]
    args: Callable[[torch.Generator], tuple[Tensor, ...]]
    """Makes the tensor arguments, real ones in float64; the checks cast them."""
    oracle: Callable[..., Any] | None
    """The same in float64 by brute force, differentiable by torch, not our code path; same arguments as function."""
    options: dict[str, Any] = field(default_factory=dict)
    wrt: tuple[int, ...] = ()
    """Arguments that have gradients; () for none."""
    outputs: tuple[int, ...] | None = None
    """Outputs that are compared and differentiated; None for all."""
    gradcheck: bool = True
    """Whether finite differences make sense here (not beside -inf or 1e6 bandwidths away)."""
    vmap: bool = True
    rtol: float = 2e-5
    atol: float = 2e-5
    """Tolerances in float32; float64 has 1e-10 of both, or `rtol64`."""
    grad_rtol: float = 1e-4
    grad_atol: float = 1e-4
    rtol64: float = 1e-10

    def make(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
        args = self.args(torch.Generator().manual_seed(0))
        # Rounded to float32 first, so that the oracle in float64 sees the very numbers that a float32 operator sees.
        return tuple(a.float().to(dtype) if a.is_floating_point() else a for a in args)

    def run(self, *args: Tensor) -> tuple[Tensor, ...]:
        return self._select(self.function(*args, **self.options))

    def expect(self, *args: Tensor) -> tuple[Tensor, ...]:
        return self._select(self.oracle(*args, **self.options))

    def _select(self, out: Any) -> tuple[Tensor, ...]:
        out = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        return out if self.outputs is None else tuple(out[i] for i in self.outputs)

    def loss(self, out: tuple[Tensor, ...]) -> Tensor:
        """A sum with fixed weights of both signs over every finite output."""
        total = 0.0
        for o in out:
            if o.is_floating_point():
                w = torch.arange(o.numel(), dtype=torch.float64).add(1).mul(1.7).cos().reshape(o.shape).to(o.dtype)
                total = total + torch.where(o.isfinite(), o * w, 0.0).sum()
        return total


class RawCalls(TorchDispatchMode):
    """Collects the calls of torch.ops.mdps.* that happen inside."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mdps":
            self.calls.append((func, tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)))
        return func(*args, **(kwargs or {}))


def _grad(args, indices):
    return tuple(a.detach().clone().requires_grad_() if i in indices else a for i, a in enumerate(args))


def _gradients(case, f, args):
    args = _grad(args, case.wrt)
    return torch.autograd.grad(case.loss(f(*args)), [args[i] for i in case.wrt], allow_unused=True, materialize_grads=True)


def checks(cases: list[Case]) -> type:
    """The class of checks over these cases. What needs seconds (compile, export) runs on the first case alone."""
    each = pytest.mark.parametrize("case", cases, ids=lambda c: c.name)
    differentiable = pytest.mark.parametrize(
        "case", [c for c in cases if c.wrt] or [None], ids=lambda c: c.name if c else "none"
    )
    first = pytest.mark.parametrize("case", cases[:1], ids=lambda c: c.name)

    class TestOperator:
        @each
        @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
        def test_values_against_oracle(self, case, dtype):
            got, want = case.run(*case.make(dtype)), case.expect(*case.make())
            tolerance = (
                {"rtol": case.rtol, "atol": case.atol} if dtype == torch.float32 else {"rtol": case.rtol64, "atol": case.rtol64}
            )
            for g, w in zip(got, want, strict=True):
                assert not g.is_floating_point() or g.dtype == dtype
                exact = {} if g.is_floating_point() else {"rtol": 0, "atol": 0}  # indices
                torch.testing.assert_close(g.to(w.dtype), w, equal_nan=True, **tolerance | exact)

        @differentiable
        @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
        def test_gradients_against_oracle(self, case, dtype):
            if case is None:
                pytest.skip("no gradients")
            got, want = _gradients(case, case.run, case.make(dtype)), _gradients(case, case.expect, case.make())
            for g, w in zip(got, want, strict=True):
                scale = w[w.isfinite()].abs().max().item() if w.isfinite().any() else 0.0
                tolerance = (
                    {"rtol": case.grad_rtol, "atol": case.grad_atol * max(scale, 1e-3)}
                    if dtype == torch.float32
                    else {"rtol": 1e-8, "atol": 1e-10 * max(scale, 1e-3)}
                )
                torch.testing.assert_close(g.double(), w, equal_nan=True, **tolerance)

        @each
        def test_reference(self, case):
            args = case.make()
            with ops.reference(), RawCalls() as raw:
                want = case.run(*args)
                want_gradients = _gradients(case, case.run, args) if case.wrt else ()
            assert not raw.calls
            for g, w in zip(case.run(*args), want, strict=True):
                torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9, equal_nan=True)
            for g, w in zip(_gradients(case, case.run, args) if case.wrt else (), want_gradients, strict=True):
                torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-8, equal_nan=True)

        @differentiable
        def test_gradcheck(self, case):
            if case is None or not case.gradcheck:
                pytest.skip("no finite differences")
            torch.autograd.gradcheck(case.run, _grad(case.make(), case.wrt), atol=1e-6, rtol=1e-5)

        @each
        def test_opcheck(self, case):
            with RawCalls() as raw:
                args = _grad(case.make(torch.float32), case.wrt)
                out = case.run(*args)
                if case.wrt:
                    case.loss(out).backward()
            assert raw.calls
            if any(o.isnan().any() for o in out):
                pytest.skip("opcheck compares without equal_nan")
            for op, op_args in raw.calls:
                torch.library.opcheck(op, op_args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))

        @first
        @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
        def test_compile(self, case, backend):
            torch._dynamo.reset()
            f = torch.compile(case.run, fullgraph=True, backend=backend)
            args = case.make()
            for g, w in zip(f(*args), case.run(*args), strict=True):
                torch.testing.assert_close(g, w, equal_nan=True)
            if case.wrt:
                torch.testing.assert_close(_gradients(case, f, args), _gradients(case, case.run, args), equal_nan=True)

        @first
        @pytest.mark.parametrize("strict", [False, True])
        def test_export(self, case, strict):
            class Model(torch.nn.Module):
                def forward(self, *args):
                    return case.run(*args)

            args = case.make()
            program = torch.export.export(Model(), args, strict=strict)
            assert any("mdps" in str(n.target) for n in program.graph.nodes)
            for g, w in zip(program.module()(*args), case.run(*args), strict=True):
                torch.testing.assert_close(g, w, equal_nan=True)

        @each
        def test_vmap(self, case):
            if not case.vmap:
                pytest.skip("not mapped")
            args = case.make()
            mapped = tuple(torch.stack([a, a.flip(0) if a.dim() > 1 and a.is_floating_point() else a]) for a in args)
            got = torch.vmap(case.run)(*mapped)
            for i in range(2):
                for g, w in zip(got, case.run(*(m[i] for m in mapped)), strict=True):
                    torch.testing.assert_close(g[i], w, rtol=0, atol=0, equal_nan=True)
            if len(args) == 1:
                return
            last_shared = torch.vmap(case.run, (0,) * (len(args) - 1) + (None,))(*mapped[:-1], args[-1])
            for g, w in zip(last_shared, case.run(*(m[1] for m in mapped[:-1]), args[-1]), strict=True):
                torch.testing.assert_close(g[1], w, rtol=0, atol=0, equal_nan=True)

        @differentiable
        def test_func_grad(self, case):
            if case is None or not case.vmap:
                pytest.skip("no gradients")
            args = case.make()
            f = torch.func.grad(lambda *a: case.loss(case.run(*a)), case.wrt)
            want = _gradients(case, case.run, args)
            torch.testing.assert_close(f(*args), want, equal_nan=True)
            stacked = tuple(torch.stack([a, a]) for a in args)
            for g, w in zip(torch.vmap(f)(*stacked), want, strict=True):
                torch.testing.assert_close(g[1], w, equal_nan=True)

        @differentiable
        def test_what_is_refused(self, case):
            if case is None:
                pytest.skip("no gradients")
            args = _grad(case.make(), case.wrt)
            g = torch.autograd.grad(case.loss(case.run(*args)), args[case.wrt[0]], create_graph=True)[0]
            with pytest.raises((NotImplementedError, RuntimeError), match="no derivative|does not require grad"):
                g.sum().backward()
            i = case.wrt[0]
            with pytest.raises(NotImplementedError):
                torch.func.jvp(lambda a: case.run(*args[:i], a, *args[i + 1 :]), (args[i].detach(),), (args[i].detach(),))

        @each
        def test_memory_layouts(self, case):
            args = case.make(torch.float32)
            strided = tuple(a.mT.contiguous().mT if a.dim() > 1 else torch.stack([a, a], -1)[..., 0] for a in args)
            for g, w in zip(case.run(*strided), case.run(*args), strict=True):
                torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)

        @first
        @pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
        def test_half_types_are_computed_in_float32(self, case, half):
            args = tuple(a.to(half) if a.is_floating_point() else a for a in case.make())
            wide = tuple(a.float() if a.is_floating_point() else a for a in args)
            for g, w in zip(case.run(*args), case.run(*wide), strict=True):
                torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)
            if case.wrt:
                for i, g in zip(case.wrt, _gradients(case, case.run, args), strict=True):
                    assert g.dtype == half == args[i].dtype

        @each
        def test_threads_do_not_change_bits(self, case):
            args, threads, results = case.make(torch.float32), torch.get_num_threads(), []
            for n in (1, 2, 3):
                torch.set_num_threads(n)
                results.append(case.run(*args) + (_gradients(case, case.run, args) if case.wrt else ()))
            torch.set_num_threads(threads)
            for r in results[1:]:
                for g, w in zip(r, results[0], strict=True):
                    torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)

        @each
        def test_no_handle_is_left(self, case):
            case.run(*case.make(torch.float32))
            assert mdps._C.live_handles() == 0
            if case.wrt:
                _gradients(case, case.run, case.make(torch.float32))
                assert mdps._C.live_handles() == 0

    return TestOperator


def check_errors(rows):
    """Parametrises (call, exception, words of the message) rows; no call may leak a handle."""

    @pytest.mark.parametrize("call, error, words", rows)
    def test_errors(call, error, words):
        with pytest.raises(error, match=words):
            call()
        assert mdps._C.live_handles() == 0

    return test_errors
