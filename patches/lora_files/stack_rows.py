"""The rows of a LoRA stack: elements of a LORA_STACK, and the JSON of GraftLoRAStack's widget."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from ...storage.problem_list import problem_lines

if TYPE_CHECKING:
    from ..patching.strength_schedule import Schedule

VERSION = 1
LIMIT = 100.0  # of strengths, as on ComfyUI's own loaders and on the widget
EMPTY = '{"version": 1, "rows": []}'
_FIELDS: dict[str, tuple[type, ...]] = {
    "file": (str,),
    "on": (bool,),
    "model": (Real,),
    "clip": (Real,),
    "blocks": (str,),
    "schedule": (str,),
    "partial": (bool,),
}
_TYPE_TEXTS = {str: "text", bool: "true or false", Real: "a number"}
_RANGE = re.compile(r"([\d.]+%?)\s*-\s*([\d.]+%?)")


class StackRow(tuple):
    """One row of a LORA_STACK: a tuple (file name, model strength, clip strength) with Graft's extra fields.

    Other packs can unpack it. `number` is its position in the source list, for messages: counted from 1, including rows
    that are off.
    """

    blocks: str
    schedule: str
    partial: bool
    number: int = 0

    def __new__(
        cls, name: str, model: float, clip: float, blocks: str = "", schedule: str = "", partial: bool = False
    ) -> StackRow:
        row = super().__new__(cls, (name, model, clip))
        row.blocks, row.schedule, row.partial = blocks, schedule, partial
        return row

    def with_blocks(self, blocks: str) -> StackRow:
        """This row with other block weights."""
        row = StackRow(self[0], self[1], self[2], blocks, self.schedule, self.partial)
        row.number = self.number
        return row

    def __getnewargs__(self) -> tuple:
        return (*self, self.blocks, self.schedule, self.partial)


def read_stack_rows(stack: Iterable[Sequence]) -> list[StackRow]:
    """Read any pack's LORA_STACK as StackRows; raises ValueError listing every unusable element."""
    rows, problems = [], []
    for number, element in enumerate(stack, start=1):
        if not (isinstance(element, (tuple, list)) and len(element) == 3 and isinstance(element[0], str)):
            problems.append(f"row {number}: expected (file name, model strength, clip strength), got {element!r}")
            continue
        row: dict[str, Any] = {"file": element[0], "model": element[1], "clip": element[2]}
        row.update(
            (name, getattr(element, name)) for name in ("blocks", "schedule", "partial") if hasattr(element, name)
        )
        row_problems = list(_row_problems(row))
        problems += [f"row {number} ({element[0]}): {problem}" for problem in row_problems]
        if not row_problems:
            rows.append(_row(row, number))
    if problems:
        raise ValueError("LORA_STACK:\n" + problem_lines(problems))
    return rows


def parse(text: str) -> list[StackRow]:
    """Read the JSON rows of GraftLoRAStack; returns those that are on.

    The text is `{"version": 1, "rows": [{"file", "on", "model", "clip", "blocks", "schedule", "partial"}]}`. Only
    "file" is required; clip defaults to the model's strength. Raises ValueError listing every error.
    """
    try:
        content = json.loads(text.strip() or EMPTY)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"LoRA rows: not JSON ({error}); expected {EMPTY}") from error
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise ValueError(f"LoRA rows: expected an object such as {EMPTY}, got {text[:80]!r}")
    if content.get("version") != VERSION:
        raise ValueError(
            f"LoRA rows: expected version {VERSION}, got {content.get('version')!r}; a newer Graft may have saved this"
            " workflow"
        )
    rows, problems = [], []
    for number, row in enumerate(content["rows"], start=1):
        if not isinstance(row, dict) or not isinstance(row.get("file"), str):
            problems.append(f"row {number}: expected an object with a file, got {row!r}")
            continue
        if row.get("on", True):
            row_problems = [f"row {number} ({row['file']}): {problem}" for problem in _row_problems(row)]
        else:
            row_problems = []
        problems += row_problems
        if not row_problems and row.get("on", True):
            rows.append(_row(row, number))
    if problems:
        raise ValueError("rows:\n" + problem_lines(problems))
    return rows


def _row_problems(row: Mapping[str, Any]) -> Iterable[str]:
    for name, value in row.items():
        if name not in _FIELDS:
            yield f"unknown field {name!r}; known are {', '.join(_FIELDS)}"
        elif not isinstance(value, _FIELDS[name]) or (bool not in _FIELDS[name] and isinstance(value, bool)):
            yield f"{name}: expected {_TYPE_TEXTS[_FIELDS[name][0]]}, got {value!r}"
        elif name in ("model", "clip") and not abs(row[name]) <= LIMIT:  # NaN fails this too
            yield f"{name}: expected a strength from {-LIMIT:g} to {LIMIT:g}, got {value}"
        elif name in ("blocks", "schedule") and isinstance(value, str) and value.strip():
            from .block_weights import parse as parse_blocks

            try:
                (parse_blocks if name == "blocks" else parse_schedule)(value)
            except ValueError as error:
                yield str(error)


def parse_schedule(text: str) -> Schedule | None:
    """Read the strength schedule of a row; None for "".

    The text is "0.2-0.8" (on from start to end), or points "0:1, 0.5:0.3, 1:0" (fraction of sampling: strength).
    Fractions are from 0 (all noise) to 1, or in percent ("20%-80%"). Raises ValueError that describes the error.
    """
    if not text.strip():
        return None
    from ..patching.strength_schedule import Schedule

    span = _RANGE.fullmatch(text.strip())
    if span is not None:
        start, end = _share(span[1]), _share(span[2])
        if not 0.0 <= start < end <= 1.0:
            raise ValueError(f"schedule: expected a start before an end, both from 0 to 1, got {text.strip()!r}")
        return Schedule.from_range(start, end)
    points = []
    for part in filter(None, (part.strip() for part in text.replace("\n", ",").split(","))):
        share, colon, strength = part.partition(":")
        if not colon:
            raise ValueError(
                "schedule: expected start-end such as 0.2-0.8, or points such as 0:1, 0.5:0.3, 1:0; got"
                f" {text.strip()!r}"
            )
        points.append((_share(share.strip()), _strength(strength.strip())))
    shares = [share for share, _ in points]
    if not shares or shares != sorted(shares) or shares[0] < 0.0 or shares[-1] > 1.0:
        raise ValueError(f"schedule: expected points in order, from 0 to 1, got {text.strip()!r}")
    return Schedule(tuple(points))


def _share(text: str) -> float:
    return _number(text[:-1]) / 100.0 if text.endswith("%") else _number(text)


def _strength(text: str) -> float:
    value = _number(text)
    if abs(value) > LIMIT:
        raise ValueError(f"schedule: expected strengths from {-LIMIT:g} to {LIMIT:g}, got {text!r}")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"schedule: expected numbers, got {text!r}")
    return value


def _row(row: dict[str, Any], number: int) -> StackRow:
    model = float(row.get("model", 1.0))
    extras = (row.get("blocks", ""), row.get("schedule", ""), row.get("partial", False))
    stack_row = StackRow(row["file"], model, float(row.get("clip", model)), *extras)
    stack_row.number = number
    return stack_row
