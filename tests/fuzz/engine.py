"""Runs the cases of a target, watched from another process: what is not a documented refusal, hangs, grows or writes
elsewhere is a failure.

A case is drawn by hypothesis from bytes that (target, seed, number) give, so that these three replay it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .fence import Fence

PATIENCE = 10.0  # seconds of a processor that a case may take
SILENCE = 120.0  # seconds by the clock: a machine may have other work
START = 180.0  # seconds to get ready
GROWTH = 1 << 30  # bytes that one case may add to the most memory that was ever used
ENTROPY = 6000  # bytes a case is drawn from
ENOUGH = 5  # different failures, then a run ends


class Target:
    """What is fuzzed: how its cases look, and what it does with one.

    `attempt` returns when the case was of use and raises one of `refusals` when it was refused; every other exception
    is a failure. `sound` is called now and then: it raises AssertionError when something has changed that nothing may
    change.
    """

    name = ""
    night = 10_000  # cases of a night
    refusals: tuple[type[BaseException], ...] = (ValueError,)

    def __init__(self, place: Path) -> None:
        self.place = place

    def cases(self) -> st.SearchStrategy[Any]:
        """The cases."""
        raise NotImplementedError

    def attempt(self, case: Any) -> None:
        """One case."""
        raise NotImplementedError

    def sound(self) -> None:
        """Nothing has changed."""

    def close(self) -> None:
        """The end."""


@dataclass
class Report:
    """What became of a target's cases."""

    target: str
    seed: int
    ran: int = 0
    used: int = 0
    refused: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def line(self) -> str:
        """One line of the table."""
        return (
            f"| {self.target} | {self.ran:,} | {self.used:,} | {self.refused:,} | {len(self.failures)} | "
            f"{self.ran / max(self.seconds, 1e-9):,.0f} |"
        )


def replay(target: str, seed: int, number: int) -> str:
    """The command that runs one case again."""
    return f"python dev.py fuzz {target} --seed {seed} --case {number}"


class Runner:
    """Runs cases of one target in this process."""

    def __init__(self, kind: Callable[[Path], Target], seed: int, place: Path) -> None:
        self.inside = place / "inside"
        self.inside.mkdir()
        (place / "outside").write_bytes(b"nobody writes here")
        self.place, self.seed = place, seed
        self.target, self.fence = kind(self.inside), Fence(place / "inside")
        self.outcome: BaseException | None = None
        self.drawn = False
        self.case: Any = None

        @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(self.target.cases())
        def one(case: Any) -> None:
            self.drawn, self.case = True, case
            self._attempt(case)

        self.draw = one.hypothesis.fuzz_one_input  # type: ignore[attr-defined]

    def run(self, number: int) -> tuple[str, str]:
        """("used", "refused", "failed" or "" where the bytes made no case, what went wrong)."""
        self.drawn, self.outcome = False, None
        before = _most_memory()
        self.draw(random.Random(f"{self.target.name} {self.seed} {number}").randbytes(ENTROPY))
        if not self.drawn:
            return "", ""
        error = self.outcome
        if error is None or isinstance(error, self.target.refusals):
            wrong = self.fence.taken() or self._grown(before)
            return ("failed", wrong) if wrong else ("refused" if error else "used", "")
        return "failed", "".join(traceback.format_exception(error)[-12:])

    def _attempt(self, case: Any) -> None:
        try:
            with self.fence.up():
                self.target.attempt(case)
        except BaseException as error:  # every error is judged in `run`
            if isinstance(error, KeyboardInterrupt):
                raise
            self.outcome = error

    def _grown(self, before: int) -> str:
        grown = _most_memory() - before
        return f"the most memory in use grew by {grown >> 20} MiB" if grown > GROWTH else ""

    def sound(self) -> None:
        """Raise AssertionError when something changed that no case may change."""
        self.target.sound()
        assert sorted(os.listdir(self.place)) == ["inside", "outside"], (
            f"there is more beside the folder: {os.listdir(self.place)}"
        )
        assert (self.place / "outside").read_bytes() == b"nobody writes here"


