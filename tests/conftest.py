"""Every test begins with the same state of torch's generator, whichever tests ran before it."""

import pytest
import torch


@pytest.fixture(autouse=True)
def torch_seed():
    torch.manual_seed(0)
