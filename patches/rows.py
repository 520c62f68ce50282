"""Rows of a LoRA stack: the elements of a LORA_STACK, and the JSON that GraftLoRAStack's widget holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from . import blocks

VERSION = 1
EMPTY = '{"version": 1, "rows": []}'
_FIELDS: dict[str, tuple[type, ...]] = {
    "file": (str,), "on": (bool,), "model": (Real,), "clip": (Real,), "blocks": (str,), "schedule": (str,), "partial": (bool,),
}  # fmt: skip
_SAID = {str: "text", bool: "true or false", Real: "a number"}
_NOT_YET = ("schedule",)


class StackRow(tuple):
    """One row of a LORA_STACK: a tuple (file name, model strength, clip strength) that other packs can unpack, with Graft's extras."""

    blocks: str
    schedule: str
    partial: bool

    def __new__(cls, name: str, model: float, clip: float, blocks: str = "", schedule: str = "", partial: bool = False) -> StackRow:
        row = super().__new__(cls, (name, model, clip))
        row.blocks, row.schedule, row.partial = blocks, schedule, partial
        return row

    def __getnewargs__(self) -> tuple:
        return (*self, self.blocks, self.schedule, self.partial)


def rows_of(stack: Iterable[Sequence]) -> list[StackRow]:
    """The rows of a LORA_STACK of any pack, as StackRows; raises ValueError that lists every element that cannot be used."""
    rows, problems = [], []
    for number, element in enumerate(stack, start=1):
        if not (isinstance(element, (tuple, list)) and len(element) == 3 and isinstance(element[0], str)):
            problems.append(f"row {number}: expected (file name, model strength, clip strength), got {element!r}")
            continue
        row: dict[str, Any] = {"file": element[0], "model": element[1], "clip": element[2]}
        row.update((name, getattr(element, name)) for name in ("blocks", "schedule", "partial") if hasattr(element, name))
        found = list(_row_problems(row))
        problems += [f"row {number} ({element[0]}): {problem}" for problem in found]
        if not found:
            rows.append(_row(row))
    if problems:
        raise ValueError("LORA_STACK:\n" + "\n".join(f"- {problem}" for problem in problems))
    return rows


def parse(text: str) -> list[StackRow]:
    """The rows that are on, of `{"version": 1, "rows": [{"file", "on", "model", "clip", "blocks", "schedule", "partial"}]}`.

    Only "file" must be there; clip defaults to the model's strength. Raises ValueError that lists everything wrong.
    """
    try:
        content = json.loads(text.strip() or EMPTY)
    except json.JSONDecodeError as error:
        raise ValueError(f"rows: not JSON ({error}); expected {EMPTY}") from error
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise ValueError(f"rows: expected an object such as {EMPTY}, got {text[:80]!r}")
    if content.get("version") != VERSION:
        raise ValueError(f"rows: expected version {VERSION}, got {content.get('version')!r}; a newer Graft may have saved this workflow")
    rows, problems = [], []
    for number, row in enumerate(content["rows"], start=1):
        if not isinstance(row, dict) or not isinstance(row.get("file"), str):
            problems.append(f"row {number}: expected an object with a file, got {row!r}")
            continue
        found = [f"row {number} ({row['file']}): {problem}" for problem in _row_problems(row)] if row.get("on", True) else []
        problems += found
        if not found and row.get("on", True):
            rows.append(_row(row))
    if problems:
        raise ValueError("rows:\n" + "\n".join(f"- {problem}" for problem in problems))
    return rows


def _row_problems(row: Mapping[str, Any]) -> Iterable[str]:
    for name, value in row.items():
        if name not in _FIELDS:
            yield f"unknown field {name!r}; known are {', '.join(_FIELDS)}"
        elif not isinstance(value, _FIELDS[name]) or (bool not in _FIELDS[name] and isinstance(value, bool)):
            yield f"{name}: expected {_SAID[_FIELDS[name][0]]}, got {value!r}"
        elif name in ("model", "clip") and not math.isfinite(row[name]):
            yield f"{name}: expected a finite number, got {value}"
        elif name in _NOT_YET and value:
            yield f"{name} is not available in this version of Graft; leave it empty"
        elif name == "blocks" and isinstance(value, str) and value.strip():
            try:
                blocks.parse(value)
            except ValueError as error:
                yield str(error)


def _row(row: dict[str, Any]) -> StackRow:
    model = float(row.get("model", 1.0))
    extras = (row.get("blocks", ""), row.get("schedule", ""), row.get("partial", False))
    return StackRow(row["file"], model, float(row.get("clip", model)), *extras)
