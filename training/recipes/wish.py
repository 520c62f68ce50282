"""What Training Recipe is asked for; this file imports nothing that a start of ComfyUI would wait for."""

from __future__ import annotations

from dataclasses import dataclass

from ...settings.declaration import check_values, setting

SIZES = (6, 8, 12, 16, 24, 48)  # GB, as graphics cards have them
AUTO = "auto"
MEMORIES = (AUTO, *(f"{size} GB" for size in SIZES))
AS_EVERYDREAM2 = "as EveryDream2"  # in place of a goal: `everydream2`
STRENGTHS = {"light": 0.5, "normal": 1.0, "strong": 2.0}  # times the published learning rate


@dataclass(frozen=True)
class Wish:
    """What the user asked for: the settings of Training Recipe, checked on creation."""

    goal: str = setting(
        "goal",
        "subject",
        "What the LoRA should learn. subject: one person, animal or thing. style: how pictures look. concept: something"
        " broader that the model does not know; it gets twice the rank. as EveryDream2: no LoRA, but full weights with"
        " the defaults of that trainer.",
        choices=("subject", "style", "concept", AS_EVERYDREAM2),
    )
    memory: str = setting(
        "memory",
        AUTO,
        "The memory of the graphics card. auto: what is free now. Choose a size to get the same settings each time, or"
        " to plan for another card.",
        choices=MEMORIES,
    )
    strength: str = setting(
        "strength",
        "normal",
        "How strongly to train: half, once or twice the published learning rate. light if the LoRA overfits, strong if"
        " it learns too little.",
        choices=tuple(STRENGTHS),
    )
    steps: int = setting(
        "steps",
        2000,
        "How many steps you want to train. Set the same in Train Step. AI-Toolkit recommends 500 to 4000.",
        low=1,
        high=10_000_000,
    )

    def __post_init__(self) -> None:
        check_values(self, "Training Recipe")
