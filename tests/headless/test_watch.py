"""Folders of workflow files: what is given out, when, and how often."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from graft_nodes.headless.embedded import HostError
from graft_nodes.headless.watch import watch
from graft_nodes.tests.headless.test_command import GOOD, command


def names(looking):
    return [path.name for path in looking.ready()]


def test_a_file_is_given_out_once_and_again_when_it_changed(tmp_path):
    (tmp_path / "old.json").write_text("{}")
    looking = watch(str(tmp_path))
    assert names(looking) == names(looking) == []
    (tmp_path / ".draft.json").write_text("{")
    (tmp_path / "notes.txt").write_text("{}")
    (tmp_path / "new.json").write_text("{")
    assert names(looking) == []  # perhaps it is still being written
    (tmp_path / "new.json").write_text("{}")
    assert names(looking) == []
    assert names(looking) == ["new.json"] and names(looking) == []
    os.replace(tmp_path / ".draft.json", tmp_path / "whole.json")
    (tmp_path / "old.json").write_text('{"changed": 1}')
    assert names(looking) == [] and names(looking) == ["old.json", "whole.json"] and names(looking) == []


def test_links_are_left_alone(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.json").write_text("{}")
    inside = tmp_path / "inside"
    inside.mkdir()
    looking = watch(str(inside))
    os.symlink(tmp_path / "outside" / "secret.json", inside / "link.json")
    os.symlink(tmp_path / "outside", inside / "folder.json")
    assert names(looking) == names(looking) == []


@pytest.mark.parametrize("becomes", ["nothing", "a file"])
def test_a_folder_that_goes_ends_the_watch_with_its_name(tmp_path, becomes):
    folder = tmp_path / "flows"
    folder.mkdir()
    looking = watch(str(folder))
    folder.rmdir()
    if becomes == "a file":
        folder.write_text("")
    with pytest.raises(HostError, match=r"--watch .*flows.*: the folder can no longer be read"):
        looking.ready()


def test_the_command_says_that_its_folder_has_gone(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "flows").mkdir()
    words, how = command(tmp_path, None, "run", "--watch", "flows", "--input", "in", "--output", "out")
    with subprocess.Popen(words, **how) as process:
        while not process.stdout.readline().startswith("watching"):
            assert process.poll() is None
        (tmp_path / "flows").rmdir()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in err
    assert "flows" in err and "can no longer be read" in err


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(HostError, match="no such folder; make it first"):
        watch(str(tmp_path / "none"))


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent differently there")
@pytest.mark.parametrize("wrong", [False, True])
def test_watching_runs_what_comes_until_ctrl_c(tmp_path, wrong):
    """A file that cannot be run is not an end; the exit status says that there was one."""
    (tmp_path / "in").mkdir()
    (tmp_path / "jobs").mkdir()
    words, how = command(tmp_path, None, "run", "--watch", "jobs", "--input", "in", "--output", "out")
    process = subprocess.Popen(words, **how)
    try:
        assert process.stdout.readline().startswith("host: ")
        if wrong:
            (tmp_path / "jobs" / "a.json").write_text("{")
        (tmp_path / "jobs" / "one.json").write_text(json.dumps(GOOD))  # while the host opens
        while not (line := process.stdout.readline()).startswith("done in"):
            assert line, process.stderr.read()
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == int(wrong) and "run one.json" not in out, err
    assert (tmp_path / "out" / "out.txt").read_text() == "hello"
