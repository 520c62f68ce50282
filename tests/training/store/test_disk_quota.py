"""Disk use of all runs together: the longest unused goes first, what the run at hand needs stays, and it is said."""

import contextlib
import os
import time
from functools import partial
from pathlib import Path

import pytest
from graft_nodes.storage import lock
from graft_nodes.storage.lock import folder_lock
from graft_nodes.tests.storage.vanishing import remove_after_listing
from graft_nodes.training.reports import text
from graft_nodes.training.run import call as runs
from graft_nodes.training.run.loop import Callbacks
from graft_nodes.training.state import equal
from graft_nodes.training.store import disk_quota
from graft_nodes.training.store.disk_quota import StoredFiles, choose_removals
from graft_nodes.training.store.store import Store, load, read_record


class Bench:
    """Runs of one model in one folder of results; `run` trains the run of that name with a limit of so many bytes."""

    def __init__(self, lab, folder):
        self.folder, self.denoiser, self.dataset = folder, lab.Flow(), lab.pictures(held_out=[9])
        self.begun = partial(lab.state, self.denoiser, self.dataset, ema=False)

    def run(self, name, steps, limit=0, keep="last", seed=3, **settings):
        store = Store(self.folder, name, {}, limit)
        callbacks = Callbacks(**{"validate_every": 0, "snapshot_every": 0, **settings})
        return runs.run(
            self.begun(seed=seed),
            steps,
            lambda: contextlib.nullcontext(self.denoiser),
            self.dataset,
            store,
            callbacks,
            keep,
        )

    def size(self):
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def age(self, folder, seconds):
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            changed = path.stat().st_mtime - seconds
            os.utime(path, (changed, changed))

    def states(self):
        return {path.parent for path in self.folder.rglob("state.json")}


@pytest.fixture
def bench(lab, tmp_path):
    return Bench(lab, tmp_path / "graft")


def test_the_longest_unused_result_goes_and_is_said(bench):
    first, second = bench.run("one", 2), bench.run("two", 3)
    bench.age(first.folder, 200)
    bench.age(second.folder, 100)
    limit = int(bench.size() * 1.4)
    third = bench.run("three", 2, limit)
    assert bench.states() == {second.folder, third.folder} and bench.size() <= limit
    assert any(
        "1 stored results that were unused for longest were removed" in note and f"one/{first.folder.name}" in note
        for note in third.notes
    )
    assert not first.folder.exists() and not (bench.folder / "one").exists()
    again = bench.run("one", 2)
    assert again.trained == 2 and equal(again.state, first.state)  # it is trained again when it is wanted again


def test_what_is_used_again_stays(bench):
    first, second = bench.run("one", 2), bench.run("two", 2, seed=4)
    for one, seconds in ((first, 200), (second, 100)):
        bench.age(one.folder, seconds)
    assert bench.run("one", 2).trained == 0  # used now
    bench.run("three", 2, int(bench.size() * 1.4), seed=5)
    assert first.folder.exists() and not second.folder.exists()


def seed_of(folder):
    """The seed of the run that a state is of."""
    return read_record(folder)["begun_from"]["seed"]


def test_every_snapshot_within_a_limit_keeps_the_latest_the_best_and_the_result(bench):
    size = bench.run("sizes", 1)
    one = sum(path.stat().st_size for path in size.folder.iterdir())
    limit = bench.size() + int(3.5 * one)
    done = bench.run("run", 8, limit, "every", seed=4, snapshot_every=1, validate_every=3)
    assert done.trained == 8 and bench.size() <= limit
    assert (done.folder / "state.json").is_file() and done.best is not None and (done.best / "state.json").is_file()
    assert done.used.limit == limit and done.used.every == bench.size() and done.notes
    for folder in bench.states():
        load(folder, bench.begun(seed=seed_of(folder)))  # what is left is whole


def test_a_limit_that_is_too_small_for_one_run_keeps_what_it_needs_and_says_so(bench):
    before = bench.run("old", 1)
    done = bench.run("run", 4, 10, seed=4)
    assert not before.folder.exists() and bench.states() == {done.folder}
    assert "over the limit because this run or unfinished ones need the space" in text.disk_use(done.used)
    assert "without a limit" in text.disk_use(bench.run("run", 4, 0, seed=4).used)


def test_an_unfinished_run_stays_for_a_day_and_then_goes_last(bench):
    def stepped(step, moved, validation):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run("broken", 6, on_step=stepped)
    (partial,) = bench.states()
    bench.age(partial, 3600)
    bench.run("other", 1, 10, seed=4)
    assert partial in bench.states()
    bench.age(partial, 30 * 3600)
    last = bench.run("third", 1, 10, seed=5)
    assert bench.states() == {last.folder}


def test_leftovers_of_a_crash_and_averages_without_a_run_go_too(bench):
    first = bench.run("one", 1)
    orphan, averages = (
        bench.folder / "two" / "abc" / "state.safetensors",
        bench.folder / "three" / "averages" / "x.safetensors",
    )
    own, cache = bench.folder / "three" / "notes.txt", bench.folder / "cache" / "latents" / "x.safetensors"
    for path in (orphan, averages, own, cache):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 10)
        bench.age(path.parent, 2 * 3600)
    bench.age(first.folder, 2 * 3600)
    bench.run("four", 1, 10, seed=4)
    assert not orphan.exists() and not averages.parent.exists() and not first.folder.exists()
    assert own.exists() and cache.exists()  # nobody's but the user's, and not of the runs


def _held(name, kind, size, age):
    return StoredFiles(Path(name), kind, (Path(name) / "state.json",), size, 1e6 - age)


