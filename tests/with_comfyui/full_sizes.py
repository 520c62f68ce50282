"""What Training Recipe counts of models of full size: facts of ComfyUI's own classes, without memory for their weights.

`full_sizes.json` keeps them, so that docs/memory.md can be written without a ComfyUI.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from graft_nodes.training.recipes.facts import ModelFacts

FILE = Path(__file__).with_name("full_sizes.json")
BF16, FP8 = "bf16", "fp8"
IN_FP8 = ("Flux.1 dev", "Qwen-Image", "Z-Image", "Wan 14B")  # the others are small
UNET = {"model_channels": 320, "num_head_channels": -1}
WAN = {"freq_dim": 256, "text_dim": 4096, "in_dim": 16, "out_dim": 16}
FULL: dict[str, tuple[str, dict[str, Any]]] = {  # title: (name in tiny_families, the settings of the full size)
    "SD 1.5": (
        "sd1",
        {
            **UNET,
            "num_res_blocks": [2] * 4,
            "channel_mult": [1, 2, 4, 4],
            "transformer_depth": [1] * 6 + [0] * 2,
            "transformer_depth_output": [1] * 9 + [0] * 3,
            "context_dim": 768,
        },
    ),
    "SDXL": (
        "sdxl",
        {
            **UNET,
            "num_res_blocks": [2] * 3,
            "channel_mult": [1, 2, 4],
            "transformer_depth": [0, 0, 2, 2, 10, 10],
            "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
            "transformer_depth_middle": 10,
            "context_dim": 2048,
            "num_head_channels": 64,
        },
    ),
    "Flux.1 dev": (
        "flux",
        {
            "vec_in_dim": 768,
            "context_in_dim": 4096,
            "hidden_size": 3072,
            "num_heads": 24,
            "depth": 19,
            "depth_single_blocks": 38,
            "axes_dim": [16, 56, 56],
            "mlp_ratio": 4.0,
        },
    ),
    "Qwen-Image": (
        "qwen",
        {
            "in_channels": 64,
            "out_channels": 16,
            "num_layers": 60,
            "attention_head_dim": 128,
            "num_attention_heads": 24,
            "joint_attention_dim": 3584,
            "axes_dims_rope": (16, 56, 56),
        },
    ),
    "Z-Image": (
        "z-image",
        {
            "dim": 3840,
            "n_layers": 30,
            "n_refiner_layers": 2,
            "n_heads": 30,
            "n_kv_heads": 30,
            "multiple_of": 256,
            "ffn_dim_multiplier": 8 / 3,
            "cap_feat_dim": 2560,
            "axes_dims": (32, 48, 48),
            "axes_lens": (1536, 512, 512),
        },
    ),
    "Wan 2.1 1.3B": ("wan", {**WAN, "dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30}),
    "Wan 14B": ("wan", {**WAN, "dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40}),
}


def dtypes(title: str) -> tuple[str, ...]:
    """The types of the weights that a model is counted with."""
    if title in IN_FP8:
        return BF16, FP8
    return (BF16,)


def stored() -> dict[str, dict[str, ModelFacts]]:
    """The facts in the file, by title and by the type of the weights."""
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    found: dict[str, dict[str, ModelFacts]] = {}
    for title, by_dtype in kept.items():
        found[title] = {dtype: ModelFacts(**facts) for dtype, facts in by_dtype.items()}
    return found


def write(found: dict[str, dict[str, ModelFacts]]) -> None:
    """Put facts into the file."""
    plain = {}
    for title, by_dtype in found.items():
        plain[title] = {dtype: dataclasses.asdict(facts) for dtype, facts in by_dtype.items()}
    FILE.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


def counted(title: str) -> dict[str, ModelFacts]:
    """The facts of the opened ComfyUI's class, by the type of the weights."""
    return {dtype: _facts(title, dtype) for dtype in dtypes(title)}


def model(title: str, dtype: str) -> Any:
    """The opened ComfyUI's model of full size, on the meta device."""
    import comfy.supported_models
    import torch
    from families import accepted
    from tiny_families import EVERY

    name, settings = FULL[title]
    family = EVERY[name]
    config = getattr(comfy.supported_models, family.supported)(accepted({**family.config, **settings}))
    types = {BF16: (torch.bfloat16, None), FP8: (torch.float8_e4m3fn, torch.bfloat16)}
    config.set_inference_dtype(*types[dtype])
    with torch.device("meta"):
        return config.get_model({}, "", torch.device("meta"))


def _facts(title: str, dtype: str) -> ModelFacts:
    from graft_nodes.host.model_sampling import prediction_type
    from graft_nodes.patches.models.registry import recognize_model
    from graft_nodes.training.recipes.facts import facts_of

    built = model(title, dtype)
    network = built.diffusion_model
    return facts_of(network, recognize_model(network), prediction_type(built.model_sampling))
