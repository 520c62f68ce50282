"""python dev.py mutate [--count N] [--seed S] [PATH …]: change the product's code at random places, one change at a
time, and see whether a test fails.

Each change is tried in a copy of the tree: by the tests nearest to its file, then by the quick tier, then by the whole
suite (but for its long tests and the browser's); --until ends earlier. What no test notices is listed: it needs a test,
or the code is not needed. With --json FILE the next call goes on where this one ended, also with a later --until.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import queue
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path, PurePosixPath

from .changes import Change, changes, is_python
from .record import Record, is_final
from .trials import STAGES, Copy, Trials, Verdict

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("settings", "storage", "patches", "ema", "training", "host", "nodes", "headless", "demo")
Place = tuple[PurePosixPath, Change]


def product_files(root: Path, paths: list[str]) -> list[PurePosixPath]:
    """The Python files that the paths name. Raises ValueError for a path without any."""
    files: set[PurePosixPath] = set()
    for path in paths:
        full = (root / path).resolve()
        found = [full]
        if full.is_dir():
            found = sorted(full.rglob("*.py"))
        if not found or not all(file.is_file() and file.is_relative_to(root) for file in found):
            raise ValueError(f"{path}: expected a Python file or a folder of the repository")
        files.update(PurePosixPath(file.relative_to(root).as_posix()) for file in found)
    return sorted(files)


def drawn(root: Path, files: list[PurePosixPath], count: int, seed: int) -> list[Place]:
    """`count` changes of these files; the same for the same seed, but for the code that was written anew."""
    sources = {file: (root / file).read_bytes() for file in files}
    places = [(file, change) for file, source in sources.items() for change in changes(source)]
    places.sort(key=lambda place: _lot(seed, *place))
    kept: list[Place] = []
    for file, change in places:
        if len(kept) == count:
            break
        if is_python(change.applied(sources[file])):
            kept.append((file, change))
    return kept


def _lot(seed: int, file: PurePosixPath, change: Change) -> str:
    """What decides when a change is drawn: nothing of it changes with the rest of the code."""
    text = f"{seed} {file} {change.nth} {change.before} -> {change.after}"
    return hashlib.sha256(text.encode()).hexdigest()


def tried(
    root: Path, places: list[Place], jobs: int, until: str, survived: dict[Place, str] | None = None
) -> Iterator[Verdict]:
    """The verdict on each change, as they come, from so many copies at once. `survived` are the stages that changes
    have survived before.
    """
    trials = Trials(root, until)
    before = survived or {}
    with tempfile.TemporaryDirectory(prefix="graft-mutate-") as folder, ThreadPoolExecutor(jobs) as pool:
        copies: queue.Queue[Copy] = queue.Queue()
        for number in range(jobs):
            copies.put(Copy(root, Path(folder) / str(number)))
        first = copies.queue[0]
        if not first.is_found():
            raise RuntimeError(f"Python does not find the copy in {first.place}: unset PYTHONSAFEPATH and PYTHONPATH")

        def work(file: PurePosixPath, change: Change) -> Verdict:
            copy = copies.get()
            try:
                return trials.try_change(copy, file, change, before.get((file, change), ""))
            finally:
                copies.put(copy)

        waiting = [pool.submit(work, file, change) for file, change in places]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def summary(verdicts: list[Verdict]) -> str:
    """How many changes ended in a failing test, and those that did not."""
    counts = Counter(verdict.by for verdict in verdicts)
    lines = [f"{name} {counts[name]}" for name in (*STAGES, "time", "survived", "untried") if counts[name]]
    noticed = sum(verdict.noticed for verdict in verdicts)
    text = [f"{noticed} of {len(verdicts)} changes were noticed ({', '.join(lines)})"]
    missed = [verdict for verdict in verdicts if not verdict.noticed]
    text += [str(verdict) for verdict in sorted(missed, key=lambda one: (one.file, one.change.start))]
    return "\n".join(text)


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Run; 0 when every change was noticed."""
    parser = argparse.ArgumentParser(prog="python dev.py mutate", description=__doc__)
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"files or folders (default: {', '.join(PACKAGES)})")
    parser.add_argument("--count", type=int, default=100, help="how many changes (default: 100)")
    parser.add_argument("--seed", type=int, help="what the changes are drawn from (default: a new one)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at once (default: one a core)")
    parser.add_argument(
        "--until", choices=STAGES, default=STAGES[-1], help=f"the last tests to run (default: {STAGES[-1]})"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="add the verdicts to this file; leave out what is in it"
    )
    parser.add_argument("--again", action="store_true", help="with --json: try again what no test noticed")
    parser.add_argument("--list", action="store_true", help="only list the changes")
    given = parser.parse_args(arguments)
    if given.count < 1 or given.jobs < 1:
        parser.error("--count and --jobs: expected 1 or more")
    if given.again and given.json is None:
        parser.error("--again: expected --json FILE, which says what no test noticed")
    seed = given.seed
    if seed is None:
        seed = secrets.randbelow(2**32)
    try:
        files = product_files(root, given.paths or [name for name in PACKAGES if (root / name).exists()])
    except ValueError as error:
        parser.error(str(error))
    places = drawn(root, files, given.count, seed)
    print(f"seed {seed}: {len(places)} changes in {len(files)} files", flush=True)
    if given.list:
        print("\n".join(f"{file}:{change.line}  {change}" for file, change in places))
        return 0
    verdicts: list[Verdict] = []
    survived: dict[Place, str] = {}
    record = None
    if given.json is not None:
        record = Record(given.json)
        earlier = record.verdicts(places)
        if given.again:
            earlier = [verdict for verdict in earlier if verdict.noticed]
        verdicts = [verdict for verdict in earlier if is_final(verdict, given.until)]
        survived = {(one.file, one.change): one.stage for one in earlier if one.by == "survived"}
        known = {(verdict.file, verdict.change) for verdict in verdicts}
        places = [place for place in places if place not in known]
        print(f"{len(verdicts)} were tried before, in {given.json}", flush=True)
    for verdict in tried(root, places, given.jobs, given.until, survived):
        verdicts.append(verdict)
        if record is not None:
            record.add(verdict)
        print(f"{len(verdicts):4}  {verdict}", flush=True)
    print(summary(verdicts))
    return int(not all(verdict.noticed for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
