"""Stores training states on disk: graft/<run>/<key>/ with state.safetensors and state.json.

They are written whole or not at all, and verified when they are read.

A state.json holds the last steps of the history; what came before lies in blocks of 1,000 steps under
graft/<run>/history/, each named by its content and shared by every state, so that a snapshot costs the same however
long the run is.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...storage.atomic import DRAFT, make_folders, set_aside, sync_folder, write_whole
from ...storage.bounded_read import MB, read_bounded
from ...storage.digest import sha256, sha256_of_file, sha256_of_json
from ...storage.disk_errors import explain_disk_errors
from ...storage.file_list import files_below, names_in
from ...storage.safetensors import load_safetensors, write_safetensors
from ..state import History, RunCost, TrainState, advance_position, follow, position_at, state_key
from . import disk_quota, rank_files
from .names import check_run_name
from .schema import block_of_history, problem

if TYPE_CHECKING:
    from ..distributed.process_group import ProcessGroup

FORMAT = 2
MOST_RECORD = 256 * MB  # bytes of a state.json: the history of three million steps
_MOST_BLOCK = 16 * MB  # bytes of a block of history
HISTORY = "history"
BLOCK = 1000  # steps per block of history
_KINDS = ("partial", "best", "snapshot", "result")  # why a state is kept; each of them stays longer than those before
GROUPS = ("trained", "optimizer", "average", "powers")


class Damaged(ValueError):
    """A stored state that cannot be used: the message says which file and what is wrong with it."""


class NewerFormat(Damaged):
    """A state that a newer Graft stored: it is not read, and not overwritten."""


@dataclass(frozen=True)
class StoredState:
    """A state that was read back, where it lay, whether it was a snapshot, and the versions it was made with."""

    state: TrainState
    folder: Path
    partial: bool
    versions: dict[str, str]


@dataclass(frozen=True)
class DiskUse:
    """Disk in use: states and bytes of one run, bytes of all runs, and how many those may be (0: any number)."""

    states: int
    run: int
    every: int
    limit: int


class Store:
    """The states of one run's folder. Nothing but safetensors and JSON is read, and only when its hash fits.

    All runs below `root` together stay within `limit` bytes (0: no limit): before a state is written, room is made as
    `room` says, and `removed` tells of it.
    """

    def __init__(self, root: str | Path, run: str, versions: dict[str, str] | None = None, limit: int = 0) -> None:
        check_run_name(run)
        self.folder = Path(root) / run
        self.versions = versions or {}
        self.limit, self.removed = limit, list[str]()

    def result_folder(self, key: str) -> Path:
        """The folder of the state with this key."""
        return self.folder / key[:32]

    # --- writing ------------------------------------------------------------------------------------------------------

    def save(self, state: TrainState, kind: str = "result") -> Path:
        """Keep a state as a result, as the `best` so far or as one `snapshot` of many; its folder.

        A state that is saved again as something else is from then on what stays longer. Raises OSError (a full disk)
        with nothing half-written left behind.
        """
        folder = self.result_folder(state.key)
        record = _readable_record(folder)
        if record is not None and record["kind"] in _KINDS:
            wanted, kind = kind, max(record["kind"], kind, key=_KINDS.index)
            if wanted != "result" and _is_whole(folder, record):
                _keep_as(folder, record, kind)
                return folder
        self._write(state, folder, "state.safetensors", kind)
        return folder

    def promote(self, folder: Path) -> None:
        """Turn a state that was kept as the best so far, or as a snapshot, into a result, which stays."""
        record = read_record(folder)
        if record["kind"] != "partial":
            _keep_as(folder, record, "result")

    def save_best(self, state: TrainState, since: int) -> Path:
        """Save the state with the lowest held-out loss so far, in place of those that had it since step `since`; its
        folder.
        """
        folder = self.save(state, "best")
        self.prune(state, since)
        return folder

    def prune(self, state: TrainState, since: int) -> None:
        """Remove states after step `since` that were kept as the best so far and are not the best any more; results
        stay.
        """
        best = state.history.best
        for step, _ in state.history.validation:
            folder = self.result_folder(state_key(state.start.digest, position_at(state.position, step)))
            outdated = since < step <= state.step and best is not None and step != best[0]
            if outdated and folder.is_dir() and (_kind(folder) == "best" or not (folder / "state.json").exists()):
                remove(folder)

    def best(self, state: TrainState) -> Path | None:
        """Where the state with the lowest held-out loss on the way to `state` is kept, if it is."""
        best = state.history.best
        if best is None or not best[0]:
            return None
        folder = self.result_folder(state_key(state.start.digest, position_at(state.position, best[0])))
        if (folder / "state.json").is_file():
            return folder
        return None

    def save_partial(self, state: TrainState, target: str) -> Path:
        """Keep a state on the way to the state with key `target`, in place of an earlier snapshot of the same way."""
        folder = self.result_folder(target) / "partial"
        tensors = f"state-{state.step:08d}.safetensors"
        refuse_newer(folder)
        self._write(state, folder, tensors, "partial")
        for old in folder.glob("state-*.safetensors"):  # the JSON already names the new one
            if old.name != tensors:
                with explain_disk_errors(str(old)):
                    old.unlink(missing_ok=True)
        return folder

    def save_by_ranks(
        self, state: TrainState, target: str, group: ProcessGroup, divided: Callable[[str, Tensor], bool]
    ) -> Path:
        """Save a snapshot by all ranks of a group: each writes the tensors of its `state`, of which those `divided` are
        rows.

        The folder must be one that every rank sees. Raises OSError on every rank if one of them cannot write.
        """
        folder = self.result_folder(target) / "partial"
        tensors = group_tensors(state)
        rows = [full for full, t in tensors.items() if divided(full.partition("/")[2], t)]
        with group.raise_together():
            make_folders(folder)
            name, sha256 = rank_files.write(folder, state.step, group.rank, group.size, tensors, rows)
        files = [
            dict(zip(("file", "sha256"), line.split(), strict=True))
            for line in group.all_gather_text(f"{name} {sha256}")
        ]
        with group.raise_together():
            if group.is_main_process:
                self._write_ranks_record(state, folder, files)
        return folder

    def _write_ranks_record(self, state: TrainState, folder: Path, files: list[dict[str, str]]) -> None:
        missing = [file["file"] for file in files if not (folder / file["file"]).is_file()]
        if missing:
            raise FileNotFoundError(
                errno.ENOENT, "other ranks write elsewhere: give all the same output folder", str(folder / missing[0])
            )
        extra = {
            "history": tail_of(state.history, self._write_history(state.history)),
            "kind": "partial",
            "tensors": {"parts": files},
        }
        write_record(folder, {**record_of(state, self.versions), **extra})
        for old in folder.glob("state-*.safetensors"):  # the JSON already names the new ones
            if old.name not in {file["file"] for file in files}:
                with explain_disk_errors(str(old)):
                    old.unlink(missing_ok=True)

    def drop_partial(self, target: str) -> None:
        """Remove the snapshot on the way to `target`, and its folder if nothing else is in it."""
        folder = self.result_folder(target)
        remove(folder / "partial")
        with contextlib.suppress(OSError):
            folder.rmdir()

    def _make_room(self, state: TrainState, folder: Path, coming: int) -> None:
        """Remove old states so that `coming` more bytes stay within the size limit.

        What the run of the state in `folder` needs is kept.
        """
        if not self.limit:
            return
        best = self.best(state)
        in_use = {self.folder, folder, folder / "partial", *([] if best is None else [best])}
        removed = disk_quota.make_space(self.folder.parent, self.limit, coming, in_use)
        if removed:
            self.removed.append(disk_quota.removal_report(removed, self.folder.parent, self.limit))

    def _write(self, state: TrainState, folder: Path, tensors: str, kind: str) -> None:
        self._make_room(
            state, folder, sum(t.numel() * t.element_size() for group in GROUPS for t in getattr(state, group).values())
        )
        blocks = self._write_history(state.history)
        new_folders = make_folders(folder)
        path = folder / tensors
        self._make_way(path, folder / "state.json")
        orphan = not path.exists()  # new tensors belong to no state until a state.json names them
        try:
            tensors_sha256 = write_safetensors(path, group_tensors(state))
            # tensors first, durably: a state.json in place means that everything it names is in place
            sync_folder(folder)
            files = {"file": tensors, "sha256": tensors_sha256}
            extra = {"history": tail_of(state.history, blocks), "kind": kind, "tensors": files}
            write_whole(str(folder / "state.json"), [_sign({**record_of(state, self.versions), **extra})])
            orphan = False
            sync_folder(folder)
            self._make_room(state, folder, 0)  # headers and history count too
        except BaseException:
            if orphan:
                path.unlink(missing_ok=True)
            for new_folder in reversed(new_folders):
                with contextlib.suppress(OSError):
                    new_folder.rmdir()
            raise

    def _make_way(self, *paths: Path) -> None:
        """Put folders aside that lie where the store writes its files and their drafts."""
        for path in paths:
            for place in (path, path.with_name(path.name + DRAFT)):
                aside = set_aside(place)
                if aside:
                    self.removed.append(f"{place} was a folder in the place of a file: it is {aside} now")

    def _write_history(self, history: History) -> list[str]:
        """Writes full blocks of history that are not stored yet. Returns the names of all blocks."""
        folder, names = self.folder / HISTORY, []
        for number in range(len(history.loss) // BLOCK):
            body = json.dumps(_rows(history, number * BLOCK, (number + 1) * BLOCK), separators=(",", ":")).encode()
            name = f"{sha256(body).hexdigest()}.json"
            names.append(name)
            if not (folder / name).is_file():
                make_folders(folder)
                self._make_way(folder / name)
                write_whole(str(folder / name), [body])
                sync_folder(folder)
        return names

    def measure_disk(self) -> DiskUse:
        """The disk use of this run's folder and of all runs."""
        files = files_below(self.folder)
        states = sum(path.name == "state.json" for path, _ in files)
        size = sum(status.st_size for _, status in files)
        _, size_of_all = disk_quota.stored_files(self.folder.parent)
        return DiskUse(states, size, size_of_all, self.limit)

    # --- reading ------------------------------------------------------------------------------------------------------

    def furthest(self, state: TrainState, steps: int) -> tuple[StoredState | None, list[str]]:
        """Find the stored state that is furthest on the way from `state` to `steps` more steps, and what is damaged.

        Results are found by their key, snapshots by what they record. Unusable states are reported, never deleted.
        Raises NewerFormat when the way leads over a state that a newer Graft stored.
        """
        problems: list[str] = []
        settings, start = state.settings.digest, state.start.digest
        target = self.result_folder(state_key(start, advance_position(state.position, settings, steps)))
        refuse_newer(target)
        refuse_newer(target / "partial")
        for step, partial, folder in self._on_the_way(state, steps, problems):
            try:
                stored, recorded = load(folder, state, self.folder / HISTORY)
            except NewerFormat:
                raise
            except Damaged as error:
                problems.append(str(error))
                continue
            try:
                way = follow(state, stored.taken, step)
            except ValueError as error:
                problems.append(f"{folder / 'state.json'}: it took settings that cannot be used: {error}")
                continue
            if way is not None and stored.key == way[0]:
                disk_quota.touch(folder)
                return StoredState(replace(stored, settings=way[1]), folder, partial, recorded), problems
        return None, problems

    def _on_the_way(self, state: TrainState, steps: int, problems: list[str]) -> list[tuple[int, bool, Path]]:
        """Step, whether it is a snapshot on the way to a result, and folder of the states that may be on the way from
        `state` to `steps` more steps, the furthest first.

        What is stored is read, rather than each step looked for: there may be millions of steps.
        """
        found: list[tuple[int, bool, Path]] = []
        for name in names_in(self.folder):
            for folder, partial in ((self.folder / name, False), (self.folder / name / "partial", True)):
                if not (folder / "state.json").is_file():
                    continue
                try:
                    record = read_record(folder)
                    if not partial:
                        _check_name(folder, record, state)
                except NewerFormat as error:
                    if not partial and _leads_over(folder, state, steps):
                        raise
                    problems.append(str(error))
                    continue
                except Damaged as error:
                    problems.append(str(error))
                    continue
                if record["start"] == state.start.digest and state.step < record["step"] <= state.step + steps:
                    found.append((record["step"], partial, folder))
        return sorted(found, key=lambda one: (-one[0], one[1], one[2]))


