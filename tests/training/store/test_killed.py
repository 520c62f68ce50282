"""Killed at every write, fsync, rename and removal, and at random moments: going on ends in the same files, and none is
unreadable.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from graft_nodes.training.run import call
from graft_nodes.training.run.loop import Callbacks
from graft_nodes.training.store import store

KILLS = os.environ.get("GRAFT_KILLS", "8")  # random ones; 50 takes minutes
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks")


def _killing(folder, *arguments):
    script = Path(__file__).with_name("killing.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_killed_at_everything_that_the_store_asks_of_the_disk(tmp_path):
    told = _killing(tmp_path, "enumerate")
    assert told["killed"] > 60
    kinds = [name.split("/")[1] if "/" in name else name for name in told["files"]]
    assert (
        "history" in kinds and "averages" in kinds and sum(name.endswith("state.json") for name in told["files"]) == 1
    )
    assert not [name for name in told["files"] if "partial" in name]


def test_killed_at_random_moments(tmp_path):
    told = _killing(tmp_path, "random", KILLS)
    assert told["killed"] >= int(KILLS) and told["finished"] >= 1


def test_nothing_is_renamed_before_it_is_on_disk_and_no_record_before_what_it_names(lab, tmp_path, monkeypatch):
    """Power loss: a file is synced after its last byte and before it is renamed, and its folder before anything that
    names it is.
    """
    monkeypatch.setattr(store, "BLOCK", 2)
    events, paths = [], {}
    real = {name: getattr(os, name) for name in ("fsync", "replace", "open", "mkdir", "unlink")}
    real_open = open

    def noting(name, *facts):
        events.append((name, *facts))

    def opening(path, mode="r", *arguments, **named):
        file = real_open(path, mode, *arguments, **named)
        if "w" in mode and str(path).startswith(str(tmp_path)):
            paths[file.fileno()] = str(path)
            noting("write", str(path))
        return file

    def os_open(path, *arguments, **named):
        number = real["open"](path, *arguments, **named)
        paths[number] = str(path)
        return number

    monkeypatch.setattr("builtins.open", opening)
    monkeypatch.setattr(os, "open", os_open)
    monkeypatch.setattr(os, "fsync", lambda number: (noting("fsync", paths[number]), real["fsync"](number))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (noting("rename", str(a), str(b)), real["replace"](a, b))[1])
    monkeypatch.setattr(
        os, "mkdir", lambda path, *a, **k: (noting("mkdir", str(path)), real["mkdir"](path, *a, **k))[1]
    )
    monkeypatch.setattr(
        os, "unlink", lambda path, *a, **k: (noting("unlink", str(path)), real["unlink"](path, *a, **k))[1]
    )
    denoiser, dataset = lab.Flow(), lab.pictures(held_out=[9])
    callbacks = Callbacks(validate_every=2, snapshot_every=3)
    kept = store.Store(tmp_path, "run")
    call.run(lab.state(denoiser, dataset), 7, lambda: nullcontext(denoiser), dataset, kept, callbacks, "best")
    monkeypatch.undo()

    renames = [(at, event[1], event[2]) for at, event in enumerate(events) if event[0] == "rename"]
    assert len(renames) > 6
    for at, source, target in renames:
        before = [event for event in events[:at] if event[1] == source]
        assert before[-1][0] == "fsync", f"{target} was renamed before it was synced"
        folder = os.path.dirname(target)
        after = next(number for number, event in enumerate(events) if number > at and event == ("fsync", folder))
        between = [event for event in events[at + 1 : after] if event[0] in ("rename", "unlink")]
        assert not between, f"{between[0]} came before the folder of {target} was synced"
    for at, event in enumerate(events):
        if event[0] == "mkdir" and event[1].startswith(str(tmp_path)):
            assert ("fsync", os.path.dirname(event[1])) in events[at:], f"{event[1]} was never synced into its folder"
