"""What threads may do that read batches ahead: read files. Models encode on the thread that trains, which they share
with nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class NeedsEncodingError(Exception):
    """What was read ahead is not in the cache any more: the thread that trains has to encode it."""


class _Thread(threading.local):
    """Of each thread: whether it reads ahead."""

    reads_ahead = False


_THREAD = _Thread()


@contextmanager
def read_ahead() -> Iterator[None]:
    """A context in which this thread encodes nothing."""
    _THREAD.reads_ahead = True
    try:
        yield
    finally:
        _THREAD.reads_ahead = False


def check_may_encode() -> None:
    """Raises NeedsEncodingError on a thread that reads ahead."""
    if _THREAD.reads_ahead:
        raise NeedsEncodingError
