"""T-LoRA's authors (ControlGenAI/T-LoRA): the attention layers of a UNet under diffusers' names of its processors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...adapters import tlora
from .key_format import GENERIC_PREFIX, Group, Groups, KeyFormat, KeySpelling

if TYPE_CHECKING:
    from ...models.family import ModelFamily

_ATTENTION = re.compile(r"((?:down_blocks|up_blocks|mid_block)\..+\.attn[12])\.to_(q|k|v|out)(?:\.0)?")
_SUFFIXES = {
    "q_layer": tlora.Q,
    "p_layer": tlora.P,
    tlora.LAMBDAS: tlora.LAMBDAS,
    "base_q": tlora.BASE_Q,
    "base_p": tlora.BASE_P,
    tlora.BASE_LAMBDAS: tlora.BASE_LAMBDAS,
}
_SCALED = (tlora.LAMBDAS, tlora.BASE_LAMBDAS)


class TLoraWriter:
    """Writes `<block>.attn1.processor.to_q_lora.q_layer.weight`, as diffusers' AttnProcsLayers names them.

    The authors have no alpha, so alpha / rank is multiplied into the lambdas. Their smallest rank and exponent are not
    in the file: Save LoRA puts them into its metadata.
    """

    def problems(self, groups: Groups, instead: str) -> list[str]:
        problems, schedules = [], set()
        for base, group in groups.items():
            missing = sorted(_SUFFIXES.keys() - group.keys())
            if missing:
                problems.append(f"{base}: it is not a T-LoRA ({', '.join(missing)} missing); save with {instead} names")
            elif _processor(base) is None:
                problems.append(
                    f"{base}: T-LoRA's authors have names for a UNet's attention layers only; save with {instead} names"
                )
            if tlora.SCHEDULE in group:
                schedules.add(tuple(group[tlora.SCHEDULE][1].tolist()))
        if len(schedules) > 1:
            problems.append(
                f"its layers have {len(schedules)} smallest ranks, and T-LoRA's authors have one for all; save with"
                f" {instead} names"
            )
        return problems

    def write(self, groups: Groups, dtype: torch.dtype, family: ModelFamily | None) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for base, group in groups.items():
            tensors.update(_layer(f"{_processor(base)}_lora", group))
        return tensors


def _processor(base: str) -> str | None:
    """The authors' name of a layer, without its end; None if they have none."""
    from ...models.unet import diffusers_name

    match = _ATTENTION.fullmatch(diffusers_name(base.removeprefix(GENERIC_PREFIX)))
    if match is None:
        return None
    return f"{match[1]}.processor.to_{match[2]}"


def _layer(name: str, group: Group) -> Iterator[tuple[str, Tensor]]:
    scale = float(group["alpha"][1]) / group["q_layer"][1].shape[0] if "alpha" in group else 1.0
    for role, suffix in _SUFFIXES.items():
        tensor = group[role][1].float()
        if role in _SCALED:
            tensor = tensor * scale
        yield f"{name}.{suffix}", tensor


def _diffusers_key(match: re.Match[str]) -> str:
    """A key as diffusers names the layer today."""
    block, projection, suffix = match.groups()
    if projection == "out":
        projection = "out.0"
    if suffix in _PAIR:
        suffix = f"lora.{suffix}"
    return f"unet.{block}.to_{projection}.{suffix}"


_PAIR = ("up.weight", "down.weight")  # their plain LoRA, and diffusers' own of 2023
_ENDS = "|".join(re.escape(suffix) for suffix in (*_SUFFIXES.values(), *_PAIR))
_KEYS = re.compile(rf"(?:unet\.)?(.+)\.processor\.to_(q|k|v|out)_lora\.({_ENDS})")
FORMAT = KeyFormat(
    name="t-lora",
    title="T-LoRA's authors",
    examples={
        "down_blocks.1.attentions.0.transformer_blocks.0.attn1.processor.to_q_lora.up.weight": (
            "diffusion_model.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q.weight"
        )
    },
    spellings=(KeySpelling(_KEYS, _diffusers_key),),
    writer=TLoraWriter(),
)
