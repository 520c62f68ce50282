"""A preview in mid-run, and memory that runs out: they change nothing that is learned, and give back what they took."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from device_timer import MB, peak_mb, reset_peak

import training

from .case import CHECKED, CannotRun, Case, Row, Setting, at_most, row, use_device
from .sdxl_step import clear, opened, size_of

STEPS, AT = 4, 2
LEFT = 1.01  # of what was on the device before
PREVIEW = 1.10  # of what the plan says of a preview
ROOM = 0.5  # of the activations, that a step gets before it runs out
CLOSE = 1e-3  # of a loss, computed by kernels that may add in another order each time


def cases(setting: Setting) -> list[Case]:
    """Both."""
    training.open_host(setting.comfyui, setting.device)
    use_device(setting.device)
    return [
        Case("a preview in mid-run", functools.partial(preview, setting)),
        Case("memory that runs out", functools.partial(out_of_memory, setting)),
    ]


def allocated(device: torch.device) -> int:
    """Bytes on the device; CannotRun where nothing counts them."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type == "cpu":
        raise CannotRun("a CPU's memory is everyone's")
    from graft_nodes.tests.second_device.meter import meter

    return meter.allocated


def losses(state: Any, denoiser: Any, data: Any, callbacks: Any = None) -> tuple[Any, tuple[float, ...]]:
    """The state after all steps, and their losses."""
    from graft_nodes.training.run.loop import train

    after = train(state, denoiser, data, STEPS, callbacks)
    return after, after.history.loss


def preview(setting: Setting) -> Iterator[Row]:
    """The same losses as without one, and the device's memory as before it."""
    from graft_nodes.host import memory_planning
    from graft_nodes.host.previews import sample
    from graft_nodes.training.run.loop import Callbacks

    allocated(setting.device)
    sizes, size = training.Sizes.of(size_of(setting)), size_of(setting)
    found: list[tuple[int, int, float]] = []
    context = torch.randn(1, sizes.tokens, sizes.context)
    prompt = [[context, {"pooled_output": torch.randn(1, training.POOLED)}]]

    def draw(denoiser: Any, *_: Any) -> None:
        clear(setting.device)
        before = allocated(setting.device)
        latent = {"samples": torch.zeros(1, 4, sizes.side, sizes.side)}
        picture = sample(denoiser.patcher, prompt, prompt, latent, 1, steps=2)
        peak = peak_mb(setting.device)
        assert bool(picture.isfinite().all()), "the preview is not finite"
        del picture
        found.append((before, allocated(setting.device), peak))

    with opened(setting) as (denoiser, data):
        state = training.begun(denoiser.module, data, size, "bf16")
        _, plain = losses(state, denoiser, data)
        _, drawn = losses(state, denoiser, data, Callbacks(preview=draw, preview_every=AT))
        planned = memory_planning.plan(denoiser.patcher, state, data).preview
    assert len(found) == STEPS // AT, f"{len(found)} previews"
    off = max(abs(one / other - 1) for one, other in zip(drawn, plain, strict=True))
    yield row("losses", off, "", at_most(CLOSE), note="the largest distance to those without previews, in these")
    before, after, peak = found[0]
    yield row("memory afterwards", after / MB, "MB", at_most(LEFT), after / before, "of that before the preview")
    if setting.device.type == "cuda":
        yield row("peak", peak, "MB", at_most(PREVIEW), peak * MB / planned, "of what the plan says")


@contextlib.contextmanager
def room_for(device: torch.device, size: int) -> Iterator[None]:
    """A context in which the device has so many bytes more than are in use now."""
    if device.type != "cuda":
        from graft_nodes.tests.second_device.meter import meter

        with meter.limited(size):
            yield
        return
    clear(device)
    whole = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated(device) + size) / whole, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def out_of_memory(setting: Setting) -> Iterator[Row]:
    """It is said with what would need less, nothing stays behind, and the run goes on with that."""
    from graft_nodes.host import memory_planning
    from graft_nodes.training.run.loop import Stopped, train

    allocated(setting.device)
    with opened(setting) as (denoiser, data):
        state = training.begun(denoiser.module, data, size_of(setting), "bf16")
        state = train(state, denoiser, data, 1)
        plan = memory_planning.plan(denoiser.patcher, state, data)
        kept_bytes = plan.parts["trained"] + plan.parts["optimizer"]
        clear(setting.device)
        before = allocated(setting.device)
        said = ""
        try:
            with room_for(setting.device, kept_bytes + int(ROOM * plan.parts["activations"])):
                train(state, denoiser, data, 1)
        except Stopped as error:
            said, kept = str(error), error.state.step
        assert "Memory ran out at step 2" in said, f"memory did not run out: {said or 'the step was made'}"
        assert "gradient checkpointing" in said, f"no advice: {said}"
        assert kept == 1, f"the state is of step {kept}, expected 1"
        clear(setting.device)
        after = allocated(setting.device)
        yield row("memory afterwards", after / MB, "MB", at_most(LEFT), after / before, "of that before the step")
        optimizer = replace(state.settings.optimizer, checkpointing=True)
        state = train(replace(state, settings=replace(state.settings, optimizer=optimizer)), denoiser, data, 1)
        reset_peak(setting.device)
        yield row("steps", state.step, "", CHECKED, note="the run goes on with gradient checkpointing")
