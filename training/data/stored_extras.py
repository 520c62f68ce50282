"""Entries of a conditioning that are read from the cache when they are drawn: those of thousands of images or samples
need no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


class StoredExtras(Mapping[str, Any]):
    """Entries of a conditioning that `read` reads anew each time that they are asked for; `read_extras` reads all of
    them at once.
    """

    def __init__(self, names: Iterable[str], read: Callable[[], Mapping[str, Any]]) -> None:
        self._names, self.read = tuple(names), read

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self.read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_extras(extras: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries, wherever they are."""
    if isinstance(extras, StoredExtras):
        return extras.read()
    return extras
