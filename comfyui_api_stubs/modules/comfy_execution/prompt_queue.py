"""Workflows that wait, run and have run (ComfyUI's execution.PromptQueue); safe to use from any thread."""

from __future__ import annotations

import bisect
import copy
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

MAXIMUM_HISTORY_SIZE = 10000


class ExecutionStatus(NamedTuple):
    """How a workflow ended: "success" or "error", whether all of it ran, and the events that were sent."""

    status_str: str
    completed: bool
    messages: list


class PromptQueue:
    """Items are tuples (number, prompt id, prompt, extra data, outputs to execute); the lowest number is next, equal ones in order."""

    ExecutionStatus = ExecutionStatus

    def __init__(self, server: Any):
        self.server = server
        self.mutex = threading.RLock()
        self.not_empty = threading.Condition(self.mutex)
        self.task_counter = 0
        self.queue: list[tuple] = []
        self.currently_running: dict[int, tuple] = {}
        self.history: dict[str, dict] = {}
        self.flags: dict[str, Any] = {}

    def put(self, item: tuple) -> None:
        """Add a workflow."""
        with self.mutex:
            bisect.insort(self.queue, item, key=lambda waiting: waiting[0])
            self.server.queue_updated()
            self.not_empty.notify()

    def get(self, timeout: float | None = None) -> tuple[tuple, int] | None:
        """(the next workflow, its number as a task), waiting for one; None when none came within `timeout` seconds or a flag was set."""
        with self.not_empty:
            while not self.queue:
                self.not_empty.wait(timeout=timeout)
                if timeout is not None and not self.queue:
                    return None
            item, task = self.queue.pop(0), self.task_counter
            self.task_counter += 1
            self.currently_running[task] = copy.deepcopy(item)
            self.server.queue_updated()
            return item, task

    def task_done(
        self, item_id: int, history_result: dict, status: ExecutionStatus | None, process_item: Callable[[tuple], tuple] | None = None,
    ) -> None:
        """Move a running workflow into the history, with what it gave."""
        with self.mutex:
            prompt = self.currently_running.pop(item_id)
            while len(self.history) >= MAXIMUM_HISTORY_SIZE:
                self.history.pop(next(iter(self.history)))
            kept = process_item(prompt) if process_item is not None else prompt
            described = None if status is None else copy.deepcopy(status._asdict())
            self.history[kept[1]] = {"prompt": kept, "outputs": {}, "status": described, **history_result}
            self.server.queue_updated()

    def get_current_queue(self) -> tuple[list[tuple], list[tuple]]:
        """(running, waiting), copied."""
        with self.mutex:
            return list(self.currently_running.values()), copy.deepcopy(self.queue)

    def get_current_queue_volatile(self) -> tuple[list[tuple], list[tuple]]:
        """(running, waiting); the items themselves are shared and must not be changed."""
        with self.mutex:
            return list(self.currently_running.values()), list(self.queue)

    def interrupt_if_running(self, prompt_id: str) -> bool:
        """Interrupt this workflow if it is the one that runs; whether it was."""
        import comfy.model_management

        with self.mutex:
            running = any(item[1] == prompt_id for item in self.currently_running.values())
            if running:
                comfy.model_management.interrupt_current_processing(True)
            return running

    def get_tasks_remaining(self) -> int:
        """How many wait or run."""
        with self.mutex:
            return len(self.queue) + len(self.currently_running)

    def wipe_queue(self) -> None:
        """Forget everything that waits."""
        with self.mutex:
            self.queue = []
            self.server.queue_updated()

    def delete_queue_item(self, function: Callable[[tuple], bool]) -> bool:
        """Forget the first waiting workflow for which `function` is true; whether there was one."""
        with self.mutex:
            for index, item in enumerate(self.queue):
                if function(item):
                    del self.queue[index]
                    self.server.queue_updated()
                    return True
        return False

    def get_history(
        self, prompt_id: str | None = None, max_items: int | None = None, offset: int = -1,
        map_function: Callable[[dict], dict] | None = None,
    ) -> dict[str, dict]:
        """What has run, oldest first: all, one by its id, or at most `max_items` from `offset` on (a negative one: the latest)."""
        with self.mutex:
            if prompt_id is not None:
                chosen = [prompt_id] if prompt_id in self.history else []
            else:
                known = list(self.history)
                start = max(0, len(known) - max_items) if offset < 0 and max_items is not None else max(0, offset)
                chosen = known[start:] if max_items is None else known[start:start + max_items]
            entries = {key: self.history[key] for key in chosen}
            if map_function is not None:
                return {key: map_function(entry) for key, entry in entries.items()}
            return copy.deepcopy(entries) if prompt_id is not None else entries

    def wipe_history(self) -> None:
        """Forget everything that has run."""
        with self.mutex:
            self.history = {}

    def delete_history_item(self, id_to_delete: str) -> None:
        """Forget one workflow that has run."""
        with self.mutex:
            self.history.pop(id_to_delete, None)

    def set_flag(self, name: str, data: Any) -> None:
        """Ask something of whoever executes the workflows; it is woken."""
        with self.mutex:
            self.flags[name] = data
            self.not_empty.notify()

    def get_flags(self, reset: bool = True) -> dict[str, Any]:
        """What was asked, and by default forget it."""
        with self.mutex:
            asked = dict(self.flags)
            if reset:
                self.flags = {}
            return asked
