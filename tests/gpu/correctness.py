"""Stages that ask whether results are right, and the same every time."""

import importlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import parity
import torch
from table import RawCalls
from torch import Tensor

from gpu.device import Row, Run, attempt
from gpu.problems import mixture_problem, problems
from mdps import ops

RUNS = 20
WRONG = 1e30
"""The error of what has to be equal and is not."""
ROWS_BOUND = 16
"""Most memory of mixture_log_prob with its gradients, in rows of D numbers for each of the M queries and N components."""


def same_as_cpu(run: Run) -> Iterator[Row]:
    """Every raw call of the case tables, on the CPU and on the device (tests/parity.py has the bounds)."""
    for operator in parity.operators():
        replayed: dict[str, list[tuple[float, str]]] = {}
        for call in parity.collect([operator]):
            replayed.setdefault(call.name, []).append(_replay(call, run.device))
        for name, results in replayed.items():
            error, about = max(results)
            yield {"name": name, "ok": error <= 1, "calls": len(results), "error": error, "worst": about}


def _replay(call: parity.Call, device: str) -> tuple[float, str]:
    """The call's error in units of its bound, and what it was called with."""
    about = ", ".join(f"{str(a.dtype)[6:]} {tuple(a.shape)}" if isinstance(a, Tensor) else str(a) for a in call.args)
    try:
        ((_, error),) = parity.compare([call], parity.replay([call], device)).values()
    except Exception as wrong:
        return WRONG, f"{about}: {type(wrong).__name__}: {wrong}"[:600]
    return min(error, WRONG), about


def derivatives(stem: str) -> Callable[[Run], Iterator[Row]]:
    """gradcheck and opcheck of an operator's whole case table, on the device."""

    def stage(run: Run) -> Iterator[Row]:
        for case in importlib.import_module(f"test_{stem}").CASES:
            if case.wrt and case.gradcheck:
                yield attempt(f"{case.name}: gradcheck", lambda: _gradcheck(case, run.device))
            yield attempt(f"{case.name}: opcheck", lambda: _opcheck(case, run.device))

    return stage


def _arguments(case, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    args = (a.to(device) for a in case.make(dtype))
    return tuple(a.requires_grad_() if i in case.wrt else a for i, a in enumerate(args))


def _gradcheck(case, device: str) -> None:
    torch.autograd.gradcheck(case.run, _arguments(case, torch.float64, device), atol=1e-6, rtol=1e-5)


def _opcheck(case, device: str) -> Row | None:
    with RawCalls() as raw:
        out = case.run(*_arguments(case, torch.float32, device))
        if case.wrt:
            case.loss(tuple(o.cpu() for o in out)).backward()
    if any(o.isnan().any() for o in out):
        return {"ok": None, "note": "results have NaN, which opcheck takes for different"}
    for op, args in raw.calls:
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))
    return None


def same_bits(run: Run) -> Iterator[Row]:
    """Every operator, forward and backward, 20 times on the same arguments, by turns on two streams."""
    sizes = [(32, 50), (3, 1001), (1, 50_000)] if run.on_gpu else [(3, 33)]
    for B, N in sizes:
        for problem in problems(B, N, run.device):
            for way, call in problem.raw_calls().items():
                yield attempt(f"{problem.name}, {way}, {B} x {N}", lambda: _repeat(call, run))


def _repeat(call: Callable[[], object], run: Run) -> Row:
    first = _bits(call())
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()] if run.on_gpu else [None]
    other = 0
    for i in range(RUNS - 1):
        run.wait()
        with torch.cuda.stream(streams[i % len(streams)]):
            other += any(not torch.equal(a, b) for a, b in zip(_bits(call()), first, strict=True))
    run.wait()
    return {"ok": other == 0, "runs": RUNS, "other": other}


def _bits(out: object) -> list[Tensor]:
    """As integers, so that NaN equals NaN."""
    tensors = out if isinstance(out, tuple) else (out,)
    integer = {4: torch.int32, 8: torch.int64}
    return [t.view(integer[t.element_size()]) for t in tensors if t is not None]


