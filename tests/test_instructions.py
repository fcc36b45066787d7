"""Instructions that the kernels need, counted by callgrind: the same number on a busy machine as on an idle one.

valgrind has no AVX-512, so it is the AVX2 code that is counted, compiled alone (MDPS_NO_CLONES and -march=x86-64-v3) to save
time; the counts of the clones differ by 2 % at most. The loop that matters most is looked at in the AVX-512 code as well,
without running it.
"""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The cases of instructions.c: the unit, and the most instructions a unit, which is what is reached (gcc 12) and 10 % more.
MOST = {
    "mixture forward f32 1000": ("pair", 4.05),
    "mixture backward f32 1000": ("pair", 8.88),
    "mixture forward f32 50": ("pair", 6.91),
    "mixture backward f32 50": ("pair", 19.1),
    "iwsg backward f32 32 x 50 x 50": ("pair", 21.5),
    "two_filter f32 8 x 100 x 50": ("pair", 6.03),
    "two_filter backward f32 8 x 100 x 50": ("pair", 15.1),
    "mixture forward f64 1000": ("pair", 10.7),
    "resample multinomial 1000": ("draw", 157),
    "resample stratified 1000": ("draw", 84),
    "resample systematic 1000": ("draw", 62),
    "resample residual 1000": ("draw", 133),
    "resample multinomial 100000": ("draw", 155),
    "resample stratified 100000": ("draw", 90),
    "resample systematic 100000": ("draw", 68),
    "resample residual 100000": ("draw", 131),
    "mixture_resample 32 x 50 poses": ("draw", 500),
    "mixture_resample 1000 poses": ("draw", 500),
    "philox_normal": ("number", 26.2),
    "philox_von_mises": ("draw", 211),
    "normalize_log_weights": ("particle", 6.07),
    "small_network": ("row", 314),
    "small_network, dynamics": ("row", 958),
    "move_poses, dynamics": ("row", 998),
    "small_network, measurement": ("row", 668),
    "weigh_poses, measurement": ("row", 692),
    "transport forward 50": ("pair and step", 10.3),
    "transport backward 50": ("pair", 83),
    "transport forward 250": ("pair and step", 6.9),
    "transport backward 250": ("pair", 40),
    "pose_correlation forward": ("pose and cell", 21.7),
    "pose_correlation backward": ("pose and cell", 42),
    "pose_correlation backward, map": ("pose and cell", 49.6),
    "pose_correlation forward, border": ("pose and cell", 33.9),
    "pose_correlation backward, border": ("pose and cell", 84.7),
    "pose_correlation backward, map, border": ("pose and cell", 61.5),
}
# File, type, header. small_network chooses its instruction set itself.
OBJECTS = [
    ("mixture_log_prob_backward", "f32", "mixture_log_prob"),
    ("mixture_log_prob", "f32", "mixture_log_prob"),
    ("mixture_log_prob", "f64", "mixture_log_prob"),
    ("mixture_prepare", "f32", "mixture_log_prob"),
    ("mixture_prepare", "f64", "mixture_log_prob"),
    ("two_filter_log_prob", "f32", "two_filter_log_prob"),
    ("resample", "f32", "resample"),
    ("mixture_resample", "f32", "mixture_resample"),
    ("philox_normal", "f32", "philox_normal"),
    ("philox_von_mises", "f32", "philox_von_mises"),
    ("normalize_log_weights", "f32", "normalize_log_weights"),
    ("transport_resample", "f32", "transport_resample"),
    ("transport_resample_backward", "f32", "transport_resample"),
    ("pose_correlation", "f32", "pose_correlation"),
    ("pose_correlation_backward", "f32", "pose_correlation"),
    ("pose_correlation_map", "f32", "pose_correlation"),
]
LOOP = """
#include "bessel.h"
#include "mixture_log_prob.h"
#include "mixture_log_prob.c"
void forward_loop(const float *q, const float *components, int64_t N, int64_t stride, float *sum) {
    sum_groups_f32(q, 64, components, N, stride, 1, 4, 2, 1, sum);
}
"""
MOST_AVX512 = 25.0  # instructions of the loop per 16 pairs


def tool(name):
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name}")
    return path


