"""One call of Train Step: takes stored results, trains the rest, and keeps results and snapshots on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ...ema.decay import remarks as ema_remarks
from ...storage.disk_errors import ignore_read_only
from ...storage.lock import folder_lock
from ..averages import snapshots
from ..data.dataset import Dataset
from ..distributed import process_group
from ..distributed.placement import RowSharded, placement_for
from ..distributed.process_group import SingleProcess
from ..memory.quantized_base.base import remark
from ..objective.denoiser import Denoiser
from ..optimizers.checks import schedule_remarks
from ..state import TrainState, advance_position, plan_schedule, state_key
from ..store.names import KEEPS
from ..store.store import GROUPS, DiskUse, Store, history_of, record_of, restore, tail_of
from . import prepare
from .loop import Callbacks, OutOfMemory, Stopped, advise_while_loading, is_due, is_something_due, train


@dataclass(frozen=True)
class Outcome:
    """How a call of Train Step ended: the state, its folder if it is stored, how many steps were trained now, and
    notes.
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
    """Train more steps from a state, or take them from the store if they are there already.

    The model is loaded only if there is something to train. With total_steps 0 the schedule ends with these steps.
    After an interruption or a full disk the whole steps so far are kept as a snapshot, and the same call later resumes
    from it. Every rank of a group makes this call; only the first has the store, shows, validates and saves.

    Args:
        state: where to begin.
        steps: how many steps more.
        opened: loads the model, for training.
        dataset: what to train on.
        store: the run's folder; None keeps nothing.
        callbacks: what is called between steps, without those that save states: they are added here.
        keep: which states are kept beside the last: `best` also the one with the lowest held-out loss, `every` that and
            every snapshot.
        say: is told at once that a file of the dataset has changed, or that the steps do not end with their schedule;
            the report repeats it.

    Raises:
        Stopped: where the loss is not finite or memory runs out.
        FolderInUse: where another process works on the same run.
        OSError: of the store, as of a full disk; and whatever `callbacks.on_step` raises.
    """
    if keep not in KEEPS:
        raise ValueError(f"states to keep is {keep!r}, expected one of {', '.join(KEEPS)}.")
    if steps == 0:
        return skip_training(state)
    with ExitStack() as stack:
        return open_call(stack, state, steps, opened, dataset, store, callbacks, keep, say).run()


def skip_training(state: TrainState) -> Outcome:
    """The outcome of 0 steps."""
    return Outcome(state, None, 0, 0.0, ("0 steps: the state is passed on",))


def open_call(
    stack: ExitStack,
    state: TrainState,
    steps: int,
    opened: Callable[[], AbstractContextManager[Denoiser]],
    dataset: Dataset,
    store: Store | None,
    callbacks: Callbacks | None = None,
    keep: str = "last",
    say: Callable[[str], object] | None = None,
) -> Call:
    """The call that `run` makes, not begun yet. The run's folder is locked until `stack` is closed; the other arguments
    are those of `run`.
    """
    state = plan_schedule(state, state.step + steps)
    group, callbacks = process_group.current(), callbacks or Callbacks()
    is_sharded = placement_for(state, group).is_sharded
    if is_sharded:
        callbacks = replace(callbacks, save_snapshot=_save_rows(group, state, steps, store))
    if not group.is_main_process:
        store, callbacks, say = None, _callbacks_of_other_ranks(group, state, callbacks, keep), None
    group.begin_call()
    call = Call(group, state, steps, opened, dataset, store, callbacks, keep, say)
    with group.raise_together():
        if group.shard and callbacks.preview_every:
            raise ValueError(
                "Train Step: previews sample on one rank, and --shard divides the model among all: set preview"
                " every N steps to 0."
            )
        if is_sharded and (keep == "every" or callbacks.keep_every or callbacks.is_kept is not None):
            raise ValueError(
                "Train Step: with --shard and adapter type full, snapshots are the ranks' own: set states to keep"
                " to best or last, and keep a state every N steps and every N epochs to 0."
            )
        call.lock(stack)
    return call