def _key_after(state: TrainState, step: int) -> str:
    """The key of the state at `step` on the way from `state`."""
    return state_key(state.start.digest, advance_position(state.position, state.settings.digest, step - state.step))


def _leads_over(folder: Path, state: TrainState, steps: int) -> bool:
    """Whether the way to `steps` more steps leads over the state in a folder, which a newer Graft stored."""
    step = _parse_record(folder / "state.json").get("step")
    if type(step) is not int or not state.step < step <= state.step + steps:
        return False
    return folder.name == _key_after(state, step)[:32]


def _check_name(folder: Path, record: Mapping[str, Any], like: TrainState) -> None:
    """Raises Damaged where the folder of a result has the name of another state, as after it was renamed."""
    if record["key"][:32] == folder.name:
        return
    _check_beginning(folder, record, like)
    raise Damaged(f"{folder / 'state.json'}: it is the state of step {record['step']}, in the folder of another state")


def _check_beginning(folder: Path, record: Mapping[str, Any], like: TrainState) -> None:
    """Raises Damaged where a recorded state began from something else than the run of `like`."""
    if record["start"] == like.start.digest:
        return
    here, there = json.loads(json.dumps(like.start.identity())), record["begun_from"]  # tuples are lists there
    differing = [_BEGINNINGS[name] for name in _BEGINNINGS if here.get(name) != there.get(name)]
    raise Damaged(
        f"{folder / 'state.json'}: it began from another {' and another '.join(differing) or 'start'} than this run,"
        " so its steps are not those of this run"
    )


