"""Counts the lines that a call runs: what work costs, the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def lines_run(work: Callable[[], object], is_counted: Callable[[str], bool]) -> int:
    """How many lines of the files that `is_counted` names a call runs."""
    count = 0

    def lines(frame: Any, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return lines

    def calls(frame: Any, event: str, argument: object) -> Any:
        return lines if is_counted(frame.f_code.co_filename) else None

    previous = sys.gettrace()
    sys.settrace(calls)
    try:
        work()
    finally:
        sys.settrace(previous)
    return count
