"""ai-toolkit: its networks on diffusers' models, saved as its model of each family does it."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import toolkit
import torch
from torch import nn

from ..case import Case, Written
from .drawing import draw

# layout: (what its network is told of the model, module and class of the model that converts the names)
MODELS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "sdxl": ({"is_sdxl": True}, ("", "")),
    "sd3": ({"is_v3": True}, ("", "")),
    "flux": ({"is_flux": True}, ("", "")),
    "wan": ({"is_transformer": True}, ("toolkit.models.wan21.wan21", "Wan21")),
    "qwen": (
        {"is_transformer": True},
        ("extensions_built_in.diffusion_models.qwen_image.qwen_image", "QwenImageModel"),
    ),
    "z-image": ({"is_transformer": True}, ("extensions_built_in.diffusion_models.z_image.z_image", "ZImageModel")),
}


def _model_of_the_toolkit(module: str, name: str) -> Any:
    """Its model of a family, without weights: it converts the names. The folder's other models are not imported."""
    folder = module.rpartition(".")[0].rpartition(".")[0]
    if folder.startswith("extensions") and folder not in sys.modules:
        package = types.ModuleType(folder)
        package.__path__ = [str(Path(toolkit.__file__).parents[1].joinpath(*folder.split(".")))]
        sys.modules[folder] = package
    model = object.__new__(getattr(importlib.import_module(module), name))
    model.use_old_lokr_format = True  # as its models start
    return model


def _writer(layout: str, kind: str, alpha: float = 2.0, **settings: Any):
    told, (module, name) = MODELS[layout]

    def write(model: nn.Module, folder: Path) -> Written:
        from toolkit.config_modules import NetworkConfig
        from toolkit.lora_special import LoRASpecialNetwork

        base = _model_of_the_toolkit(module, name) if module else None
        network = LoRASpecialNetwork(
            text_encoder=[],
            unet=model,
            lora_dim=4,
            alpha=alpha,
            multiplier=1.0,
            train_text_encoder=False,
            network_type=kind,
            network_config=NetworkConfig(type=kind, linear=4, linear_alpha=alpha, **settings),
            target_lin_modules=[type(model).__name__],
            target_conv_modules=[type(model).__name__],
            base_model=base,
            conv_lora_dim=settings.get("conv"),
            conv_alpha=settings.get("conv_alpha"),
            **told,
        )
        network.apply_to([], model, False, True)
        draw(network.parameters())
        path = folder / "ai-toolkit.safetensors"
        network.save_weights(str(path), torch.float32, {})
        network.eval().is_active = True
        network._update_torch_multiplier()
        network.base_model_of_its_own = base  # it holds a weak reference
        return Written(path, network)

    return write


REPOSITORY = "https://github.com/ostris/ai-toolkit"
CASES = [
    *(Case("ai-toolkit", layout, "LoRA", _writer(layout, "lora")) for layout in MODELS),
    *(Case("ai-toolkit", layout, "LoKr", _writer(layout, "lokr", lokr_factor=4)) for layout in MODELS),
    *(
        Case("ai-toolkit", layout, "LoKr, full rank", _writer(layout, "lokr", lokr_full_rank=True, lokr_factor=4))
        for layout in MODELS
    ),
    *(
        Case("ai-toolkit", layout, "LoKr, old format", _writer(layout, "lokr", lokr_factor=4, old_lokr_format=True))
        for layout in ("flux", "qwen")
    ),
    *(Case("ai-toolkit", layout, "DoRA", _writer(layout, "dora", alpha=4.0)) for layout in MODELS if layout != "sdxl"),
    Case("ai-toolkit", "sdxl", "LoRA with convolutions", _writer("sdxl", "lora", conv=2, conv_alpha=1.0)),
]
