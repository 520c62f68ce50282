"""Sets what Ctrl-C and SIGTERM do during a block."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from . import log

INTERRUPTED = 130  # the exit status


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM was received. Not a plain KeyboardInterrupt: Python kills itself at exit if one has passed
    through an exec(), which dataclasses use.
    """


@contextlib.contextmanager
def listening(ask: Callable[[int, Any], None]) -> Iterator[None]:
    """During the block, Ctrl-C and SIGTERM call `ask`. Does nothing outside the main thread, as only that may set
    signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """During the block, Ctrl-C and SIGTERM raise Stopped, and again at its end, as an import may have caught it."""
    asked = False

    def stop(number: int, frame: Any) -> None:
        nonlocal asked
        asked = True
        raise Stopped

    with listening(stop):
        yield
    if asked:
        raise Stopped


def say_stopped() -> int:
    """Say that the command was stopped; returns the exit status."""
    log.say("graft_nodes: stopped", sys.stderr)
    return INTERRUPTED
