"""The training loop: steps from one state to the next, with validation, previews, snapshots and watchers.

The input state is not changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...patches.core.host_memory import pinned
from ..data.dataset import Dataset
from ..data.epoch_order import batch_sizes
from ..distributed import process_group
from ..distributed.process_group import RankConnectionError, RemoteRankError
from ..objective.denoiser import Denoiser
from ..state import TrainState
from ..tasks.registry import task_of
from . import out_of_memory
from .epoch_settings import EpochSettings
from .step import Diverged, advance_
from .validation import measure
from .workspace import HeldOutLoss, StepResult, Workspace


class Stopped(RuntimeError):
    """Training ended early; `state` is the last good one that is known."""

    def __init__(self, message: str, state: TrainState) -> None:
        super().__init__(message)
        self.state = state


class OutOfMemory(Stopped):
    """Memory ran out; `on_host` says whether that was main memory."""

    def __init__(self, message: str, state: TrainState, on_host: bool) -> None:
        super().__init__(message, state)
        self.on_host = on_host


AtStrength = Callable[[float], AbstractContextManager[None]]


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of the training loop, and how often each is called.

    A callback may raise to end the loop (an interruption, a full disk).

    `on_begin(state)` gets the state that `run` goes on from, which may come from the store. `on_step(step, result,
    validation)` runs after every step. `save_snapshot(state)` runs every `snapshot_every` and every `keep_every` steps,
    or when `snapshot_minutes` have passed since the last snapshot (0 is never), and before an exception leaves the
    loop; where ranks shard the trained tensors, each gets its own rows. `save_best(state)` runs when the held-out loss
    (of the running average, if the run has one) is the lowest so far. `preview(denoiser, step, average, at_strength)`
    runs every `preview_every` steps with the trained weights installed, and again with their average; inside
    `at_strength(strength)` the adapter has that strength. It must not draw from a global generator.
    `save_average(state, width, lora)` runs every `snapshots` steps of the run's EMASettings, and again when training
    resumes from such a step; it gets a state without tensors, a relative width, and a function that returns that
    power-function average as a LORA_MODEL. `should_stop()` is asked after every step: True ends the loop there.
    `is_kept(step)`: whether the state after a step is to stay; `save_snapshot` gets it too.
    `raise_if_interrupted()` is called before every micro-batch and every held-out picture, and may raise: the state
    after the last whole step is kept. `note` gets sentences for the report. `take_wish("save")` and
    `take_wish("sample")` are asked after every step, unless it is None: True saves the state with `save_asked`, or runs
    `preview`, at this step too. `save_memory(state, words)` says that memory ran out, and that training goes on from
    `state` with the saving that `words` name; unless it is None, memory is saved so (`memory_savings.save_more`).
    `epoch_settings` is asked after every step whether training ends there, as it does to take other settings from a
    file.
    """

    on_step: Callable[[int, StepResult, HeldOutLoss | None], None] | None = None
    save_snapshot: Callable[[TrainState], None] | None = None
    save_average: Callable[[TrainState, float, Callable[[], dict[str, Tensor]]], None] | None = None
    save_best: Callable[[TrainState], None] | None = None
    preview: Callable[[Denoiser, int, bool, AtStrength], None] | None = None
    should_stop: Callable[[], bool] | None = None
    raise_if_interrupted: Callable[[], None] | None = None
    on_begin: Callable[[TrainState], None] | None = None
    note: Callable[[str], None] | None = None
    is_kept: Callable[[int], bool] | None = None
    take_wish: Callable[[str], bool] | None = None
    save_asked: Callable[[TrainState], None] | None = None
    save_memory: Callable[[TrainState, str], None] | None = None
    epoch_settings: EpochSettings | None = None
    validate_every: int = 0
    snapshot_every: int = 0
    keep_every: int = 0
    snapshot_minutes: float = 0.0
    preview_every: int = 0

    def keeps_state(self, step: int) -> bool:
        """Whether the state after a step is to stay."""
        return is_due(step, self.keep_every) or (self.is_kept is not None and self.is_kept(step))


