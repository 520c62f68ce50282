"""Verdicts in a file, one JSON object a line, so that a call that was broken off goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

from .changes import Change
from .trials import Verdict


class Record:
    """The verdicts of earlier calls: the last one on each change counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[tuple[str, str, str, int], tuple[str, str]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                name = (entry["file"], entry["before"], entry["after"], entry["nth"])
                self.known[name] = (entry["by"], entry["detail"])

    def verdicts(self, places: list[tuple[PurePosixPath, Change]], again: bool = False) -> list[Verdict]:
        """What is known of these changes; with `again` only of those that a test noticed."""
        found = []
        for file, change in places:
            name = (file.as_posix(), change.before, change.after, change.nth)
            if name not in self.known:
                continue
            verdict = Verdict(file, change, *self.known[name])
            if verdict.noticed or (verdict.by == "survived" and not again):
                found.append(verdict)
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
        }
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
