"""Training states on disk: graft/<run>/<key>/ with state.safetensors and state.json, whole or not at all, verified when they are read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..patches.files import load_safetensors, safetensors_bytes, write_whole
from .state import History, TrainState, advanced, digest_of, key_of

FORMAT = 1
_GROUPS = ("trained", "optimizer", "average", "powers")


class Damaged(ValueError):
    """A stored state that cannot be used: the message says which file and what is wrong with it."""


@dataclass(frozen=True)
class Found:
    """A state that was read back, where it lay, whether it was a snapshot, and the versions it was made with."""

    state: TrainState
    folder: Path
    partial: bool
    versions: dict[str, str]


class Store:
    """The states of one run's folder. Nothing but safetensors and JSON is read, and only when its hash fits."""

    def __init__(self, root: str | Path, run: str, versions: dict[str, str] | None = None) -> None:
        if not re.fullmatch(r"[^\\/:*?\"<>|\x00-\x1f]{1,100}", run) or run.strip(" .") != run or run in ("", ".", ".."):
            raise ValueError(f"run is {run!r}: expected a plain folder name, without slashes, colons or quotes.")
        self.folder = Path(root) / run
        self.versions = versions or {}

    def result_folder(self, key: str) -> Path:
        """Where the state with this key lies."""
        return self.folder / key[:32]

    # --- writing ------------------------------------------------------------------------------------------------------------------

    def save(self, state: TrainState) -> Path:
        """Keep a state as a result; its folder. Raises OSError (a full disk) with nothing half-written left behind."""
        folder = self.result_folder(state.key)
        self._write(state, folder, "state.safetensors")
        return folder

    def save_partial(self, state: TrainState, target: str) -> Path:
        """Keep a state on the way to the state with key `target`, in place of an earlier snapshot of the same way."""
        folder = self.result_folder(target) / "partial"
        tensors = f"state-{state.step:08d}.safetensors"
        self._write(state, folder, tensors)
        for old in folder.glob("state-*.safetensors"):  # the JSON names the new one by now
            if old.name != tensors:
                old.unlink()
        return folder

    def drop_partial(self, target: str) -> None:
        """Remove the snapshot on the way to `target`, and its folder if nothing else is in it."""
        folder = self.result_folder(target)
        (folder / "partial" / "state.json").unlink(missing_ok=True)  # first, so that it never names what is gone
        shutil.rmtree(folder / "partial", ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()

    def _write(self, state: TrainState, folder: Path, tensors: str) -> None:
        made = _make_folders(folder)
        path = folder / tensors
        orphan = not path.exists()  # until a state.json names them, tensors that were not there before are nobody's
        try:
            hashed = hashlib.sha256()

            def chunks() -> Any:
                every = {f"{group}/{name}": t for group in _GROUPS for name, t in getattr(state, group).items()}
                for chunk in safetensors_bytes(every, {}):
                    hashed.update(chunk)
                    yield chunk

            write_whole(str(path), chunks())
            record = _record(state, tensors, hashed.hexdigest(), self.versions)
            # Tensors first: a state.json in place means that everything it names is in place.
            write_whole(str(folder / "state.json"), [json.dumps(record, indent=1, sort_keys=True).encode()])
            orphan = False
            _sync_folder(folder)
        except BaseException:
            if orphan:
                path.unlink(missing_ok=True)
            for one in reversed(made):
                with contextlib.suppress(OSError):
                    one.rmdir()
            raise

    # --- reading ------------------------------------------------------------------------------------------------------------------

    def furthest(self, state: TrainState, steps: int) -> tuple[Found | None, list[str]]:
        """The stored state furthest on the way from `state` to `steps` more steps with its settings, and what was found damaged.

        Results are found by their key, snapshots by what they record. Whatever cannot be used is named, never deleted.
        """
        problems: list[str] = []
        try:
            names = set(os.listdir(self.folder))
        except FileNotFoundError:
            return None, problems
        settings, start = state.settings.digest, state.start.digest
        snapshots = self._snapshots(names, state, steps, problems)
        for count in range(steps, 0, -1):
            position = advanced(state.position, settings, count)
            key = key_of(start, position)
            folders = [(self.result_folder(key), False)] if key[:32] in names else []
            folders += [(folder, True) for folder in snapshots.get(state.step + count, [])]
            for folder, partial in folders:
                if not (folder / "state.json").is_file():
                    continue
                try:
                    found, recorded = load(folder, state)
                except Damaged as error:
                    problems.append(str(error))
                    continue
                if found.key == key:
                    return Found(found, folder, partial, recorded), problems
        return None, problems

    def _snapshots(self, names: set[str], state: TrainState, steps: int, problems: list[str]) -> dict[int, list[Path]]:
        out: dict[int, list[Path]] = {}
        for name in sorted(names):
            folder = self.folder / name / "partial"
            if not (folder / "state.json").is_file():
                continue
            try:
                record = _read_record(folder)
            except Damaged as error:
                problems.append(str(error))
                continue
            if record["start"] == state.start.digest and state.step < record["step"] <= state.step + steps:
                out.setdefault(record["step"], []).append(folder)
        return out


def load(folder: Path, like: TrainState) -> tuple[TrainState, dict[str, str]]:
    """The state in a folder, with the run's beginning, settings and attachments of `like`, and the versions it was made with."""
    record = _read_record(folder)
    path = folder / record["tensors"]["file"]
    try:
        with open(path, "rb") as file:
            hashed = hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)
    except OSError as error:
        raise Damaged(f"{path}: cannot be read ({error.strerror})") from error
    if hashed != record["tensors"]["sha256"]:
        raise Damaged(f"{path}: its hash is not the one in state.json; it was changed or cut short")
    try:
        tensors, _ = load_safetensors(str(path))
    except ValueError as error:
        raise Damaged(str(error)) from error
    groups: dict[str, dict[str, Tensor]] = {group: {} for group in _GROUPS}
    for full, tensor in tensors.items():
        group, name = full.split("/", 1)
        groups[group][name] = tensor.clone()  # not a view of the file, which may be replaced
    if groups["trained"].keys() != like.trained.keys():
        raise Damaged(f"{path}: it trains other tensors than this run")
    history = record["history"]
    state = replace(
        like,
        trained={name: groups["trained"][name] for name in like.trained},  # in the run's order: the gradient's norm is summed in it
        optimizer=groups["optimizer"],
        average=groups["average"],
        powers=groups["powers"],
        step=record["step"],
        position=tuple((settings, steps) for settings, steps in record["position"]),
        history=History(
            loss=tuple(history["loss"]),
            rate=tuple(history["rate"]),
            norm=tuple(history["norm"]),
            validation=tuple((step, loss) for step, loss in history["validation"]),
        ),
    )
    return state, record["versions"]