def train(
    state: TrainState, denoiser: Denoiser, dataset: Dataset, steps: int, callbacks: Callbacks | None = None
) -> TrainState:
    """Train some steps from a state.

    Equal input gives equal bytes on the CPU, and two calls of a and b steps equal one of a + b. Validation runs at step
    0 and at every multiple of `validate_every`, however the steps are cut into calls. On an exception the state after
    the last whole step goes to `callbacks.save_snapshot` and the exception goes on. The global generator, gradients,
    modes, flags and weights of the model are left as they were. Every rank of a group (`process_group.group`) makes
    this call with the same state; what one rank raises, all raise, as RemoteRankError where it was another.

    Args:
        state: where to begin.
        denoiser: the model, on its device.
        dataset: what to train on.
        steps: how many steps; fewer are made when `callbacks.should_stop` says so.
        callbacks: what is called between steps.

    Returns:
        The state after the steps.

    Raises:
        Stopped: where a loss is not finite or memory runs out, with the last good state.
        ValueError: where settings, model and dataset do not fit each other, or `steps` is below 0.
    """
    callbacks = callbacks or Callbacks()
    if steps < 0:
        raise ValueError(f"Training goes forward: steps is {steps}, expected 0 or more.")
    if steps == 0 and not is_something_due(state, dataset, callbacks):
        return state
    until = state.step + steps
    with torch.inference_mode(False):
        pinned.begin_anew()
        with ExitStack() as stack:
            group = process_group.current()
            with group.raise_together(), advise_while_loading(state, dataset):
                work = Workspace(state, denoiser, dataset, group, callbacks.raise_if_interrupted)
                stack.enter_context(closing(work))
                work.load_until(until)
                stack.enter_context(work.install())
            for note in work.notes:
                if callbacks.note is not None:
                    callbacks.note(note)
            try:
                with _compile(work, callbacks):
                    _train_until(work, until, callbacks)
                if callbacks.note is not None and pinned.note:
                    callbacks.note(pinned.note)
            except Diverged as error:
                raise _stop_diverged(work, error, callbacks) from error
            except BaseException as error:  # an interruption is not an Exception everywhere; it is raised again below
                _tell_other_ranks(work, error, until)
                stopped = _save_after_error(work, error, callbacks)
                if stopped is not None:
                    raise stopped from error
                raise
        return work.state()


@contextmanager
def _compile(work: Workspace, callbacks: Callbacks) -> Iterator[None]:
    """A context for the steps; before them blocks are compiled, if that was asked for."""
    if not work.compiles:
        yield
        return
    from .compiling import CompilationReport

    report = CompilationReport(work)
    report.first_pass()
    yield
    if callbacks.note is not None:
        for line in report.lines():
            callbacks.note(line)


def _stop_diverged(work: Workspace, error: Diverged, callbacks: Callbacks) -> Stopped:
    """Save the state before a step that diverged; the error for the caller. Every rank makes this call."""
    last, kept_step = work.start_state, work.saved_step  # fused_backward may have updated some weights already
    if work.is_consistent:
        last = work.state()
        kept_step = last.step
        if callbacks.save_snapshot is not None and work.step > work.start_state.step:
            if work.placement.is_sharded:
                callbacks.save_snapshot(work.state(own=True))
            else:
                callbacks.save_snapshot(last)
    advice = f"The state after step {kept_step} is kept; use a lower learning rate or more warmup steps."
    return Stopped(f"{error} {advice}", last)


def _tell_other_ranks(work: Workspace, error: BaseException, until: int) -> None:
    """Sends this rank's error to the others, unless it came from one of them."""
    if isinstance(error, (RemoteRankError, RankConnectionError)):
        return
    with suppress(RankConnectionError):  # the first error counts
        work.gradients.broadcast_error(error, until)


def _save_after_error(work: Workspace, error: BaseException, callbacks: Callbacks) -> Stopped | None:
    """Save the state after the last whole step; the error for the caller where memory ran out, else None.

    Ranks that shard the tensors save nothing: it would take all of them.
    """
    is_out_of_memory = out_of_memory.is_out_of_memory(error)
    if is_out_of_memory:
        work.stepper.drop_gradients()
        out_of_memory.release(error)
    last = work.start_state
    has_moved = work.is_usable and last.step < work.step and not work.placement.is_sharded
    save = None
    if work.step != work.saved_step:
        save = callbacks.save_snapshot
    if has_moved and (is_out_of_memory or save is not None):
        last = work.state()
    if has_moved and save is not None:
        work.note_saved()
        save(last)
    if is_out_of_memory:
        return OutOfMemory(_short_of_memory(work, error), last, work.denoiser.device.type == "cpu")
    return None


def is_something_due(state: TrainState, dataset: Dataset, callbacks: Callbacks) -> bool:
    """Whether something is left to do at this very step, from a call that ended early: it may have left a loss
    unmeasured or averages unsaved.

    Args:
        state: where the run is.
        dataset: with the images that are held out.
        callbacks: how often what is called.
    """
    ema = state.start.ema
    if ema is not None and state.step and is_due(state.step, ema.snapshots):
        return True
    return bool(dataset.held_out) and _is_unmeasured(state, callbacks)


def _is_unmeasured(state: TrainState, callbacks: Callbacks) -> bool:
    """Whether the held-out loss is due at this step and not measured yet.

    That is so at the start, or if a call ended just before it.
    """
    if not is_due(state.step, callbacks.validate_every):
        return False
    return state.step not in {step for step, _ in state.history.validation}


def is_due(step: int, every: int) -> bool:
    """Whether an action that runs every `every` steps (0: never) is due after this one."""
    return every > 0 and step % every == 0


