"""Save State and Load State: named training states, as sharded safetensors and one state.json, verified when read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ...ema.decay import EMASettings
from ...storage import shards
from ...storage.atomic import make_folders, sync_folder
from ...storage.digest import sha256_of_file, sha256_of_json, sha256_of_tensors
from ...storage.disk_errors import explain_disk_errors
from ...storage.lock import folder_lock
from ..objective.settings import ObjectiveSettings
from ..optimizers.settings import OptimizerSettings
from ..state import DENOISING, Settings, Start, TrainState
from ..tasks.registry import TASKS
from ..tasks.task import TaskKind
from ..trainable.settings import AdapterSettings
from ..trainable.words import WordSettings
from .names import PLAIN, is_plain_name, saved_names
from .store import (
    Damaged,
    check_file,
    group_tensors,
    history_of,
    read_record,
    record_of,
    refuse_newer,
    restore,
    tail_of,
    write_record,
)

Plain = TypeVar("Plain")


def folder_of(root: Path, name: str) -> Path:
    """The folder for a name in `root`. ValueError when it is not a plain folder name."""
    if not is_plain_name(name):
        raise ValueError(f"name is {name!r}: expected a plain folder name, {PLAIN}.")
    return root / name


def save(state: TrainState, root: Path, name: str, shard: int = 0, versions: Mapping[str, str] | None = None) -> Path:
    """Keep a state under a name, in files of at most `shard` bytes (0: one file); its folder.

    A state that had the name is replaced when the new one is whole on disk, and not before. Raises OSError with nothing
    half-written left, FolderInUse when another process saves under that name, NewerFormat when the state that has the
    name was saved by a newer Graft.
    """
    with folder_lock(folder_of(root, name)), explain_disk_errors(str(folder_of(root, name))):
        return _save(state, folder_of(root, name), shard, versions or {})


def _save(state: TrainState, folder: Path, shard: int, versions: Mapping[str, str]) -> Path:
    refuse_newer(folder)
    tensors = group_tensors(state)
    # Named by content and shard size, so that the files of an older state with this name are not overwritten.
    stem = f"tensors-{sha256_of_json([sha256_of_tensors(tensors), list(tensors), shard])[:16]}"
    new_folders, before = make_folders(folder), set(folder.glob("tensors-*"))
    try:
        paths = shards.save_shards(tensors, folder, stem, shard)
        sync_folder(folder)
        files = {path.name: sha256_of_file(path) for path in paths}
        write_record(folder, {**_record_of(state, versions), "tensors": {"name": stem, "files": files}})
    except BaseException:
        if not _is_of(folder, stem):
            for path in set(folder.glob("tensors-*")) - before:
                path.unlink(missing_ok=True)
            for new_folder in reversed(new_folders):
                with contextlib.suppress(OSError):
                    new_folder.rmdir()
        raise
    for path in folder.glob("tensors-*"):
        if path.name not in files:
            path.unlink(missing_ok=True)
    return folder


def _is_of(folder: Path, stem: str) -> bool:
    """Whether the state in a folder has these tensors."""
    try:
        return bool(read_record(folder)["tensors"].get("name") == stem)
    except Damaged:
        return False


def _record_of(state: TrainState, versions: Mapping[str, str]) -> dict[str, Any]:
    """The entries of a saved state's state.json, except its files."""
    record = {**record_of(state, versions), "run": state.run, "notes": dict(state.notes), "kind": "saved"}
    record["history"] = tail_of(state.history, [])
    if state.open_schedule:
        record["open_schedule"] = True
    return record


def needs_clip(root: Path, name: str) -> bool:
    """Whether the state with this name trains the text encoder or words too; False without such a state, which `load`
    says.
    """
    folder = folder_of(root, name)
    if not (folder / "state.json").is_file():
        return False
    start = read_record(folder)["begun_from"]
    return bool(start["adapter"].get("text_encoder")) or "words" in start


def is_of_vae(root: Path, name: str) -> bool:
    """Whether the state with this name trains a VAE; False without such a state, which `load` says."""
    folder = folder_of(root, name)
    return (folder / "state.json").is_file() and _kind(read_record(folder)["begun_from"], folder).network == "VAE"


def _kind(start: Mapping[str, Any], folder: Path) -> TaskKind:
    """The kind of training of a recorded run. Raises Damaged for one that this Graft does not know."""
    name = start.get("task", DENOISING)
    if name not in TASKS:
        raise Damaged(
            f"{folder / 'state.json'}: it is of the kind of training {name!r}, which this Graft does not know; update"
            " Graft to load it"
        )
    return TASKS.get(name)


