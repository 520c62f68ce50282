"""A folder's lock in one process: who waits, who is told what, and which errors of the drive mean what."""

import errno
import os
import socket
import threading
import time

import pytest
from graft_nodes.storage import lock
from graft_nodes.storage.lock import FolderInUse, folder_lock

pytestmark = pytest.mark.skipif(os.name == "nt", reason="locks of POSIX systems")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.1)


def refused(number):
    """(stands in for the system's lock and is refused with this error, the list of its calls)."""
    calls = []

    def refuse(descriptor):
        calls.append(descriptor)
        raise OSError(number, os.strerror(number))

    return refuse, calls


@pytest.mark.parametrize("made_again", [True, False])
def test_a_lock_file_that_went_while_it_was_waited_for_is_no_lock(tmp_path, monkeypatch, made_again):
    """The process before removes its file at its end, and a third one may already have made another."""
    path, plain, calls = tmp_path / ".run.lock", lock.lock_descriptor, []

    def removed_meanwhile(descriptor):
        plain(descriptor)
        calls.append(descriptor)
        if len(calls) == 1:
            path.unlink()
            if made_again:
                path.touch()

    monkeypatch.setattr(lock, "lock_descriptor", removed_meanwhile)
    with folder_lock(tmp_path / "run"):
        assert len(calls) == 2
        with pytest.raises(FolderInUse), folder_lock(tmp_path / "run"):
            raise AssertionError("two processes are inside")
    assert not list(tmp_path.iterdir())


def test_a_killed_process_left_its_file_and_its_number_is_ours(tmp_path):
    """A process number comes back; only the system's lock counts, and the file names its new owner alone."""
    path = tmp_path / ".run.lock"
    path.write_text(f"process {os.getpid()} on {'x' * 300}")
    with folder_lock(tmp_path / "run") as warning:
        assert warning == "" and path.read_text() == f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(FolderInUse, match=f"process {os.getpid()} on {socket.gethostname()}: two that"):
            folder_lock(tmp_path / "run").__enter__()


def test_a_lock_that_ends_soon_is_waited_for_and_no_clock_that_jumps_matters(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 20.0)
    clock = iter(range(10**9, 10**15, 10**9))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    first = folder_lock(tmp_path / "run")
    first.__enter__()
    timer = threading.Timer(0.3, first.__exit__, (None, None, None))
    timer.start()
    with folder_lock(tmp_path / "run") as warning:
        assert warning == ""
    timer.join()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EMFILE])
def test_another_error_than_held_is_raised_at_once_with_the_file(tmp_path, monkeypatch, number):
    refuse, calls = refused(number)
    monkeypatch.setattr(lock, "lock_descriptor", refuse)
    with pytest.raises(OSError, match=r"\.run\.lock") as raised, folder_lock(tmp_path / "run"):
        raise AssertionError("nothing is locked")
    assert raised.value.errno == number and len(calls) == 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.EAGAIN, errno.EDEADLK])
def test_held_is_told_after_waiting(tmp_path, monkeypatch, number):
    refuse, calls = refused(number)
    monkeypatch.setattr(lock, "lock_descriptor", refuse)
    with pytest.raises(FolderInUse, match="run is in use by another process"), folder_lock(tmp_path / "run"):
        raise AssertionError("nothing is locked")
    assert len(calls) >= 2


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_drive_without_locks_is_a_warning(tmp_path, monkeypatch, number):
    monkeypatch.setattr(lock, "lock_descriptor", refused(number)[0])
    with folder_lock(tmp_path / "run") as warning:
        assert warning == lock.NO_LOCKS


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_what_cannot_be_written_needs_no_lock(tmp_path, monkeypatch, number):
    monkeypatch.setattr(lock, "make_folders", refused(number)[0])
    with folder_lock(tmp_path / "run") as warning:
        assert warning == "" and not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files as Linux lists them")
def test_no_descriptor_is_left_by_any_way_out(tmp_path, monkeypatch):
    before = len(os.listdir("/proc/self/fd"))
    for number in (errno.EIO, errno.EAGAIN, errno.ENOLCK):
        with monkeypatch.context() as patch:
            patch.setattr(lock, "lock_descriptor", refused(number)[0])
            try:
                with folder_lock(tmp_path / "run"):
                    pass
            except (OSError, FolderInUse):
                assert number != errno.ENOLCK
    with folder_lock(tmp_path / "run"):
        pass
    assert len(os.listdir("/proc/self/fd")) == before