def load(folder: Path, like: TrainState, history: Path | None = None) -> tuple[TrainState, dict[str, str]]:
    """Load the state in a folder, and the versions it was made with.

    The run's beginning, settings and attachments are those of `like`. `history` is the folder of the run's blocks of
    history, by default the one two folders up. Raises Damaged where the files were changed, or are of a run that began
    from something else.
    """
    record = read_record(folder)
    if "files" in record["tensors"]:
        raise Damaged(
            f"{folder / 'state.json'}: it is a saved state, not one of a run's own folder; Load State reads it"
        )
    _check_beginning(folder, record, like)
    files = record["tensors"].get("parts", [record["tensors"]])
    paths = [folder / file["file"] for file in files]
    for path, file in zip(paths, files, strict=True):
        check_file(path, file["sha256"])
    try:
        if "parts" in record["tensors"]:
            tensors = rank_files.read(paths)
        else:
            tensors = load_safetensors(str(paths[0]))[0]
    except ValueError as error:
        raise Damaged(str(error)) from error
    if history is None:
        history = (folder.parent if record["kind"] == "partial" else folder).parent / HISTORY
    measured = history_of(record["history"], history)
    try:
        return restore(like, record, tensors, measured), record["versions"]
    except Damaged as error:
        raise Damaged(f"{paths[0]}: {error}") from error


