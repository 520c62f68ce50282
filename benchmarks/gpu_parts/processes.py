"""Runs a part in processes of its own, within its time, and reads what they say. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .registry import Part

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
LEAST_SECONDS = 3.0  # with less, no other process is started
START_SECONDS = 120.0  # for torch to start on the device
ERROR_LINES = 30  # of a traceback, in the JSON file

# How a case or a part ended.
BEGUN, DONE, CANNOT, FAILED, CUT = "begun", "done", "not on this device", "FAILED", "cut"


@dataclass
class CaseResult:
    """How one case ended: `reason` says why if it is not done."""

    name: str
    status: str = CUT
    reason: str = ""
    seconds: float = 0.0
    peak_mb: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""  # the end of the traceback


@dataclass
class PartResult:
    """A part's cases, how long it took and how long it might have taken."""

    name: str
    title: str
    seconds: float
    limit: float
    cases: list[CaseResult]

    @property
    def status(self) -> str:
        """FAILED if any case failed, else cut if any was cut, else done if any was."""
        found = {case.status for case in self.cases}
        return next((status for status in (FAILED, CUT, DONE) if status in found), CANNOT)

    def as_json(self) -> dict[str, Any]:
        """For the JSON file."""
        return {**asdict(self), "status": self.status}


@dataclass(frozen=True)
class Options:
    """What the command was asked for, as far as a part's process must know it."""

    device: str
    tiny: bool
    comfyui: str
    folder: Path


@dataclass(frozen=True)
class Ended:
    """How a process ended: `in_time` is False if it was stopped."""

    status: int
    in_time: bool
    log: Path


def ask_about(options: Options) -> dict[str, Any]:
    """What the device is, from a process of its own; {"reason": …} when there is none."""
    events = options.folder / "about.jsonl"
    for path in (events, events.with_suffix(".log")):
        path.unlink(missing_ok=True)
    ended = start(["--device", options.device], events, options, {}, START_SECONDS)
    found = read_events(events)
    if not found:
        return {"reason": f"torch did not start in {sys.executable}: {last_line(ended.log)}"}
    return found[-1].get("facts", found[-1])


def run_part(part: Part, options: Options, limit: float) -> PartResult:
    """Run a part's cases within its time. After a failed case another process goes on with those that are left."""
    begun = time.monotonic()
    events = options.folder / f"{part.name}.jsonl"
    for path in (events, events.with_suffix(".log")):
        path.unlink(missing_ok=True)
    cases: dict[str, CaseResult] = {}
    failed: dict[str, CaseResult] = {}
    while not cases or unfinished(cases):
        left = limit - (time.monotonic() - begun)
        if cases and left < LEAST_SECONDS:
            break
        waiting = [case.name for case in unfinished(cases)]
        ended = start(part_arguments(part, options, left, cases), events, options, part.environment, left)
        cases = read_cases(read_events(events)) | failed
        failed.update(failures(cases, ended, limit))
        cases.update(failed)
        if [case.name for case in unfinished(cases)] == waiting:
            break
    for case in unfinished(cases):
        case.reason = f"the part's {limit:.0f} s were over"
    return PartResult(part.name, part.title, time.monotonic() - begun, limit, list(cases.values()))


def part_arguments(part: Part, options: Options, left: float, cases: Mapping[str, CaseResult]) -> list[str]:
    """The command line of a part's next process."""
    arguments = ["--module", part.module, "--device", options.device, "--seconds", str(left)]
    if options.tiny:
        arguments.append("--tiny")
    if options.comfyui:
        arguments += ["--comfyui", options.comfyui]
    waiting = unfinished(cases)
    return [*arguments, "--finished", *(name for name, case in cases.items() if case not in waiting)]


def unfinished(cases: Mapping[str, CaseResult]) -> list[CaseResult]:
    """Cases that have not begun."""
    return [case for case in cases.values() if case.status == CUT and not case.reason]


