"""Files to average, in the order of the steps recorded in them: a run's snapshots, LoRAs, or checkpoints."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from ...ema.post_hoc import Profile
from ...patches.lora_files import open_file
from ...patches.lora_files.key_formats.registry import embedding_names
from ...patches.lora_files.parse import add_alphas, drop_embeddings, group_by_layer
from ...patches.lora_files.peft_config import peft_configs
from ...patches.lora_files.trained_scale import restore_trained_scales
from ...storage.float16 import SCALE_PREFIX, from_float16
from ...storage.problem_list import problem_lines
from ..state import TrainState
from . import snapshots
from .snapshots import Snapshot

CHECKPOINT = ("model.diffusion_model.", "diffusion_model.", "")  # the last one is for files with only a diffusion model
_TEXT_ENCODERS = ("cond_stage_model.", "conditioner.", "text_encoders.")


@dataclass(frozen=True)
class Source:
    """One file to average: its name for messages, the step and run recorded in it, and what a snapshot averages.

    `text_encoder` is how many tensors of text encoders a checkpoint holds, `embeddings` are the textual inversions in
    a LoRA file; neither is averaged.
    """

    name: str
    path: str
    step: int | None = None
    run: str = ""
    kind: str = "lora"
    snapshot: Snapshot | None = None
    text_encoder: int = 0
    embeddings: tuple[str, ...] = ()

    def load(self) -> dict[str, Tensor]:
        """Load the file: a LORA_MODEL in float32, or a checkpoint's diffusion model, memory-mapped in the file's own
        type.

        Raises ValueError naming what is wrong with the file.
        """
        if self.snapshot is not None:
            return snapshots.read(self.snapshot)
        tensors, metadata = open_file.load_once(self.path)
        if self.kind == "lora":
            layers = restore_trained_scales(from_float16(drop_embeddings(tensors)), metadata)
            return add_alphas(layers, peft_configs(metadata))
        prefix = next(prefix for prefix in CHECKPOINT if any(key.startswith(prefix) for key in tensors))
        return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}

    def load_as_stored(self) -> dict[str, Tensor]:
        """`load`; a snapshot memory-mapped in float16, with the same numbers."""
        if self.snapshot is None:
            return self.load()
        return snapshots.read_as_stored(self.snapshot)


@dataclass(frozen=True)
class Sources:
    """Files in the order in which they are averaged.

    `powers` is True if they are snapshots of one run's power-function averages.
    """

    files: tuple[Source, ...]
    powers: bool = False
    notes: tuple[str, ...] = ()

    @property
    def profiles(self) -> list[Profile]:
        """The step and width of each snapshot."""
        return [file.snapshot.profile for file in self.files if file.snapshot is not None]

    def report(self) -> str:
        """The files, one per line, numbered in the order that `weights` uses."""
        kind = "snapshots" if self.powers else "files"
        lines = [f"{len(self.files)} {kind}", *self.notes]
        for number, file in enumerate(self.files, 1):
            line = f"{number}. {file.name}: no step recorded"
            if file.step is not None:
                line = f"{number}. {file.name}: step {file.step}"
            if file.snapshot is not None:
                line += f", width {file.snapshot.width:g}"
            if file.kind != "lora":
                line += f", {file.kind}"
            if file.embeddings:
                line += f"; its embeddings are left out ({', '.join(file.embeddings)})"
            lines.append(line)
        return "\n".join(lines)


def _sources_of(snapshots: Sequence[Snapshot]) -> Sources:
    files = []
    for snapshot in sorted(snapshots, key=lambda snapshot: (snapshot.profile.step, snapshot.width)):
        path = snapshot.path
        files.append(Source(path.name, str(path), snapshot.profile.step, snapshot.start, snapshot=snapshot))
    return Sources(tuple(files), True)


def sources_of_state(state: TrainState, folder: Path) -> Sources:
    """The snapshots that a state's run has taken; raises ValueError that lists those that are missing."""
    if state.start.ema is None or not state.start.ema.snapshots:
        raise ValueError(
            "this run takes no snapshots of averages: set snapshot every N steps in EMA Settings before Start Training"
        )
    expected = snapshots.expected_snapshots(state, folder)
    missing = [snapshot for snapshot in expected if not snapshot.path.is_file()]
    if missing:
        lines = "\n".join(
            f"- step {snapshot.profile.step}, width {snapshot.width:g}: {snapshot.path}" for snapshot in missing
        )
        raise ValueError(
            f"{len(missing)} of {len(expected)} snapshots are missing (results that cannot be stored have none; deleted"
            f" ones come back when the run's stored results are deleted too and it is trained again):\n{lines}"
        )
    if not expected:
        raise ValueError(
            f"the state is at step {state.step}, before the first snapshot (step {state.start.ema.snapshots}): train"
            " further"
        )
    return _sources_of(expected)


