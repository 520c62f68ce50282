"""Lists stored runs and states without reading tensors, for panels that show earlier runs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ...storage.file_list import names_in
from ..state import advance_position, state_key
from .disk_quota import CACHE
from .store import HISTORY, Damaged, Store, history_of, read_record


def runs(root: str | Path) -> list[dict[str, Any]]:
    """Every run that has a readable state: {run, states, step}, the run with the newest state first.

    `step` is that of the furthest state.
    """
    if os.path.isdir(root):
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))
    else:
        names = []
    named_states = [(name, states(root, name)) for name in names if name != CACHE and _plain(root, name)]
    named_states = [(name, run_states) for name, run_states in named_states if run_states]
    named_states.sort(key=lambda pair: max(state["changed"] for state in pair[1]), reverse=True)
    return [
        {"run": name, "states": len(run_states), "step": max(state["step"] for state in run_states)}
        for name, run_states in named_states
    ]


def states(root: str | Path, run: str) -> list[dict[str, Any]]:
    """The readable states of a run: {key, step, kind, changed, best}; `changed` is in seconds since 1970.

    Raises ValueError if the name is not valid.
    """
    folder = Store(root, run).folder
    entries = []
    for state_folder in sorted(_places(folder)):
        try:
            record, changed = read_record(state_folder), (state_folder / "state.json").stat().st_mtime
        except (Damaged, FileNotFoundError):
            continue  # skip it here; loading the state reports what is wrong with it
        entries.append({"key": record["key"], "step": record["step"], "kind": record["kind"], "changed": changed})
    return sorted(entries, key=lambda state: (state["step"], state["changed"]))


def describe_state(root: str | Path, run: str, key: str, until: int = 0) -> dict[str, Any]:
    """What the editor shows of a state.

    The keys: run, key, start (its digest), step, kind, settings, effort, versions and the whole history.

    `key` is a state's key, or that of the state that a snapshot is on the way to; "latest" is the furthest state of the
    run. When no state has the key, it is the furthest on the way there, to step `until`: where training was stopped.
    Raises ValueError for what is not a name or key, FileNotFoundError when it is not stored, Damaged when it cannot
    be read.
    """
    store = Store(root, run)
    if key == "latest":
        stored = states(root, run)
        if not stored:
            raise FileNotFoundError(f"run {run!r} has no stored state")
        key = stored[-1]["key"]
    if not re.fullmatch(r"[0-9a-f]{32,64}", key):
        raise ValueError(f"key {key!r}: expected the 32 to 64 hexadecimal digits of a stored state, or 'latest'")
    folder = _place(store, key, until)
    record = read_record(folder)
    measured = history_of(record["history"], store.folder / HISTORY)
    names = ("key", "start", "step", "kind", "settings", "effort", "versions", "begun_from")
    measurements = ("loss", "rate", "norm", "validation", "average_validation", "accuracy")
    history = {name: list(getattr(measured, name)) for name in measurements}
    return {"run": run, **{name: record[name] for name in names}, "best": measured.best, "history": history}


def _place(store: Store, key: str, until: int) -> Path:
    """The folder of the state with this key, or of the snapshot of it, or of the furthest state on the way to it."""
    folder = store.result_folder(key)
    for candidate in (folder, folder / "partial"):
        if (candidate / "state.json").is_file():
            return candidate
    on_the_way = {}
    for candidate in _places(store.folder):
        record = _record_of(candidate)
        if record is None:
            continue
        if candidate.name == "partial" and record["key"] == key:
            return candidate
        if _leads_to(record, key, until):
            on_the_way[record["step"]] = candidate
    if on_the_way:
        return on_the_way[max(on_the_way)]
    raise FileNotFoundError(f"run {store.folder.name!r} has no stored state {key[:32]}")


def _leads_to(record: dict[str, Any], key: str, until: int) -> bool:
    """Whether more steps with the same settings, up to step `until`, lead from a state to the one with this key."""
    position = tuple((settings, steps) for settings, steps in record["position"])
    if not position or record["step"] >= until:
        return False
    settings, _ = position[-1]
    reached = state_key(record["start"], advance_position(position, settings, until - record["step"]))
    return reached[:32] == key[:32]


def _places(folder: Path) -> list[Path]:
    """Every folder of a run that holds a state."""
    places: list[Path] = []
    for name in names_in(folder):
        for place in (folder / name, folder / name / "partial"):
            if (place / "state.json").is_file():
                places.append(place)
    return places


def _record_of(folder: Path) -> dict[str, Any] | None:
    """What the state in a folder says of itself, None when it cannot be read or another process has just removed it."""
    try:
        return read_record(folder)
    except Damaged:
        return None


def _plain(root: str | Path, name: str) -> bool:
    try:
        Store(root, name)
    except ValueError:
        return False
    return True
