"""What a program asks of the disk below a folder, request by request: counted, and answered otherwise at the one that a
test names.

Requests are opening a file to write, every write, fsync, rename, removal, new and removed folder. Reading is never
disturbed.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CALLS = ("fsync", "replace", "rename", "link", "unlink", "remove", "rmdir", "mkdir")
Answer = Callable[[str, str, Callable[[], object]], None]  # what happens instead: (request, path, does half of it)


def fails(number: int) -> Answer:
    """The request is answered with this errno, after half of a write; as in the system, writing and fsync do not say of
    which file.
    """

    def answer(request: str, path: str, half: Callable[[], object]) -> None:
        half()
        raise OSError(number, os.strerror(number), *([] if request in ("write", "fsync") else [path]))

    return answer


class Disk:
    """Counts requests below `folder` in `asked`; number `at` (from 1) gets `answer`, and with `lasting` every write
    after it too.
    """

    def __init__(self, folder: Path, at: int = 0, answer: Answer | None = None, lasting: bool = False) -> None:
        self.folder, self.at, self.answer, self.lasting = os.path.abspath(folder), at, answer, lasting
        self.asked: list[str] = []

    def request(self, what: str, path: str, half: Callable[[], object] = lambda: None) -> None:
        """Note a request, and answer it if it is the one."""
        if not os.path.abspath(path).startswith(self.folder):
            return
        self.asked.append(f"{what} {os.path.relpath(path, self.folder)}")
        fresh = what in ("write", "open", "mkdir", "fsync")
        if self.answer is not None and (
            len(self.asked) == self.at or (self.lasting and fresh and len(self.asked) > self.at > 0)
        ):
            self.answer(what, path, half)

    @contextmanager
    def installed(self) -> Iterator[Disk]:
        """For the block, requests of this process go through here."""
        held = {name: getattr(os, name) for name in (*CALLS, "open")}
        plain, paths = builtins.open, dict[int, str]()

        def guarded(name: str) -> Callable[..., Any]:
            def call(place: Any, *arguments: Any, **named: Any) -> Any:
                path = paths.get(place, "") if isinstance(place, int) else os.fspath(place)
                if path:
                    self.request(name, path)
                return held[name](place, *arguments, **named)

            return call

        def os_open(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.request("open", os.fspath(path))
            number = held["open"](path, flags, *arguments, **named)
            paths[number] = os.fspath(path)
            return number

        def opening(path: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            if not set(mode) & set("wxa+") or isinstance(path, int):
                return plain(path, mode, *arguments, **named)
            self.request("open", os.fspath(path))
            file = plain(path, mode, *arguments, **named)
            paths[file.fileno()] = os.fspath(path)
            return _Written(file, os.fspath(path), self)

        for name in CALLS:
            setattr(os, name, guarded(name))
        os.open, builtins.open, io.open = os_open, opening, opening  # type: ignore[assignment]
        try:
            yield self
        finally:
            for name, real in held.items():
                setattr(os, name, real)
            builtins.open, io.open = plain, plain  # type: ignore[assignment]


class _Written:
    """A file whose writes are requests."""

    def __init__(self, file: Any, path: str, disk: Disk) -> None:
        self.file, self.path, self.disk = file, path, disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, body: Any) -> Any:
        self.disk.request("write", self.path, lambda: (self.file.write(body[: len(body) // 2]), self.file.flush()))
        return self.file.write(body)


ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}
