"""The process of one part: runs its cases in order and writes each event as a line of JSON.

An error ends the process, as a CUDA error makes it useless: the command names the case and starts another process for
those that are left.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from device_timer import peak_mb, reset_peak

from .case import CannotRun, Case, CutShort, Row, Setting, device_named


class Events:
    """Writes events where the command reads them, each as soon as it happens."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", encoding="utf-8")

    def write(self, event: str, **values: Any) -> None:
        """Append one event."""
        self.file.write(json.dumps({"event": event, **values}) + "\n")
        self.file.flush()


def about(device: torch.device) -> dict[str, Any]:
    """The device and the software, for the head of the table."""
    facts: dict[str, Any] = {"device": str(device), "torch": torch.__version__, "python": sys.executable}
    facts["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        memory = torch.cuda.get_device_properties(device).total_memory
        facts["device"] = f"{torch.cuda.get_device_name(device)} ({major}.{minor}), {memory / 2**30:.0f} GiB"
        facts["devices"] = torch.cuda.device_count()
        facts["cuda"] = torch.version.cuda or f"ROCm {torch.version.hip}"
    return facts


def run(cases: list[Case], events: Events, setting: Setting, finished: set[str]) -> None:
    """Run the cases that are not finished yet. Rows beyond their bounds fail a case, where the setting decides."""
    device = setting.device
    events.write("plan", cases=[case.name for case in cases])
    for case in cases:
        if case.name in finished:
            continue
        events.write("begin", case=case.name)
        start = time.monotonic()
        reset_peak(device)
        broken = []
        try:
            for found in case.run():
                events.write("row", case=case.name, row=found)
                if found["broken"]:
                    broken.append(f"{found['name']} is {in_words(found)}, expected {found['bound']}")
        except CannotRun as error:
            events.write("cannot", case=case.name, reason=str(error))
            continue
        except CutShort as error:
            events.write("cut", case=case.name, reason=str(error))
            continue
        assert not (broken and setting.decides), "; ".join(broken)
        events.write("end", case=case.name, seconds=time.monotonic() - start, peak_mb=peak_mb(device))


def in_words(found: Row) -> str:
    """The number of a row that its bound is for."""
    if found["ratio"] is not None:
        return f"{found['ratio']:.3g}"
    return f"{found['value']:.4g} {found['unit']}".strip()


def main(arguments: list[str]) -> None:
    """Run one part, or say what the device is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("events", type=Path)
    parser.add_argument("--module", default="")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--comfyui", default="")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--finished", nargs="*", default=[])
    options = parser.parse_args(arguments)
    events = Events(options.events)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        events.write("no device", reason=f"the torch {torch.__version__} of {sys.executable} sees no CUDA device")
        return
    device = device_named(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not options.module:
        events.write("about", facts=about(device))
        return
    setting = Setting(device, options.tiny, options.comfyui, time.monotonic() + options.seconds)
    part = importlib.import_module(options.module)
    run(part.cases(setting), events, setting, set(options.finished))


if __name__ == "__main__":
    main(sys.argv[1:])