def memory(run: Run) -> Iterator[Row]:
    """Peak memory of mixture_log_prob with all gradients: O(M + N), with a bound, and about twice for twice the size."""
    if not run.on_gpu:
        yield {"name": "mixture_log_prob", "ok": None, "note": "on a GPU alone"}
        return
    peaks = {N: _peak(N, run) for N in (50_000, 100_000)}
    rows = peaks[100_000] / (2 * 100_000 * 3 * 4)
    yield {
        "name": "mixture_log_prob with gradients, M = N = 100,000",
        "ok": rows <= ROWS_BOUND,
        "MB": peaks[100_000] / 1e6,
        "rows": rows,
        "target": ROWS_BOUND,
    }
    growth = peaks[100_000] / peaks[50_000]
    yield {"name": "growth from M = N = 50,000 to 100,000", "ok": growth <= 2.5, "value": growth, "target": 2.5}


def _peak(N: int, run: Run) -> int:
    wanted = [a.requires_grad_() for a in mixture_problem(N, run.device)]
    run.wait()
    before = torch.cuda.memory_allocated() - sum(a.untyped_storage().nbytes() for a in wanted)
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(ops.mixture_log_prob(*wanted, n_angular=1).sum(), wanted)
    run.wait()
    return torch.cuda.max_memory_allocated() - before


def errors(run: Run) -> Iterator[Row]:
    """What must be refused is refused, what is empty is done, and the device works after each."""
    other = "cpu" if run.on_gpu else "meta"
    logs, means, bandwidths = (f(2, 5).to(run.device) for f in (torch.randn, torch.randn, torch.rand))
    means, bandwidths = means[..., None], bandwidths[0, :1] + 0.5
    seed, seed_elsewhere = torch.tensor(3, device=run.device), torch.tensor(3, device=other)
    refused = {
        "components elsewhere": lambda: ops.mixture_log_prob(means, means.to(other), logs, bandwidths),
        "queries elsewhere": lambda: ops.mixture_log_prob(means.to(other), means, logs, bandwidths),
        "bandwidths elsewhere": lambda: ops.mixture_log_prob(means, means, logs, bandwidths.to(other)),
        "resample's seed elsewhere": lambda: ops.resample(logs, seed_elsewhere),
        "mixture_resample's seed elsewhere": lambda: ops.mixture_resample(means, logs, bandwidths, seed_elsewhere),
        "von Mises seed elsewhere": lambda: ops.philox_von_mises(seed_elsewhere, logs.exp()),
        "more memory than there is": lambda: ops.philox_uniform(seed, (1, 2**50)),
    }
    if run.on_gpu:
        raw = torch.ops.mdps.mixture_log_prob
        refused["operator alone, components elsewhere"] = lambda: raw(means, means.cpu(), logs, bandwidths, 0)
        refused["operator alone, queries elsewhere"] = lambda: raw(means.cpu(), means, logs, bandwidths, 0)
    for name, call in refused.items():
        yield attempt(name, lambda: _refused(call, run))
    for problem in problems(0, 7, run.device):
        yield attempt(f"{problem.name}, no rows", lambda: _empty(problem, run))
    yield attempt("no queries", lambda: _no_queries(means, logs, bandwidths, run))
    if run.on_gpu:
        yield attempt("more rows than a launch has blocks", lambda: _many_rows(run))


def _refused(call: Callable[[], object], run: Run) -> Row:
    try:
        call()
        run.wait()
    except (ValueError, TypeError, RuntimeError) as error:
        _works(run)
        return {"message": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:200]}
    raise AssertionError("it was not refused")


def _empty(problem, run: Run) -> None:
    """Results without rows are empty; gradients of what rows share are 0."""
    for way, call in problem.raw_calls().items():
        _spoil(run)
        out = call()
        for o in out if isinstance(out, tuple) else (out,):
            assert o.numel() == 0 or (way == "backward" and (o == 0).all()), (way, o)
    _works(run)


def _spoil(run: Run) -> None:
    """NaN in memory that the next results may get."""
    for n in (1 << 6, 1 << 10, 1 << 16):
        torch.full((n,), math.nan, device=run.device)


