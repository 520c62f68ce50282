"""Names that nodes offer and check before anything of a run is read: of runs, of saved states, of what is kept and
shown.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from ...storage.file_list import names_in

KEEPS = ("last", "best", "every")  # which states TrainStep keeps besides the last one
SHOWN = ("both", "weights", "average")  # with which weights previews are sampled
PLAIN = (
    "without slashes, colons, quotes or broken characters, of at most 100 characters and 240 bytes (80 of Chinese or"
    " Japanese)"
)


def is_plain_name(name: str) -> bool:
    """Whether a name is a plain folder name, as `PLAIN` says.

    Systems allow 255 bytes, and the lock's name is longer. A lone surrogate is a broken character: UTF-8 has none.
    """
    fits = re.fullmatch(r"[^\\/:*?\"<>|\x00-\x1f\ud800-\udfff]{1,100}", name) and len(name.encode()) <= 240
    return bool(fits) and name.strip(" .") == name


def check_run_name(run: str) -> None:
    """Raises ValueError when a run cannot have this name."""
    if not is_plain_name(run):
        raise ValueError(f"run name is {run!r}: expected a plain folder name, {PLAIN}.")
    if run.lower() == "cache":
        raise ValueError("run name is 'cache': that folder holds what Dataset has encoded; give the run another name.")


NEWEST = "(the newest)"  # in place of a saved state's name


def newest_name(root: Path) -> str:
    """The name of the state that was saved last. Raises FileNotFoundError where there is none."""
    times: list[tuple[int, str]] = []
    for name in saved_names(root):
        with suppress(FileNotFoundError):  # another process has removed it since
            times.append(((root / name / "state.json").stat().st_mtime_ns, name))
    if not times:
        raise FileNotFoundError(f"Load State: there is no saved state in {root} yet. Save one with Save State first.")
    return max(times)[1]


def saved_names(root: Path) -> list[str]:
    """The names of all saved states."""
    return [name for name in names_in(root) if (root / name / "state.json").is_file()]
