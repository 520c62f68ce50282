"""A call of TrainStep: what is stored already is taken, the rest is trained, results and snapshots are kept
on the way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ...storage.lock import folder_lock
from ..averages import snapshots
from ..data.dataset import Dataset
from ..distributed import process_group
from ..distributed.placement import RowSharded, placement_for
from ..distributed.process_group import SingleProcess
from ..objective.denoiser import Denoiser
from ..state import TrainState, advance_position, state_key
from ..store.store import GROUPS, KEEPS, DiskUse, Store, history_of, record_of, restored, tail_of
from . import prepare
from .loop import Callbacks, Stopped, behind, train


@dataclass(frozen=True)
class Outcome:
    """Where a call ended and how: the state, its folder if it is stored, how many steps were trained now, and what
    there is to say.
    """

    state: TrainState
    folder: Path | None
    trained: int
    seconds: float
    notes: tuple[str, ...] = ()
    best: Path | None = None  # where the state with the lowest held-out loss is kept
    used: DiskUse | None = None  # of the disk


def run(
    state: TrainState,
    steps: int,
    opened: Callable[[], AbstractContextManager[Denoiser]],
    dataset: Dataset,
    store: Store | None,
    callbacks: Callbacks | None = None,
    keep: str = "last",
    say: Callable[[str], object] | None = None,
) -> Outcome:
    """Trains `steps` further from `state`, and takes from the store what is there already. The model is loaded only
    when there is something to train.

    The caller sets `callbacks` without those that save states; they are added here. `keep` says which states are kept
    beside the last: `best` also the one with the lowest held-out loss, `every` that and every snapshot. `say` is told
    at once that a file of the dataset has changed; the report repeats it. Raises what `callbacks.on_step` raises (an
    interruption) and OSError of the store (a full disk); the whole steps so far are then kept as a snapshot, and the
    same call later resumes from it. Raises Stopped when the loss is not finite or memory runs out, FolderInUse when
    another process works on the same run. Every rank of a group makes this call; only the first has the store, shows,
    validates and saves.
    """
    if keep not in KEEPS:
        raise ValueError(f"keep is {keep!r}, expected one of {', '.join(KEEPS)}.")
    if steps == 0:
        return Outcome(state, None, 0, 0.0, ("0 steps: the state is passed on",))
    group, callbacks = process_group.current(), callbacks or Callbacks()
    if placement_for(state, group).is_sharded:
        callbacks = replace(callbacks, save_snapshot=_together(group, state, steps, store))
    if not group.is_main_process:
        store, callbacks, say = None, _of_others(group, state, callbacks, keep), None
    group.begin_call()
    with ExitStack() as stack:
        with group.raise_together():
            if group.shard and callbacks.preview_every:
                raise ValueError(
                    "TrainStep: previews sample on one rank, and --shard divides the model among all: set preview_every"
                    " to 0."
                )
            if placement_for(state, group).is_sharded and keep == "every":
                raise ValueError(
                    "TrainStep: with --shard and kind full, snapshots are the ranks' own: set keep to best or last."
                )
            warning = stack.enter_context(nullcontext("") if store is None else folder_lock(store.folder))
        return _run(group, state, steps, opened, dataset, store, callbacks, keep, say, [warning] if warning else [])


def _run(
    group: SingleProcess,
    state: TrainState,
    steps: int,
    opened: Callable[[], AbstractContextManager[Denoiser]],
    dataset: Dataset,
    store: Store | None,
    callbacks: Callbacks,
    keep: str,
    say: Callable[[str], object] | None,
    notes: list[str],
) -> Outcome:
    target = state_key(state.start.digest, advance_position(state.position, state.settings.digest, steps))
    with group.raise_together():
        at, folder, old = (state, None, None) if store is None else _furthest(store, state, steps, notes)
    at = _everywhere(group, state, at, GROUPS if at.step == state.step + steps else ("trained", "optimizer"))
    left = state.step + steps - at.step
    if left == 0 and old is None:
        if store is not None and folder is not None:
            store.promote(folder)
            store.drop_partial(target)
        return _outcome(store, at, folder, 0, 0.0, notes)
    began, begun = at.step, time.perf_counter()
    with group.raise_together():
        if left or behind(at, dataset, callbacks):
            at = _trained(group, at, left, opened, dataset, store, callbacks, notes, say, (state, target, keep))
        seconds = time.perf_counter() - begun
        if at.step < state.step + steps:
            notes.append(
                f"stopped at step {at.step} as asked, {state.step + steps - at.step} steps early; the state so far is"
                " passed on"
            )
        if store is not None:
            folder = store.save(at)
            store.drop_partial(target)
            if old is not None:
                store.drop_partial(old.parent.name)
    if left:
        at = _everywhere(group, state, at, GROUPS if placement_for(state, group).is_sharded else ("average", "powers"))
    return _outcome(store, at, folder, at.step - began, seconds, notes)


def _trained(
    group: SingleProcess,
    at: TrainState,
    left: int,
    opened: Callable[[], AbstractContextManager[Denoiser]],
    dataset: Dataset,
    store: Store | None,
    callbacks: Callbacks,
    notes: list[str],
    say: Callable[[str], object] | None,
    way: tuple[TrainState, str, str],
) -> TrainState:
    """`left` steps further from `at`; `way` is the state that the call began with, the key that it leads to and what is
    kept.
    """
    state, target, keep = way
    began = at.step
    try:
        with ExitStack() as stack:
            with group.raise_together():
                callbacks = prepare.watching(callbacks, dataset, notes, say)
                notes += prepare.ready(at, left, dataset, None if store is None else store.folder) if left else []
                denoiser = stack.enter_context(opened())
            at = train(at, denoiser, dataset, left, _keeping(callbacks, store, state, target, keep))
    except Stopped as error:
        if store is None:
            places = []
        else:
            places = [store.result_folder(target) / "partial", store.result_folder(error.state.key)]
        where = next((f" It is stored in {place}." for place in places if (place / "state.json").is_file()), "")
        raise Stopped(f"{error}{where}", error.state) from error
    notes += group.report(at.settings.optimizer.accumulation, at.step - began)
    return at


def _of_others(group: SingleProcess, state: TrainState, callbacks: Callbacks, keep: str) -> Callbacks:
    """What ranks after the first do of `callbacks`: they keep nothing; what takes every rank they do with it."""
    others = Callbacks(on_step=callbacks.on_step, should_stop=callbacks.should_stop)
    if not group.shard:
        return others
    others = replace(others, validate_every=callbacks.validate_every)
    if not placement_for(state, group).is_sharded:
        return others

    def gone(state: TrainState) -> None:
        """The state was put together on the first rank."""

    others = replace(others, snapshot_every=callbacks.snapshot_every, snapshot_minutes=callbacks.snapshot_minutes)
    return replace(others, save_snapshot=callbacks.save_snapshot, save_best=gone if keep != "last" else None)


def _together(
    group: SingleProcess, state: TrainState, steps: int, store: Store | None
) -> Callable[[TrainState], None] | None:
    """What keeps a snapshot that all ranks write together."""
    placement = placement_for(state, group)
    if store is None or not isinstance(placement, RowSharded):
        return None
    target = state_key(state.start.digest, advance_position(state.position, state.settings.digest, steps))
    save = store.save_by_ranks

    def parts(own: TrainState) -> None:
        """What this rank has of a snapshot, beside the others' parts."""
        save(own, target, placement.group, placement.is_row_sharded)

    return parts


