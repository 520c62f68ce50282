"""What `plan` counts of models at their published sizes, as a share of what the estimate's formula counts.

`python -m graft_nodes.tests.with_comfyui.write_plans COMFYUI` plans them; a test holds these figures to its plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .facts import ModelFacts

_LEAST = 0.5  # of the smallest size that was planned: smaller models have other proportions


@dataclass(frozen=True)
class Shares:
    """Activations as planned, in shares of the formula's, without and with gradient checkpointing."""

    plain: float
    checkpointed: float


@dataclass(frozen=True)
class PlannedFamily:
    """A family's shares by target layers, and the parameters of its smallest model that was planned."""

    parameters: int
    by_targets: Mapping[str, Shares]


PLANNED: Mapping[str, PlannedFamily] = {
    "flux": PlannedFamily(
        11_901_408_320,
        {
            "attention": Shares(0.53, 0.76),
            "attention+ff": Shares(0.57, 0.76),
        },
    ),
    "qwen": PlannedFamily(
        20_430_401_088,
        {
            "attention": Shares(0.29, 0.67),
            "attention+ff": Shares(0.36, 0.69),
        },
    ),
    "sd1": PlannedFamily(
        859_520_964,
        {
            "attention": Shares(0.55, 0.76),
            "attention+ff": Shares(0.61, 0.78),
        },
    ),
    "sdxl": PlannedFamily(
        2_567_463_684,
        {
            "attention": Shares(0.52, 0.5),
            "attention+ff": Shares(0.61, 0.58),
        },
    ),
    "wan": PlannedFamily(
        1_418_996_800,
        {
            "attention": Shares(0.63, 0.9),
            "attention+ff": Shares(0.71, 0.96),
        },
    ),
    "z-image": PlannedFamily(
        6_154_908_736,
        {
            "attention": Shares(0.74, 1.03),
            "attention+ff": Shares(0.84, 1.09),
        },
    ),
}


def share_of(facts: ModelFacts, targets: str, checkpointing: bool) -> float | None:
    """The share for a model and the layers that a LoRA trains; None for what was not planned."""
    family = PLANNED.get(facts.family)
    if family is None or targets not in family.by_targets or facts.parameters < _LEAST * family.parameters:
        return None
    shares = family.by_targets[targets]
    if checkpointing:
        return shares.checkpointed
    return shares.plain
