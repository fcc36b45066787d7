"""Stages that measure, with the bars that they are held to."""

import importlib.util
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench.mixture_log_prob import clamped_form
from torch import Tensor

from gpu.device import Row, Run, attempt, call_seconds, device_seconds, offer
from gpu.problems import Problem, mixture_problem, problems
from mdps import ops

OPERATOR_TARGET_US = 8.0
"""Most device time of any operator, forward and backward, at the paper's size."""
NOT_ASKED = {"transport_resample", "find_modes", "pose_correlation"}
"""Of these it is not asked: two take as many passes as convergence does, one has many cells a pose and several launches."""
PAPER_SIZE = (32, 50)
PAIRS_TARGET = 0.75
"""Least share of the issue limit that mixture_log_prob reaches forward, broad or not, from 1e5 queries and components on."""
INSTRUCTIONS = {"forward": 9.33, "broad": 8.31, "backward": 29.7}
"""Machine instructions a pair of two linear dimensions and an angle: the fewest known, counted in code for sm_90. broad:
forward with headings whose concentration is at most 16, where one instruction less is exact enough."""
LANES = 128
"""Instructions (of 32 lanes each, 4 a clock) that an SM issues a clock, in lanes."""
SIZES = [PAPER_SIZE, (32, 1000), (1, 100_000), (1, 1_000_000)]
PAIR_SIZES = [1000, 3000, 10_000, 30_000, 100_000, 300_000]
MOST_SECONDS = 2.0
"""Calls that would take longer are not made."""
MOST_PAIRS_IN_TORCH = 1.1e8
"""In plain PyTorch a pair needs memory."""


def pairs_limit(way: str, sms: int, clock_mhz: float) -> float:
    """The pairs a second whose instructions the card can issue."""
    return sms * clock_mhz * 1e6 * LANES / INSTRUCTIONS[way]


def sizes_of(run: Run) -> list[tuple[int, int]]:
    return SIZES if run.on_gpu else [(2, 16)]


def operators(run: Run) -> Iterator[Row]:
    """Every operator at every size: device time forward and backward, and what a call from Python costs."""
    seconds_a_pair: dict[str, float] = {}
    for B, N in sizes_of(run):
        for problem in problems(B, N, run.device):
            expected = problem.pairs * seconds_a_pair.get(problem.name, 0.0)
            row = attempt(problem.name, lambda: _operator(problem, B, N, run, expected))
            if problem.pairs and "forward_us" in row:
                seconds_a_pair[problem.name] = 1e-6 * (row["forward_us"] + row.get("backward_us", 0.0)) / problem.pairs
            yield row


def _operator(problem: Problem, B: int, N: int, run: Run, expected: float) -> Row:
    row: Row = {"ok": None, "B": B, "N": N}
    if expected > MOST_SECONDS or run.left() < 5 + 10 * expected:
        return {**row, "note": "would take too long"}
    for way, call in problem.raw_calls().items():
        row[f"{way}_us"] = 1e6 * device_seconds(call, run)
    row["call_us"] = 1e6 * call_seconds(problem.forward, run)
    if problem.wrt:
        row["both_us"] = 1e6 * call_seconds(problem.both, run)
    if (B, N) == PAPER_SIZE and run.on_gpu and problem.name not in NOT_ASKED:
        row["target_us"] = OPERATOR_TARGET_US
        row["ok"] = max(row["forward_us"], row.get("backward_us", 0)) <= OPERATOR_TARGET_US
    return row


def torch_eager(run: Run) -> Iterator[Row]:
    """The same operators by their references in plain PyTorch, where memory allows."""
    for B, N in [*sizes_of(run), *([(1, 10_000)] if run.on_gpu else [])]:
        for problem in problems(B, N, run.device):
            if problem.name == "find_modes":
                continue  # its reference searches a row at a time, by thousands of calls
            if problem.pairs <= 2 * MOST_PAIRS_IN_TORCH and (N != 10_000 or problem.name == "mixture_log_prob"):
                yield offer(problem.name, lambda: _reference(problem, B, N, run))


def _reference(problem: Problem, B: int, N: int, run: Run) -> Row:
    row: Row = {"ok": None, "B": B, "N": N}
    if run.left() < 5:
        return {**row, "note": "no time was left"}
    with ops.reference():
        row["call_us"] = 1e6 * call_seconds(problem.forward, run)
        if problem.wrt:
            row["both_us"] = 1e6 * call_seconds(problem.both, run)
    return row


def pairs(run: Run) -> Iterator[Row]:
    """mixture_log_prob of one row with N queries and N components, against the most pairs that the SMs can issue."""
    slowest = 0.0
    for N in PAIR_SIZES if run.on_gpu else [100]:
        if slowest * 10 > MOST_SECONDS or run.left() < 10:
            yield {"name": "pairs", "ok": None, "N": N, "note": "would take too long"}
            continue
        row = attempt("pairs", lambda: _pairs(N, run))
        slowest = row.get("backward_ms", slowest * 1e3) / 1e3
        yield row


