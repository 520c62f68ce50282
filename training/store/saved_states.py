"""A training state under a name, to move a run to another folder or machine: sharded safetensors and one state.json,
verified when read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ...ema.decay import EMASettings
from ...storage import shards
from ...storage.atomic import make_folders, sync_folder
from ...storage.digest import sha256_of_file, sha256_of_json, sha256_of_tensors
from ...storage.disk_errors import disk_errors_at
from ...storage.lock import folder_lock
from ..objective.settings import ObjectiveSettings
from ..optimizers.settings import OptimizerSettings
from ..state import Settings, Start, TrainState
from ..trainable.settings import AdapterSettings
from .store import (
    PLAIN,
    Damaged,
    check_file,
    group_tensors,
    history_of,
    is_plain_name,
    read_record,
    record_of,
    restored,
    tail_of,
    write_record,
)

Plain = TypeVar("Plain")


def folder_of(root: Path, name: str) -> Path:
    """The folder of a name below `root`; ValueError when it is no plain folder name."""
    if not is_plain_name(name):
        raise ValueError(f"name is {name!r}: expected a plain folder name, {PLAIN}.")
    return root / name


def names(root: Path) -> list[str]:
    """The names that states are saved under."""
    return sorted(path.parent.name for path in root.glob("*/state.json"))


def save(state: TrainState, root: Path, name: str, shard: int = 0, versions: Mapping[str, str] | None = None) -> Path:
    """Keep a state under a name, in files of at most `shard` bytes (0: one file); its folder.

    A state that had the name is replaced when the new one is whole on disk, and not before. Raises OSError with nothing
    half-written left, FolderInUse when another process saves under that name.
    """
    with folder_lock(folder_of(root, name)), disk_errors_at(str(folder_of(root, name))):
        return _save(state, folder_of(root, name), shard, versions or {})


def _save(state: TrainState, folder: Path, shard: int, versions: Mapping[str, str]) -> Path:
    tensors = group_tensors(state)
    # By content and cut: files of the state that has the name now are never written over with others.
    stem = f"tensors-{sha256_of_json([sha256_of_tensors(tensors), list(tensors), shard])[:16]}"
    make_folders(folder)
    written = shards.save(tensors, folder, stem, shard)
    sync_folder(folder)
    files = {path.name: sha256_of_file(path) for path in written}
    more = {"run": state.run, "notes": dict(state.notes), "history": tail_of(state.history, []), "kind": "saved"}
    write_record(folder, {**record_of(state, versions), **more, "tensors": {"name": stem, "files": files}})
    for path in folder.glob("tensors-*"):
        if path.name not in files:
            path.unlink(missing_ok=True)
    return folder


def trains_text_encoder(root: Path, name: str) -> bool:
    """Whether the state with this name trains the text encoder too; False without such a state, which `load` says."""
    folder = folder_of(root, name)
    return (folder / "state.json").is_file() and bool(read_record(folder)["begun_from"]["adapter"].get("text_encoder"))


def load(
    root: Path,
    name: str,
    model: str,
    dataset: str | None = None,
    base: Callable[[], Mapping[str, Tensor]] | None = None,
) -> TrainState:
    """The state with this name, for the model and dataset with these fingerprints (a dataset may be left out).

    Raises FileNotFoundError without such a state, Damaged naming the file, ValueError when model or dataset are others.
    """
    folder = folder_of(root, name)
    if not (folder / "state.json").is_file():
        raise FileNotFoundError(
            f"There is no saved state {name!r} in {root}; there are: {', '.join(names(root)) or 'none'}."
        )
    record = read_record(folder)
    begun = record["begun_from"]
    wrong = [
        f"it was trained {preposition} the {what} {begun[what][:16]}, and the {what} that is connected is {given[:16]}"
        for what, preposition, given in (("model", "on", model), ("dataset", "with", dataset))
        if given is not None and given != begun[what]
    ]
    if wrong:
        advice = (
            "Connect that one; to go on with another, save a LoRA and start a run from it (Adapter Settings, initial)."
        )
        raise ValueError(f"The saved state {name!r} does not fit: {'; '.join(wrong)}. {advice}")
    if "name" not in record["tensors"]:
        raise Damaged(f"{folder / 'state.json'}: it is a state of a run's own folder, not a saved one")
    for file, sha256 in record["tensors"]["files"].items():
        check_file(folder / file, sha256)
    try:
        tensors = shards.load(folder, record["tensors"]["name"])
    except ValueError as error:
        raise Damaged(str(error)) from error
    settings = record["settings"]
    like = TrainState(
        Start(
            begun["model"],
            begun["dataset"],
            _rebuilt(AdapterSettings, begun["adapter"], folder),
            None if begun["ema"] is None else _rebuilt(EMASettings, begun["ema"], folder),
            begun["seed"],
        ),
        Settings(
            _rebuilt(OptimizerSettings, settings["optimizer"], folder),
            _rebuilt(ObjectiveSettings, settings["objective"], folder),
        ),
        {},
        run=record.get("run", name),
        notes=record.get("notes", {}),
        base=base,
    )
    measured = history_of(record["history"], folder)
    try:
        return restored(like, record, tensors, measured)
    except Damaged as error:
        raise Damaged(f"{folder / 'state.json'}: {error}") from error


def _rebuilt(kind: Callable[..., Plain], values: Mapping[str, Any], folder: Path) -> Plain:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    strange = sorted(values.keys() - known)
    if strange:
        raise Damaged(
            f"{folder / 'state.json'}: a newer Graft wrote it, with {', '.join(strange)}; update Graft to load it"
        )
    try:
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    except (TypeError, ValueError, OverflowError) as error:
        raise Damaged(f"{folder / 'state.json'}: its settings cannot be used: {error}") from error
