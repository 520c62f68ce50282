"""What a part is made of: cases that give rows, and what they are told about the device and the host."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterable
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


@dataclass(frozen=True)
class Case:
    """One check or measurement; `run` gives rows as they come. It raises AssertionError for a wrong result, CannotRun
    or CutShort.
    """

    name: str
    run: Callable[[], Iterable[Row]]


def row(name: str, value: float, unit: str, ratio: float | None = None, note: str = "") -> Row:
    """A line of the table. `ratio` compares with something that `note` or the name says."""
    return {"name": name, "value": value, "unit": unit, "ratio": ratio, "note": note}


def noted(rows: Iterable[Row], note: str) -> list[Row]:
    """Rows of the benchmarks with a note: what was checked, and how closely."""
    return [{**found, "note": note} for found in rows]


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


def open_host(setting: Setting) -> str:
    """Open the ComfyUI checkout or the embedded host; says which."""
    from todo import open_host

    os.environ["COMFYUI_PATH"] = setting.comfyui
    where = open_host("default", setting.device.type == "cpu")
    use_device(setting.device)
    return where


def use_device(device: torch.device) -> None:
    """Have the open host compute on the device where it would not find it: the second one of the tests."""
    if device.type not in ("cpu", "cuda"):
        import comfy.model_management

        comfy.model_management.get_torch_device = lambda: device