def _furthest(
    store: Store, state: TrainState, steps: int, notes: list[str]
) -> tuple[TrainState, Path | None, Path | None]:
    """The state to go on from, its folder, and that again where it is a snapshot; what there is to say
    goes to `notes`.
    """
    found, problems = store.furthest(state, steps)
    notes += [f"not used: {problem}" for problem in problems]
    if found is None:
        return state, None, None
    notes.append(_said(found.state.step, state.step + steps, found.partial))
    differing = [
        f"{name} {value}, now {store.versions.get(name)}"
        for name, value in sorted(found.versions.items())
        if store.versions.get(name) != value
    ]
    store.prune(found.state, state.step)  # what a run that was killed left behind
    if differing:
        notes.append(f"it was made with {'; '.join(differing)}")
    return found.state, found.folder, found.folder if found.partial else None


def _everywhere(group: SingleProcess, state: TrainState, at: TrainState, groups: Sequence[str]) -> TrainState:
    """The first rank's `at` on every rank; of tensors those of `groups` travel. Raises ValueError on a rank that trains
    something else.
    """
    if group.size == 1:
        return at
    named = {name: {f"{name}/{key}": t for key, t in getattr(at, name).items()} for name in GROUPS}
    said = {"from": state.key, "record": {**record_of(at, {}), "history": tail_of(at.history, [])}}
    said, given = group.broadcast(said, {key: t for name in groups for key, t in named[name].items()})
    with group.raise_together():
        if said["from"] != state.key:
            raise ValueError(
                f"The first rank trains {said['from'][:16]} and this one {state.key[:16]}: model, dataset, settings or"
                " seed differ. Give every rank the same files."
            )
    if group.is_main_process:
        return at
    own = {key: t for name in GROUPS if name not in groups for key, t in named[name].items()}
    return restored(state, said["record"], {**own, **given}, history_of(said["record"]["history"], Path()))


def _outcome(
    store: Store | None, at: TrainState, folder: Path | None, trained: int, seconds: float, notes: list[str]
) -> Outcome:
    best, used = (None, None) if store is None else (store.best(at), store.used())
    removed: tuple[str, ...] = ()
    if store is not None:
        removed = tuple(store.removed)
    return Outcome(at, folder, trained, seconds, (*notes, *removed), best, used)


def _keeping(callbacks: Callbacks, store: Store | None, before: TrainState, target: str, keep: str) -> Callbacks:
    """`callbacks` with what keeps states: snapshots, the best so far, and averages."""
    if store is None:
        return callbacks

    def snapshot(state: TrainState) -> None:
        if callbacks.save_snapshot is not None:  # by all ranks
            callbacks.save_snapshot(state)
        elif keep == "every" and not (callbacks.snapshot_every and state.step % callbacks.snapshot_every):
            store.save(state, "snapshot")
        else:
            store.save_partial(state, target)

    def best(state: TrainState) -> None:
        store.save_best(state, before.step)

    averages = partial(snapshots.write, store.folder)
    return replace(callbacks, save_snapshot=snapshot, save_best=best if keep != "last" else None, save_average=averages)


def _said(found: int, wanted: int, snapshot: bool) -> str:
    if snapshot:
        return f"went on from the snapshot at step {found}"
    return f"stored result of step {found}: " + ("nothing was trained" if found == wanted else "went on from there")
