"""Kills a tiny training run and goes on with it, over and over; every run is a fork, so that torch is imported once.

python killing.py FOLDER enumerate      killed at every write, fsync, rename, removal and new folder of the store, one
run each python killing.py FOLDER random COUNT   SIGKILL at random moments, until it has been killed so often

Prints one line of JSON. A run is right when it ends in the very files that an uninterrupted one ends in, and when no
file that has its final name is ever unreadable. What differs between two runs that are both right is how long they
took.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from conftest import Lab
from graft_nodes.ema.decay import EMASettings
from graft_nodes.storage.safetensors import load_safetensors
from graft_nodes.tests.faults.disk import Disk
from graft_nodes.training.run import call
from graft_nodes.training.run.loop import Callbacks
from graft_nodes.training.state import begin
from graft_nodes.training.store import store
from graft_nodes.training.trainable.settings import AdapterSettings

torch.set_num_threads(1)
store.BLOCK = 3
STEPS = 4
DENOISER, DATASET = Lab.Flow(), Lab.pictures(held_out=[9])
_PLAIN = Lab.state(
    DENOISER, DATASET, AdapterSettings(targets="all", rank=1, pattern="blocks.0.ff"), ema=False, optimizer="sgd"
)
_EMA = EMASettings("ramp", snapshots=4, widths=(0.1, 0.2))
START = begin(
    DENOISER.module, type(_PLAIN.start)("model", DATASET.digest, _PLAIN.start.adapter, _EMA, 3), _PLAIN.settings
)


def train(folder: Path) -> None:
    """The run, from wherever the store stands."""
    callbacks = Callbacks(validate_every=2, snapshot_every=3)
    call.run(START, STEPS, lambda: nullcontext(DENOISER), DATASET, store.Store(folder, "run"), callbacks, "best")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; of a state.json what does not depend on the time it took."""
    out = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        body = path.read_bytes()
        if path.name == "state.json":
            record = json.loads(body)
            body = json.dumps(
                {key: value for key, value in record.items() if key not in ("effort", "sha256")}, sort_keys=True
            ).encode()
        out[str(path.relative_to(folder))] = body
    return out


def check(folder: Path) -> None:
    """Every file that has its final name is whole, and every state.json names what is there."""
    for path in folder.rglob("*"):
        if path.name == "state.json":
            store.load(path.parent, START)
        elif path.suffix == ".safetensors":
            load_safetensors(str(path))
        elif path.suffix == ".json":
            json.loads(path.read_bytes())


def killed(request: str, path: str, half: Callable[[], object]) -> None:
    """The process ends in the middle of a request to the disk."""
    half()
    os.kill(os.getpid(), signal.SIGKILL)


def forked(act) -> int:
    """Run `act` in a fork; how it ended: 0, or minus the signal."""
    child = os.fork()
    if child == 0:
        code = 1
        signal.alarm(300)
        try:
            act()
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def enumerated(root: Path) -> dict:
    whole = root / "whole"
    clear(whole)
    told = root / "count"

    def counted() -> None:
        with Disk(whole).installed() as disk:
            train(whole)
        told.write_text(str(len(disk.asked)))

    assert forked(counted) == 0
    expected, count, folder = contents(whole), int(told.read_text()), root / "killed"
    for at in range(1, count + 1):
        clear(folder)

        def interrupted(at=at) -> None:
            with Disk(folder, at, killed).installed():
                train(folder)

        ended = forked(interrupted)
        assert ended == -signal.SIGKILL, f"{at}: ended with {ended}"
        check(folder)
        assert forked(lambda: train(folder)) == 0, f"{at}: did not go on"
        found = contents(folder)
        assert found == expected, (
            f"{at}: {sorted(k for k in found.keys() | expected.keys() if found.get(k) != expected.get(k))}"
        )
    return {"killed": count, "files": sorted(expected)}


def at_random(root: Path, times: int) -> dict:
    whole, folder = root / "whole", root / "killed"
    clear(whole)
    begun = time.perf_counter()
    assert forked(lambda: train(whole)) == 0
    length, expected = time.perf_counter() - begun, contents(whole)
    draw, killed, finished = random.Random(0), 0, 0
    clear(folder)
    while killed < times:
        child = os.fork()
        if child == 0:
            try:
                train(folder)
            finally:
                os._exit(0)
        time.sleep(draw.uniform(0, length))
        os.kill(child, signal.SIGKILL)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        killed += ended == -signal.SIGKILL
        check(folder)
        if ended == 0 or killed == times:
            assert forked(lambda: train(folder)) == 0
            found = contents(folder)
            assert found == expected, sorted(
                k for k in found.keys() | expected.keys() if found.get(k) != expected.get(k)
            )
            finished += 1
            clear(folder)
    return {"killed": killed, "finished": finished}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    train(place / "warm")  # what is imported at first use is imported before the forks
    print(json.dumps(enumerated(place) if sys.argv[2] == "enumerate" else at_random(place, int(sys.argv[3]))))
