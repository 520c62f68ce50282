"""Batches for the training steps: flips, crops, caption dropout and caption variants are drawn, latents stacked.

Every draw is a function of (seed, step), so the captions that a step needs are known before it, and a batch is the same
whoever prepares it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..random_draws import generator
from .buckets import Framing
from .dataset import Conditioning, Dataset, DatasetImage, ImageCrop, SampleConditioning, read_conditioning
from .epoch_order import select_images
from .parts import Parts
from .stored_extras import read_extras
from .stored_latent import read_latent


@dataclass(frozen=True, eq=False)
class SliderConditionings:
    """What the model itself sees of a slider's prompts, one conditioning for each image; none where there is no
    anchor.
    """

    positive: tuple[Conditioning, ...]
    negative: tuple[Conditioning, ...]
    neutral: tuple[Conditioning, ...]
    empty: tuple[Conditioning, ...]
    anchor: tuple[Conditioning, ...] = ()


@dataclass(frozen=True, eq=False)
class Batch:
    """Images of one size that go through the model together: latents (B, C, h, w), one conditioning each, and which of
    them are regularization images (B,).

    `captions` are what the conditionings were made of; `mask` (B, 1, h, w) in 0..1 says where the loss counts, None
    where it counts everywhere; `weights` (B,) scale the loss of each image. `worse` are the latents of the pictures
    that people like less than these, or of a slider the other pictures of its pairs; None where some have none.
    `directions` are the conditionings of a slider's prompts. `parts` are the shapes of what latents of video with
    sound pack; their masks are of the video. `empty` are the conditionings without captions, where they are needed.
    """

    latents: Tensor
    conditionings: tuple[Conditioning, ...]
    is_regularization: Tensor
    captions: tuple[str, ...] = ()
    mask: Tensor | None = None
    weights: Tensor | None = None
    worse: Tensor | None = None
    directions: SliderConditionings | None = None
    parts: Parts = ()
    empty: tuple[Conditioning, ...] = ()

    def at_strength(self, strength: float) -> Tensor:
        """The latents that the adapter learns at a strength: below 0 the other pictures of pairs."""
        if strength < 0 and self.worse is not None:
            return self.worse
        return self.latents


@dataclass(frozen=True, eq=False)
class BatchItem:
    """One image as a step trains it: of which dataset, which crop, flipped or not, with which caption ("" if it is
    `dropped`).
    """

    dataset: Dataset
    image: DatasetImage
    crop_number: int
    flipped: bool
    caption: str
    is_regularization: bool
    dropped: bool = False

    @property
    def crop(self) -> ImageCrop:
        """The crop that is trained."""
        return self.image.crop(self.crop_number)

    @property
    def prompt(self) -> str:
        """The key of its conditioning in the dataset."""
        return self.crop.prompt(self.caption, self.flipped)


def draw_items(
    dataset: Dataset, batch_size: int, dropout: float, seed: int, step: int, number: int, purpose: str
) -> list[BatchItem]:
    """The images of a micro-batch, with flips, crops and captions drawn from (seed, step, purpose).

    Args:
        dataset: the images, with those of its regularization dataset mixed in.
        batch_size: how many; images of a dataset with its own batch size keep that.
        dropout: the objective's conditioning dropout. The dataset's caption dropout comes on top; an image's own
            replaces both. A dropped caption is the empty prompt.
        seed: the run's.
        step: the step, 0 is the first.
        number: which micro-batch of the run it is: it says which images.
        purpose: what is drawn for, such as "part 0".
    """
    rng = generator(seed, step, f"pictures {purpose}")
    images, regularization_images = select_images(dataset, batch_size, seed, number)
    items: list[BatchItem] = []
    for image in images:
        variant_rng = _variant_generator(image, seed, step, f"picture {len(items)} {purpose}")
        items.append(_draw_item(dataset, image, dropout, rng, variant_rng, False))
    for image in regularization_images:
        assert dataset.regularization is not None
        variant_rng = _variant_generator(image, seed, step, f"picture {len(items)} {purpose}")
        items.append(_draw_item(dataset.regularization, image, dropout, rng, variant_rng, True))
    return items


def _variant_generator(image: DatasetImage, seed: int, step: int, purpose: str) -> torch.Generator | None:
    if image.other_crops or image.caption_template is not None:
        return generator(seed, step, purpose)
    return None


def _draw_item(
    dataset: Dataset,
    image: DatasetImage,
    dropout: float,
    rng: torch.Generator,
    variant_rng: torch.Generator | None,
    is_regularization: bool,
) -> BatchItem:
    flip_draw, objective_draw, caption_draw = torch.rand(3, generator=rng).tolist()
    flip = dataset.flip
    if image.flip is not None:
        flip = image.flip
    caption_dropout = dataset.caption_dropout
    if image.caption_dropout is not None:
        caption_dropout = image.caption_dropout
    flipped = flip_draw < flip and image.flipped_latent is not None
    if image.dropout is None:
        dropped = objective_draw < dropout or caption_draw < caption_dropout
    else:
        dropped = caption_draw < image.dropout
    crop = 0
    if image.other_crops:
        crop = int(torch.randint(1 + len(image.other_crops), (), generator=variant_rng))
    caption = image.caption
    if image.caption_template is not None:
        caption = image.caption_template.draw(variant_rng)
    if dropped:
        caption = ""
    return BatchItem(dataset, image, crop, flipped, caption, is_regularization, dropped)


_SIZE_CONDITIONED: weakref.WeakKeyDictionary[Conditioning, dict[Framing, Conditioning]] = weakref.WeakKeyDictionary()


def add_size_conditioning(conditioning: Conditioning, framing: Framing | None) -> Conditioning:
    """The conditioning with SDXL's original size, crop and target size; unchanged if `framing` is None.

    Equal arguments give the same object as long as the first lives, so that a host may recognize it.
    """
    if framing is None:
        return conditioning
    variants = _SIZE_CONDITIONED.setdefault(conditioning, {})
    extras = {**conditioning.extras, **framing.size_conditioning()}
    return variants.setdefault(framing, Conditioning(conditioning.context, extras))


@dataclass(frozen=True, eq=False)
class ImageConditioning(Conditioning):
    """A caption's conditioning with the entries of one image. Both live as long as it does, so that no other object
    gets their ids.
    """

    of_caption: Conditioning | None = None
    of_image: Mapping[str, Any] = field(default_factory=dict)


_OF_IMAGES: weakref.WeakValueDictionary[tuple[int, int], ImageConditioning] = weakref.WeakValueDictionary()


def add_extras(conditioning: Conditioning, extras: Mapping[str, Any]) -> Conditioning:
    """The conditioning with the entries of an image in place of its own; unchanged if there are none.

    The same two objects give the same result as long as somebody holds it, so that a host may recognize it. There may
    be one for each image, so nothing is kept here.
    """
    if not extras:
        return conditioning
    key = (id(conditioning), id(extras))
    known = _OF_IMAGES.get(key)
    if known is None:
        entries = {**conditioning.extras, **read_extras(extras)}
        known = ImageConditioning(conditioning.context, entries, conditioning, extras)
        _OF_IMAGES[key] = known
    return known


def image_conditioning(
    dataset: Dataset, caption: str, crop: ImageCrop, flipped: bool = False, dropped: bool = False
) -> Conditioning:
    """The conditioning of an image: that of its caption, with the image's sizes and own entries. A sample may bring one
    in place of the caption's, and another for where that is dropped.

    Args:
        dataset: the image's.
        caption: the caption that is shown.
        crop: the crop of the image.
        flipped: whether it is mirrored.
        dropped: whether the caption was dropped.
    """
    if crop.brought is not None:
        return add_extras(_extras_brought(crop.brought, dropped), crop.extras_of(flipped))
    framing = crop.framing
    if flipped and framing:
        framing = framing.flipped
    conditioning = add_size_conditioning(dataset.conditionings[crop.prompt(caption, flipped)], framing)
    return add_extras(conditioning, crop.extras_of(flipped))


def _extras_brought(brought: SampleConditioning, dropped: bool) -> Conditioning:
    if not dropped:
        return read_conditioning(brought.conditioning)
    assert brought.empty is not None
    return brought.empty


def collate(items: Sequence[BatchItem], with_empty: bool = False) -> Batch:
    """One batch of images whose latents have one size; `with_empty`: with the conditionings of the empty prompt."""
    latents = torch.stack([_latent(item) for item in items])
    empty: tuple[Conditioning, ...] = ()
    if with_empty:
        empty = tuple(image_conditioning(one.dataset, "", one.crop, one.flipped, True) for one in items)
    return Batch(
        latents,
        tuple(image_conditioning(one.dataset, one.caption, one.crop, one.flipped, one.dropped) for one in items),
        torch.tensor([item.is_regularization for item in items]),
        tuple(item.caption for item in items),
        _masks(items),
        torch.tensor([item.image.loss_weight for item in items]),
        _worse(items),
        _directions(items),
        items[0].image.parts,
        empty,
    )


def _directions(items: Sequence[BatchItem]) -> SliderConditionings | None:
    slider = items[0].dataset.slider
    if slider is None or not slider.takes_prompts:
        return None
    sets = [slider.sets[item.image.prompt_set] for item in items]

    def encoded(prompts: Sequence[str]) -> tuple[Conditioning, ...]:
        return tuple(
            image_conditioning(item.dataset, prompt, item.crop, item.flipped)
            for item, prompt in zip(items, prompts, strict=True)
        )

    anchor: tuple[Conditioning, ...] = ()
    if slider.anchor:
        anchor = encoded([one.anchor for one in sets])
    return SliderConditionings(
        encoded([one.positive for one in sets]),
        encoded([one.negative for one in sets]),
        encoded([one.neutral for one in sets]),
        encoded([""] * len(items)),
        anchor,
    )


def _latent(item: BatchItem) -> Tensor:
    crop = item.crop
    if item.flipped and crop.flipped_latent is not None:
        return read_latent(crop.flipped_latent)
    return read_latent(crop.latent)


def _worse(items: Sequence[BatchItem]) -> Tensor | None:
    """The latents of the worse pictures (B, C, h, w), flipped as the better ones are."""
    latents = [item.crop.worse.latent_as(item.flipped) for item in items if item.crop.worse is not None]
    if len(latents) < len(items):
        return None
    return torch.stack(latents)


def _masks(items: Sequence[BatchItem]) -> Tensor | None:
    """Loss masks (B, 1, h, w), ones where an image has none; None if no image has one."""
    masks: list[Tensor] = []
    some_masked = False
    for item in items:
        mask = item.crop.mask
        if mask is None:
            mask = torch.ones(1, *item.image.shape[-2:])
        else:
            some_masked = True
        if item.flipped:
            mask = mask.flip(-1)
        masks.append(mask)
    if not some_masked:
        return None
    return torch.stack(masks)


def group_by_size(items: Sequence[BatchItem]) -> list[list[BatchItem]]:
    """Groups images by latent size, in the order in which each size first appears."""
    groups: dict[tuple[int, ...], list[BatchItem]] = {}
    for item in items:
        groups.setdefault(item.image.size, []).append(item)
    return list(groups.values())


def make_batches(
    dataset: Dataset,
    batch_size: int,
    dropout: float,
    seed: int,
    step: int,
    number: int,
    purpose: str,
    with_empty: bool = False,
) -> list[Batch]:
    """A micro-batch, drawn by `draw_items`, which has the same arguments, and grouped by image size (`collate`)."""
    items = draw_items(dataset, batch_size, dropout, seed, step, number, purpose)
    return [collate(group, with_empty) for group in group_by_size(items)]
