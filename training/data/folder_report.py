"""What GraftDataset reports about a folder: in words, and as plain data for the editor's panel."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ...storage.problem_list import problem_lines
from .buckets import name_of
from .combine import count_unmeasured, repeated_names
from .control_methods import ControlMethod
from .dataset import Dataset
from .file_names import printable
from .folder_reader import FolderGlance
from .folder_settings import FolderSource
from .listing import FolderListing, ImageEntry, count_names, first_names, unique_images
from .stored_latent import StoredLatent

MOST_IMAGES = 500  # that the editor's data lists
_BYTES_PER_NUMBER = 4  # latents are float32


def bucket_counts(listing: FolderListing) -> list[dict[str, Any]]:
    """The buckets in use, with how many images are trained and held out in each; one row per batch_id, and per number
    of frames, too.
    """
    train = Counter(map(_bucket_key, listing.train))
    held_out = Counter(map(_bucket_key, listing.held_out))
    rows: list[dict[str, Any]] = []
    for key in sorted(train | held_out):
        bucket, frames, batch_id = key
        row: dict[str, Any] = {"width": bucket[0], "height": bucket[1], "batch_id": batch_id}
        if frames:
            row["frames"] = frames
        rows.append({**row, "train": train[key], "held_out": held_out[key]})
    return rows


def _bucket_key(entry: ImageEntry) -> tuple[tuple[int, int], int, str]:
    return entry.bucket, len(entry.frames), entry.batch_id


def report(listing: FolderListing, regularization: Dataset | None = None, share: float = 0.0) -> str:
    """What was read, in a few lines."""
    lines = _count_lines(listing)
    lines.append("buckets: " + ", ".join(map(_bucket_text, bucket_counts(listing))))
    lines += [*_size_and_mask_lines(listing), *_caption_lines(listing), *listing.notes]
    if listing.problems:
        lines.append(f"{len(listing.problems)} left out:")
        lines.append(problem_lines(listing.problems, "  "))
    return "\n".join(lines + _regularization_lines(regularization, share))


@dataclass(frozen=True)
class ReadFolders:
    """What the folders of one dataset say together: (path below the input folder, source, listing) of each."""

    folders: Sequence[tuple[str, FolderSource, FolderListing]]

    def lines(self, regularization: Dataset | None, share: float) -> list[str]:
        """The report: of several folders each with its name in front."""
        if len(self.folders) == 1:
            return [report(self.folders[0][2], regularization, share)]
        lines: list[str] = []
        for name, source, listing in self.folders:
            lines.append(f"{name} ({_describe_source(source)}):")
            lines += [f"  {line}" for line in report(_listing_in_use(source, listing)).splitlines()]
        return lines + _regularization_lines(regularization, share)

    def brackets(self, weighted: bool) -> list[str]:
        """What brackets in captions do, where there are any."""
        lines: list[str] = []
        for _, _, listing in self.folders:
            lines += [line for line in brackets(listing, weighted) if line not in lines]
        return lines

    def editor_data(self, lines: str) -> dict[str, Any]:
        """`editor_data` of all folders, with the folder's path in front of each name where they are several."""
        if len(self.folders) == 1:
            name, _, listing = self.folders[0]
            return {**editor_data(listing, lines), "folder": name}
        data: dict[str, Any] = {"version": 1, "folder": ".", "resolution": 0, "count": 0, "train": 0, "held_out": 0}
        lists: dict[str, list[Any]] = {"buckets": [], "pictures": [], "problems": [], "notes": []}
        for folder, source, listing in self.folders:
            of_folder = editor_data(_listing_in_use(source, listing), lines)
            for name in ("count", "train", "held_out"):
                data[name] += of_folder[name]
            data["resolution"] = max(data["resolution"], of_folder["resolution"])
            for row in [*of_folder["pictures"], *of_folder["problems"]]:
                row["name"] = f"{folder}/{row['name']}"
            lists["notes"] += [f"{folder}: {note}" for note in of_folder["notes"]]
            for name in ("buckets", "pictures", "problems"):
                lists[name] += of_folder[name]
        lists["pictures"] = lists["pictures"][:MOST_IMAGES]
        return {**data, **lists, "buckets": _add_rows(lists["buckets"]), "report": lines}


