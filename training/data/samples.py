"""A dataset of samples that come encoded: latents with a conditioning each, captions for reports, and masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...storage.digest import sha256_of_json, sha256_of_tensors
from . import validation_split
from .dataset import Conditioning, Dataset, DatasetImage, SampleConditioning
from .folder_settings import SampleSettings
from .parts import ENTRY, Parts
from .sample_store import SampleStore

# Entries of a conditioning that text encoders make: an empty prompt has its own, or none. All others belong to the
# sample, as reference latents, and stay where its prompt is dropped.
TEXT_ENTRIES = frozenset(
    {
        "attention_mask",
        "attention_mask_mt5xl",
        "conditioning_byt5small",
        "conditioning_llama3",
        "conditioning_lyrics",
        "conditioning_mt5xl",
        "cross_attn_controlnet",
        "lyrics_strength",
        "minimax_token_tags",
        "pooled_output",
        "reference_latents_text_embeds",
        "t5xxl_ids",
        "t5xxl_weights",
        "text_input_ids",
        "unprocessed_ltxav_embeds",
    }
)


@dataclass(frozen=True, eq=False)
class Sample:
    """One sample: a latent (C, [frames,] h, w), of sound (C, T), its conditioning, a caption for reports, and a mask
    (1, h, w). A latent of video with its sound is packed (1, N), of those `parts`.
    """

    latent: Tensor
    conditioning: Conditioning
    caption: str = ""
    mask: Tensor | None = None
    parts: Parts = ()


def make_dataset(
    samples: Iterable[Sample],
    settings: SampleSettings,
    empty: Conditioning | None = None,
    store: SampleStore | None = None,
    **fields: Any,
) -> Dataset:
    """The dataset of samples.

    Args:
        samples: with tensors that are not copied.
        settings: those of Samples.
        empty: the conditioning without a prompt; without one none is dropped.
        store: puts tensors into the cache, which are then not kept.
        fields: further fields of Dataset.
    """
    contents: list[Any] = []
    images = []
    shared = _SharingMaker(empty, store or SampleStore())
    for number, sample in enumerate(samples, 1):
        contents.append(shared.content(sample))
        images.append(shared.image(f"sample {number}", sample, settings))
    held_out = validation_split.choose_held_out([(image.name, image.sha256) for image in images], settings.validation)
    digest: list[Any] = ["samples", contents, settings.repeats, settings.validation, settings.caption_dropout]
    digest += [settings.batch_size, None if empty is None else _digest_of(empty)]
    if settings.loss_weight != 1:
        digest.append(["loss weight", settings.loss_weight])
    regularization = fields.get("regularization")
    if regularization is not None:
        digest += [regularization.digest, fields["regularization_share"]]
    return Dataset(
        tuple(image for image in images if image.name not in held_out),
        {},
        sha256_of_json(digest),
        tuple(image for image in images if image.name in held_out),
        caption_dropout=settings.caption_dropout,
        batch_size=settings.batch_size,
        workers=int(shared.store.leaves_on_disk),
        **fields,
    )


@dataclass(frozen=True, eq=False)
class _SharedConditioning:
    """A conditioning as samples bring it: what goes with the prompt, and what stays with the sample."""

    brought: SampleConditioning
    own: Mapping[str, Any]


class _SharingMaker:
    """Makes the images; a conditioning that several samples share stays one object, so that a host makes its condition
    once.
    """

    def __init__(self, empty: Conditioning | None, store: SampleStore) -> None:
        self.empty, self.store = empty, store
        self._conditionings: WeakKeyDictionary[Conditioning, dict[Parts, _SharedConditioning]] = WeakKeyDictionary()
        self._digests: WeakKeyDictionary[Conditioning, str] = WeakKeyDictionary()

    def content(self, sample: Sample) -> list[Any]:
        """The hashes of a sample, and its caption."""
        tensors = {"latent": sample.latent}
        if sample.mask is not None:
            tensors["mask"] = sample.mask
        if sample.conditioning not in self._digests:
            self._digests[sample.conditioning] = _digest_of(sample.conditioning)
        content: list[Any] = [sha256_of_tensors(tensors), self._digests[sample.conditioning], sample.caption]
        if sample.parts:
            content.append([list(part) for part in sample.parts])
        return content

    def image(self, name: str, sample: Sample, settings: SampleSettings) -> DatasetImage:
        """The image of a sample."""
        by_parts = self._conditionings.setdefault(sample.conditioning, {})
        if sample.parts not in by_parts:
            by_parts[sample.parts] = self._share(name, sample.conditioning, sample.parts)
        shared = by_parts[sample.parts]
        dropout = None
        if self.empty is None:
            dropout = 0.0
        sha256 = sha256_of_tensors({"": sample.latent})
        return DatasetImage(
            name,
            sample.caption,
            self.store.latent(name, sample.latent, sha256),
            repeats=settings.repeats,
            mask=sample.mask,
            dropout=dropout,
            loss_weight=settings.loss_weight,
            batch_size=settings.batch_size,
            sha256=sha256,
            extras=shared.own,
            brought=shared.brought,
            parts=sample.parts,
        )

    def _share(self, name: str, conditioning: Conditioning, parts: Parts) -> _SharedConditioning:
        text = {entry: value for entry, value in conditioning.extras.items() if entry in TEXT_ENTRIES}
        others = {entry: value for entry, value in conditioning.extras.items() if entry not in TEXT_ENTRIES}
        if parts:
            others[ENTRY] = parts
        own = self.store.conditioning(name, Conditioning(conditioning.context, text))
        return _SharedConditioning(SampleConditioning(own, self.empty), self.store.extras(name, others))


# --- hashes -----------------------------------------------------------------------------------------------------------


def _digest_of(conditioning: Conditioning) -> str:
    tensors: dict[str, Tensor] = {"context": conditioning.context}
    plain = []
    for path, value in leaves(conditioning.extras):
        if isinstance(value, Tensor):
            tensors[path] = value
        else:
            plain.append([path, type(value).__name__, repr(value)])
    return sha256_of_json([sha256_of_tensors(tensors), sorted(plain)])


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of everything in nested mappings, sequences and objects with attributes."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from leaves(entry, f"{path}/{name}")
    elif isinstance(value, list | tuple):
        yield f"{path}#", len(value)
        for number, entry in enumerate(value):
            yield from leaves(entry, f"{path}/{number}")
    elif isinstance(value, Tensor) or not hasattr(value, "__dict__"):
        yield path, value
    else:
        yield f"{path}#", type(value).__qualname__
        yield from leaves(vars(value), path)


# --- the report -------------------------------------------------------------------------------------------------------


@dataclass
class _Counts:
    sizes: Counter[str] = field(default_factory=Counter)
    entries: Counter[str] = field(default_factory=Counter)
    captions: int = 0
    masks: int = 0


def report(dataset: Dataset, has_empty: bool) -> list[str]:
    """What the dataset of samples has: how many, their sizes, and what their conditionings bring."""
    counts = _Counts()
    for image in dataset.images + dataset.held_out:
        counts.sizes[" with sound of ".join("x".join(map(str, part)) for part in image.parts or [image.shape])] += 1
        counts.entries.update(name for name in image.extras if name != ENTRY)
        counts.captions += bool(image.caption)
        counts.masks += image.mask is not None
    lines = [f"{len(dataset.images)} samples to train on, {len(dataset.held_out)} held out for validation"]
    lines.append("latents: " + ", ".join(f"{number} of {size}" for size, number in sorted(counts.sizes.items())))
    if counts.entries:
        brought = ", ".join(f"{name} ({number})" for name, number in sorted(counts.entries.items()))
        lines.append(f"conditionings bring: {brought}")
    lines.append(f"{counts.captions} captions, for reports only; {counts.masks} masks")
    if has_empty:
        lines.append("where the prompt is dropped, the empty conditioning takes its place; what a sample brings stays")
    else:
        lines.append("no prompt is dropped: connect an empty conditioning, or CLIP, for that")
    return lines


def check_takes_mask(name: str, shape: Sequence[int]) -> None:
    """Raise ValueError where the latent of a sample has no height and width, as that of sound, so that no mask fits."""
    if len(shape) < 3:
        raise ValueError(
            f"Samples: {name} is sound, whose latents have no height and width, so that a mask says nothing of them:"
            " disconnect masks."
        )


def check_finite(tensor: Tensor, name: str) -> None:
    """Raise ValueError when a tensor holds NaN or infinite values."""
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"Samples: {name} holds NaN or infinite values, as some VAEs make in float16.")
