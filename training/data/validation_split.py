"""Which images are held out for validation: a share of them, chosen by their contents and not by names or order."""

from __future__ import annotations

from collections.abc import Iterable

from ...storage.digest import sha256


def held_out(contents: Iterable[tuple[str, str]], share: float) -> set[str]:
    """The names of the held-out ones among (name, content hash). Equal contents stay together."""
    if not share:
        return set()

    def order(content: tuple[str, str]) -> tuple[str, str]:
        name, content_hash = content
        return sha256(content_hash.encode()).hexdigest(), name

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
