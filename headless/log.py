"""What a command says: its own lines, Graft's own messages and the host's warnings, all of them printable."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from ..storage.printable import make_printable

PACKAGE = str(Path(__file__).absolute().parent.parent) + os.sep
EMBEDDED = os.path.join(PACKAGE, "comfyui_api_stubs") + os.sep


def _ours(record: logging.LogRecord) -> bool:
    """Whether a record comes from Graft (the embedded host counts as a host, not as Graft)."""
    return record.pathname.startswith(PACKAGE) and not record.pathname.startswith(EMBEDDED)


def _nothing() -> None:
    """Before most messages."""


class _Printable(logging.Formatter):
    """A host's messages hold what strangers' files name, as Graft's do."""

    def format(self, record: logging.LogRecord) -> str:
        return make_printable(super().format(record))


class _Handler(logging.StreamHandler):
    """Shows warnings and everything that Graft's own files log; with `verbose`, everything."""

    def __init__(self, verbose: bool):
        super().__init__(sys.stderr)
        self.verbose = verbose
        self.before: Callable[[], None] = _nothing
        self.setFormatter(_Printable("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.before()
        super().emit(record)

    def filter(self, record: logging.LogRecord) -> bool:
        visible = record.levelno >= logging.WARNING or _ours(record)
        return self.verbose or (visible and bool(super().filter(record)))


@contextlib.contextmanager
def shown(verbose: bool) -> Iterator[None]:
    """Log to standard error during the block."""
    root, handler = logging.getLogger(), _Handler(verbose)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        with _any_text(sys.stdout), _any_text(sys.stderr):
            yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


@contextlib.contextmanager
def _any_text(stream: TextIO) -> Iterator[None]:
    """During the block, what a stream's encoding lacks is written as an escape: a node that prints its title must not
    fail for where the output goes.
    """
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    before = stream.errors
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        stream.reconfigure(errors=before)


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print a line, by default on standard output."""
    write(make_printable(text) + "\n", stream)


def write(text: str, stream: TextIO | None = None) -> None:
    """Write a text as it is: JSON, or what is drawn on a terminal and printable already."""
    print(text, end="", file=stream or sys.stdout, flush=True)


@contextlib.contextmanager
def quiet(module: str | None = None) -> Iterator[None]:
    """Hide the host's log, or that of one of its modules, while Graft reports the same; --verbose still shows it."""

    def keep(record: logging.LogRecord) -> bool:
        return _ours(record) or (module is not None and record.module != module)

    handlers = _handlers()
    for handler in handlers:
        handler.addFilter(keep)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(keep)


@contextlib.contextmanager
def preceded_by(call: Callable[[], None]) -> Iterator[None]:
    """Make a call before each message that is shown during the block."""
    handlers = _handlers()
    for handler in handlers:
        handler.before = call
    try:
        yield
    finally:
        for handler in handlers:
            handler.before = _nothing


def _handlers() -> list[_Handler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, _Handler)]
