"""Which images are held out for validation: a share of them, chosen by their contents and not by names or order."""

from __future__ import annotations

from collections.abc import Iterable

from ...storage.digest import sha256
from .listing import ImageEntry


def contents(entries: Iterable[ImageEntry]) -> list[tuple[str, str]]:
    """(name, content hash) of images. Preference pairs that share a picture have one hash, so that they stay together:
    a held-out pair is of pictures that the model has not seen.
    """
    listed = list(entries)
    joined: dict[str, str] = {}

    def group_of(picture: str) -> str:
        while joined.get(picture, picture) != picture:
            picture = joined[picture]
        return picture

    for entry in listed:
        if entry.worse is not None:
            joined[group_of(entry.worse.sha256)] = group_of(entry.sha256)
    first: dict[str, str] = {}
    for entry in listed:
        group = group_of(entry.sha256)
        first[group] = min(first.get(group, entry.sha256), entry.sha256)
    return [(entry.name, first[group_of(entry.sha256)]) for entry in listed]


def choose_held_out(contents: Iterable[tuple[str, str]], share: float) -> set[str]:
    """The names of the held-out ones among (name, content hash). Equal contents stay together."""
    if not share:
        return set()

    def order(content: tuple[str, str]) -> tuple[str, str]:
        name, content_hash = content
        return sha256(content_hash.encode("utf-8", "surrogatepass")).hexdigest(), name

    groups: dict[str, list[str]] = {}
    for name, content_hash in sorted(contents, key=order):
        groups.setdefault(content_hash, []).append(name)
    total = sum(map(len, groups.values()))
    count = min(total - 1, max(1, round(total * share)))
    chosen: set[str] = set()
    for names in groups.values():
        if len(chosen) + len(names) <= count:
            chosen.update(names)
    if not chosen and len(groups) > 1:
        smallest = min(groups.values(), key=len)
        chosen.update(smallest)
    return chosen
