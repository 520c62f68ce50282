"""Ctrl-C and termination signals: what they do for the length of a block."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Stopped(KeyboardInterrupt):
    """Asked to stop. Python kills itself at its end when a plain KeyboardInterrupt has passed through an exec(), as of
    a dataclass.
    """


@contextlib.contextmanager
def listening(ask: Callable[[int, Any], None]) -> Iterator[None]:
    """For the block Ctrl-C and a termination signal call `ask`; outside the main thread, which alone may listen,
    nothing changes.
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
    """For the block they raise Stopped, at its end again: an import may have swallowed it."""
    asked = False

    def stop(number: int, frame: Any) -> None:
        nonlocal asked
        asked = True
        raise Stopped

    with listening(stop):
        yield
    if asked:
        raise Stopped
