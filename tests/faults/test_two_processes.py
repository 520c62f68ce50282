"""Two processes on one run: one works, the other is told which; nothing that a dead process leaves is a lock, and a
drive may know none.
"""

import errno
import os
import signal
import sys
import time
import traceback
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from graft_nodes.storage import lock
from graft_nodes.storage.lock import FolderInUse, folder_lock
from graft_nodes.tests.faults import tried
from graft_nodes.training.data.cache import Cache, key_of
from graft_nodes.training.run import call
from graft_nodes.training.run.loop import Callbacks
from graft_nodes.training.store import saved_states
from graft_nodes.training.store.store import Store

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the other process is a fork")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.1)
    return tried.Run(tmp_path)


class Other:
    """A process that holds a folder's lock until it is ended."""

    def __init__(self, folder):
        ready, told = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            with folder_lock(folder):
                os.write(told, b"x")
                time.sleep(60)
            os._exit(0)
        assert os.read(ready, 1) == b"x"

    def end(self, number=signal.SIGKILL):
        os.kill(self.pid, number)
        os.waitpid(self.pid, 0)


def train(run, steps=tried.STEPS):
    return call.run(
        run.start, steps, lambda: nullcontext(run.denoiser), run.dataset, Store(run.folder, "run"), Callbacks()
    )


def test_the_second_is_told_who_works_there_and_what_to_do_and_goes_on_when_that_one_is_killed(run):
    other = Other(run.folder / "run")
    try:
        with pytest.raises(
            FolderInUse, match=rf"run is in use by process {other.pid} on .*Wait for it, end it, or use another name"
        ):
            train(run)
        assert [path.name for path in run.folder.iterdir()] == [".run.lock"], (
            "nothing is written while another process works"
        )
        call.run(
            run.start, 2, lambda: nullcontext(run.denoiser), run.dataset, Store(run.folder, "another"), Callbacks()
        )
    finally:
        other.end()
    assert (run.folder / ".run.lock").exists(), "what a killed process leaves"
    assert train(run).trained == tried.STEPS
    assert not (run.folder / ".run.lock").exists()


def test_a_saved_state_has_one_writer_and_any_number_of_readers(run):
    saved_states.save(run.older, run.folder, "mine")
    other = Other(run.folder / "mine")
    try:
        with pytest.raises(FolderInUse, match="mine is in use"):
            saved_states.save(run.older, run.folder, "mine")
        assert saved_states.load(run.folder, "mine", "model").step == run.older.step
    finally:
        other.end()
    saved_states.save(run.older, run.folder, "mine")


def test_of_many_processes_one_is_inside_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 30.0)
    count = tmp_path / "count"
    count.write_text("0")
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            for _ in range(25):
                with folder_lock(tmp_path / "run"):
                    number = int(count.read_text())
                    time.sleep(0.0005)
                    count.write_text(str(number + 1))
            os._exit(0)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert count.read_text() == "100" and not (tmp_path / ".run.lock").exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_drive_without_locks_is_said_in_the_report(run, monkeypatch, number):
    def refuse(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock, "lock_descriptor", refuse)
    outcome = train(run)
    assert outcome.trained == tried.STEPS and outcome.notes[0] == lock.NO_LOCKS


def test_an_error_inside_lets_go(tmp_path):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), folder_lock(tmp_path / "run"):
            raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def repeat_in_two_processes(work, times):
    """Calls `work(process, time)` so often in each of two processes at once; returns what they raised."""
    children, reader, writer = [], *os.pipe()
    for process in range(2):
        child = os.fork()
        if child == 0:
            try:
                for number in range(times):
                    work(process, number)
            finally:
                if sys.exc_info()[0] is not None:
                    os.write(writer, traceback.format_exc().encode()[-8000:])
                os._exit(0)
        children.append(child)
    os.close(writer)
    with open(reader, encoding="utf-8") as errors:
        raised = errors.read()
    for child in children:
        os.waitpid(child, 0)
    return raised


TIMES = int(os.environ.get("GRAFT_TEST_TWO_PROCESSES", "60"))  # in each process


def test_two_processes_make_room_in_one_folder_at_once(run):
    """Each run is too large for the limit, so that each removes what the other has just stored."""

    def work(process, number):
        store = Store(run.folder, f"run {process} {number % 3}", {}, 10)
        start = replace(run.start, start=replace(run.start.start, seed=number))
        call.run(start, 1, lambda: nullcontext(run.denoiser), run.dataset, store, Callbacks())

    assert repeat_in_two_processes(work, TIMES) == ""


def test_two_processes_trim_one_cache_at_once(tmp_path):
    tensors = {"latent": torch.arange(12.0)}

    def work(process, number):
        cache = Cache(tmp_path, 0.0)
        for key in (key_of(process, number), key_of(number)):
            found = cache.read("latents", key)
            assert found is None or torch.equal(found[0]["latent"], tensors["latent"])
            assert cache.write("latents", key, tensors) and not cache.notes
        packed = {key: (tensors, None) for key in (key_of("packed", process, number), key_of("packed", number))}
        assert cache.write_together("latents", packed)
        for key in packed:
            found = cache.read("latents", key)
            assert found is None or torch.equal(found[0]["latent"], tensors["latent"])
        cache.report()
        assert len(cache.notes) == 0
        Cache(tmp_path, 0.0).trim()

    assert repeat_in_two_processes(work, max(150, TIMES)) == ""
