"""Registries: every list of choices in Graft (optimizers, adapter kinds, model families …), by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar


class Record(Protocol):
    """Anything with a name."""

    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=Record)
T = TypeVar("T")


def no_duplicates(record: Record) -> list[str]:
    """The check of a registry whose records share nothing but their names."""
    return []


class Registry(Generic[R]):
    """Records by name, in the order in which nodes list them and files are compared with them.

    `title` is what a record is in messages ("optimizer"). `duplicates(record)` lists what a new record has in common
    with the registered ones beside its name. With `newest_first`, a record registered later is asked before the others.
    """

    def __init__(
        self,
        title: str,
        records: Sequence[R],
        *,
        duplicates: Callable[[R], list[str]] = no_duplicates,
        newest_first: bool = False,
    ) -> None:
        self.title = title
        self._duplicates = duplicates
        self._newest_first = newest_first
        self._records: dict[str, R] = {}
        self._derived: list[Callable[[], None]] = []
        for record in records:
            self._check_name(record)
            self._records[record.name] = record

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def __iter__(self) -> Iterator[R]:
        return iter(self._records.values())

    def names(self) -> list[str]:
        """All names, in order."""
        return list(self._records)

    def get(self, name: str) -> R:
        """The record with this name. For an unknown name, ValueError that lists the known ones."""
        if name not in self._records:
            raise ValueError(self.unknown(name))
        return self._records[name]

    def unknown(self, name: str) -> str:
        """The error for an unknown name."""
        return f"{self.title} is {name!r}, expected one of {', '.join(self._records)}"

    def register(self, record: R) -> None:
        """Add a record. ValueError when its name, or anything else of it, is taken."""
        self._check_name(record)
        duplicates = self._duplicates(record)
        if duplicates:
            raise ValueError(f"{self.title} {record.name}: already registered: {', '.join(duplicates)}.")
        if self._newest_first:
            self._records = {record.name: record, **self._records}
        else:
            self._records[record.name] = record
        self._forget_derived()

    def unregister(self, name: str) -> None:
        """Remove a record; KeyError where there is none."""
        del self._records[name]
        self._forget_derived()

    @contextmanager
    def registered(self, record: R) -> Iterator[None]:
        """Add a record within the block, for tests."""
        self.register(record)
        try:
            yield
        finally:
            self.unregister(record.name)

    def derived(self, compute: Callable[[], T]) -> Callable[[], T]:
        """Decorator: a table made from the records, made once and again after the records have changed."""
        cached = functools.cache(compute)
        self._derived.append(cached.cache_clear)
        return cached

    def _check_name(self, record: R) -> None:
        if record.name in self._records:
            raise ValueError(f"{self.title} {record.name} is already registered.")

    def _forget_derived(self) -> None:
        for clear in self._derived:
            clear()
