"""kohya-ss/sd-scripts and musubi-tuner: `lora_unet_` and the model's path, with underscores for dots."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .diffusers import kohya_name_from_diffusers
from .key_format import GENERIC_PREFIX, Groups, KeyFormat, KeyWriter
from .layer_tensors import layer_tensors

if TYPE_CHECKING:
    from ...models.family import ModelFamily

GENERIC_ENCODER = re.compile(r"text_encoders\.(clip_l|clip_g|clip_h|t5xxl)\.transformer\.(.+)")
_PARAMETER = re.compile(  # last words of parameters that belong to the model itself, not to one of its modules
    r"\.(modulation|modulate_table|\w*shift_table|scale|gamma|beta|positional_\w+"
    r"|\w*(tokens?|registers?|pos_embed|_embedding|padding))$"
)
_LEAF_PARAMETER = re.compile(r"\.(scale|gamma|beta)$")  # those of them that norms have
_NUMBERS = {"clip_l": "1", "clip_g": "2", "t5xxl": "3"}  # diffusers counts the encoders that a family has


def is_inner_parameter(base: str) -> bool:
    """Whether a layer is a parameter of a module that holds other modules, as Wan's `modulation`."""
    return _PARAMETER.search(base) is not None and _LEAF_PARAMETER.search(base) is None


class KohyaWriter(KeyWriter):
    """Writes sd-scripts' names: `lora_unet_<path with underscores>.lora_up.weight` and `.alpha`.

    SD1.x and SD2 get diffusers' block names; text encoders get `lora_te…`.
    """

    def write(self, groups: Groups, dtype: torch.dtype, family: ModelFamily | None) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for base, group in groups.items():
            tensors.update(layer_tensors(_layer_name(base, family, groups), group, dtype))
        return tensors


def _layer_name(base: str, family: ModelFamily | None, groups: Groups) -> str:
    """sd-scripts' name for a layer.

    A layer without one keeps its generic name: other text encoders, and parameters of the model that belong to no
    module.
    """
    encoder = GENERIC_ENCODER.fullmatch(base)
    if encoder is not None:
        return f"lora_te{_encoder_number(encoder[1], family, groups)}_{encoder[2].replace('.', '_')}"
    path = base.removeprefix(GENERIC_PREFIX)
    if path == base:
        return kohya_name_from_diffusers(base, groups)
    if "diff" in groups[base] and _PARAMETER.search(base):
        return base
    from ...models.family import Kohya
    from ...models.unet import diffusers_name

    if family is not None and isinstance(family.kohya, Kohya) and family.kohya.diffusers_blocks:
        path = diffusers_name(path)
    return "lora_unet_" + path.replace(".", "_")


def _encoder_number(encoder: str, family: ModelFamily | None, groups: Groups) -> str:
    """kohya's number for a text encoder: none if the model has only one."""
    if encoder == "clip_h":
        return ""
    if encoder != "t5xxl" and _is_single_encoder(encoder, family) and not _has_other_encoder(encoder, groups):
        return ""
    return _NUMBERS[encoder]


def _is_single_encoder(encoder: str, family: ModelFamily | None) -> bool:
    from ...models.family import Kohya

    if family is None:
        return encoder == "clip_l"
    return isinstance(family.kohya, Kohya) and family.kohya.one_text_encoder


def _has_other_encoder(encoder: str, groups: Groups) -> bool:
    matches = [GENERIC_ENCODER.fullmatch(base) for base in groups]
    return any(match is not None and match[1] != encoder for match in matches)


FORMAT = KeyFormat(
    name="kohya",
    title="kohya-ss/sd-scripts and musubi-tuner",
    examples={
        "lora_unet_blocks_0_self_attn_q.lora_up.weight": "diffusion_model.blocks.0.self_attn.q.weight",
        "oft_unet_blocks_0_self_attn_q.lora_up.weight": "diffusion_model.blocks.0.self_attn.q.weight",
        "Hunyuan_video_I2V_lora_blocks_0_self_attn_q.lora_up.weight": "diffusion_model.blocks.0.self_attn.q.weight",
    },
    prefixes=("lora_unet_", "oft_unet_", "Hunyuan_video_I2V_lora_"),  # the last one is that of Tencent's own trainer
    text_encoder=r"(?:lora_)?te(\d?)",
    text_encoder_prefixes=("lora_te", "te.", "te1.", "te2."),
    writer=KohyaWriter(),
    holds_every_kind=True,
)
