"""Reads the options of an optimizer's library from text: `betas = 0.9 0.99, eps = 1e-8` (kohya's optimizer_args)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from .option_readers import OptionReader
from .record import OptimizerRecord
from .registry import OPTIMIZERS


def parse(optimizer: str, text: str) -> dict[str, Any]:
    """Read optimizer options.

    Args:
        optimizer: the optimizer that they are for.
        text: entries `name = value`, separated by commas or lines. Two numbers of one value may be separated by a
            comma too.

    Returns:
        {name in the library: value}.

    Raises:
        ValueError: listing everything that cannot be read.
    """
    return parse_for(OPTIMIZERS.get(optimizer), text)


def parse_for(record: OptimizerRecord, text: str) -> dict[str, Any]:
    """The same for the record of an optimizer."""
    entries, errors = _entries(text)
    values: dict[str, Any] = {}
    for name, value in entries:
        if name not in record.options:
            errors.append(_unknown(record.name, name, record.options))
            continue
        if name in values:
            errors.append(f"{name} is given twice")
        reader = record.options[name]
        try:
            values[name] = reader.read(value)
        except (ValueError, KeyError):
            errors.append(f"{name} is {value!r}, expected {reader.expected}")
    errors += record.check_options(values)
    if errors:
        raise ValueError("optimizer options: " + "; ".join(errors))
    return values


def _unknown(optimizer: str, name: str, known: Mapping[str, OptionReader]) -> str:
    nearest = difflib.get_close_matches(name, list(known), n=1)
    if nearest:
        return f"{optimizer} has no {name!r}, did you mean {nearest[0]}?"
    if not known:
        return f"{optimizer} has no {name!r}: it has no options"
    return f"{optimizer} has no {name!r}, only {', '.join(known)}"


def _entries(text: str) -> tuple[list[tuple[str, str]], list[str]]:
    """(name, value) of every entry, and an error for each that has no name."""
    entries: list[tuple[str, str]] = []
    errors = []
    for line in re.split(r"[,\n]", text):
        entry = line.strip()
        name, equals, value = entry.partition("=")
        if equals:
            entries.append((name.strip(), value.strip()))
        elif entry and entries:
            name, value = entries[-1]
            entries[-1] = (name, f"{value} {entry}")
        elif entry:
            errors.append(f"{entry!r} cannot be read, expected such as betas = 0.9 0.99, eps = 1e-8")
    return entries, errors
