"""Lists of problems for error messages: the first ones, and how many there are more."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 50


def problem_lines(problems: Sequence[str], mark: str = "- ") -> str:
    """One line per problem, with `mark` before each; after the first 50 a line with the number of the others."""
    lines = [f"{mark}{problem}" for problem in problems[:SHOWN]]
    if len(problems) > SHOWN:
        lines.append(f"{mark}and {len(problems) - SHOWN:,} more")
    return "\n".join(lines)
