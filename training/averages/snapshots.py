"""Snapshots of a run's averages, for EMA Merge: LoRA files in half precision under graft/<run>/averages/.

They are power-function averages (Karras 2024, 2312.02696).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ...ema.post_hoc import Profile
from ...storage.atomic import make_folders, sync_folder
from ...storage.digest import sha256_of_tensors
from ...storage.file_list import names_in
from ...storage.float16 import apply_scales, from_float16, to_float16
from ...storage.safetensors import load_safetensors, read_header, write_safetensors
from ..lora_metadata import lora_metadata
from ..state import TrainState, position_at, state_key

FOLDER = "averages"
Position = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Snapshot:
    """One snapshot file: the average of one width at the end of `position`, for the run that began as `start`.

    `position` has the run's settings and steps.
    """

    path: Path
    start: str
    position: Position
    width: float

    @property
    def profile(self) -> Profile:
        """The step and width of the average."""
        return Profile(_steps(self.position), self.width)


def path_of(folder: Path, start: str, position: Position, width: float) -> Path:
    """The file of a snapshot; `folder` is the run's."""
    return folder / FOLDER / f"{state_key(start, position)[:32]}-{width:g}.safetensors"


def expected_snapshots(state: TrainState, folder: Path) -> list[Snapshot]:
    """All snapshots that a run has taken up to `state`, by step and width, whether their files still exist or not."""
    ema = state.start.ema
    if ema is None or not ema.snapshots:
        return []
    start = state.start.digest
    snapshots = []
    for step in range(ema.snapshots, state.step + 1, ema.snapshots):
        position = position_at(state.position, step)
        for width in ema.widths:
            snapshots.append(Snapshot(path_of(folder, start, position, width), start, position, width))
    return snapshots


def write(folder: Path, state: TrainState, width: float, lora: Callable[[], Mapping[str, Tensor]]) -> None:
    """Save an average at `state`, unless the file exists. Raises OSError, leaving nothing half-written."""
    path = path_of(folder, state.start.digest, state.position, width)
    if path.exists():  # the name identifies the content
        return
    make_folders(path.parent)
    tensors = to_float16(lora())
    snapshot_metadata = {
        "graft_width": repr(width),
        "graft_position": json.dumps([list(part) for part in state.position]),
        "graft_tensors": sha256_of_tensors(tensors),
    }
    write_safetensors(path, tensors, {**lora_metadata(state), **snapshot_metadata})
    sync_folder(path.parent)


def read(snapshot: Snapshot) -> dict[str, Tensor]:
    """Read a snapshot as a LORA_MODEL in float32.

    Raises ValueError naming the file if it is missing, damaged or another one.
    """
    return from_float16(_open_checked(snapshot))


def read_as_stored(snapshot: Snapshot) -> dict[str, Tensor]:
    """`read`, memory-mapped in float16: the same numbers, and no copy of them."""
    return apply_scales(_open_checked(snapshot))


def _open_checked(snapshot: Snapshot) -> dict[str, Tensor]:
    """A snapshot's tensors, memory-mapped, after their hash was compared with the recorded one."""
    if not snapshot.path.is_file():
        raise ValueError(
            f"{snapshot.path} is missing: the snapshot of step {snapshot.profile.step}, width {snapshot.width:g}"
        )
    tensors, metadata = load_safetensors(str(snapshot.path))
    if metadata.get("graft_tensors") != sha256_of_tensors(tensors):
        raise ValueError(f"{snapshot.path}: its hash is not the recorded one; it was changed or cut short")
    if snapshot_of(snapshot.path, metadata) != snapshot:
        raise ValueError(f"{snapshot.path}: it is not the snapshot that its name says")
    return tensors


def snapshot_of(path: Path, metadata: Mapping[str, str]) -> Snapshot | None:
    """The snapshot that a file's metadata describe, or None."""
    if not metadata.keys() >= {"graft_run", "graft_width", "graft_position"}:
        return None
    try:
        position = tuple((str(settings), int(steps)) for settings, steps in json.loads(metadata["graft_position"]))
        return Snapshot(path, metadata["graft_run"], position, float(metadata["graft_width"]))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: what it says of itself cannot be read ({error})") from error


def find_snapshots(folder: Path) -> list[Snapshot]:
    """Every snapshot in a run's folder, with any start and settings, by step and width. Only headers are read."""
    kept = []
    for name in names_in(folder / FOLDER):
        path = folder / FOLDER / name
        if path.suffix != ".safetensors":
            continue
        with contextlib.suppress(FileNotFoundError):  # another process has removed it since
            snapshot = snapshot_of(path, read_header(str(path))[1])
            if snapshot is not None:
                kept.append(snapshot)
    return sorted(kept, key=lambda kept: (kept.start, kept.profile.step, kept.width, kept.path.name))


def branches(snapshots: list[Snapshot]) -> dict[str, list[Snapshot]]:
    """Split snapshots into branches, by the key of each branch's last state.

    A run that was started or continued in different ways has several.
    """
    positions = sorted({(snapshot.start, snapshot.position) for snapshot in snapshots})
    by_key = {}
    for start, end in positions:
        if any(start == other and end != later_end and _leads_to(end, later_end) for other, later_end in positions):
            continue
        on_branch = []
        for snapshot in snapshots:
            if snapshot.start == start and _leads_to(snapshot.position, end):
                on_branch.append(snapshot)
        by_key[state_key(start, end)] = on_branch
    return by_key


def _leads_to(position: Position, end: Position) -> bool:
    steps = _steps(position)
    return steps <= _steps(end) and position_at(end, steps) == position


def _steps(position: Position) -> int:
    return sum(count for _, count in position)
