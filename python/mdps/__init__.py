import torch  # noqa: F401  before _C: the loader takes libtorch.so from it

from mdps import _C

_C.register()