def group_tensors(state: TrainState) -> dict[str, Tensor]:
    """All tensors of a state by `<group>/<name>`, as its files have them."""
    tensors = {}
    for group in GROUPS:
        for name, tensor in getattr(state, group).items():
            tensors[f"{group}/{name}"] = tensor
    return tensors


def restore(like: TrainState, record: dict[str, Any], tensors: Mapping[str, Tensor], history: History) -> TrainState:
    """Build a state from a record and tensors by `<group>/<name>`: `like` at the record's position.

    Raises Damaged if they are of another run.
    """
    groups: dict[str, dict[str, Tensor]] = {group: {} for group in GROUPS}
    for full, tensor in tensors.items():
        group, _, name = full.partition("/")
        if group not in groups:
            raise Damaged(f"it holds {full[:80]!r}, which is of no training state")
        groups[group][name] = tensor.clone()  # not a view of the file, which may be replaced
    order = dict.fromkeys(record["order"])  # the gradient's norm is summed in it
    if groups["trained"].keys() != order.keys() or like.trained.keys() - order.keys():
        raise Damaged("it trains other tensors than this run")  # more of them: layers that are left out today
    if any(tensor.shape != groups["trained"][name].shape for name, tensor in like.trained.items()):
        raise Damaged("it trains tensors of other shapes than this run")
    powers = {name.partition("/")[2] for name in groups["powers"]}
    if groups["average"].keys() - order.keys() or powers - order.keys():
        raise Damaged("it holds averages of other tensors than it trains")
    cost = record["effort"]
    return replace(
        like,
        trained={name: groups["trained"][name] for name in order},
        optimizer=groups["optimizer"],
        average=groups["average"],
        powers=groups["powers"],
        step=record["step"],
        position=tuple((settings, steps) for settings, steps in record["position"]),
        history=history,
        cost=RunCost(float(cost["seconds"]), int(cost["memory"])),
        taken=tuple((step, values) for step, values in record.get("taken", [])),
    )


