"""Trains the experts of a pair in turn: some steps of one, then as many of the other, so that only one model is on the
device at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from ..state import TrainState
from .call import Call, Outcome

Preview = Callable[[Sequence[TrainState], int], None]


def train_in_turn(
    calls: Sequence[Call], every: int, preview: Preview | None = None, preview_every: int = 0
) -> list[Outcome]:
    """Make calls of Train Step together, each from its own state and to its own store. The bytes are those of the calls
    made one by one.

    What ends one call ends all: the whole steps of each are kept as a snapshot.

    Args:
        calls: one for each expert.
        every: how many steps of each at a time; 0 is all steps at once.
        preview: runs with the states and the step when all are that far and no model is loaded for training.
        preview_every: how often, in steps of the first call; 0 is never.

    Returns:
        How each call ended.
    """
    for call in calls:
        call.begin()
    try:
        _take_turns(calls, every, preview, preview_every)
    except BaseException:
        for call in calls:
            with suppress(OSError):  # a full disk: the first error counts
                call.save_snapshot()
        raise
    for call in calls:
        if not call.is_stored:
            call.save()
    return [call.finish() for call in calls]


def _take_turns(calls: Sequence[Call], every: int, preview: Preview | None, preview_every: int) -> None:
    first = calls[0]
    start, step = first.state.step, first.state.step
    while step < first.until:
        step = min([first.until, *(next_multiple(step, interval) for interval in (every, preview_every) if interval)])
        before = [call.at.step for call in calls]
        for call in calls:
            goal = call.state.step + step - start
            _take_turn(call, goal)
            if call.at.step < goal or (call.callbacks.should_stop is not None and call.callbacks.should_stop()):
                return
        has_trained = before != [call.at.step for call in calls]
        if preview is not None and preview_every and step % preview_every == 0 and has_trained:
            preview([call.at for call in calls], step)


def next_multiple(step: int, interval: int) -> int:
    """The first multiple of an interval after a step."""
    return step - step % interval + interval


def _take_turn(call: Call, goal: int) -> None:
    """Train one expert up to a step, with the snapshot that is due there."""
    if call.is_stored or (call.at.step >= goal and goal < call.until):
        return
    call.train_to(goal)
    if call.at.step == goal and goal < call.until:
        call.save_snapshot_if_due()
