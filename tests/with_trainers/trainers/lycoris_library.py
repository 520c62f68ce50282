"""LyCORIS: its algorithms on diffusers' models, saved by its network.

DyLoRA draws a rank at every call; here it always draws the highest.
"""

from __future__ import annotations

import functools
from importlib.metadata import version
from pathlib import Path

import lycoris
from torch import nn

from .. import layouts
from ..case import Case, Written
from .drawing import draw

VERSION = version("lycoris_lora")
RANKED = {"linear_dim": 4, "linear_alpha": 2.0}
KINDS = {
    "LoRA": {"algo": "lora", **RANKED},
    "DoRA": {"algo": "lora", "dora_wd": True, **RANKED},
    "LoHa": {"algo": "loha", **RANKED},
    "LoKr": {"algo": "lokr", **RANKED, "factor": 4},
    "LoKr, full matrix": {"algo": "lokr", "linear_dim": 4, "linear_alpha": 4.0, "full_matrix": True, "factor": 4},
    "DyLoRA": {"algo": "dylora", **RANKED, "block_size": 1},
    "full": {"algo": "full", **RANKED},
    "OFT": {"algo": "diag-oft", "linear_dim": 4, "linear_alpha": 1.0, "spread": 0.05},
    "OFT, rescaled, with a constraint": {
        "algo": "diag-oft",
        "linear_dim": 4,
        "linear_alpha": 1.0,
        "constraint": 0.01,
        "rescaled": True,
    },
    "BOFT": {"algo": "boft", "linear_dim": 18, "linear_alpha": 1.0, "spread": 0.05},
    "GLoRA": {"algo": "glora", **RANKED},
    "IA3": {"algo": "ia3", **RANKED},
}
CONVOLUTIONS = {
    "LoRA, Tucker": {"algo": "lora", "use_tucker": True, **RANKED},
    "LoHa, Tucker": {"algo": "loha", "use_tucker": True, **RANKED},
    "LoKr, Tucker": {"algo": "lokr", "use_tucker": True, "factor": 4, "linear_dim": 1, "linear_alpha": 1.0},
}


def _draw_the_highest_rank(network: nn.Module) -> None:
    for layer in network.loras:
        layer.get_random_rank_weight = functools.partial(layer.get_weight, layer.lora_dim - layer.block_size)


def _writer(spread: float = 0.2, **settings: object):
    def write(model: nn.Module, folder: Path) -> Written:
        network = lycoris.create_lycoris(model, 1.0, **settings)
        network.apply_to()
        if settings["algo"] == "dylora":
            _draw_the_highest_rank(network)
        draw(network.parameters(), spread)
        path = folder / "lycoris.safetensors"
        network.eval().save_weights(str(path), None, {})
        return Written(path, network, in_float32=str(settings["algo"]).endswith("oft"))

    return write


# LyCORIS divides the rows of a layer for a butterfly, and finds no way for some widths of these tiny models.
IMPOSSIBLE = {("wan", "BOFT"), ("z-image", "BOFT")}
CASES = [
    Case("LyCORIS", family, kind, _writer(**settings))
    for family in layouts.LAYOUTS
    for kind, settings in (KINDS | (CONVOLUTIONS if family == "sdxl" else {})).items()
    if (family, kind) not in IMPOSSIBLE
]