def tail_of(history: History, blocks: list[str]) -> dict[str, Any]:
    """A history as it stands in a state.json: the names of its blocks, and the rest."""
    return {"blocks": blocks, "outdated": history.outdated, **_rows(history, len(blocks) * BLOCK, len(history.loss))}


def _rows(history: History, start: int, end: int) -> dict[str, Any]:
    """The measurements of the steps after `start` up to `end`. The validation at step 0 goes with the first step."""
    rows: dict[str, Any] = {
        "loss": history.loss[start:end],
        "rate": history.rate[start:end],
        "norm": history.norm[start:end],
        "validation": _select_between(history.validation, start, end),
    }
    average = _select_between(history.average_validation, start, end)
    if average:  # runs without an average are stored as they were before it was measured
        rows["average_validation"] = average
    accuracy = _select_between(history.accuracy, start, end)
    if accuracy:
        rows["accuracy"] = accuracy
    return rows


def _select_between(validations: Sequence[tuple[int, float]], start: int, end: int) -> list[tuple[int, float]]:
    return [row for row in validations if start < row[0] <= end or row[0] == start == 0]


def history_of(recorded: dict[str, Any], folder: Path) -> History:
    """The history that `tail_of` recorded, with its blocks in `folder`. Raises Damaged."""
    parts = []
    for name in recorded["blocks"]:
        path = folder / os.path.basename(name)
        try:
            body = read_bounded(path, _MOST_BLOCK)
        except OSError as error:
            raise Damaged(f"{path}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise Damaged(f"{path}: {error}") from error
        if f"{sha256(body).hexdigest()}.json" != name:
            raise Damaged(f"{path}: its hash is not its name; it was changed or cut short")
        try:
            parts.append(json.loads(body))
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{path}: is not JSON ({error})") from error
        if not block_of_history(parts[-1]):
            raise Damaged(f"{path}: is not a block of history")
    parts.append(recorded)
    loss, rate, norm = (tuple(value for part in parts for value in part[name]) for name in ("loss", "rate", "norm"))
    validation = tuple((step, value) for part in parts for step, value in part["validation"])
    average = tuple((step, value) for part in parts for step, value in part.get("average_validation", []))
    accuracy = tuple((step, value) for part in parts for step, value in part.get("accuracy", []))
    return History(loss, rate, norm, validation, recorded.get("outdated", 0), average, accuracy)


def check_file(path: Path, expected: str) -> None:
    """Raises Damaged unless the file exists and has this hash."""
    try:
        hashed = sha256_of_file(path)
    except OSError as error:
        raise Damaged(f"{path}: cannot be read ({error.strerror})") from error
    if hashed != expected:
        raise Damaged(f"{path}: its hash is not the one in state.json; it was changed or cut short")


def record_of(state: TrainState, made_with: Mapping[str, str]) -> dict[str, Any]:
    """The entries of a state.json, except its history and files."""
    optional: dict[str, Any] = {}
    if state.taken:
        optional["taken"] = [[step, dict(values)] for step, values in state.taken]
    if state.settings.clip_skip is not None:
        optional["clip_skip"] = state.settings.clip_skip
    return {
        **optional,
        "format": FORMAT,
        "key": state.key,
        "start": state.start.digest,
        "begun_from": state.start.identity(),
        "settings": {"optimizer": asdict(state.settings.optimizer), "objective": state.settings.objective.identity()},
        "position": [list(part) for part in state.position],
        "step": state.step,
        "order": list(state.trained),
        "effort": asdict(state.cost),
        "versions": dict(made_with),
    }


_BEGINNINGS = {  # what `Start.identity` tells, in words
    "model": "model",
    "dataset": "dataset",
    "adapter": "Adapter Settings",
    "ema": "EMA Settings",
    "seed": "seed",
    "training_only": "training-only LoRA",
    "words": "Train Words",
    "task": "kind of training",
    "task_settings": "setting of its kind of training",
}


def _keep_as(folder: Path, record: Mapping[str, Any], kind: str) -> None:
    """Say in the record of a state why it is kept from now on."""
    if record["kind"] != kind:
        write_record(folder, {**{key: value for key, value in record.items() if key != "sha256"}, "kind": kind})


def write_record(folder: Path, body: dict[str, Any]) -> None:
    """Writes a state.json with its own hash, whole or not at all."""
    write_whole(str(folder / "state.json"), [_sign(body)])
    sync_folder(folder)


def _sign(body: dict[str, Any]) -> bytes:
    text = json.dumps({**body, "sha256": sha256_of_json(body)}, indent=1, sort_keys=True)
    error = problem(json.loads(text))
    assert not error, error  # it must be readable again
    return text.encode()


def read_record(folder: Path) -> dict[str, Any]:
    """Read the state.json of a folder.

    Raises Damaged if it is missing, changed, of another format, or names a file elsewhere, NewerFormat if a newer Graft
    wrote it.
    """
    path = folder / "state.json"
    record = _parse_record(path)
    _refuse_newer_record(path, record)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise Damaged(f"{path}: expected format {FORMAT} of a Graft training state")
    if sha256_of_json({k: v for k, v in record.items() if k != "sha256"}) != record.get("sha256"):
        raise Damaged(f"{path}: its hash does not fit its contents; it was changed by hand or cut short")
    fault = problem(record)
    if fault:
        raise Damaged(f"{path}: {fault}")
    return record


def _parse_record(path: Path) -> Any:
    try:
        return json.loads(read_bounded(path, MOST_RECORD))
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path}: cannot be read as JSON ({error})") from error


