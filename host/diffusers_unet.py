"""A MODEL's UNet as diffusers has it: its weights as they sample, under diffusers' names, beside a config.json."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from ..patches.models.diffusers_config import diffusers_config
from ..patches.models.unet import diffusers_name
from ..patches.patching.fuse import MERGEABLE_DTYPES
from ..storage.atomic import write_whole
from ..storage.disk_errors import explain_disk_errors
from ..storage.shards import save_shards
from . import events
from .base_weights import base_weights
from .comfyui_objects import Model
from .model_difference import weight_as_sampled

_PREFIX = "diffusion_model."
_FILE = "diffusion_pytorch_model"  # what diffusers looks for


def save(patcher: Model, folder: Path, dtype: torch.dtype, most: int = 0) -> int:
    """Write a UNet so that diffusers' `UNet2DConditionModel.from_pretrained` reads it.

    Args:
        patcher: a MODEL; its patches and LoRA stacks are merged into what is written.
        folder: where the files go.
        dtype: of the weights in them.
        most: bytes of a file at most; 0 is one file.

    Returns:
        How many parameters were written.

    Raises:
        ValueError: for a model of another layout, or with quantized weights.
        OSError: where a file cannot be written.
    """
    try:
        config = diffusers_config(patcher.model.model_config.unet_config)
    except ValueError as error:
        raise ValueError(f"Save UNet for diffusers: {error}.") from error
    bases = {name: weight for name, weight in base_weights(patcher).items() if name.startswith(_PREFIX)}
    quantized = [name for name, weight in bases.items() if weight.dtype not in MERGEABLE_DTYPES]
    if quantized:
        raise ValueError(
            f"Save UNet for diffusers: {quantized[0]} is quantized ({bases[quantized[0]].dtype}). Load the model in"
            " another precision."
        )
    advance = events.step_counter(len(bases))
    weights: dict[str, torch.Tensor] = {}
    for name, base in bases.items():
        layer, _, kind = name.removeprefix(_PREFIX).rpartition(".")
        weights[f"{diffusers_name(layer)}.{kind}"] = weight_as_sampled(patcher, name, base).to(dtype).contiguous()
        advance()
    with explain_disk_errors(str(folder)):
        save_shards(weights, folder, _FILE, most, {"format": "pt"})
        write_whole(str(folder / "config.json"), [json.dumps(config, indent=2).encode()])
    return sum(weight.numel() for weight in weights.values())