def _describe_source(source: FolderSource) -> str:
    """What a folder of several is for, and its own settings."""
    words = [f"resolution {name_of(source.settings.own_resolution)}"]
    if source.settings.batch_size:
        words.append(f"batch size {source.settings.batch_size}")
    if source.is_regularization:
        words.append("regularization")
    if source.is_validation:
        words.append("validation")
    return ", ".join(words)


def _listing_in_use(source: FolderSource, listing: FolderListing) -> FolderListing:
    """The listing with all images held out where the folder is for validation."""
    if source.is_validation:
        return replace(listing, train=(), held_out=listing.entries)
    return listing


def _regularization_lines(regularization: Dataset | None, share: float) -> list[str]:
    if regularization is None:
        return []
    return [f"regularization dataset: {len(regularization.images)} pictures, {share:.0%} of each batch"]


def describe_together(parts: Sequence[Dataset], whole: Dataset) -> list[str]:
    """What there is to say of several datasets as one."""
    trained, held_out = len(whole.images), len(whole.held_out)
    lines = [f"together {trained} images to train on, {held_out} held out, of {len(parts)} datasets"]
    return lines + count_names(repeated_names(parts), "images are in several of them and count in each")


def note_unmeasured(parts: Sequence[Dataset], whole: Dataset) -> list[str]:
    """How many held-out images of the parts the whole trains on."""
    count = count_unmeasured(parts, whole)
    if not count:
        return []
    return [
        f"{count} held-out images are not measured, because they are trained on too, in another dataset or as"
        " regularization images"
    ]


def overlap(validation: Dataset, whole: Dataset) -> list[str]:
    """Which images of a validation folder are not measured, as they are trained on."""
    measured = {image.sha256 for image in whole.held_out}
    return count_names(
        [image.name for image in validation.images if image.sha256 not in measured],
        "images of the validation folder are trained on too, so they are not measured",
    )


def _count_lines(listing: FolderListing) -> list[str]:
    count, train, held_out = (
        len(unique_images(entries)) for entries in (listing.entries, listing.train, listing.held_out)
    )
    lines = [f"{_count_text(listing, count)}: {train} to train on, {held_out} held out for validation"]
    parts = [entry for entry in listing.entries if entry.frames]
    if parts:
        settings = listing.settings
        rate = "their own frame rate"
        if settings.frame_rate:
            rate = f"{settings.frame_rate:g} frames a second"
        lines.append(f"parts of clips: {len(parts)} ({settings.clip_part}), at {rate}")
    if listing.settings.filters.resolutions:
        sides = ", ".join(map(name_of, listing.settings.resolutions))
        lines.append(f"at resolutions {sides}: {len(listing.train)} to train on, {len(listing.held_out)} held out")
    if listing.settings.validation and not listing.held_out:
        lines.append(f"{_too_few(count)} cannot be held out too, so there is no validation")
    repeated = sum(entry.repeats for entry in listing.train)
    if repeated != len(listing.train):
        lines.append(f"{repeated:g} a round with repeats")
    return lines


def _count_text(listing: FolderListing, count: int) -> str:
    """How many pictures and clips there are."""
    clips = len(unique_images(entry for entry in listing.entries if entry.frames))
    words = []
    if count > clips or not clips:
        words.append(f"{count - clips} pictures")
    if clips:
        words.append(f"{clips} clips")
    return " and ".join(words)


def _too_few(count: int) -> str:
    if count == 1:
        return "one picture alone"
    return "copies of one picture"


def _bucket_text(row: dict[str, Any]) -> str:
    text = f"{row['width']}x{row['height']}"
    if "frames" in row:
        text += f"x{row['frames']}"
    if row["batch_id"]:
        text += f" {row['batch_id']}"
    return f"{text} ({row['train'] + row['held_out']})"


