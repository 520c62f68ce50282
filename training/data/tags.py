"""Caption variants: wildcards, shuffled tags, tag dropout, replaced and removed tags, trigger word.

Wildcards, the order of the draws and tag dropout are kohya's (sd-scripts, `process_caption`), weights and lengths
EveryDream2's (SHUFFLING_TAGS.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from .wildcards import NO_LISTS, WordLists, fill_lists, list_names

_CHOICE = re.compile(r"\{([^{}]*)\}")
_BRACES = re.compile(r"\{\{|\}\}|[{}]")
_MAX_DEPTH, _MAX_TAG_LENGTH = 200, 100_000
TRIGGERS = ("[trigger]", "[name]")  # AI-Toolkit's, both
_WITHOUT_SPACES = 0x2E80  # from here on there are the scripts of East Asia
_OPEN, _CLOSE = "\0", "\1"  # stand for {{ and }} while the choices are made


Tag = tuple[str, float]  # a tag and its weight


@dataclass(frozen=True)
class CaptionRules:
    """How a caption varies; plain values.

    The first `keep` tags never move or drop out. `shuffle` is the chance that the tags are shuffled, `dropout` the
    chance that a tag is dropped. `left_out` tags are removed; `replacements` work inside each tag, in order.
    `max_length` counts characters, 0 means no limit. `lists` are the word lists that `__name__` stands for with
    `wildcards`. Tags before `keep_separator` in a text, and after a second one, never move or drop out; where none
    do anyway, it is part of the text, as kohya's. `trigger` takes the place of `[trigger]`, or stands in front of a
    text without the word (AI-Toolkit's `trigger_word`); `prefix` and `suffix` stand around it all.
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

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Its fields as plain values, for digests; without the word lists, which are long and the same for all."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "lists"}

    @property
    def moves_tags(self) -> bool:
        """Whether tags are shuffled or dropped."""
        return bool(self.shuffle or self.dropout)

    @property
    def needs_tags(self) -> bool:
        """Whether a text has to be split into its tags."""
        if self.moves_tags or self.left_out or self.replacements or self.max_length:
            return True
        return self.separator != ", "


@dataclass(frozen=True)
class _Parts:
    """The tags of a caption in the order written: the fixed ones in front, the free ones, the fixed ones at the end."""

    front: list[Tag]
    free: list[Tag]
    end: list[Tag]


@dataclass(frozen=True)
class Caption:
    """A caption as it was written: lines of text, or a list of tags (with one weight per tag, or none at all)."""

    lines: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    rules: CaptionRules = field(default_factory=CaptionRules)

    @property
    def texts(self) -> tuple[str, ...]:
        """All lines and tags as they were written."""
        return self.lines + self.tags

    @property
    def shows_separator(self) -> bool:
        """Whether it holds a `keep_separator` that does nothing."""
        rules = self.rules
        if rules.moves_tags or not rules.keep_separator:
            return False
        return any(rules.keep_separator in line for line in self.lines)

    @property
    def possible_texts(self) -> tuple[str, ...]:
        """Texts that between them hold everything that a draw can give, but for what word lists give."""
        rules = self.rules
        if not (rules.wildcards or rules.max_length):
            return (self.plain,)
        replaced = tuple(new for _, new in rules.replacements)
        return (*self.texts, *replaced, rules.separator, rules.trigger, rules.prefix, rules.suffix)

    @cached_property
    def plain(self) -> str:
        """The caption without random draws: the first line and the first choices, in the order written."""
        return self.draw(None)

    @property
    def varies(self) -> bool:
        """Whether two draws can differ."""
        rules = self.rules
        if rules.wildcards and (len(self.lines) > 1 or self._has_wildcards()):
            return True
        free = len(self._parts(None).free)
        return (rules.shuffle > 0 and free > 1) or (rules.dropout > 0 and free > 0)

    def draw(self, rng: torch.Generator | None) -> str:
        """One variant of the caption, drawn from a CPU generator; None gives the plain one."""
        rules, parts = self.rules, self._parts(rng)
        free = parts.free
        if rng is not None and rules.shuffle and float(torch.rand((), generator=rng)) < rules.shuffle:
            free = [free[i] for i in _shuffled_order([weight for _, weight in free], rng)]
        if rng is not None and rules.dropout:
            random_numbers = torch.rand(len(free), generator=rng).tolist()
            free = [
                tag for tag, random_number in zip(free, random_numbers, strict=True) if random_number >= rules.dropout
            ]
        text = _join([tag for tag, _ in parts.front + free + parts.end], rules)
        prefix = self._fill(rules.prefix, rng)
        suffix = self._fill(rules.suffix, rng)
        return _add_trigger(text, rules.trigger, prefix, suffix)

    def _has_wildcards(self) -> bool:
        for text in (*self.texts, self.rules.prefix, self.rules.suffix):
            if _CHOICE.search(text) or (self.rules.lists and list_names(text)):
                return True
        return False

    def _parts(self, rng: torch.Generator | None) -> _Parts:
        """The tags with choices made."""
        rules = self.rules
        if self.tags:
            weights = self.weights or (1.0,) * len(self.tags)
            texts = [self._fill(tag, rng) for tag in self.tags]
            tags = self._edit(zip(texts, weights, strict=True))
            return _Parts(tags[: rules.keep], tags[rules.keep :], [])
        text = self._fill(self._line(rng), rng)
        if rules.moves_tags and rules.keep_separator and rules.keep_separator in text:
            pieces = [self._edit_text(piece) for piece in text.split(rules.keep_separator, 2)]
            return _Parts(pieces[0], pieces[1], pieces[2] if len(pieces) > 2 else [])
        tags = self._edit_text(text) if rules.needs_tags else self._edit([(text, 1.0)])
        return _Parts(tags[: rules.keep], tags[rules.keep :], [])

    def _edit_text(self, text: str) -> list[Tag]:
        return self._edit((tag, 1.0) for tag in split_tags(text))

    def _edit(self, tags: Iterable[Tag]) -> list[Tag]:
        """Tags without those that are left out, and with replacements."""
        left_out = set(self.rules.left_out)
        edited: list[Tag] = []
        for tag, weight in tags:
            if tag in left_out:
                continue
            replaced = _replace(tag, self.rules.replacements)
            if replaced:
                edited.append((replaced, weight))
        return edited

    def _line(self, rng: torch.Generator | None) -> str:
        if self.rules.wildcards and len(self.lines) > 1:
            return _choose(self.lines, rng)
        return " ".join(self.lines)

    def _fill(self, text: str, rng: torch.Generator | None) -> str:
        if self.rules.wildcards:
            return fill_wildcards(text, rng, self.rules.lists)
        return text


def split_tags(text: str) -> list[str]:
    """The tags of a text: what stands between commas."""
    stripped = (part.strip() for part in text.split(","))
    return [part for part in stripped if part]


def split_template(text: str) -> list[str]:
    """The tags of a text whose choices are not made yet: a comma inside of {a, b|c} begins no tag."""
    if not has_choices(text):
        return split_tags(text)
    text = hidden = _hide_plain_braces(text)
    for _ in range(_MAX_DEPTH):
        hidden, count = _CHOICE.subn(lambda match: "_" * len(match[0]), hidden)
        if not count:
            break
    commas = [at for at, character in enumerate(hidden) if character == ","]
    parts = (text[begin:end] for begin, end in pairwise([0, *commas, len(text)]))
    stripped = (part.removeprefix(",").strip().replace(_OPEN, "{{").replace(_CLOSE, "}}") for part in parts)
    return [part for part in stripped if part]


def _choose(options: Sequence[str], rng: torch.Generator | None) -> str:
    """One of the options, the first one without a generator."""
    if rng is None:
        return options[0]
    return options[int(torch.randint(len(options), (), generator=rng))]


def fill_wildcards(text: str, rng: torch.Generator | None, lists: WordLists | None = None) -> str:
    """The text with one of each {a|b|c} and one line for each __name__.

    `{{` and `}}` are braces, but `}}` ends two choices where one lies in another. Choices may lie inside choices and in
    lines of lists, which lead to an end (`WordLists.check`).

    Args:
        text: the caption.
        rng: draws them; without one they are the first ones.
        lists: the word lists by name.

    Raises:
        ValueError: where they are nested more than 200 deep.
    """
    text, count, rounds = _hide_plain_braces(text), 1, 0
    while count:
        text, count = _CHOICE.subn(lambda match: _choose(match[1].split("|"), rng), text)
        if lists and not count:
            text, count = fill_lists(text, lambda name: _choose(lists[name], rng))
        rounds += 1
        if count and rounds > _MAX_DEPTH:
            raise ValueError(f"the caption's choices lie in each other more than {_MAX_DEPTH} deep: {text[:60]!r}")
    return " ".join(text.replace(_OPEN, "{").replace(_CLOSE, "}").split())


def _hide_plain_braces(text: str) -> str:
    """The text with `{{` and `}}`, where they are braces, as characters that begin and end no choice."""
    depth = 0

    def replaced(match: re.Match[str]) -> str:
        nonlocal depth
        braces = match[0]
        if braces == "{{":
            return _OPEN
        if braces == "}}" and depth < 2:
            return _CLOSE
        depth = max(0, depth + braces.count("{") - braces.count("}"))
        return braces

    return _BRACES.sub(replaced, text)


def has_choices(text: str) -> bool:
    """Whether a text has a choice that may have been meant as a wildcard."""
    return any("|" in choice for choice in _CHOICE.findall(text))


def _shuffled_order(weights: list[float], rng: torch.Generator) -> list[int]:
    """A random order, tag by tag with a chance in proportion to its weight (an exponential race gives just that)."""
    if len(set(weights)) < 2:
        return torch.randperm(len(weights), generator=rng).tolist()
    u = torch.rand(len(weights), generator=rng, dtype=torch.float64)
    arrivals = -torch.log1p(-u) / torch.tensor(weights, dtype=torch.float64).clamp(min=1e-12)
    return arrivals.argsort(stable=True).tolist()


def _replace(tag: str, replacements: tuple[tuple[str, str], ...]) -> str:
    for old, new in replacements:
        tag = tag.replace(old, new)
        if len(tag) > _MAX_TAG_LENGTH:
            raise ValueError(f"replacements make a tag of more than {_MAX_TAG_LENGTH} characters: {tag[:60]!r}")
    return tag


def _join(tags: list[str], rules: CaptionRules) -> str:
    """The tags as one text; with a maximal length, whole tags up to the first that would exceed it."""
    if not rules.max_length:
        return rules.separator.join(tags)
    text = ""
    for tag in tags:
        joined = tag
        if text:
            joined = f"{text}{rules.separator}{tag}"
        if len(joined) > rules.max_length:
            break
        text = joined
    return text


def _add_trigger(text: str, trigger: str, prefix: str, suffix: str) -> str:
    whole = _join_texts(prefix, text, suffix)
    if not trigger:
        return whole
    if has_trigger(whole):
        return replace_trigger(whole, trigger)
    if _has_word(whole, trigger):
        return whole
    return _join_texts(prefix, trigger, text, suffix)


def has_trigger(text: str) -> bool:
    """Whether a trigger word is to stand somewhere in a text."""
    return any(name in text for name in TRIGGERS)


def replace_trigger(text: str, trigger: str) -> str:
    """The text with the trigger word where it is to stand."""
    for name in TRIGGERS:
        text = text.replace(name, trigger)
    return text


def _has_word(text: str, word: str) -> bool:
    """Whether a text has a word, and not only as part of another one: "cat" is not in "concatenate"."""
    at = text.find(word)
    while at >= 0:
        before, after = text[:at][-1:], text[at + len(word) :][:1]
        if not (_are_of_one_word(before, word[0]) or _are_of_one_word(word[-1], after)):
            return True
        at = text.find(word, at + 1)
    return False


def _are_of_one_word(first: str, second: str) -> bool:
    """Whether two neighboring characters belong to one word: letters or digits of a script with spaces."""
    return all(one != "" and (one.isalnum() or one == "_") and ord(one) < _WITHOUT_SPACES for one in (first, second))


def _join_texts(*texts: str) -> str:
    return " ".join(text for text in texts if text).strip()
