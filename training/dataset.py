"""Pictures as training sees them: latents and encoded captions in memory, and which of them make up each batch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .draws import generator


@dataclass(frozen=True, eq=False)
class Conditioning:
    """What a text encoder made of one caption: `context` (1, T, C) and the other entries of the host's conditioning (pooled output …)."""

    context: Tensor
    extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture: a name for messages, its caption, its latent (C, h, w) in float32, the mirrored one's latent if there is a flip."""

    name: str
    caption: str
    latent: Tensor
    flipped: Tensor | None = None
    repeats: int = 1


@dataclass(frozen=True, eq=False)
class Dataset:
    """Pictures, held-out pictures and encoded captions (with the empty one), immutable; `digest` stands for the contents."""

    pictures: tuple[Picture, ...]
    conditionings: Mapping[str, Conditioning]
    digest: str
    held_out: tuple[Picture, ...] = ()
    flip: float = 0.0
    caption_dropout: float = 0.0
    regularisation: Dataset | None = None
    regularisation_share: float = 0.0
    report: str = ""
    unhashed: tuple[str, ...] = ()  # parts of the encoders that the digest cannot see

    def __post_init__(self) -> None:
        captions = {picture.caption for picture in self.pictures + self.held_out} | {""}
        missing = sorted(captions - self.conditionings.keys())
        if not self.pictures:
            raise ValueError("A dataset needs at least one picture to train on.")
        if missing:
            raise ValueError(f"Captions without conditioning ({len(missing)}; the empty caption is always needed): {missing[:5]}")
        if self.regularisation is not None and not 0.0 < self.regularisation_share < 1.0:
            raise ValueError(f"regularisation_share is {self.regularisation_share}, expected above 0 and below 1.")

    @classmethod
    def of(
        cls,
        latents: Sequence[Tensor],
        captions: Sequence[str],
        conditionings: Mapping[str, Conditioning],
        held_out: Sequence[int] = (),
        **settings: Any,
    ) -> Dataset:
        """A dataset of latents (C, h, w) that are in memory already; `held_out` are the indices kept for validation."""
        if len(latents) != len(captions):
            raise ValueError(f"{len(latents)} latents and {len(captions)} captions: expected one caption a latent.")
        every = [Picture(str(i), c, x.detach().float().cpu()) for i, (x, c) in enumerate(zip(latents, captions, strict=True))]
        plain = sorted((key, str(value)) for key, value in settings.items() if key != "regularisation")
        digest = hashlib.sha256(repr((sorted(held_out), plain)).encode())
        for picture in every:
            digest.update(picture.caption.encode() + picture.latent.contiguous().numpy().tobytes())
        for caption in sorted(conditionings):
            digest.update(caption.encode() + conditionings[caption].context.detach().float().cpu().contiguous().numpy().tobytes())
        if settings.get("regularisation") is not None:
            digest.update(settings["regularisation"].digest.encode())
        kept = set(held_out)
        train = tuple(p for i, p in enumerate(every) if i not in kept)
        return cls(train, dict(conditionings), digest.hexdigest(), tuple(every[i] for i in sorted(kept)), **settings)


@dataclass(frozen=True, eq=False)
class Batch:
    """Pictures of one size that go through the model together: latents (B, C, h, w), a conditioning each, which are regularisation (B,)."""

    latents: Tensor
    conditionings: tuple[Conditioning, ...]
    regular: Tensor


@lru_cache(maxsize=8)
def _plan(shapes: tuple[tuple[int, ...], ...], size: int, seed: int, epoch: int, purpose: str) -> tuple[tuple[int, ...], ...]:
    """Batches of one epoch as indices into `shapes`: one shape a batch, the last of a shape smaller, order drawn from (seed, epoch)."""
    draws = generator(seed, epoch, purpose)
    groups: dict[tuple[int, ...], list[int]] = {}
    for index in torch.randperm(len(shapes), generator=draws).tolist():
        groups.setdefault(shapes[index], []).append(index)
    batches = [tuple(group[i : i + size]) for _, group in sorted(groups.items()) for i in range(0, len(group), size)]
    return tuple(batches[i] for i in torch.randperm(len(batches), generator=draws).tolist())