def _short_of_memory(work: Workspace, error: BaseException) -> str:
    what = f"Memory ran out at step {work.step + 1}"
    return _advise(work.start_state, work.dataset, work.denoiser.device, what, work.saved_step, error)


def _advise(
    state: TrainState, dataset: Dataset, device: torch.device, what: str, saved_step: int, error: BaseException
) -> str:
    settings = state.settings.optimizer
    largest = batch_sizes(dataset, settings.batch_size)[-1]
    advice = out_of_memory.advice(settings, device, largest, task_of(state).saves_memory(state))
    saved = "No step was made yet"
    if saved_step:
        saved = f"The state after step {saved_step} is kept"
    cause, *_ = [*str(error).splitlines(), ""]
    if cause:
        cause = f" ({cause})"
    return f"{what}{cause}. {saved}. To need less: {advice}."


@contextmanager
def advise_while_loading(state: TrainState, dataset: Dataset) -> Iterator[None]:
    """A context in which memory that runs out raises Stopped with the advice that it gives in a step."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, Stopped) or not out_of_memory.is_out_of_memory(error):
            raise
        out_of_memory.release(error)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        message = _advise(state, dataset, device, "Memory ran out while the model was loaded", state.step, error)
        raise OutOfMemory(message, state, device.type == "cpu") from error


def _train_until(work: Workspace, until: int, callbacks: Callbacks) -> None:
    """Steps up to step `until`, with what is due between them; fewer when the caller asks to stop."""
    _save_averages(work, callbacks)
    if _is_unmeasured(work.start_state, callbacks):
        _validate(work, callbacks)
    saved_at = time.monotonic()
    while work.step < until:
        out_of_memory.begin_peak(work.denoiser.device)
        started = time.perf_counter()
        result = advance_(work)
        work.note_memory()
        result = replace(result, seconds=time.perf_counter() - started)
        work.count_seconds(result.seconds)
        validation = None
        if is_due(work.step, callbacks.validate_every):
            validation = _validate(work, callbacks)
        _save_averages(work, callbacks)
        stopping = work.group.agree_to_stop(callbacks.should_stop is not None and callbacks.should_stop())
        if callbacks.epoch_settings is not None and work.step < until:
            stopping = callbacks.epoch_settings.pauses(work.step) or stopping
        is_late = bool(callbacks.snapshot_minutes and time.monotonic() - saved_at >= 60 * callbacks.snapshot_minutes)
        if work.placement.is_sharded:
            is_late = work.group.broadcast_flag(is_late)  # the first rank's clock counts
        due = is_late or is_due(work.step, callbacks.snapshot_every) or callbacks.keeps_state(work.step)
        if callbacks.save_snapshot is not None and due and work.step < until and not stopping:
            work.note_saved()  # before the attempt: a store that fails once is not asked again
            callbacks.save_snapshot(work.state(own=True))
            saved_at = time.monotonic()
        if callbacks.save_asked is not None and work.step < until and _is_asked(callbacks, "save"):
            callbacks.save_asked(work.state())
        _preview(work, callbacks)
        if callbacks.on_step is not None:
            callbacks.on_step(work.step, result, validation)
        if stopping:
            break


def _is_asked(callbacks: Callbacks, what: str) -> bool:
    return callbacks.take_wish is not None and callbacks.take_wish(what)


def _save_averages(work: Workspace, callbacks: Callbacks) -> None:
    """Passes the power-function averages to the caller at the steps of the run's EMASettings."""
    ema = work.start_state.start.ema
    if callbacks.save_average is None or ema is None or not work.step or not is_due(work.step, ema.snapshots):
        return
    for settings, shadow in work.powers:
        callbacks.save_average(work.position(), settings.widths[0], partial(work.lora_of, shadow))


def _validate(work: Workspace, callbacks: Callbacks) -> HeldOutLoss | None:
    """Measures the held-out loss, and saves the state if it is the lowest so far."""
    loss = measure(work)
    if loss is None:
        return None
    work.note_validation(loss)
    best = work.best
    is_best = best is not None and best[0] == work.step
    if callbacks.save_best is not None and work.step and is_best:
        callbacks.save_best(work.state())
    return loss


@torch.no_grad()
def _preview(work: Workspace, callbacks: Callbacks) -> None:
    """Lets the caller sample with the current weights, then with their average swapped in."""
    if callbacks.preview is None:
        return
    if not (is_due(work.step, callbacks.preview_every) or _is_asked(callbacks, "sample")):
        return
    with work.use_own_weights():
        with work.stepper.use_sampling_weights():
            callbacks.preview(work.denoiser, work.step, False, work.at_strength)
        if work.has_average:
            with work.use_average():
                callbacks.preview(work.denoiser, work.step, True, work.at_strength)
