"""Tries changes in a copy of the tree: the nearest tests first, then the quick tier, then the whole suite, each with a
limit of time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..nearest_tests import WITH_COMFYUI, nearest_tests
from .changes import Change

PACKAGE = "graft_nodes"  # the name by which tests import the tree
# The stages in their order, and pytest's marks for each; the nearest tests are named by the change's file.
MARKS = {"nearest": "not long", "quick": "not slow and not long", "whole": "not long and not browser"}
STAGES = tuple(MARKS)
# They read the product's source: a changed line may be too long for them, which says nothing of what it does.
READERS = (
    "tests/test_import_circles.py",
    "tests/test_imports.py",
    "tests/test_mirror.py",
    "tests/test_private_names.py",
    "tests/test_readability.py",
)
LEAST_SECONDS, TIMES = 30.0, 4.0  # the limit of a run: this much, and so many times what it takes without a change
FIRST_SECONDS = 240.0  # of the nearest tests, before anyone knows what they take without a change
MOST_SECONDS = 3600.0  # of a run without a change
MOST_MEMORY = 16 << 30  # bytes of a process, where the system can limit them
NOT_FOUND, NO_TESTS = 4, 5  # pytest's exit statuses
_FAILURE = re.compile(r"(?:FAILED|ERROR) (\S+\.py.*?)(?: - .*)?$")  # and no line of a log


@dataclass(frozen=True)
class Ran:
    """How a run of pytest ended: `status` is None when it took too long."""

    status: int | None
    seconds: float
    output: str

    @property
    def passed(self) -> bool:
        return self.status in (0, NO_TESTS)

    @property
    def failing_test(self) -> str | None:
        """The first failing test, or the file that could not be imported, as pytest names it."""
        for line in self._lines():
            named = _FAILURE.match(line)
            if named is not None:
                return named[1]
        return None

    @property
    def first_failure(self) -> str:
        """The failing test, or the last line that pytest printed."""
        return self.failing_test or (self._lines() or ["no output"])[-1]

    def _lines(self) -> list[str]:
        return [line.strip() for line in self.output.splitlines() if line.strip()]


@dataclass(frozen=True)
class Verdict:
    """What noticed a change: a stage, "time" (in a stage), or nothing: "survived" the last `stage`; or "untried" with
    the reason.
    """

    file: PurePosixPath
    change: Change
    by: str
    detail: str = ""
    stage: str = ""

    @property
    def noticed(self) -> bool:
        return self.by in (*STAGES, "time")

    def __str__(self) -> str:
        line = f"{self.by:8}  {self.file}:{self.change.line}  {self.change}"
        if self.detail:
            line += f"  [{self.detail}]"
        return line


class Copy:
    """A copy of the tree's tracked and new files, in which one change at a time is tried."""

    def __init__(self, root: Path, place: Path) -> None:
        self.root = place / PACKAGE
        self.place = place
        (place / "tmp").mkdir(parents=True)
        for name in _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
            if name and (root / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.root / name)
        _git(self.root, "init", "--quiet")
        _git(self.root, "add", "--all")  # some tests ask git which files there are

    @contextlib.contextmanager
    def changed(self, file: PurePosixPath, change: Change) -> Iterator[None]:
        """The copy with this change."""
        source = (self.root / file).read_bytes()
        self._write(file, change.applied(source))
        try:
            yield
        finally:
            self._write(file, source)

    def _write(self, file: PurePosixPath, source: bytes) -> None:
        path = self.root / file
        path.write_bytes(source)
        # Python takes a compiled file for fresh by the second and the size of its source.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def run(self, marks: str, tests: list[str], limit: float) -> Ran:
        """Run tests, up to the first failure."""
        options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={self.place / 'tests'}", "-m", marks]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        output = self.place / "output"
        start = time.monotonic()
        with open(output, "wb") as file:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            _limit_memory(process.pid)
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process)
        seconds = time.monotonic() - start
        return Ran(status, seconds, output.read_text(encoding="utf-8", errors="replace"))

    def environment(self) -> dict[str, str]:
        """The variables for a run: Python finds the copy in front of the installed package, in one thread."""
        settings = {"PYTHONPATH": str(self.place), "TMPDIR": str(self.place / "tmp")}
        return {**os.environ, **settings, "OMP_NUM_THREADS": "1", "GRAFT_TEST_THREADS": "1"}

    def is_found(self) -> bool:
        """Whether Python finds the copy under the package's name."""
        code = f"import importlib.util; print(importlib.util.find_spec({PACKAGE!r}).origin)"
        command = [sys.executable, "-c", code]
        answer = subprocess.run(command, cwd=self.place, env=self.environment(), capture_output=True, text=True)
        return answer.stdout.strip() == str(self.root / "__init__.py")


