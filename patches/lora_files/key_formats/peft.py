"""PEFT, with diffusers' names if the model's family is known: `lora_A` and `lora_B`, alpha outside the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...adapters.lora import LoRA
from .diffusers import strip_attn_processor
from .key_format import GENERIC_PREFIX, Group, Groups, KeyFormat
from .kohya import GENERIC_ENCODER

if TYPE_CHECKING:
    from ...models.diffusers_names import LayerNames
    from ...models.family import ModelFamily

_HELD = {"up", "down", "alpha"}
_UNDERSCORED = ("lora_", "lycoris_", "oft_unet_", "Hunyuan_video_I2V_lora_")  # names with underscores for dots


class PeftWriter:
    """Writes PEFT's names with diffusers' prefixes: `unet.…`, `transformer.….lora_B.weight`.

    A fused weight becomes separate parts. PEFT stores alpha outside the file, so alpha / rank is multiplied into B.
    diffusers expects one rank for all layers, so every factor is padded with zeros to the largest rank.
    """

    def problems(self, groups: Groups, instead: str) -> list[str]:
        problems = []
        for base, group in groups.items():
            unsupported = sorted(set(group) - _HELD)
            if unsupported:
                problems.append(f"{base}: PEFT has no name for {', '.join(unsupported)}; save with {instead} names")
        underscored = sorted(base for base in groups if base.startswith(_UNDERSCORED))
        if underscored:
            problems.append(
                f"{len(underscored)} layers have a file's names, of which PEFT's are not known"
                f" ({', '.join(underscored[:3])}); connect model to Merge LoRAs, or save with {instead} names"
            )
        return problems

    def write(self, groups: Groups, dtype: torch.dtype, family: ModelFamily | None) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for base, group in groups.items():
            tensors.update(_factors(base, group, dtype, family))
        return _pad_to_one_rank(tensors)


def _factors(base: str, group: Group, dtype: torch.dtype, family: ModelFamily | None) -> Iterator[tuple[str, Tensor]]:
    from ...models.diffusers_names import swap_halves

    alpha = float(group["alpha"][1]) if "alpha" in group else None
    layer = LoRA(group["up"][1], group["down"][1], alpha)
    up = layer.up.float() * layer.scale if layer.scale != 1.0 else layer.up
    rows, columns = layer.up.shape[0], layer.down.shape[1]
    names = _family_names(family)
    if names is not None and names.swaps_halves(base.removeprefix(GENERIC_PREFIX), rows, columns):
        up = swap_halves(up)
    for name, start, length in _layer_parts(base, names, rows, columns):
        yield f"{name}.lora_B.weight", up[start : start + length].to(dtype).contiguous()
        yield f"{name}.lora_A.weight", layer.down.to(dtype)


def _family_names(family: ModelFamily | None) -> LayerNames | None:
    from ...models.family import Missing

    if family is None or isinstance(family.layer_names, Missing):
        return None
    return family.layer_names


def _layer_parts(base: str, names: LayerNames | None, rows: int, columns: int) -> Sequence[tuple[str, int, int]]:
    """The parts of a layer under diffusers' names: (name, first row, rows), several for a fused weight.

    A layer of an unknown family keeps its own name.
    """
    encoder = GENERIC_ENCODER.fullmatch(base)
    if encoder is not None:
        t5 = names.t5 if names is not None else "2"
        number = {"clip_l": "", "clip_g": "_2", "clip_h": "", "t5xxl": f"_{t5}"}[encoder[1]]
        return [(f"text_encoder{number}.{encoder[2]}", 0, rows)]
    path = base.removeprefix(GENERIC_PREFIX)
    if path == base or names is None:
        return [(strip_attn_processor(base), 0, rows)]
    return [(names.prefix + name, start, length) for name, start, length in names.parts(path, rows, columns)]


def _pad_to_one_rank(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Factors padded with zeros to the largest rank of their part of the model (`unet.`, `text_encoder.`)."""
    ranks: dict[str, int] = {}
    for name, tensor in tensors.items():
        if name.endswith(".lora_A.weight"):
            part = name.partition(".")[0]
            ranks[part] = max(ranks.get(part, 0), len(tensor))
    return {name: _pad_factor(name, tensor, ranks[name.partition(".")[0]]) for name, tensor in tensors.items()}


def _pad_factor(name: str, tensor: Tensor, rank: int) -> Tensor:
    shape = (rank, *tensor.shape[1:]) if name.endswith(".lora_A.weight") else (len(tensor), rank, *tensor.shape[2:])
    if shape == tuple(tensor.shape):
        return tensor
    filled = tensor.new_zeros(shape)
    filled[: tensor.shape[0], : tensor.shape[1]] = tensor
    return filled


FORMAT = KeyFormat(
    name="peft",
    title="PEFT",
    examples={"base_model.model.blocks.0.self_attn.q.lora_A.weight": "diffusion_model.blocks.0.self_attn.q.weight"},
    prefixes=("base_model.model.",),
    text_encoder_prefixes=("text_model.", "base_model.model.text_model."),
    writer=PeftWriter(),
)
