"""The LoRA of one expert of a pair (Wan 2.2 14B) knows whose it is, for the name and the metadata of its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .objective.settings import ObjectiveSettings
from .objective.timesteps import NO_EXPERT


class ExpertLora(dict[str, Tensor]):
    """A LORA_MODEL of the expert that `objective` trains."""

    def __init__(self, tensors: Mapping[str, Tensor], objective: ObjectiveSettings) -> None:
        super().__init__(tensors)
        self.objective = objective


def mark_expert(lora: dict[str, Tensor], objective: ObjectiveSettings) -> dict[str, Tensor]:
    """A LORA_MODEL that was trained with these settings: one that knows its expert, where they have one."""
    if objective.expert == NO_EXPERT:
        return lora
    return ExpertLora(lora, objective)


def expert_of(lora: Mapping[str, Tensor]) -> str:
    """Of which expert a LORA_MODEL is, as far as it knows."""
    if isinstance(lora, ExpertLora):
        return lora.objective.expert
    return NO_EXPERT


def expert_metadata(objective: ObjectiveSettings) -> dict[str, Any]:
    """What a LoRA's file says of the expert; nothing without one."""
    if objective.expert == NO_EXPERT:
        return {}
    return {"graft_expert": objective.expert, "graft_expert_boundary": objective.boundary}


def metadata_of(lora: Mapping[str, Tensor]) -> dict[str, str]:
    """The same of a LORA_MODEL, as texts."""
    if not isinstance(lora, ExpertLora):
        return {}
    return {name: str(value) for name, value in expert_metadata(lora.objective).items()}