def _most_memory() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def work(kind: Callable[[Path], Target], seed: int, cases: int, now: Any, answer: Any) -> None:
    """In a process of its own: run the cases, and send the report through `answer`; `now` shows the number of the case
    at work.
    """
    faulthandler.enable()
    with contextlib.suppress(AttributeError, ValueError):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    with tempfile.TemporaryDirectory(prefix="graft-fuzz-") as folder:
        runner = Runner(kind, seed, Path(folder))
        report, known = Report(runner.target.name, seed), set[str]()
        number, begun = 0, time.perf_counter()
        while report.ran < cases and len(report.failures) < ENOUGH:
            now.value = number
            what, wrong = runner.run(number)
            report.ran += bool(what)
            report.used += what == "used"
            report.refused += what == "refused"
            if report.ran % 200 == 0 or report.ran == cases:
                try:
                    runner.sound()
                except AssertionError as error:
                    what, wrong = "failed", f"after this case or one of the 200 before: {error}"
            if what == "failed":
                kept = hashlib.sha256("".join(wrong.splitlines()[-5:]).encode()).hexdigest()
                if kept not in known:
                    known.add(kept)
                    report.failures.append(f"{replay(report.target, seed, number)}\n{wrong}")
            number += 1
        report.seconds = time.perf_counter() - begun
        runner.target.close()
        answer.send(report)


def watched(kind: Callable[[Path], Target], seed: int, cases: int, say: Callable[[str], object] = print) -> Report:
    """The report of a target whose cases run in another process; a crash or a hang there is a failure that names its
    case.
    """
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    now, (mine, theirs) = context.Value("q", -1), context.Pipe(False)
    process = context.Process(target=work, args=(kind, seed, cases, now, theirs), daemon=True)
    process.start()
    theirs.close()
    times = psutil.Process(process.pid).cpu_times
    at, since, told, before = -1, time.monotonic(), time.monotonic(), 0.0
    name = kind.name  # type: ignore[attr-defined]
    try:
        while not mine.poll(0.2):
            spent = sum(times()[:2])  # user's and system's
            if now.value != at:
                at, since, before = now.value, time.monotonic(), spent
            if time.monotonic() - told > 30:
                told = time.monotonic()
                say(f"{name}: case {at:,}")
            silent = time.monotonic() - since
            hung = silent > START
            if at >= 0:
                hung = spent - before > PATIENCE or silent > SILENCE
            if hung or not process.is_alive():
                if hung and hasattr(signal, "SIGUSR1"):
                    os.kill(process.pid or 0, signal.SIGUSR1)  # it says where it is
                    time.sleep(0.5)
                why = f"took longer than {PATIENCE:g} s of work, or {SILENCE:g} s by the clock"
                if not hung:
                    why = f"ended the process ({process.exitcode})"
                return Report(name, seed, at + 1, failures=[f"{replay(name, seed, at)}\n{why}"])
        return mine.recv()
    except EOFError:
        process.join()
        return Report(
            name,
            seed,
            now.value + 1,
            failures=[f"{replay(name, seed, now.value)}\nended the process ({process.exitcode})"],
        )
    finally:
        if process.is_alive():
            process.join(5)
        process.kill()
        process.join()


def replayed(kind: Callable[[Path], Target], seed: int, number: int) -> str:
    """Run one case here, and say what it was and what became of it."""
    with tempfile.TemporaryDirectory(prefix="graft-fuzz-") as folder:
        runner = Runner(kind, seed, Path(folder))
        begun = time.perf_counter()
        what, wrong = runner.run(number)
        runner.target.close()
        said = repr(runner.case)
        shown = said if len(said) < 4000 else f"{said[:4000]} … ({len(said)} characters)"
        error = f"{type(runner.outcome).__name__}: {runner.outcome}" if runner.outcome else ""
        return f"case: {shown}\n{what or 'no case'} in {time.perf_counter() - begun:.3f} s {error[:2000]}\n{wrong}"
