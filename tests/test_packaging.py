"""The package from outside: built, installed into an empty folder, and imported where it cannot work."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mdps

ROOT = Path(__file__).parents[1]
WITHOUT_CUDA = {"MDPS_CUDA": "OFF"}


def python(code, *path, cwd=None):
    """Run code in a new interpreter that finds `path` first; what is built there is built without CUDA."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **WITHOUT_CUDA}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=900)


def test_a_torch_that_is_too_old(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text('__version__ = "2.9.1+cpu"\n')
    done = python("import mdps", tmp_path, Path(mdps.__file__).parents[1])
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ImportError: mdps needs torch 2.10 or newer, this is torch 2.9.1+cpu: pip install 'torch>=2.10'"


def test_a_library_for_another_python(tmp_path):
    skip = shutil.ignore_patterns("_C*.so", "__pycache__")
    shutil.copytree(Path(mdps.__file__).parent, tmp_path / "mdps", ignore=skip)
    shutil.copy(mdps._C.__file__, tmp_path / "mdps/_C.cpython-37m-x86_64-linux-gnu.so")
    done = python("import mdps", tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: mdps has no compiled library for this Python and torch")


@pytest.mark.slow
def test_from_a_source_distribution_without_cuda(tmp_path):
    """Packed, unpacked, built without CUDA whether nvcc is here or not, installed and used."""
    pytest.importorskip("scikit_build_core")
    pytest.importorskip("pybind11")
    source = tmp_path / "source"
    skip = shutil.ignore_patterns(".git", ".venv", "build", "_site", "runs", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, source, ignore=skip)
    made = python(f"from scikit_build_core import build; print(build.build_sdist({str(tmp_path)!r}))", cwd=source)
    assert made.returncode == 0, made.stderr
    package = tmp_path / made.stdout.strip().splitlines()[-1]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", tmp_path / "site"]
    command = [sys.executable, "-m", "pip", "install", *options, package]
    installed = subprocess.run(command, env={**os.environ, **WITHOUT_CUDA}, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    assert (tmp_path / "site/mdps/py.typed").exists() and (tmp_path / "site/mdps/ops/py.typed").exists()
    code = "import mdps.ops, torch; print(mdps.__file__, mdps.ops.normalize_log_weights(torch.zeros(1, 4)).ess.item())"
    done = python(f"{code}; print(mdps.build_info()['cuda'] or 'without')", tmp_path / "site", cwd=tmp_path)
    assert done.stdout.split() == [str(tmp_path / "site/mdps/__init__.py"), "4.0", "without"], done.stderr
