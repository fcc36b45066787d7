"""Files that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """Where to write a file so that there is never half of it, whenever the program is killed; it then gets its name."""
    unfinished = Path(f"{path}.unfinished")
    yield unfinished
    os.replace(unfinished, path)


def write_whole(path: str | Path, text: str) -> None:
    """Write a text so that there is never half of it."""
    with whole(path) as unfinished:
        unfinished.write_text(text)