def _entries(dataset: Dataset) -> tuple[list[Picture], tuple[tuple[int, ...], ...]]:
    pictures = [picture for picture in dataset.pictures for _ in range(picture.repeats)]
    return pictures, tuple(tuple(picture.latent.shape) for picture in pictures)


def batches_per_epoch(dataset: Dataset, batch_size: int) -> int:
    """Batches that show every picture (and repeat) once; regularisation pictures come on top and are not counted."""
    regular = _regular_count(dataset, batch_size)
    _, shapes = _entries(dataset)
    counts: dict[tuple[int, ...], int] = {}
    for shape in shapes:
        counts[shape] = counts.get(shape, 0) + 1
    own = sum(math.ceil(count / (batch_size - regular)) for count in counts.values())
    if dataset.regularisation is not None and regular == 0:
        return math.ceil(own / (1 - dataset.regularisation_share))
    return own


def _regular_count(dataset: Dataset, batch_size: int) -> int:
    if dataset.regularisation is None:
        return 0
    return min(batch_size - 1, int(batch_size * dataset.regularisation_share + 0.5))


def _take(dataset: Dataset, size: int, seed: int, number: int, purpose: str) -> list[Picture]:
    """Batch `number` of the endless row of epochs."""
    pictures, shapes = _entries(dataset)
    counts: dict[tuple[int, ...], int] = {}
    for shape in shapes:
        counts[shape] = counts.get(shape, 0) + 1
    per_epoch = sum(math.ceil(count / size) for count in counts.values())
    plan = _plan(shapes, size, seed, number // per_epoch, purpose)
    return [pictures[i] for i in plan[number % per_epoch]]


def chosen(dataset: Dataset, batch_size: int, seed: int, number: int) -> tuple[list[Picture], list[Picture]]:
    """The pictures of micro-batch `number` (from 0): those of the dataset and those of its regularisation set.

    A share of the batch goes to regularisation; where the batch is so small that the share is no whole picture, whole batches do.
    """
    regular, other = _regular_count(dataset, batch_size), dataset.regularisation
    if other is None:
        return _take(dataset, batch_size, seed, number, "order"), []
    if regular == 0:
        before, after = math.floor(number * dataset.regularisation_share), math.floor((number + 1) * dataset.regularisation_share)
        if after > before:
            return [], _take(other, batch_size, seed, before, "regularisation order")
        return _take(dataset, batch_size, seed, number - before, "order"), []
    pick = [_take(other, 1, seed, number * regular + i, "regularisation order")[0] for i in range(regular)]
    return _take(dataset, batch_size - regular, seed, number, "order"), pick


def batches(dataset: Dataset, batch_size: int, dropout: float, seed: int, step: int, number: int, purpose: str) -> list[Batch]:
    """Micro-batch `number`, grouped by picture size, with flips and captions drawn from (seed, step, purpose).

    `dropout` is the objective's conditioning dropout; the dataset's caption dropout comes on top. A dropped caption is the empty prompt.
    """
    draws = generator(seed, step, f"pictures {purpose}")
    own, regular = chosen(dataset, batch_size, seed, number)
    groups: dict[tuple[int, ...], list[tuple[Tensor, Conditioning, bool]]] = {}
    for source, pictures in ((dataset, own), (dataset.regularisation, regular)):
        for picture in pictures:
            assert source is not None
            flip, first, second = torch.rand(3, generator=draws).tolist()
            latent = picture.flipped if flip < source.flip and picture.flipped is not None else picture.latent
            caption = "" if first < dropout or second < source.caption_dropout else picture.caption
            groups.setdefault(tuple(latent.shape), []).append((latent, source.conditionings[caption], source is not dataset))
    columns = [tuple(zip(*group, strict=True)) for group in groups.values()]
    return [Batch(torch.stack(latents), conditionings, torch.tensor(regular)) for latents, conditionings, regular in columns]
