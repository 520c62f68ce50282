"""Registries: the choices of one setting (optimizers, losses, loss weightings, timestep samplings), by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar


class Record(Protocol):
    """Anything with a name."""

    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=Record)


class Registry(Generic[R]):
    """Records by name. `setting` is the setting that selects one of them."""

    def __init__(self, setting: str, records: Sequence[R]) -> None:
        self.setting = setting
        self._records: dict[str, R] = {}
        for record in records:
            self.register(record)

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def __iter__(self) -> Iterator[R]:
        return iter(self._records.values())

    def names(self) -> list[str]:
        """All names, in the order in which a node lists them."""
        return list(self._records)

    def get(self, name: str) -> R:
        """The record with this name. For an unknown name, ValueError that lists the known ones."""
        if name not in self._records:
            raise ValueError(self.unknown(name))
        return self._records[name]

    def unknown(self, name: str) -> str:
        """The error for an unknown name."""
        return f"{self.setting} is {name!r}, expected one of {', '.join(self._records)}"

    def register(self, record: R) -> None:
        """Adds a record. ValueError when its name is taken."""
        if record.name in self._records:
            raise ValueError(f"{self.setting} {record.name} is registered already.")
        self._records[record.name] = record

    def unregister(self, name: str) -> None:
        """Remove a record."""
        del self._records[name]

    @contextmanager
    def registered(self, record: R) -> Iterator[None]:
        """Adds a record inside the block, for tests."""
        self.register(record)
        try:
            yield
        finally:
            self.unregister(record.name)
