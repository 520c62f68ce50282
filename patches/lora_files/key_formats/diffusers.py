"""diffusers: its own models' names, prefixed by the part of the pipeline."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .key_format import KeyFormat

_UNET = re.compile(
    r"(?:base_model\.model\.)?(?:unet\.)?"
    r"((?:(?:down|up)_blocks\.|mid_block\.|conv_|time_embedding\.|add_embedding\.).+)"
)
_TEXT_ENCODER = re.compile(r"text_encoder(?:_([23]))?\.(.+)")
_PROCESSOR = re.compile(r"([._])processor[._]to_(\w+?)$")


def strip_attn_processor(name: str) -> str:
    """A layer's name as diffusers has written it since 2023.

    Before that, `attn1.to_out.0` was called `attn1.processor.to_out`.
    """
    return _PROCESSOR.sub(_drop_processor, name)


def _drop_processor(match: re.Match[str]) -> str:
    separator, projection = match.groups()
    name = f"{separator}to_{projection}"
    if projection == "out":
        name += f"{separator}0"
    return name


def kohya_name_from_diffusers(base: str, layers: Iterable[str]) -> str:
    """kohya's name for a layer with a diffusers UNet or text encoder name; other names are returned unchanged."""
    encoder, unet = _TEXT_ENCODER.fullmatch(base), _UNET.fullmatch(base)
    if encoder is not None:
        number = encoder[1] or ""
        if not number and any(name.startswith("text_encoder_2.") for name in layers):
            number = "1"
        return f"lora_te{number}_{encoder[2].replace('.', '_')}"
    if unet is not None:
        return f"lora_unet_{strip_attn_processor(unet[1]).replace('.', '_')}"
    return base


FORMAT = KeyFormat(
    name="diffusers",
    title="diffusers",
    examples={
        "transformer.blocks.0.self_attn.q.lora_A.weight": "diffusion_model.blocks.0.self_attn.q.weight",
        "unet.conv_in.lora.up.weight": "diffusion_model.conv_in.weight",
        "connectors.blocks.0.self_attn.q.lora_A.weight": "diffusion_model.blocks.0.self_attn.q.weight",
    },
    prefixes=("transformer.", "conditional_transformer.", "connectors.", "unet."),
    text_encoder=r"text_encoder(?:_(\d))?",
    text_encoder_prefixes=("text_encoder",),
)
