"""The ledger of a model: who has what on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

from torch import nn

from .handle import Handle

ATTRIBUTE = "_graft_ledger"  # set on a model while anything is on it; two imports of this package share it
Thing = TypeVar("Thing")
About = TypeVar("About")


class Ledger:
    """What is on one model, by its owner, in the order in which it came. A deep copy of the model begins anew."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Any]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        return Ledger()


def owners(model: nn.Module) -> list[str]:
    """Who has something on a model, in the order in which they came."""
    return [owner for owner, _ in _entries(model)]


def open_entry(model: nn.Module, owner: str) -> ExitStack:
    """A context in which an owner has things on a model: enter their handles in it.

    At its end, also after an error on the way, none of them is left.
    """
    stack = ExitStack()
    stack.callback(_leave, model, _enter(model, owner, stack))
    return stack


class Joint(ABC, Generic[Thing, About]):
    """What several owners have on a model together: whenever one comes or leaves, it is computed for all of them.

    A subclass computes, and installs through slots and calls. `attach` and `detach` may come in any order. After the
    last detach the model is as before. If computing fails, everything of all owners is removed and the error is raised.

    - `slots`: what is done to weights, by name; `calls`: what is around modules, by path.
    """

    owner: str  # in the model's ledger

    def __init__(self) -> None:
        self.owners: dict[Hashable, tuple[Thing, ...]] = {}
        self.slots: dict[str, Handle] = {}
        self.calls: dict[str, Handle] = {}

    @property
    def things(self) -> list[Thing]:
        """Everything that is attached, in order; what two owners have is there once."""
        return list(dict.fromkeys(thing for things in self.owners.values() for thing in things))

    def attach(self, model: nn.Module, owner: Hashable, things: Iterable[Thing], about: About) -> None:
        """Put an owner's things on the model, in place of those that it had there."""
        self.owners.pop(owner, None)
        self.owners[owner] = tuple(things)
        self._install(model, about)

    def detach(self, model: nn.Module, owner: Hashable, about: About) -> None:
        """Take an owner's things off; does nothing if it has none here."""
        if self.owners.pop(owner, None) is not None:
            self._install(model, about)

    @abstractmethod
    def install(self, model: nn.Module, things: list[Thing], about: About) -> None:
        """Put on the model what these things are together, in place of what is on it now."""

    def _install(self, model: nn.Module, about: About) -> None:
        things = self.things
        try:
            self.install(model, things, about)
        except BaseException:
            self._clear(model)
            raise
        if not things:
            self._clear(model)

    def _clear(self, model: nn.Module) -> None:
        for handle in (*self.slots.values(), *self.calls.values()):
            handle.leave()
        self.slots, self.calls, self.owners = {}, {}, {}
        _leave(model, (self.owner, self))


def find_joint(model: nn.Module, owner: str) -> Any:
    """The Joint that is on a model under this name; None without one."""
    return next((what for name, what in _entries(model) if name == owner), None)


def enter_joint(model: nn.Module, what: Joint[Any, Any]) -> None:
    """Note that a Joint is on a model; it leaves by itself when its last owner does."""
    _enter(model, what.owner, what)


def _entries(model: nn.Module) -> list[tuple[str, Any]]:
    ledger = model.__dict__.get(ATTRIBUTE)
    if ledger is None:
        return []
    entries: list[tuple[str, Any]] = ledger.entries
    return entries


def _enter(model: nn.Module, owner: str, what: Any) -> tuple[str, Any]:
    entry = owner, what
    model.__dict__.setdefault(ATTRIBUTE, Ledger()).entries.append(entry)
    return entry


def _leave(model: nn.Module, entry: tuple[str, Any]) -> None:
    entries = _entries(model)
    if entry in entries:
        entries.remove(entry)
    if not entries:
        model.__dict__.pop(ATTRIBUTE, None)
