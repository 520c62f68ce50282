"""Progress, interruption and events to the front end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..storage.printable import logger
from .browser_json import without_nan

log = logger(__name__)

_stops = 0
# What a panel draws of a history, and writes into its table.
MEASURED = ("loss", "rate", "norm", "validation", "average_validation", "accuracy")


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
        instance.send_sync(name, without_nan(dict(data)))


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
    send_event("graft.notice", {"node": node, "text": text, "prompt": running_prompt()})


def stop_run(run: str) -> bool:
    """Asks every running training step of this run to stop. Returns whether there was one.

    The loop asks `should_stop` between steps and ends there as if its last step were done, so that the state is kept
    and passed on. That is not an interruption, which raises and ends the whole workflow.
    """
    global _stops
    calls = [call for call in running_calls() if call.run == run]
    for call in calls:
        call.stopping.set()
    _stops += bool(calls)
    return bool(calls)


def ask_run(run: str, what: str) -> bool:
    """Asks every running training step of this run to "sample" previews or to "save" its state after the step that it
    is at. Returns whether there was one that can.
    """
    calls = [call for call in running_calls() if call.run == run and what in call.can]
    for call in calls:
        with call.lock:
            call.asked.add(what)
    return bool(calls)


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
    prompt: str | None = None  # the id of the execution that it belongs to
    result: str = ""  # the key of the state that it ended with
    trained: int = 0  # steps so far, without those that came from the store
    began: float = field(default_factory=time.monotonic)
    is_first_rank: bool = True  # of a training on several ranks, one tells of its end
    problem: str = ""  # why the owner's webhook was not told of it
    is_paused: bool = False  # nodes of the workflow sample its previews, and it goes on after them
    stopping: threading.Event = field(default_factory=threading.Event)  # set when somebody asked it to stop
    can: tuple[str, ...] = ()  # what else it can be asked for: "sample" (previews now), "save" (its state now)
    asked: set[str] = field(default_factory=set)  # what of that somebody asked for
    history: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in MEASURED})
    latest: dict[str, Any] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def event_fields(self) -> dict[str, Any]:
        """What every event of the call says."""
        named = {"node": self.node, "workflow": self.workflow, "run": self.run, "key": self.key, "until": self.until}
        return {**named, "can": list(self.can)}

    def summary(self, ended: str) -> dict[str, Any]:
        """What is said to somebody who is not at the page: how it ended, where, and how long it took in seconds.

        `ended` is "done", "stopped" (by the button, before the last step), "interrupted" or "failed". `step` is the
        last that it reached, `steps` how many it has trained; the losses are the last that were measured.
        """
        with self.lock:
            step, measured = len(self.history["loss"]), self.history
            if ended == "done" and step < self.until and self.stopping.is_set():
                ended = "stopped"
            return {
                "run": self.run,
                "ended": {"error": "failed"}.get(ended, ended),
                "step": step,
                "until": self.until,
                "steps": self.trained,
                "loss": measured["loss"][-1] if step else None,
                "held_out": measured["validation"][-1][1] if measured["validation"] else None,
                "seconds": round(time.monotonic() - self.began, 1),
            }

    def take_wish(self, what: str) -> bool:
        """Whether somebody has asked for this since it was taken last."""
        with self.lock:
            is_asked = what in self.asked
            self.asked.discard(what)
        return is_asked

    def take_history(self, history: Any) -> None:
        """Takes the history of the state that training goes on from."""
        with self.lock:
            self.history = {name: list(getattr(history, name)) for name in MEASURED}

    def report_step(self, data: Mapping[str, Any]) -> None:
        """Notes a step and sends it to every page as `graft.step`."""
        with self.lock:
            self.trained += 1
            for name in ("loss", "rate", "norm"):
                self.history[name].append(data[name])
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
def announce_call(call: TrainingCall) -> Iterator[Callable[[], bool]]:
    """A context in which pages can ask for this training step and stop it; its end goes to every page as `graft.end`.

    It gives `should_stop()`, which says whether somebody asked for that. `ended` is "done", "interrupted" or "error". A
    page that has not queued the workflow hears of the end by it alone. A call that `is_paused` has not ended: it is
    announced again when it goes on.
    """
    from comfy.model_management import InterruptProcessingException

    ended = "interrupted"
    if not call.is_paused:
        _end_paused(lambda other: other.run == call.run and other.prompt != call.prompt)
        _calls.append(call)
    call.is_paused = False
    try:
        yield call.stopping.is_set
        ended = "done"
    except Exception as error:
        call.is_paused = False
        if not isinstance(error, InterruptProcessingException):
            ended = "error"
        raise
    finally:
        if not call.is_paused:
            _end(call, ended)


def _end(call: TrainingCall, ended: str) -> None:
    """Tells pages and the owner's webhook how a call ended. One that found its result in the store tells no webhook."""
    from . import webhook

    _calls.remove(call)
    summary = call.summary(ended)
    send_event("graft.end", {**call.event_fields, "ended": ended, "result": call.result, "summary": summary})
    if call.is_first_rank and (call.trained or ended == "error"):
        call.problem = webhook.post(summary)
        if call.problem:
            log.warning("Graft: %s", call.problem)


def running_calls() -> list[TrainingCall]:
    """The training steps that run now. One whose execution ended while nodes sampled its previews has ended with it."""
    _end_paused(lambda call: _is_over(call.prompt))
    return list(_calls)


def _end_paused(is_over: Callable[[TrainingCall], bool]) -> None:
    for call in [call for call in _calls if call.is_paused and is_over(call)]:
        _end(call, "interrupted")


def _is_over(prompt: str | None) -> bool:
    """Whether an execution has ended, as far as the queue of the server knows."""
    queue = getattr(prompt_server(), "prompt_queue", None)
    return queue is not None and all(item[1] != prompt for item in list(queue.currently_running.values()))


def running_prompt() -> str | None:
    """The id of the execution that a node runs in; None outside of one."""
    from comfy_execution.utils import get_executing_context

    context = get_executing_context()
    return None if context is None else context.prompt_id


def live_state(run: str) -> dict[str, Any]:
    """What the training step of a run that runs now has reached. FileNotFoundError when none does."""
    for call in running_calls():
        if call.run == run:
            return call.state_so_far()
    raise FileNotFoundError(f"no training step of run {run!r} is running")
