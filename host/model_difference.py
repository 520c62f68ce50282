"""The difference of two MODELs, and a weight as a MODEL samples with it: with ComfyUI's patches and Graft's stacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..patches.patching.fuse import MERGEABLE_DTYPES, Patch, apply_in_order, effective_patches
from .base_weights import base_weights
from .comfyui_objects import Model
from .lora_injection import carried_stacks


def model_difference(patcher: Model, base: Any) -> dict[str, Callable[[], torch.Tensor]]:
    """{weight: computes patcher's minus base's, float32} of two MODELs' diffusion models, where they may differ.

    Raises ValueError that lists every weight that only one has, whose shapes differ, or that is quantized.
    """
    from ..patches.lora_files.merge import check_comparable

    trained, original = base_weights(patcher), base_weights(base)
    changes: dict[str, Callable[[], torch.Tensor]] = {}
    for name in check_comparable(trained, original, prefix="diffusion_model."):
        is_unchanged = (
            _same_memory(trained[name], original[name]) and _is_plain(patcher, name) and _is_plain(base, name)
        )
        if not is_unchanged:
            changes[name] = functools.partial(_difference, patcher, trained[name], base, original[name], name)
    return changes


def _difference(patcher: Model, weight: torch.Tensor, base: Any, base_weight: torch.Tensor, name: str) -> torch.Tensor:
    return weight_as_sampled(patcher, name, weight) - weight_as_sampled(base, name, base_weight)


def weight_as_sampled(patcher: Model, name: str, base: torch.Tensor) -> torch.Tensor:
    """A weight as the patcher samples with it, in float32 on the CPU: ComfyUI's patches, then Graft's stacks."""
    import comfy.lora

    weight = base.detach().to("cpu", torch.float32, copy=True)
    if patcher.patches.get(name):
        weight = comfy.lora.calculate_weight(patcher.patches[name], weight, name)
    return apply_in_order(weight, _stack_patches(patcher, name))


def weight_reader(patcher: Model) -> Callable[[str], torch.Tensor]:
    """A function that gives a weight by name as the patcher samples with it; ValueError for a quantized one."""
    bases = base_weights(patcher)

    def read(name: str) -> torch.Tensor:
        if bases[name].dtype not in MERGEABLE_DTYPES:
            raise ValueError(
                f"{name} is quantized ({bases[name].dtype}), and a LoRA of the stack depends on it (DoRA, OFT, GLoRA,"
                " IA3 …). Load the model in another precision, or take that row out."
            )
        return weight_as_sampled(patcher, name, bases[name])

    return read


def _stack_patches(patcher: Model, name: str) -> list[Patch]:
    stacks = carried_stacks(patcher)
    return [*effective_patches(stacks, name, bypass=False), *effective_patches(stacks, name, bypass=True)]


def _same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() and first.dtype == second.dtype


def _is_plain(patcher: Model, name: str) -> bool:
    """Whether a weight has no patches."""
    return not patcher.patches.get(name) and not _stack_patches(patcher, name)
