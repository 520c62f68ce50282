"""Another process that removes something right after a folder was listed."""

import os
import shutil
from pathlib import Path


class _Entries:
    """What os.scandir gives, read at once."""

    def __init__(self, entries):
        self._entries = iter(list(entries))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._entries)

    def close(self):
        """As os.scandir's."""


def remove_after_listing(monkeypatch, listed: Path, *removed: Path) -> None:
    """Removes files and folders as soon as `listed` has been listed, before the caller looks at any of its entries."""
    scandir, listdir = os.scandir, os.listdir
    left = list(removed)

    def remove_if_listed(folder) -> None:
        if isinstance(folder, int) or Path(folder) != listed:
            return
        while left:
            _remove(left.pop())

    def scanned(folder="."):
        with scandir(folder) as entries:
            found = _Entries(entries)
        remove_if_listed(folder)
        return found

    def names(folder="."):
        found = listdir(folder)
        remove_if_listed(folder)
        return found

    monkeypatch.setattr(os, "scandir", scanned)
    monkeypatch.setattr(os, "listdir", names)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
