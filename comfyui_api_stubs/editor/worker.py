"""Runs the queued workflows, one after the other, in its own thread."""

from __future__ import annotations

import gc
import threading
from typing import Any

from ..caching import new_executor
from ..host import Host
from .clients import UNENCODED_PREVIEW_IMAGE

IDLE = 1000.0  # seconds to sleep when the queue is empty; a flag wakes the thread
AGAIN = 0.2  # seconds between two requests to stop, as a workflow that just starts clears an earlier request


class Worker:
    """The thread that runs workflows; call `start` and `stop` once each."""

    def __init__(self, host: Host):
        self.host, self.queue = host, host.server.prompt_queue
        self.thread = threading.Thread(target=self._work, name="workflows", daemon=True)
        self.ending = threading.Event()

    def start(self) -> None:
        """Start the thread, and send the progress of nodes to the clients, with previews unless a workflow asks for
        none.
        """
        import latent_preview

        latent_preview.default_preview_method = latent_preview.LatentPreviewMethod.Auto
        self.host.utils.set_progress_bar_global_hook(self._moved)
        self.host.utils.set_progress_bar_enabled(False)
        self.thread.start()

    def stop(self, timeout: float) -> bool:
        """Interrupt the running workflow and wait up to `timeout` seconds for the thread to end; returns whether it
        did. Waiting workflows do not start.
        """
        self.ending.set()
        remaining = timeout
        while self.thread.is_alive() and remaining > 0:
            self.host.nodes.interrupt_processing(True)
            self.queue.set_flag("ending", True)
            self.thread.join(AGAIN)
            remaining -= AGAIN
        return not self.thread.is_alive()

    def _work(self) -> None:
        executor = new_executor(self.host)
        while not self.ending.is_set():
            entry = self.queue.get(timeout=IDLE)
            self._asked(executor, self.queue.get_flags())  # before workflows that were queued later
            if entry is not None:
                self._execute(executor, *entry)

    def _execute(self, executor: Any, item: tuple, task: int) -> None:
        server, (_, prompt_id, prompt, extra_data, outputs) = self.host.server, item
        if self.ending.is_set():
            return
        try:
            executor.execute(prompt, prompt_id, extra_data, outputs)
        finally:
            if executor.success:
                status_name = "success"
            else:
                status_name = "error"
            status = self.queue.ExecutionStatus(
                status_str=status_name, completed=executor.success, messages=executor.status_messages
            )
            self.queue.task_done(task, executor.history_result, status=status)
            if server.client_id is not None:
                server.send_sync("executing", {"node": None, "prompt_id": prompt_id}, server.client_id)

    def _asked(self, executor: Any, flags: dict[str, Any]) -> None:
        """Unload models and clear results, as POST /free requested."""
        if flags.get("unload_models") or flags.get("free_memory"):
            self.host.management.unload_all_models()
            if flags.get("free_memory"):
                executor.reset()
            gc.collect()
            self.host.management.soft_empty_cache()

    def _moved(
        self, value: float, total: float, preview: Any = None, prompt_id: str | None = None, node_id: str | None = None
    ) -> None:
        """The running node is at `value` of `total`; raises the host's exception if the workflow was interrupted."""
        from comfy_execution.progress import get_progress_state
        from comfy_execution.utils import get_executing_context

        self.host.management.throw_exception_if_processing_interrupted()
        server, context = self.host.server, get_executing_context()
        prompt_id = prompt_id or (context.prompt_id if context else server.last_prompt_id)
        node_id = node_id or (context.node_id if context else server.last_node_id)
        if node_id is None:
            return
        get_progress_state().update_progress(node_id, value, total, preview)
        server.send_sync(
            "progress", {"value": value, "max": total, "prompt_id": prompt_id, "node": node_id}, server.client_id
        )
        flags = server.sockets_metadata.get(server.client_id, {}).get("feature_flags", {})
        if preview is not None and flags.get("supports_preview_metadata") is not True:
            server.send_sync(UNENCODED_PREVIEW_IMAGE, preview, server.client_id)
