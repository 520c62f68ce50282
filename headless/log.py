"""Logging of a command: Graft's own messages and the host's warnings, on standard error."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGE = str(Path(__file__).absolute().parent.parent) + os.sep
EMBEDDED = os.path.join(PACKAGE, "comfyui_api_stubs") + os.sep


def _ours(record: logging.LogRecord) -> bool:
    """Whether a record comes from Graft (the embedded host counts as a host, not as Graft)."""
    return record.pathname.startswith(PACKAGE) and not record.pathname.startswith(EMBEDDED)


def _nothing() -> None:
    """Before most messages."""


class _Handler(logging.StreamHandler):
    """Shows warnings and everything that Graft's own files log; with `verbose`, everything."""

    def __init__(self, verbose: bool):
        super().__init__(sys.stderr)
        self.verbose = verbose
        self.before: Callable[[], None] = _nothing
        self.setFormatter(logging.Formatter("%(message)s"))

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
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


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
