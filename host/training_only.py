"""LoRAs that are on only while a run computes its loss, as AI-Toolkit's training adapters for distilled models.

They are off in previews, and no part of the MODEL output or of what is saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..patches.lora_files import read_stack
from ..patches.lora_files.entry import LoraEntry
from ..patches.patching import switched_stack
from ..patches.patching.fuse import Stack
from ..patches.patching.switched_stack import SwitchedStack
from .comfyui_objects import Model
from .lora_injection import compute_of
from .lora_stacks import model_weights, to_generic_keys


class TrainingOnlyLora(NamedTuple):
    """The patches of a training-only LoRA on a model, and the report on its files."""

    stack: Stack
    report: str

    @property
    def identity(self) -> str:
        """A hash of what it does, the same in every process: a part of the run's identity."""
        return self.stack.identity


def read_lora(model: Model, entries: Sequence[LoraEntry], full_weights: bool) -> TrainingOnlyLora:
    """Read LoRAs for the MODEL that is trained; with `full_weights` its own weights move.

    Raises ValueError that lists everything wrong with them.
    """
    scheduled = [entry.name for entry in entries if entry.schedule is not None]
    if scheduled:
        raise ValueError(
            f"Start Training: training-only LoRA: {', '.join(scheduled)} has a schedule, and schedules follow sampling,"
            " not training. Empty the schedule of its row."
        )
    found = read_stack.read_stack(entries, model_weights(model), "bypass", to_generic_keys)
    if found.enlarging:
        names = ", ".join(lora.name for lora in found.enlarging)
        raise ValueError(
            f"Start Training: training-only LoRA: {names} enlarges weights of the model, so it cannot be switched off"
            " for previews. Apply it to the model with Patch Model with LoRA Stack instead."
        )
    patches = found.patches.get("model", {})
    if not patches:
        report = "\n".join(found.report)
        raise ValueError(f"Start Training: training-only LoRA changes nothing of this model:\n{report}")
    try:
        switched_stack.check_switchable(model.model, patches, full_weights)
    except ValueError as error:
        raise ValueError(f"Start Training: training-only LoRA cannot be switched on and off:\n{error}") from error
    return TrainingOnlyLora(Stack(patches, patches), "\n".join(found.report))


@contextlib.contextmanager
def attach(patcher: Model, lora: TrainingOnlyLora | None) -> Iterator[SwitchedStack | None]:
    """A context in which a loaded MODEL computes with the LoRA, except inside the `off()` of what it yields."""
    if lora is None:
        yield None
        return
    switched = SwitchedStack(patcher.model, lora.stack.patches, compute_of(patcher))
    try:
        yield switched
    finally:
        switched.remove()