def refuse_newer(folder: Path) -> None:
    """Raises NewerFormat when the state in a folder is of a newer format: it must not be overwritten."""
    path = folder / "state.json"
    if not path.is_file():
        return
    try:
        record = _parse_record(path)
    except Damaged:
        return
    _refuse_newer_record(path, record)


def _refuse_newer_record(path: Path, record: Any) -> None:
    if not isinstance(record, dict) or type(record.get("format")) is not int or record["format"] <= FORMAT:
        return
    versions = record.get("versions")
    writer = "a newer Graft"
    if isinstance(versions, dict) and isinstance(versions.get("graft"), str):
        writer = f"Graft {versions['graft'][:40]}"
    raise NewerFormat(
        f"{path}: {writer} wrote it in format {record['format']}, and this Graft reads format {FORMAT}. It is kept"
        " as it is: update Graft to use it, or give this run or state another name."
    )


def remove(folder: Path) -> None:
    """Remove a state, and its folder if nothing else is in it."""
    names = [name for name in names_in(folder) if name.startswith("state")]
    disk_quota.remove([folder / "state.json", *(folder / name for name in names)])


def _readable_record(folder: Path) -> dict[str, Any] | None:
    """What `read_record` gives, None without a readable state. Raises NewerFormat: that one must not be overwritten."""
    try:
        return read_record(folder)
    except NewerFormat:
        raise
    except Damaged:
        return None


def _is_whole(folder: Path, record: dict[str, Any]) -> bool:
    """Whether the tensors in a folder are those that its state recorded."""
    stored = record["tensors"]
    try:
        if "file" in stored:
            check_file(folder / stored["file"], stored["sha256"])
    except Damaged:
        return False
    return True


def _kind(folder: Path) -> str | None:
    """The kind under which the state in a folder is kept. None when no readable state is there."""
    try:
        return str(read_record(folder)["kind"])
    except Damaged:
        return None
