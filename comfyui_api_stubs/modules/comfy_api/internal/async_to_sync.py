"""An API of coroutines for callers that cannot await (ComfyUI's comfy_api.internal.async_to_sync)."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from comfy_api.internal.singleton import SingletonMetaclass


def _wait_for(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run a coroutine function to its end in a thread with a loop of its own, and give what it gave; it knows the
    running node as the caller does.
    """
    context = contextvars.copy_context()
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = context.run(asyncio.run, function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  (raised again by the caller's thread)
            outcome["error"] = error

    thread = threading.Thread(target=run, name="async_to_sync")
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


class _Sync:
    """Stands before an object: its coroutine functions wait for their result."""

    _async_class: type

    def __init__(self, *args: Any, **kwargs: Any):
        self._async_instance = self._async_class(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._async_instance, name)
        if inspect.iscoroutinefunction(found):
            return functools.partial(_wait_for, found)
        if isinstance(type(found), SingletonMetaclass):  # an API of its own, such as `execution`
            return create_sync_class(type(found))()
        return found


def create_sync_class(async_class: type, thread_pool_size: int = 10) -> type:
    """A class with the methods of `async_class`, each waiting for its result."""
    return type(f"{async_class.__name__}Sync", (_Sync,), {"_async_class": async_class})