def _record(state: TrainState, tensors: str, sha256: str, made_with: dict[str, str]) -> dict[str, Any]:
    adapter = {k: v for k, v in vars(state.start.adapter).items() if k != "initial"}
    body = {
        "format": FORMAT,
        "key": state.key,
        "start": state.start.digest,
        "begun_from": {
            "model": state.start.model,
            "dataset": state.start.dataset,
            "adapter": adapter,
            "ema": None if state.start.ema is None else asdict(state.start.ema),
            "seed": state.start.seed,
        },
        "settings": {"optimizer": asdict(state.settings.optimizer), "objective": asdict(state.settings.objective)},
        "position": [list(part) for part in state.position],
        "step": state.step,
        "history": asdict(state.history),
        "tensors": {"file": tensors, "sha256": sha256},
        "versions": made_with,
    }
    return {**body, "sha256": digest_of(body)}


def _read_record(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Damaged(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise Damaged(f"{path}: expected format {FORMAT} of a Graft training state")
    if digest_of({k: v for k, v in record.items() if k != "sha256"}) != record.get("sha256"):
        raise Damaged(f"{path}: its hash does not fit its contents; it was changed by hand or cut short")
    if os.path.basename(record["tensors"]["file"]) != record["tensors"]["file"] or not record["tensors"]["file"].endswith(".safetensors"):
        raise Damaged(f"{path}: it names {record['tensors']['file']!r}, which is no safetensors file beside it")
    return record


def _digest(file: Any) -> str:
    hashed = hashlib.sha256()
    for chunk in iter(lambda: file.read(1 << 20), b""):
        hashed.update(chunk)
    return hashed.hexdigest()


def _make_folders(folder: Path) -> list[Path]:
    """Create a folder and those above it; the ones that were not there, outermost first."""
    missing = []
    at = folder
    while not at.exists():
        missing.append(at)
        at = at.parent
    missing.reverse()
    for one in missing:
        one.mkdir(exist_ok=True)
    return missing


def _sync_folder(folder: Path) -> None:
    """Make renames in a folder durable where the system can (Windows cannot open folders)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


