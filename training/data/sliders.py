"""Datasets of sliders: noise or pictures with sets of prompts, or pairs of pictures.

A pair is an image with its worse picture (`name.win.png`, `name.lose.png`), or with its control picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from ...storage.digest import sha256_of_json
from ..objective.guidance import PLAIN
from ..objective.settings import ObjectiveSettings
from ..objective.slider import SliderSettings
from ..objective.timesteps import NO_EXPERT
from ..trainable.settings import AdapterSettings
from .buckets import frame
from .dataset import Conditioning, Dataset, DatasetImage, ImageCrop, WorsePicture
from .listing import first_names

REFERENCE = "reference_latents"  # the control pictures of an image, as entries of its conditioning
ROUNDS = 96  # of noise in an epoch, for each set of prompts; most batch sizes divide it
HELD_OUT = 4  # draws of noise that measure the held-out loss
_NO_EXTRAS: dict[str, Any] = {"extras": {}, "flipped_extras": None, "seen": ("", "")}


class Fingerprint(Protocol):
    """The hash of a text encoder, and what of it cannot be hashed."""

    @property
    def digest(self) -> str:
        """The hash."""

    @property
    def unhashed(self) -> tuple[str, ...]:
        """What the hash leaves out."""


def texts(settings: SliderSettings) -> list[str]:
    """Every prompt that is to be encoded, and the empty one."""
    found = dict.fromkeys(prompt for prompts in settings.sets for prompt in prompts)
    return list(found | {"": None})


def make_noise_dataset(
    settings: SliderSettings,
    latent: Tensor,
    size: tuple[int, int],
    conditionings: Mapping[str, Conditioning],
    encoders: tuple[str, str],
    **fields: Any,
) -> Dataset:
    """A dataset without pictures, for a slider of prompts: zeros for each set of prompts.

    Args:
        settings: the slider's.
        latent: (C, h, w), whose shape the zeros have.
        size: (width, height) in pixels.
        conditionings: of all prompts.
        encoders: the hashes of VAE and text encoder.
        fields: further fields of Dataset.
    """
    check_direction(settings, conditionings)
    framing = frame(size, size)
    images = []
    for number, prompts in enumerate(settings.sets):
        name = f"noise {number + 1}"
        zeros = torch.zeros_like(latent)
        image = DatasetImage(name, prompts.target, zeros, repeats=ROUNDS, framing=framing, prompt_set=number)
        images.append(replace(image, dropout=0.0))
    held_out = []
    for number in range(HELD_OUT):
        image = images[number % len(images)]
        held_out.append(replace(image, name=f"held-out noise {number + 1}", repeats=1))
    identity = ["slider", settings.identity, list(latent.shape), list(size), list(encoders)]
    return Dataset(
        tuple(images),
        conditionings,
        sha256_of_json(identity),
        tuple(held_out),
        slider=settings,
        has_pictures=False,
        encoders=encoders,
        **fields,
    )


def make_picture_dataset(
    settings: SliderSettings, dataset: Dataset, conditionings: Mapping[str, Conditioning], text_encoder: Fingerprint
) -> Dataset:
    """The pictures of a dataset with the prompts of a slider in place of their captions: each picture with each set.

    Args:
        settings: the slider's.
        dataset: the pictures.
        conditionings: of all prompts.
        text_encoder: its hash.
    """
    check_direction(settings, conditionings)
    _check_whole(dataset)
    images = [
        _make_prompted(settings, number, image) for number, image in product(range(len(settings.sets)), dataset.images)
    ]
    held_out = []
    for place, image in enumerate(dataset.held_out):
        held_out.append(_make_prompted(settings, place % len(settings.sets), image))
    return replace(
        dataset,
        images=tuple(images),
        held_out=tuple(held_out),
        conditionings=conditionings,
        digest=sha256_of_json(["slider", settings.identity, dataset.digest, text_encoder.digest]),
        unhashed=tuple(dict.fromkeys(dataset.unhashed + text_encoder.unhashed)),
        pictures=None,
        slider=settings,
    )


def make_pair_dataset(settings: SliderSettings, dataset: Dataset) -> Dataset:
    """A dataset of pairs: images with a worse picture, or with one control picture. Raises ValueError for missing
    partners.
    """
    _check_whole(dataset)
    images = dataset.images + dataset.held_out
    without = [image.name for image in images if image.worse is None and REFERENCE not in image.extras]
    if without:
        raise ValueError(
            f"Slider: {len(without)} of {len(images)} pictures have no partner: {first_names(without)}. Name the"
            " pictures of a pair name.win.png and name.lose.png; or put the other one beside it as name.control.png,"
            " and set control pictures of Dataset to reference latents."
        )
    wrong = [image.name for image in images if image.worse is None and not _is_pair(image)]
    if wrong:
        raise ValueError(
            "Slider: a pair is two pictures of one shape, and these have several control pictures or one of another"
            f" shape: {first_names(wrong)}. Keep one for each, with control pictures of Dataset on reference latents."
        )
    return replace(
        dataset,
        images=tuple(map(_make_pair, dataset.images)),
        held_out=tuple(map(_make_pair, dataset.held_out)),
        digest=sha256_of_json(["slider", settings.identity, dataset.digest]),
        pictures=None,
        slider=settings,
    )


def check_direction(settings: SliderSettings, conditionings: Mapping[str, Conditioning]) -> None:
    """Raise ValueError for prompts that the text encoder does not tell apart."""
    for prompts in settings.sets:
        positive, negative = conditionings[prompts.positive], conditionings[prompts.negative]
        if positive.context.shape == negative.context.shape and torch.equal(positive.context, negative.context):
            raise ValueError(
                f"Slider: this CLIP encodes {prompts.positive!r} and {prompts.negative!r} alike, so there is no"
                " direction between them: write other words."
            )


def check(dataset: Dataset, adapter: AdapterSettings, words: bool, objective: ObjectiveSettings) -> None:
    """Raise ValueError that lists what a slider cannot be trained with; any other dataset may."""
    if dataset.slider is None:
        return
    errors = []
    if adapter.full_weights or not adapter.adapter.linear:
        errors.append(f"adapter type {adapter.kind} has no strength below 0: use another one, such as lora")
    if objective.compares_pairs:
        errors.append(
            f"loss function {objective.loss} compares the pictures of pairs: choose mse in Objective Settings"
        )
    if adapter.text_encoder:
        errors.append("train text encoder is on in Adapter Settings: switch it off")
    if words:
        errors.append("Train Words is connected: disconnect it")
    if objective.expert != NO_EXPERT and is_noise(dataset):
        errors.append(
            f"expert is {objective.expert} in Objective Settings, which does not denoise noise alone: connect a dataset"
            " of pictures to Slider"
        )
    if objective.ip_noise and dataset.slider.takes_prompts:
        errors.append("input perturbation is above 0 in Objective Settings, which is for pictures: set it to 0")
    if objective.target != PLAIN:
        errors.append(
            f"training target is {objective.target} in Objective Settings, and a slider has its own: set it to {PLAIN}"
        )
    if objective.noise_candidates > 1:
        errors.append(
            "noise candidates is above 1 in Objective Settings, and both ends of a slider learn from the same noise:"
            " set it to 1"
        )
    if errors:
        raise ValueError(f"Slider is connected, and {'; '.join(errors)}.")


def describe(dataset: Dataset) -> list[str]:
    """The reports' lines on a slider's dataset; none for any other."""
    settings = dataset.slider
    if settings is None:
        return []
    if not settings.takes_prompts:
        return [f"slider from {len(dataset.images)} pairs: strength 1 gives the pictures, -1 their partners"]
    (first, *others) = settings.sets
    lines = [
        f"slider, {settings.method}, guidance {settings.guidance:g}: {first.target!r} from {first.negative!r} to"
        f" {first.positive!r}"
    ]
    if first.neutral != first.target:
        lines[0] += f", starting from {first.neutral!r}"
    if first.anchor:
        lines[0] += f", held at {first.anchor!r} with strength {settings.anchor_strength:g}"
    if others:
        lines.append(f"and {len(others)} more sets of prompts")
    if is_noise(dataset):
        lines.append(f"no pictures: noise is denoised in {settings.steps} steps with CFG {settings.cfg:g}")
    return lines


def metadata(dataset: Dataset) -> dict[str, str]:
    """What a saved LoRA says of its slider: the method and the prompts of both ends."""
    settings = dataset.slider
    if settings is None:
        return {}
    values = {"graft_slider": settings.method}
    if not settings.takes_prompts:
        return values
    values["graft_slider_guidance"] = f"{settings.guidance:g}"
    roles = ["positive", "negative", "target", "neutral"]
    if settings.anchor:
        roles.append("anchor")
        values["graft_slider_anchor_strength"] = f"{settings.anchor_strength:g}"
    for role in roles:
        values[f"graft_slider_{role}"] = "\n".join(getattr(prompts, role) for prompts in settings.sets)
    return values


def is_noise(dataset: Dataset) -> bool:
    """Whether a slider's dataset has no pictures, so that noise is denoised in their place."""
    return dataset.slider is not None and dataset.slider.takes_prompts and not dataset.has_pictures


