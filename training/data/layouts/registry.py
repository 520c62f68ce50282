"""The dataset layouts that Graft reads: one module each, listed here.

To add one, write a module with a `LAYOUT` and add it to the list. Layouts in front are asked first with `auto`.
"""

from __future__ import annotations

from ....patches.registry import Registry
from . import captions_folder, everydream2_yaml, kohya_metadata_json, kohya_txt, lunnova_json
from .layout import DatasetLayout

AUTO = "auto"  # the option that asks every layout for each image and takes the first caption


def _named_auto(layout: DatasetLayout) -> list[str]:
    if layout.name == AUTO:
        return [f"option {AUTO}"]
    return []


LAYOUTS: Registry[DatasetLayout] = Registry(
    "caption source",
    (
        kohya_txt.LAYOUT,
        captions_folder.LAYOUT,
        lunnova_json.LAYOUT,
        everydream2_yaml.LAYOUT,
        kohya_metadata_json.LAYOUT,
    ),
    duplicates=_named_auto,
)


def options() -> list[str]:
    """The options of GraftDataset's input `captions`."""
    return [AUTO, *LAYOUTS.names()]


def find_layouts(option: str) -> tuple[DatasetLayout, ...]:
    """The layouts that an option reads: one, or all of them with auto. Raises ValueError for an unknown option."""
    if option == AUTO:
        return tuple(LAYOUTS)
    if option not in LAYOUTS:
        raise ValueError(f"caption source is {option!r}, expected one of {', '.join(options())}")
    return (LAYOUTS.get(option),)


def names_where_scores_are_read() -> list[str]:
    """The options with which images have scores."""
    return [AUTO, *(layout.name for layout in LAYOUTS if layout.has_scores)]


def suffixes() -> tuple[str, ...]:
    """Suffixes of every file that a layout reads, in lower case."""
    unique = {suffix: None for layout in LAYOUTS for suffix in layout.suffixes}
    return tuple(unique)


def tooltip() -> str:
    """What each option of `captions` reads, for the tooltip."""
    hints = [f"{layout.name}: {layout.hint}." for layout in LAYOUTS]
    return " ".join(["Where captions come from.", *hints, f"{AUTO}: whichever is there."])