class Call:
    """One call of `run` on this rank: what was asked for, how far it is, and the notes for its report.

    First `begin`; then, unless `is_stored`, `train_to` once or in several pieces, and `save`; at last `finish`.
    """

    def __init__(
        self,
        group: SingleProcess,
        state: TrainState,
        steps: int,
        opened: Callable[[], AbstractContextManager[Denoiser]],
        dataset: Dataset,
        store: Store | None,
        callbacks: Callbacks,
        keep: str,
        say: Callable[[str], object] | None,
    ) -> None:
        self.group, self.state, self.steps, self.open_model = group, state, steps, opened
        self.dataset, self.store, self.callbacks, self.keep, self.say = dataset, store, callbacks, keep, say
        self.notes: list[str] = []
        self.at = state  # how far the call is
        self.is_stored = False  # whether the store had the result, so that there is nothing to train
        self._folder: Path | None = None
        self._snapshot: Path | None = None  # that training went on from
        self._first_step, self._seconds = state.step, 0.0
        self._saving: Callbacks | None = None  # once training has begun
        self._ready_until = state.step  # the step up to which everything is prepared
        self._saved_step, self._saved_at = state.step, time.monotonic()

    @property
    def until(self) -> int:
        """The step that the call leads to."""
        return self.state.step + self.steps

    @property
    def target(self) -> str:
        """The key of the state that the call leads to."""
        return target_key(self.state, self.steps)

    def lock(self, stack: ExitStack) -> None:
        """Lock the run's folder until `stack` is closed: a call that pauses between two pieces locks it for each."""
        if self.store is not None:
            warning = stack.enter_context(folder_lock(self.store.folder))
            if warning:
                self._note_once(warning)

    def run(self) -> Outcome:
        """Resume from the store, train what is left, and store the result."""
        self.begin()
        if not self.is_stored:
            with self.group.raise_together():
                self.train_to(self.until)
                self.save()
        return self.finish()

    def begin(self) -> None:
        """Go to the furthest state that the store has on the way."""
        self.notes.extend(self._schedule_remarks())
        with self.group.raise_together():
            self.at, self._folder, self._snapshot = self._furthest()
        resumed: Sequence[str] = ("trained", "optimizer")
        if self.at.step == self.until:
            resumed = GROUPS
        self.at = _send_to_every_rank(self.group, self.state, self.at, resumed)
        if self.callbacks.epoch_settings is not None:
            self.dataset = self.callbacks.epoch_settings.go_on(self.at, self.dataset, len(self.state.taken))
        self._first_step = self._saved_step = self.at.step
        self.is_stored = self.at.step == self.until and self._snapshot is None

    def train_to(self, step: int) -> None:
        """Train up to a step, or until somebody asks to stop."""
        started = time.perf_counter()
        if step > self.at.step or is_something_due(self.at, self.dataset, self.callbacks):
            goal = self._train_piece(step)
            while self.at.step < step and (self.at.step == goal or self._is_paused()):
                if self.at.step == goal:
                    self.save_snapshot_if_due()
                goal = self._train_piece(step)
        self._seconds += time.perf_counter() - started

    def _is_paused(self) -> bool:
        """Whether training ended at this step only to take other settings."""
        taken, should_stop = self.callbacks.epoch_settings, self.callbacks.should_stop
        return taken is not None and taken.paused_at == self.at.step and not (should_stop is not None and should_stop())

    def _train_piece(self, step: int) -> int:
        """Train toward a step as far as everything is prepared; returns how far that is."""
        try:
            saving = self._prepare()
        except BaseException:
            if self.at.step > self._first_step:
                with suppress(OSError):  # a full disk: the first error counts
                    self.save_snapshot()
            raise
        goal = min(step, self._ready_until)
        self._train(max(0, goal - self.at.step), saving)
        return goal

    def save(self) -> None:
        """Store what was reached as a result, in place of the snapshots on the way to it."""
        if self.at.step < self.until:
            self.notes.append(
                f"stopped at step {self.at.step} as asked, {self.until - self.at.step} steps early; the state so far is"
                " passed on"
            )
        if self.store is None:
            return
        self._folder = self.store.save(self.at)
        self.store.drop_partial(self.target)
        if self._snapshot is not None:
            self.store.drop_partial(self._snapshot.parent.name)

    def save_snapshot(self, after_minutes: float = 0.0) -> None:
        """Store what was trained since the last snapshot, between two pieces, when that is so many minutes ago."""
        is_late = time.monotonic() - self._saved_at >= 60 * after_minutes
        if is_late and self.at.step > self._saved_step and self._saving is not None and self._saving.save_snapshot:
            self._saving.save_snapshot(self.at)

    def save_snapshot_if_due(self) -> None:
        """Store what was trained so far, between two pieces, when a snapshot is due at this step or by now."""
        if is_due(self.at.step, self.callbacks.snapshot_every) or self.callbacks.keeps_state(self.at.step):
            self.save_snapshot()
        elif self.callbacks.snapshot_minutes:
            self.save_snapshot(self.callbacks.snapshot_minutes)

    def finish(self) -> Outcome:
        """How the call ended, on every rank."""
        if self.is_stored and self.store is not None and self._folder is not None:
            with ignore_read_only():
                self.store.promote(self._folder)
                self.store.drop_partial(self.target)
        if self._first_step < self.until:
            trained: Sequence[str] = ("average", "powers")  # the rest every rank has by itself
            if placement_for(self.state, self.group).is_sharded:
                trained = GROUPS
            self.at = _send_to_every_rank(self.group, self.state, self.at, trained)
        return self._outcome()

    def _schedule_remarks(self) -> list[str]:
        state = self.state
        sentences = schedule_remarks(
            state.settings.optimizer, state.step, self.until, state.open_schedule, state.history.rate
        )
        if state.start.ema is not None and state.open_schedule:  # else the start has said it
            sentences += ema_remarks(state.start.ema, self.until)
        return sentences

    def _furthest(self) -> tuple[TrainState, Path | None, Path | None]:
        """The state to resume from, its folder, and that again where it is a snapshot."""
        if self.store is None:
            return self.state, None, None
        stored, problems = self.store.furthest(self.state, self.steps)
        for problem in problems:
            self.notes.append(f"not used: {problem}")
        if stored is None:
            return self.state, None, None
        self.notes.append(_describe_resuming(stored.state.step, self.until, stored.partial))
        differing = []
        for name, version in sorted(stored.versions.items()):
            current_version = self.store.versions.get(name)
            if current_version != version:
                differing.append(f"{name} {version}, now {current_version}")
        with ignore_read_only():
            self.store.prune(stored.state, self.state.step)  # what a run that was killed left behind
        if differing:
            self.notes.append(f"it was made with {'; '.join(differing)}")
        if stored.partial:
            return stored.state, stored.folder, stored.folder
        return stored.state, stored.folder, None

    def _train(self, left: int, saving: Callbacks) -> None:
        """`left` steps further, with more savings where memory runs out and the caller wants that."""
        first_step = self.at.step
        until = first_step + left
        state: TrainState | None = self.at
        while state is not None:
            self.at = state
            state = self._try_to_train(until - self.at.step, saving)
        self.notes.extend(self.group.report(self.at.settings.optimizer.accumulation, self.at.step - first_step))

    def _try_to_train(self, left: int, saving: Callbacks) -> TrainState | None:
        """Train; where memory ran out and can be saved, the state to try again from, else None."""
        try:
            with ExitStack() as stack:
                with self.group.raise_together(), advise_while_loading(self.at, self.dataset):
                    denoiser = stack.enter_context(self.open_model())
                    adapter = self.at.start.adapter
                    if adapter.quantized_base:
                        self._note_once(remark(denoiser.module, adapter.base_weights))
                self.at = train(self.at, denoiser, self.dataset, left, saving)
        except Stopped as error:
            if isinstance(error, OutOfMemory) and saving.save_memory is not None and self.group.size == 1:
                from .memory_savings import save_more

                found = save_more(self._last_good(error.state), error.on_host)
                if found is not None:
                    words, state = found
                    at = state.step
                    self.notes.append(f"memory ran out at step {at + 1}: {words}, and training went on from step {at}")
                    saving.save_memory(state, words)
                    return state
            raise Stopped(f"{error}{self._describe_folder(error.state)}", error.state) from error
        return None

    def _last_good(self, state: TrainState) -> TrainState:
        """A state that training can go on from, or that of the last snapshot if that is further: a fused backward pass
        may have moved some weights already, so the state before it is gone.
        """
        if state.step < self._saved_step:
            state = self._furthest()[0]
        return replace(state, settings=self.at.settings)

    def _note_once(self, remark: str) -> None:
        """A call may train in several pieces, which have the same to say."""
        if remark not in self.notes:
            self.notes.append(remark)

    def _prepare(self) -> Callbacks:
        """The callbacks of training, once what comes before the next steps is done."""
        with self.group.raise_together():
            if self._saving is None:
                self._saving = self._begin_training()
            self._take_settings(self._saving)
            if self._ready_until <= self.at.step < self.until:
                self._get_ready()
        return self._saving

    def _take_settings(self, saving: Callbacks) -> None:
        """Where an epoch begins: go on with what the file of settings says, if it says something new. A snapshot keeps
        it, so that a run that breaks off after this step goes on with the same.
        """
        taken = self.callbacks.epoch_settings
        if taken is None or self.at.step == self.until:
            return
        before = self.at
        self.at, self.dataset = taken.take(before, self.dataset)
        for note in taken.notes:
            self._note_once(note)
        if self.at is before:
            return
        self._ready_until = self.at.step
        if self.at.step > self.state.step and saving.save_snapshot is not None:
            saving.save_snapshot(self.at)

    def _get_ready(self) -> None:
        """Prepare the next steps: all that are left, or a piece of them where each step needs something of its own."""
        steps = self.until - self.at.step
        if prepare.prepares_each_step(self.dataset):
            steps = min(steps, prepare.MOST_STEPS)
        folder = None
        if self.store is not None:
            folder = self.store.folder
        raise_if_interrupted = self.callbacks.raise_if_interrupted
        for note in prepare.prepare_steps(self.at, steps, self.dataset, folder, raise_if_interrupted):
            self._note_once(note)
        self._ready_until = self.at.step + steps

    def _begin_training(self) -> Callbacks:
        """The callbacks of training, once the caller was told what there is to say before the first step."""
        if self.say is not None:
            for remark in self._schedule_remarks():
                self.say(remark)
        callbacks = prepare.watch_files(self.callbacks, self.dataset, self.notes, self.say)
        callbacks = replace(callbacks, note=self._note_once)
        if callbacks.on_begin is not None:
            callbacks.on_begin(self.at)
        return self._add_saving(callbacks)

    def _describe_folder(self, state: TrainState) -> str:
        """Where the state that a stopped call ended with is stored, as a sentence; empty where it is not."""
        if self.store is None:
            return ""
        for state_folder in (self.store.result_folder(self.target) / "partial", self.store.result_folder(state.key)):
            if (state_folder / "state.json").is_file():
                return f" It is stored in {state_folder}."
        return ""

    def _add_saving(self, callbacks: Callbacks) -> Callbacks:
        """`callbacks` with those that save states: snapshots, the best so far, and averages."""
        store = self.store
        if store is None:
            return callbacks

        def snapshot(state: TrainState) -> None:
            if callbacks.save_snapshot is not None:  # by all ranks
                callbacks.save_snapshot(state)
            elif callbacks.keeps_state(state.step) or (
                self.keep == "every" and is_due(state.step, callbacks.snapshot_every)
            ):
                store.save(state, "snapshot")
            else:
                store.save_partial(state, self.target)
            self._saved_step, self._saved_at = state.step, time.monotonic()

        def best(state: TrainState) -> None:
            store.save_best(state, self.state.step)

        def asked(state: TrainState) -> None:
            store.save(state, "snapshot")
            self._saved_step, self._saved_at = state.step, time.monotonic()
            self._note_once(f"saved at step {state.step} as asked: ask for that many steps to get this state")
            if callbacks.save_asked is not None:
                callbacks.save_asked(state)

        saving = replace(callbacks, save_snapshot=snapshot, save_average=partial(snapshots.write, store.folder))
        saving = replace(saving, save_asked=asked)
        if self.keep == "last":
            return replace(saving, save_best=None)
        return replace(saving, save_best=best)

    def _outcome(self) -> Outcome:
        trained, seconds = self.at.step - self._first_step, self._seconds
        if self.store is None:
            return Outcome(self.at, self._folder, trained, seconds, tuple(self.notes))
        best, disk_used = self.store.best(self.at), self.store.measure_disk()
        return Outcome(self.at, self._folder, trained, seconds, (*self.notes, *self.store.removed), best, disk_used)


