"""How the trained tensors move: AdamW (arXiv 1711.05101), with learning-rate schedules that are functions of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

OPTIMIZERS = ("adamw",)
LATER_OPTIMIZERS = ("adamw8bit", "adafactor", "lion", "prodigy", "schedulefree", "muon", "adacoor", "sgd")
SCHEDULES = ("constant", "linear", "cosine", "cosine-restarts", "polynomial")
PRECISIONS = ("auto", "float32", "bf16")
LATER = "is not available in this version of Graft"


@dataclass(frozen=True)
class OptimizerSettings:
    """Settings of the optimiser; plain values, checked on creation.

    `total_steps` is the horizon of the schedule, `warmup` its first steps, `floor` the share of the learning rate that is left at the end.
    `lora_plus` multiplies the rate of up weights (LoRA+, 2402.12354). `scale_lr` multiplies the rate by (batch * accumulation)^0.55.
    """

    optimizer: str = "adamw"
    learning_rate: float = 1e-4
    schedule: str = "constant"
    warmup: int = 0
    total_steps: int = 1000
    floor: float = 0.0
    batch_size: int = 1
    accumulation: int = 1
    clip_norm: float = 1.0
    weight_decay: float = 0.01
    lora_plus: float = 1.0
    precision: str = "auto"
    checkpointing: bool = False
    scale_lr: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        wrong = []
        if self.optimizer in LATER_OPTIMIZERS:
            wrong.append(f"optimizer {self.optimizer} {LATER}; use adamw")
        elif self.optimizer not in OPTIMIZERS:
            wrong.append(f"optimizer is {self.optimizer!r}, expected one of {', '.join(OPTIMIZERS)}")
        if self.schedule not in SCHEDULES:
            wrong.append(f"schedule is {self.schedule!r}, expected one of {', '.join(SCHEDULES)}")
        if self.precision in ("fp16", "full-bf16"):
            wrong.append(f"precision {self.precision} {LATER}; use auto, float32 or bf16")
        elif self.precision not in PRECISIONS:
            wrong.append(f"precision is {self.precision!r}, expected one of {', '.join(PRECISIONS)}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            wrong.append(f"learning_rate is {self.learning_rate}, expected a finite number above 0")
        for name in ("total_steps", "batch_size", "accumulation"):
            if getattr(self, name) < 1:
                wrong.append(f"{name} is {getattr(self, name)}, expected 1 or more")
        for name in ("warmup", "clip_norm", "weight_decay"):
            if not getattr(self, name) >= 0:
                wrong.append(f"{name} is {getattr(self, name)}, expected 0 or more")
        if self.warmup > self.total_steps:
            wrong.append(f"warmup is {self.warmup} steps and total_steps only {self.total_steps}")
        if not 0.0 <= self.floor <= 1.0:
            wrong.append(f"floor is {self.floor}, expected a share from 0 to 1 of the learning rate")
        if self.lora_plus <= 0:
            wrong.append(f"lora_plus is {self.lora_plus}, expected above 0 (1 is off)")
        if wrong:
            raise ValueError("GraftOptimizer: " + "; ".join(wrong) + ".")


def peak_rate(settings: OptimizerSettings) -> float:
    """The learning rate that the schedule multiplies."""
    if settings.scale_lr:
        return settings.learning_rate * (settings.batch_size * settings.accumulation) ** 0.55
    return settings.learning_rate


def rate_at(settings: OptimizerSettings, step: int) -> float:
    """Learning rate of optimiser step `step` (0 is the first). Warm-up rises linearly; step `total_steps` and later have the floor.

    linear and polynomial (power 2) and cosine fall over what follows the warm-up; cosine-restarts falls four times over the same length.
    """
    peak = peak_rate(settings)
    if step < settings.warmup:
        return peak * (step + 1) / settings.warmup
    if settings.schedule == "constant":
        return peak
    # The last step of the run (total_steps - 1) is at the floor, the first after the warm-up at the peak.
    length = max(1, settings.total_steps - 1 - settings.warmup)
    done = min(1.0, (step - settings.warmup) / length)
    if settings.schedule == "cosine-restarts" and done < 1.0:
        done = (done * 4) % 1.0
    left = {"linear": 1 - done, "polynomial": (1 - done) ** 2}.get(settings.schedule, 0.5 * (1 + math.cos(math.pi * done)))
    return peak * (settings.floor + (1 - settings.floor) * left)


def build(settings: OptimizerSettings, trained: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """AdamW over the trained tensors, with the moments of `saved` (`exp_avg/<name>`, `exp_avg_sq/<name>`, `step/<name>`)."""
    fast = {name: t for name, t in trained.items() if settings.lora_plus != 1.0 and name.endswith(".lora_up.weight")}
    slow = {name: t for name, t in trained.items() if name not in fast}
    groups = [{"params": list(part.values()), "ratio": ratio} for part, ratio in ((slow, 1.0), (fast, settings.lora_plus)) if part]
    fused = {tensor.device.type for tensor in trained.values()} <= {"cpu", "cuda"}
    optimizer = torch.optim.AdamW(
        groups, lr=peak_rate(settings), betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay, fused=fused
    )
    for name, tensor in trained.items():
        if f"exp_avg/{name}" in saved:
            optimizer.state[tensor] = {
                "step": saved[f"step/{name}"].clone().to(tensor.device if tensor.device.type != "cpu" else "cpu"),
                "exp_avg": saved[f"exp_avg/{name}"].to(tensor.device, copy=True),
                "exp_avg_sq": saved[f"exp_avg_sq/{name}"].to(tensor.device, copy=True),
            }
    return optimizer


def moments(optimizer: torch.optim.Optimizer, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimiser's tensors by name, copied to the CPU: the inverse of `build`."""
    out: dict[str, Tensor] = {}
    for name, tensor in trained.items():
        for key, value in optimizer.state.get(tensor, {}).items():
            out[f"{key}/{name}"] = value.detach().to("cpu", torch.float32, copy=True)
    return out


def set_rate_(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group to `rate` times the group's ratio."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["ratio"]
