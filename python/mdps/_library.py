"""Loads the compiled half of the package, once, and says what to do where that cannot be."""

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


def build_info() -> dict[str, str]:
    """Return how the compiled library was made: version, compiler, python, cuda ("" if without), and the torch it runs on."""
    return dict(_C.build_info())
