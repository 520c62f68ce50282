"""OneTrainer: its adapters on diffusers' models, in each of its LoRA formats, by its savers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..case import Case, Written
from .drawing import draw

MODELS = {  # layout: (module of the model, type of model, part, module of the saver)
    "sdxl": ("StableDiffusionXLModel", "STABLE_DIFFUSION_XL_10_BASE", "unet", "stableDiffusionXL.StableDiffusionXL"),
    "sd3": ("StableDiffusion3Model", "STABLE_DIFFUSION_35", "transformer", "stableDiffusion3.StableDiffusion3"),
    "flux": ("FluxModel", "FLUX_DEV_1", "transformer", "flux.Flux"),
    "qwen": ("QwenModel", "QWEN", "transformer", "qwen.Qwen"),
    "z-image": ("ZImageModel", "Z_IMAGE", "transformer", "zImage.ZImage"),
}
RANKED = {"lora_rank": 4, "lora_alpha": 2.0}
LOKR = {"peft_type": "LOKR", "lokr_dim": 2, "lora_alpha": 1.0, "lokr_decompose_factor": 4}
OFT = {"peft_type": "OFT_2", "oft_block_size": 4}
KINDS = {
    "LoRA": RANKED,
    "DoRA": {**RANKED, "lora_decompose": True},
    "DoRA by output": {**RANKED, "lora_decompose": True, "lora_decompose_output_axis": True},
    "LoHa": {**RANKED, "peft_type": "LOHA"},
    "LoKr": LOKR,
    "LoKr with DoRA": {**LOKR, "lokr_weight_decompose": True},
    "OFT": OFT,
    "OFT, shared": {**OFT, "oft_block_share": True},
    "OFT, scaled": {**OFT, "oft_scaled": True},
}
FORMATS = ("LEGACY", "KOHYA", "DIFFUSERS", "ORIGINAL", "COMFY")
CONVOLUTIONS = {"LoKr, Tucker": {**LOKR, "lokr_use_tucker": True}}


def _config(settings: dict[str, Any]) -> Any:
    from modules.util.config.TrainConfig import TrainConfig
    from modules.util.enum.ModelType import PeftType

    config = TrainConfig.default_values()
    config.train_device = "cpu"
    for name, value in settings.items():
        setattr(config, name, PeftType[value] if name == "peft_type" else value)
    return config


def _writer(layout: str, format_name: str, settings: dict[str, Any]):
    model_name, model_type, part, saver_name = MODELS[layout]

    def write(theirs: nn.Module, folder: Path) -> Written:
        from modules.module.LoRAModule import LoRAModuleWrapper
        from modules.util.enum.ModelFormat import ModelFormat
        from modules.util.enum.ModelType import ModelType

        config = _config(settings)
        saved_as = ModelFormat[f"{format_name}_LORA"]
        model = getattr(importlib.import_module(f"modules.model.{model_name}"), model_name)(ModelType[model_type])
        setattr(model, part, theirs)
        model.train_config = config
        fused = {"fusion_spec": model.fusion_groups(), "fuse": saved_as.needs_qkv_fusion()}
        network = LoRAModuleWrapper(theirs, part, config, [], **fused)
        setattr(model, f"{part}_lora", network)
        draw(network.parameters(), 0.05 if "oft_block_size" in settings else 0.2)
        network.hook_to_module()
        package, _, name = saver_name.partition(".")
        saver = getattr(importlib.import_module(f"modules.modelSaver.{package}.{name}LoRASaver"), f"{name}LoRASaver")
        path = folder / "onetrainer.safetensors"
        saver().save(model, saved_as, str(path), torch.float32)
        modules = nn.ModuleList(module for module in network.modules() if isinstance(module, nn.Module))
        return Written(path, modules.eval())

    return write


def _spoilt(layout: str, kind: str, name: str) -> dict[str, Any]:
    """Its savers put diffusers' shift and scale into the original's order in `lora_up` and `dora_scale` alone."""
    if layout not in ("flux", "sd3") or name in ("LEGACY", "DIFFUSERS") or not kind.startswith(("LoHa", "LoKr")):
        return {}
    remark = "without the last modulation, whose rows its saver leaves in diffusers' order under the original's name"
    return {"spoilt": ("norm_out.linear", "transformer_blocks.1.norm1_context.linear"), "remark": remark}


def _cases() -> list[Case]:
    cases = []
    for layout in MODELS:
        kinds = KINDS | (CONVOLUTIONS if layout == "sdxl" else {})
        for kind, settings in kinds.items():
            formats = FORMATS if kind in ("LoRA", "DoRA by output") and layout != "sdxl" else ("LEGACY", "COMFY")
            if layout == "sdxl":
                formats = FORMATS if kind == "LoRA" else ("LEGACY", "KOHYA")
            for name in formats:
                write = _writer(layout, name, settings)
                cases.append(Case("OneTrainer", layout, f"{kind}, {name} format", write, **_spoilt(layout, kind, name)))
    return cases


REPOSITORY = "https://github.com/Nerogar/OneTrainer"
CASES = _cases()
