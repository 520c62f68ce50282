"""Progress, interruption and events to the front end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .browser_json import finite

_stoppable: dict[str, list[threading.Event]] = {}  # by run: the training steps that are running now
_stops = 0


def progress(total: int) -> Callable[[int], None]:
    """The running node's progress bar: call it with how much is done."""
    import comfy.utils

    bar = comfy.utils.ProgressBar(total)
    return lambda done: bar.update_absolute(done, total)


def raise_if_interrupted() -> None:
    """Raise the host's own exception when the user has asked to stop."""
    import comfy.model_management

    comfy.model_management.throw_exception_if_processing_interrupted()


def interrupt_as(kind: str) -> None:
    """Raises ComfyUI's interruption when that exception class, which ended another process, was one."""
    import comfy.model_management as management

    if kind in (management.InterruptProcessingException.__name__, KeyboardInterrupt.__name__):
        management.interrupt_current_processing(True)
        management.throw_exception_if_processing_interrupted()


def send_event(name: str, data: Mapping[str, Any]) -> None:
    """Sends an event to the front end, with null for NaN and infinities. Without a server it does nothing."""
    import server

    instance = getattr(server.PromptServer, "instance", None)
    if instance is not None:
        instance.send_sync(name, finite(dict(data)))


def say_on_node(node: str | None, text: str) -> None:
    """Shows a text on a node in the editor while it runs. Without a server it does nothing."""
    import server

    instance = getattr(server.PromptServer, "instance", None)
    if instance is not None and node is not None:
        instance.send_progress_text(text, node)


@contextlib.contextmanager
def stoppable(run: str) -> Iterator[Callable[[], bool]]:
    """A context in which a training step of this run can be stopped from outside.

    It gives `should_stop()`, which says whether somebody asked for that. The loop calls `should_stop` between steps and
    ends there as if its last step were done, so that the state is kept and passed on. That is not an interruption,
    which raises and ends the whole workflow. Steps of several workflows may be in it at once.
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
    """Asks every running training step of this run to stop. Returns whether there was one."""
    global _stops
    stop_events = list(_stoppable.get(run, ()))
    for stop_event in stop_events:
        stop_event.set()
    _stops += bool(stop_events)
    return bool(stop_events)


def stops() -> int:
    """How often a training step was stopped in this process.

    In a node's fingerprint it makes a stopped step continue when it is queued again.
    """
    return _stops
