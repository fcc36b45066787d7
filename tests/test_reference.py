import os
import subprocess
import sys

import torch
from table import RawCalls

from mdps import ops

SCRIPT = """
import torch
from mdps import ops
assert ops.reference_active()
with ops.reference(False):
    assert not ops.reference_active()
print(ops.normalize_log_weights(torch.zeros(2, 4)).ess.tolist())
"""


def test_environment_variable():
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, "MDPS_REFERENCE": "1"}, capture_output=True, text=True, check=True
    )
    assert out.stdout == "[4.0, 4.0]\n"


def test_context_is_left_as_it_was():
    before = ops.reference_active()
    with ops.reference():
        assert ops.reference_active()
        with ops.reference(False), RawCalls() as raw:
            ops.normalize_log_weights(torch.zeros(2, 4))
        assert raw.calls and ops.reference_active()
    assert ops.reference_active() == before


def test_autocast_leaves_references_exact():
    """As the operators, which compute in the dtype that they are given."""
    g = torch.Generator().manual_seed(0)
    x, particles = torch.randn(2, 5, 3, generator=g), torch.randn(2, 6, 2, generator=g)
    log_weights, pixels = torch.randn(2, 6, generator=g), torch.randn(3, 8, 9, generator=g)
    poses = torch.full((1, 2, 3), 3.3)
    calls = (
        lambda: ops.small_network(x, torch.linspace(-1, 1, 16), (ops.Layer(4, "tanh"),)),
        lambda: ops.transport_resample(particles, log_weights)[0],
        lambda: ops.pose_correlation(pixels[None], pixels[None, :, :3, :3], poses, origin=(1.0, 1.0)),
    )
    with ops.reference():
        for call in calls:
            want = call()
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(call(), want)
