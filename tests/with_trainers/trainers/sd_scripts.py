"""sd-scripts: its networks on its own models."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import layouts
from ..case import Case, State, Written
from .drawing import draw
from .widths import narrowed

SDXL = {
    **layouts.UNET,
    "transformer_depth": [0, 0, 1, 1, 1, 1],
    "transformer_depth_output": [0, 0, 0, 1, 1, 1, 1, 1, 1],
    "transformer_depth_middle": 1,
    "num_head_channels": 64,
}
REAL_FLUX = {3072: layouts.FLUX_WIDTH, 12288: 4 * layouts.FLUX_WIDTH}
FLUX = {"depth": 2, "depth_single_blocks": 2, "mlp_ratio": 4.0, "hidden_size": layouts.FLUX_WIDTH}


def _same(state: dict[str, Tensor]) -> State:
    return state


def _sdxl(state: State) -> nn.Module:
    """Its UNet with a tenth of the width and one transformer block where there are more."""
    from library import sdxl_original_unet as unet

    if not hasattr(unet.Transformer2DModel, "graft_is_small"):
        unet.MODEL_CHANNELS, unet.TIME_EMBED_DIM = 32, 128
        original = unet.Transformer2DModel

        class Transformer2DModel(original):
            graft_is_small = True

            def __init__(self, *sizes: object, **named: object):
                super().__init__(*sizes, **{**named, "num_transformer_layers": 1, "cross_attention_dim": 12})

        unet.Transformer2DModel = Transformer2DModel
    return layouts.filled(unet.SdxlUNet2DConditionModel(), state)


def _flux(state: State) -> nn.Module:
    from library import flux_models

    sizes = flux_models.FluxParams(
        in_channels=64,
        vec_in_dim=8,
        context_in_dim=12,
        hidden_size=layouts.FLUX_WIDTH,
        mlp_ratio=4.0,
        num_heads=2,
        depth=2,
        depth_single_blocks=2,
        axes_dim=[4, 6, 6],
        theta=10000,
        qkv_bias=True,
        guidance_embed=True,
    )
    scales = {name.replace("_norm.weight", "_norm.scale"): tensor for name, tensor in state.items()}
    return layouts.filled(flux_models.Flux(sizes), scales)


def _flux_names(state: dict[str, Tensor]) -> State:
    return {name.replace("_norm.weight", "_norm.scale"): tensor for name, tensor in state.items()}


def _sd3(state: State) -> nn.Module:
    from library import sd3_models

    sizes = sd3_models.SD3Params(
        patch_size=2,
        depth=2,
        num_patches=256,
        pos_embed_max_size=16,
        adm_in_channels=8,
        qk_norm="rms",
        x_block_self_attn_layers=[0],
        context_embedder_in_features=12,
        context_embedder_out_features=128,
        model_type="medium",
    )
    return layouts.filled(sd3_models.create_sd3_mmdit(sizes), state)


def _writer(module: str, *, dim: int = 4, alpha: float = 2.0, spread: float = 0.2, flux: bool = False, **settings):
    def write(model: nn.Module, folder: Path) -> Written:
        networks = importlib.import_module(module)
        if module == "networks.oft_flux":
            networks.OFTNetwork.__init__ = narrowed(networks.OFTNetwork.__init__, REAL_FLUX)
        text = [None, None, None] if flux else []
        network = networks.create_network(1.0, dim, alpha, None, text, model, **settings)
        network.apply_to(text, model, False, True)
        draw(network.parameters(), spread)
        path = folder / "sd-scripts.safetensors"
        network.eval().save_weights(str(path), torch.float32, {"ss_network_module": module})
        return Written(path, network, in_float32=".oft" in module)

    return write


REPOSITORY = "https://github.com/kohya-ss/sd-scripts"
CASES = [
    Case("sd-scripts", "sdxl", "LoRA", _writer("networks.lora"), _sdxl, _same, SDXL),
    Case("sd-scripts", "sdxl", "LoRA with convolutions", _writer("networks.lora", conv_dim=2), _sdxl, _same, SDXL),
    Case("sd-scripts", "sdxl", "LoRA-FA", _writer("networks.lora_fa"), _sdxl, _same, SDXL),
    Case("sd-scripts", "sdxl", "DyLoRA", _writer("networks.dylora", unit=4), _sdxl, _same, SDXL),
    Case("sd-scripts", "sdxl", "OFT", _writer("networks.oft", alpha=0.01, spread=0.05), _sdxl, _same, SDXL),
    Case("sd-scripts", "flux", "LoRA", _writer("networks.lora_flux", flux=True), _flux, _flux_names, FLUX),
    Case("sd-scripts", "flux", "OFT", _writer("networks.oft_flux", alpha=0.01, flux=True), _flux, _flux_names, FLUX),
    Case("sd-scripts", "sd3", "LoRA", _writer("networks.lora_sd3"), _sd3, _same),
]