def flags():
    """The options of CMakeLists.txt that decide what code the kernels become."""
    text = (ROOT / "CMakeLists.txt").read_text()
    options = re.findall(r"-O3|-fno-(?:\S+?-(?:errno|math)|gcse-after-reload|gcse)|-fopenmp-simd", text)
    expected = ["-O3", "-fno-gcse", "-fno-gcse-after-reload", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"]
    assert sorted(set(options)) == expected
    return ["-std=gnu11", *sorted(set(options)), f"-I{ROOT / 'kernels'}"]


def own_flags(stem):
    """What CMakeLists.txt has for this kernel file alone."""
    text = (ROOT / "CMakeLists.txt").read_text()
    return re.findall(rf"kernels/{stem}\.c PROPERTIES COMPILE_OPTIONS (\S+)\)", text)


def one_type(real, march):
    """Options that compile a kernel file for one type and one instruction set."""
    name = {"f32": "float", "f64": "double"}[real]
    return [f"-march={march}", "-DMDPS_NO_CLONES", f"-DREAL={name}", f"-DFN(name)=name##_{real}", "-include", "stdbool.h"]


def succeed(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compiler():
    gcc = tool("gcc")
    if not subprocess.run([gcc, "-dumpmachine"], capture_output=True, text=True).stdout.startswith("x86_64"):
        pytest.skip("needs gcc for x86-64")
    if "Free Software Foundation" not in subprocess.run([gcc, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("needs gcc, and this gcc is another compiler: the bounds are gcc's")
    return gcc


@pytest.fixture(scope="module")
def counts(compiler, tmp_path_factory):
    """Instructions a unit, by case."""
    valgrind, folder = tool("valgrind"), tmp_path_factory.mktemp("instructions")
    if not {"avx2", "fma"} <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip("needs a machine with AVX2 and FMA")
    jobs = [["-O1", str(ROOT / "tests/instructions.c"), "-o", "main.o"]]
    jobs += [[str(ROOT / "kernels/small_network.c"), "-o", "small_network.o"]]
    for stem, real, header in OBJECTS:
        options = [*own_flags(stem), *one_type(real, "x86-64-v3"), "-include", "bessel.h", "-include", f"{header}.h"]
        jobs.insert(0, [*options, str(ROOT / f"kernels/{stem}.c"), "-o", f"{stem}_{real}.o"])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda job: succeed([compiler, *flags(), "-c", *job], folder), reversed(jobs)))
    succeed([compiler, *(job[-1] for job in jobs), "-lm", "-o", "main"], folder)
    command = [valgrind, "--tool=callgrind", "--callgrind-out-file=part", "--dump-before=mark", "./main"]
    lines = [line.split(maxsplit=1) for line in succeed(command, folder).splitlines()]
    counted = {}
    for i, (units, name) in enumerate(lines):
        part = (folder / f"part.{2 * i + 2}").read_text()
        counted[name] = int(re.search(r"^totals: (\d+)$", part, re.M)[1]) / int(units)
    assert set(counted) == set(MOST)
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST)
def test_instructions(counts, name):
    unit, most = MOST[name]
    assert counts[name] <= most, f"{name}: {counts[name]:.2f} instructions a {unit} counted, at most {most} expected"
    assert counts[name] >= 0.6 * most, f"{name}: {counts[name]:.2f} instructions a {unit}: lower the bound of {most}"


def innermost_loop(assembly):
    """The instructions of the longest loop that has no other loop within; `assembly` is what objdump prints of a function."""
    lines = re.findall(r"^ +([0-9a-f]+):\s+(\S+)(.*)$", assembly, re.M)
    addresses = [int(address, 16) for address, _, _ in lines]
    loops = []
    for i, (_, name, operands) in enumerate(lines):
        target = re.match(r"\s+([0-9a-f]+) <", operands)
        if name.startswith("j") and target and int(target[1], 16) in addresses[: i + 1]:
            loops.append((addresses.index(int(target[1], 16)), i + 1))
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    first, end = max(inner, key=lambda loop: loop[1] - loop[0])
    return [name + operands for _, name, operands in lines[first:end]]


def test_avx512_loop(compiler, tmp_path):
    """64 queries as lanes, in vectors of 512 bits; nothing called or gathered, nothing scalar but a component's weight."""
    objdump = tool("objdump")
    (tmp_path / "loop.c").write_text(LOOP)
    succeed([compiler, *flags(), *one_type("f32", "x86-64-v4"), "-c", "loop.c"], tmp_path)
    text = succeed([objdump, "-d", "--no-show-raw-insn", "--disassemble=forward_loop", "loop.o"], tmp_path)
    loop = innermost_loop(text)
    listing = "\n".join(loop)
    assert listing.count("zmm") > 30, f"no AVX-512 in the loop:\n{listing}"
    bad = [line for line in loop if re.match(r"call|v?p?gather", line)]
    assert not bad, f"{bad} in the loop:\n{listing}"
    scalar = [line for line in loop if re.match(r"(?!v?mov|v?broadcast)\w+s[sd]\b", line)]
    assert len(scalar) <= 1, f"{scalar} in the loop:\n{listing}"
    count = len(loop) / 4
    assert count <= MOST_AVX512, f"{count} instructions for 16 pairs, at most {MOST_AVX512} expected:\n{listing}"