def _no_queries(means: Tensor, logs: Tensor, bandwidths: Tensor, run: Run) -> None:
    wanted = [a.clone().requires_grad_() for a in (means[:, :0], means, logs, bandwidths)]
    out = ops.mixture_log_prob(*wanted)
    assert out.shape == (2, 0)
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), wanted))
    _works(run)


def _many_rows(run: Run) -> Row | None:
    """2^31 rows of one weight: refused, or right."""
    if torch.cuda.mem_get_info()[0] < 50e9:
        return {"ok": None, "note": "needs 50 GB of free memory"}
    try:
        out = ops.normalize_log_weights(torch.zeros(1, 1, device=run.device).expand(2**31, 1))
        assert (out.log_weights == 0).all() and (out.ess == 1).all()
        del out
        message = "not refused, and right"
    except RuntimeError as error:
        message = str(error).splitlines()[0][:200]
        assert "too large" in message or "more than 2^31" in message, message
    torch.cuda.empty_cache()
    _works(run)
    return {"message": message}


def _works(run: Run) -> None:
    """An operator has the right result, so no error of before is left on the device."""
    run.wait()
    got = ops.normalize_log_weights(torch.arange(4.0, device=run.device))
    torch.testing.assert_close(got.log_weights.cpu(), torch.arange(4.0).log_softmax(0))
    torch.testing.assert_close(got.log_sum.cpu().item(), math.log(sum(math.exp(i) for i in range(4))))


def small(run: Run) -> Iterator[Row]:
    """Every operator once on small sizes: what runs under compute-sanitizer."""
    for B, N, dtype in ((3, 33, torch.float32), (1, 2500, torch.float32), (2, 70, torch.float64)):
        for problem in problems(B, N, run.device, dtype):
            for way, call in problem.raw_calls().items():
                yield attempt(f"{problem.name}, {way}, {B} x {N}, {dtype}", lambda: _finish(call, run))


def _finish(call: Callable[[], object], run: Run) -> None:
    call()
    run.wait()


def sanitizer(tool: str) -> Callable[[Run], Iterator[Row]]:
    """compute-sanitizer over `small`. Without torch's cache every tensor has its own allocation, with bounds to check."""

    def stage(run: Run) -> Iterator[Row]:
        program = find_sanitizer()
        if program is None or not run.on_gpu:
            yield {"name": tool, "ok": None, "note": "not available"}
            return
        with tempfile.TemporaryDirectory() as folder:
            options = ["--tool", tool, "--error-exitcode", "99", "--print-limit", "10", "--log-file", f"{folder}/log"]
            options += ["--report-api-errors", "no"] if tool == "memcheck" else []
            check = [sys.executable, str(Path(__file__).with_name("check.py")), "--stage", "small", "--part", f"{folder}/part"]
            environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            try:
                done = subprocess.run(
                    [program, *options, *check], env=environment, capture_output=True, text=True, timeout=run.left()
                )
            except subprocess.TimeoutExpired as late:
                output = (late.stdout or b"").decode(errors="replace")[-2000:]
                yield {"name": tool, "ok": False, "error": f"stopped after {late.timeout:.0f} s", "output": output}
                return
            log = Path(folder, "log").read_text() if Path(folder, "log").exists() else ""
        yield verdict(tool, done.returncode, log, done.stdout + done.stderr)

    return stage


def verdict(tool: str, status: int, log: str, output: str) -> Row:
    """The row of a sanitizer's run: its exit status is 99 where it found something, the program's own otherwise."""
    if "not supported" in log + output and status != 0:
        reason = next(line for line in (log + output).splitlines() if "not supported" in line)
        return {"name": tool, "ok": None, "note": f"not available on this device: {reason.strip()[:300]}"}
    row: Row = {"name": tool, "ok": status == 0, "summary": (log.strip().splitlines() or [""])[-1]}
    return row if status == 0 else {**row, "status": status, "log": log[:4000], "output": output[-2000:]}


def find_sanitizer() -> str | None:
    """compute-sanitizer on PATH, or beside nvcc."""
    nvcc = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve().parent
    places = [nvcc, nvcc.parent / "compute-sanitizer", Path("/usr/local/cuda/bin"), Path("/usr/local/cuda/compute-sanitizer")]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(map(str, places)))
