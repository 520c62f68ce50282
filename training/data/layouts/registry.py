"""The dataset layouts that Graft reads: one module each, listed here.

To add one, write a module with a `LAYOUT` and add it to `_MODULES`. Before the first of them are asked with `auto`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from . import captions_folder, everydream2_yaml, kohya_txt, lunnova_json
from .layout import DatasetLayout

AUTO = "auto"  # the option that asks every layout for each image and takes the first caption
_MODULES = (kohya_txt, captions_folder, lunnova_json, everydream2_yaml)  # the order in which auto asks
_LAYOUTS: dict[str, DatasetLayout] = {}


def register(layout: DatasetLayout) -> None:
    """Add a layout; raises ValueError when the name is taken."""
    if layout.name == AUTO or layout.name in _LAYOUTS:
        raise ValueError(f"there is a dataset layout named {layout.name!r} already; give the new one another name")
    _LAYOUTS[layout.name] = layout


def unregister(name: str) -> None:
    """Remove a layout; raises KeyError when there is no layout with that name."""
    del _LAYOUTS[name]


@contextmanager
def registered(layout: DatasetLayout) -> Iterator[None]:
    """Adds a layout inside the block, for tests."""
    register(layout)
    try:
        yield
    finally:
        unregister(layout.name)


def layouts() -> tuple[DatasetLayout, ...]:
    """All layouts, in the order in which auto asks them."""
    return tuple(_LAYOUTS.values())


def options() -> list[str]:
    """The options of GraftDataset's input `captions`."""
    return [AUTO, *_LAYOUTS]


def selected(option: str) -> tuple[DatasetLayout, ...]:
    """The layouts that an option reads: one, or all of them with auto. Raises ValueError for an unknown option."""
    if option == AUTO:
        return layouts()
    if option not in _LAYOUTS:
        raise ValueError(f"captions is {option!r}, expected one of {', '.join(options())}")
    return (_LAYOUTS[option],)


def names_where_scores_are_read() -> list[str]:
    """The options with which images have scores."""
    return [AUTO, *(layout.name for layout in layouts() if layout.has_scores)]


def suffixes() -> tuple[str, ...]:
    """Suffixes of every file that a layout reads, in lower case."""
    unique = {suffix: None for layout in layouts() for suffix in layout.suffixes}
    return tuple(unique)


def tooltip() -> str:
    """What each option of `captions` reads, for the tooltip."""
    hints = [f"{layout.name}: {layout.hint}." for layout in layouts()]
    return " ".join(["Where captions come from.", *hints, f"{AUTO}: whichever is there."])


for _module in _MODULES:
    register(_module.LAYOUT)
