"""Sliders: adapters whose strength moves a property one way and the other: their settings and what they predict.

Concept sliders (arXiv 2311.12092) learn a direction between two prompts from the model itself, at strength 1, or at 1
and -1. AI-Toolkit's concept slider trains both with targets that it normalizes, and holds the prediction for an anchor.
From pairs of pictures, strength 1 learns one picture and strength -1 the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...settings.declaration import check_values, setting
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


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip())


@dataclass(frozen=True)
class SliderSettings:
    """The settings of Slider: plain values, checked on creation.

    Line for line, `positive` and `negative` are the ends of a direction, `target` what is moved along it, and `neutral`
    what it is moved from ("": the target); one line stands for all. Each of the words in `keep` is written in front of
    the prompts in turn, so that the direction does not change it. `guidance` is how far strength 1 goes. Without
    pictures, noise is denoised in `steps` steps (of the whole schedule) with CFG `cfg`, down to the noise level that is
    trained. For each `anchor` the adapter learns to predict what the model does; `anchor_strength` is what that counts.
    """

    method: str = setting(
        "slider method",
        BOTH_DIRECTIONS,
        "both directions: strengths 1 and -1 are trained in each step. concept sliders: only strength 1, as in the"
        " paper, in half the time. picture pairs: strength 1 learns one picture, -1 the other; no prompts are used."
        " ai-toolkit: both directions with AI-Toolkit's targets, which are scaled to the mean and deviation of the"
        " model's own prediction. Use it if strength 1 burns images.",
        choices=METHODS,
        ai_toolkit=(
            "type",
            "`ai-toolkit` is the objective of Concept Slider: each target is scaled to the mean and deviation of the"
            " model's own prediction, over the batch. `picture pairs` is `image_reference_slider_trainer` with"
            " `slider.datasets.pair_folder`: AI-Toolkit cuts both pictures out of one file; here they are two,"
            " `name.win.png` and `name.lose.png`",
        ),
    )
    positive: tuple[str, ...] = setting(
        "positive prompt",
        "",
        "What strength 1 moves toward, such as a very old person. Several lines are several pairs: each line goes"
        " with the same line of the negative and target prompts.",
        multiline=True,
        read=_lines,
        ai_toolkit=("slider.positive_prompt", "of several `slider.targets` a line each, here and in the next two"),
    )
    negative: tuple[str, ...] = setting(
        "negative prompt",
        "",
        "What strength -1 moves toward, such as a very young person. If empty, the empty prompt.",
        multiline=True,
        read=_lines,
        ai_toolkit="slider.negative_prompt",
    )
    target: tuple[str, ...] = setting(
        "target prompt",
        "",
        "What the slider is for, without the property, such as a person.",
        multiline=True,
        read=_lines,
        ai_toolkit="slider.target_class",
    )
    neutral: tuple[str, ...] = setting(
        "neutral prompt",
        "",
        "What the model starts from. Usually empty, which means the target prompt.",
        multiline=True,
        read=_lines,
        advanced=True,
    )
    keep: tuple[str, ...] = setting(
        "words to keep",
        "",
        "What the slider must not change, one per line: male, then female. Each one in turn is put in front of all"
        " prompts.",
        multiline=True,
        read=_lines,
        advanced=True,
    )
    guidance: float = setting(
        "guidance",
        3.0,
        "How far strength 1 goes, as a multiple of the difference between the two prompts. Lower it if strength 1 is"
        " already too much.",
        low=0.01,
        high=100.0,
        step=0.1,
        ai_toolkit="slider.guidance_strength",
    )
    width: int = setting(
        "width",
        512,
        "Without pictures: the width in pixels to train at. Use one that the model was trained on.",
        low=16,
        high=16384,
        step=8,
    )
    height: int = setting(
        "height",
        512,
        "Without pictures: the height in pixels to train at.",
        low=16,
        high=16384,
        step=8,
    )
    steps: int = setting(
        "denoising steps",
        20,
        "Without pictures: the model denoises noise down to the noise level of the training step. This is the number"
        " of steps for all of sampling. Lower it to train faster.",
        low=1,
        high=1000,
        advanced=True,
    )
    cfg: float = setting(
        "denoising CFG",
        3.0,
        "The CFG scale in these steps. 1 takes half the time, and is right for distilled models.",
        low=1.0,
        high=100.0,
        step=0.1,
        advanced=True,
    )
    anchor: tuple[str, ...] = setting(
        "anchor prompt",
        "",
        "What the slider must not change: a person, for a slider of a woman. For this prompt, the model with the"
        " adapter learns to predict what it predicts without it. If empty, there is no anchor, which is faster.",
        multiline=True,
        read=_lines,
        advanced=True,
        ai_toolkit="slider.anchor_class",
    )
    anchor_strength: float = setting(
        "anchor strength",
        1.0,
        "How much the anchor counts. Raise it if the anchor still changes.",
        low=0.01,
        high=100.0,
        step=0.1,
        advanced=True,
        ai_toolkit="slider.anchor_strength",
    )

    def __post_init__(self) -> None:
        check_values(self, "Slider", _prompt_errors)

    @property
    def takes_prompts(self) -> bool:
        """Whether the direction is between prompts; else it is between pictures."""
        return self.method != PICTURE_PAIRS

    @property
    def identity(self) -> dict[str, Any]:
        """What a run is stored under: settings that do something. The size is that of the dataset's latents."""
        values = asdict(self if self.takes_prompts else SliderSettings(self.method))
        del values["width"], values["height"]
        if not self.anchor:
            del values["anchor"], values["anchor_strength"]
        return values

    @property
    def is_normalized(self) -> bool:
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


