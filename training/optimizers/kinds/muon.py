"""Muon (Jordan 2024), torch's own, for matrices; AdamW updates all other tensors at the same learning rate."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..option_readers import COUNT
from ..record import BuildRequest, OptimizerRecord, RunFacts, TorchClass
from . import adamw, sgd

MATRICES, OTHERS = "matrices", "others"


def _part_of(tensor: Tensor) -> str:
    if tensor.ndim == 2:
        return MATRICES
    return OTHERS


def _build(request: BuildRequest) -> torch.optim.Optimizer:
    muon_options, adamw_options = {}, {}
    for name, value in request.options.items():
        if name in adamw.OPTIONS:
            adamw_options[name] = value
        else:
            muon_options[name] = value
    if request.part != MATRICES:
        return adamw.build(replace(request, options=adamw_options))
    return torch.optim.Muon(
        request.groups,
        lr=request.learning_rate,
        weight_decay=request.weight_decay,
        adjust_lr_fn="match_rms_adamw",  # so that AdamW's learning rates work
        **muon_options,
    )


def _check_run(run: RunFacts) -> list[str]:
    if any(_part_of(tensor) == MATRICES for tensor in run.trained.values()):
        return []
    return ["muon moves matrices and none of the trained tensors is one: use adamw"]


RECORD = OptimizerRecord(
    name="muon",
    help="for the matrices of LoRA and linear layers; adamw trains the rest",
    full_name="torch.optim._muon.Muon",
    torch_class=TorchClass("Muon", "2.9"),
    build=_build,
    options={**sgd.OPTIONS, "ns_steps": COUNT, **adamw.OPTIONS},
    option_defaults=adamw.DEFAULTS,
    element_wise=False,
    usual_rates=adamw.USUAL_RATES,
    diverges_from=0.5,
    check_options=sgd.check_options,
    check_run=_check_run,
    parts=(MATRICES, OTHERS),
    part_of=_part_of,
)
