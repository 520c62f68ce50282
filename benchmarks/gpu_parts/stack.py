"""LoRA stacks: applied, changed in strength, taken off, and sampled, as benchmarks/lora.py measures them."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator

import lora
import torch
from device_timer import Timer

from .case import CannotRun, Case, Row, Setting, at_most, bounded, open_host, row

COUNTS = (8, 4, 1)
FP8 = "fp8"
DTYPES = {"fp16": (torch.float16, None), "bf16": (torch.bfloat16, None), FP8: (torch.float8_e4m3fn, torch.bfloat16)}
RANK, CHANGE = 16, 0.01
INVOKEAI = 2.4  # seconds that InvokeAI says it takes to apply LoRAs to SDXL
ERROR = 1.01  # of the host's mean error: where both round once, neither is better
WAYS = ("apply", "strength", "remove")  # of what is measured, those that the host has a way for
OVERHEAD = 1.35  # forwards with eight LoRAs of rank 8 at the activations
MERGED = 1.02  # forwards with a merged stack
EXACT = {
    "fp16": "equal to float64 to 2^-10, the base comes back byte for byte",
    "bf16": "equal to float64 to 2^-7, the base comes back byte for byte",
    "fp8": "one of float64's neighbors in fp8, the base comes back byte for byte",
}


def cases(setting: Setting) -> list[Case]:
    """Each type: eight LoRAs, forwards through bypass, and fewer LoRAs."""
    open_host(setting)
    found = []
    for kind in DTYPES:
        first, *others = [
            Case(f"{kind}, {count} LoRAs", functools.partial(measured, setting, kind, count)) for count in COUNTS
        ]
        found += [first, Case(f"{kind}, sampled", functools.partial(sampled, setting, kind)), *others]
    return found


def model_of(setting: Setting) -> str:
    """The UNet's shape."""
    if setting.tiny:
        return "tiny"
    return "sdxl"


def rounds_of(setting: Setting) -> int:
    """How often each is measured."""
    if setting.tiny:
        return 1
    return 3


@functools.cache
def bench_on(setting: Setting, kind: str) -> lora.Bench:
    """The model in one type and the LoRAs for it, kept for the next cases."""
    if kind == FP8:
        need_fp8(setting.device)
    dtype, compute = DTYPES[kind]
    bench = lora.Bench(model_of(setting), dtype, RANK, max(COUNTS), CHANGE, Timer(setting.device), compute)
    if setting.tiny:
        bench.side = 8
    return bench


def need_fp8(device: torch.device) -> None:
    """Raise CannotRun where no tensor can be fp8."""
    try:
        torch.ones(1, device=device).to(torch.float8_e4m3fn).float()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise CannotRun(f"this device has no fp8: {error}") from error


def measured(setting: Setting, kind: str, count: int) -> Iterator[Row]:
    """Median seconds of Graft's way and the host's own, over a copy of the bytes that a stack touches."""
    bench = bench_on(setting, kind)
    bench.check_exact(count)
    ways, note = ("ours", "core"), EXACT[kind]
    if kind == FP8 and not setting.comfyui:
        ways, note = ("ours",), f"{note}; no host's own way: the embedded host has none for fp8"
    elif kind != FP8:
        error = bench.check(count)
        same = "equal to the host's own way to 2^-6"
        yield row("mean error against float64", error, "of the host's", at_most(ERROR), note=same)
    rounds = [bench.round(count, ways) for _ in range(rounds_of(setting))]
    seconds = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    copies = {key: value / seconds["copy"] for key, value in seconds.items()}
    yield row("apply, beside InvokeAI's seconds", seconds["ours apply"], "s", at_most(INVOKEAI), note=note)
    for way in WAYS:
        ours, core = f"ours {way}", f"core {way}"
        note = f"{copies[ours]:.1f} copies of the touched bytes"
        if core in seconds:
            yield row(way, seconds[ours], "s", at_most(1.0), seconds[ours] / seconds[core], f"of the host's; {note}")


def sampled(setting: Setting, kind: str) -> Iterator[Row]:
    """What a forward costs with four LoRAs at the activations, and with a merged stack."""
    bench = bench_on(setting, kind)
    rows = lora.forwards(bench, model_of(setting), kind, rounds_of(setting))
    bounds = {"bypass_overhead_8_of_rank_8": at_most(OVERHEAD), "merged_overhead": at_most(MERGED)}
    bounds.update({name: at_most(1.0) for name in ("bypass_vs_core", "bypass_vs_core_8_of_rank_8")})
    yield from bounded(rows, bounds, "of a bare forward, or of what the host's own way adds to one")
