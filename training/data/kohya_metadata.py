"""The dataset's part of a saved LoRA's metadata, under the names of kohya-ss/sd-scripts (`train_network.py`,
`library/train_util.py`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from .dataset import Dataset
from .epoch_order import batch_sizes, batches_per_epoch
from .listing import FolderListing, ImageEntry, unique_images
from .tags import split_tags

FolderMetadata = Mapping[str, Any]


def folder_metadata(listing: FolderListing, clip_skip: int = 0) -> FolderMetadata:
    """Plain values of one folder: the directories, tags and buckets of the training images, and the settings."""
    buckets = None
    if listing.settings.buckets:
        buckets = _bucket_counts(listing.train)
    return {
        "dirs": _directories(listing),
        "tags": _tag_counts(listing),
        "buckets": buckets,
        "ar_error": fmean(
            abs(entry.bucket[0] / entry.bucket[1] - entry.size[0] / entry.size[1]) for entry in listing.train
        ),
        "settings": _settings(listing, clip_skip),
    }


def join_metadata(folders: Sequence[FolderMetadata]) -> FolderMetadata:
    """The plain values of several folders: counts add up, and the settings are the first one's. Empty unless each has
    some.
    """
    if not all(folders):
        return {}
    dirs: dict[str, dict[str, int]] = {}
    tags: dict[str, Counter[str]] = {}
    buckets: Counter[tuple[int, int]] = Counter()
    for folder in folders:
        for name, counts in folder["dirs"].items():
            known = dirs.setdefault(name, {**counts, "img_count": 0})
            known["img_count"] += counts["img_count"]
        for name, of_directory in folder["tags"].items():
            tags.setdefault(name, Counter()).update(of_directory)
        buckets.update(dict(folder["buckets"] or ()))
    return {
        "dirs": dirs,
        "tags": {name: dict(of_directory) for name, of_directory in tags.items()},
        "buckets": sorted(buckets.items()) or None,
        "ar_error": fmean(folder["ar_error"] for folder in folders),
        "settings": folders[0]["settings"],
    }


def _settings(listing: FolderListing, clip_skip: int) -> dict[str, Any]:
    settings, filters = listing.settings, listing.settings.filters
    sides: list[int] = []
    for choices in settings.bucket_choices():
        for size in choices:
            sides += size
    values = {
        "ss_resolution": str(settings.own_resolution),
        "ss_enable_bucket": settings.buckets,
        "ss_bucket_no_upscale": settings.no_upscale,
        "ss_min_bucket_reso": min(sides),
        "ss_max_bucket_reso": max(sides),
        "ss_flip_aug": settings.flip > 0,
        "ss_color_aug": False,
        "ss_random_crop": filters.crop == "random",
        "ss_shuffle_caption": bool(settings.shuffle_tags or filters.shuffle_tag_p),
        "ss_keep_tokens": settings.keep_tags,
        "ss_caption_tag_dropout_rate": settings.tag_dropout,
        "ss_clip_skip": clip_skip or None,
        "ss_cache_latents": True,
    }
    if filters.trigger:
        values["modelspec.trigger_phrase"] = filters.trigger
    return values


def _directory(listing: FolderListing, entry: ImageEntry) -> str:
    return entry.directory or listing.folder.name


def _directories(listing: FolderListing) -> dict[str, dict[str, int]]:
    """{directory: {n_repeats, img_count}} by the directory's own name, as kohya has it."""
    directories: dict[str, dict[str, int]] = {}
    for entry in unique_images(listing.train):
        new = {"n_repeats": listing.settings.repeats * entry.folder_repeats, "img_count": 0}
        directories.setdefault(_directory(listing, entry), new)["img_count"] += 1
    return directories


def _tag_counts(listing: FolderListing) -> dict[str, dict[str, int]]:
    """{directory: {tag in lower case: how many images}}: what stands between the commas of each caption."""
    counts: dict[str, Counter[str]] = {}
    for entry in unique_images(listing.train):
        tags = (tag.lower() for tag in split_tags(entry.caption.plain))
        counts.setdefault(_directory(listing, entry), Counter()).update(tags)
    return {directory: dict(of_directory) for directory, of_directory in counts.items()}


