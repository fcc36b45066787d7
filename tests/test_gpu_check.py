"""tests/gpu/check.py without a GPU: its stages run through, and what happens to a stage that fails, hangs or crashes."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu import check, correctness, device, filter, speed, training
from gpu.device import Run
from gpu.filter import Inputs
from gpu.problems import problems

TESTS = Path(__file__).parent


def run(script, folder, *arguments):
    """Run check.py, or a script that does the same, on the CPU; return its exit status, output and results."""
    command = [sys.executable, script, "--device", "cpu", "--out", str(folder / "out"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    path = folder / "out/CPU.json"
    assert path.exists(), done.stdout + done.stderr
    return done.returncode, done.stdout, json.loads(path.read_text())


def test_stages_run_through(tmp_path):
    names = ["parity", "derivatives of log_i0", "same bits", "errors", "localization", "map smoother", "operators"]
    names += ["torch", "pairs"]
    status, output, result = run(TESTS / "gpu/check.py", tmp_path, "--stages", ",".join(names))
    assert status == 0 and result["passed"] is True, output
    assert set(result["stages"]) == set(names) and all(s["ok"] and s["rows"] for s in result["stages"].values())
    everything = {p.name for p in problems(2, 3, "cpu")}
    rows = result["stages"]["operators"]["rows"]
    assert {r["name"] for r in rows} == everything and all(r["forward_us"] > 0 for r in rows)
    assert {r["name"].split(", ")[0] for r in result["stages"]["same bits"]["rows"]} == {n.split(", ")[0] for n in everything}
    assert result["card"]["name"] == "CPU" and result["torch"] == torch.__version__ and result["commit"]


TROUBLE = """
import os, sys, time, types
sys.path.insert(0, {tests!r})
from gpu import check

def row(ok): return {{"name": "row", "ok": ok}}
def fine(run): yield row(True)
def wrong(run): yield from (row(True), row(False))
def broken(run): yield row(True); raise ValueError("broken")
def crash(run): yield row(True); os.abort()
def hang(run): yield row(True); time.sleep(600)

