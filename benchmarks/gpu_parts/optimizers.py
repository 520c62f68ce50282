"""Every optimizer on 1,100 tensors, as many as a LoRA for SDXL has: seconds of a step, and what it waits for."""

from __future__ import annotations

import functools
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from device_timer import Timer
from graft_nodes.training.optimizers.registry import OPTIMIZERS
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.optimizers.stepper import OptimizerStepper
from torch import Tensor

from .case import Case, Row, Setting, at_most, need, row

COUNT, TINY_COUNT, RANK, WIDTH, ROUNDS = 1100, 8, 16, 1280, 5
WAITS = 1  # a step, to read its loss and the gradient's norm
ADAMW, SECONDS = 1.25, 0.06  # of torch's own loop; 15% of a step of SDXL's


def cases(setting: Setting) -> list[Case]:
    """Each optimizer."""
    return [Case(name, functools.partial(measured, setting, name)) for name in OPTIMIZERS.names()]


def tensors(setting: Setting) -> dict[str, Tensor]:
    """Pairs of a LoRA."""
    draws, found = torch.Generator().manual_seed(0), {}
    for number in range((TINY_COUNT if setting.tiny else COUNT) // 2):
        for side, shape in (("down", (RANK, WIDTH)), ("up", (WIDTH, RANK))):
            found[f"layers.{number}.lora_{side}.weight"] = torch.randn(shape, generator=draws)
    return found


def measured(setting: Setting, name: str) -> Iterator[Row]:
    """A step with its norm and clipping."""
    record = OPTIMIZERS.get(name)
    if record.package is not None:
        need(record.package.module, f"for {name}")
    settings = OptimizerSettings(name, learning_rate=record.fixed_rate or 1e-4)
    stepper = OptimizerStepper(settings, tensors(setting), {}, setting.device, 0)

    def step(number: int) -> None:
        stepper.prepare(settings.learning_rate, number)
        set_gradients(stepper.trained)
        stepper.norm()
        stepper.step_()

    timer = Timer(setting.device)
    for number in range(2):
        step(number)
    spent = statistics.median(timer.seconds(functools.partial(step, number)) for number in range(2, 2 + ROUNDS))
    if setting.device.type != "cpu":
        waits = waits_of(setting.device, functools.partial(step, 2 + ROUNDS))
        yield row("waits", len(waits), "a step", at_most(WAITS), note="; ".join(sorted(set(waits))[:3]))
    if name != "adamw":
        yield row("a step", spent, "s", at_most(SECONDS), note=f"on {len(stepper.trained)} tensors")
        return
    trained = {key: tensor.to(setting.device).requires_grad_() for key, tensor in tensors(setting).items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-4, fused=setting.device.type == "cuda")

    def bare() -> None:
        optimizer.zero_grad()
        set_gradients(trained)
        float(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0))
        optimizer.step()

    bare()
    limit = statistics.median(timer.seconds(bare) for _ in range(ROUNDS))
    yield row("a step", spent, "s", at_most(ADAMW), spent / limit, f"of torch's; {len(trained)} tensors")


def set_gradients(trained: dict[str, Tensor]) -> None:
    """Gradients as large as the tensors."""
    for tensor in trained.values():
        tensor.grad = tensor.detach() * 0.01


def waits_of(device: torch.device, work: Callable[[], Any]) -> list[str]:
    """Where the host waits for the device: torch warns of it on CUDA, the second device counts it."""
    if device.type != "cuda":
        from graft_nodes.tests.second_device.meter import meter

        meter.clear()
        work()
        return list(meter.synchronizations)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{one.filename}:{one.lineno}" for one in found if "synchronizing" in str(one.message)]
