"""Tells which trainer wrote a LoRA file whose tensors mean different things to different trainers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..adapters.file_format import Trainer
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
    trainers = {_by_name(key) for key in keys if ".oft_R." in key} - {""}
    if len(trainers) == 1:
        return trainers.pop()
    return ""


def _by_name(key: str) -> Trainer:
    if key.startswith(_UNDERSCORED) or key.endswith(_ONETRAINER_MARK):
        return "OneTrainer"
    if key.startswith(_PEFT_START) or _PEFT_ADAPTER in key:
        return "PEFT"
    return ""
