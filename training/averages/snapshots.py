"""Snapshots of a run's power-function averages: LoRA files in half precision under graft/<run>/averages/ (Karras 2024,
2312.02696).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ...ema.post_hoc import Profile
from ...storage.atomic import make_folders, sync_folder
from ...storage.digest import sha256_of_tensors
from ...storage.float16 import from_float16, to_float16
from ...storage.safetensors import load_safetensors, read_header, write_safetensors
from ..lora_metadata import lora_metadata
from ..state import TrainState, position_at, state_key

FOLDER = "averages"
Position = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Stored:
    """A snapshot file of the run that began as `start`: the average of one width at the end of `position`, the run's
    settings and steps.
    """

    path: Path
    start: str
    position: Position
    width: float

    @property
    def profile(self) -> Profile:
        """What the average is made of."""
        return Profile(sum(steps for _, steps in self.position), self.width)


def path_of(folder: Path, start: str, position: Position, width: float) -> Path:
    """The file of a snapshot; `folder` is the run's."""
    return folder / FOLDER / f"{state_key(start, position)[:32]}-{width:g}.safetensors"


def expected(state: TrainState, folder: Path) -> list[Stored]:
    """The snapshots that a run had taken when it stood at `state`, by step and width; whether they are there is another
    question.
    """
    ema = state.start.ema
    if ema is None or not ema.snapshots:
        return []
    out = []
    for step in range(ema.snapshots, state.step + 1, ema.snapshots):
        at = position_at(state.position, step)
        out += [
            Stored(path_of(folder, state.start.digest, at, width), state.start.digest, at, width)
            for width in ema.widths
        ]
    return out


def write(folder: Path, state: TrainState, width: float, lora: Callable[[], Mapping[str, Tensor]]) -> None:
    """Keep an average of `state`'s run as it stands at `state`, unless it is kept already. Raises OSError, leaving
    nothing half-written.
    """
    path = path_of(folder, state.start.digest, state.position, width)
    if path.exists():  # its name is its content's identity
        return
    make_folders(path.parent)
    tensors = to_float16(lora())
    more = {
        "graft_width": repr(width),
        "graft_position": json.dumps([list(part) for part in state.position]),
        "graft_tensors": sha256_of_tensors(tensors),
    }
    write_safetensors(path, tensors, {**lora_metadata(state), **more})
    sync_folder(path.parent)


def read(stored: Stored) -> dict[str, Tensor]:
    """The average as a LORA_MODEL in float32. Raises ValueError naming the file when it is missing, damaged or another
    one.
    """
    if not stored.path.is_file():
        raise ValueError(
            f"{stored.path} is missing: the snapshot of step {stored.profile.step}, width {stored.width:g}"
        )
    tensors, metadata = load_safetensors(str(stored.path))
    if metadata.get("graft_tensors") != sha256_of_tensors(tensors):
        raise ValueError(f"{stored.path}: its hash is not the recorded one; it was changed or cut short")
    if recorded(stored.path, metadata) != stored:
        raise ValueError(f"{stored.path}: it is not the snapshot that its name says")
    return from_float16(tensors)


def recorded(path: Path, metadata: Mapping[str, str]) -> Stored | None:
    """What a file's metadata say that it is a snapshot of, or None."""
    if not metadata.keys() >= {"graft_run", "graft_width", "graft_position"}:
        return None
    try:
        position = tuple((str(settings), int(steps)) for settings, steps in json.loads(metadata["graft_position"]))
        return Stored(path, metadata["graft_run"], position, float(metadata["graft_width"]))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: what it says of itself cannot be read ({error})") from error


def found(folder: Path) -> list[Stored]:
    """Every snapshot in a run's folder, of whatever beginnings and settings, by step and width; only the headers are
    read.
    """
    out = []
    for path in sorted((folder / FOLDER).glob("*.safetensors")):
        one = recorded(path, read_header(str(path))[1])
        if one is not None:
            out.append(one)
    return sorted(out, key=lambda one: (one.start, one.profile.step, one.width, one.path.name))


def lines(snapshots: list[Stored]) -> dict[str, list[Stored]]:
    """Snapshots by the furthest one of their way (its key), for runs that were begun or continued in several ways."""
    positions = {(one.start, one.position) for one in snapshots}
    ends = [
        (start, position)
        for start, position in positions
        if not any(
            other_start == start and other != position and _leads_to(position, other)
            for other_start, other in positions
        )
    ]
    return {
        state_key(start, end): [one for one in snapshots if one.start == start and _leads_to(one.position, end)]
        for start, end in sorted(ends)
    }


def _leads_to(position: Position, end: Position) -> bool:
    steps = sum(count for _, count in position)
    return steps <= sum(count for _, count in end) and position_at(end, steps) == position
