"""Steps in a row from one state to the next, with validation, snapshots and watchers; the input state is not changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .dataset import Dataset
from .objective import Denoiser
from .state import TrainState
from .step import Diverged, Moved, Workspace, advance_, validate


class Stopped(RuntimeError):
    """Training ended early; `state` is the last good one."""

    def __init__(self, message: str, state: TrainState) -> None:
        super().__init__(message)
        self.state = state


@dataclass(frozen=True)
class Watch:
    """What the caller wants to hear of: each is called from the loop and may raise to end it (an interruption, a full disk).

    `stepped(step, moved, validation)` after every step, `keep(state)` every `snapshot_every` steps and before an exception leaves the loop.
    `average(state, width, lora)` every `snapshots` steps of the run's EMASettings, and again when training goes on from such a step: a
    state without tensors, a relative width, and a callable that gives that power-function average as a LORA_MODEL.
    """

    stepped: Callable[[int, Moved, float | None], None] | None = None
    keep: Callable[[TrainState], None] | None = None
    average: Callable[[TrainState, float, Callable[[], dict[str, Tensor]]], None] | None = None
    validate_every: int = 0
    snapshot_every: int = 0


def train(state: TrainState, denoiser: Denoiser, dataset: Dataset, steps: int, watch: Watch | None = None) -> TrainState:
    """The state `steps` steps further on. Equal input gives equal bytes on the CPU, and two calls of a and b steps are one of a + b.

    Validation runs at step 0 and at every multiple of `validate_every`, whatever the calls. On an exception the state after the last whole
    step goes to `watch.keep` and the exception goes on; a loss that is not finite raises Stopped with that state. The global generator,
    gradients, modes, flags and weights of the model are left as they were.
    """
    watch = watch or Watch()
    if steps < 0:
        raise ValueError(f"Training goes forward: steps is {steps}, expected 0 or more.")
    if steps == 0:
        return state
    with torch.inference_mode(False):
        work = Workspace(state, denoiser, dataset)
        with closing(work), work.installed():
            try:
                _run_(work, state.step + steps, watch)
            except Diverged as error:
                last = work.state()
                if watch.keep is not None and work.step > state.step:
                    watch.keep(last)
                advice = f"The state after step {last.step} is kept; use a lower learning_rate or a longer warmup."
                raise Stopped(f"{error} {advice}", last) from error
            except BaseException:  # an interruption is no Exception everywhere; it goes on after the state is safe
                if watch.keep is not None and work.whole and state.step < work.step != work.kept:
                    watch.keep(work.state())
                raise
        return work.state()


def _run_(work: Workspace, until: int, watch: Watch) -> None:
    _offer_averages(work, watch)
    if watch.validate_every and work.step == 0 and not work.begun.history.validation:
        _validate_(work)
    while work.step < until:
        moved = advance_(work)
        due = watch.validate_every and work.step % watch.validate_every == 0
        validation = _validate_(work) if due else None
        _offer_averages(work, watch)
        if watch.keep is not None and watch.snapshot_every and work.step % watch.snapshot_every == 0 and work.step < until:
            work.kept = work.step  # before the attempt: a store that fails once is not asked again
            watch.keep(work.state())
        if watch.stepped is not None:
            watch.stepped(work.step, moved, validation)


def _offer_averages(work: Workspace, watch: Watch) -> None:
    ema = work.begun.start.ema
    if watch.average is None or ema is None or not ema.snapshots or not work.step or work.step % ema.snapshots:
        return
    for (own, shadow) in work.powers:
        watch.average(work.place(), own.widths[0], partial(work.as_lora, shadow))


def _validate_(work: Workspace) -> float | None:
    value = validate(work)
    if value is not None:
        work.validation.append((work.step, value))
    return value
