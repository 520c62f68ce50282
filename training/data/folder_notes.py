"""The report's notes about a dataset folder, besides its problems: left out images, duplicates, unused word lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import clip_files, clip_parts, images, wildcards
from .folder_settings import FolderSettings, read_frames
from .layouts import registry
from .layouts.layout import looks_like_repeats
from .listing import ImageEntry, count_names, first_names, unique_images
from .tags import TRIGGERS, has_choices

_MOST_DUPLICATES = 5  # lines of one kind


@dataclass
class Counts:
    """What is counted while the images of a folder are read."""

    left_out: Counter[str] = field(default_factory=Counter)  # by the reason
    too_small: list[str] = field(default_factory=list)
    fallbacks: int = 0  # captions that no file gave
    class_words: set[str] = field(default_factory=set)  # images that have the words of their folder as caption
    more_lines: list[str] = field(default_factory=list)  # images whose captions have more lines than are used
    settings_notes: list[str] = field(default_factory=list)  # of the layouts' settings files
    other_shapes: list[str] = field(default_factory=list)  # control pictures of another shape than their images
    alpha_masks: list[str] = field(default_factory=list)  # mask files whose transparency is the mask
    conditions: list[str] = field(default_factory=list)  # OneTrainer's conditioning pictures, which are left out
    too_short: list[str] = field(default_factory=list)  # clips, with their frames
    without_rate: list[str] = field(default_factory=list)  # clips whose frames have no times

    def add_notes(self, notes: Iterable[str]) -> None:
        """Keep notes of settings files, each once."""
        self.settings_notes += [note for note in notes if note not in self.settings_notes]


def write_notes(folder: Path, settings: FolderSettings, counts: Counts, entries: Sequence[ImageEntry]) -> list[str]:
    """Lines for the report."""
    entries = unique_images(entries)
    lines = [f"{count} left out {reason}" for reason, count in sorted(counts.left_out.items()) if count]
    lines += count_names(counts.too_small, "left out, smaller than their bucket (small: skip)")
    if counts.fallbacks:
        lines.append(f"{counts.fallbacks} {registry.find_layouts(settings.captions)[0].fallback_note}")
    lines += _captions(settings, counts, entries)
    cut = [entry.name for entry in entries if entry.framings[0].kept < 0.5]
    lines += count_names(cut, "lose more than half of the picture to the shape of their bucket")
    lines += count_names(
        list(dict.fromkeys(counts.other_shapes)),
        "control pictures have another shape than their images, so they are not cropped with them",
    )
    lines += count_names(
        list(dict.fromkeys(counts.alpha_masks)),
        "mask files have one color, as black, and their shape in transparency, which is read as the mask",
    )
    lines += count_names(
        counts.conditions,
        "conditioning pictures of OneTrainer (-condlabel) are left out",
        "; to train with them, choose in control pictures how the model takes them",
    )
    lines += _clips(folder, settings, counts, entries)
    lines += _note_unread_files(folder)
    lines += _folder_repeats(folder, entries)
    lines += _duplicates(entries)
    if not settings.filters.wildcards:
        lines += _unused_wildcards(folder, entries)
    lines += _other_layouts(folder, settings, [entry for entry in entries if entry.name not in counts.class_words])
    return lines + counts.settings_notes


def _captions(settings: FolderSettings, counts: Counts, entries: Sequence[ImageEntry]) -> list[str]:
    """What captions are made of, and what of them is not followed."""
    where = "class folder, as kohya's 10_name says name"
    if settings.subset is not None:
        where = "class_tokens"
    lines = count_names(
        [entry.name for entry in entries if entry.name in counts.class_words],
        f"captions are the words of their {where}, where no file has one",
    )
    lines += count_names(
        counts.more_lines,
        "captions have more than one line, and only the first is used, as in kohya's scripts (wildcards: true in"
        " filters draws one of them)",
    )
    separators = [entry.name for entry in entries if entry.caption.shows_separator]
    if separators:
        lines.append(
            f"keep_separator is part of {len(separators)} captions, as in kohya's scripts where no tags are shuffled or"
            f" dropped: {first_names(separators)}"
        )
    if not settings.filters.trigger:
        lines += count_names(
            [entry.name for entry in entries if TRIGGERS[0] in entry.caption.plain],
            "captions have [trigger] as it is, as filters have no trigger",
        )
    return lines


def _clips(folder: Path, settings: FolderSettings, counts: Counts, entries: Sequence[ImageEntry]) -> list[str]:
    """What is trained of the clips, and which are left out."""
    if not settings.takes_clips:
        return count_names(
            [path.relative_to(folder).as_posix() for path in images.find_files(folder, clip_files.is_video)],
            "clips are left out, as frames of clips is 0",
            "; set it, to 17 for example, to train a video model on them",
        )
    lines = _note_rounded_frames(settings)
    lines += count_names(counts.too_short, f"clips left out, shorter than {settings.frame_counts[0]} frames")
    if counts.without_rate:
        lines.append(
            f"frame rate does nothing to {len(counts.without_rate)} clips whose frames have no times of their own:"
            f" {first_names(counts.without_rate)}"
        )
    if not counts.too_short and not any(entry.frames for entry in entries):
        lines.append("frames of clips does nothing here: the folder has no clips")
    return lines


def _note_rounded_frames(settings: FolderSettings) -> list[str]:
    """Which numbers of frames are not those that were asked for."""
    step = max(1, settings.frame_step)
    lines: list[str] = []
    for count in dict.fromkeys(read_frames(settings.frames)):
        taken = clip_parts.round_frames(count, step)
        if taken != count:
            lines.append(f"frames of clips {count} is taken as {taken}: this VAE takes multiples of {step} and 1 more")
    return lines


def _note_unread_files(folder: Path) -> list[str]:
    """What lies in the folder and is not read: folders that are closed or linked, and pictures of other formats."""
    links, unread = images.find_ignored(folder, images.OTHER_SUFFIXES + clip_files.OTHER_SUFFIXES)
    others = [name for name in unread if name.lower().endswith(images.OTHER_SUFFIXES)]
    videos = [name for name in unread if name.lower().endswith(clip_files.OTHER_SUFFIXES)]
    return [
        *count_names(images.closed_folders(folder), "folders cannot be opened, so nothing in them is read"),
        *count_names(images.others_pictures(folder), "thumbnails and pictures in the system's folders are left out"),
        *count_names(
            images.numbered_masks(folder),
            "numbered masks are not read",
            "; a picture has one mask, so draw them together as name-masklabel.png",
        ),
        *count_names(links, "linked folders are not read", "; copy them, or link the whole dataset"),
        *count_names(others, "pictures of formats that are not read", "; save them as PNG"),
        *count_names(videos, "clips of formats that are not read", "; save them as MP4"),
    ]


def _folder_repeats(folder: Path, entries: Sequence[ImageEntry]) -> list[str]:
    """Which folder names repeat their images, and which begin with a number that does not say how often."""
    repeats: dict[str, int] = {}
    numbers: dict[str, None] = {}
    for entry in entries:
        name = entry.directory or folder.name
        if entry.folder_repeats > 1:
            repeats[name] = entry.folder_repeats
        elif looks_like_repeats(name):
            numbers[name] = None
    lines: list[str] = []
    if repeats:
        named = [f"{name} {count:,}" for name, count in sorted(repeats.items())]
        lines.append(f"repeats by folder name: {first_names(named)}")
    if numbers:
        lines.append(f"no repeats in {first_names(sorted(numbers))}: what follows the number is not a name")
    return lines


def _duplicates(entries: Sequence[ImageEntry]) -> list[str]:
    by_content, by_name = [], []
    for names in _grouped_names(entries, lambda entry: entry.sha256):
        by_content.append(f"the same picture {len(names)} times: {first_names(names)}")
    for names in _grouped_names(entries, lambda entry: entry.name.rpartition(".")[0]):
        by_name.append(f"one name for {len(names)} pictures, so one caption file too: {first_names(names)}")
    return _first_lines(by_content) + _first_lines(by_name)


def _grouped_names(entries: Sequence[ImageEntry], key: Callable[[ImageEntry], str]) -> list[list[str]]:
    """Names of the entries that share a key with another one."""
    groups: dict[str, list[str]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry.name)
    return [names for names in groups.values() if len(names) > 1]


def _first_lines(lines: list[str]) -> list[str]:
    if len(lines) <= _MOST_DUPLICATES:
        return lines
    return [*lines[:_MOST_DUPLICATES], f"and {len(lines) - _MOST_DUPLICATES} more like this"]


def _unused_wildcards(folder: Path, entries: Sequence[ImageEntry]) -> list[str]:
    lines = count_names(
        [entry.name for entry in entries if any(map(has_choices, entry.caption.texts))],
        "captions have {a|b} as it is; wildcards: true in filters makes choices of it",
    )
    if (folder / wildcards.FOLDER).is_dir():
        lines.append(
            f"{wildcards.FOLDER} is not used; with wildcards: true in filters __name__ is a line of its name.txt"
        )
    return lines


def _other_layouts(folder: Path, settings: FolderSettings, entries: Sequence[ImageEntry]) -> list[str]:
    """If the chosen layout finds no captions: the other layout that the folder looks like."""
    if settings.captions == registry.AUTO or any(entry.captioned for entry in entries):
        return []
    lines: list[str] = []
    for layout in registry.LAYOUTS:
        if layout.name != settings.captions and layout.recognize(folder):
            lines.append(
                f"no caption was found with caption source {settings.captions}, but the folder has {layout.title}: set"
                f" caption source to {layout.name} or {registry.AUTO}"
            )
    return lines
