"""Notes everything that a case asks of the system and may not: files written outside its folder, programs, sockets,
pickles.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NEVER = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "pickle.find_class",
    "webbrowser.open",
    "ctypes.dlopen",
)
_CHANGES = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "shutil.rmtree",
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _below_a_descriptor(event: str, arguments: tuple[Any, ...]) -> bool:
    """shutil.rmtree removes by name below an open folder; its own event has told of the folder."""
    places = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2}
    return event in places and arguments[places[event]] not in (-1, None)


class Fence:
    """Around one folder; `up` for the time of a case, `taken` gives what was done outside since."""

    def __init__(self, folder: Path) -> None:
        self.folders = tuple(os.path.realpath(place) + os.sep for place in (folder,))
        self.spare = os.path.realpath(tempfile.gettempdir()) + os.sep + "tmp"  # anonymous files of uploads
        self.is_up, self.noted = False, list[str]()
        sys.addaudithook(self._heard)

    @contextmanager
    def up(self) -> Iterator[None]:
        """For the block the fence stands."""
        self.is_up = True
        try:
            yield
        finally:
            self.is_up = False

    def taken(self) -> str:
        """What was done outside, and forget it."""
        noted, self.noted = self.noted, []
        return "\n".join(noted)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_up:
            return
        if event in _NEVER:
            self.noted.append(f"{event} {arguments!r}"[:300])
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING:
            self._check(event, arguments[0])
        elif event in _CHANGES and not _below_a_descriptor(event, arguments):
            for path in arguments[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]:
                self._check(event, path)

    def _check(self, event: str, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        real = os.path.realpath(os.fsdecode(path))
        if event == "open" and os.path.isdir(real):
            return  # a file without a name, as uploads are kept in: there is no other way to open a folder for writing
        if not (real + os.sep).startswith(self.folders) and not real.startswith(self.spare) and real != os.devnull:
            self.noted.append(f"{event} {real} is outside")
