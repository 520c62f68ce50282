"""Names that nodes offer and check before anything of a run is read: of runs, of saved states, of what is kept."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from ...storage.file_list import names_in

KEEPS = ("last", "best", "every")  # which states TrainStep keeps besides the last one
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


@dataclass(frozen=True)
class KeepRule:
    """Which states stay on disk: one in `every` steps or `epochs`, from the step or epoch `first` on."""

    every: int
    epochs: bool = False
    first: int = 0

    def keeps(self, step: int, epoch: Fraction) -> bool:
        """Whether the state after `step` stays. `epoch` is the length of an epoch in steps; one that ends within a step
        ends after it.
        """
        length = epoch if self.epochs else 1
        before, now = math.floor((step - 1) / length), math.floor(step / length)
        newest = now - now % self.every
        return newest > before and newest >= self.first


def parse_keep_rules(text: str) -> tuple[KeepRule, ...]:
    """Rules from text such as "every 20000 steps, every 2 epochs from 10". Raises ValueError for what is no rule."""
    rules = []
    for part in filter(None, map(str.strip, text.split(","))):
        found = re.fullmatch(r"every ([1-9]\d{0,8}) (step|epoch)s?(?: from (\d{1,9}))?", part)
        if found is None:
            raise ValueError(f"{part!r} is no rule, expected such as 'every 20000 steps' or 'every 2 epochs from 10'")
        rules.append(KeepRule(int(found[1]), found[2] == "epoch", int(found[3] or 0)))
    return tuple(rules)


NEWEST = "(the newest)"  # in place of a saved state's name


def newest_name(root: Path) -> str:
    """The name of the state that was saved last. Raises FileNotFoundError where there is none."""
    names = saved_names(root)
    if not names:
        raise FileNotFoundError(f"Load State: there is no saved state in {root} yet. Save one with Save State first.")
    return max(names, key=lambda name: ((root / name / "state.json").stat().st_mtime_ns, name))


def saved_names(root: Path) -> list[str]:
    """The names of all saved states."""
    return [name for name in names_in(root) if (root / name / "state.json").is_file()]
