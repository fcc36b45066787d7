"""The library under AddressSanitizer and UndefinedBehaviorSanitizer: the cases of every operator, forward and backward."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from parity import operators

ROOT = Path(__file__).parents[1]
CASES = "values or gradients or errors or layouts or empty"


def runtime(name: str) -> str:
    """The path of a sanitizer's run-time, as gcc has it."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(path):
        pytest.skip(f"gcc has no {name}")
    return path


def install(folder: Path, **defines: str) -> Path:
    """Builds the package with these CMake variables, by gcc; returns the folder in `folder` that it is installed into."""
    pytest.importorskip("scikit_build_core")
    pytest.importorskip("pybind11")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder / "site")]
    settings = [f"build-dir={folder / 'build'}", "install.strip=false", *(f"cmake.define.{k}={v}" for k, v in defines.items())]
    command = [sys.executable, "-m", "pip", "install", *options, *(x for s in settings for x in ("-C", s)), str(ROOT)]
    environment = {**os.environ, "CC": "gcc", "CXX": "g++"}
    built = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert built.returncode == 0, built.stderr
    (library,) = (folder / "site/mdps").glob("_C*.so")
    for sanitizer in set(defines.get("MDPS_SANITIZE", "").split(",")) & {"address", "thread"}:
        assert f"__{sanitizer[0]}san_init".encode() in library.read_bytes(), f"{library} is not instrumented"
    return folder / "site"


def run_tests(site: Path, cases: str, preload: str = "", wrapper: tuple[str, ...] = (), **settings: str):
    """The operators' tests with the package in `site`; what they print, sanitizers' reports included, and the exit status."""
    environment = {**os.environ, "PYTHONPATH": str(site), "LD_PRELOAD": preload, **settings}
    # -s: a report goes to stderr of the process, which pytest would swallow.
    command = [*wrapper, sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-m", "not slow", "-k", cases]
    tests = [str(ROOT / f"tests/test_{x}.py") for x in operators()]
    done = subprocess.run([*command, *tests], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    return done.stdout + done.stderr, done.returncode


@pytest.mark.slow
def test_no_report(tmp_path):
    preload = f"{runtime('libasan.so')} {runtime('libubsan.so')}"
    site = install(tmp_path, MDPS_SANITIZE="address,undefined", MDPS_CUDA="OFF")
    output, status = run_tests(
        site, CASES, preload, ASAN_OPTIONS="detect_leaks=0:halt_on_error=1", UBSAN_OPTIONS="print_stacktrace=1"
    )
    report = re.search(r".*(?:runtime error:|ERROR: AddressSanitizer)(?:.*\n?){30}", output)
    assert report is None, report[0]
    assert status == 0, output[-5000:]
