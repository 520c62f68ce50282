"""Reads small files whole, and refuses those that are too large for what they should be."""

from __future__ import annotations

import os

MB = 1 << 20


def read_bounded(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a file. Raises ValueError when there are more than `most`, OSError as `open` does."""
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it is larger than {most / MB:g} MB, which no such file should be")
    return content
