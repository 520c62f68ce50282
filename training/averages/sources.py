"""Files to average: the snapshots of a run, or LoRAs and checkpoints that people have, in the order of the steps
recorded in them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from ...ema.post_hoc import Profile
from ...patches.lora_files import open_file
from ...patches.lora_files.parse import grouped, with_alphas
from ...patches.lora_files.peft_config import peft_configs
from ...storage.float16 import SCALE_PREFIX, from_float16
from ..state import TrainState
from . import snapshots
from .snapshots import Stored

CHECKPOINT = ("model.diffusion_model.", "diffusion_model.", "")  # the last of files that hold a diffusion model alone
_TEXT_ENCODERS = ("cond_stage_model.", "conditioner.", "text_encoders.")


@dataclass(frozen=True)
class Source:
    """One file: its name for messages, the step and the run recorded in it, and for a snapshot what it is an average
    of.

    `text_encoder` is how many tensors of text encoders a checkpoint holds, which are not averaged.
    """

    name: str
    path: str
    step: int | None = None
    run: str = ""
    kind: str = "lora"
    stored: Stored | None = None
    text_encoder: int = 0

    def load(self) -> dict[str, Tensor]:
        """A LORA_MODEL in float32, or a checkpoint's diffusion model by parameter name, mapped as the file has it.

        Raises ValueError naming what is wrong with the file.
        """
        if self.stored is not None:
            return snapshots.read(self.stored)
        tensors, metadata = open_file.load_once(self.path)
        if self.kind == "lora":
            return with_alphas(from_float16(tensors), peft_configs(metadata))
        prefix = next(prefix for prefix in CHECKPOINT if any(key.startswith(prefix) for key in tensors))
        return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


@dataclass(frozen=True)
class Sources:
    """Files in the order in which they are averaged; `powers` when they are snapshots of one run's power-function
    averages.
    """

    files: tuple[Source, ...]
    powers: bool = False
    notes: tuple[str, ...] = ()

    @property
    def profiles(self) -> list[Profile]:
        """What snapshots are averages of."""
        return [file.stored.profile for file in self.files if file.stored is not None]

    def report(self) -> str:
        """The files, one a line, numbered as weights are given."""
        lines = [f"{len(self.files)} {'snapshots' if self.powers else 'files'}", *self.notes]
        for number, file in enumerate(self.files, 1):
            if file.step is None:
                step = "no step recorded"
            else:
                step = f"step {file.step}"
            if file.stored is not None:
                width = f", width {file.stored.width:g}"
            else:
                width = ""
            lines.append(f"{number}. {file.name}: {step}{width}{'' if file.kind == 'lora' else ', ' + file.kind}")
        return "\n".join(lines)


def _of_stored(stored: Sequence[Stored]) -> Sources:
    ordered = sorted(stored, key=lambda one: (one.profile.step, one.width))
    return Sources(
        tuple(Source(one.path.name, str(one.path), one.profile.step, one.start, stored=one) for one in ordered), True
    )


def of_state(state: TrainState, folder: Path) -> Sources:
    """The snapshots that a state's run has taken; raises ValueError that lists those that are missing."""
    if state.start.ema is None or not state.start.ema.snapshots:
        raise ValueError("this run takes no snapshots of averages: set snapshots on GraftEMA before Start Training")
    wanted = snapshots.expected(state, folder)
    missing = [one for one in wanted if not one.path.is_file()]
    if missing:
        listed = "\n".join(f"- step {one.profile.step}, width {one.width:g}: {one.path}" for one in missing)
        raise ValueError(
            f"{len(missing)} of {len(wanted)} snapshots are missing (results that cannot be stored have none; deleted"
            f" ones come back when the run's stored results are deleted too and it is trained again):\n{listed}"
        )
    if not wanted:
        raise ValueError(
            f"the state is at step {state.step}, before the first snapshot (step {state.start.ema.snapshots}): train"
            " further"
        )
    return _of_stored(wanted)


