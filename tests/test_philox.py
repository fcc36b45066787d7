"""Philox itself: kernels/philox.h compiled alone, against Random123's known answers, against the operators' words, and as the
C of the CPU against the C++ of the GPU, which calls cuRAND."""

import ctypes
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch

from mdps import ops
from mdps.ops import _philox

KERNELS = pathlib.Path(__file__).parent.parent / "kernels"
EMULATION = pathlib.Path(__file__).parent / "emulation"
# counter (n, 4), key (n, 2) -> out (n, 4)
PROGRAM = """
#include "philox.h"
#ifdef __cplusplus
extern "C"
#endif
void NAME(int64_t n, const uint32_t *c, const uint32_t *k, uint32_t *out) {
    for (int64_t i = 0; i < n; i++, c += 4, k += 2, out += 4) {
        Words r = philox(c[0], c[1], c[2], c[3], k[0], k[1]);
        out[0] = r.x; out[1] = r.y; out[2] = r.z; out[3] = r.w;
    }
}
"""
# (n, 3): seed, subsequence, offset -> the next four words of that generator
GENERATOR = """
extern "C" void generate(int64_t n, const uint64_t *address, uint32_t *out) {
    for (int64_t i = 0; i < n; i++, address += 3, out += 4) {
        curandStatePhilox4_32_10_t state;
        curand_init(address[0], address[1], address[2], &state);
        uint4 r = curand4(&state);
        out[0] = r.x; out[1] = r.y; out[2] = r.z; out[3] = r.w;
    }
}
"""
# Random123, tests/kat_vectors, philox4x32 10: counter, key, answer.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def pointer(x):
    return ctypes.c_void_p(x.data_ptr())


def random_bits(n, columns, dtype=torch.int32):
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return torch.randint(low, high, (n, columns), generator=torch.Generator().manual_seed(columns), dtype=dtype)


def check_known_answers(words):
    for counter, key, answer in KNOWN:
        out = (ctypes.c_uint32 * 4)()
        words(ctypes.c_int64(1), (ctypes.c_uint32 * 4)(*counter), (ctypes.c_uint32 * 2)(*key), out)
        assert tuple(out) == answer


@pytest.fixture(scope="module")
def words_in_c(tmp_path_factory):
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("c")
    (folder / "p.c").write_text(PROGRAM)
    command = ["cc", "-std=gnu11", "-O2", "-shared", "-fPIC", "-DNAME=words", f"-I{KERNELS}", "p.c", "-o", "p.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "p.so")).words


@pytest.fixture(scope="module")
def curand(tmp_path_factory):
    """philox.h as CUDA sees it, and cuRAND's own generator: the functions for Philox out of a header that needs a toolkit."""
    places = [pathlib.Path(p) / "nvidia" / name / "include" for p in sys.path for name in ("cu13", "curand")]
    places += [pathlib.Path(nvcc).resolve().parents[1] / "include" for nvcc in [shutil.which("nvcc")] if nvcc]
    include = next((p for p in places if (p / "curand_kernel.h").exists()), None)
    if include is None or not shutil.which("g++"):
        pytest.skip("needs g++ and the headers of pip's nvidia-curand")
    text = (include / "curand_kernel.h").read_text()
    functions = re.findall(r"^QUALIFIERS[^;{}]*curandStatePhilox4_32_10_t \*state\)\n\{\n.*?^\}\n", text, re.M | re.S)
    parts = [next(f for f in functions if re.search(rf"\b{name}\(", f.partition("{")[0])) for name in
             ("curand4", "skipahead", "skipahead_sequence", "curand_init")]  # fmt: skip
    folder = tmp_path_factory.mktemp("curand")
    (folder / "p.cpp").write_text(PROGRAM + "#define QUALIFIERS static\n" + "".join(parts) + GENERATOR)
    command = ["g++", "-std=gnu++17", "-O2", "-shared", "-fPIC", "-DNAME=words", f"-I{EMULATION}", f"-I{KERNELS}"]
    subprocess.run([*command, "-isystem", str(include), "p.cpp", "-o", "p.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "p.so"))


def test_known_answers_in_c(words_in_c):
    check_known_answers(words_in_c)


def test_words_of_curand(words_in_c, curand):
    """The words of a GPU are those of the CPU: cuRAND's function, called as the .cu files call it."""
    check_known_answers(curand.words)
    n, results = 20000, []
    counter, key = random_bits(n, 4), random_bits(n, 2)
    for words in (words_in_c, curand.words):
        results.append(torch.zeros(n, 4, dtype=torch.int32))
        words(ctypes.c_int64(n), pointer(counter), pointer(key), pointer(results[-1]))
    assert torch.equal(*results)


def test_layout_of_curand(words_in_c, curand):
    """Word w of curand_init(seed, subsequence, 0) is word w % 4 of the block that philox.h puts at w / 4."""
    n = 5000
    address = random_bits(n, 3, torch.int64)
    address[:1000] = address[:1000] & 0xFFFF
    address[1000:1010, 2] = torch.arange(10)
    got = torch.zeros(n, 4, dtype=torch.int32)
    curand.generate(ctypes.c_int64(n), pointer(address), pointer(got))
    seed, subsequence, offset = address.unbind(1)
    block = (offset >> 2) & (2**62 - 1)
    key, halves = seed.unsqueeze(1).contiguous().view(torch.int32), torch.zeros(2, n, 4, dtype=torch.int32)
    for i in range(2):
        counter = torch.stack([block + i, subsequence], 1).view(torch.int32)
        words_in_c(ctypes.c_int64(n), pointer(counter), pointer(key), pointer(halves[i]))
    want = torch.cat([halves[0], halves[1]], 1).gather(1, (offset % 4).unsqueeze(1) + torch.arange(4))
    assert torch.equal(got, want)


def test_known_answers_in_the_reference():
    for counter, key, answer in KNOWN:
        out = _philox.philox(*(torch.tensor([c]) for c in counter + key))
        assert tuple(int(o) for o in out) == answer


def test_known_answer_through_an_operator():
    """Counter 0 under key 0 is the first block of philox_uniform with seed 0."""
    u = ops.philox_uniform(torch.tensor(0), (1, 4))
    assert [int(x) for x in (u[0] * 2**24).long()] == [w >> 8 for w in KNOWN[0][2]]
    u = ops.philox_uniform(torch.tensor(0), (1, 2), dtype=torch.float64)
    w = KNOWN[0][2]
    assert u[0].tolist() == [((w[0] << 32 | w[1]) >> 11) / 2**53, ((w[2] << 32 | w[3]) >> 11) / 2**53]


def test_operators_streams_and_rows_share_no_word():
    """Every block that the operators and streams of one seed take, in the first 3 rows: all counters differ."""
    seed, blocks, seen = torch.tensor(12345), torch.arange(40), []
    for kind in (v for name, v in vars(_philox).items() if name.startswith("KIND_")):
        for stream in (0, 1, 2**32 - 1):
            seen += _philox.words(seed, 3, stream, kind, blocks).reshape(-1, 4).tolist()
    seen += _philox.words(seed, 3, 0, _philox.KIND_VON_MISES, blocks, 1).reshape(-1, 4).tolist()
    assert len({tuple(s) for s in seen}) == len(seen)
