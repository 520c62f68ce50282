"""YAML mappings loaded safely, and readers of their values: each raises ValueError that says what was expected."""

from __future__ import annotations

import codecs
import difflib
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...storage.printable import pip_install

_MAX_VALUES = 100_000  # in a mapping; its text may be short, as an alias may stand for many (a "billion laughs")
_LARGEST_NUMBER = 1e300
_INFINITY = float("inf")
_YAML_ERRORS = (  # what PyYAML raises beside its own, of `!!bool x`, a 99th day …
    ValueError,
    KeyError,
    AttributeError,
    TypeError,
    OverflowError,
    RecursionError,
)


def load_mapping(text: str, where: str) -> dict[Any, Any]:
    """A YAML mapping by the safe loader; empty text is an empty one. Raises ValueError with line and column."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{where}: reading YAML needs PyYAML, which ComfyUI installs: {pip_install('PyYAML')}"
        ) from error
    document = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is not None:
            if _count_values(node, {}) > _MAX_VALUES:
                raise ValueError(f"its aliases stand for more than {_MAX_VALUES:,} values")
            document = loader.construct_document(node)
    except (*_YAML_ERRORS, yaml.YAMLError) as error:
        raise ValueError(f"{where} is not YAML: {' '.join(str(error).split()) or type(error).__name__}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ValueError(f"{where} is YAML of a {type(document).__name__}, expected lines of the form key: value")
    return document


def _count_values(node: Any, counts: dict[int, float]) -> float:
    """How many values a YAML node stands for with its aliases written out; infinitely many where it holds itself."""
    if id(node) in counts:
        return counts[id(node)]
    counts[id(node)] = _INFINITY
    total = 1.0
    if isinstance(node.value, list):
        for child in node.value:
            if isinstance(child, tuple):  # (key, value) of a mapping
                total += sum(_count_values(part, counts) for part in child)
            else:
                total += _count_values(child, counts)
    counts[id(node)] = total
    return total


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 2


def shorten(value: object) -> str:
    """A wrong value for an error message, cut short."""
    text = _BRIEF.repr(value)
    if len(text) <= 80:
        return text
    return f"{text[:79]}…"


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The error message for an unknown key, with the nearest known one."""
    names = sorted(known)
    similar = difflib.get_close_matches(key, names, n=1)
    if similar:
        return f"unknown key {key!r}, did you mean {similar[0]}?"
    return f"unknown key {key!r}; known are {', '.join(names)}"


def read_whole_number(least: int, most: float = _INFINITY) -> Callable[[Any], int]:
    """A whole number from `least` to `most`."""
    expected = f"a whole number, {least} or more"
    if most < _INFINITY:
        expected = f"a whole number from {least} to {most}"

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(expected)
        return value

    return read


def read_number(value: Any, least: float = -_INFINITY, most: float = _INFINITY) -> float:
    """A finite number from `least` to `most`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or not abs(value) < _LARGEST_NUMBER:
        bounds = ""
        if least > -_INFINITY:
            bounds = f" from {least:g}"
        if most < _INFINITY:
            bounds += f" to {most:g}"
        raise ValueError(f"a number{bounds}")
    return float(value)


def read_number_from(least: float) -> Callable[[Any], float]:
    """A finite number from `least` on."""
    return lambda value: read_number(value, least)


def read_chance(value: object) -> float:
    """A probability."""
    return read_number(value, 0.0, 1.0)


def read_flag(value: object) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def read_choice(*options: str) -> Callable[[Any], str]:
    """One of a few words."""

    def read(value: object) -> str:
        if value is False and "off" in options:
            return "off"  # YAML 1.1 reads a bare off as false
        if value not in options:
            raise ValueError(f"one of {', '.join(options)}")
        return str(value)

    return read


def read_text(value: object) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError("a text in quotes")
    return value


def read_tags(value: object) -> tuple[str, ...]:
    """A list of texts; numbers are taken as they are written, one text is a list of one."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(tag, str | int | float) for tag in value):
        raise ValueError("a list of tags")
    return tuple(str(tag) for tag in value)


def read_replacements(value: object) -> tuple[tuple[str, str], ...]:
    """A mapping of texts to what replaces them."""
    if not isinstance(value, Mapping) or not all(isinstance(new, str | int | float) for new in value.values()):
        raise ValueError("lines of the form 'old': 'new'")
    if "" in value:
        raise ValueError("something to replace, not an empty text")
    return tuple((str(old), str(new)) for old, new in value.items())


def read_scores(value: object) -> tuple[tuple[str, float], ...]:
    """A mapping of tags to numbers."""
    if not isinstance(value, Mapping):
        raise ValueError("lines of the form tag: number")
    try:
        return tuple((str(tag), read_number(score)) for tag, score in value.items())
    except ValueError:
        raise ValueError("lines of the form tag: number") from None


def read_whole_numbers(least: int | None = None, most: int | None = None) -> Callable[[Any], tuple[int, ...]]:
    """A list of whole numbers, from `least` to `most` where both are given."""
    expected = "a list of whole numbers"
    if least is not None and most is not None:
        expected += f" from {least} to {most}"

    def read(value: object) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise ValueError(expected)
        for number in value:
            if not isinstance(number, int) or isinstance(number, bool):
                raise ValueError(expected)
            if least is not None and most is not None and not least <= number <= most:
                raise ValueError(expected)
        return tuple(value)

    return read


def read_encoding(value: object) -> str:
    """The name of a text encoding."""
    try:
        name = codecs.lookup(read_text(value)).name
        "a".encode(name)  # some are of bytes, not of text
        return name
    except (LookupError, UnicodeError):
        raise ValueError("the name of a text encoding, as utf-8 or cp1252") from None