def of_run(folder: Path, way: str = "") -> Sources:
    """The snapshots in a run's folder. `way` is the beginning of one way's key, for a run that was begun or continued
    in several ways.
    """
    found = snapshots.found(folder)
    if not found:
        raise ValueError(
            f"run {folder.name!r} has no snapshots of averages: set snapshots on GraftEMA before Start Training"
        )
    every = snapshots.lines(found)
    ways = {key: of for key, of in every.items() if key.startswith(way)}
    if len(ways) != 1:
        listed = "\n".join(
            f"- {folder.name}/{key[:12]}: {len(of)} snapshots, to step {of[-1].profile.step}"
            for key, of in every.items()
        )
        if not ways:
            wrong = f"none that begins with {way!r}"
        else:
            wrong = "was begun or continued in several ways"
        raise ValueError(
            f"Snapshots of different runs: run {folder.name!r}: {wrong}; name one of these as the source:\n{listed}"
        )
    return _of_stored(next(iter(ways.values())))


def of_files(files: Sequence[tuple[str, str]]) -> Sources:
    """(name, path) of LoRAs or of checkpoints, put in the order of their recorded steps; in the order given where any
    records none.

    When all are snapshots of power-function averages they must be of one way of one run. Raises ValueError that lists
    every file that is unreadable, of the other kind, named twice, or of another run.
    """
    sources, wrong = [], []
    for name, path in files:
        try:
            sources.append(_opened(name, path))
        except ValueError as error:
            wrong.append(str(error))
    wrong += [f"{name}: named twice" for name in sorted({n for n, _ in files}) if [n for n, _ in files].count(name) > 1]
    if len({source.kind for source in sources}) > 1:
        wrong += [f"{source.name}: a {source.kind}; give files of one kind" for source in sources]
    if wrong:
        raise ValueError("Files to average:\n" + "\n".join(f"- {one}" for one in wrong))
    without = [source.name for source in sources if source.step is None]
    if without:
        return Sources(tuple(sources), notes=(f"in the order given: no step is recorded in {', '.join(without)}",))
    stored = [source.stored for source in sources if source.stored is not None]
    if len(stored) == len(sources):
        ways = snapshots.lines(stored)
        if len(ways) > 1:
            listed = "\n".join(f"- {one.path.name}: {key[:12]}" for key, of in ways.items() for one in of)
            raise ValueError(f"Snapshots of different runs:\n{listed}")
        return _of_stored(stored)
    sources = [replace(source, stored=None) for source in sources]  # among other files a snapshot is a file like them
    ordered = sorted(sources, key=lambda source: source.step or 0)
    notes = ["in the order of the steps recorded in them"]
    runs = {source.run for source in ordered}
    if len(runs) > 1:
        notes.append(f"they are of {len(runs)} different runs")
    return Sources(tuple(ordered), notes=tuple(notes))


def _opened(name: str, path: str) -> Source:
    tensors, metadata = open_file.load(path)
    groups, strangers, problems = grouped(
        {key: tensor for key, tensor in tensors.items() if not key.startswith(SCALE_PREFIX)}
    )
    checkpoint = any(key.startswith(CHECKPOINT[0]) for key in tensors) or any(
        key.startswith(CHECKPOINT[1]) for key in strangers
    )
    if (
        not groups and not problems
    ):  # names without a prefix are a diffusion model's, if they are those of the model that it is put on
        checkpoint = checkpoint or any(key.endswith(".weight") and tensors[key].ndim > 1 for key in strangers)
    if not checkpoint and (not groups or problems):
        raise ValueError(
            f"{name}: neither a LoRA nor a checkpoint of a diffusion model ({'; '.join(problems) or 'no known key'})"
        )
    recorded = next(
        (metadata[key] for key in ("ss_steps", "graft_step", "step", "global_step") if metadata.get(key, "").isdigit()),
        None,
    )
    # Without a recorded run a file is its own: averages of factors are only offered where one run is recorded.
    run = metadata.get("graft_run") or metadata.get("ss_session_id") or ""
    step, kind = None if recorded is None else int(recorded), "checkpoint" if checkpoint else "lora"
    if checkpoint:
        text = sum(key.startswith(_TEXT_ENCODERS) for key in tensors)
    else:
        text = 0
    return Source(name, os.path.abspath(path), step, run, kind, snapshots.recorded(Path(path), metadata), text)
