"""python dev.py mutate [--count N] [--seed S] [PATH …]: change the product's code at random places, one change at a
time, and see which changes fail no test.

Cosmic Ray makes the changes and runs the tests, in a clone of the last commit in build/mutation: commit first. Each
change is tried by the tests nearest to its file (tests/nearest_tests.py). What they do not notice is listed: it needs
a test, or the code is not needed. --resume goes on with what a call that was broken off has left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from cosmic_ray import plugins
from cosmic_ray.commands.init import init
from cosmic_ray.modules import find_modules
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.testing import run_tests
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkItem, WorkResult

from ..nearest_tests import nearest_tests
from .operators import Provider

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("settings", "storage", "patches", "ema", "training", "host", "nodes", "headless", "demo")
# They read the product's source: a changed line may be too long for them, which says nothing of what it does.
READERS = ("tests/test_import_circles.py", "tests/test_imports.py", "tests/test_private_names.py")
LEAST_SECONDS, TIMES = 30.0, 4.0  # the limit of a run: this much, and so many times what it takes without a change
MOST_SECONDS = 1800.0  # of a run without a change

plugins.OPERATOR_PROVIDERS = {"graft": Provider()}


def clone(root: Path, folder: Path) -> Path:
    """The last commit of a repository in a new folder, by the name that tests import it by."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", str(root), str(folder / "graft_nodes")], check=True)
    return folder / "graft_nodes"


def draw(items: list[WorkItem], count: int, seed: int) -> list[WorkItem]:
    """`count` changes at as many places, the same for the same seed and code."""
    places: dict[tuple[str, object, object], list[WorkItem]] = {}
    for item in sorted(items, key=lambda item: sort_key(item.mutations[0])):
        change = item.mutations[0]
        places.setdefault((str(change.module_path), change.start_pos, change.end_pos), []).append(item)
    chance = random.Random(seed)
    return [chance.choice(places[place]) for place in chance.sample(list(places), min(count, len(places)))]


def sort_key(change: MutationSpec) -> tuple[str, object, str, int]:
    return str(change.module_path), change.start_pos, change.operator_name, change.occurrence


def begin(paths: list[str], count: int, seed: int, session: Path) -> None:
    """Draw changes of the files below these paths of the working folder, and write them into a session."""
    with use_db(session.with_name("all.sqlite")) as everything:
        init(sorted(find_modules(map(Path, paths))), everything, {})
        items = draw(list(everything.work_items), count, seed)
    with use_db(session) as work:
        work.add_work_items(items)


class Tests:
    """Runs the tests nearest to a file of the working folder."""

    def __init__(self) -> None:
        self.unchanged: dict[str, tuple[TestOutcome, float]] = {}

    def command(self, file: Path) -> str:
        tests = [test for test in nearest_tests(Path(), PurePosixPath(file.as_posix())) if test not in READERS]
        options = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not long and not browser")
        return shlex.join([sys.executable, "-m", "pytest", *options, *tests])

    def try_change(self, item: WorkItem) -> WorkResult | None:
        """What became of a change; None where its tests fail, or do not end, without it."""
        command = self.command(item.mutations[0].module_path)
        if command not in self.unchanged:
            start = time.monotonic()
            outcome, _ = run_tests(command, MOST_SECONDS)
            self.unchanged[command] = outcome, time.monotonic() - start
        outcome, seconds = self.unchanged[command]
        if outcome != TestOutcome.SURVIVED:
            return None
        return mutate_and_test(item.mutations, command, LEAST_SECONDS + TIMES * seconds)


def try_pending(work: WorkDB, say: Callable[[str], None]) -> None:
    """Try what a session has left, and note what became of it."""
    tests = Tests()
    pending = sorted(work.pending_work_items, key=lambda item: sort_key(item.mutations[0]))
    for number, item in enumerate(pending, 1):
        result = tests.try_change(item)
        if result is not None:
            work.set_result(item.job_id, result)
        say(f"{number:4} of {len(pending)}  {verdict(result):9}  {described(item)}")


def verdict(result: WorkResult | None) -> str:
    if result is None:
        return "untried"
    return "noticed" if result.is_killed else "survived"


def described(item: WorkItem) -> str:
    change = item.mutations[0]
    return f"{change.module_path.as_posix()}:{change.start_pos[0]}  {change.operator_name.removeprefix('graft/')}"


def summary(work: WorkDB) -> str:
    """How many changes a test noticed, and the others as they were made."""
    tried = sorted(work.completed_work_items, key=lambda pair: sort_key(pair[0].mutations[0]))
    survived = [(item, result) for item, result in tried if not result.is_killed]
    lines = [f"{len(tried) - len(survived)} of {len(tried)} changes were noticed"]
    lines += [f"survived  {described(item)}\n{result.diff}" for item, result in survived]
    untried = [described(item) for item in work.pending_work_items]
    lines += [f"untried, for its tests fail without it: {place}" for place in sorted(untried)]
    return "\n".join(lines)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a clone, which Python finds in front of the installed package, on one core."""
    before, environment = Path.cwd(), dict(os.environ)
    os.chdir(folder)
    os.environ.update(PYTHONPATH=str(folder.parent), OMP_NUM_THREADS="1", GRAFT_TEST_THREADS="1")
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Run; 0 when every change was noticed."""
    parser = argparse.ArgumentParser(prog="python dev.py mutate", description=__doc__)
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"files or folders (default: {', '.join(PACKAGES)})")
    parser.add_argument("--count", type=int, default=100, help="how many changes (default: 100)")
    parser.add_argument("--seed", type=int, help="what the changes are drawn from (default: a new one)")
    parser.add_argument("--resume", action="store_true", help="go on with the changes of the call before")
    given = parser.parse_args(arguments)
    folder = root / "build" / "mutation"
    session = folder / "session.sqlite"
    if given.resume and not session.exists():
        parser.error(f"--resume: expected the session of a call before, in {session}")
    paths = given.paths or [name for name in PACKAGES if (root / name).exists()]
    for path in paths:
        if not (root / path).exists():
            parser.error(f"{path}: expected a file or a folder of the repository")
    if not given.resume:
        seed = secrets.randbelow(2**32) if given.seed is None else given.seed
        with inside(clone(root, folder)):
            begin(paths, given.count, seed, session)
        print(f"seed {seed}", flush=True)
    with inside(folder / "graft_nodes"), use_db(session) as work:
        try_pending(work, lambda line: print(line, flush=True))
        print(summary(work))
        return int(any(not result.is_killed for _, result in work.results) or bool(work.pending_work_items))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
