"""What a saved LoRA says of its pictures, in the words of kohya-ss/sd-scripts (`train_network.py`,
`library/train_util.py`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from . import buckets
from .captions import repeats_of
from .dataset import Dataset
from .epoch_order import batches_per_epoch
from .layouts.folder import Entry, Listing, once
from .tags import split

Facts = Mapping[str, Any]


def of_listing(listing: Listing, clip_skip: int = 0) -> Facts:
    """Plain values of one folder: its directories, tags and buckets, of the pictures that are trained on, and its
    settings.
    """
    settings, filters = listing.settings, listing.settings.filters
    sides = [side for size in _sizes(listing) for side in size]
    return {
        "dirs": _directories(listing),
        "tags": _tags(listing),
        "buckets": _buckets(listing.train) if settings.buckets else None,
        "ar_error": fmean(abs(e.bucket[0] / e.bucket[1] - e.size[0] / e.size[1]) for e in listing.train),
        "settings": {
            "ss_resolution": str((settings.resolution, settings.resolution)),
            "ss_enable_bucket": settings.buckets,
            "ss_bucket_no_upscale": False,
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
            **({"modelspec.trigger_phrase": filters.trigger} if filters.trigger else {}),
        },
    }


def _sizes(listing: Listing) -> list[tuple[int, int]]:
    settings = listing.settings
    every = [
        buckets.sizes(side, settings.bucket_step) if settings.buckets else [(side, side)]
        for side in settings.resolutions
    ]
    return [size for sizes in every for size in sizes]


def _directory(listing: Listing, entry: Entry) -> str:
    return (listing.folder / entry.name).parent.name


def _directories(listing: Listing) -> dict[str, dict[str, int]]:
    """{directory: {n_repeats, img_count}} by the directory's own name, as kohya has it."""
    found: dict[str, dict[str, int]] = {}
    for entry in once(listing.train):
        repeats = listing.settings.repeats * repeats_of(listing.folder / entry.name, listing.folder)
        found.setdefault(_directory(listing, entry), {"n_repeats": repeats, "img_count": 0})["img_count"] += 1
    return found


def _tags(listing: Listing) -> dict[str, dict[str, int]]:
    """{directory: {tag in lower case: how many pictures}}: what stands between the commas of each caption."""
    found: dict[str, Counter[str]] = {}
    for entry in once(listing.train):
        found.setdefault(_directory(listing, entry), Counter()).update(
            tag.lower() for tag in split(entry.caption.plain)
        )
    return {name: dict(counts) for name, counts in found.items()}


def _buckets(entries: tuple[Entry, ...]) -> list[tuple[tuple[int, int], int]]:
    """((width, height), pictures with their repeats) of the buckets in use, in order."""
    found: Counter[tuple[int, int]] = Counter()
    for entry in entries:
        found[entry.bucket] += max(1, round(entry.repeats))
    return sorted(found.items())


def metadata(dataset: Dataset, batch_size: int, accumulation: int, total_steps: int, dropout: float) -> dict[str, str]:
    """`ss_*` entries of a dataset and its regularisation, for a run with these settings; `dropout` is the objective's.

    A dataset that was not read from a folder only has its counts.
    """
    regular = dataset.regularisation
    every = batches_per_epoch(dataset, batch_size)
    dropped = 1 - (1 - dropout) * (1 - dataset.caption_dropout)
    said: dict[str, Any] = {
        "ss_num_train_images": _shown(dataset),
        "ss_num_reg_images": 0 if regular is None else _shown(regular),
        "ss_num_batches_per_epoch": every,
        "ss_num_epochs": math.ceil(total_steps / math.ceil(every / accumulation)),
        "ss_batch_size_per_device": batch_size,
        "ss_caption_dropout_rate": round(dropped, 10),
    }
    folders = [one.kohya_metadata for one in (dataset, regular) if one is not None and one.kohya_metadata]
    if dataset.kohya_metadata:
        said |= dict(dataset.kohya_metadata["settings"])
        said["ss_dataset_dirs"] = json.dumps(dataset.kohya_metadata["dirs"])
        said["ss_reg_dataset_dirs"] = json.dumps(
            regular.kohya_metadata["dirs"] if regular is not None and regular.kohya_metadata else {}
        )
        said["ss_tag_frequency"] = json.dumps({name: tags for facts in folders for name, tags in facts["tags"].items()})
        said["ss_bucket_info"] = json.dumps(_bucket_info(folders))
    return {name: str(value) for name, value in said.items()}


def _shown(dataset: Dataset) -> int:
    return round(sum(image.repeats for image in dataset.images))


def _bucket_info(folders: list[Facts]) -> dict[str, Any] | None:
    """{"buckets": {number: {resolution, count}}, "mean_img_ar_error"}; None without buckets."""
    if folders[0]["buckets"] is None:
        return None
    counts: Counter[tuple[int, int]] = Counter()
    for facts in folders:
        for size, count in facts["buckets"] or ():
            counts[size] += count
    rows = {
        str(i): {"resolution": list(size), "count": count} for i, (size, count) in enumerate(sorted(counts.items()))
    }
    return {"buckets": rows, "mean_img_ar_error": fmean(facts["ar_error"] for facts in folders)}