class Trials:
    """Tries changes; what the tests do without a change is measured once for all copies."""

    def __init__(self, root: Path, until: str) -> None:
        self.root = root
        self.stages = STAGES[: STAGES.index(until) + 1]
        self.unchanged: dict[tuple[str, ...], Ran] = {}
        self.lock = threading.Lock()

    def try_change(self, copy: Copy, file: PurePosixPath, change: Change, survived: str = "") -> Verdict:
        """What noticed the change, in this copy; the stages up to `survived` did not."""
        begin = 0
        if survived:
            begin = STAGES.index(survived) + 1
        for stage in self.stages[begin:]:
            tests = self._tests(stage, file)
            if not tests:
                continue
            ran = self._changed(copy, file, change, stage, tests)
            if ran.passed:
                continue
            before = self._failed_without(copy, MARKS[stage], tests, ran.failing_test)
            if not before.passed:
                return Verdict(file, change, "untried", f"without a change: {before.first_failure}", stage)
            if ran.status is None:
                return Verdict(file, change, "time", f"after {ran.seconds:.0f} s of {stage}", stage)
            return Verdict(file, change, stage, ran.first_failure, stage)
        return Verdict(file, change, "survived", "", self.stages[-1])

    def _changed(self, copy: Copy, file: PurePosixPath, change: Change, stage: str, tests: list[str]) -> Ran:
        """How a stage's tests end with the change. What the nearest tests take without it is measured only when they
        seem to have no end: most changes end them long before.
        """
        marks = MARKS[stage]
        if stage == "nearest":
            with copy.changed(file, change):
                ran = copy.run(marks, tests, FIRST_SECONDS)
            if ran.status is not None:
                return ran
        before = self.without_change(copy, marks, tests)
        limit = LEAST_SECONDS + TIMES * before.seconds
        if stage == "nearest" and ran.seconds >= limit:
            return ran
        with copy.changed(file, change):
            return copy.run(marks, tests, limit)

    def _failed_without(self, copy: Copy, marks: str, tests: list[str], failed: str | None) -> Ran:
        """How the test that failed ends without the change, or all of them when none was named."""
        if failed is not None:
            alone = self.without_change(copy, marks, [failed])
            if alone.status != NOT_FOUND:
                return alone
        return self.without_change(copy, marks, tests)

    def _tests(self, stage: str, file: PurePosixPath) -> list[str]:
        """pytest's arguments that name the tests of a stage."""
        if stage == "nearest":
            return [test for test in nearest_tests(self.root, file) if test not in READERS]
        return [f"--ignore={test}" for test in (*READERS, WITH_COMFYUI)]

    def without_change(self, copy: Copy, marks: str, tests: list[str]) -> Ran:
        """How the tests end without a change; copies that ask for it at the same time wait for one."""
        key = (marks, *tests)
        with self.lock:
            if key not in self.unchanged:
                self.unchanged[key] = copy.run(marks, tests, MOST_SECONDS)
            return self.unchanged[key]


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


def _limit_memory(process: int) -> None:
    """A change may ask for endless memory: that ends its own process and no other."""
    if importlib.util.find_spec("resource") is None:  # Windows
        return
    import resource

    if hasattr(resource, "prlimit"):
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process, resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run and everything that it started."""
    if os.name == "nt":
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