def _make_prompted(settings: SliderSettings, number: int, image: DatasetImage) -> DatasetImage:
    caption = settings.sets[number].target
    plain = replace(image, caption=caption, caption_template=None, dropout=0.0, seen=("", ""), brought=None)
    crops = tuple(replace(crop, seen=("", ""), brought=None) for crop in image.other_crops)
    return replace(plain, other_crops=crops, prompt_set=number)


def _check_whole(dataset: Dataset) -> None:
    if dataset.slider is not None:
        raise ValueError("Slider: the dataset comes from another Slider: connect Dataset instead.")
    if dataset.regularization is not None:
        raise ValueError(
            "Slider: the dataset has regularization images, which have no place in a slider: disconnect them."
        )


def _make_pair(image: DatasetImage) -> DatasetImage:
    """An image whose partner is its worse picture; the model does not get it as a control picture."""
    if image.worse is not None:
        return image
    crops = tuple(replace(crop, worse=_partner(crop), **_NO_EXTRAS) for crop in image.other_crops)
    return replace(image, worse=_partner(image.crop(0)), other_crops=crops, **_NO_EXTRAS)


def _partner(crop: ImageCrop) -> WorsePicture:
    flipped = None
    if crop.flipped_latent is not None:
        flipped = _control(crop, True)
    return WorsePicture(_control(crop, False), flipped)


def _control(crop: ImageCrop, flipped: bool) -> Tensor:
    """The latent (C, h, w) of the control picture of a crop."""
    (latent,) = crop.extras_of(flipped)[REFERENCE]
    return latent[0]


def _is_pair(image: DatasetImage) -> bool:
    latents = image.extras[REFERENCE]
    return len(latents) == 1 and latents[0].shape[1:] == image.latent.shape
