"""What nvcc makes of the kernels, and how the package builds and loads with CUDA: all without a GPU."""

import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from test_emulation import CURAND
from test_sanitizers import install

import mdps

ROOT = Path(__file__).parents[1]
KERNELS = sorted((ROOT / "kernels").glob("*.cu"))
ARCHITECTURES = ("sm_80", "sm_90")

needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc") or CURAND is None, reason="needs nvcc and cuRAND's headers")


def cubin(source: Path, architecture: str, folder: Path, *options: str) -> tuple[bytes, str]:
    """The machine code, and what ptxas says about it."""
    includes = [f"-I{ROOT / 'kernels'}", "-isystem", str(CURAND)]
    out = folder / f"{source.stem}_{architecture}.cubin"
    command = ["nvcc", "-cubin", f"-arch={architecture}", "-O3", "-Xptxas=-v", "-diag-suppress=1675", *includes, *options]
    done = subprocess.run([*command, str(source), "-o", str(out)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return out.read_bytes(), done.stdout + done.stderr


def code_sizes(elf: bytes) -> dict[str, int]:
    """Bytes of every kernel in a cubin: the sections .text.<name> of a 64-bit ELF file (no disassembler is needed)."""
    assert elf[:5] == b"\x7fELF\x02"
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, number, names = struct.unpack_from("<HHH", elf, 0x3A)
    # name, type, flags, address, offset, size
    sections = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(number)]

    def name(section):
        begin = sections[names][4] + section[0]
        return elf[begin : elf.index(b"\0", begin)].decode()

    return {name(s)[6:]: s[5] for s in sections if name(s).startswith(".text.")}


def instructions_per_unit(source, kernel, macro, unrolls, units, architecture, folder) -> float:
    """SASS instructions for each of `units` equal pieces of work in one turn of a loop whose unrolling `macro` sets: the
    difference in size between two unrolls, 16 bytes an instruction. `kernel` is a regular expression of one kernel's name."""
    sizes = []
    for unroll in unrolls:
        found = code_sizes(cubin(source, architecture, folder, f"-D{macro}={unroll}")[0])
        (kernel_name,) = [x for x in found if re.search(kernel, x)]
        sizes.append(found[kernel_name])
    return (sizes[1] - sizes[0]) / 16 / (unrolls[1] - unrolls[0]) / units


KNOWN = """
enum { TURNS = UNROLL };
__global__ void other(float *y) {}
__global__ void loop(float x, float *out) {
    float y = x;
#pragma unroll TURNS
    for (int i = 0; i < 4000; i++) { BODY }
    *out = y;
}
"""


@needs_nvcc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("n", [1, 3])
def test_instructions_are_counted(n, architecture, tmp_path):
    source = tmp_path / "known.cu"
    source.write_text(KNOWN.replace("BODY", "y = y * x + x;" * n))
    assert instructions_per_unit(source, "loop", "UNROLL", (8, 40), 1, architecture, tmp_path) == n


# Each loop over pairs in a kernel of its own, for (x, y, heading) in float32, four items a thread.
PAIRS = """
#define REAL float
#define FN(name) name##_f32
#include "bessel.h"
#include "mixture_pass.cuh"
typedef Features<2, 1> F;
static __device__ void load(const float *from, float *to, int n) { for (int i = 0; i < n; i++) to[i] = from[i]; }
template <bool HALF> static __device__ void forward(const MixtureLogProb &p, Passing_f32<2, 1> &s, const float *x, float *out) {
    float q[4][F::n], sum[4] = {};
    load(x + threadIdx.x, q[0], 4 * F::n);
    sum_pairs_f32<2, 1, 4, HALF>(p, s.row, s.value, 0, 0, p.N, q, sum);
    for (int r = 0; r < 4; r++) out[threadIdx.x * 4 + r] = sum[r];
}
__global__ void narrow(MixtureLogProb p, const float *x, float *out) {
    forward<true>(p, *shared_memory<Passing_f32<2, 1>>(), x, out);
}
__global__ void broad(MixtureLogProb p, const float *x, float *out) {
    forward<false>(p, *shared_memory<Passing_f32<2, 1>>(), x, out);
}
__global__ void queries(MixtureLogProb p, const float *x, float *out) {
    float q[4][F::n], sums[4][F::n] = {};
    load(x + threadIdx.x, q[0], 4 * F::n);
    gather_components_f32<2, 1, 4>(p, *shared_memory<Passing_f32<2, 1>>(), 0, 0, p.N, q, sums);
    for (int i = 0; i < 4 * F::n; i++) out[threadIdx.x * 4 * F::n + i] = sums[0][i];
}
__global__ void components(MixtureLogProb p, const float *x, float *out) {
    float own[4][1 + F::n], sums[4][1 + F::n] = {};
    load(x + threadIdx.x, own[0], 4 * (1 + F::n));
    gather_queries_f32<2, 1, 4>(p, *shared_memory<Passing_f32<2, 1>>(), 0, 0, p.M, own, sums);
    for (int i = 0; i < 4 * (1 + F::n); i++) out[threadIdx.x * 4 * (1 + F::n) + i] = sums[0][i];
}
"""


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_instructions_a_pair(architecture, tmp_path):
    """Of mixture_log_prob: what the head comments and the README say, and what a card's speed is compared with."""
    source = tmp_path / "pairs.cu"
    source.write_text(PAIRS)
    sizes = [code_sizes(cubin(source, architecture, tmp_path, f"-DMDPS_UNROLL={n}")[0]) for n in (8, 104)]
    found = {}
    for name in ("broad", "narrow", "queries", "components"):
        small, large = (next(v for k, v in s.items() if name in k) for s in sizes)
        found[name] = (large - small) / 16 / 96 / 4
    assert found["broad"] <= 8.5, found  # headings broader than 0.25 rad; 8.31 reached
    assert found["narrow"] <= 9.35, found  # an instruction more for the half angle; 9.31 reached
    assert found["queries"] + found["components"] <= 32, found  # backward


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", KERNELS, ids=lambda p: p.stem)
def test_nothing_is_spilled(source, architecture, tmp_path):
    code, said = cubin(source, architecture, tmp_path)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert len(spills) >= len(code_sizes(code))
    assert [x for x in spills if x != ("0", "0")] == [], said


# The package


def python(executable, site, code):
    """What the code prints in a new interpreter that finds the package in `site`."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


REPORT = """
import torch, mdps
print(bool(mdps.build_info()["cuda"]))
print(mdps.ops.normalize_log_weights(torch.zeros(1, 4)).ess.item())
print(torch._C._dispatch_has_kernel_for_dispatch_key("mdps::normalize_log_weights", "CUDA"))
"""


@pytest.fixture(scope="module")
def cuda_site(tmp_path_factory):
    """A folder with the package with CUDA and nothing else (a torch beside it would hide `cuda_python`'s): links to what is
    tested anyhow, or a build."""
    folder = tmp_path_factory.mktemp("cuda")
    if not mdps.build_info()["cuda"]:
        return install(folder, MDPS_CUDA="ON")
    for path in Path(mdps.__file__).parents[1].glob("mdps*"):
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def cuda_python():
    """An interpreter whose torch has CUDA: this one, or one of its own."""
    if torch.version.cuda:
        yield sys.executable
        return
    with tempfile.TemporaryDirectory() as folder:
        executable = f"{folder}/bin/python"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        command = [executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "torch", "numpy"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
        if done.returncode:
            pytest.skip(f"pip gave no torch: {done.stderr.strip().splitlines()[-1]}")
        if python(executable, "", "import torch; print(torch.version.cuda)") == ["None"]:
            pytest.skip("pip gave a torch without CUDA")
        yield executable


@needs_nvcc
@pytest.mark.slow
def test_with_cuda_it_loads_under_this_torch(cuda_site):
    assert python(sys.executable, cuda_site, REPORT) == ["True", "4.0", str(torch.version.cuda is not None)]


@needs_nvcc
@pytest.mark.slow
def test_with_cuda_it_loads_under_a_torch_with_cuda(cuda_site, cuda_python):
    assert python(cuda_python, cuda_site, REPORT) == ["True", "4.0", "True"]
    if torch.cuda.is_available():
        return
    code = "import mdps\ntry: mdps.ops.make_seed(device='cuda')\nexcept RuntimeError as e: print(e)"
    assert re.search("NVIDIA driver|no CUDA-capable device", python(cuda_python, cuda_site, code)[0])


def configure(folder, *options, **environment):
    pybind11 = pytest.importorskip("pybind11")
    settings = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", *options]
    command = ["cmake", "-S", ROOT, "-B", folder, *settings]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    errors = [" ".join(e.split()) for e in re.findall(r"CMake Error at [^\n]*\n((?:  .*\n|\n(?=  ))*)", done.stderr)]
    return done.returncode, errors


needs_cmake = pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")


@needs_cmake
def test_cuda_without_nvcc(tmp_path):
    status, errors = configure(tmp_path, "-DMDPS_CUDA=ON", CUDACXX="/nowhere/nvcc")
    assert status != 0
    assert errors == [
        "mdps: MDPS_CUDA=ON, but there is no nvcc: put it on PATH or name it in CUDACXX, or build with MDPS_CUDA=OFF"
    ]


@needs_cmake
@needs_nvcc
def test_nvcc_without_curand(tmp_path):
    status, errors = configure(tmp_path, "-DMDPS_CUDA=ON", f"-DCMAKE_IGNORE_PATH={CURAND}")
    if status == 0:
        found = re.search("CURAND_INCLUDE:PATH=(.*)", (tmp_path / "CMakeCache.txt").read_text())[1]
        assert Path(found) != CURAND
        pytest.skip(f"cuRAND is in {found}, too")
    assert errors == [
        "mdps: nvcc is here, but not cuRAND's headers: MDPS_CUDA=ON pip install . fetches them; without build isolation pip "
        "install nvidia-curand does (CUDA 12: nvidia-curand-cu12); MDPS_CUDA=OFF does without CUDA"
    ]
