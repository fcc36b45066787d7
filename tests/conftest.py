"""Every test begins with the same state of torch's generator, whichever tests ran before it, and leaves no figure open. Those
of the training programs have a folder of their own: what they write by default, and `demo` removes first, is in `runs`."""

import itertools
import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def torch_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(autouse=True)
def own_folder(request):
    if request.path.stem in ("test_training", "test_reproduce", "test_localization_training"):
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))


@pytest.fixture
def interrupt_at(monkeypatch):
    """A function: training stops, as by Ctrl+C, at the batches of these numbers, counted from 1 since it was called."""
    import staged

    ordinary = staged.StagedModule.training_step

    def interrupt(*numbers):
        seen = itertools.count(1)

        def training_step(self, batches, index):
            if next(seen) in numbers:
                raise KeyboardInterrupt
            return ordinary(self, batches, index)

        monkeypatch.setattr(staged.StagedModule, "training_step", training_step)

    return interrupt
