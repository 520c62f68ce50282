"""AdamW (1711.05101), torch's own; fused where all tensors are on a CPU or a CUDA device."""

from __future__ import annotations

import torch

from ..option_readers import ABOVE_ZERO, BETAS
from ..record import BuildRequest, OptimizerRecord

OPTIONS = {"betas": BETAS, "eps": ABOVE_ZERO}
DEFAULTS = {"betas": (0.9, 0.999), "eps": 1e-8}
USUAL_RATES = (1e-6, 5e-3)  # from full weights to small LoRAs


def build(request: BuildRequest) -> torch.optim.Optimizer:
    """torch's AdamW over the parameter groups."""
    devices = {parameter.device.type for group in request.groups for parameter in group["params"]}
    return torch.optim.AdamW(
        request.groups,
        lr=request.learning_rate,
        weight_decay=request.weight_decay,
        fused=devices <= {"cpu", "cuda"},
        **request.options,
    )


RECORD = OptimizerRecord(
    name="adamw",
    help="the usual choice",
    full_name="torch.optim.adamw.AdamW",
    build=build,
    options=OPTIONS,
    option_defaults=DEFAULTS,
    element_wise=True,
    usual_rates=USUAL_RATES,
    diverges_from=0.1,
)