def _bucket_counts(entries: Sequence[ImageEntry]) -> list[tuple[tuple[int, int], int]]:
    """((width, height), images with their repeats) of the buckets in use, in order."""
    counts: Counter[tuple[int, int]] = Counter()
    for entry in entries:
        counts[entry.bucket] += max(1, round(entry.repeats))
    return sorted(counts.items())


def training_metadata(
    dataset: Dataset, batch_size: int, accumulation: int, total_steps: int, dropout: float
) -> dict[str, str]:
    """`ss_*` entries of a dataset and its regularization, for a run with these settings; `dropout` is the objective's.

    A dataset that was not read from a folder has its counts only.
    """
    regularization = dataset.regularization
    batches = batches_per_epoch(dataset, batch_size)
    dropout_rate = 1 - (1 - dropout) * (1 - _caption_dropout(dataset))
    sizes = batch_sizes(dataset, batch_size)
    if len(sizes) == 1:
        batch_size = sizes[0]
    values: dict[str, Any] = {
        "ss_num_train_images": _image_count(dataset),
        "ss_num_reg_images": 0,
        "ss_num_batches_per_epoch": batches,
        "ss_num_epochs": epoch_of(total_steps, batches, accumulation),
        "ss_batch_size_per_device": batch_size,
        "ss_caption_dropout_rate": round(dropout_rate, 10),
    }
    if sizes != [batch_size] or any(image.batch_size for image in dataset.images):
        values["ss_total_batch_size"] = max(sizes) * accumulation
    of_regularization: FolderMetadata = {}
    if regularization is not None:
        values["ss_num_reg_images"] = _image_count(regularization)
        of_regularization = regularization.kohya_metadata
    if dataset.kohya_metadata:
        values |= _folder_values(dataset.kohya_metadata, of_regularization)
    return {name: str(value) for name, value in values.items()}


def epoch_of(steps: int, batches: int, accumulation: int) -> int:
    """In which epoch the last of so many steps lies, from 1. A step of several batches goes on into the next epoch; the
    trainer of kohya ends a step with the epoch instead.
    """
    return math.ceil(steps * accumulation / batches)


def _caption_dropout(dataset: Dataset) -> float:
    """The caption dropout of the dataset; the mean of its images where they have their own."""
    own = [image.caption_dropout for image in dataset.images if image.caption_dropout is not None]
    if len(own) < len(dataset.images):
        return dataset.caption_dropout
    return fmean(own)


def _folder_values(folder: FolderMetadata, regularization: FolderMetadata) -> dict[str, Any]:
    folders = [folder]
    if regularization:
        folders.append(regularization)
    tags: dict[str, dict[str, int]] = {}
    for metadata in folders:
        for name, counts in metadata["tags"].items():
            tags.setdefault(name, counts)  # kohya's: of two directories of one name, those of the images count
    return {
        **folder["settings"],
        "ss_dataset_dirs": json.dumps(folder["dirs"]),
        "ss_reg_dataset_dirs": json.dumps(regularization.get("dirs", {})),
        "ss_tag_frequency": json.dumps(tags),
        "ss_bucket_info": json.dumps(_bucket_info(folders)),
    }


def _image_count(dataset: Dataset) -> int:
    return round(sum(image.repeats for image in dataset.images))


def _bucket_info(folders: Sequence[FolderMetadata]) -> dict[str, Any] | None:
    """{"buckets": {number: {resolution, count}}, "mean_img_ar_error"}; None without buckets."""
    if folders[0]["buckets"] is None:
        return None
    counts: Counter[tuple[int, int]] = Counter()
    for metadata in folders:
        for size, count in metadata["buckets"] or ():
            counts[size] += count
    rows: dict[str, Any] = {}
    for number, (size, count) in enumerate(sorted(counts.items())):
        rows[str(number)] = {"resolution": list(size), "count": count}
    return {"buckets": rows, "mean_img_ar_error": fmean(metadata["ar_error"] for metadata in folders)}
