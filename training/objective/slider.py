"""Sliders: adapters whose strength moves a property one way and the other: their settings and what they predict.

Concept sliders (arXiv 2311.12092) learn a direction between two prompts from the model itself, at strength 1, or at 1
and -1. AI-Toolkit's concept slider trains both with targets that it normalises, and holds the prediction for an anchor.
From pairs of pictures, strength 1 learns one picture and strength -1 the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .loss import output_scale

BOTH_DIRECTIONS, CONCEPT_SLIDERS, PICTURE_PAIRS = "both directions", "concept sliders", "picture pairs"
AI_TOOLKIT = "ai-toolkit"
METHODS = (BOTH_DIRECTIONS, CONCEPT_SLIDERS, PICTURE_PAIRS, AI_TOOLKIT)
MOST_SETS = 1000


class PromptSet(NamedTuple):
    """The prompts of one direction: `target` is what the adapter sees, the others are what the model itself sees; for
    `anchor` both see the same.
    """

    target: str
    positive: str
    negative: str
    neutral: str
    anchor: str = ""


@dataclass(frozen=True)
class SliderSettings:
    """The settings of Slider: plain values, checked on creation.

    Line for line, `positive` and `negative` are the ends of a direction, `target` what is moved along it, and `neutral`
    what it is moved from ("": the target); one line stands for all. Each of the words in `keep` is written in front of
    the prompts in turn, so that the direction does not change it. `guidance` is how far strength 1 goes. Without
    pictures, noise is denoised in `steps` steps (of the whole schedule) with CFG `cfg`, down to the noise level that is
    trained. For each `anchor` the adapter learns to predict what the model does; `anchor_strength` is what that counts.
    """

    method: str = BOTH_DIRECTIONS
    positive: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    neutral: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    guidance: float = 3.0
    steps: int = 20
    cfg: float = 3.0
    anchor: tuple[str, ...] = ()
    anchor_strength: float = 1.0

    def __post_init__(self) -> None:
        errors = [*_value_errors(self)]
        if self.method in METHODS and self.takes_prompts:
            errors += _prompt_errors(self)
        if errors:
            raise ValueError("Slider: " + "; ".join(errors) + ".")

    @classmethod
    def read(
        cls,
        method: str,
        positive: str,
        negative: str,
        target: str,
        neutral: str,
        keep: str,
        anchor: str = "",
        **settings: float,
    ) -> SliderSettings:
        """The settings from the node's texts, a prompt on each line. Picture pairs have no prompts."""
        texts = (positive, negative, target, neutral, keep)
        if method == PICTURE_PAIRS:
            return cls(method)
        made = cls(method, *(_lines(text) for text in texts), **settings)  # type: ignore[arg-type]
        return replace(made, anchor=_lines(anchor))

    @property
    def takes_prompts(self) -> bool:
        """Whether the direction is between prompts; else it is between pictures."""
        return self.method != PICTURE_PAIRS

    @property
    def identity(self) -> dict[str, Any]:
        """What a run is stored under; without an anchor as before there were any."""
        values = asdict(self)
        if not self.anchor:
            del values["anchor"], values["anchor_strength"]
        return values

    @property
    def is_normalised(self) -> bool:
        """Whether targets get the mean and the deviation of the neutral prediction."""
        return self.method == AI_TOOLKIT

    @property
    def strengths(self) -> tuple[float, ...]:
        """The strengths of the adapter that each step trains."""
        if self.method == CONCEPT_SLIDERS:
            return (1.0,)
        return (1.0, -1.0)

    @cached_property
    def sets(self) -> tuple[PromptSet, ...]:
        """Every set of prompts: each line with each of the words to keep in front."""
        count = len(self.positive)
        rows = [_for_all(texts, count) for texts in (self.target, self.positive, self.negative)]
        rows.append(_for_all(self.neutral or self.target, count))
        rows.append(_for_all(self.anchor, count))
        sets = []
        for kept in self.keep or ("",):
            for prompts in zip(*rows, strict=True):
                made = PromptSet(*(f"{kept} {prompt}".strip() for prompt in prompts))
                if not self.anchor:
                    made = made._replace(anchor="")
                sets.append(made)
        return tuple(sets)


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def _for_all(texts: Sequence[str], count: int) -> tuple[str, ...]:
    """As many prompts as there are lines: one stands for all, and none is the empty prompt."""
    if len(texts) <= 1:
        return (*texts, "")[:1] * count
    return tuple(texts)


