"""XLabs' trainer for Flux: the layers of a block's attention processor."""

from __future__ import annotations

import re

from .key_format import KeyFormat, KeySpelling


def _generic_key(match: re.Match[str]) -> str:
    """lora1 is for the image stream, lora2 for the text stream."""
    kind, number, weight, stream, side = match.groups()
    if kind == "single":
        layer = {"qkv": "linear1_qkv", "proj": "linear2"}[weight]
    elif stream == "2":
        layer = f"txt_attn.{weight}"
    else:
        layer = f"img_attn.{weight}"
    return f"diffusion_model.{kind}_blocks.{number}.{layer}.lora_{side}.weight"


_KEYS = re.compile(r"(double|single)_blocks\.(\d+)\.processor\.(qkv|proj)_lora([12]?)\.(up|down)\.weight")
FORMAT = KeyFormat(
    name="xlabs",
    title="XLabs, for Flux",
    examples={
        "double_blocks.0.processor.qkv_lora1.up.weight": "diffusion_model.double_blocks.0.img_attn.qkv.weight",
        "double_blocks.0.processor.proj_lora2.up.weight": "diffusion_model.double_blocks.0.txt_attn.proj.weight",
    },
    spellings=(KeySpelling(_KEYS, _generic_key),),
)