def load(
    root: Path,
    name: str,
    model: str,
    dataset: str | None = None,
    base: Callable[[], Mapping[str, Tensor]] | None = None,
    training_only: str | None = None,
) -> TrainState:
    """The state with this name, for the model, dataset and training-only LoRA with these fingerprints (the last two may
    be left out).

    Raises FileNotFoundError without such a state, Damaged naming the file, ValueError when one of them is another.
    """
    folder = folder_of(root, name)
    if not (folder / "state.json").is_file():
        raise FileNotFoundError(
            f"There is no saved state {name!r} in {root}; there are: {', '.join(saved_names(root)) or 'none'}."
        )
    record = read_record(folder)
    _check_belongs(name, record["begun_from"], folder, model, dataset, training_only)
    tensors = _read_checked_tensors(folder, record["tensors"])
    template = _before_first_step(name, record, folder, base)
    measured = history_of(record["history"], folder)
    try:
        return restore(template, record, tensors, measured)
    except Damaged as error:
        raise Damaged(f"{folder / 'state.json'}: {error}") from error


def _check_belongs(
    name: str, start: Mapping[str, Any], folder: Path, model: str, dataset: str | None, training_only: str | None
) -> None:
    """Raise ValueError with everything that a state began from and that is not what is connected."""
    errors = []
    network = _kind(start, folder).network
    for kind, called, preposition, digest in (
        ("model", network, "on", model),
        ("dataset", "dataset", "with", dataset),
    ):
        if digest is not None and digest != start[kind]:
            errors.append(
                f"it was trained {preposition} the {called} {start[kind][:16]}, and the {called} that is connected is"
                f" {digest[:16]}"
            )
    if training_only is not None and not start.get("training_only"):
        errors.append("it was trained without a training-only LoRA, and one is connected")
    elif training_only is not None and training_only != start["training_only"]:
        errors.append(
            f"it was trained with the training-only LoRA {start['training_only'][:16]}, and what is connected is"
            f" {training_only[:16]}"
        )
    if errors:
        instead = "save a LoRA and start a run from it (Adapter Settings, initial LoRA)"
        if network == "VAE":
            instead = "start a run with it (Start VAE Training)"
        raise ValueError(
            f"The saved state {name!r} does not fit: {'; '.join(errors)}. Connect that one; to go on with another,"
            f" {instead}."
        )


def _read_checked_tensors(folder: Path, stored: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a saved state, each of whose files has the hash that its record names."""
    if "name" not in stored:
        raise Damaged(f"{folder / 'state.json'}: it is a state of a run's own folder, not a saved one")
    for file, sha256 in stored["files"].items():
        check_file(folder / file, sha256)
    try:
        return shards.load_shards(folder, stored["name"])
    except ValueError as error:
        raise Damaged(str(error)) from error


def _before_first_step(
    name: str, record: Mapping[str, Any], folder: Path, base: Callable[[], Mapping[str, Tensor]] | None
) -> TrainState:
    """The state that the recorded one was begun from, with the settings that it had last."""
    start, settings = record["begun_from"], record["settings"]
    ema = words = task_settings = None
    if start["ema"] is not None:
        ema = _rebuild(EMASettings, start["ema"], folder)
    if "words" in start:
        words = _rebuild(WordSettings, start["words"], folder)
    kind = _kind(start, folder)
    if kind.settings is not None:
        task_settings = _rebuild(kind.settings, start.get("task_settings", {}), folder)
    adapter = _rebuild(AdapterSettings, start["adapter"], folder)
    only = start.get("training_only", "")
    return TrainState(
        Start(start["model"], start["dataset"], adapter, ema, start["seed"], only, words, kind.name, task_settings),
        Settings(
            _rebuild(OptimizerSettings, settings["optimizer"], folder),
            _rebuild(ObjectiveSettings, settings["objective"], folder),
            record.get("clip_skip"),
        ),
        {},
        run=record.get("run", name),
        notes=record.get("notes", {}),
        base=base,
        open_schedule=record.get("open_schedule", False),
    )


def _rebuild(kind: Callable[..., Plain], values: Mapping[str, Any], folder: Path) -> Plain:
    field_names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(values.keys() - field_names)
    if unknown:
        raise Damaged(
            f"{folder / 'state.json'}: a newer Graft wrote it, with {', '.join(unknown)}; update Graft to load it"
        )
    try:
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    except (TypeError, ValueError, OverflowError) as error:
        raise Damaged(f"{folder / 'state.json'}: its settings cannot be used: {error}") from error
