"""Steps in a row from one state to the next, with validation, previews, snapshots and watchers; the input state is not
changed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..data.dataset import Dataset
from ..distributed import process_group
from ..distributed.process_group import RankConnectionError, RemoteRankError
from ..objective.denoiser import Denoiser
from ..state import TrainState
from . import out_of_memory
from .step import Diverged, StepResult, Workspace, advance_, validate


class Stopped(RuntimeError):
    """Training ended early; `state` is the last good one that is known."""

    def __init__(self, message: str, state: TrainState) -> None:
        super().__init__(message)
        self.state = state


@dataclass(frozen=True)
class Callbacks:
    """What a caller of `train` is told, and how often. Each callback runs in the training loop and may raise to end it
    (an interruption, a full disk).

    `on_step(step, result, validation)` runs after every step. `save_snapshot(state)` runs every `snapshot_every` steps,
    or when `snapshot_minutes` have passed since the last snapshot (0 is never), and before an exception leaves the
    loop; where ranks shard the trained tensors, each gets its own rows. `save_best(state)` runs when the held-out loss
    is the lowest so far. `preview(denoiser, step, average)` runs every `preview_every` steps with the trained weights
    installed, and again with their average; it must not draw from a global generator. `save_average(state, width,
    lora)` runs every `snapshots` steps of the run's EMASettings, and again when training resumes from such a step; it
    gets a state without tensors, a relative width, and a function that returns that power-function average as a
    LORA_MODEL. `should_stop()` is asked after every step: True ends the loop there.
    """

    on_step: Callable[[int, StepResult, float | None], None] | None = None
    save_snapshot: Callable[[TrainState], None] | None = None
    save_average: Callable[[TrainState, float, Callable[[], dict[str, Tensor]]], None] | None = None
    save_best: Callable[[TrainState], None] | None = None
    preview: Callable[[Denoiser, int, bool], None] | None = None
    should_stop: Callable[[], bool] | None = None
    validate_every: int = 0
    snapshot_every: int = 0
    snapshot_minutes: float = 0.0
    preview_every: int = 0


def train(
    state: TrainState, denoiser: Denoiser, dataset: Dataset, steps: int, callbacks: Callbacks | None = None
) -> TrainState:
    """Trains `steps` steps from `state` and returns the new state; fewer steps when `callbacks.should_stop` says so.

    Equal input gives equal bytes on the CPU, and two calls of a and b steps equal one of a + b. Validation runs at step
    0 and at every multiple of `validate_every`, however the steps are cut into calls. On an exception the state after
    the last whole step goes to `callbacks.save_snapshot` and the exception goes on. A loss that is not finite, and
    memory that runs out, raise Stopped with that state. The global generator, gradients, modes, flags and weights of
    the model are left as they were. Every rank of a group (`process_group.group`) makes this call with the same state;
    what one rank raises, all raise, as RemoteRankError where it was another.
    """
    callbacks = callbacks or Callbacks()
    if steps < 0:
        raise ValueError(f"Training goes forward: steps is {steps}, expected 0 or more.")
    if steps == 0 and not behind(state, dataset, callbacks):
        return state
    until = state.step + steps
    with torch.inference_mode(False):
        with ExitStack() as stack:
            group = process_group.current()
            with group.raise_together():
                work = stack.enter_context(closing(Workspace(state, denoiser, dataset, group)))
                work.loader.until = until
                stack.enter_context(work.installed())
            try:
                _run_(work, until, callbacks)
            except Diverged as error:
                last = work.state() if work.whole else state  # every rank is here
                if callbacks.save_snapshot is not None and work.whole and work.step > state.step:
                    callbacks.save_snapshot(work.state(own=True) if work.placement.is_sharded else last)
                kept = last.step if work.whole else work.kept  # fused_backward had moved some weights already
                advice = f"The state after step {kept} is kept; use a lower learning_rate or a longer warmup."
                raise Stopped(f"{error} {advice}", last) from error
            except (
                BaseException
            ) as error:  # an interruption is no Exception everywhere; it goes on after the state is safe
                if not isinstance(error, (RemoteRankError, RankConnectionError)):
                    with suppress(RankConnectionError):  # what began it counts
                        work.gradients.broadcast_error(error, until)
                short = out_of_memory.exhausted(error)
                if short:
                    work.stepper.drop_gradients()
                    out_of_memory.release(error)
                moved = (
                    work.whole and state.step < work.step and not work.placement.is_sharded
                )  # a state that takes every rank is past
                if moved and (short or (callbacks.save_snapshot is not None and work.step != work.kept)):
                    last = work.state()
                else:
                    last = state
                if callbacks.save_snapshot is not None and moved and work.step != work.kept:
                    work.kept = work.step
                    callbacks.save_snapshot(last)
                if short:
                    raise Stopped(_short_of_memory(work, error), last) from error
                raise
        return work.state()


def behind(state: TrainState, dataset: Dataset, callbacks: Callbacks) -> bool:
    """Whether there is something to do at this very step: a call that ended early may have left a loss unmeasured or
    averages unkept.
    """
    ema = state.start.ema
    averages = ema is not None and ema.snapshots and state.step and state.step % ema.snapshots == 0
    return bool(averages) or (bool(dataset.held_out) and _unmeasured(state, callbacks))


def _unmeasured(state: TrainState, callbacks: Callbacks) -> bool:
    """Whether the held-out loss is due at this step and not there: at the start, or where a call ended
    just before it.
    """
    if not callbacks.validate_every or state.step % callbacks.validate_every:
        return False
    return state.step not in {step for step, _ in state.history.validation}


def _short_of_memory(work: Workspace, error: BaseException) -> str:
    begun, said = work.begun, str(error).splitlines()
    ways = out_of_memory.advice(begun.start.adapter, begun.settings.optimizer, work.denoiser.device)
    if work.kept:
        kept = f"The state after step {work.kept} is kept"
    else:
        kept = "No step was made yet"
    return f"Memory ran out at step {work.step + 1}{f' ({said[0]})' if said else ''}. {kept}. To need less: {ways}."


def _run_(work: Workspace, until: int, callbacks: Callbacks) -> None:
    _offer_averages(work, callbacks)
    if _unmeasured(work.begun, callbacks):
        _validate_(work, callbacks)
    kept_at = time.monotonic()
    while work.step < until:
        begun = time.perf_counter()
        moved = advance_(work)
        moved = replace(moved, seconds=time.perf_counter() - begun)
        work.seconds += moved.seconds
        due = callbacks.validate_every and work.step % callbacks.validate_every == 0
        if due:
            validation = _validate_(work, callbacks)
        else:
            validation = None
        _offer_averages(work, callbacks)
        stopping = work.group.agree_to_stop(callbacks.should_stop is not None and callbacks.should_stop())
        late = bool(callbacks.snapshot_minutes and time.monotonic() - kept_at >= 60 * callbacks.snapshot_minutes)
        if work.placement.is_sharded:
            late = work.group.broadcast_flag(late)
        due = late or (callbacks.snapshot_every and work.step % callbacks.snapshot_every == 0)
        if callbacks.save_snapshot is not None and due and work.step < until and not stopping:
            work.kept = work.step  # before the attempt: a store that fails once is not asked again
            callbacks.save_snapshot(work.state(own=True))
            kept_at = time.monotonic()
        _preview(work, callbacks)
        if callbacks.on_step is not None:
            callbacks.on_step(work.step, moved, validation)
        if stopping:
            break


def _offer_averages(work: Workspace, callbacks: Callbacks) -> None:
    ema = work.begun.start.ema
    if callbacks.save_average is None or ema is None or not ema.snapshots or not work.step or work.step % ema.snapshots:
        return
    for own, shadow in work.powers:
        callbacks.save_average(work.place(), own.widths[0], partial(work.as_lora, shadow))


def _validate_(work: Workspace, callbacks: Callbacks) -> float | None:
    value = validate(work)
    if value is not None:
        earlier = work.best
        work.validation.append((work.step, value))
        if (
            callbacks.save_best is not None
            and work.step
            and math.isfinite(value)
            and (earlier is None or value < earlier[1])
        ):
            callbacks.save_best(work.state())
    return value


@torch.no_grad()
def _preview(work: Workspace, callbacks: Callbacks) -> None:
    """Pictures of the weights as they are and of their average, which is in the weights' place meanwhile."""
    if callbacks.preview is None or not callbacks.preview_every or work.step % callbacks.preview_every:
        return
    with work.stepper.evaluated():
        callbacks.preview(work.denoiser, work.step, False)
    if work.shadow is not None:
        with work.shadow.swapped(work.trained):
            callbacks.preview(work.denoiser, work.step, True)