def target_key(state: TrainState, steps: int) -> str:
    """The key of the state that more steps lead to; snapshots on the way are found under it.

    Args:
        state: where the steps begin.
        steps: how many, with the state's settings.
    """
    return state_key(state.start.digest, advance_position(state.position, state.settings.digest, steps))


def _callbacks_of_other_ranks(group: SingleProcess, state: TrainState, callbacks: Callbacks, keep: str) -> Callbacks:
    """The callbacks of ranks after the first: they save nothing, and take part in what takes every rank."""
    rank_callbacks = Callbacks(
        on_step=callbacks.on_step,
        should_stop=callbacks.should_stop,
        raise_if_interrupted=callbacks.raise_if_interrupted,
    )
    if not group.shard:
        return rank_callbacks
    rank_callbacks = replace(rank_callbacks, validate_every=callbacks.validate_every)
    if not placement_for(state, group).is_sharded:
        return rank_callbacks

    def saved_by_first_rank(state: TrainState) -> None:
        """Nothing to do: the state was gathered on the first rank."""

    rank_callbacks = replace(
        rank_callbacks, snapshot_every=callbacks.snapshot_every, snapshot_minutes=callbacks.snapshot_minutes
    )
    rank_callbacks = replace(rank_callbacks, save_snapshot=callbacks.save_snapshot)
    if keep == "last":
        return rank_callbacks
    return replace(rank_callbacks, save_best=saved_by_first_rank)


