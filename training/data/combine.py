"""One dataset of several: each keeps its own repeats, captions, resolution and batch size; and a validation dataset.

No batch mixes images of datasets with another resolution or batch size, as in kohya's scripts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

from ...storage.digest import sha256_of_spaced_json
from .conditionings import Conditionings, Encode
from .dataset import Conditioning, Dataset, DatasetImage, prompt_parts
from .kohya_metadata import join_metadata


class JoinedConditionings(Mapping[str, Conditioning]):
    """The conditionings of several datasets with one text encoder. The first of them that can encodes other captions
    when they are asked for.
    """

    def __init__(self, parts: Sequence[Mapping[str, Conditioning]]) -> None:
        self._part_of: dict[str, Mapping[str, Conditioning]] = {}
        for part in parts:
            for text in part:
                self._part_of.setdefault(text, part)
        self._parts = list(parts)
        self._encoding = next((part for part in parts if hasattr(part, "prepare")), parts[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._part_of)

    def __len__(self) -> int:
        return len(self._part_of)

    def __getitem__(self, text: str) -> Conditioning:
        return self._part(text)[text]

    def with_encoder(self, encode: Encode, encoder: str) -> JoinedConditionings:
        """The same captions, encoded by another text encoder. Raises ValueError where they cannot be."""
        return JoinedConditionings([encode_anew(part, encode, encoder) for part in self._parts])

    def sees(self, pictures: str) -> bool:
        """Whether these are pictures that one of the parts has, by their key."""
        return self._part_with_pictures(pictures) is not None

    def _part_with_pictures(self, pictures: str) -> Any:
        return next((part for part in self._parts if hasattr(part, "sees") and part.sees(pictures)), None)

    def _part(self, text: str) -> Any:
        """The part that has a text or can encode it."""
        pictures = prompt_parts(text)[1]
        if pictures:
            return self._part_with_pictures(pictures)
        return self._part_of.get(text, self._encoding)

    def prepare(self, texts: Iterable[str], done: Callable[[int, int], object] = lambda done, total: None) -> int:
        """Encode the captions that are missing, as `Conditionings.prepare` does."""
        missing = [text for text in texts if text not in self._part_of]
        by_part: dict[int, tuple[Any, list[str]]] = {}
        for text in missing:
            part = self._part(text)
            by_part.setdefault(id(part), (part, []))[1].append(text)
        count = 0
        for part, own in by_part.values():
            if hasattr(part, "prepare"):
                count += part.prepare(own, done)
        return count


def encode_anew(conditionings: Mapping[str, Conditioning], encode: Encode, encoder: str) -> Mapping[str, Conditioning]:
    """The same captions, encoded by another text encoder. Raises ValueError where they cannot be: those of samples
    bring what they were encoded as.
    """
    if isinstance(conditionings, (Conditionings, JoinedConditionings)):
        return conditionings.with_encoder(encode, encoder)
    raise ValueError("captions that came encoded, as those of Samples, cannot be encoded anew")


def with_clip_skip(dataset: Dataset, clip_skip: int, encode: Encode) -> Dataset:
    """The dataset with its captions encoded at another CLIP skip.

    Args:
        dataset: read by the node Dataset.
        clip_skip: counted from the last layer; 0 leaves the text encoder as it is.
        encode: encodes captions at that CLIP skip.

    Raises:
        ValueError: where its captions cannot be encoded again.
    """
    if dataset.slider is not None:
        raise ValueError("the prompts of a slider are encoded by its node: CLIP skip cannot change while it is trained")
    hashes, regularization = dataset.encoders, dataset.regularization
    if regularization is not None:
        regularization = with_clip_skip(regularization, clip_skip, encode)
    encoder = f"{hashes[1].partition(' ')[0]} {clip_skip}"
    settings = {**dataset.kohya_metadata.get("settings", {}), "ss_clip_skip": clip_skip or None}
    return replace(
        dataset,
        conditionings=encode_anew(dataset.conditionings, encode, encoder),
        encoders=(hashes[0], encoder),
        clip_skip=clip_skip,
        regularization=regularization,
        kohya_metadata={**dataset.kohya_metadata, "settings": settings} if dataset.kohya_metadata else {},
    )


def combine(datasets: Sequence[Dataset]) -> Dataset:
    """One dataset of several, in their order. Raises ValueError where they cannot be trained together.

    A held-out image of one that another one trains on is not measured: it would not tell what the model has not seen.
    """
    first = datasets[0]
    if len(datasets) == 1:
        measured = tuple(_drop_trained(first.held_out, _regularization_images(first)))
        if measured == first.held_out:
            return first
        return replace(first, held_out=measured)
    check_together(datasets)
    images = tuple(image for dataset in datasets for image in _give_own_settings(dataset, dataset.images))
    regularized = next((dataset for dataset in datasets if dataset.regularization is not None), first)
    held_out = _interleave([_give_own_settings(dataset, dataset.held_out) for dataset in datasets])
    held_out = _drop_trained(held_out, [*images, *_regularization_images(regularized)])
    return replace(
        _join(first, datasets),
        images=images,
        digest=sha256_of_spaced_json(
            ["several datasets", [[dataset.digest, dataset.resolution] for dataset in datasets]]
        ),
        held_out=tuple(held_out),
        regularization=regularized.regularization,
        regularization_share=regularized.regularization_share,
        batch_size=0,
        resolution=0,
        folder="",
        kohya_metadata=join_metadata([dataset.kohya_metadata for dataset in datasets]),
        pictures=lambda: combine([dataset.as_pictures() for dataset in datasets]),
    )


def hold_out(dataset: Dataset, validation: Dataset, every: str = "", without: str = "") -> Dataset:
    """The dataset with all images of another one held out.

    Args:
        dataset: what is trained on.
        validation: whose images are held out.
        every: how the error begins.
        without: what the error says to do instead; without them it is about Dataset's validation folder.

    Raises:
        ValueError: where all of them are trained on too.
    """
    check_together([dataset, validation])
    trained = [*dataset.images, *_regularization_images(dataset)]
    held_out = tuple(_drop_trained(_give_own_settings(validation, validation.images), trained))
    if not held_out:
        every = every or f"Dataset: every image of validation folder {validation.folder!r}"
        without = without or "leave validation folder empty"
        raise ValueError(f"{every} is trained on too, so it measures nothing. Put other images there, or {without}.")
    joined = _join(dataset, [dataset, validation])
    digest = sha256_of_spaced_json(["validation dataset", dataset.digest, validation.digest])

    def pictures() -> Dataset:
        return hold_out(dataset.as_pictures(), validation.as_pictures(), every, without)

    return replace(joined, held_out=held_out, digest=digest, pictures=pictures)


def _join(dataset: Dataset, parts: Sequence[Dataset]) -> Dataset:
    """The dataset with the conditionings, files, threads and notes of all parts."""
    return replace(
        dataset,
        conditionings=JoinedConditionings([part.conditionings for part in parts]),
        unhashed=tuple(dict.fromkeys(chain.from_iterable(part.unhashed for part in parts))),
        workers=max(part.workers for part in parts),
        write_schedule=any(part.write_schedule for part in parts),
        watched=tuple(chain.from_iterable(part.watched for part in parts)),
    )


def _give_own_settings(dataset: Dataset, images: Iterable[DatasetImage]) -> list[DatasetImage]:
    """Images that say of themselves what their dataset says of them all."""
    described: list[DatasetImage] = []
    for image in images:
        flip, caption_dropout = image.flip, image.caption_dropout
        if flip is None:
            flip = dataset.flip
        if caption_dropout is None:
            caption_dropout = dataset.caption_dropout
        name = image.name
        if dataset.folder:
            name = f"{dataset.folder}/{name}"
        resolution = image.resolution or dataset.resolution
        described.append(replace(image, name=name, flip=flip, caption_dropout=caption_dropout, resolution=resolution))
    return described


def _interleave(groups: Sequence[Sequence[DatasetImage]]) -> list[DatasetImage]:
    """The first image of each group, then the second ones …, as validation measures only the first images."""
    rows = zip_longest(*groups)
    return [image for row in rows for image in row if image is not None]


def _drop_trained(held_out: Sequence[DatasetImage], trained: Sequence[DatasetImage]) -> list[DatasetImage]:
    seen = set(chain.from_iterable(map(_contents, trained)))
    return [image for image in held_out if seen.isdisjoint(_contents(image))]


def _contents(image: DatasetImage) -> set[str]:
    """The content hashes of an image and of the worse picture of its pair."""
    contents = {image.sha256}
    if image.worse is not None:
        contents.add(image.worse.sha256)
    return contents - {""}


def _regularization_images(dataset: Dataset) -> Sequence[DatasetImage]:
    if dataset.regularization is None:
        return ()
    return dataset.regularization.images


def count_unmeasured(parts: Sequence[Dataset], whole: Dataset) -> int:
    """How many held-out images of the parts the whole leaves out, because it trains on them."""
    return sum(len(part.held_out) for part in parts) - len(whole.held_out)


def repeated_names(datasets: Sequence[Dataset]) -> list[str]:
    """Names of images that more than one dataset trains on, so that each of them counts; "" of none."""
    places: Counter[str] = Counter()
    names: dict[str, str] = {}
    for dataset in datasets:
        for image in {image.sha256: image for image in dataset.images if image.sha256}.values():
            places[image.sha256] += 1
            names.setdefault(image.sha256, image.name)
    return [names[content] for content, count in places.items() if count > 1]


def check_together(datasets: Sequence[Dataset]) -> None:
    """Raise ValueError that names everything in which the datasets differ and must not."""
    errors: list[str] = []
    if any(dataset.slider is not None for dataset in datasets):
        errors.append("one comes from Slider, which goes to Start Training by itself")
    read = [dataset for dataset in datasets if _is_read(dataset)]
    if _differ(dataset.images[0].shape[0] for dataset in datasets) or _differ(_encoder(datasets, 0)):
        errors.append("they were encoded by different VAEs; connect the same VAE to each")
    if _differ(dataset.clip_skip for dataset in read):
        errors.append("CLIP skip differs; set it to the same number in each")
    elif _differ(_encoder(datasets, 1)):
        errors.append("they were encoded by different text encoders; connect the same CLIP to each")
    if _differ(dataset.weighted_captions for dataset in read):
        errors.append("weighted captions is on in one and off in another; set it alike in each")
    if _differ(dataset.images[0].framing is None for dataset in read):
        errors.append("size_conditioning of filters differs; set it alike in each")
    if sum(dataset.regularization is not None for dataset in datasets) > 1:
        errors.append("several have a regularization dataset; connect it to one of them")
    if errors:
        raise ValueError(f"Dataset: datasets cannot be trained together: {'; '.join(errors)}.")


def _is_read(dataset: Dataset) -> bool:
    """Whether any image was read from a folder; samples come encoded, and no text encoder reads their captions."""
    return any(image.brought is None for image in dataset.images)


def _differ(values: Iterable[Any]) -> bool:
    return len(set(values)) > 1


def _encoder(datasets: Sequence[Dataset], number: int) -> list[str]:
    """The hashes of one encoder, of the datasets that know it."""
    return [dataset.encoders[number] for dataset in datasets if dataset.encoders[number]]