trouble = types.ModuleType("gpu.trouble")
stages = [fine, wrong, broken, crash, hang]
vars(trouble).update({{f.__name__: f for f in stages}})
sys.modules["gpu.trouble"] = trouble
plans = {{f.__name__: check.Plan(f"trouble.{{f.__name__}}", 60, alone=f is hang) for f in stages}}
plans["hang"].seconds = 15
plans["late"] = check.Plan("trouble.hang", 15, alone=True, asked=False)
check.plans = lambda: {{**plans, "last": check.Plan("trouble.fine", 60, alone=True)}}
check.__file__ = __file__
sys.exit(check.main())
"""


@pytest.mark.slow
def test_a_stage_in_trouble_takes_nothing_along(tmp_path):
    script = tmp_path / "trouble.py"
    script.write_text(TROUBLE.format(tests=str(TESTS)))
    status, output, result = run(script, tmp_path)
    assert status == 1 and result["passed"] is False
    stages = result["stages"]
    assert {name: s["ok"] for name, s in stages.items()} == {
        "fine": True, "wrong": False, "broken": False, "crash": False, "hang": False, "late": None, "last": True
    }  # fmt: skip
    assert all(s["rows"][0] == {"name": "row", "ok": True} for s in stages.values())
    assert "ValueError: broken" in stages["broken"]["error"] and "status -6" in stages["crash"]["error"]
    assert stages["hang"]["error"] == stages["late"]["error"] == "stopped after 15 s"
    assert "FAILED wrong: 2 results, 1 failed" in output and "ok     last" in output and "late   late" in output


def test_without_a_gpu_it_says_so(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, TESTS / "gpu/check.py", "--out", tmp_path], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.strip().endswith("torch sees no GPU here")


def test_no_stage_is_forgotten():
    """Every test file with a case table has its stage, and every plan a function."""
    plans = check.plans()
    tables = {p.stem for p in TESTS.glob("test_*.py") if "\nTestOperator = checks(CASES)" in p.read_text()}
    assert {f"test_{name.removeprefix('derivatives of ')}" for name in plans if name.startswith("derivatives")} == tables
    assert all(callable(plan.stage()) for plan in plans.values())
    readme = (TESTS / "gpu/README.md").read_text()
    assert all(f"`{'derivatives of ...' if name.startswith('derivatives') else name}`" in readme for name in plans)


@pytest.mark.parametrize("B, N", [(0, 5), (3, 7)])
def test_problems_and_filter_stay_on_their_device(B, N):
    """On the meta device a tensor that is made on the CPU is an error, as on a GPU."""
    for problem in problems(B, N, "meta"):
        for way, call in problem.raw_calls().items():
            out = call()
            assert all(o.is_meta for o in (out if isinstance(out, tuple) else (out,))), (problem.name, way)
    inputs = Inputs("meta")
    for out in (inputs.step(inputs.state()), inputs.sequence(), inputs.training_step()):
        assert all(o.is_meta for o in out)
    for stage in training.EPOCHS:
        losses = torch.stack(training.Training("meta", stage, 2).losses())
        losses.sum().backward()
        assert losses.is_meta


def program(folder, name, text):
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport sys, time\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    "status, log, ok", [(0, "ERROR SUMMARY: 0 errors", True), (99, "ERROR SUMMARY: 1 error", False), (1, "not supported", None)]
)
def test_sanitizer(status, log, ok, tmp_path, monkeypatch):
    text = f"open(sys.argv[sys.argv.index('--log-file') + 1], 'w').write({log!r})\nsys.exit({status})"
    program(tmp_path, "compute-sanitizer", text)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (row,) = correctness.sanitizer("memcheck")(Run("cuda", time.monotonic() + 60, {}))
    assert row["ok"] is ok and log in row["note" if ok is None else "summary"]


def test_sanitizer_that_does_not_end(tmp_path, monkeypatch):
    program(tmp_path, "compute-sanitizer", "print('begun', flush=True)\ntime.sleep(60)")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (row,) = correctness.sanitizer("memcheck")(Run("cuda", time.monotonic() + 2, {}))
    assert row["ok"] is False and row["error"] == "stopped after 2 s" and row["output"] == "begun\n"


def test_clock_under_load(tmp_path, monkeypatch):
    program(tmp_path, "nvidia-smi", "time.sleep(0.01)\nprint(1755)")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    run = Run("cuda", time.monotonic() + 60, {"uuid": "GPU-0"})
    assert speed.clock_under_load(lambda: time.sleep(0.01), 0.01, run) == 1755
    monkeypatch.setenv("PATH", "/nonexistent")
    assert speed.clock_under_load(lambda: None, 0.01, run) is None


class Pretended(Run):
    """The CPU, taken for a GPU."""

    on_gpu = True


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.time = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1e3 * (end.time - self.time)


class Stream:
    def wait_stream(self, other):
        assert isinstance(other, Stream)


class Graph:
    replays = 0

    def replay(self):
        Graph.replays += 1


@pytest.fixture
def pretended(monkeypatch):
    """What of torch.cuda the stages use, on the CPU; a graph's replay does nothing."""
    fakes = {
        "Event": Event, "Stream": Stream, "CUDAGraph": Graph, "current_stream": Stream, "synchronize": lambda: None,
        "stream": contextlib.nullcontext, "graph": contextlib.nullcontext, "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: 10_000, "max_memory_allocated": lambda: 50_000,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return Pretended("cpu", time.monotonic() + 60, {"sms": 132, "clock_mhz_most": 1980.0, "uuid": "GPU-0"})


def test_measurements_of_a_gpu(pretended, monkeypatch):
    """What no run on the CPU comes to: graphs, shares of the limit, targets."""
    monkeypatch.setattr(speed, "SIZES", [speed.PAPER_SIZE])
    monkeypatch.setattr(speed, "PAIR_SIZES", [100, 100_000])
    monkeypatch.setattr(speed, "mixture_problem", lambda n, d, heading=0.2: problem_of(min(n, 200), d, heading))
    monkeypatch.setattr(speed, "OPERATOR_TARGET_US", 1e9)
    problem_of = correctness.mixture_problem
    rows = list(speed.operators(pretended))
    asked = [r for r in rows if r["name"] not in speed.NOT_ASKED]
    assert all(r["ok"] is True and r["target_us"] == 1e9 for r in asked) and Graph.replays > 0
    assert len(asked) == len(rows) - len(speed.NOT_ASKED) and all(r["ok"] is None for r in rows if r["name"] in speed.NOT_ASKED)
    small, large = speed.pairs(pretended)
    assert small["ok"] is None and large["ok"] in (True, False) and large["target"] == speed.PAIRS_TARGET
    limit = 132 * 1980e6 * 128 / speed.INSTRUCTIONS["forward"]
    assert large["forward_share"] == pytest.approx(1e10 / (1e-3 * large["forward_ms"]) / limit)
    assert correctness._peak(100, pretended) == 40_000 + 100 * 7 * 4 + 12
    assert correctness._repeat(lambda: torch.tensor(torch.nan), pretended) == {"ok": True, "runs": 20, "other": 0}
    numbers = iter(range(20))
    assert correctness._repeat(lambda: torch.tensor(next(numbers)), pretended)["other"] == 19


def test_a_failed_capture_leaves_the_stream_as_it_was(pretended, monkeypatch):
    """What torch does where the end of a capture fails: the stream of the capture stays the current one."""
    streams = [first := Stream(), other := Stream()]

    class Broken(contextlib.nullcontext):
        def __enter__(self):
            streams[0] = other

        def __exit__(self, *reason):
            raise RuntimeError("capture invalidated")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: streams.__setitem__(0, stream))
    monkeypatch.setattr(torch.cuda, "graph", Broken)
    with pytest.raises(RuntimeError, match="capture invalidated"):
        device.capture(lambda: None)
    assert streams[0] is first


