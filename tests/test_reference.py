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