def _size_and_mask_lines(listing: FolderListing) -> list[str]:
    enlarged = list(dict.fromkeys(entry.name for entry in listing.entries if entry.framings[0].enlarged))
    lines = count_names(enlarged, "smaller than their bucket, enlarged")
    masks = [entry.mask for entry in unique_images(listing.entries) if entry.mask]
    if masks:
        lines.append(f"masks: {len(masks)}, {masks.count('alpha')} of them from transparency")
    return lines + _control_lines(listing) + _pair_lines(listing)


def _control_lines(listing: FolderListing) -> list[str]:
    """How many control pictures there are, and how many each image has."""
    counts = Counter(len(entry.controls) for entry in unique_images(listing.entries))
    if not any(counts):
        return []
    total = sum(count * number for count, number in counts.items())
    each = " or ".join(str(count) for count in sorted(counts))
    return [f"control pictures: {total}, {each} for each image"]


def _pair_lines(listing: FolderListing) -> list[str]:
    """How many preference pairs there are, and what trains on them."""
    entries = unique_images(listing.entries)
    pairs = [entry for entry in entries if entry.worse is not None]
    if not pairs:
        return []
    line = (
        f"preference pairs: {len(pairs)}, as {pairs[0].name} better than {pairs[0].worse_entry().name}. Loss function"
        " dpo of Objective Settings learns from both; the others train on the better picture alone"
    )
    if len(pairs) == len(entries):
        return [line]
    return [line, f"{len(entries) - len(pairs)} without a worse picture, which dpo cannot train on"]


def control_methods_used(methods: Sequence[ControlMethod]) -> list[str]:
    """How control pictures were encoded."""
    lines: dict[str, None] = {}
    for method in methods:
        lines[f"control pictures are encoded as {method.node} does: {method.name} ({method.models})"] = None
    return list(lines)


def _caption_lines(listing: FolderListing) -> list[str]:
    entries = unique_images(listing.entries)
    missing = [entry.name for entry in entries if not entry.captioned]
    different = {entry.caption.plain for entry in entries}
    line = f"captions: {len(entries) - len(missing)} found, {len(different)} different"
    varying = sum(entry.caption.varies for entry in unique_images(listing.train))
    if varying:
        line += f", {varying} vary by draw"
    return [line, *count_names(missing, "without a caption, the empty caption is used")]


def brackets(listing: FolderListing, weighted: bool) -> list[str]:
    """What brackets in captions do, where there are any."""
    names = [entry.name for entry in unique_images(listing.entries) if "(" in entry.caption.plain]
    if not names:
        return []
    if weighted:
        return [f"brackets weigh what is in them (weighted captions is on): {first_names(names)}"]
    return [f"brackets in captions are text (weighted captions is off): {first_names(names)}"]


def memory(dataset: Dataset) -> str:
    """How much of the dataset is in memory, at the latest once it was drawn, and how much is read each time."""
    total, stored = 0, 0
    for image in dataset.images + dataset.held_out:
        for number in range(1 + len(image.other_crops)):
            crop = image.crop(number)
            tensors = [crop.latent, crop.flipped_latent, crop.mask]
            if crop.worse is not None:
                tensors += [crop.worse.latent, crop.worse.flipped_latent]
            for tensor in tensors:
                if isinstance(tensor, StoredLatent) and not tensor.keeps:
                    stored += _BYTES_PER_NUMBER * math.prod(tensor.shape)
                elif isinstance(tensor, StoredLatent):
                    total += _BYTES_PER_NUMBER * math.prod(tensor.shape)
                elif tensor is not None:
                    total += tensor.numel() * tensor.element_size()
            total += _extras_bytes(crop.extras) + _extras_bytes(crop.flipped_extras)
    line = f"{total / 2**20:.1f} MB of latents and masks in memory"
    if stored:
        line += f"; {stored / 2**20:.1f} MB more are read from the cache when they are drawn"
    return line


