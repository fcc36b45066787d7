"""The CUDA kernels on the CPU (tests/emulation): first whether the emulation finds bugs, then whether the kernels have any."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_sanitizers import CASES, install, run_tests, runtime

import mdps

ROOT = Path(__file__).parents[1]
CURAND = [Path(p) / f"nvidia/{x}/include" for p in sys.path for x in ("cu13", "curand")]
CURAND = next((p for p in CURAND if (p / "curand_philox4x32_x.h").exists()), None)
ORDERS = ["forward", "reverse", "1"]
FLAGS = ["-std=gnu++17", "-O2", "-march=x86-64-v3", "-Wall", "-Wno-unknown-pragmas", f"-I{ROOT / 'tests/emulation'}"]
FLAGS += [f"-I{ROOT / 'kernels'}", f"-I{CURAND}", "-fPIC"]
HALT = {
    "": {},
    "address,undefined": {
        # New memory is NaN: nothing may be taken for 0.
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:malloc_fill_byte=255:max_malloc_fill_size=2147483647",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    },
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1"},
}

pytestmark = [
    pytest.mark.skipif(not shutil.which("g++"), reason="needs g++"),
    pytest.mark.skipif(CURAND is None, reason="needs cuRAND's headers: pip install nvidia-curand"),
]


def compile(*arguments):
    subprocess.run(["g++", *FLAGS, *map(str, arguments)], check=True, timeout=300)


def fixed_addresses(sanitizer):
    """ThreadSanitizer needs memory where it expects it."""
    if sanitizer == "thread" and not shutil.which("setarch"):
        pytest.skip("ThreadSanitizer needs setarch -R")
    return ("setarch", "-R") if sanitizer == "thread" else ()


@pytest.fixture(scope="module")
def emulation(tmp_path_factory):
    """The run-time of the emulation, which is never under a sanitizer."""
    path = tmp_path_factory.mktemp("emulation") / "emulation.o"
    compile("-c", ROOT / "tests/emulation/emulation.cpp", "-o", path)
    return path


def run_seeded(emulation, folder, bug, sanitizer, order):
    """What tests/emulation/seeded_bugs.cu says with one of its bugs."""
    fixed = fixed_addresses(sanitizer)
    program = folder / f"{bug}_{sanitizer}"
    if not program.exists():
        checked = ["-g", f"-fsanitize={sanitizer}"] if sanitizer else []
        compile(*checked, f"-D{bug}", "-xc++", ROOT / "tests/emulation/seeded_bugs.cu", "-xnone", emulation, "-o", program)
    environment = {**os.environ, **HALT[sanitizer], "MDPS_EMULATION_ORDER": order}
    done = subprocess.run([*fixed, program], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) == (done.stdout == "right\n")
    return done.stdout + done.stderr


@pytest.mark.parametrize("sanitizer", HALT, ids=["plain", "address", "thread"])
def test_right_code_is_silent(sanitizer, emulation, tmp_path):
    for order in ORDERS:
        assert run_seeded(emulation, tmp_path, "NO_BUG", sanitizer, order) == "right\n"


@pytest.mark.parametrize(
    "bug, sanitizer, words",
    [
        ("NO_BARRIER", "", "^wrong$"),
        ("NO_BARRIER", "thread", "data race"),
        ("BARRIER_OF_WARP", "thread", "data race"),
        ("LOCKSTEP", "thread", "data race"),
        ("SAME_VALUE", "thread", "data race"),
        ("OVERRUN", "address,undefined", r"heap-buffer-overflow(.*\n)*.*seeded_bugs\.cu:\d+"),
        ("DIVERGENT_BARRIER", "", "block 0, thread 40: __syncthreads at different lines"),
        ("ENDED_LANE", "", "a mask names a lane that has ended"),
        ("ABSENT_LANES", "", "deadlock"),
        ("DIVERGENT_SHUFFLE", "", "lanes of one operation are at different ones"),
        ("OTHER_LANE", "", "reads a lane that its mask does not name|lanes of one operation pass different masks"),
    ],
)
def test_seeded_bugs_are_found(bug, sanitizer, words, emulation, tmp_path):
    for order in ORDERS:
        assert re.search(words, run_seeded(emulation, tmp_path, f"BUG_{bug}", sanitizer, order), re.M), order


class NormalizeLogWeights(ctypes.Structure):
    """As in kernels/normalize_log_weights.h."""

    POINTERS = ("log_weights", "normalized", "log_sum", "ess", "grad_normalized", "grad_log_sum", "grad_ess")
    _fields_ = [(x, ctypes.c_int64) for x in "BN"]
    _fields_ += [(x, ctypes.c_void_p) for x in (*POINTERS, "grad_log_weights", "scratch")]


def test_one_launcher_alone(emulation, tmp_path):
    """In rows of one block and of several, with torch's own functions as oracle."""
    sources = [ROOT / f"kernels/{x}.cu" for x in ("normalize_log_weights", "cuda_launch")]
    compile("-shared", "-xc++", *sources, "-xnone", emulation, "-o", tmp_path / "normalize.so")
    launch = ctypes.CDLL(str(tmp_path / "normalize.so")).normalize_log_weights_cuda
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        for B, N in ((3, 1), (2, 300), (2, 9000)):
            x = torch.randn(B, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
            normalized, log_sum, ess, scratch = torch.empty_like(x), x.new_empty(B), x.new_empty(B), x.new_empty(B * 1000)
            pointers = {n: t.data_ptr() for n, t in zip(NormalizeLogWeights.POINTERS, (x, normalized, log_sum, ess))}
            p = NormalizeLogWeights(B=B, N=N, scratch=scratch.data_ptr(), **pointers)
            assert launch(ctypes.byref(p), ctypes.c_int64(B), int(dtype == torch.float64), None) == 0
            want = x.double().log_softmax(1)
            for g, w in ((normalized, want), (log_sum, x.double().logsumexp(1)), (ess, 1 / want.exp().square().sum(1))):
                torch.testing.assert_close(g.double(), w, rtol=tolerance, atol=tolerance)


# The whole package on emulated kernels


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return install(tmp_path_factory.mktemp("plain"), MDPS_EMULATE="ON")


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_operators(site, order):
    # Once with everything but what says nothing about kernels, or the same again: torch's tracing, compiling and transforms,
    # the CPU's threads, finite differences of what is compared with the reference already, and the statistics of ancestors
    # that are the CPU's number by number. In the other orders what the order may change.
    others = ("compile", "export", "opcheck", "func_grad", "vmap", "threads", "gradcheck", "unbiased", "variances")
    cases = " and ".join(f"not {x}" for x in others) if order == "forward" else "values or gradients"
    output, status = run_tests(site, cases, MDPS_EMULATION_ORDER=order)
    assert status == 0, output[-5000:]


FAILED_LAUNCHES = """
import os, torch, mdps
from mdps import ops
x, seed = torch.zeros(2, 5, 3), ops.make_seed()
calls = [lambda: ops.normalize_log_weights(x[..., 0]), lambda: ops.mixture_log_prob(x, x, x[..., 0], torch.ones(3)),
         lambda: ops.mixture_resample(x, x[..., 0], torch.ones(3), seed), lambda: ops.philox_normal(seed, (2, 5))]
for call in calls:
    call()
    os.environ["MDPS_EMULATION_FAIL"] = "1"
    try:
        call()
    except RuntimeError as error:
        print(error)
    del os.environ["MDPS_EMULATION_FAIL"]
    call()
print(mdps._C.live_handles())
"""


@pytest.mark.slow
def test_a_failed_launch(site):
    """One clear error, nothing leaks, and the next call works."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", FAILED_LAUNCHES], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *errors, handles = done.stdout.splitlines()
    names = ("normalize_log_weights", "mixture_log_prob", "mixture_resample", "philox_normal")
    why = "this GPU is older than the architectures that mdps was built for"
    assert [e.partition(why)[0] for e in errors] == [f"mdps.{n}: CUDA: " for n in names]
    assert handles == "0"


@pytest.mark.slow
def test_parity(site, tmp_path):
    assert not mdps.build_info()["emulated"]
    here, there = dict(os.environ), {**os.environ, "PYTHONPATH": str(site)}
    for what, environment in (("record", here), ("check", there)):
        command = [sys.executable, ROOT / "tests/parity.py", what, tmp_path / "calls.pt"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"], ids=["address", "thread"])
def test_no_report(sanitizer, tmp_path):
    fixed = fixed_addresses(sanitizer)
    libraries = ["libtsan.so"] if sanitizer == "thread" else ["libasan.so", "libubsan.so"]
    preload = " ".join(runtime(x) for x in libraries)
    site = install(tmp_path, MDPS_EMULATE="ON", MDPS_SANITIZE=sanitizer)
    # Under ThreadSanitizer a block takes 0.2 s: the values and gradients of float32 are enough to meet every barrier.
    cases = "f32 and (values or gradients)" if sanitizer == "thread" else CASES
    output, status = run_tests(site, cases, preload, fixed, **HALT[sanitizer])
    report = re.search(r".*(?:runtime error:|(?:ERROR|WARNING): \w+Sanitizer)(?:.*\n?){30}", output)
    assert report is None, report[0]
    assert status == 0, output[-5000:]
