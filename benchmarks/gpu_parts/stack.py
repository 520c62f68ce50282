"""LoRA stacks: applied, changed in strength, taken off, and sampled, as benchmarks/lora.py measures them."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator

import lora
import torch
from device_timer import Timer, peak_mb, reset_peak

from .case import CannotRun, Case, Row, Setting, noted, open_host, row

COUNTS = (1, 4, 8)
DTYPES = {"bf16": (torch.bfloat16, None), "fp8": (torch.float8_e4m3fn, torch.bfloat16)}
RANK, CHANGE = 16, 0.01
CHECKED = {
    "bf16": "equal to float64 to 2^-7, the base comes back byte for byte",
    "fp8": "one of float64's neighbors in fp8, the base comes back byte for byte",
}


def cases(setting: Setting) -> list[Case]:
    """Each type and number of LoRAs, and forwards through bypass."""
    open_host(setting)
    found = []
    for kind in DTYPES:
        for count in COUNTS:
            found.append(Case(f"{kind}, {count} LoRAs", functools.partial(measured, setting, kind, count)))
        found.append(Case(f"{kind}, sampled", functools.partial(sampled, setting, kind)))
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
    return 5


@functools.cache
def bench_on(setting: Setting, kind: str) -> lora.Bench:
    """The model in one type and the LoRAs for it, kept for the next cases."""
    if kind == "fp8":
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
    ways, note = ("ours", "core"), CHECKED[kind]
    if kind == "fp8" and not setting.comfyui:
        ways, note = ("ours",), f"{note}; no host's own way: the embedded host has none for fp8"
    elif kind == "bf16":
        error = bench.check(count)
        yield row("mean error against float64", error, "of the host's", error, "equal to the host's own way to 2^-6")
    reset_peak(setting.device)
    rounds = [bench.round(count, ways) for _ in range(rounds_of(setting))]
    seconds = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    for key, value in seconds.items():
        yield row(key, value, "s", value / seconds["copy"], f"in copies of the touched bytes; {note}")
    if setting.device.type == "cuda":
        yield row("both ways, peak memory", peak_mb(setting.device), "MB")


def sampled(setting: Setting, kind: str) -> Iterator[Row]:
    """What a forward costs with four LoRAs at the activations, and with a merged stack."""
    bench = bench_on(setting, kind)
    yield from noted(lora.forwards(bench, model_of(setting), kind, rounds_of(setting)), "share of a bare forward")
