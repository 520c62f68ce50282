"""Pairs of models that share the noise levels, as Wan 2.2 14B: the boundary of a model, and what reports and files say.

Each expert is trained on its own side of the boundary only (`timesteps.draw_expert_levels`); `training.expert_pair` has
the states of both.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ...patches.models.registry import recognize_model
from .settings import ObjectiveSettings
from .timesteps import BOTH_EXPERTS, HIGH_NOISE, LOW_NOISE, NO_EXPERT

IN_TURN = (HIGH_NOISE, LOW_NOISE)  # as samplers use them
ALONE = (
    "the previews are sampled with this expert alone, over all noise levels: they show whether it learns, not what the"
    " pair makes"
)


def fill_boundary(settings: ObjectiveSettings, model: nn.Module) -> ObjectiveSettings:
    """The settings with the boundary of a diffusion model, where they leave it to the model.

    Args:
        settings: with the expert that is trained; a boundary of 0 leaves it to the model.
        model: the host's diffusion model.

    Raises:
        ValueError: for a model that is none of a known pair, and for both experts at once.
    """
    if settings.expert == BOTH_EXPERTS:
        raise ValueError(
            "Objective Settings: expert is both, and Start Training has one model: use Start Training Expert Pair, or"
            " choose the expert that is trained."
        )
    if settings.expert == NO_EXPERT or settings.boundary:
        return settings
    family = recognize_model(model)
    boundary = None
    if family is not None and family.expert_boundary is not None:
        boundary = family.expert_boundary(model)
    if boundary is None:
        raise ValueError(
            f"Objective Settings: expert is {settings.expert}, and this model is not known as one of a pair. Connect a"
            " Wan 2.2 14B model, give the pair's border in expert boundary, or set expert to none."
        )
    return replace(settings, boundary=boundary)


def split_pair(settings: ObjectiveSettings, model: nn.Module) -> tuple[ObjectiveSettings, ObjectiveSettings]:
    """The settings of the high noise and of the low noise expert, which are trained in one run.

    Args:
        settings: for both experts.
        model: the high noise expert's diffusion model.

    Raises:
        ValueError: for settings of one expert, and for a model that is none of a known pair.
    """
    if settings.expert not in (NO_EXPERT, BOTH_EXPERTS):
        raise ValueError(
            f"Objective Settings: expert is {settings.expert}, and Start Training Expert Pair trains both: set expert"
            " to both, or use Start Training for the one that is trained."
        )
    high = fill_boundary(replace(settings, expert=HIGH_NOISE), model)
    return high, replace(high, expert=LOW_NOISE)


def describe(settings: ObjectiveSettings) -> list[str]:
    """The reports' line on the expert that is trained; none without one."""
    if settings.expert == HIGH_NOISE:
        return [f"expert high noise: only noise levels (sigma) from {settings.boundary:g} up are trained"]
    if settings.expert == LOW_NOISE:
        return [f"expert low noise: only noise levels (sigma) below {settings.boundary:g} are trained"]
    return []


def name_file(name: str, expert: str) -> str:
    """The name of an expert's file, ending in the expert as AI-Toolkit's do.

    Args:
        name: the name with its folder, without an ending. It stays where it says the expert already.
        expert: one of `EXPERTS`.
    """
    letters = "".join(filter(str.isalpha, name.replace("\\", "/").rpartition("/")[2].lower()))
    if expert == NO_EXPERT or expert.replace(" ", "") in letters:
        return name
    return f"{name}_{expert.replace(' ', '_')}"


def pair_names(name: str) -> tuple[str, str]:
    """The names of what both experts of a pair get, from one name or that of one of them."""
    stem = name.removesuffix("_high_noise").removesuffix("_low_noise")
    return f"{stem}_high_noise", f"{stem}_low_noise"
