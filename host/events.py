"""Progress, interruption and events to the front end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .browser_json import finite

_stoppable: dict[str, list[threading.Event]] = {}  # by run: the training steps that are running now
_stops = 0
MEASURED = ("loss", "rate", "validation", "average_validation", "accuracy")  # what a panel draws of a history


def progress_bar(total: int) -> Callable[[int], None]:
    """The running node's progress bar: call it with how much is done."""
    import comfy.utils

    bar = comfy.utils.ProgressBar(total)
    return lambda done: bar.update_absolute(done, total)


def step_counter(steps: int) -> Callable[[], None]:
    """Returns a function to call after each of `steps` steps: it shows progress and stops when the user asks."""
    bar, step_numbers = progress_bar(steps), iter(range(1, steps + 1))

    def advance() -> None:
        raise_if_interrupted()
        bar(next(step_numbers))

    return advance


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


def prompt_server() -> Any:
    """ComfyUI's PromptServer of this process; None where there is none, as in a command."""
    import server

    return getattr(server.PromptServer, "instance", None)


def send_event(name: str, data: Mapping[str, Any]) -> None:
    """Sends an event to the front end, with null for NaN and infinities. Without a server it does nothing."""
    instance = prompt_server()
    if instance is not None:
        instance.send_sync(name, finite(dict(data)))


def say_on_node(node: str | None, text: str) -> None:
    """Shows a text on a node in the editor while it runs. Without a server it does nothing."""
    instance = prompt_server()
    if instance is not None and node is not None:
        instance.send_progress_text(text, node)


def running_node() -> str | None:
    """The execution id of the node that runs, or None outside of a workflow."""
    from comfy_execution.utils import get_executing_context

    context = get_executing_context()
    return None if context is None else context.node_id


def say_at_node(node: str, text: str) -> None:
    """Says in the box of a node what a later node of the same run has found out about it, until the next run begins.
    Without a server it does nothing.
    """
    from comfy_execution.utils import get_executing_context

    context = get_executing_context()
    send_event("graft.notice", {"node": node, "text": text, "prompt": None if context is None else context.prompt_id})


@contextlib.contextmanager
def allow_stopping(run: str) -> Iterator[Callable[[], bool]]:
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


def stop_run(run: str) -> bool:
    """Asks every running training step of this run to stop. Returns whether there was one."""
    global _stops
    stop_events = list(_stoppable.get(run, ()))
    for stop_event in stop_events:
        stop_event.set()
    _stops += bool(stop_events)
    return bool(stop_events)


def stop_count() -> int:
    """How often a training step was stopped in this process.

    In a node's fingerprint it makes a stopped step continue when it is queued again.
    """
    return _stops


@dataclass
class TrainingCall:
    """A training step that runs, for the pages that open or come back meanwhile.

    `node` is its execution id, `workflow` the id of its workflow (None outside the editor), `key` that of the state it
    leads to, and `start` the digest that its run began from.
    """

    node: str | None
    workflow: str | None
    run: str
    key: str
    start: str
    until: int
    result: str = ""  # the key of the state that it ended with
    history: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in MEASURED})
    latest: dict[str, Any] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def event_fields(self) -> dict[str, Any]:
        """What every event of the call says."""
        return {"node": self.node, "workflow": self.workflow, "run": self.run, "key": self.key, "until": self.until}

    def take_history(self, history: Any) -> None:
        """Takes the history of the state that training goes on from."""
        with self.lock:
            self.history = {name: list(getattr(history, name)) for name in MEASURED}

    def report_step(self, data: Mapping[str, Any]) -> None:
        """Notes a step and sends it to every page as `graft.step`."""
        with self.lock:
            self.history["loss"].append(data["loss"])
            self.history["rate"].append(data["rate"])
            held_out = {"validation": data["validation"], "average_validation": data["average"]}
            held_out["accuracy"] = data.get("accuracy")
            for name, value in held_out.items():
                if value is not None:
                    self.history[name].append((data["step"], value))
            self.latest = dict(data)
        send_event("graft.step", {**self.event_fields, **data})

    def state_so_far(self) -> dict[str, Any]:
        """The newest step with the whole history; its step is that of the last loss."""
        with self.lock:
            history = {name: list(values) for name, values in self.history.items()}
            return {
                **self.event_fields,
                **self.latest,
                "step": len(history["loss"]),
                "start": self.start,
                "history": history,
            }


_calls: list[TrainingCall] = []  # the training steps that run now


@contextlib.contextmanager
def announce_call(call: TrainingCall) -> Iterator[None]:
    """A context in which pages can ask for this training step; its end goes to every page as `graft.end`.

    `ended` is "done", "interrupted" or "error". A page that has not queued the workflow hears of the end by it alone.
    """
    from comfy.model_management import InterruptProcessingException

    ended = "interrupted"
    _calls.append(call)
    try:
        yield
        ended = "done"
    except Exception as error:
        if not isinstance(error, InterruptProcessingException):
            ended = "error"
        raise
    finally:
        _calls.remove(call)
        send_event("graft.end", {**call.event_fields, "ended": ended, "result": call.result})


def running_calls() -> list[TrainingCall]:
    """The training steps that run now."""
    return list(_calls)


def live_state(run: str) -> dict[str, Any]:
    """What the training step of a run that runs now has reached. FileNotFoundError when none does."""
    for call in running_calls():
        if call.run == run:
            return call.state_so_far()
    raise FileNotFoundError(f"no training step of run {run!r} is running")
