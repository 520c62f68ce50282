"""Memory that runs out, of the host or a device, wherever a step asks for it: the base stays, the state is kept, going
on is the same.
"""

import importlib
from contextlib import nullcontext

import pytest
import torch
from graft_nodes.tests.faults import tried
from graft_nodes.training.run import call as runs
from graft_nodes.training.run.loop import Callbacks, Stopped
from graft_nodes.training.state import equal
from graft_nodes.training.store.store import Store

ERRORS = {
    "host": MemoryError(),
    "allocator": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
}


@pytest.fixture
def run(tmp_path):
    return tried.Run(tmp_path)


def train(run, **more):
    callbacks = Callbacks(validate_every=2, snapshot_every=1, **more)
    return runs.run(
        run.start,
        tried.STEPS,
        lambda: nullcontext(run.denoiser),
        run.dataset,
        Store(run.folder, "run"),
        callbacks,
        "best",
    )


def at(call, error):
    """A function that raises when it is called that often."""
    count = iter(range(1, 1000))

    def function(*arguments, **named):
        if next(count) == call:
            raise error
        return function.real(*arguments, **named)

    return function


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize(
    "place",
    [
        "denoise",
        "noisy",
        "step",
        "validate",
        "validate the average",
        "validate at the end",
        "validate the average at the end",
        "save",
    ],
)
def test_where_memory_runs_out_the_state_is_kept_and_the_base_as_it_was(run, tmp_path, monkeypatch, kind, place):
    expected = train(tried.Run(tmp_path / "whole")).state
    failing, where = {
        "denoise": (at(4, ERRORS[kind]), (run.denoiser, "denoise")),
        "noisy": (at(3, ERRORS[kind]), (run.denoiser, "noisy")),
        "step": (at(3, ERRORS[kind]), (torch.optim.SGD, "step")),
        "validate": (at(3, ERRORS[kind]), "graft_nodes.training.run.validation.validate"),
        "validate the average": (at(4, ERRORS[kind]), "graft_nodes.training.run.validation.validate"),
        "validate at the end": (at(5, ERRORS[kind]), "graft_nodes.training.run.validation.validate"),
        "validate the average at the end": (at(6, ERRORS[kind]), "graft_nodes.training.run.validation.validate"),
        "save": (at(2, ERRORS[kind]), "graft_nodes.training.store.store.write_safetensors"),
    }[place]
    with monkeypatch.context() as patch:
        if isinstance(where, str):
            module, _, name = where.rpartition(".")
            failing.real = getattr(importlib.import_module(module), name)
            patch.setattr(where, failing)
        else:
            failing.real = getattr(*where)
            if place == "step":
                patch.setattr(torch.optim.SGD, "step", lambda self, *a, **k: failing(self, *a, **k))
            else:
                patch.setattr(*where, failing)
        try:
            train(run)
        except (Stopped, MemoryError, RuntimeError) as error:
            assert isinstance(error, Stopped), f"{type(error).__name__} says nothing of what to do: {error}"
            assert "To need less" in str(error) and "Memory ran out at step" in str(error)
        else:
            pytest.fail("nothing ran out")
    assert tried.hash_of(run.denoiser.module) == run.base
    again = train(run)
    assert equal(again.state, expected) and again.state.history == expected.history


def test_an_allocation_that_the_system_refuses(run):
    denoise = run.denoiser.denoise

    def greedy(*arguments):
        if run.denoiser.calls == 6:
            run.denoiser.calls += 1
            torch.empty(1 << 50)
        return denoise(*arguments)

    run.denoiser.denoise = greedy
    with pytest.raises(Stopped, match=r"Memory ran out at step .*To need less"):
        train(run)
    assert tried.hash_of(run.denoiser.module) == run.base and train(run).state.step == tried.STEPS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_that_is_full(run):
    denoise, held = run.denoiser.denoise, []

    def greedy(*arguments):
        if run.denoiser.calls == 6:
            run.denoiser.calls += 1
            while True:
                held.append(torch.empty(1 << 32, device="cuda"))
        return denoise(*arguments)

    run.denoiser.denoise = greedy
    with pytest.raises(Stopped, match=r"Memory ran out at step .*To need less"):
        train(run)
    held.clear()
    assert train(run).state.step == tried.STEPS
