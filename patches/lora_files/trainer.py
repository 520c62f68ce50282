"""Tells which trainer wrote a LoRA file whose tensors mean different things to different trainers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..adapters.file_format import Trainer
from ..adapters.tlora import BASE_LAMBDAS, SCHEDULE
from .peft_config import peft_configs

_ONETRAINER_METADATA = ("ot_branch", "ot_revision", "ot_config")
_ONETRAINER_MARK = ".oft_R.scaled_oft"
_UNDERSCORED = "lora_"  # kohya's names: OneTrainer writes them, PEFT only names with dots
_PEFT_START, _PEFT_ADAPTER = "base_model.model.", ".oft_R.default."


def oft_trainer(keys: Iterable[str], metadata: Mapping[str, str]) -> Trainer:
    """Who trained the OFT (`oft_R`) in a file, PEFT or OneTrainer: by its metadata, else by its names; "" if neither
    tells.
    """
    if any(entry in metadata for entry in _ONETRAINER_METADATA):
        return "OneTrainer"
    if peft_configs(metadata):
        return "PEFT"
    trainers = {_trainer_of_key(key) for key in keys if ".oft_R." in key} - {""}
    if len(trainers) == 1:
        return trainers.pop()
    return ""


MIN_RANK, RANK_EXPONENT = "ss_tlora_min_rank", "ss_tlora_alpha_rank_scale"  # metadata, with the authors' names
_AUTHORS_MIN_RANK, _AUTHORS_EXPONENT = 1, 1.0  # of their inference where its config does not say them


def rank_schedules(keys: Iterable[str], metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors with which Graft writes a T-LoRA's smallest rank and exponent, for the layers of a file that have
    none: from its metadata, else the authors' defaults.
    """
    names = set(keys)
    layers = {key.removesuffix(f".{BASE_LAMBDAS}") for key in names if key.endswith(f".{BASE_LAMBDAS}")}
    if not layers:
        return {}
    schedule = torch.tensor([_AUTHORS_MIN_RANK, _AUTHORS_EXPONENT])
    given = metadata.get(MIN_RANK, ""), metadata.get(RANK_EXPONENT, "")
    try:
        schedule = torch.tensor([float(value or default) for value, default in zip(given, schedule, strict=True)])
    except ValueError as error:
        raise ValueError(f"its metadata {MIN_RANK} and {RANK_EXPONENT} are not numbers: {given}") from error
    missing = (f"{layer}.{SCHEDULE}" for layer in layers)
    return {name: schedule for name in sorted(missing) if name not in names}


def _trainer_of_key(key: str) -> Trainer:
    if key.startswith(_UNDERSCORED) or key.endswith(_ONETRAINER_MARK):
        return "OneTrainer"
    if key.startswith(_PEFT_START) or _PEFT_ADAPTER in key:
        return "PEFT"
    return ""