def _pairs(N: int, run: Run) -> Row:
    args, broad = mixture_problem(N, run.device), mixture_problem(N, run.device, heading=0.3)
    log2_sum = torch.ops.mdps.mixture_log_prob(*args, 1)[1]
    grad = torch.ones_like(log2_sum)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: torch.ops.mdps.mixture_log_prob(*args, 1),
        "broad": lambda: torch.ops.mdps.mixture_log_prob(*broad, 1),
        "backward": lambda: torch.ops.mdps.mixture_log_prob_backward(grad, *args, log2_sum, 1),
    }
    row: Row = {"ok": None, "N": N}
    face = Problem("pairs", lambda *a: ops.mixture_log_prob(*a, n_angular=1), args, (0, 1, 2, 3))
    row |= {"call_us": 1e6 * call_seconds(face.forward, run), "both_us": 1e6 * call_seconds(face.both, run)}
    for way, call in calls.items():
        seconds = device_seconds(call, run, 0.1)
        row[f"{way}_ms"], row[f"{way}_pairs_per_s"] = 1e3 * seconds, N * N / seconds
        if not run.on_gpu:
            continue
        clock = (seconds > 1e-3 and clock_under_load(call, seconds, run)) or run.card["clock_mhz_most"]
        row[f"{way}_clock_mhz"] = clock
        row[f"{way}_share"] = N * N / seconds / pairs_limit(way, run.card["sms"], clock)
    if run.on_gpu and N >= 100_000:
        row |= {"target": PAIRS_TARGET, "ok": min(row["forward_share"], row["broad_share"]) >= PAIRS_TARGET}
    return row


def clock_under_load(call: Callable[[], Any], seconds: float, run: Run) -> float | None:
    """SM clock in MHz while the device does nothing but this call: the median of nvidia-smi's readings."""
    command = ["nvidia-smi", "-i", run.card["uuid"], "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    batch, end = max(1, int(0.02 / seconds)), time.monotonic() + 3
    readings: list[float] = []
    while len(readings) < 4 and time.monotonic() < end:
        try:
            reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError:
            return None
        while reader.poll() is None and time.monotonic() < end + 3:
            for _ in range(batch):
                call()
            torch.cuda.synchronize()
        reader.kill()
        text = reader.communicate()[0].strip()
        readings += [float(text)] if text.isdigit() else []
    return statistics.median(readings[1:]) if len(readings) > 1 else None


def compiled(run: Run) -> Iterator[Row]:
    """torch.compile of mixture_log_prob as one writes it in torch, exponents clamped."""
    for B, N in [PAPER_SIZE, (32, 1000), (1, 10_000)] if run.on_gpu else [(2, 16)]:
        yield offer("compiled", lambda: _compiled(B, N, run))


def _compiled(B: int, N: int, run: Run) -> Row:
    row: Row = {"ok": None, "B": B, "N": N}
    if run.left() < 20:
        return {**row, "note": "no time was left"}
    torch._dynamo.reset()
    args = tuple(a.expand(B, *a.shape[1:]).contiguous() if a.dim() > 1 else a for a in mixture_problem(N, run.device))
    f = torch.compile(clamped_form, dynamic=False)
    with torch.no_grad():
        row["call_us"] = 1e6 * call_seconds(lambda: f(*args), run)
    row["both_us"] = 1e6 * call_seconds(Problem("compiled", f, args, (0, 1, 2, 3)).both, run)
    return row


def keops(run: Run) -> Iterator[Row]:
    """The same in KeOps, where it is installed."""
    if importlib.util.find_spec("pykeops") is None:
        yield {"name": "keops", "ok": None, "note": "pykeops is not installed"}
        return
    for N in [1000, 10_000, 100_000] if run.on_gpu else [100]:
        yield offer("keops", lambda: _keops(N, run))


def _keops(N: int, run: Run) -> Row:
    if run.left() < 20:
        return {"ok": None, "N": N, "note": "no time was left"}
    args = mixture_problem(N, run.device)
    with torch.no_grad():
        got, want = keops_form(*args), ops.mixture_log_prob(*args, n_angular=1)
        near = want > -50  # KeOps adds in another order, and loses digits far away
        torch.testing.assert_close(got[near], want[near], rtol=1e-4, atol=1e-3)
        forward = call_seconds(lambda: keops_form(*args), run)
    both = call_seconds(Problem("keops", keops_form, args, (0, 1, 2, 3)).both, run)
    return {"ok": None, "N": N, "call_us": 1e6 * forward, "both_us": 1e6 * both}


def keops_form(x: Tensor, means: Tensor, log_weights: Tensor, bandwidths: Tensor) -> Tensor:
    """mixture_log_prob of a pose by pykeops, which goes through the pairs without storing them."""
    from pykeops.torch import LazyTensor

    scale, kappa = bandwidths[:2], bandwidths[2] ** -2
    norm = -scale.log().sum() - math.log(2 * math.pi) - torch.log(2 * math.pi * torch.special.i0e(kappa))
    query, component = ((t[..., :2] / scale).contiguous() for t in (x, means))
    difference = LazyTensor(query[:, :, None]) - LazyTensor(component[:, None])
    half = (LazyTensor(x[:, :, None, 2:].contiguous()) - LazyTensor(means[:, None, :, 2:].contiguous())) / 2
    weight = LazyTensor((log_weights + norm)[:, None, :, None].contiguous())
    angle = half.sin() ** 2 * LazyTensor(kappa.reshape(1, 1, 1, 1))
    return (weight - (difference**2).sum(-1) / 2 - 2 * angle).logsumexp(dim=2).squeeze(-1)
