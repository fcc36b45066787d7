"""Loads the compiled half of the package, once, and says what to do where that cannot be."""

from typing import TypedDict

import torch  # before _C: the loader takes libtorch.so from it

if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 10):
    raise ImportError(f"mdps needs torch 2.10 or newer, this is torch {torch.__version__}: pip install 'torch>=2.10'")
try:
    from mdps import _C
except ImportError as error:
    raise ImportError(
        f"mdps has no compiled library for this Python and torch ({error}): reinstall it, in its folder, with pip install ."
    ) from error

_C.register()
__version__: str = _C.build_info()["version"]


class BuildInfo(TypedDict):
    """What `build_info` returns."""

    version: str
    """Of mdps."""
    compiler: str
    """Of the C."""
    python: str
    torch: str
    """That it runs on."""
    cuda: str
    """The version of nvcc; "" without CUDA kernels."""
    cuda_architectures: str
    """That the CUDA kernels were compiled for, as "80-real 90"; "" without."""
    emulated: bool
    """Whether the CUDA kernels run on the CPU, as in a build for the tests."""


def build_info() -> BuildInfo:
    """Return how the compiled library was made."""
    return _C.build_info()
