"""The problems of a workflow: they are collected, then raised together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHOWN = 50  # of the problems in one error


@dataclass(frozen=True)
class Problem:
    """One problem: its node (if any), its input (if any), and a message that says what was expected."""

    message: str
    node: str = ""
    title: str = ""
    class_type: str = ""
    input: str = ""
    unread: bool = False  # it is only that this reader cannot read it: a browser may send the workflow

    def __str__(self) -> str:
        if self.node:
            location = f'node {self.node} "{self.title or self.class_type}" ({self.class_type or "no class"})'
        else:
            location = ""
        if location and self.input:
            location = f"{location}, input '{self.input}'"
        else:
            location = location or (f"input '{self.input}'" if self.input else "")
        if location:
            return f"{location}: {self.message}"
        return self.message

    def as_json(self) -> dict[str, str]:
        """The non-empty fields, for --json."""
        fields = {
            "node": self.node,
            "title": self.title,
            "class": self.class_type,
            "input": self.input,
            "message": self.message,
        }
        return {name: value for name, value in fields.items() if value}


class WorkflowError(Exception):
    """The workflow is not valid; `problems` lists every error."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        lines = [str(problem) for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"and {len(self.problems) - SHOWN:,} more")
        super().__init__("\n".join(lines))
