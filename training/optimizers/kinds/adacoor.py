"""AdaCoor, EveryDream2's optimizer without a learning rate: v += eps g^2, p -= eps g / (sqrt(v) + eps), v in bf16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..by_tensor import ByTensor
from ..option_readers import ABOVE_ZERO
from ..record import DEFAULT_WEIGHT_DECAY, BuildRequest, OptimizerRecord, SettingsView, changed_settings

STEP = 1e-8  # EveryDream2's eps, the only number of AdaCoor
MOST_IMAGES = 8  # of a step, by EveryDream2's advice


class AdaCoor(ByTensor):
    """AdaGrad with another scale: a first step of about sqrt(eps) in every coordinate, then smaller ones.

    The `lr` of a group is ignored.
    """

    def __init__(self, params: Any, eps: float = STEP) -> None:
        if not eps > 0:
            raise ValueError(f"AdaCoor: eps is {eps}, expected above 0")
        super().__init__(params, {"eps": eps, "lr": eps})

    def _move_(self, p: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state, eps = self.state[p], group["eps"]
        if "v" not in state:
            state["v"] = torch.zeros_like(p, dtype=torch.bfloat16)
        state["v"].copy_(state["v"].float().addcmul_(gradient, gradient, value=eps))  # the sum in float32, rounded once
        p.addcdiv_(gradient, state["v"].float().sqrt_().add_(eps), value=-eps)


def _build(request: BuildRequest) -> torch.optim.Optimizer:
    return AdaCoor(request.groups, **request.options)


def _check_settings(settings: SettingsView) -> list[str]:
    decayed = settings.weight_decay not in (0.0, DEFAULT_WEIGHT_DECAY)
    unused = (
        ("text encoder learning rate", settings.text_encoder_rate, settings.text_encoder_rate != 0),
        ("LoRA+ ratio", settings.lora_plus, settings.lora_plus != 1),
        ("block learning rates", settings.block_rates, bool(settings.block_rates.strip())),
        ("scale rate with batch size", settings.scale_lr, settings.scale_lr),
        ("warmup steps", settings.warmup, settings.warmup > 0),
        ("learning rate schedule", settings.schedule, settings.schedule != "constant"),
        ("weight decay", settings.weight_decay, decayed),
    )
    return changed_settings("adacoor has no learning rate and no weight decay", unused)


def _remarks(settings: SettingsView) -> list[str]:
    rate, decay = settings.learning_rate, settings.weight_decay
    sentences = [f"adacoor ignores the learning rate ({rate:g}) and weight decay ({decay:g})"]
    images = settings.batch_size * settings.accumulation
    if images > MOST_IMAGES:
        sentences.append(
            f"a step has {images} images, and adacoor learns slowly with more than {MOST_IMAGES}: lower batch size or"
            " gradient accumulation"
        )
    return sentences


RECORD = OptimizerRecord(
    name="adacoor",
    help="EveryDream2's, without a learning rate, for at most 8 images a step",
    full_name="graft_nodes.training.adacoor.AdaCoor",  # where the class was when the first files were saved
    build=_build,
    options={"eps": ABOVE_ZERO},
    option_defaults={"eps": STEP},
    element_wise=True,
    fixed_rate=STEP,
    has_weight_decay=False,
    check_settings=_check_settings,
    remarks=_remarks,
)
