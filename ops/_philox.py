"""What the random operators share: checks of their arguments and Philox4x32-10 in plain PyTorch (kernels/philox.h)."""

import torch
from torch import Tensor

from . import _arguments as check

KIND_UNIFORM, KIND_NORMAL, KIND_VON_MISES, KIND_SPLIT, KIND_RESAMPLE = range(5)
_MASK = 0xFFFFFFFF


def check_seed(seed: Tensor, batch: tuple[int, ...] | None = None) -> None:
    """A seed is an int64 tensor, () or the shape of the batch."""
    if not isinstance(seed, Tensor):
        raise TypeError(f"seed: expected an int64 tensor (see make_seed), got {type(seed).__name__}")
    if seed.dtype != torch.int64:
        raise TypeError(f"seed: expected dtype int64, got {seed.dtype}")
    if batch is None:
        if seed.dim() > 1:
            raise ValueError(f"seed: expected shape () or (B,), got {tuple(seed.shape)}")
    elif seed.dim() and seed.shape != batch:
        raise ValueError(f"seed: expected shape () or (...) = {tuple(batch)}, got {tuple(seed.shape)}")


def check_stream(stream: int) -> None:
    """A stream is a number of 32 bits."""
    check.whole("stream", stream)
    if not 0 <= stream < 2**32:
        raise ValueError(f"stream: expected 0 to 2**32 - 1, got {stream}")


def check_count(name: str, n: int) -> None:
    """A number of things, such as samples."""
    check.whole(name, n)
    if n < 0 or n >= 2**31 - 1:
        raise ValueError(f"{name}: expected 0 to 2**31 - 2, got {n}")


def philox(x: Tensor, y: Tensor, z: Tensor, w: Tensor, key0: Tensor, key1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds on 32-bit words held in int64, whose products wrap modulo 2^64 as they should."""
    for _ in range(10):
        p, q = 0xD2511F53 * x, 0xCD9E8D57 * z
        x, y, z, w = ((q >> 32) & _MASK) ^ y ^ key0, q & _MASK, ((p >> 32) & _MASK) ^ w ^ key1, p & _MASK
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    return x, y, z, w


def words(seed: Tensor, rows: int, stream: int, kind: int, low: Tensor, high: int = 0) -> Tensor:
    """Blocks (rows, len(low), 4) of random words; low (n,) is counter 0, high the low 24 bits of counter 1."""
    row = torch.arange(rows, device=seed.device) if seed.dim() == 0 else torch.zeros_like(seed)
    key = seed.reshape(-1, 1)
    low = low.reshape(1, -1)
    counter1 = torch.full_like(low, kind << 24 | high)
    counter2 = torch.full_like(low, stream)
    out = philox(low, counter1, counter2, row.reshape(-1, 1), key & _MASK, (key >> 32) & _MASK)
    return torch.stack([o.expand(rows, low.size(1)) for o in out], -1)


def word_rows(seed: Tensor, rows: int, stream: int, kind: int, n: int) -> Tensor:
    """The first n words of each row, (rows, n)."""
    blocks = torch.arange((n + 3) // 4, device=seed.device)
    return words(seed, rows, stream, kind, blocks).flatten(1)[:, :n]


def unit(high: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
    """In [0, 1)."""
    if dtype == torch.float32:
        return (high >> 8).float() * 2.0**-24
    return high.double() * 2.0**-32 + (low >> 11).double() * 2.0**-53


def open_unit(high: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
    """In (0, 1), or (0, 1] where float32 rounds."""
    if dtype == torch.float32:
        return ((high >> 1).float() + 0.5) * 2.0**-31
    return (high >> 1).double() * 2.0**-31 + ((low >> 10).double() + 0.5) * 2.0**-53


def centred_unit(high: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
    """In (-1/2, 1/2); float32 may round to an end."""
    signed = high - ((high >> 31) << 32)
    if dtype == torch.float32:
        return (signed.float() + 0.5) * 2.0**-32
    return signed.double() * 2.0**-32 + ((low >> 11).double() + 0.5) * 2.0**-53
