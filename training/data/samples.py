"""A dataset of samples that come encoded: latents with a conditioning each, captions for reports, and masks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...storage.digest import sha256_of_json, sha256_of_tensors
from . import validation_split
from .dataset import Conditioning, Dataset, DatasetImage, SampleConditioning

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
    """One sample: a latent (C, [frames,] h, w), its conditioning, a caption for reports, and a mask (1, h, w)."""

    latent: Tensor
    conditioning: Conditioning
    caption: str = ""
    mask: Tensor | None = None


@dataclass(frozen=True)
class SampleSettings:
    """How samples are trained: `validation` is the share held out, `batch_size` their own (0: the run's)."""

    repeats: int = 1
    validation: float = 0.1
    caption_dropout: float = 0.0
    batch_size: int = 0


def make_dataset(
    samples: Sequence[Sample], settings: SampleSettings, empty: Conditioning | None = None, **fields: Any
) -> Dataset:
    """The dataset of samples; `empty` is the conditioning without a prompt, and without one none is dropped. `fields`
    are further fields of Dataset. Tensors are not copied.
    """
    contents = [_content(sample) for sample in samples]
    latents = [sha256_of_tensors({"": sample.latent}) for sample in samples]
    names = [f"sample {number}" for number in range(1, len(samples) + 1)]
    held_out = validation_split.held_out(zip(names, latents, strict=True), settings.validation)
    images = []
    shared = _Shared(empty)
    for name, sample, latent in zip(names, samples, latents, strict=True):
        image = shared.image(name, sample, settings)
        images.append(replace(image, sha256=latent))
    digest: list[Any] = ["samples", contents, settings.repeats, settings.validation, settings.caption_dropout]
    digest += [settings.batch_size, None if empty is None else _digest_of(empty)]
    regularisation = fields.get("regularisation")
    if regularisation is not None:
        digest += [regularisation.digest, fields["regularisation_share"]]
    return Dataset(
        tuple(image for image in images if image.name not in held_out),
        {},
        sha256_of_json(digest),
        tuple(image for image in images if image.name in held_out),
        caption_dropout=settings.caption_dropout,
        batch_size=settings.batch_size,
        **fields,
    )


class _Shared:
    """Makes the images; a conditioning that several samples share stays one object, so that a host makes its condition
    once.
    """

    def __init__(self, empty: Conditioning | None) -> None:
        self.empty = empty
        self._brought: dict[int, tuple[SampleConditioning, Mapping[str, Any]]] = {}

    def image(self, name: str, sample: Sample, settings: SampleSettings) -> DatasetImage:
        """The image of a sample, without its hash."""
        key = id(sample.conditioning)
        if key not in self._brought:
            extras = sample.conditioning.extras
            text = {entry: value for entry, value in extras.items() if entry in TEXT_ENTRIES}
            others = {entry: value for entry, value in extras.items() if entry not in TEXT_ENTRIES}
            self._brought[key] = SampleConditioning(Conditioning(sample.conditioning.context, text), self.empty), others
        brought, own = self._brought[key]
        dropout = None
        if self.empty is None:
            dropout = 0.0
        return DatasetImage(
            name,
            sample.caption,
            sample.latent,
            repeats=settings.repeats,
            mask=sample.mask,
            dropout=dropout,
            batch_size=settings.batch_size,
            extras=own,
            brought=brought,
        )


# --- hashes -----------------------------------------------------------------------------------------------------------


def _content(sample: Sample) -> list[Any]:
    tensors = {"latent": sample.latent}
    if sample.mask is not None:
        tensors["mask"] = sample.mask
    return [sha256_of_tensors(tensors), _digest_of(sample.conditioning), sample.caption]


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
    numbers: int = 0


def report(dataset: Dataset, has_empty: bool) -> list[str]:
    """What the dataset of samples has: how many, their sizes, and what their conditionings bring."""
    counts = _Counts()
    for image in dataset.images + dataset.held_out:
        counts.sizes["x".join(map(str, image.latent.shape))] += 1
        counts.entries.update(image.extras.keys())
        counts.captions += bool(image.caption)
        counts.masks += image.mask is not None
        counts.numbers += math.prod(image.latent.shape)
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
    lines.append(f"{4 * counts.numbers / 2**20:.1f} MB of latents, as the graph holds them: nothing is copied")
    return lines


def check_finite(tensor: Tensor, name: str) -> None:
    """Raise ValueError when a tensor holds NaN or infinite values."""
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"Samples: {name} holds NaN or infinite values, as some VAEs make in float16.")
