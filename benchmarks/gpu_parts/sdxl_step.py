"""A training step of SDXL's shape at 1,024 pixels: beside a bare loop, against its plan, what the card waits for, and
what an average costs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from device_timer import reset_peak
from graft_nodes.ema.decay import EMASettings
from torch.profiler import ProfilerActivity, profile, record_function

import training

from .case import CannotRun, Case, Row, Setting, at_most, row, use_device

BF16 = torch.bfloat16
STEP, PEAK = 1.10, 1.05  # of the bare loop; of the plan
WAITS, IDLE = 1, 0.08  # a step
AVERAGES = {"same": 1.01, "host": 1.02}  # of a step without an average
ENDS = "graft: a step has ended"  # in the profile
WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def cases(setting: Setting) -> list[Case]:
    """Both types that SDXL is loaded in, the profile, and averages."""
    training.open_host(setting.comfyui, setting.device)
    use_device(setting.device)
    return [
        Case("bf16 beside a bare loop", functools.partial(beside_bare, setting, BF16)),
        Case("fp16 beside a bare loop", functools.partial(beside_bare, setting, torch.float16)),
        Case("waits and idle time", functools.partial(profiled, setting)),
        Case("an average beside a step", functools.partial(averages, setting)),
    ]


def size_of(setting: Setting) -> str:
    """The UNet's shape."""
    if setting.tiny:
        return "tiny"
    return "sdxl"


def steps_of(setting: Setting) -> int:
    """How many steps are measured."""
    if setting.tiny:
        return 2
    return 6


def clear(device: torch.device) -> None:
    """Free what a case before this one has left, and count the peak anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    reset_peak(device)


def beside_bare(setting: Setting, dtype: torch.dtype) -> Iterator[Row]:
    """Seconds over those of a bare loop in bf16, and the peak over the plan."""
    if setting.device.type == "cpu" and dtype == torch.float16:
        raise CannotRun("no model is loaded in fp16 on a CPU")
    clear(setting.device)
    found = training.graft(size_of(setting), steps_of(setting), setting.comfyui, setting.device, dtype, "bf16")
    ours, bare = statistics.median(found["seconds"]), statistics.median(found["bare"])
    note = f"of the bare loop's; LoRA rank {training.RANK} on every Linear and Conv2d, {found['where']}"
    yield row("a step", ours, "s", at_most(STEP), ours / bare, note)
    if setting.device.type == "cuda":
        yield row("peak memory", found["peak"], "MB", at_most(PEAK), found["peak"] / found["planned"], "of the plan")


@contextlib.contextmanager
def opened(setting: Setting) -> Iterator[tuple[Any, Any]]:
    """The model in bf16, as a Denoiser, and the dataset."""
    from graft_nodes.host.denoiser import open_denoiser

    clear(setting.device)
    patcher = training.unet(size_of(setting), setting.device, BF16)
    with open_denoiser(patcher) as denoiser, torch.inference_mode(False):
        yield denoiser, training.dataset(size_of(setting))


# --- waits ------------------------------------------------------------------------------------------------------------


def profiled(setting: Setting) -> Iterator[Row]:
    """How often the host waits for the device in a step, and how long the device has nothing to do."""
    if setting.device.type == "cpu":
        raise CannotRun("nothing waits for the CPU")
    from graft_nodes.training.run.loop import Callbacks, train

    with opened(setting) as (denoiser, data):
        state = train(training.begun(denoiser.module, data, size_of(setting), "bf16"), denoiser, data, 2)
        if setting.device.type != "cuda":
            yield row("waits", _counted_waits(state, denoiser, data), "a step", at_most(WAITS))
            return

        def mark(*_: Any) -> None:
            with record_function(ENDS):
                pass

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            train(state, denoiser, data, 5, Callbacks(mark))
    waits, idle = read_profile(list(found.events() or []))
    yield row("waits", waits, "a step", at_most(WAITS), note="the most of four steps")
    yield row("idle", idle, "of the time", at_most(IDLE), note="over four steps, with what the profiler itself takes")


def _counted_waits(state: Any, denoiser: Any, data: Any) -> int:
    """The most waits of a step on the second device, whose meter counts them."""
    from graft_nodes.tests.second_device.meter import meter
    from graft_nodes.training.run.loop import Callbacks, train

    counts: list[int] = []

    def count(*_: Any) -> None:
        counts.append(len(meter.synchronizations))
        meter.clear()

    train(state, denoiser, data, 4, Callbacks(count))
    return max(counts[1:])


def read_profile(events: list[Any]) -> tuple[int, float]:
    """(the most waits of a step, the share of the time in which no kernel ran), from the first end of a step to the
    last.
    """
    ends = sorted(event.time_range.end for event in events if event.name == ENDS and not _is_on_device(event))
    first, last = ends[0], ends[-1]
    counts = [0] * (len(ends) - 1)
    spans = []
    for event in events:
        if _is_on_device(event):
            if event.name != ENDS:
                spans.append((max(first, event.time_range.start), min(last, event.time_range.end)))
        elif event.name in WAITING and first < event.time_range.start < last:
            counts[sum(end < event.time_range.start for end in ends) - 1] += 1
    busy, until = 0.0, first
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return max(counts), 1 - busy / (last - first)


def _is_on_device(event: Any) -> bool:
    return event.device_type == torch.autograd.DeviceType.CUDA


# --- averages ---------------------------------------------------------------------------------------------------------


def averages(setting: Setting) -> Iterator[Row]:
    """A step with an average on the device and in host memory, in turn with steps without one."""
    kinds = {"": None, **{kind: EMASettings("ramp", device=kind) for kind in AVERAGES}}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with opened(setting) as (denoiser, data):
        states = {
            kind: training.begun(denoiser.module, data, size_of(setting), "bf16", average)
            for kind, average in kinds.items()
        }
        for _ in range(1 if setting.tiny else 4):
            for kind, state in states.items():
                states[kind], found = training.seconds_of_steps(state, denoiser, data, 5)
                seconds[kind] += found
    plain = statistics.median(seconds[""])
    for kind, most in AVERAGES.items():
        spent = statistics.median(seconds[kind])
        yield row(f"average device {kind}", spent, "s", at_most(most), spent / plain, "of a step without one")
