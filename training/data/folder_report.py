"""What GraftDataset says of a folder: in words, and as plain data for the editor."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .dataset import Dataset
from .layouts.folder import Listing, once, some

SHOWN = 500  # pictures that the editor's data lists


def bucket_counts(listing: Listing) -> list[dict[str, Any]]:
    """The buckets in use, with how many pictures are trained and held out in each; one row a batch_id too."""
    train, held = (Counter((e.bucket, e.group) for e in part) for part in (listing.train, listing.held_out))
    rows = []
    for (width, height), group in sorted(train | held):
        counts = {"train": train[(width, height), group], "held_out": held[(width, height), group]}
        rows.append({"width": width, "height": height, "batch_id": group, **counts})
    return rows


def report(listing: Listing, regularisation: Dataset | None = None, share: float = 0.0) -> str:
    """What was read, in a few lines."""
    every, train = once(listing.entries), once(listing.train)
    lines = [f"{len(every)} pictures: {len(train)} to train on, {len(once(listing.held_out))} held out for validation"]
    if listing.settings.filters.resolutions:
        sides = ", ".join(map(str, listing.settings.resolutions))
        lines.append(f"at resolutions {sides}: {len(listing.train)} to train on, {len(listing.held_out)} held out")
    if listing.settings.validation and not listing.held_out:
        lines.append("one picture alone cannot be held out too, so there is no validation")
    repeated = sum(entry.repeats for entry in listing.train)
    if repeated != len(listing.train):
        lines.append(f"{repeated:g} a round with repeats")
    rows = bucket_counts(listing)
    shown = [
        f"{r['width']}x{r['height']}{' ' + r['batch_id'] if r['batch_id'] else ''} ({r['train'] + r['held_out']})"
        for r in rows
    ]
    lines.append("buckets: " + ", ".join(shown))
    small = list(dict.fromkeys(entry.name for entry in listing.entries if entry.framings[0].enlarged))
    if small:
        lines.append(f"{len(small)} smaller than their bucket, enlarged: {some(small)}")
    masks = [entry.name for entry in every if entry.mask]
    if masks:
        lines.append(f"masks: {len(masks)}, {sum(entry.mask == 'alpha' for entry in every)} of them from transparency")
    missing = [entry.name for entry in every if not entry.captioned]
    plain = {e.caption.plain for e in every}
    varying = sum(e.caption.varies for e in train)
    lines.append(
        f"captions: {len(every) - len(missing)} found, {len(plain)} different"
        + (f", {varying} vary by draw" if varying else "")
    )
    if missing:
        lines.append(f"{len(missing)} without a caption, the empty caption is used: {some(missing)}")
    lines += listing.notes
    if listing.problems:
        lines.append(f"{len(listing.problems)} left out:")
        lines += [f"  {problem}" for problem in listing.problems]
    if regularisation is not None:
        lines.append(f"regularisation: {len(regularisation.images)} pictures, {share:.0%} of each batch")
    return "\n".join(lines)


def memory(dataset: Dataset) -> str:
    """How much of it is held in memory."""
    views = [
        image.crop(number)
        for image in dataset.images + dataset.held_out
        for number in range(1 + len(image.other_crops))
    ]
    held = [one for view in views for one in (view.latent, view.flipped_latent, view.mask) if one is not None]
    return f"{sum(one.numel() * one.element_size() for one in held) / 2**20:.1f} MB of latents and masks in memory"


def editor_data(listing: Listing, lines: str) -> dict[str, Any]:
    """The listing as JSON for the editor: version, counts, buckets, pictures (the first 500), problems, notes and the
    report's text.
    """
    held = {id(entry) for entry in listing.held_out}
    rows = [
        {
            "name": e.name,
            "width": e.size[0],
            "height": e.size[1],
            "bucket": list(e.bucket),
            "caption": e.caption.plain,
            "varies": e.caption.varies,
            "captioned": e.captioned,
            "repeats": e.repeats,
            "held_out": id(e) in held,
            "mask": bool(e.mask),
            "batch_id": e.group,
            "enlarged": e.framings[0].enlarged,
            "crops": len(e.framings),
        }
        for e in sorted(listing.entries, key=lambda e: (e.name, e.bucket))[:SHOWN]
    ]
    return {
        "version": 1,
        "folder": listing.folder.name,
        "resolution": listing.settings.resolution,
        "count": len(once(listing.entries)),
        "train": len(once(listing.train)),
        "held_out": len(once(listing.held_out)),
        "buckets": bucket_counts(listing),
        "pictures": rows,
        "problems": [
            dict(zip(("name", "message"), problem.split(": ", 1), strict=False)) for problem in listing.problems
        ],
        "notes": list(listing.notes),
        "report": lines,
    }
