"""A call of TrainStep: what is stored already is taken, the rest is trained, results and snapshots are kept on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from . import snapshots
from .dataset import Dataset
from .loop import Stopped, Watch, train
from .objective import Denoiser
from .state import TrainState, advanced, key_of
from .step import Moved
from .store import Store


@dataclass(frozen=True)
class Outcome:
    """Where a call ended and how: the state, its folder if it is stored, how many steps were trained now, and what there is to say."""

    state: TrainState
    folder: Path | None
    trained: int
    seconds: float
    notes: tuple[str, ...] = ()


def run(
    state: TrainState,
    steps: int,
    opened: Callable[[], AbstractContextManager[Denoiser]],
    dataset: Dataset,
    store: Store | None,
    stepped: Callable[[int, Moved, float | None], None] | None = None,
    validate_every: int = 0,
    snapshot_every: int = 0,
) -> Outcome:
    """`steps` further from `state`, from the store as far as it goes. The model is opened only when there is something to train.

    Raises what `stepped` raises (an interruption) and OSError of the store (a full disk); until then whole steps are kept as a snapshot,
    and the same call later goes on from it. Raises Stopped when the loss is not finite.
    """
    if steps == 0:
        return Outcome(state, None, 0, 0.0, ("0 steps: the state is passed on",))
    notes: list[str] = []
    at, folder, old = state, None, None
    target = key_of(state.start.digest, advanced(state.position, state.settings.digest, steps))
    if store is not None:
        found, problems = store.furthest(state, steps)
        notes += [f"not used: {problem}" for problem in problems]
        if found is not None:
            at, folder = found.state, found.folder
            old = found.folder if found.partial else None
            notes.append(_said(found.state.step, state.step + steps, found.partial))
            differing = [f"{name} {value}, now {store.versions.get(name)}" for name, value in sorted(found.versions.items())
                         if store.versions.get(name) != value]  # fmt: skip
            if differing:
                notes.append(f"it was made with {'; '.join(differing)}")
    left = state.step + steps - at.step
    if left == 0 and old is None:
        return Outcome(at, folder, 0, 0.0, tuple(notes))
    begun = time.perf_counter()
    if left:
        try:
            kept, averages = (None, None) if store is None else (partial(_keep, store, target), partial(snapshots.write, store.folder))
            watch = Watch(stepped, kept, averages, validate_every, snapshot_every)
            with opened() as denoiser:
                at = train(at, denoiser, dataset, left, watch)
        except Stopped as error:
            where = ""
            if store is not None and error.state.step > at.step:
                where = f" It is stored in {store.result_folder(target) / 'partial'}."
            raise Stopped(f"{error}{where}", error.state) from error
    seconds = time.perf_counter() - begun
    if store is not None:
        folder = store.save(at)
        store.drop_partial(target)
        if old is not None:
            store.drop_partial(old.parent.name)
    return Outcome(at, folder, left, seconds, tuple(notes))


def _keep(store: Store, target: str, state: TrainState) -> None:
    store.save_partial(state, target)


def _said(found: int, wanted: int, snapshot: bool) -> str:
    if snapshot:
        return f"went on from the snapshot at step {found}"
    return f"stored result of step {found}: " + ("nothing was trained" if found == wanted else "went on from there")
