"""Adafactor (1804.04235), torch's own: row and column averages in place of a second moment."""

from __future__ import annotations

import torch

from ..option_readers import number
from ..record import BuildRequest, OptimizerRecord, TorchClass


def _build(request: BuildRequest) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(
        request.groups, lr=request.learning_rate, weight_decay=request.weight_decay, **request.options
    )


RECORD = OptimizerRecord(
    name="adafactor",
    help="almost no optimizer memory; try learning rate 0.01",
    full_name="torch.optim._adafactor.Adafactor",
    torch_class=TorchClass("Adafactor", "2.5"),
    build=_build,
    options={"beta2_decay": number(-10.0, 0.0), "d": number(1.0)},
    element_wise=False,
    diverges_from=3.0,
)