def _extras_bytes(extras: Mapping[str, Any] | None) -> int:
    """The bytes of an image's own entries of the conditioning; those that are read from the cache need none."""
    if not isinstance(extras, dict):
        return 0
    total = 0
    for value in extras.values():
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, Tensor):
                total += tensor.numel() * tensor.element_size()
    return total


def editor_data(listing: FolderListing, lines: str) -> dict[str, Any]:
    """The listing as JSON for the editor: version, counts, buckets, images (the first 500), problems, notes and the
    report's text.
    """
    held_out = {id(entry) for entry in listing.held_out}
    entries = sorted(listing.entries, key=lambda entry: (entry.name, entry.bucket, len(entry.frames)))
    rows = _image_rows(entries, held_out)
    return {
        "version": 1,
        "folder": listing.folder.name,
        "resolution": listing.settings.resolution,
        "count": len(unique_images(listing.entries)),
        "train": len(unique_images(listing.train)),
        "held_out": len(unique_images(listing.held_out)),
        "buckets": bucket_counts(listing),
        "pictures": rows,
        "problems": [_problem_row(problem) for problem in listing.problems],
        "notes": list(map(printable, listing.notes)),
        "report": lines,
    }


def _image_rows(entries: Sequence[ImageEntry], held_out: set[int]) -> list[dict[str, Any]]:
    """The first images: one row for each image in a bucket, whatever parts a clip has there."""
    rows: dict[tuple[str, tuple[int, int]], dict[str, Any]] = {}
    for entry in entries:
        key = entry.name, entry.bucket
        if key not in rows and len(rows) == MOST_IMAGES:
            break
        row = rows.get(key) or _image_row(entry, id(entry) in held_out)
        rows[key] = row
        if entry.frames:
            row["parts"] = row.get("parts", 0) + 1
            row["frames"] = sorted({*row.get("frames", ()), len(entry.frames)})
    return list(rows.values())


def glance_data(glance: FolderGlance) -> dict[str, Any]:
    """A glance as JSON for the editor: as `editor_data`, with how many pictures there are and were looked at, what a
    run would refuse, and everything that the report would remark.
    """
    listing = glance.listing
    data = editor_data(listing, "")
    remarks = list(listing.notes)
    if listing.entries:
        remarks = [*_size_and_mask_lines(listing), *_caption_lines(listing), *remarks]
    return {
        **data,
        "train": data["count"] - glance.held_out,
        "held_out": glance.held_out,
        "a_round": sum(entry.repeats for entry in listing.entries),
        "found": glance.found,
        "seen": glance.seen,
        "refusal": glance.refusal,
        "notes": list(map(printable, remarks)),
        "encoding": listing.settings.filters.encoding,
    }


def _add_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of buckets, with those of the same size and batch_id as one."""
    added: dict[tuple[int, int, int, str], dict[str, Any]] = {}
    for row in rows:
        key = row["width"], row["height"], row.get("frames", 0), row["batch_id"]
        known = added.setdefault(key, {**row, "train": 0, "held_out": 0})
        known["train"] += row["train"]
        known["held_out"] += row["held_out"]
    return [row for _, row in sorted(added.items())]


def _image_row(entry: ImageEntry, held_out: bool) -> dict[str, Any]:
    return {
        "name": printable(entry.name),
        "width": entry.size[0],
        "height": entry.size[1],
        "bucket": list(entry.bucket),
        "caption": entry.caption.plain,
        "varies": entry.caption.varies,
        "captioned": entry.captioned,
        "repeats": entry.repeats,
        "held_out": held_out,
        "mask": bool(entry.mask),
        "batch_id": entry.batch_id,
        "enlarged": entry.framings[0].enlarged,
        "crops": len(entry.framings),
        "controls": len(entry.controls),
    }


def _problem_row(problem: str) -> dict[str, str]:
    """A problem "file: what is wrong" in its two parts."""
    return dict(zip(("name", "message"), printable(problem).split(": ", 1), strict=False))