def sources_of_run(folder: Path, way: str = "") -> Sources:
    """The snapshots in a run's folder.

    `way` is the first characters of a branch's key, for a run that was started or continued in several ways.
    """
    found_snapshots = snapshots.find_snapshots(folder)
    if not found_snapshots:
        raise ValueError(
            f"run {folder.name!r} has no snapshots of averages: set snapshot every N steps in EMA Settings before Start"
            " Training"
        )
    branches = snapshots.branches(found_snapshots)
    keys = [key for key in branches if key.startswith(way)]
    if len(keys) == 1:
        return _sources_of(branches[keys[0]])
    problem = "was begun or continued in several ways"
    if not keys:
        problem = f"none that begins with {way!r}"
    lines = ""
    for key, branch in branches.items():
        lines += f"\n- {folder.name}/{key[:12]}: {len(branch)} snapshots, to step {branch[-1].profile.step}"
    raise ValueError(
        f"Snapshots of different runs: run {folder.name!r}: {problem}; name one of these in run or files:{lines}"
    )


def sources_of_files(files: Sequence[tuple[str, str]]) -> Sources:
    """(name, path) of LoRAs or of checkpoints, put in the order of their recorded steps; in the order given where any
    records none.

    When all are snapshots of power-function averages they must be of one way of one run. Raises ValueError that lists
    every file that is unreadable, of the other kind, named twice, or of another run.
    """
    sources, problems = [], []
    for name, path in files:
        try:
            sources.append(_open_source(name, path))
        except ValueError as error:
            problems.append(str(error))
    for name, count in sorted(Counter(name for name, _ in files).items()):
        if count > 1:
            problems.append(f"{name}: named twice")
    if len({source.kind for source in sources}) > 1:
        for source in sources:
            problems.append(f"{source.name}: a {source.kind}; give files of one kind")
    if problems:
        raise ValueError("Files to average:\n" + problem_lines(problems))
    no_step = [source.name for source in sources if source.step is None]
    if no_step:
        return Sources(tuple(sources), notes=(f"in the order given: no step is recorded in {', '.join(no_step)}",))
    of_snapshots = [source.snapshot for source in sources if source.snapshot is not None]
    if len(of_snapshots) == len(sources):
        return _pick_branch(of_snapshots)
    # next to other files, a snapshot is treated as a normal file
    by_step = sorted((replace(source, snapshot=None) for source in sources), key=lambda source: source.step or 0)
    notes = ["in the order of the steps recorded in them"]
    runs = {source.run for source in by_step}
    if len(runs) > 1:
        notes.append(f"they are of {len(runs)} different runs")
    return Sources(tuple(by_step), notes=tuple(notes))


def _pick_branch(kept: list[Snapshot]) -> Sources:
    branches = snapshots.branches(kept)
    if len(branches) > 1:
        lines = ""
        for key, branch in branches.items():
            for snapshot in branch:
                lines += f"\n- {snapshot.path.name}: {key[:12]}"
        raise ValueError(f"Snapshots of different runs:{lines}")
    return _sources_of(kept)


_STEP_KEYS = ("ss_steps", "graft_step", "step", "global_step")  # in the metadata; the first number counts


def _open_source(name: str, path: str) -> Source:
    tensors, metadata = open_file.load(path)
    kind = _kind(name, tensors)
    step = None
    for key in reversed(_STEP_KEYS):
        if metadata.get(key, "").isdigit():
            step = int(metadata[key])
    # A file without a recorded run counts as its own run: factors are averaged only if all files name the same run.
    run = metadata.get("graft_run") or metadata.get("ss_session_id") or ""
    text_encoder = 0
    if kind == "checkpoint":
        text_encoder = sum(key.startswith(_TEXT_ENCODERS) for key in tensors)
    snapshot = snapshots.snapshot_of(Path(path), metadata)
    embeddings = tuple(embedding_names(tensors)) if kind == "lora" else ()
    return Source(name, os.path.abspath(path), step, run, kind, snapshot, text_encoder, embeddings)


def _kind(name: str, tensors: Mapping[str, Tensor]) -> str:
    """Whether it is "lora" or "checkpoint". Raises ValueError when it is neither."""
    weights = {key: tensor for key, tensor in tensors.items() if not key.startswith(SCALE_PREFIX)}
    groups, other_keys, problems = group_by_layer(weights)
    if any(key.startswith(CHECKPOINT[0]) for key in tensors):
        return "checkpoint"
    if any(key.startswith(CHECKPOINT[1]) for key in other_keys):
        return "checkpoint"
    if groups and not problems:
        return "lora"
    # names without a prefix are a diffusion model's, if they are those of the model that it is put on
    if not groups and not problems and any(key.endswith(".weight") and tensors[key].ndim > 1 for key in other_keys):
        return "checkpoint"
    reason = "; ".join(problems) or "no known key"
    raise ValueError(f"{name}: neither a LoRA nor a checkpoint of a diffusion model ({reason})")
