"""The table and the JSON file of `python dev.py gpu`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .processes import CANNOT, DONE, FAILED, CaseResult, PartResult


def as_json(facts: Mapping[str, Any], parts: Sequence[PartResult], seconds: float) -> dict[str, Any]:
    """Everything that is known."""
    return {**facts, "seconds": seconds, "parts": [part.as_json() for part in parts]}


def markdown(facts: Mapping[str, Any], parts: Sequence[PartResult], seconds: float) -> str:
    """One table of the parts, one of the cases that gave numbers, and what is missing and why."""
    head = [f"# Graft on {facts['device']}", ""]
    head += [f"- {name}: {value}" for name, value in facts.items() if name != "device"]
    head += ["", f"{seconds:.0f} seconds in all.", "", "| part | result | seconds |", "|---|---|---:|"]
    for part in parts:
        head.append(f"| {part.title} (`{part.name}`) | {counts(part)} | {part.seconds:.0f} of {part.limit:.0f} |")
    return "\n".join([*head, "", *missing(parts), *numbers(parts)]) + "\n"


def counts(part: PartResult) -> str:
    """How a part's cases ended, in words: "done", "3 done, 1 FAILED"."""
    found: dict[str, int] = {}
    for case in part.cases:
        found[case.status] = found.get(case.status, 0) + 1
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{count} {status}" for status, count in found.items())


def missing(parts: Sequence[PartResult]) -> list[str]:
    """What failed, was cut, or cannot be done here, each with its reason."""
    lines = []
    for part in parts:
        for case in part.cases:
            if case.status != DONE:
                lines.append(f"| {case.status} | {part.name}: {cell(case.name)} | {cell(case.reason)} |")
    if not lines:
        return []
    lines.sort(key=lambda line: (not line.startswith(f"| {FAILED}"), line.startswith(f"| {CANNOT}")))
    return ["## Not done", "", "| | what | why |", "|---|---|---|", *lines, ""]


def numbers(parts: Sequence[PartResult]) -> list[str]:
    """What was measured and checked, part by part."""
    lines = []
    for part in parts:
        measured = [case for case in part.cases if case.rows or case.status == DONE]
        if not measured:
            continue
        lines += [f"## {part.title}", "", "| case | | value | ratio | bound | |", "|---|---|---:|---:|---|---|"]
        for case in measured:
            lines += [table_row(case, found) for found in case.rows]
            if case.status == DONE:
                lines.append(
                    f"| {cell(case.name)} | whole, with setting up | {case.seconds:.1f} s | | | {peak(case)} |"
                )
        lines.append("")
    return lines


def peak(case: CaseResult) -> str:
    """The most memory that a case took, in words."""
    return f"peak memory {case.peak_mb:,.0f} MB"


def table_row(case: CaseResult, found: Mapping[str, Any]) -> str:
    """One number."""
    ratio = found.get("ratio")
    shown = ""
    if ratio is not None:
        shown = f"{ratio:.3g}"
    bound = found["bound"]
    if found["broken"]:
        bound = f"**{bound}**"
    value = f"{found['value']:.4g} {found['unit']}"
    return f"| {cell(case.name)} | {cell(found['name'])} | {value} | {shown} | {bound} | {cell(found['note'])} |"


def cell(text: str) -> str:
    """A text as it may stand in a cell of the table."""
    return " ".join(text.split()).replace("|", "\\|")
