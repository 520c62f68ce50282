"""An exception in any callback, a clock that jumps, a slow disk: base, flags and generator stay, and going on ends in
the same bytes.
"""

import itertools
import time
from contextlib import nullcontext

import pytest
import torch
from graft_nodes.tests.faults import tried
from graft_nodes.tests.faults.disk import Disk
from graft_nodes.training.reports.tensorboard import Writer
from graft_nodes.training.run import call as runs
from graft_nodes.training.run.loop import Callbacks
from graft_nodes.training.state import equal
from graft_nodes.training.store.store import Store


class Planted(Exception):
    """What a callback raises."""


@pytest.fixture
def run(tmp_path):
    return tried.Run(tmp_path)


def train(run, folder=None, **more):
    callbacks = Callbacks(validate_every=2, snapshot_every=3, preview_every=2, **{"preview": lambda *_: None, **more})
    kept = Store(folder or run.folder, "run")
    return runs.run(run.start, tried.STEPS, lambda: nullcontext(run.denoiser), run.dataset, kept, callbacks, "best")


def flags(module):
    return (
        module.training,
        [(p.requires_grad, p.grad is None, id(p)) for p in module.parameters()],
        len(module._forward_hooks),
    )


@pytest.mark.parametrize("kind", [Planted, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("name", ["on_step", "preview", "should_stop"])
def test_a_callback_that_raises(run, tmp_path, name, call, kind):
    expected, count = train(run, tmp_path / "whole"), itertools.count(1)
    before, draws = flags(run.denoiser.module), torch.random.get_rng_state()

    def raising(*_):
        if next(count) == call:
            raise kind("planted")

    with pytest.raises(kind, match="planted"):
        train(run, **{name: raising})
    assert tried.hash_of(run.denoiser.module) == run.base and flags(run.denoiser.module) == before
    assert torch.equal(torch.random.get_rng_state(), draws)
    again = train(run)
    assert equal(again.state, expected.state) and again.state.history == expected.state.history
    assert tried.contents(run.folder / "run") == tried.contents(tmp_path / "whole" / "run")


def test_a_clock_that_jumps_changes_no_byte(run, tmp_path, monkeypatch):
    expected = train(run, tmp_path / "whole")
    real, jumps = time.time, itertools.cycle((0.0, 3e8, -6e8, 1e4, -1.0))
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)  # no time passes: speeds must not be divided by
    writer = Writer(tmp_path / "logs") if _has_tensorboard() else None
    again = train(
        run,
        on_step=lambda step, moved, validation: writer and writer.write(step, moved, validation),
        snapshot_minutes=0.0001,
    )
    if writer is not None:
        writer.close()
    assert equal(again.state, expected.state)
    monkeypatch.undo()
    assert tried.contents(run.folder / "run") == tried.contents(tmp_path / "whole" / "run")


def _has_tensorboard():
    import importlib.util

    return importlib.util.find_spec("tensorboard") is not None


def test_a_slow_disk_changes_no_byte(run, tmp_path):
    expected = train(run, tmp_path / "whole")

    def waits(request, path, half):
        time.sleep(0.003)

    with Disk(run.folder / "run", 1, waits, lasting=True).installed():
        assert equal(train(run).state, expected.state)
    assert tried.contents(run.folder / "run") == tried.contents(tmp_path / "whole" / "run")
