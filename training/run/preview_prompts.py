"""The preview prompts of Train Step: a text with one prompt a line."""

from __future__ import annotations

MOST = 16  # each is sampled at every preview, with the weights and again with their average
LONGEST = 4000  # characters; previews carry their prompt in their files


def preview_prompts(text: str) -> list[str]:
    """The prompts of a text: its lines, without blank ones and those that start with #.

    Raises ValueError when there are too many, or when one is too long.
    """
    lines = [line.strip() for line in text.splitlines()]
    prompts = [line for line in lines if line and not line.startswith("#")]
    if len(prompts) > MOST:
        raise ValueError(
            f"Train Step: more preview prompts has {len(prompts)} prompts, at most {MOST} are allowed: each is sampled"
            " at every preview. Delete some, or put a # in front of them."
        )
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt) > LONGEST:
            raise ValueError(
                f"Train Step: more preview prompts: prompt {number} has {len(prompt)} characters, at most {LONGEST} are"
                " allowed. Make it shorter."
            )
    return prompts
