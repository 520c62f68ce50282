"""AdamW with its moments in 8 bits (2110.02861), from bitsandbytes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ..record import BuildRequest, OptimizerRecord, Package
from . import adamw

SMALL = 4096  # tensors with fewer numbers keep moments of 32 bits
BLOCK = 256  # numbers that share a scale


class StatesWithoutKernels(torch.optim.Optimizer):
    """The states of AdamW8bit and nothing else: for the meta device, where bitsandbytes' kernels do not run.

    They are two moments, each of a byte for a number and a float32 scale for a block.
    """

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Makes the states of what has a gradient; changes no weight."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self.state:
                    self.state[parameter] = _states(parameter)


def _states(parameter: torch.Tensor) -> dict[str, Any]:
    if parameter.numel() < SMALL:
        return {f"state{moment}": torch.empty(parameter.shape, device=parameter.device) for moment in (1, 2)}
    states = {}
    for moment in (1, 2):
        states[f"state{moment}"] = torch.empty(parameter.shape, dtype=torch.uint8, device=parameter.device)
        states[f"absmax{moment}"] = torch.empty(-(-parameter.numel() // BLOCK), device=parameter.device)
    return states


def _build(request: BuildRequest) -> torch.optim.Optimizer:
    devices = {parameter.device.type for group in request.groups for parameter in group["params"]}
    if devices == {"meta"}:
        return StatesWithoutKernels(request.groups, {"lr": request.learning_rate})
    library: Any = importlib.import_module("bitsandbytes")
    return library.optim.AdamW8bit(
        request.groups, lr=request.learning_rate, weight_decay=request.weight_decay, **request.options
    )


RECORD = OptimizerRecord(
    name="adamw8bit",
    help="adamw with a quarter of its optimizer memory",
    full_name="bitsandbytes.optim.adamw.AdamW8bit",
    package=Package("bitsandbytes", "bitsandbytes"),
    build=_build,
    options=adamw.OPTIONS,
    option_defaults=adamw.DEFAULTS,
    element_wise=False,
    usual_rates=adamw.USUAL_RATES,
    diverges_from=0.1,
)
