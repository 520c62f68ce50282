"""A call of TrainStep: what is stored already is taken, the rest is trained, results and snapshots are kept on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from . import ahead, snapshots
from .dataset import Dataset
from .lock import alone
from .loop import Stopped, Watch, train
from .objective import Denoiser
from .state import TrainState, advanced, key_of
from .store import KEEPS, Store, Used


@dataclass(frozen=True)
class Outcome:
    """Where a call ended and how: the state, its folder if it is stored, how many steps were trained now, and what there is to say."""

    state: TrainState
    folder: Path | None
    trained: int
    seconds: float
    notes: tuple[str, ...] = ()
    best: Path | None = None  # where the state with the lowest held-out loss is kept
    used: Used | None = None  # of the disk


def run(
    state: TrainState,
    steps: int,
    opened: Callable[[], AbstractContextManager[Denoiser]],
    dataset: Dataset,
    store: Store | None,
    watch: Watch | None = None,
    keep: str = "last",
    say: Callable[[str], object] | None = None,
) -> Outcome:
    """`steps` further from `state`, from the store as far as it goes. The model is opened only when there is something to train.

    Of `watch` the caller sets what is called and how often; what keeps states is added here. `keep` says which are kept beside the last:
    `best` also the one with the lowest held-out loss, `every` that and every snapshot.
    `say` hears at once what the report says in the end: that a file of the dataset has changed.
    Raises what `watch.stepped` raises (an interruption) and OSError of the store (a full disk); until then whole steps are kept as a
    snapshot, and the same call later goes on from it. Raises Stopped when the loss is not finite or memory runs out, Busy when another
    process works on the same run.
    """
    if keep not in KEEPS:
        raise ValueError(f"keep is {keep!r}, expected one of {', '.join(KEEPS)}.")
    if steps == 0:
        return Outcome(state, None, 0, 0.0, ("0 steps: the state is passed on",))
    with nullcontext("") if store is None else alone(store.folder) as warning:
        return _run(state, steps, opened, dataset, store, watch, keep, say, [warning] if warning else [])


def _run(
    state: TrainState,
    steps: int,
    opened: Callable[[], AbstractContextManager[Denoiser]],
    dataset: Dataset,
    store: Store | None,
    watch: Watch | None,
    keep: str,
    say: Callable[[str], object] | None,
    notes: list[str],
) -> Outcome:
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
            store.prune(at, state.step)  # what a run that was killed left behind
            if differing:
                notes.append(f"it was made with {'; '.join(differing)}")
    left = state.step + steps - at.step
    if left == 0 and old is None:
        if store is not None and folder is not None:
            store.promote(folder)
            store.drop_partial(target)
        return _outcome(store, at, folder, 0, 0.0, notes)
    if store is not None and left == 0:
        snapshots.complete(store.folder, at)
    began, begun = at.step, time.perf_counter()
    if left:
        try:
            watch = ahead.watching(watch or Watch(), dataset, notes, say)
            notes += ahead.ready(at, left, dataset, None if store is None else store.folder)
            with opened() as denoiser:
                at = train(at, denoiser, dataset, left, _keeping(watch, store, state, target, keep))
        except Stopped as error:
            places = [] if store is None else [store.result_folder(target) / "partial", store.result_folder(error.state.key)]
            where = next((f" It is stored in {place}." for place in places if (place / "state.json").is_file()), "")
            raise Stopped(f"{error}{where}", error.state) from error
    seconds = time.perf_counter() - begun
    if at.step < state.step + steps:
        notes.append(f"stopped at step {at.step} as asked, {state.step + steps - at.step} steps early; the state so far is passed on")
    if store is not None:
        folder = store.save(at)
        store.drop_partial(target)
        if old is not None:
            store.drop_partial(old.parent.name)
    return _outcome(store, at, folder, at.step - began, seconds, notes)


def _outcome(store: Store | None, at: TrainState, folder: Path | None, trained: int, seconds: float, notes: list[str]) -> Outcome:
    best, used = (None, None) if store is None else (store.best(at), store.used())
    removed = () if store is None else tuple(store.removed)
    return Outcome(at, folder, trained, seconds, (*notes, *removed), best, used)


def _keeping(watch: Watch, store: Store | None, before: TrainState, target: str, keep: str) -> Watch:
    """`watch` with what keeps states: snapshots, the best so far, and averages."""
    if store is None:
        return watch

    def snapshot(state: TrainState) -> None:
        if keep == "every" and not (watch.snapshot_every and state.step % watch.snapshot_every):
            store.save(state, "snapshot")
        else:
            store.save_partial(state, target)

    def best(state: TrainState) -> None:
        store.save_best(state, before.step)

    averages = partial(snapshots.write, store.folder)
    return replace(watch, keep=snapshot, best=best if keep != "last" else None, average=averages)


def _said(found: int, wanted: int, snapshot: bool) -> str:
    if snapshot:
        return f"went on from the snapshot at step {found}"
    return f"stored result of step {found}: " + ("nothing was trained" if found == wanted else "went on from there")
