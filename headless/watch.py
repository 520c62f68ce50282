"""Watches a folder for workflow files: each new or changed one is given out once, when it is written whole."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from .embedded import HostError

EVERY = 0.5  # seconds between two looks at the folder
_State = tuple[int, int, int]  # which file, when it was changed, its size


@dataclass
class Watch:
    """The workflow files that lie in a folder itself. What is there at the start, links and folders are left alone."""

    folder: Path
    known: dict[str, _State] = field(default_factory=dict)  # given out, or there at the start
    settling: dict[str, _State] = field(default_factory=dict)  # seen once since they changed

    def ready(self) -> list[Path]:
        """The files that are new or changed, and the same as at the last look, so that nobody is still writing them.

        Raises HostError when the folder has gone.
        """
        try:
            now = _files(self.folder)
        except OSError as error:
            raise HostError(
                f"--watch {self.folder}: the folder can no longer be read ({error.strerror}); put it back and start"
                " again"
            ) from error
        found = []
        for name, state in sorted(now.items()):
            if self.known.get(name) == state:
                continue
            if self.settling.get(name) == state:
                self.known[name] = state
                found.append(self.folder / name)
        self.settling = now
        self.known = {name: state for name, state in self.known.items() if name in now}
        return found


def watch(folder: str) -> Watch:
    """Watch a folder from now on. Raises HostError if it is none."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise HostError(f"--watch {folder}: no such folder; make it first")
    place = path.resolve()
    return Watch(place, known=_files(place))


def _files(folder: Path) -> dict[str, _State]:
    """The folder's own .json files, without links and hidden ones, which are drafts."""
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.endswith(".json") or entry.name.startswith("."):
                continue
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(info.st_mode):
                found[entry.name] = (info.st_ino, info.st_mtime_ns, info.st_size)
    return found
