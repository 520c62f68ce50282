"""Prepares a call's images and watches them while it trains: encodes captions, writes the schedule, checks files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...storage.atomic import make_folders, write_whole
from ..data.changed_files import FileWatcher
from ..data.dataset import Dataset
from ..data.file_names import printable
from ..state import TrainState
from .batch_loader import BatchSchedule, captions_vary
from .loop import Callbacks
from .workspace import HeldOutLoss, StepResult

# How many steps are prepared at a time where each needs something of its own, so that the first one need not wait for
# what the millionth needs.
MOST_STEPS = 1000


def prepares_each_step(dataset: Dataset) -> bool:
    """Whether each step needs something of its own before it: captions that vary, or lines of the schedule."""
    return dataset.write_schedule or captions_vary(dataset)


def prepare_steps(
    state: TrainState,
    steps: int,
    dataset: Dataset,
    folder: Path | None,
    raise_if_interrupted: Callable[[], None] | None = None,
) -> list[str]:
    """Do what has to be done before some steps: encode the captions that they draw, and write the schedule.

    Args:
        state: the run.
        steps: how many steps from `state`.
        dataset: what is trained on.
        folder: where the schedule goes; None writes none.
        raise_if_interrupted: called between captions.

    Returns:
        What there is to say of it.

    Raises:
        ValueError: where their conditionings do not fit into the cache.
        OSError: where the schedule cannot be written.
    """
    schedule, notes = BatchSchedule.from_state(state, dataset), []

    def done(*_: int) -> None:
        if raise_if_interrupted is not None:
            raise_if_interrupted()

    encoded = schedule.prepare(state.step, steps, done)
    if encoded:
        notes.append(f"{encoded} wordings of captions encoded for these steps")
    if dataset.write_schedule and folder is None:
        notes.append("no schedule is written: results that cannot be stored have no folder")
    elif dataset.write_schedule and folder is not None:
        path = folder / f"schedule-{state.step + 1:08d}-{state.step + steps:08d}.txt"
        make_folders(folder)
        write_whole(str(path), (f"{printable(line)}\n".encode() for line in schedule.lines(state.step, steps)))
        notes.append(f"schedule of these steps: {path}")
    return notes


def watch_files(
    callbacks: Callbacks, dataset: Dataset, notes: list[str], say: Callable[[str], object] | None = None
) -> Callbacks:
    """Callbacks that also watch the dataset's files, and report what has changed since it was encoded, now and after
    each step.

    Args:
        callbacks: those to add it to.
        dataset: whose files are watched.
        notes: for the report; grows.
        say: is told of a change at once.

    Raises:
        DatasetChangedError: where a change is to stop the run.
    """
    sources = [*dataset.watched]
    if dataset.regularization is not None:
        sources += dataset.regularization.watched
    watcher = FileWatcher(sources)

    def tell(changes: list[str]) -> None:
        for change in changes:
            notes.append(f"the dataset changed: {change}; training goes on with what was encoded")
            if say is not None:
                say(notes[-1])

    tell(watcher.check_all())

    def stepped(step: int, moved: StepResult, validation: HeldOutLoss | None) -> None:
        tell(watcher.check_next())
        if callbacks.on_step is not None:
            callbacks.on_step(step, moved, validation)

    if sources:
        return replace(callbacks, on_step=stepped)
    return callbacks
