"""CAME (2307.02047): Adafactor with momentum, whose steps are smaller where the momentum disagrees with the updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..by_tensor import ByTensor, clip_rms_, inverse_root_, new_moment
from ..option_readers import ABOVE_ZERO, THREE_BETAS
from ..record import OptimizerRecord
from . import adamw

_SMALLEST_SQUARE, _SMALLEST_DISTANCE = 1e-30, 1e-16  # the authors' eps, added to g^2 and to (u - m)^2


class CAME(ByTensor):
    """u = g / sqrt(v), clipped; m is the mean of u; a matrix moves by lr m / sqrt(s), with s the mean of (u - m)^2,
    and a vector by lr m. v and s are kept as means of rows and columns. Weight decay is decoupled.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "clip_threshold": clip_threshold, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def _move_(self, p: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state, (beta1, beta2, beta3) = self.state[p], group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(gradient)
            state.update(new_moment(gradient, "row_var", "col_var", "variance"))
            if gradient.dim() > 1:
                state.update(new_moment(gradient, "row_distance", "col_distance", ""))
        square = gradient.square().add_(_SMALLEST_SQUARE)
        if gradient.dim() < 2:
            scale = state["variance"].lerp_(square, 1 - beta2).rsqrt()
        else:
            scale = inverse_root_(state["row_var"], state["col_var"], square, 1 - beta2)
        update = clip_rms_(scale.mul_(gradient), group["clip_threshold"])
        mean = state["exp_avg"].lerp_(update, 1 - beta1)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        if gradient.dim() > 1:
            distance = update.sub_(mean).square_().add_(_SMALLEST_DISTANCE)
            mean = mean * inverse_root_(state["row_distance"], state["col_distance"], distance, 1 - beta3)
        p.add_(mean, alpha=-group["lr"])


RECORD = OptimizerRecord(
    name="came",
    help="half of adamw's optimizer memory, with adafactor's factored moments and a momentum",
    full_name="graft_nodes.training.optimizers.kinds.came.CAME",
    build=CAME.build,
    options={"betas": THREE_BETAS, "clip_threshold": ABOVE_ZERO},
    option_defaults={"betas": (0.9, 0.999, 0.9999), "clip_threshold": 1.0},
    element_wise=False,
    usual_rates=adamw.USUAL_RATES,
    diverges_from=0.1,
)
