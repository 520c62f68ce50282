"""Verdicts in a file, one JSON object a line, so that a call that was broken off goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

from .changes import Change
from .trials import STAGES, Verdict


class Record:
    """The verdicts of earlier calls: the last one on each change counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[tuple[str, str, str, int], tuple[str, str, str]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                name = (entry["file"], entry["before"], entry["after"], entry["nth"])
                self.known[name] = (entry["by"], entry["detail"], entry["stage"])

    def verdicts(self, places: list[tuple[PurePosixPath, Change]]) -> list[Verdict]:
        """What is known of these changes."""
        found = []
        for file, change in places:
            name = (file.as_posix(), change.before, change.after, change.nth)
            if name in self.known:
                found.append(Verdict(file, change, *self.known[name]))
        return found

    def add(self, verdict: Verdict) -> None:
        change = verdict.change
        entry = {
            "file": verdict.file.as_posix(),
            "line": change.line,
            "before": change.before,
            "after": change.after,
            "nth": change.nth,
            "by": verdict.by,
            "detail": verdict.detail,
            "stage": verdict.stage,
        }
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def is_final(verdict: Verdict, until: str) -> bool:
    """Whether the stages up to `until` have nothing to add: a test noticed the change, or it survived all of them."""
    if verdict.noticed:
        return True
    return verdict.by == "survived" and STAGES.index(verdict.stage) >= STAGES.index(until)