def test_filter_stage(pretended, monkeypatch):
    def capture(call):
        out = call()
        return lambda: [o.copy_(new) for o, new in zip(out, call())], out

    monkeypatch.setattr(filter, "capture", capture)
    monkeypatch.setattr(filter, "STEP_TARGET_US", 1e9)
    monkeypatch.setattr(filter, "T", 4)
    monkeypatch.setattr(device, "capture", lambda call: (call, None))
    rows = {r["name"]: r for r in filter.stage(pretended)}
    assert all(r["ok"] is True for name, r in rows.items() if "replay" in name or name == "filter step"), rows
    assert all(r["ok"] is not False for r in rows.values()) and len(rows) == 8
    inputs = filter.Inputs("cpu")
    monkeypatch.setattr(filter, "capture", lambda call: (lambda: None, call()))
    with pytest.raises(AssertionError):  # a replay that keeps the first seed
        filter._replay(inputs.sequence, inputs, exact=True)


def test_training_stage(pretended, monkeypatch):
    def capture(call):
        out = call().clone()
        return lambda: out.copy_(call()), out

    monkeypatch.setattr(training, "T", 3)
    monkeypatch.setattr(training, "B", 2)
    monkeypatch.setattr(training, "capture", capture)
    monkeypatch.setattr(device, "capture", lambda call: (call, None))
    monkeypatch.setattr(training, "TARGET_MINUTES", {1: 1e9, 2: 0.0})
    rows = {r["name"]: r for r in training.stage(pretended)}
    assert {name: r["ok"] for name, r in rows.items()} == dict.fromkeys(rows, True) | {"whole training, 2 at once": False}, rows
    assert len(rows) == 10
    minutes = sum(rows[f"{name}, 1 at once"]["device_us"] * n for name, n in training.EPOCHS.items()) * 157 / 60e6
    assert rows["whole training, 1 at once"]["minutes"] == pytest.approx(minutes)
    with monkeypatch.context() as patch:
        patch.setattr(training, "_measure", lambda step, run: 1 / 0)
        rows = {r["name"]: r for r in training.stage(pretended)}
    assert rows["smoother, 1 at once"]["ok"] is False and rows["whole training, 1 at once"]["ok"] is None
    one = training.Training("cpu", "smoother", 1)
    frozen = [p.clone() for p in one.smoothers[0].forward_filter.parameters()]
    one.step()
    assert all(torch.equal(p, q) for p, q in zip(one.smoothers[0].forward_filter.parameters(), frozen, strict=True))
    monkeypatch.setattr(training, "capture", lambda call: (lambda: None, call().clone()))
    with pytest.raises(AssertionError):  # a replay that does nothing
        training._replay(training.Training("cpu", "everything", 1))