def failures(cases: Mapping[str, CaseResult], ended: Ended, limit: float) -> dict[str, CaseResult]:
    """The case in which a process died or was stopped; if it was none, the process itself."""
    reason = last_line(ended.log)
    if not ended.in_time:
        reason = f"it was still running when the part's {limit:.0f} s were over"
    for name, case in cases.items():
        if case.status == BEGUN:
            return {name: replace(case, status=FAILED, reason=reason, error=last_lines(ended.log))}
    if ended.status and (ended.in_time or not cases):
        name = "the process itself"
        return {name: CaseResult(name, FAILED, reason, error=last_lines(ended.log))}
    return {}


# --- a process --------------------------------------------------------------------------------------------------------


def start(arguments: Sequence[str], events: Path, options: Options, more: Mapping[str, str], seconds: float) -> Ended:
    """Run a process of a part for at most so many seconds; then it and those that it started are stopped."""
    log = events.with_suffix(".log")
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpu_parts.child", str(events), *arguments],
            cwd=BENCHMARKS,  # in the root, `ema` and `training` would be the packages of Graft
            env=environment(options, more),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return Ended(process.wait(seconds), True, log)
        except subprocess.TimeoutExpired:
            return Ended(1, False, log)
        finally:
            stop(process)


def stop(process: subprocess.Popen) -> None:
    """End a process and all that it started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # none of them is left
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        process.kill()
    process.wait()


def environment(options: Options, more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a part's process: it finds this checkout as `graft_nodes`, installed or not."""
    found = {**os.environ, **more, "PYTHONUNBUFFERED": "1"}
    paths = [str(BENCHMARKS), str(package_folder(options.folder)), found.get("PYTHONPATH", "")]
    found["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if not options.device.startswith("cuda"):
        found["CUDA_VISIBLE_DEVICES"] = ""
    if options.tiny:
        found.setdefault("OMP_NUM_THREADS", "1")  # several would wait for each other longer than they compute
    return found


def package_folder(folder: Path) -> Path:
    """A folder in which this checkout is called `graft_nodes`, the name that Graft is installed by."""
    link = folder / "package" / "graft_nodes"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(ROOT, target_is_directory=True)
    return link.parent


# --- what it said -----------------------------------------------------------------------------------------------------


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events that a part's processes have written so far."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # a process may be stopped within a line


def read_cases(events: Sequence[Mapping[str, Any]]) -> dict[str, CaseResult]:
    """The cases by name, from the events of all of a part's processes."""
    cases: dict[str, CaseResult] = {}
    for event in events:
        if event["event"] == "plan":
            cases.update({name: CaseResult(name) for name in event["cases"] if name not in cases})
        elif "case" in event:
            _read_event(cases[event["case"]], event)
    return cases


def _read_event(case: CaseResult, event: Mapping[str, Any]) -> None:
    kind = event["event"]
    if kind == "row":
        case.rows.append(event["row"])
        return
    case.status = {"begin": BEGUN, "cannot": CANNOT, "cut": CUT, "end": DONE}[kind]
    case.reason = event.get("reason", "")
    case.seconds = event.get("seconds", 0.0)
    case.peak_mb = event.get("peak_mb", 0.0)


def last_lines(log: Path) -> str:
    """The end of what a process printed."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-ERROR_LINES:])


def last_line(log: Path) -> str:
    """The error at the end of what a process printed: its last line that is not indented."""
    lines = [line for line in last_lines(log).splitlines() if line.strip() and not line[0].isspace()]
    return next(reversed(lines), "it printed nothing")[:500]


def limits(shares: Sequence[float], total: float) -> Iterator[float]:
    """Each part's seconds, worked out when it begins: its share of the time that is left then."""
    begun = time.monotonic()
    for number, share in enumerate(shares):
        left = total - (time.monotonic() - begun)
        yield max(0.0, left) * share / sum(shares[number:])
