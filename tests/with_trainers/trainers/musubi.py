"""musubi-tuner: its networks on its own models, and its conversions for ComfyUI."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import layouts
from ..case import Case, State, Written
from .drawing import draw

NETWORKS = "musubi_tuner.networks"


def _same(state: dict[str, Tensor]) -> State:
    return state


def _scales(state: dict[str, Tensor]) -> State:
    return {name.replace("_norm.weight", "_norm.scale"): tensor for name, tensor in state.items()}


def _wan(state: State) -> nn.Module:
    from musubi_tuner.wan.modules.model import WanModel

    sizes = {"dim": 36, "ffn_dim": 32, "freq_dim": 16, "text_dim": 12, "num_heads": 2, "num_layers": 2}
    return layouts.filled(WanModel(**sizes, attn_mode="torch"), state)


def _qwen(state: State) -> nn.Module:
    from musubi_tuner.qwen_image.qwen_image_model import QwenImageTransformer2DModel

    return layouts.filled(QwenImageTransformer2DModel(**layouts.LAYOUTS["qwen"].settings), state)


def _z_image(state: State) -> nn.Module:
    from musubi_tuner.zimage import zimage_model

    sizes = {**layouts.LAYOUTS["z-image"].settings, "axes_dims": (4, 6, 6), "axes_lens": (64, 64, 64)}
    model = zimage_model.ZImageTransformer2DModel(**sizes)
    model.t_embedder = zimage_model.TimestepEmbedder(256, mid_size=256)
    return layouts.filled(model, layouts.LAYOUTS["z-image"].to_diffusers(dict(state)))


def _flux(state: State) -> nn.Module:
    from musubi_tuner.flux import flux_models

    sizes = flux_models.FluxParams(
        64, 8, 12, layouts.FLUX_WIDTH, 4.0, 2, 2, 2, [4, 6, 6], 10000, qkv_bias=True, guidance_embed=True
    )
    return layouts.filled(flux_models.Flux(sizes, attn_mode="torch"), _scales(dict(state)))


MODELS = {
    "wan": ("lora_wan", _wan, _same),
    "qwen": ("lora_qwen_image", _qwen, _same),
    "z-image": ("lora_zimage", _z_image, None),
    "flux": ("lora_flux", _flux, _scales),
}


def _writer(module: str, convert: str = "", **settings: object):
    def write(model: nn.Module, folder: Path) -> Written:
        networks = importlib.import_module(f"{NETWORKS}.{module}")
        network = networks.create_arch_network(1.0, 4, 2.0, None, None, model, **settings)
        network.apply_to(None, model, False, True)
        draw(network.parameters())
        path = folder / "musubi.safetensors"
        network.eval().save_weights(str(path), torch.float32, {"ss_network_module": f"networks.{module}"})
        converted = folder / "converted.safetensors"
        if convert == "other":
            importlib.import_module("musubi_tuner.convert_lora").convert(str(path), str(converted), "other", None)
            path = converted
        if convert == "comfyui":
            conversion = importlib.import_module(f"{NETWORKS}.convert_z_image_lora_to_comfy")
            named = {"src_path": str(path), "dst_path": str(converted), "reverse": False, "lokr_rank": None}
            conversion.main(argparse.Namespace(**named))
            path = converted
        return Written(path, network)

    return write


def _cases() -> list[Case]:
    cases = []
    for layout, (lora, model, names) in MODELS.items():
        conversions = {"": "", ", converted": "other"}
        if layout == "z-image":
            conversions[", converted for ComfyUI"] = "comfyui"
        for kind, module, settings in (("LoRA", lora, {}), ("LoHa", "loha", {}), ("LoKr", "lokr", {"factor": "4"})):
            for words, convert in conversions.items():
                if kind == "LoKr" and convert == "comfyui":
                    continue  # its script ends with an error of safetensors: a tensor is not contiguous
                write = _writer(module, convert, **settings)
                changes = None
                cases.append(Case("musubi-tuner", layout, kind + words, write, model, names, changes))
    return cases


REPOSITORY = "https://github.com/kohya-ss/musubi-tuner"
CASES = _cases()