def _save_rows(
    group: SingleProcess, state: TrainState, steps: int, store: Store | None
) -> Callable[[TrainState], None] | None:
    """The callback that saves a snapshot which all ranks write together, each its own rows."""
    placement = placement_for(state, group)
    if store is None or not isinstance(placement, RowSharded):
        return None
    target = target_key(state, steps)
    save = store.save_by_ranks

    def parts(own: TrainState) -> None:
        """What this rank has of a snapshot, beside the others' parts."""
        save(own, target, placement.group, placement.is_row_sharded)

    return parts


def _send_to_every_rank(group: SingleProcess, state: TrainState, at: TrainState, groups: Sequence[str]) -> TrainState:
    """Send the first rank's state `at` to every rank, with the tensors of `groups`.

    Raises ValueError on a rank that trains something else.
    """
    if group.size == 1:
        return at
    named = {name: {f"{name}/{key}": t for key, t in getattr(at, name).items()} for name in GROUPS}
    first = {"from": state.key, "record": {**record_of(at, {}), "history": tail_of(at.history, [])}}
    first, received = group.broadcast(first, {key: t for name in groups for key, t in named[name].items()})
    with group.raise_together():
        if first["from"] != state.key:
            raise ValueError(
                f"The first rank trains {first['from'][:16]} and this one {state.key[:16]}: model, dataset, settings or"
                " seed differ. Give every rank the same files."
            )
    if group.is_main_process:
        return at
    local_tensors = {key: t for name in GROUPS if name not in groups for key, t in named[name].items()}
    return restore(
        state, first["record"], {**local_tensors, **received}, history_of(first["record"]["history"], Path())
    )


def _describe_resuming(step: int, until: int, is_snapshot: bool) -> str:
    if is_snapshot:
        return f"went on from the snapshot at step {step}"
    if step == until:
        return f"stored result of step {step}: nothing was trained"
    return f"stored result of step {step}: went on from there"
