"""Token downsampling: forward and LoRA training step beside the plain model, as benchmarks/todo.py measures them."""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
from collections.abc import Iterator
from typing import Any

import lora
import todo
import torch
from device_timer import Timer, peak_mb, reset_peak

import training

from .case import Bound, CannotRun, Case, Row, Setting, at_least, at_most, bounded, open_host, row, use_device
from .sdxl_step import BF16, clear, size_of

SIZES = (("sd15", 768), ("sd15", 1024), ("sdxl", 1024))
TINY_SIZES = (("tiny", 128),)
WAYS = ("off", "f2", "f44", "f2 kohya", "f44 ideal")
ROUNDS = 7
PEAK, PEER, IDEAL = 1.02, 1.05, 1.3  # of the plain model; of the kohya fork; of a context that is thinned already
CHECKED = "factor 2 is the kohya fork's result, to 2e-2 in bfloat16 and 1e-4 in float32"


def cases(setting: Setting) -> list[Case]:
    """Forward and training step of every model and size."""
    open_host(setting)
    use_device(setting.device)
    sizes = SIZES
    if setting.tiny:
        sizes = TINY_SIZES
    found = [Case("Train Step and a sample", functools.partial(in_runs, setting))]
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


def in_runs(setting: Setting) -> Iterator[Row]:
    """Train Step's loop on SDXL's shape at 1,024 pixels, and a sample, with Apply ToDo and without."""
    from graft_nodes.host.denoiser import open_denoiser
    from graft_nodes.host.previews import sample
    from graft_nodes.host.token_downsampling import apply_todo
    from graft_nodes.patches.token_downsampling.tokens import ToDoSettings

    clear(setting.device)
    size, timer = size_of(setting), Timer(setting.device)
    sizes, patcher = training.Sizes.of(size), training.unet(size, setting.device, BF16)
    data, latent = training.dataset(size), {"samples": torch.zeros(1, 4, sizes.side, sizes.side)}
    prompt = [[torch.randn(1, sizes.tokens, sizes.context), {"pooled_output": torch.randn(1, training.POOLED)}]]
    seconds: dict[str, list[float]] = {"train": [], "sample": []}
    results, peaks = [], []
    thinned = [apply_todo(patcher, ToDoSettings(depth_factors="2", phase=phase))[0] for phase in ("both", "sampling")]
    for trains, samples in ((patcher, patcher), thinned):  # previews, which are sampled so, are whole with "both"
        with open_denoiser(trains) as denoiser, torch.inference_mode(False):
            state = training.begun(denoiser.module, data, size, "bf16")
            reset_peak(setting.device)
            state, found = training.seconds_of_steps(state, denoiser, data, 3 if setting.tiny else 7)
            peaks.append(peak_mb(setting.device))
        seconds["train"].append(statistics.median(found))
        lora.load(samples)
        samples.pre_run()
        picture = sample(samples, prompt, None, latent, 1, steps=4)
        work = functools.partial(sample, samples, prompt, None, latent, 1, steps=4)
        seconds["sample"].append(min(timer.seconds(work) for _ in range(3)))
        results.append((state.history.loss, picture))
    (losses, plain), (other_losses, found_picture) = results
    assert losses[0] != other_losses[0], "token downsampling changes no loss"
    assert not torch.equal(plain, found_picture), "token downsampling changes no sample"
    for name, (without, with_it) in seconds.items():
        yield row(name, with_it, "s", at_most(1.0), with_it / without, "of what it takes without Apply ToDo")
    if setting.device.type == "cuda":
        yield row("train, peak memory", peaks[1], "MB", at_most(PEAK), peaks[1] / peaks[0], "of the peak without it")


def bounds(what: str) -> dict[str, Bound]:
    """Faster than the plain model, as fast as the other node, and not far from the ideal."""
    faster = {f"{what}_{way}": at_least(1.0) for way in ("f2", "f44")}
    return {**faster, f"{what}_f2_over_kohya": at_most(PEER), f"{what}_f44_over_ideal": at_most(IDEAL)}
