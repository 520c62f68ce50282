"""What GraftDataset reports about a folder: in words, and as plain data for the editor's panel."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ...storage.problem_list import problem_lines
from .dataset import Dataset
from .folder_reader import FolderGlance
from .listing import FolderListing, ImageEntry, first_names, unique_images

MOST_IMAGES = 500  # that the editor's data lists


def bucket_counts(listing: FolderListing) -> list[dict[str, Any]]:
    """The buckets in use, with how many images are trained and held out in each; one row per batch_id too."""
    train = Counter((entry.bucket, entry.batch_id) for entry in listing.train)
    held_out = Counter((entry.bucket, entry.batch_id) for entry in listing.held_out)
    rows: list[dict[str, Any]] = []
    for bucket, batch_id in sorted(train | held_out):
        row = {"width": bucket[0], "height": bucket[1], "batch_id": batch_id}
        rows.append({**row, "train": train[bucket, batch_id], "held_out": held_out[bucket, batch_id]})
    return rows


def report(listing: FolderListing, regularisation: Dataset | None = None, share: float = 0.0) -> str:
    """What was read, in a few lines."""
    lines = _count_lines(listing)
    lines.append("buckets: " + ", ".join(map(_bucket_text, bucket_counts(listing))))
    lines += [*_size_and_mask_lines(listing), *_caption_lines(listing), *listing.notes]
    if listing.problems:
        lines.append(f"{len(listing.problems)} left out:")
        lines.append(problem_lines(listing.problems, "  "))
    if regularisation is not None:
        lines.append(f"regularization dataset: {len(regularisation.images)} pictures, {share:.0%} of each batch")
    return "\n".join(lines)


def _count_lines(listing: FolderListing) -> list[str]:
    count, train, held_out = (
        len(unique_images(entries)) for entries in (listing.entries, listing.train, listing.held_out)
    )
    lines = [f"{count} pictures: {train} to train on, {held_out} held out for validation"]
    if listing.settings.filters.resolutions:
        sides = ", ".join(map(str, listing.settings.resolutions))
        lines.append(f"at resolutions {sides}: {len(listing.train)} to train on, {len(listing.held_out)} held out")
    if listing.settings.validation and not listing.held_out:
        lines.append(f"{_too_few(count)} cannot be held out too, so there is no validation")
    repeated = sum(entry.repeats for entry in listing.train)
    if repeated != len(listing.train):
        lines.append(f"{repeated:g} a round with repeats")
    return lines


def _too_few(count: int) -> str:
    if count == 1:
        return "one picture alone"
    return "copies of one picture"


def _bucket_text(row: dict[str, Any]) -> str:
    text = f"{row['width']}x{row['height']}"
    if row["batch_id"]:
        text += f" {row['batch_id']}"
    return f"{text} ({row['train'] + row['held_out']})"


def _size_and_mask_lines(listing: FolderListing) -> list[str]:
    lines: list[str] = []
    enlarged = list(dict.fromkeys(entry.name for entry in listing.entries if entry.framings[0].enlarged))
    if enlarged:
        lines.append(f"{len(enlarged)} smaller than their bucket, enlarged: {first_names(enlarged)}")
    masks = [entry.mask for entry in unique_images(listing.entries) if entry.mask]
    if masks:
        lines.append(f"masks: {len(masks)}, {masks.count('alpha')} of them from transparency")
    return lines


def _caption_lines(listing: FolderListing) -> list[str]:
    entries = unique_images(listing.entries)
    missing = [entry.name for entry in entries if not entry.captioned]
    different = {entry.caption.plain for entry in entries}
    line = f"captions: {len(entries) - len(missing)} found, {len(different)} different"
    varying = sum(entry.caption.varies for entry in unique_images(listing.train))
    if varying:
        line += f", {varying} vary by draw"
    if not missing:
        return [line]
    return [line, f"{len(missing)} without a caption, the empty caption is used: {first_names(missing)}"]


def brackets(listing: FolderListing, weighted: bool) -> list[str]:
    """What brackets in captions do, where there are any."""
    names = [entry.name for entry in unique_images(listing.entries) if "(" in entry.caption.plain]
    if not names:
        return []
    if weighted:
        return [f"brackets weigh what is in them (weighted captions is on): {first_names(names)}"]
    return [f"brackets in captions are text (weighted captions is off): {first_names(names)}"]


def memory(dataset: Dataset) -> str:
    """How much of the dataset is in memory."""
    total = 0
    for image in dataset.images + dataset.held_out:
        for number in range(1 + len(image.other_crops)):
            crop = image.crop(number)
            for tensor in (crop.latent, crop.flipped_latent, crop.mask):
                if tensor is not None:
                    total += tensor.numel() * tensor.element_size()
    return f"{total / 2**20:.1f} MB of latents and masks in memory"


def editor_data(listing: FolderListing, lines: str) -> dict[str, Any]:
    """The listing as JSON for the editor: version, counts, buckets, images (the first 500), problems, notes and the
    report's text.
    """
    held_out = {id(entry) for entry in listing.held_out}
    entries = sorted(listing.entries, key=lambda entry: (entry.name, entry.bucket))[:MOST_IMAGES]
    return {
        "version": 1,
        "folder": listing.folder.name,
        "resolution": listing.settings.resolution,
        "count": len(unique_images(listing.entries)),
        "train": len(unique_images(listing.train)),
        "held_out": len(unique_images(listing.held_out)),
        "buckets": bucket_counts(listing),
        "pictures": [_image_row(entry, id(entry) in held_out) for entry in entries],
        "problems": [_problem_row(problem) for problem in listing.problems],
        "notes": list(listing.notes),
        "report": lines,
    }


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
        "notes": remarks,
        "encoding": listing.settings.filters.encoding,
    }


def _image_row(entry: ImageEntry, held_out: bool) -> dict[str, Any]:
    return {
        "name": entry.name,
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
    }


def _problem_row(problem: str) -> dict[str, str]:
    """A problem "file: what is wrong" in its two parts."""
    return dict(zip(("name", "message"), problem.split(": ", 1), strict=False))
