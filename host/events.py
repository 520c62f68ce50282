"""Progress, interruption and events to the front end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .browser_json import finite

_stoppable: dict[str, list[threading.Event]] = {}  # by run: the training steps that go on now
_stops = 0


def progress(total: int) -> Callable[[int], None]:
    """A progress bar of the node that runs now: call it with how much is done."""
    import comfy.utils

    bar = comfy.utils.ProgressBar(total)
    return lambda done: bar.update_absolute(done, total)


def raise_if_interrupted() -> None:
    """Raise the host's own exception when the user has asked to stop."""
    import comfy.model_management

    comfy.model_management.throw_exception_if_processing_interrupted()


def interrupt_as(kind: str) -> None:
    """Raise the host's own interruption when what ended another process, by its exception's class, was one."""
    import comfy.model_management as management

    if kind in (management.InterruptProcessingException.__name__, KeyboardInterrupt.__name__):
        management.interrupt_current_processing(True)
        management.throw_exception_if_processing_interrupted()


def send_event(name: str, data: Mapping[str, Any]) -> None:
    """Send an event to the front end, NaN and infinities as null; a host without a server has nobody to send it to."""
    import server

    instance = getattr(server.PromptServer, "instance", None)
    if instance is not None:
        instance.send_sync(name, finite(dict(data)))


@contextlib.contextmanager
def stoppable(run: str) -> Iterator[Callable[[], bool]]:
    """Within it a training step of this run can be stopped from outside: it gives `should_stop()`, which says whether
    that was asked.

    The loop calls `should_stop` between steps and ends there as if its last step were done, so that the state is kept
    and passed on: that is not an interruption, which raises and ends the whole workflow. Steps of several workflows may
    be within it at once.
    """
    stop_event = threading.Event()
    _stoppable.setdefault(run, []).append(stop_event)
    try:
        yield stop_event.is_set
    finally:
        _stoppable[run].remove(stop_event)
        if not _stoppable[run]:
            del _stoppable[run]


def stop(run: str) -> bool:
    """Ask every training step of this run that goes on now to stop; whether there was one."""
    global _stops
    stop_events = list(_stoppable.get(run, ()))
    for stop_event in stop_events:
        stop_event.set()
    _stops += bool(stop_events)
    return bool(stop_events)


def stops() -> int:
    """How often a step was stopped in this process. As part of a node's fingerprint it has a stopped step go on when it
    is queued again.
    """
    return _stops
