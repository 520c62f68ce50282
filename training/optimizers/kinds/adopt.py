"""ADOPT (2411.02853) with its authors' clipping: Adam that scales a gradient by the moments of the steps before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..by_tensor import ByTensor
from ..record import OptimizerRecord
from . import adamw


class ADOPT(ByTensor):
    """m += (1 - beta1) (clip(g / max(sqrt(v), eps)) - m), p -= lr m, and only then v += (1 - beta2) (g^2 - v).

    The first step sets v = g^2 and moves nothing. Step t (from 0) clips to t^0.25. Weight decay is decoupled.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _move_(self, p: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state.update(step=1, exp_avg=torch.zeros_like(p), exp_avg_sq=gradient.square())
            return
        largest = state["step"] ** 0.25
        scaled = gradient / state["exp_avg_sq"].sqrt().clamp_(min=group["eps"])
        state["exp_avg"].lerp_(scaled.clamp_(-largest, largest), 1 - beta1)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(state["exp_avg"], alpha=-group["lr"])
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["step"] += 1


RECORD = OptimizerRecord(
    name="adopt",
    help="adamw that converges with any second beta",
    full_name="graft_nodes.training.optimizers.kinds.adopt.ADOPT",
    build=ADOPT.build,
    options=adamw.OPTIONS,
    option_defaults={"betas": (0.9, 0.9999), "eps": 1e-6},
    element_wise=True,
    usual_rates=adamw.USUAL_RATES,
    diverges_from=0.1,
)
