"""Philox itself: kernels/philox.h compiled alone, against Random123's known answers and against the operators' words."""

import ctypes
import pathlib
import shutil
import subprocess

import pytest
import torch

from mdps import ops
from mdps.ops import _philox

KERNELS = pathlib.Path(__file__).parent.parent / "kernels"
PROGRAM = """
#include "philox.h"
void words(const uint32_t *c, const uint32_t *k, uint32_t *out) {
    Words r = philox(c[0], c[1], c[2], c[3], k[0], k[1]);
    out[0] = r.x; out[1] = r.y; out[2] = r.z; out[3] = r.w;
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


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_known_answers_in_c(tmp_path):
    (tmp_path / "p.c").write_text(PROGRAM)
    library = tmp_path / "p.so"
    subprocess.run(["cc", "-std=gnu11", "-O2", "-shared", "-fPIC", f"-I{KERNELS}", tmp_path / "p.c", "-o", library], check=True)
    words = ctypes.CDLL(str(library)).words
    for counter, key, answer in KNOWN:
        out = (ctypes.c_uint32 * 4)()
        words((ctypes.c_uint32 * 4)(*counter), (ctypes.c_uint32 * 2)(*key), out)
        assert tuple(out) == answer


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
    for kind in range(4):
        for stream in (0, 1, 2**32 - 1):
            seen += _philox.words(seed, 3, stream, kind, blocks).reshape(-1, 4).tolist()
    seen += _philox.words(seed, 3, 0, _philox.KIND_VON_MISES, blocks, 1).reshape(-1, 4).tolist()
    assert len({tuple(s) for s in seen}) == len(seen)
