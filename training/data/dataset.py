"""Pictures as training sees them: latents and encoded captions, and which of them make up each batch.

Every choice is a function of (seed, step): which pictures, mirrored or not, which cut, which wording. So the captions
that a step needs are known before it, and a batch is the same whoever prepares it.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..random_draws import generator
from .buckets import Framing
from .changed_files import Watched
from .tags import Caption


@dataclass(frozen=True, eq=False)
class Conditioning:
    """What a text encoder made of one caption: `context` (1, T, C) and the other entries of the host's conditioning
    (pooled output …).
    """

    context: Tensor
    extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class View:
    """One cut of a picture: latent (C, h, w) in float32, the mirrored one's if there is a flip, loss mask (1, h, w) in
    0..1, framing.
    """

    latent: Tensor
    flipped: Tensor | None = None
    mask: Tensor | None = None
    framing: Framing | None = None


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture: a name for messages, its caption, its latent (C, h, w) in float32, the mirrored one's latent if
    there is a flip.

    `repeats` counts a round and need not be whole. `wording` says how the caption varies (`caption` is the plain one,
    which validation uses), `more` are other cuts than the first. `flip` and `dropout` override the dataset's (and
    `dropout` the objective's too), pictures of different `group`s never share a batch, `weight` scales the loss.
    """

    name: str
    caption: str
    latent: Tensor
    flipped: Tensor | None = None
    repeats: float = 1
    mask: Tensor | None = None
    framing: Framing | None = None
    more: tuple[View, ...] = ()
    wording: Caption | None = None
    flip: float | None = None
    dropout: float | None = None
    group: str = ""
    weight: float = 1.0

    def view(self, number: int) -> View:
        """The cut of that number, 0 is the picture's own."""
        if number:
            return self.more[number - 1]
        return View(self.latent, self.flipped, self.mask, self.framing)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Pictures, held-out pictures and encoded captions (with the empty one), immutable; `digest` stands for the
    contents.

    `conditionings` may know more captions than it holds and encode them when they are asked for
    (`conditionings.Conditionings`).
    """

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
    clip_skip: int = 0  # of the encoder that made the conditionings, for whoever encodes captions anew
    workers: int = 0  # threads that prepare batches ahead; not part of the digest
    write_schedule: bool = False
    watched: Watched | None = None  # the files it was made from
    facts: Mapping[str, Any] = field(default_factory=dict)  # what a saved LoRA says of them (`facts.of_listing`)

    def __post_init__(self) -> None:
        captions = {picture.caption for picture in self.pictures + self.held_out} | {""}
        missing = sorted(captions - self.conditionings.keys())
        if not self.pictures:
            raise ValueError("A dataset needs at least one picture to train on.")
        if missing:
            raise ValueError(
                f"Captions without conditioning ({len(missing)}; the empty caption is always needed): {missing[:5]}"
            )
        if self.regularisation is not None:
            self._check_regularisation(self.regularisation)

    def _check_regularisation(self, other: Dataset) -> None:
        if not 0.0 < self.regularisation_share < 1.0:
            raise ValueError(f"regularisation_share is {self.regularisation_share}, expected above 0 and below 1.")
        if other.regularisation is not None:
            raise ValueError("The regularisation dataset has a regularisation dataset of its own: connect only one.")
        channels = [dataset.pictures[0].latent.shape[0] for dataset in (self, other)]
        if channels[0] != channels[1]:
            raise ValueError(
                f"Latents have {channels[0]} channels and those of regularisation {channels[1]}: use the same VAE for"
                " both."
            )

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
        every = [
            Picture(str(i), c, x.detach().float().cpu()) for i, (x, c) in enumerate(zip(latents, captions, strict=True))
        ]
        plain = sorted((key, str(value)) for key, value in settings.items() if key != "regularisation")
        digest = hashlib.sha256(repr((sorted(held_out), plain)).encode())
        for picture in every:
            digest.update(picture.caption.encode() + picture.latent.contiguous().numpy().tobytes())
        for caption in sorted(conditionings):
            digest.update(
                caption.encode() + conditionings[caption].context.detach().float().cpu().contiguous().numpy().tobytes()
            )
        if settings.get("regularisation") is not None:
            digest.update(settings["regularisation"].digest.encode())
        kept = set(held_out)
        train = tuple(p for i, p in enumerate(every) if i not in kept)
        return cls(train, dict(conditionings), digest.hexdigest(), tuple(every[i] for i in sorted(kept)), **settings)


@dataclass(frozen=True, eq=False)
class Batch:
    """Pictures of one size that go through the model together: latents (B, C, h, w), a conditioning each, which are
    regularisation (B,).

    `captions` are what the conditionings were made of; `mask` (B, 1, h, w) in 0..1 says where the loss counts, None
    where it counts everywhere; `weights` (B,) scale the loss of each picture.
    """

    latents: Tensor
    conditionings: tuple[Conditioning, ...]
    regular: Tensor
    captions: tuple[str, ...] = ()
    mask: Tensor | None = None
    weights: Tensor | None = None


class _Order:
    """The endless row of batches of one dataset: rounds one after another, each in an order of its own.

    Holds indices, never the dataset itself, so that it may live as long as the dataset and no longer.
    """

    def __init__(self, dataset: Dataset, size: int, seed: int, purpose: str) -> None:
        self.size, self.seed, self.purpose = size, seed, purpose
        self.keys = [(tuple(picture.latent.shape), picture.group) for picture in dataset.pictures]
        self.repeats = [picture.repeats for picture in dataset.pictures]
        self.even = all(float(repeats).is_integer() for repeats in self.repeats)
        self.starts = [0]  # numbers of the first batch of each round
        self._round: tuple[int, list[list[int]]] = (-1, [])

    def entries(self, epoch: int) -> list[int]:
        """Indices of a round, each as often as it repeats; the part of a repeat is spread over the rounds as evenly as
        can be.
        """
        out: list[int] = []
        for index, repeats in enumerate(self.repeats):
            if float(repeats).is_integer():
                phase = 0.0
            else:
                phase = index * 0.6180339887498949 % 1.0
            out += [index] * (math.floor((epoch + 1) * repeats + phase) - math.floor(epoch * repeats + phase))
        return out

    def count(self, epoch: int) -> int:
        """Batches of a round."""
        counts: dict[Any, int] = {}
        for index in self.entries(epoch):
            counts[self.keys[index]] = counts.get(self.keys[index], 0) + 1
        return sum(math.ceil(count / self.size) for count in counts.values())

    def plan(self, epoch: int) -> list[list[int]]:
        """Batches of a round: one shape and group a batch, the last of a shape smaller, order drawn
        from (seed, epoch).
        """
        if self._round[0] != epoch:
            draws = generator(self.seed, epoch, self.purpose)
            entries = self.entries(epoch)
            groups: dict[Any, list[int]] = {}
            for position in torch.randperm(len(entries), generator=draws).tolist():
                groups.setdefault(self.keys[entries[position]], []).append(entries[position])
            batches = [
                group[i : i + self.size] for _, group in sorted(groups.items()) for i in range(0, len(group), self.size)
            ]
            self._round = (epoch, [batches[i] for i in torch.randperm(len(batches), generator=draws).tolist()])
        return self._round[1]

    def take(self, number: int) -> list[int]:
        """Batch `number`, from 0."""
        if self.even:
            if len(self.starts) == 1:
                self.starts.append(self.count(0))
            epoch, place = divmod(number, self.starts[1])
            return self.plan(epoch)[place]
        while self.starts[-1] <= number:
            self.starts.append(self.starts[-1] + self.count(len(self.starts) - 1))
        epoch = bisect_right(self.starts, number) - 1
        return self.plan(epoch)[number - self.starts[epoch]]


_ORDERS: weakref.WeakKeyDictionary[Dataset, dict[tuple[int, int, str], _Order]] = weakref.WeakKeyDictionary()


def _order(dataset: Dataset, size: int, seed: int, purpose: str) -> _Order:
    known = _ORDERS.setdefault(dataset, {})
    if (size, seed, purpose) not in known:
        known[size, seed, purpose] = _Order(dataset, size, seed, purpose)
    return known[size, seed, purpose]


def batches_per_epoch(dataset: Dataset, batch_size: int) -> int:
    """Batches that show every picture (and repeat) once; regularisation pictures come on top and are not counted.

    Where repeats are not whole, rounds differ by a picture or so and this is the first that is not empty.
    """
    regular = _regular_count(dataset, batch_size)
    order = _order(dataset, batch_size - regular, 0, "order")
    own = next(count for count in map(order.count, range(1_000_000)) if count)
    if dataset.regularisation is not None and regular == 0:
        return math.ceil(own / (1 - dataset.regularisation_share))
    return own


def _regular_count(dataset: Dataset, batch_size: int) -> int:
    if dataset.regularisation is None:
        return 0
    return min(batch_size - 1, int(batch_size * dataset.regularisation_share + 0.5))


def _take(dataset: Dataset, size: int, seed: int, number: int, purpose: str) -> list[Picture]:
    return [dataset.pictures[index] for index in _order(dataset, size, seed, purpose).take(number)]


def chosen(dataset: Dataset, batch_size: int, seed: int, number: int) -> tuple[list[Picture], list[Picture]]:
    """The pictures of micro-batch `number` (from 0): those of the dataset and those of its regularisation set.

    A share of the batch goes to regularisation; where the batch is so small that the share is no whole picture, whole
    batches do.
    """
    regular, other = _regular_count(dataset, batch_size), dataset.regularisation
    if other is None:
        return _take(dataset, batch_size, seed, number, "order"), []
    if regular == 0:
        before, after = (
            math.floor(number * dataset.regularisation_share),
            math.floor((number + 1) * dataset.regularisation_share),
        )
        if after > before:
            return [], _take(other, batch_size, seed, before, "regularisation order")
        return _take(dataset, batch_size, seed, number - before, "order"), []
    pick = [_take(other, 1, seed, number * regular + i, "regularisation order")[0] for i in range(regular)]
    return _take(dataset, batch_size - regular, seed, number, "order"), pick


@dataclass(frozen=True, eq=False)
class Shown:
    """A picture as one step shows it: of which dataset, which cut, mirrored or not, under which caption ("" when it is
    dropped).
    """

    source: Dataset
    picture: Picture
    cut: int
    mirrored: bool
    caption: str
    regular: bool


def shown(
    dataset: Dataset, batch_size: int, dropout: float, seed: int, step: int, number: int, purpose: str
) -> list[Shown]:
    """Micro-batch `number` with flips, cuts and captions drawn from (seed, step, purpose).

    `dropout` is the objective's conditioning dropout; the dataset's caption dropout comes on top, a picture's own
    replaces both. A dropped caption is the empty prompt.
    """
    draws = generator(seed, step, f"pictures {purpose}")
    own, regular = chosen(dataset, batch_size, seed, number)
    out: list[Shown] = []
    for source, pictures in ((dataset, own), (dataset.regularisation, regular)):
        for picture in pictures:
            assert source is not None
            flip, first, second = torch.rand(3, generator=draws).tolist()
            if picture.flip is None:
                share = source.flip
            else:
                share = picture.flip
            mirrored = flip < share and picture.flipped is not None
            if picture.dropout is None:
                dropped = first < dropout or second < source.caption_dropout
            else:
                dropped = second < picture.dropout
            if picture.more or picture.wording is not None:
                more = generator(seed, step, f"picture {len(out)} {purpose}")
            else:
                more = None
            if picture.more:
                cut = int(torch.randint(1 + len(picture.more), (), generator=more))
            else:
                cut = 0
            if picture.wording is None:
                caption = picture.caption
            else:
                caption = picture.wording.drawn(more)
            out.append(Shown(source, picture, cut, mirrored, "" if dropped else caption, source is not dataset))
    return out


_FRAMED: weakref.WeakKeyDictionary[Conditioning, dict[Framing, Conditioning]] = weakref.WeakKeyDictionary()


def framed(conditioning: Conditioning, framing: Framing | None) -> Conditioning:
    """The conditioning of a picture that is put into its bucket so: with the sizes that SDXL is told; None leaves it as
    it is.

    Equal arguments give the same object as long as the first lives, so that a host may know it again.
    """
    if framing is None:
        return conditioning
    known = _FRAMED.setdefault(conditioning, {})
    return known.setdefault(
        framing, Conditioning(conditioning.context, {**conditioning.extras, **framing.conditions()})
    )


def batch_of(pictures: Sequence[Shown]) -> Batch:
    """One batch of pictures whose latents are of one size."""
    views = [one.picture.view(one.cut) for one in pictures]
    latents, conditionings = [], []
    for one, view in zip(pictures, views, strict=True):
        latents.append(view.flipped if one.mirrored and view.flipped is not None else view.latent)
        framing = view.framing
        if one.mirrored and framing:
            framing = framing.mirrored
        conditionings.append(framed(one.source.conditionings[one.caption], framing))
    mask = None
    if any(view.mask is not None for view in views):
        whole = torch.ones(1, *latents[0].shape[-2:])
        masks = [whole if view.mask is None else view.mask for view in views]
        mask = torch.stack([mask.flip(-1) if one.mirrored else mask for one, mask in zip(pictures, masks, strict=True)])
    return Batch(
        torch.stack(latents),
        tuple(conditionings),
        torch.tensor([one.regular for one in pictures]),
        tuple(one.caption for one in pictures),
        mask,
        torch.tensor([one.picture.weight for one in pictures]),
    )


def by_size(pictures: Sequence[Shown]) -> list[list[Shown]]:
    """The pictures in groups whose latents are of one size, in the order of their first."""
    groups: dict[tuple[int, ...], list[Shown]] = {}
    for one in pictures:
        groups.setdefault(tuple(one.picture.latent.shape), []).append(one)
    return list(groups.values())


def batches(
    dataset: Dataset, batch_size: int, dropout: float, seed: int, step: int, number: int, purpose: str
) -> list[Batch]:
    """Micro-batch `number`, grouped by picture size, as `shown` draws it."""
    return [batch_of(group) for group in by_size(shown(dataset, batch_size, dropout, seed, step, number, purpose))]
