"""Every test begins with the same state of torch's generator, whichever tests ran before it, and those of the training programs
in a folder of their own: what they write by default, and `demo` removes first, is in `runs`."""

import pytest
import torch


@pytest.fixture(autouse=True)
def torch_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_folder(request):
    if request.path.stem in ("test_training", "test_reproduce", "test_localization_training"):
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))
