"""csrc/ against torch: the ABI that we declare by hand, the errors, the handles."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu.problems import problems

import mdps
from mdps import ops

ROOT = Path(__file__).parents[1]
INCLUDE = Path(torch.__file__).parent / "include"
raw = torch.ops.mdps.normalize_log_weights.default


def test_declarations_agree_with_those_of_torch():
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{INCLUDE}", f"-I{ROOT / 'csrc'}", "torch_c_agrees.cpp"]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_every_declared_name_exists_in_torch():
    known = "".join((INCLUDE / "torch/csrc" / p).read_text() for p in ("stable/c/shim.h", "inductor/aoti_torch/c/shim.h"))
    names = re.findall(r"\b((?:aoti_)?torch_\w+)\(", (ROOT / "csrc/torch_c.h").read_text())
    newer = {"torch_delete_stable_ivalue", "torch_exception_get_what_without_backtrace"}  # torch 2.13
    assert {
        "aoti_torch_get_dim",
        "aoti_torch_empty_strided",
        "torch_library_impl",
        "torch_parallel_for",
        "aoti_torch_check",
    } <= set(names)
    assert [n for n in names if n not in newer and not re.search(rf"\b{n}\b", known)] == []


def test_a_second_copy_is_refused(tmp_path):
    copy = shutil.copy(mdps._C.__file__, tmp_path)
    program = f"""
import mdps, importlib.util
spec = importlib.util.spec_from_file_location("copy._C", {str(copy)!r})
other = importlib.util.module_from_spec(spec)
spec.loader.exec_module(other)
try:
    other.register()
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout == "mdps: a second copy of mdps is loaded in this process\n", done.stderr


def test_registering_twice_is_fine():
    mdps._C.register()


@pytest.mark.parametrize(
    "args, text",
    [
        ((torch.ones(3),), "mdps.normalize_log_weights: log_weights: expected 2 dimensions, got 1"),
        ((torch.ones(2, 3).half(),), "mdps.normalize_log_weights: log_weights: expected dtype float32 or float64"),
        ((torch.ones(2, 0),), "mdps.normalize_log_weights: log_weights: expected at least one particle, got 0"),
    ],
)
def test_an_error_from_c_is_exact(args, text):
    with pytest.raises(RuntimeError) as error:
        raw(*args)
    assert str(error.value) == text
    assert mdps._C.live_handles() == 0


def test_the_first_of_several_errors_is_told():
    backward = torch.ops.mdps.normalize_log_weights_backward.default
    one, two = torch.ones(1), torch.ones(2, 3)
    with pytest.raises(
        RuntimeError, match="^mdps.normalize_log_weights_backward: grad_normalized: expected 2 dimensions, got 1$"
    ):
        backward(one, two, two, one, two, two)
    assert mdps._C.live_handles() == 0


def test_no_leak_in_calls_and_failures():
    x, bad = torch.randn(100, 1000, requires_grad=True), torch.ones(100, 1000, dtype=torch.float16)

    def calls():
        for _ in range(300):
            ops.normalize_log_weights(x).ess.sum().backward()
            x.grad = None
            ops.normalize_log_weights(x.detach().T)
            with pytest.raises(RuntimeError):
                raw(bad)

    def resident():
        """MB now: the peak of a process says nothing once another test had a higher one."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    calls()
    before = resident()
    calls()
    assert mdps._C.live_handles() == 0
    assert resident() - before < 8  # a leak would be 120 MB


def test_threads_do_not_change_bits():
    """Every operator, forward and backward, on enough rows for several tasks; the tables' cases are too small for most."""
    threads = torch.get_num_threads()
    for problem in problems(1400, 50, "cpu"):
        for way, call in problem.raw_calls().items():
            results = []
            for n in (1, 2, 3):
                torch.set_num_threads(n)
                out = call()
                results.append(out if isinstance(out, tuple) else (out,))
            torch.set_num_threads(threads)
            for got in results[1:]:
                for g, w in zip(got, results[0], strict=True):
                    assert torch.equal(g, w), f"{problem.name}, {way}"


def test_build_info():
    info = mdps.build_info()
    assert set(info) == set(mdps._library.BuildInfo.__annotations__)
    assert info["version"] == mdps.__version__
    assert isinstance(info["emulated"], bool)
    assert bool(info["cuda"]) == bool(info["cuda_architectures"])
    assert not (info["cuda"] and info["emulated"])
    assert info["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert info["torch"] == ".".join(torch.__version__.split(".")[:2])
