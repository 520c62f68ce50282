"""What a part is made of: cases that give rows, and what they are told about the device and the host."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]


class CannotRun(Exception):
    """This machine cannot do the case: the message says why."""


class CutShort(Exception):
    """The time was over before the case was done: the message says what is missing."""


@dataclass(frozen=True)
class Bound:
    """What the ratio of a row may be, or its value where it has no ratio: at most, or at least so much."""

    most: float | None = None
    least: float | None = None

    def allows(self, number: float) -> bool:
        """Whether a number is within the bound."""
        return (self.most is None or number <= self.most) and (self.least is None or number >= self.least)

    def __str__(self) -> str:
        if self.most is not None:
            return f"at most {self.most:g}"
        if self.least is not None:
            return f"at least {self.least:g}"
        return "checked"


CHECKED = Bound()  # of a row whose note says what its case has asserted


def at_most(number: float) -> Bound:
    """An upper bound."""
    return Bound(most=number)


def at_least(number: float) -> Bound:
    """A lower bound."""
    return Bound(least=number)


@dataclass(frozen=True)
class Setting:
    """The device, whether sizes are tiny (to try the command), the ComfyUI checkout or "", and when the time is over
    (`time.monotonic`).
    """

    device: torch.device
    tiny: bool
    comfyui: str
    deadline: float

    def left(self) -> float:
        """Seconds that are left."""
        return self.deadline - time.monotonic()

    @property
    def decides(self) -> bool:
        """Whether bounds on seconds and memory count: tiny sizes and other devices than a GPU only try the command."""
        return not self.tiny and self.device.type == "cuda"


@dataclass(frozen=True)
class Case:
    """One check or measurement; `run` gives rows as they come. It raises AssertionError for a wrong result, CannotRun
    or CutShort.
    """

    name: str
    run: Callable[[], Iterable[Row]]


def row(name: str, value: float, unit: str, bound: Bound, ratio: float | None = None, note: str = "") -> Row:
    """A line of the table. `ratio` compares with something that `note` or the name says."""
    number = value if ratio is None else ratio
    kept = {"name": name, "value": value, "unit": unit, "ratio": ratio, "note": note}
    return {**kept, "bound": str(bound), "broken": not bound.allows(number)}


def bounded(rows: Iterable[Row], bounds: Mapping[str, Bound], note: str) -> Iterator[Row]:
    """Rows of the benchmarks that have a bound by their name, with a note: what was checked, and how closely."""
    for found in rows:
        if found["name"] in bounds:
            yield row(found["name"], found["value"], found["unit"], bounds[found["name"]], found["ratio"], note)


def device_named(name: str) -> torch.device:
    """The device of a name; `second` is the one of the tests."""
    if name.partition(":")[0] == "second":
        from graft_nodes.tests.second_device.device import DEVICE

        return DEVICE
    if name == "cuda":
        return torch.device("cuda", 0)
    return torch.device(name)


def need(package: str, used_for: str) -> None:
    """Raise CannotRun unless a package is installed."""
    if importlib.util.find_spec(package) is None:
        raise CannotRun(f"{package} is not installed in {sys.executable}; it is needed {used_for}")


@functools.cache
def open_host(setting: Setting) -> str:
    """Open the ComfyUI checkout or the embedded host, once in a process; says which."""
    from todo import open_host

    os.environ["COMFYUI_PATH"] = setting.comfyui
    where = open_host("default", setting.device.type != "cuda")
    use_device(setting.device)
    return where


def use_device(device: torch.device) -> None:
    """Have the open host compute on the device where it would not find it: the second one of the tests."""
    if device.type not in ("cpu", "cuda"):
        from graft_nodes.tests.second_device.comfyui import put_models_on

        put_models_on(device)
