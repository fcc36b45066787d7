"""The library under AddressSanitizer and UndefinedBehaviorSanitizer: the cases of every operator, forward and backward."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CASES = "values or gradients or errors or layouts or empty"


def runtime(compiler: str, name: str) -> str:
    path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(path):
        pytest.skip(f"the compiler has no {name}")
    return path


@pytest.mark.slow
def test_no_report(tmp_path):
    pytest.importorskip("scikit_build_core")
    pytest.importorskip("pybind11")
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    preload = f"{runtime(compiler, 'libasan.so')} {runtime(compiler, 'libubsan.so')}"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(tmp_path / "site")]
    settings = [
        "-C",
        "cmake.define.MDPS_SANITIZE=address,undefined",
        "-C",
        f"build-dir={tmp_path / 'build'}",
        "-C",
        "install.strip=false",
    ]
    build = [sys.executable, "-m", "pip", "install", *options, *settings, str(ROOT)]
    built = subprocess.run(build, env={**os.environ, "CC": compiler}, capture_output=True, text=True, timeout=1200)
    assert built.returncode == 0, built.stderr
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path / "site"),
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    # -s: a report goes to stderr of the process, which pytest would swallow.
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-m", "not slow", "-k", CASES]
    tests = sorted(str(p) for p in (ROOT / "tests").glob("test_*.py") if (ROOT / f"csrc/{p.stem[5:]}.c").exists())
    done = subprocess.run([*command, *tests], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    output = done.stdout + done.stderr
    report = re.search(r".*(?:runtime error:|ERROR: AddressSanitizer)(?:.*\n?){30}", output)
    assert report is None, report[0]
    assert done.returncode == 0, output[-5000:]
