"""PEFT: adapters of every kind on diffusers' models, saved with `save_pretrained`."""

from __future__ import annotations

from pathlib import Path

import peft
from torch import nn

from .. import layouts, seen
from ..case import Case, Written
from .drawing import draw

VERSION = peft.__version__
FAMILIES = tuple(layouts.LAYOUTS)
UNETS = ("sdxl",)


def _writer(config: type[peft.PeftConfig], spread: float = 0.2, convolutions: bool = False, **settings: object):
    def write(model: nn.Module, folder: Path) -> Written:
        kinds = (nn.Linear, nn.Conv2d) if convolutions else nn.Linear
        names = [name for name, layer in seen.layers(model).items() if isinstance(layer, kinds)]
        if config is peft.IA3Config:
            settings.setdefault("feedforward_modules", [name for name in names if name.endswith("proj")])
        network = peft.get_peft_model(model, config(target_modules=names, **settings))
        draw((tensor for tensor in network.parameters() if tensor.requires_grad), spread)
        network.eval().save_pretrained(str(folder))
        return Written(folder / "adapter_model.safetensors", network)

    return write


LORA = {"r": 4, "lora_alpha": 6}
HADAMARD = {"r": 4, "alpha": 6, "init_weights": True}
KINDS = {
    "LoRA": (peft.LoraConfig, {**LORA}),
    "LoRA, rank-stabilised": (peft.LoraConfig, {**LORA, "use_rslora": True}),
    "LoRA, ranks and alphas by pattern": (
        peft.LoraConfig,
        {**LORA, "rank_pattern": {"to_q|q_proj": 2}, "alpha_pattern": {"to_k|k_proj": 3}},
    ),
    "DoRA": (peft.LoraConfig, {**LORA, "use_dora": True}),
    "LoHa": (peft.LoHaConfig, HADAMARD),
    "LoKr": (peft.LoKrConfig, {**HADAMARD, "decompose_both": True}),
    "OFT": (peft.OFTConfig, {"oft_block_size": 4, "r": 0, "spread": 0.05}),
    "BOFT": (peft.BOFTConfig, {"boft_block_size": 2, "boft_n_butterfly_factor": 1, "spread": 0.1}),
    "IA3": (peft.IA3Config, {}),
}
CONVOLUTIONS = {
    "LoRA with convolutions": (peft.LoraConfig, {**LORA, "convolutions": True}),
    "DoRA with convolutions": (peft.LoraConfig, {**LORA, "use_dora": True, "convolutions": True}),
    "LoHa with convolutions": (peft.LoHaConfig, {**HADAMARD, "convolutions": True}),
    "LoHa with convolutions, Tucker": (
        peft.LoHaConfig,
        {**HADAMARD, "use_effective_conv2d": True, "convolutions": True},
    ),
    "LoKr with convolutions, Tucker": (
        peft.LoKrConfig,
        {**HADAMARD, "use_effective_conv2d": True, "convolutions": True},
    ),
    "OFT with convolutions": (
        peft.OFTConfig,
        {"oft_block_size": 4, "r": 0, "spread": 0.05, "convolutions": True},
    ),
    "IA3 with convolutions": (peft.IA3Config, {"convolutions": True}),
}
# Its OFT turns overlapping patches of a larger kernel's input and adds them up again, which is no convolution and not
# what its own merge makes.
SPOILT = {
    "OFT with convolutions": {
        "spoilt": ("conv1", "conv2", "conv_in", "conv_out", ".conv"),
        "remark": "1x1 only: with larger kernels PEFT's forward is not what PEFT merges; Graft does as its merge",
    }
}
CASES = [
    Case("PEFT", family, kind, _writer(config, **settings), **SPOILT.get(kind, {}))
    for family in FAMILIES
    for kind, (config, settings) in (KINDS | (CONVOLUTIONS if family in UNETS else {})).items()
]