def _for_all(texts: Sequence[str], count: int) -> tuple[str, ...]:
    """As many prompts as there are lines: one stands for all, and none is the empty prompt."""
    if len(texts) <= 1:
        return (*texts, "")[:1] * count
    return tuple(texts)


def _prompt_errors(settings: SliderSettings) -> Iterator[str]:
    if not settings.takes_prompts:
        return
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
                f"line {line} of positive and negative prompt is the same ({positive!r}), which is not a direction:"
                " write what strength -1 gives as negative prompt"
            )
    if count * max(1, len(settings.keep)) > MOST_SETS:
        yield f"{count} lines with {len(settings.keep)} words to keep are more than {MOST_SETS} sets of prompts"


def move_prediction(neutral: Tensor, positive: Tensor, negative: Tensor, amount: float) -> Tensor:
    """What the adapter is to predict: neutral + amount (positive - negative) (concept sliders, Gandikota 2023, arXiv
    2311.12092).

    It holds for denoised latents as for noise, velocity or flow, which are the same linear function of each other in
    all three predictions.

    Args:
        neutral: what the model itself predicts for the target prompt (B, C, …, h, w).
        positive: the same for the positive prompt, of that shape.
        negative: the same for the negative prompt, of that shape.
        amount: the strength of the adapter times the guidance.
    """
    return neutral + amount * (positive - negative)


def normalize_like(target: Tensor, like: Tensor) -> Tensor:
    """AI-Toolkit's norm_like_tensor: give a prediction the mean and the deviation of another, both over the whole
    batch.

    Args:
        target: the prediction to change, of any shape.
        like: the prediction whose mean and deviation it gets, of any shape.
    """
    return (target - target.mean()) / (target.std() + 1e-8) * like.std() + like.mean()


def prediction_of(prediction: str, x: Tensor, denoised: Tensor, sigma: Tensor) -> Tensor:
    """What the network itself gives (noise, velocity or flow) where it denoises `x` to `denoised`.

    Args:
        prediction: what the network predicts: eps, v or flow.
        x: noisy latents (B, C, …, h, w).
        denoised: denoised latents of the same shape.
        sigma: noise levels (B,).
    """
    return (_denoised_of_zeros(prediction, x, sigma) - denoised) * _rows(output_scale(prediction, sigma), x)


def denoised_of(prediction: str, x: Tensor, output: Tensor, sigma: Tensor) -> Tensor:
    """Denoised latents of what the network gives: `prediction_of` the other way round.

    Args:
        prediction: what the network predicts: eps, v or flow.
        x: noisy latents (B, C, …, h, w).
        output: what the network gives for them, of the same shape.
        sigma: noise levels (B,).
    """
    return _denoised_of_zeros(prediction, x, sigma) - output / _rows(output_scale(prediction, sigma), x)


def _denoised_of_zeros(prediction: str, x: Tensor, sigma: Tensor) -> Tensor:
    """The denoised latents of a network that gives zeros."""
    if prediction == "v":
        return x / _rows(sigma**2 + 1, x)
    return x


def _rows(values: Tensor, like: Tensor) -> Tensor:
    """Values (B,) beside latents (B, C, …)."""
    return values.view([-1] + [1] * (like.ndim - 1))


def add_anchor(direction: Tensor, anchor: Tensor, strength: float) -> Tensor:
    """AI-Toolkit's sum of losses, (2 direction + strength anchor) / 3. It counts the direction twice, to enhance one
    end and to erase the other, which are one target.

    Args:
        direction: losses (B,) of the direction.
        anchor: losses (B,) of the anchor prompt.
        strength: how much the anchor counts.
    """
    return (2 * direction + strength * anchor) / 3


def denoise_partly(denoise: Callable[[Tensor, Tensor], Tensor], x: Tensor, levels: Tensor, sigma: Tensor) -> Tensor:
    """Denoise latents down to a noise level of their own each, by Euler's steps.

    Args:
        denoise: gives denoised latents (B, C, …) of noisy ones and their noise levels (B,).
        x: latents (B, C, …) at `levels[0]`.
        levels: the noise levels of the steps (N,), falling.
        sigma: where each row stops (B,).

    Returns:
        Latents (B, C, …) at the noise levels `sigma`.
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
