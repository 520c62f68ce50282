"""diffusers: a LoRA on its own models, saved by the pipeline of the family."""

from __future__ import annotations

from pathlib import Path

import diffusers
import peft
from diffusers.loaders import lora_pipeline
from diffusers.training_utils import _collate_lora_metadata
from torch import nn

from .. import seen
from ..case import Case, Written
from .drawing import draw

VERSION = diffusers.__version__
PIPELINES = {
    "sdxl": ("StableDiffusionXLLoraLoaderMixin", "unet"),
    "sd3": ("SD3LoraLoaderMixin", "transformer"),
    "flux": ("FluxLoraLoaderMixin", "transformer"),
    "wan": ("WanLoraLoaderMixin", "transformer"),
    "qwen": ("QwenImageLoraLoaderMixin", "transformer"),
    "z-image": ("ZImageLoraLoaderMixin", "transformer"),
}
KINDS = {
    "LoRA": {"r": 4, "lora_alpha": 4},
    "LoRA, alpha in the metadata": {"r": 4, "lora_alpha": 6},
    "LoRA, rank-stabilised": {"r": 4, "lora_alpha": 6, "use_rslora": True},
    "DoRA": {"r": 4, "lora_alpha": 4, "use_dora": True},
}


def _writer(family: str, convolutions: bool = False, **settings: object):
    pipeline, part = PIPELINES[family]

    def write(model: nn.Module, folder: Path) -> Written:
        kinds = (nn.Linear, nn.Conv2d) if convolutions else nn.Linear
        names = [name for name, layer in seen.layers(model).items() if isinstance(layer, kinds)]
        model.add_adapter(peft.LoraConfig(target_modules=names, **settings))
        draw(tensor for tensor in model.parameters() if tensor.requires_grad)
        saved = {
            f"{part}_lora_layers": peft.get_peft_model_state_dict(model),
            f"{part}_lora_adapter_metadata": _collate_lora_metadata({part: model})[f"{part}_lora_adapter_metadata"],
        }
        getattr(lora_pipeline, pipeline).save_lora_weights(str(folder), **saved)
        return Written(folder / "pytorch_lora_weights.safetensors", model)

    return write


CASES = [
    *(
        Case("diffusers", family, kind, _writer(family, **settings))
        for family in PIPELINES
        for kind, settings in KINDS.items()
    ),
    Case("diffusers", "sdxl", "LoRA with convolutions", _writer("sdxl", True, **KINDS["LoRA"])),
]
