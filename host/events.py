"""Progress, interruption and events to the front end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def progress(total: int) -> Callable[[int], None]:
    """A progress bar of the node that runs now: call it with how much is done."""
    import comfy.utils

    bar = comfy.utils.ProgressBar(total)
    return lambda done: bar.update_absolute(done, total)


def raise_if_interrupted() -> None:
    """Raise the host's own exception when the user has asked to stop."""
    import comfy.model_management

    comfy.model_management.throw_exception_if_processing_interrupted()


def send_event(name: str, data: Mapping[str, Any]) -> None:
    """Send an event to the front end; a host without a server has nobody to send it to."""
    import server

    instance = getattr(server.PromptServer, "instance", None)
    if instance is not None:
        instance.send_sync(name, dict(data))
