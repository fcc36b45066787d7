"""What the stages share: the device they run on, the time they have, rows of results, and times.

On a GPU a time is the device's own, from events around replays of a CUDA graph, which leaves launches out, or that of a call as
Python makes it. On the CPU, where only the logic is tried, both are the clock's.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Row = dict[str, Any]
"""A result: `name`, `ok` (None: nothing was asked for, or it could not be found out; then `note` says why), and numbers."""


@dataclass(frozen=True)
class Run:
    device: str
    deadline: float
    """time.monotonic() when the stage has to be over."""
    card: Row
    """What check.py found out about the device."""

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


Stage = Callable[[Run], Iterator[Row]]


def attempt(name: str, check: Callable[[], Row | None]) -> Row:
    """A row that is ok unless the check raises; it may return more entries, `ok` among them."""
    try:
        return {"name": name, "ok": True, **(check() or {})}
    except Exception as error:
        return {"name": name, "ok": False, "error": f"{type(error).__name__}: {error}"[:600]}


def offer(name: str, measure: Callable[[], Row]) -> Row:
    """A row about what others offer, of which nothing is asked: a failure is a note."""
    row = attempt(name, measure)
    return row if row["ok"] is not False else {"name": name, "ok": None, "note": row["error"]}


def capture(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """The replay of a CUDA graph of this call, and the tensors that a replay fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            out = call()
    except BaseException:
        torch.cuda.set_stream(stream)  # where its end fails too, torch leaves the capture's own stream the current one
        raise
    return graph.replay, out


def device_seconds(call: Callable[[], Any], run: Run, least: float = 0.02) -> float:
    """Seconds that one call takes on the device: median of 5 rounds of replays, `least` seconds each; long calls run once."""
    if not run.on_gpu:
        return call_seconds(call, run, least)
    call()
    once = max(_elapsed(call, 1), 1e-7)
    if once > 0.2:
        return once
    copies = max(1, min(50, int(5e-3 / once)))

    def several() -> None:
        for _ in range(copies):
            call()

    replay, _ = capture(several)
    replay()
    replays = max(1, int(least / max(_elapsed(replay, 1), 1e-7)))
    return statistics.median(_elapsed(replay, replays) for _ in range(5)) / copies


def _elapsed(call: Callable[[], Any], n: int) -> float:
    """Seconds a call, by events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(n):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / n


def call_seconds(call: Callable[[], Any], run: Run, least: float = 0.02) -> float:
    """Seconds a call when Python makes one after the other and waits at the end: the best of 3 rounds; long calls run once."""

    def seconds(n: int) -> float:
        run.wait()
        start = time.perf_counter()
        for _ in range(n):
            call()
        run.wait()
        return (time.perf_counter() - start) / n

    seconds(1)
    once, least = seconds(1), least if run.on_gpu else 1e-3
    return once if once > 0.2 else min(seconds(max(1, int(least / once))) for _ in range(3))
