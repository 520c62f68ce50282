"""The optimizers that Graft knows, by name. To add one, write its record in `kinds` and list it here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .kinds import adacoor, adafactor, adamw, adamw8bit, lion, muon, prodigy, schedulefree, sgd
from .record import OptimizerRecord

_RECORDS: dict[str, OptimizerRecord] = {}


def names() -> tuple[str, ...]:
    """The names of all optimizers, in the order in which a node lists them."""
    return tuple(_RECORDS)


def records() -> tuple[OptimizerRecord, ...]:
    """The records of all optimizers."""
    return tuple(_RECORDS.values())


def element_wise() -> list[str]:
    """The names of the optimizers that move each number of a tensor by itself."""
    return [record.name for record in _RECORDS.values() if record.element_wise]


def is_registered(name: str) -> bool:
    """Whether there is an optimizer of this name."""
    return name in _RECORDS


def get(name: str) -> OptimizerRecord:
    """The record of an optimizer; ValueError with the names that there are where it is unknown."""
    if name not in _RECORDS:
        raise ValueError(unknown(name))
    return _RECORDS[name]


def unknown(name: str) -> str:
    """The error that an optimizer is not registered."""
    return f"optimizer is {name!r}, expected one of {', '.join(_RECORDS)}"


def register(record: OptimizerRecord) -> None:
    """Add an optimizer; ValueError where its name is taken."""
    if record.name in _RECORDS:
        raise ValueError(f"The optimizer {record.name} is registered already.")
    _RECORDS[record.name] = record


def unregister(name: str) -> None:
    """Take an optimizer out again."""
    del _RECORDS[name]


@contextmanager
def registered(record: OptimizerRecord) -> Iterator[None]:
    """For the block there is one more optimizer; for tests."""
    register(record)
    try:
        yield
    finally:
        unregister(record.name)


for _kind in (adamw, adamw8bit, adafactor, lion, prodigy, schedulefree, muon, adacoor, sgd):
    register(_kind.RECORD)
