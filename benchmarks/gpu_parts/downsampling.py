"""Token downsampling: forward and LoRA training step beside the plain model, as benchmarks/todo.py measures them."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import todo
import torch
from device_timer import Timer, peak_mb, reset_peak

from .case import Bound, CannotRun, Case, Row, Setting, at_least, at_most, bounded, open_host, row

SIZES = (("sd15", 768), ("sd15", 1024), ("sdxl", 1024))
TINY_SIZES = (("tiny", 128),)
WAYS = ("off", "f2", "f44", "f2 kohya", "f44 ideal")
ROUNDS = 7
PEAK, PEER, IDEAL = 1.02, 1.05, 1.3  # of the plain model; of the kohya fork; of a context that is thinned already
CHECKED = "factor 2 is the kohya fork's result, to 2e-2 in bfloat16 and 1e-4 in float32"


def cases(setting: Setting) -> list[Case]:
    """Forward and training step of every model and size."""
    open_host(setting)
    sizes = SIZES
    if setting.tiny:
        sizes = TINY_SIZES
    found = []
    for model, size in sizes:
        for what in ("forward", "train"):
            found.append(Case(f"{model} {size} px, {what}", functools.partial(measured, setting, model, size, what)))
    return found


def dtype_of(setting: Setting) -> torch.dtype:
    """bfloat16 on a GPU."""
    if setting.device.type == "cuda":
        return torch.bfloat16
    return torch.float32


@functools.cache
def model_on(device: torch.device, name: str, dtype: torch.dtype) -> Any:
    """A model, kept for the next cases."""
    weights = todo.WEIGHTS[name] * dtype.itemsize / 4
    _need_memory(device, weights, f"the weights of {name}")
    return todo.build(name, device, dtype)


def _need_memory(device: torch.device, needed: float, what: str) -> None:
    free = todo.free_bytes(device)
    if needed > free:
        raise CannotRun(f"{what} need about {needed / 1e9:.0f} GB, and {free / 1e9:.0f} are free")


def measured(setting: Setting, model: str, size: int, what: str) -> Iterator[Row]:
    """Seconds of each way over those of the plain model, and peak memory."""
    dtype, train = dtype_of(setting), what == "train"
    patcher = model_on(setting.device, model, dtype)
    options = argparse.Namespace(dtype=dtype, checkpointing=False)
    _need_memory(setting.device, todo.needed_bytes(model, size, "off", train, options, False), f"{what} at {size} px")
    runner = todo.Runner(patcher, model, size, setting.device, dtype, Timer(setting.device))
    ways = todo.ways(patcher, model, list(WAYS))
    rounds = ROUNDS
    if setting.tiny:
        rounds = 1
    with contextlib.ExitStack() as stack:
        if train:
            runner.lora = stack.enter_context(todo.lora(patcher.model.diffusion_model, False))
        yield from bounded(todo.rows_of(what, todo.compare(runner, ways, train, rounds)), bounds(what), CHECKED)
        if setting.device.type == "cuda":
            peaks = {}
            for way in ("off", "f2", "f44"):
                reset_peak(setting.device)
                runner.seconds(ways[way], train)
                peaks[way] = peak_mb(setting.device)
            for way in ("f2", "f44"):
                ratio = peaks[way] / peaks["off"]
                yield row(f"{what}_{way}, peak memory", peaks[way], "MB", at_most(PEAK), ratio, "of the plain model's")


def bounds(what: str) -> dict[str, Bound]:
    """Faster than the plain model, as fast as the other node, and not far from the ideal."""
    faster = {f"{what}_{way}": at_least(1.0) for way in ("f2", "f44")}
    return {**faster, f"{what}_f2_over_kohya": at_most(PEER), f"{what}_f44_over_ideal": at_most(IDEAL)}