def test_the_order_and_how_much():
    found = [
        _held("new", "state", 10, 5),
        _held("old", "state", 10, 500),
        _held("left", "orphan", 10, 2 * 3600),
        _held("young", "orphan", 10, 60),
        _held("writing", "partial", 10, 60),
        _held("given up", "partial", 10, 48 * 3600),
    ]

    def names(excess, needed=()):
        return [str(one.folder) for one in choose_removals(found, excess, {Path(name) for name in needed}, 1e6)]

    assert names(0) == [] and names(1) == ["left"] and names(11) == ["left", "old"]
    assert names(1000) == ["left", "old", "new", "given up"]
    assert names(11, ["old", "left"]) == ["new", "given up"]


def test_making_room_while_another_process_does_too(bench, monkeypatch):
    first = bench.run("one", 2)
    found, total = disk_quota.stored_files(bench.folder)
    for path in first.folder.iterdir():
        path.unlink()
    monkeypatch.setattr(disk_quota, "stored_files", lambda root: (found, total))
    done = bench.run("two", 1, 10, seed=4)
    assert bench.states() == {done.folder}


def test_what_cannot_be_removed_stays_and_training_goes_on(bench, monkeypatch):
    first = bench.run("one", 2)
    real = Path.unlink

    def held_open(path, missing_ok=False):
        if path.parent == first.folder:
            raise PermissionError(13, "used by another process", str(path))
        return real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", held_open)
    done = bench.run("two", 1, 10, seed=4)
    assert bench.states() == {first.folder, done.folder} and done.used.every > 10
    assert [note for note in done.notes if "is planned for" not in note] == []


def test_a_run_that_another_process_works_in_keeps_everything(bench):
    first = bench.run("one", 2)
    lock = bench.folder / ".one.lock"
    lock.touch()
    bench.run("two", 1, 10, seed=4)
    assert first.folder.exists()
    os.utime(lock, (0, 0))  # one that a killed process left
    bench.run("three", 1, 10, seed=5)
    assert not first.folder.exists()


@pytest.mark.parametrize("now", [0.0, 4e9], ids=["1970", "2096"])
def test_a_run_that_another_process_works_in_stays_though_the_clock_jumps(bench, monkeypatch, now):
    """By the clock its lock file may be years old: the system's lock counts."""
    first = bench.run("one", 2)
    monkeypatch.setattr(lock, "PATIENCE", 0.1)
    monkeypatch.setattr(time, "time", lambda: now)
    with folder_lock(bench.folder / "one"):
        bench.run("two", 1, 10, seed=4)
        assert (first.folder / "state.json").exists()
    bench.run("three", 1, 10, seed=5)
    assert not first.folder.exists()


def test_a_kill_while_room_is_made_leaves_no_record_of_what_is_gone(bench, monkeypatch):
    """At every removal of a file or folder in turn, as if the process were gone there; the same call then goes on."""

    class Killed(BaseException):
        pass

    at = 0
    while True:
        folder = bench.folder.parent / f"graft {at}"
        bench.folder, left, removed = folder, at, {"unlink": Path.unlink, "rmdir": Path.rmdir}
        first, second = bench.run("one", 2), bench.run("two", 2, seed=4)
        bench.age(first.folder, 200)
        bench.age(second.folder, 100)

        def dying(name, removed=removed):
            def call(path, *args, **kwargs):
                nonlocal left
                inside = any(path.is_relative_to(bench.folder / run) for run in ("one", "two"))
                left -= inside
                if inside and left < 0:
                    raise Killed
                return removed[name](path, *args, **kwargs)

            return call

        with monkeypatch.context() as patched:
            for name in removed:
                patched.setattr(Path, name, dying(name))
            try:
                done = bench.run("three", 1, 10, seed=5)
            except Killed:
                done = None
        for state in bench.states():
            load(state, bench.begun(seed=seed_of(state)))
        after = bench.run("three", 1, 10, seed=5)
        assert bench.states() == {after.folder} and (done is None or after.trained == 0)
        if done is not None:
            break
        at += 1
    assert at >= 6  # two states, two files and two folders each


@pytest.mark.parametrize("listed", ["", "one"])
@pytest.mark.parametrize("removed", ["one", "one/*", "one/*/state.json", "one/*/state.safetensors"])
def test_what_another_process_removes_while_the_folder_is_listed_is_no_error(bench, monkeypatch, listed, removed):
    bench.run("one", 2)
    gone = list(bench.folder.glob(removed))
    remove_after_listing(monkeypatch, bench.folder / listed, *gone)
    assert disk_quota.stored_files(bench.folder)[1] >= 0
    monkeypatch.undo()
    bench.run("one", 2)
    remove_after_listing(monkeypatch, bench.folder / listed, *gone)
    done = bench.run("two", 1, 10, seed=4)
    monkeypatch.undo()
    assert bench.states() == {done.folder}


def test_a_run_that_another_process_opens_while_room_is_made_stays(bench, monkeypatch):
    """Its lock is taken, or its state read, after it was chosen and before it is removed."""
    choose, first = disk_quota.choose_removals, bench.run("one", 2)
    monkeypatch.setattr(lock, "PATIENCE", 0.1)

    def train_meanwhile(run, act):
        def chosen(*arguments):
            entries = choose(*arguments)
            act()
            return entries

        with monkeypatch.context() as patched:
            patched.setattr(disk_quota, "choose_removals", chosen)
            bench.run(run, 1, 10, seed=4)

    with contextlib.ExitStack() as opened:
        held = iter([folder_lock(bench.folder / "one")])
        train_meanwhile("two", lambda: [opened.enter_context(one) for one in held])
        assert (first.folder / "state.json").exists()
    train_meanwhile("three", lambda: disk_quota.touch(first.folder))
    assert (first.folder / "state.json").exists()
    bench.run("four", 1, 10, seed=4)
    assert not first.folder.exists()
