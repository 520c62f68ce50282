"""EIO and ENOSPC at every request to the disk, one by one and from one on; folders that can only be read; real limits
of the system.
"""

import errno
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
from graft_nodes.storage import shards
from graft_nodes.tests.faults import tried
from graft_nodes.tests.faults.disk import Disk, fails
from graft_nodes.training.reports.tensorboard import Writer
from graft_nodes.training.run import call
from graft_nodes.training.run.loop import Callbacks, train
from graft_nodes.training.state import equal
from graft_nodes.training.store import saved_states
from graft_nodes.training.store.store import Store

resource = pytest.importorskip("resource", reason="Windows sets no limits")
LEAST = {
    "a run into the store": 200,
    "Save State over another": 90,
    "a LoRA file over another": 12,
    "the dataset's cache": 20,
}


@pytest.mark.parametrize("name", tried.ALL)
def test_every_request_fails_once(name, tmp_path):
    tally = tried.ALL[name](tmp_path / "place")
    assert tally.tried == tally.survived >= LEAST[name]
    assert all(lost <= 3 for lost in tally.lost)  # the steps between two snapshots


@pytest.fixture
def run(tmp_path):
    return tried.Run(tmp_path)


def test_a_folder_that_can_only_be_read_gives_what_is_stored_and_says_that_nothing_can_be_added(run):
    run.act()
    before = tried.contents(run.folder)
    with Disk(run.folder, 1, fails(errno.EROFS), lasting=True).installed():
        run.act()
        with pytest.raises(OSError, match="Read-only file system") as caught:
            call.run(
                run.other, 3, lambda: nullcontext(run.denoiser), run.dataset, Store(run.folder, "run"), Callbacks()
            )
    assert str(caught.value.filename).startswith(str(run.folder)) and "choose another output folder" in str(
        caught.value
    )
    assert tried.contents(run.folder) == before and tried.hash_of(run.denoiser.module) == run.base


@contextmanager
def files_of_at_most(size):
    """The system itself refuses larger files, to libraries too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_a_library_writes_fails_as_an_error_of_the_disk_that_names_the_file(run, tmp_path):
    saved_states.save(run.older, tmp_path, "mine")
    newer = train(run.start, run.denoiser, run.dataset, 2)
    with files_of_at_most(100), pytest.raises(OSError, match=r"File too large \(.*raise the limit\): '.*tensors-"):
        saved_states.save(newer, tmp_path, "mine")
    assert equal(saved_states.load(tmp_path, "mine", "model"), run.older)
    with files_of_at_most(100), pytest.raises(OSError, match=r"one\.safetensors"):
        shards.save_shards({"a": torch.zeros(100)}, tmp_path / "shards", "one")
    assert not list((tmp_path / "shards").iterdir())


def test_tensorboard_files_that_cannot_be_written_are_named_and_its_thread_ends(run, tmp_path):
    pytest.importorskip("tensorboard")
    writer, before = Writer(tmp_path / "logs"), threading.active_count()
    moved = type("StepResult", (), {"loss": 1.0, "rate": 0.1, "norm": 1.0, "seconds": 0.1})()
    with files_of_at_most(50), pytest.raises(OSError, match="File too large") as caught:
        for step in range(1, 200):
            writer.write(step, moved, None)
        writer.close()
    assert str(tmp_path / "logs") in str(caught.value)
    writer.close()
    assert threading.active_count() <= before + 1
