"""The operations of a pickle of map tiles, followed without doing them, for those that take much of little data.

A dictionary's key is hashed through all tuples in it, as often as they are referred to: t = (t, t), sixty times, takes a
century, and a hundred thousand tuples in tuples overflow the C stack. A memo's number asks for a list of that length: nine
bytes for half a gigabyte. No file of tiles has tuples in tuples, long tuples, sets or vast numbers, and its memo counts up.

Cost: 2 us an operation.
"""

import pickletools
from typing import Any

from .errors import DataError

_MOST_ENTRIES = 16
"""Of a tuple; that of a numpy dtype has 8 or 9."""
_MOST_BITS = 8192
"""Of a whole number."""
_NEVER = ("DUP", "FROZENSET", "EMPTY_SET", "ADDITEMS")
_KEEP = ("BUILD", "APPEND", "APPENDS", "SETITEM", "SETITEMS")
"""Operations that leave on the stack what they change, whatever it is."""


def follow(data: bytes) -> None:
    """Follow a pickle to its end.

    Raises:
        DataError: an operation that no file of tiles needs, and which. Any other exception: it is damaged.
    """
    stack: list[bool] = []  # which things are tuples
    marks: list[int] = []  # how many things lie below each mark
    memo: dict[int, bool] = {}
    argument: Any
    for n, (code, argument, _) in enumerate(pickletools.genops(data), 1):
        name = code.name
        if name in _NEVER or (isinstance(argument, int) and argument.bit_length() > _MOST_BITS):
            raise DataError(f"{'a vast number' if isinstance(argument, int) else name}, which it has no use for")
        if name == "MARK":
            marks.append(len(stack))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            place: int = len(memo) if name == "MEMOIZE" else argument
            if place > n:
                raise DataError(f"number {place} in a memo, after {n} operations")
            memo[place] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        else:
            taken = _take(code, stack, marks)
            if name.startswith("TUPLE") and (any(taken) or len(taken) > _MOST_ENTRIES):
                raise DataError("tuples in tuples, or of many things, which it has no use for")
            stack += taken[:1] if name in _KEEP else [made.name == "tuple" for made in code.stack_after]


def _take(code: pickletools.OpcodeInfo, stack: list[bool], marks: list[int]) -> list[bool]:
    """Take off the stack what an operation takes: a number of things, or those down to the last mark."""
    kinds = [kind.name for kind in code.stack_before]
    if "mark" in kinds:
        first = marks.pop() - kinds.index("mark")
    elif code.name == "POP" and marks[-1:] == [len(stack)]:
        first = marks.pop()
    else:
        first = len(stack) - len(kinds)
    if first < (marks[-1] if marks else 0):
        raise ValueError("nothing left on the stack")
    taken = stack[first:]
    del stack[first:]
    return taken
