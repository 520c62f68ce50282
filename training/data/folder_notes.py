"""The report's notes about a dataset folder, besides its problems: left out images, duplicates, unused word lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import wildcards
from .folder_settings import FolderSettings
from .layouts import registry
from .listing import ImageEntry, first_names, unique_images
from .tags import has_choices

_MOST_DUPLICATES = 5  # lines of one kind


@dataclass
class Counts:
    """What is counted while the images of a folder are read."""

    left_out: Counter[str] = field(default_factory=Counter)  # by the reason
    too_small: list[str] = field(default_factory=list)
    fallbacks: int = 0  # captions that no file gave
    settings_notes: list[str] = field(default_factory=list)  # of the layouts' settings files

    def add_notes(self, notes: Iterable[str]) -> None:
        """Keep notes of settings files, each once."""
        self.settings_notes += [note for note in notes if note not in self.settings_notes]


def notes(folder: Path, settings: FolderSettings, counts: Counts, entries: Sequence[ImageEntry]) -> list[str]:
    """Lines for the report."""
    entries = unique_images(entries)
    lines = [f"{count} left out {reason}" for reason, count in sorted(counts.left_out.items()) if count]
    if counts.too_small:
        names = first_names(counts.too_small)
        lines.append(f"{len(counts.too_small)} left out, smaller than their bucket (small: skip): {names}")
    if counts.fallbacks:
        lines.append(f"{counts.fallbacks} {registry.selected(settings.captions)[0].fallback_note}")
    lines += _duplicates(entries)
    if not settings.filters.wildcards:
        lines += _unused_wildcards(folder, entries)
    lines += _other_layouts(folder, settings, entries)
    return lines + counts.settings_notes


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
    lines: list[str] = []
    names = [entry.name for entry in entries if any(map(has_choices, entry.caption.texts))]
    if names:
        lines.append(
            f"{len(names)} captions have {{a|b}} as it is; wildcards: true in filters makes choices of it:"
            f" {first_names(names)}"
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
        if layout.name != settings.captions and layout.recognise(folder):
            lines.append(
                f"no caption was found with captions {settings.captions}, but the folder has {layout.title}: set"
                f" captions to {layout.name} or {registry.AUTO}"
            )
    return lines
