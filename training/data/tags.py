"""How a caption varies from draw to draw: wildcards, shuffled and dropped tags.

Wildcards, the order of the draws and tag dropout are kohya's (sd-scripts, `process_caption`), weights and lengths
EveryDream2's (SHUFFLING_TAGS.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from . import wildcards as word_lists
from .wildcards import NO_LISTS, WordLists

_CHOICE = re.compile(r"\{([^{}]*)\}")
_DEEPEST, _LONGEST = 200, 100_000
TRIGGER = "[trigger]"
_OPEN, _CLOSE = "\0", "\1"  # stand for {{ and }} while the choices are made


Part = tuple[str, float]  # a tag and its weight


@dataclass(frozen=True)
class Rules:
    """What happens to the tags of a caption; plain values.

    `keep` tags at the front neither move nor drop out; `shuffle` and `dropout` are probabilities, of a draw and of a
    tag; `left_out` tags are never said; `replacements` work inside each tag, in order; `max_length` counts characters,
    0 is no limit; `lists` are what `__name__` stands for with `wildcards`. What stands before `keep_separator` in a
    text, and after a second one, neither moves nor drops out; it is not said itself. `trigger` takes the place of
    `[trigger]`, or stands in front; `prefix` and `suffix` stand around it all.
    """

    separator: str = ", "
    keep: int = 0
    shuffle: float = 0.0
    dropout: float = 0.0
    wildcards: bool = False
    lists: WordLists = NO_LISTS
    left_out: tuple[str, ...] = ()
    replacements: tuple[tuple[str, str], ...] = ()
    max_length: int = 0
    keep_separator: str = ""
    trigger: str = ""
    prefix: str = ""
    suffix: str = ""

    @property
    def by_tag(self) -> bool:
        """Whether a text has to be cut into its tags."""
        own = self.separator != ", " or self.keep_separator
        return bool(self.shuffle or self.dropout or self.left_out or self.replacements or self.max_length or own)


@dataclass(frozen=True)
class Caption:
    """A caption as it was written: lines of text, or a list of tags (with weights, one a tag, or none at all)."""

    lines: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    rules: Rules = field(default_factory=Rules)

    @property
    def plain(self) -> str:
        """The caption without a draw: the first line and the first choices, in the order written."""
        return self.draw(None)

    @property
    def varies(self) -> bool:
        """Whether two draws can differ."""
        rules, texts = self.rules, self.lines + self.tags
        wild = any(
            _CHOICE.search(text) or (rules.lists and word_lists.named(text))
            for text in (*texts, rules.prefix, rules.suffix)
        )
        if rules.wildcards and (len(self.lines) > 1 or wild):
            return True
        free = len(self._parts(None)[1])
        return (rules.shuffle > 0 and free > 1) or (rules.dropout > 0 and free > 0)

    def draw(self, draws: torch.Generator | None) -> str:
        """One draw of the caption from a CPU generator; None gives the plain one."""
        rules, (before, free, after) = self.rules, self._parts(draws)
        if draws is not None and rules.shuffle and float(torch.rand((), generator=draws)) < rules.shuffle:
            free = [free[i] for i in _order([weight for _, weight in free], draws)]
        if draws is not None and rules.dropout:
            free = [
                part
                for part, u in zip(free, torch.rand(len(free), generator=draws).tolist(), strict=True)
                if u >= rules.dropout
            ]
        text = _joined([text for text, _ in before + free + after], rules)
        around = (self._chosen(one, draws) for one in (rules.prefix, rules.suffix))
        return _framed(text, rules.trigger, *around)

    def _parts(self, draws: torch.Generator | None) -> tuple[list[Part], list[Part], list[Part]]:
        """What is to be said, in the order written, wildcards chosen: what stays in front, what is free, what stays at
        the end.
        """
        rules = self.rules
        if self.tags:
            weights = self.weights or (1.0,) * len(self.tags)
            every = self._edited(
                (self._chosen(tag, draws), weight) for tag, weight in zip(self.tags, weights, strict=True)
            )
            return every[: rules.keep], every[rules.keep :], []
        text = self._chosen(self._line(draws), draws)
        if rules.keep_separator and rules.keep_separator in text:
            parts = [
                self._edited((part, 1.0) for part in split(piece)) for piece in text.split(rules.keep_separator, 2)
            ]
            return parts[0], parts[1], parts[2] if len(parts) > 2 else []
        every = self._edited((part, 1.0) for part in (split(text) if rules.by_tag else [text]))
        return every[: rules.keep], every[rules.keep :], []

    def _edited(self, parts: Iterable[Part]) -> list[Part]:
        """Tags without those that are left out, with what is replaced in them."""
        left_out = set(self.rules.left_out)
        edited = ((_replaced(tag, self.rules.replacements), weight) for tag, weight in parts if tag not in left_out)
        return [(tag, weight) for tag, weight in edited if tag]

    def _line(self, draws: torch.Generator | None) -> str:
        if not self.rules.wildcards or len(self.lines) < 2:
            return " ".join(self.lines)
        return self.lines[0 if draws is None else int(torch.randint(len(self.lines), (), generator=draws))]

    def _chosen(self, text: str, draws: torch.Generator | None) -> str:
        if self.rules.wildcards:
            return chosen(text, draws, self.rules.lists)
        return text


def split(text: str) -> list[str]:
    """The tags of a text: what stands between commas."""
    return [part for part in (part.strip() for part in text.split(",")) if part]


def chosen(text: str, draws: torch.Generator | None, lists: WordLists | None = None) -> str:
    """The text with one of each {a|b|c} and one line for each __name__ of `lists`, the first ones without a generator.

    `{{` and `}}` are braces; choices may lie inside choices, and in lines of lists, which lead to an end
    (`WordLists.check`). Raises ValueError where they lie in each other more than 200 deep.
    """

    def of(options: Sequence[str]) -> str:
        return options[0 if draws is None else int(torch.randint(len(options), (), generator=draws))]

    text, count, rounds = text.replace("{{", _OPEN).replace("}}", _CLOSE), 1, 0
    while count:
        rounds += 1
        if rounds > _DEEPEST:
            raise ValueError(f"the caption's choices lie in each other more than {_DEEPEST} deep: {text[:60]!r}")
        text, count = _CHOICE.subn(lambda found: of(found[1].split("|")), text)
        if lists and not count:
            text, count = word_lists.filled(text, lambda name: of(lists[name]))
    return " ".join(text.replace(_OPEN, "{").replace(_CLOSE, "}").split())


def looks_wild(text: str) -> bool:
    """Whether a text has a choice that a reader may have meant as a wildcard."""
    return any("|" in found for found in _CHOICE.findall(text))


def _order(weights: list[float], draws: torch.Generator) -> list[int]:
    """A drawn order, tag by tag with a chance in proportion to its weight (an exponential race gives just that)."""
    if len(set(weights)) < 2:
        return torch.randperm(len(weights), generator=draws).tolist()
    u = torch.rand(len(weights), generator=draws, dtype=torch.float64)
    arrivals = -torch.log1p(-u) / torch.tensor(weights, dtype=torch.float64).clamp(min=1e-12)
    return arrivals.argsort(stable=True).tolist()


def _replaced(tag: str, replacements: tuple[tuple[str, str], ...]) -> str:
    for old, new in replacements:
        tag = tag.replace(old, new)
        if len(tag) > _LONGEST:
            raise ValueError(f"replacements make a tag of more than {_LONGEST} characters: {tag[:60]!r}")
    return tag


def _joined(parts: list[str], rules: Rules) -> str:
    """The tags as one text; with a length, whole tags up to the first that would exceed it."""
    if not rules.max_length:
        return rules.separator.join(parts)
    text = ""
    for part in parts:
        if text:
            longer = f"{text}{rules.separator}{part}"
        else:
            longer = part
        if len(longer) > rules.max_length:
            break
        text = longer
    return text


def _framed(text: str, trigger: str, prefix: str, suffix: str) -> str:
    if trigger:
        if TRIGGER in text:
            text = text.replace(TRIGGER, trigger)
        else:
            text = f"{trigger} {text}"
    return " ".join(part for part in (prefix, text, suffix) if part).strip()