def _value_errors(settings: SliderSettings) -> Iterator[str]:
    if settings.method not in METHODS:
        yield f"slider method is {settings.method!r}, expected one of {', '.join(METHODS)}"
    if not 0 < settings.guidance < math.inf:
        yield f"guidance is {settings.guidance}, expected above 0 (3 is usual)"
    if settings.steps < 1:
        yield f"denoising steps is {settings.steps}, expected 1 or more"
    if not 1 <= settings.cfg < math.inf:
        yield f"denoising CFG is {settings.cfg}, expected 1 (off) or more"
    if not 0 < settings.anchor_strength < math.inf:
        yield (
            f"anchor strength is {settings.anchor_strength}, expected above 0 (1 is usual): to have no anchor, leave"
            " anchor prompt empty"
        )


def _prompt_errors(settings: SliderSettings) -> Iterator[str]:
    count = len(settings.positive)
    if not count:
        yield "positive prompt is empty: write what strength 1 gives, such as a very old person"
        return
    if not settings.target:
        yield "target prompt is empty: write what the slider is for, such as a person"
    for label, texts in (
        ("negative prompt", settings.negative),
        ("target prompt", settings.target),
        ("neutral prompt", settings.neutral),
        ("anchor prompt", settings.anchor),
    ):
        if len(texts) not in (0, 1, count):
            yield (
                f"{label} has {len(texts)} lines and positive prompt {count}: write as many, each the partner"
                " of the same line, or one for all"
            )
            return
    for line, (positive, negative) in enumerate(
        zip(settings.positive, _for_all(settings.negative, count), strict=True), 1
    ):
        if positive == negative:
            yield (
                f"line {line} of positive and negative prompt is the same ({positive!r}), which is no direction: write"
                " what strength -1 gives as negative prompt"
            )
    if count * max(1, len(settings.keep)) > MOST_SETS:
        yield f"{count} lines with {len(settings.keep)} words to keep are more than {MOST_SETS} sets of prompts"


def moved(neutral: Tensor, positive: Tensor, negative: Tensor, amount: float) -> Tensor:
    """What the adapter is to predict: neutral + amount (positive - negative), of the model's own predictions.

    Of denoised latents as of noise, velocity or flow: these are the same linear function of each other in all three.
    """
    return neutral + amount * (positive - negative)


def normalised(target: Tensor, like: Tensor) -> Tensor:
    """AI-Toolkit's norm_like_tensor: `target` with the mean and the deviation of `like`, both over the whole batch."""
    return (target - target.mean()) / (target.std() + 1e-8) * like.std() + like.mean()


def predicted(prediction: str, x: Tensor, denoised: Tensor, sigma: Tensor) -> Tensor:
    """What the network itself gives (noise, velocity or flow) where it denoises `x` at `sigma` (B,) to `denoised`."""
    return (_without_output(prediction, x, sigma) - denoised) * _rows(output_scale(prediction, sigma), x)


def denoised_by(prediction: str, x: Tensor, output: Tensor, sigma: Tensor) -> Tensor:
    """Denoised latents of what the network gives: `predicted` the other way round."""
    return _without_output(prediction, x, sigma) - output / _rows(output_scale(prediction, sigma), x)


def _without_output(prediction: str, x: Tensor, sigma: Tensor) -> Tensor:
    """The denoised latents of a network that gives zeros."""
    if prediction == "v":
        return x / _rows(sigma**2 + 1, x)
    return x


def _rows(values: Tensor, like: Tensor) -> Tensor:
    """Values (B,) beside latents (B, C, …)."""
    return values.view([-1] + [1] * (like.ndim - 1))


def with_anchor(direction: Tensor, anchor: Tensor, strength: float) -> Tensor:
    """AI-Toolkit's sum of losses. It counts the direction twice, to enhance one end and to erase the other, which are
    one target.
    """
    return (2 * direction + strength * anchor) / 3


def partly_denoised(denoise: Callable[[Tensor, Tensor], Tensor], x: Tensor, levels: Tensor, sigma: Tensor) -> Tensor:
    """Latents (B, C, …) at the noise levels `sigma` (B,), from `x` at `levels[0]`, by Euler's steps down `levels`.

    Each row stops at its own level. `denoise(x, sigma)` gives denoised latents.
    """
    per_row = [-1] + [1] * (x.ndim - 1)
    now = torch.maximum(levels[:1], sigma)
    for level in levels[1:]:
        if bool((now <= sigma).all()):
            break
        then = torch.maximum(level, sigma)
        slope = (x - denoise(x, now)) / now.view(per_row)
        x = x + slope * (then - now).view(per_row)
        now = then
    return x
