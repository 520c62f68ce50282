"""Applies LoRA stacks as ComfyUI patches: one fused adapter per weight, and control LoRAs that enlarge a weight."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..patches.adapters.lora import LoRA
from ..patches.adapters.registry import pack_layer, unpack_layer
from ..patches.core.clones import put_callback
from ..patches.lora_files.read_stack import EnlargingLora
from ..patches.models.weight_caches import clear_weight_caches
from ..patches.patching.fuse import Patch, apply_in_order, are_additive, fuse
from .comfyui_objects import Model

_CACHES = "graft-caches"  # key of callbacks


def with_host_patches(patcher: Model, patches: Mapping[str, Sequence[Patch]]) -> Model:
    """A clone with the stack as ComfyUI's own patches: one fused adapter per weight.

    Layers that are not a product of factors go into one Graft adapter.
    """
    from comfy.weight_adapter import LoRAAdapter

    graft_adapter = _graft_adapter_class()
    parameters = dict(patcher.model.named_parameters(remove_duplicate=False))
    adapters: dict[str, Any] = {}
    differences: dict[str, Any] = {}
    for weight, on_weight in patches.items():
        factors = _to_factors(on_weight)
        if factors is None:  # takes no more memory than its file
            layers = tuple((patch.strength, patch.part, pack_layer(patch.layer)) for patch in on_weight)
            adapters[weight] = graft_adapter(set(), layers)
            continue
        fused = fuse(factors, parameters[weight].shape)
        up = fused.up
        if up.shape[1]:
            adapters[weight] = LoRAAdapter(set(), (up, fused.down, None, None, None, None))
        if fused.diff is not None:
            differences[weight] = ("diff", (fused.diff,))
    clone = patcher.clone()
    for host_patches in (adapters, differences):
        applied = clone.add_patches(host_patches, 1.0)
        if len(applied) != len(host_patches):
            raise ValueError(
                f"ComfyUI did not accept the patches of these weights: {sorted(set(host_patches) - set(applied))}"
            )
    _clear_caches_with(clone)
    return clone


def _to_factors(patches: Sequence[Patch]) -> list[Patch] | None:
    """A weight's patches as plain pairs of factors and differences, each worked out once; None if they cannot be
    written so.
    """
    if not are_additive(patches):
        return None
    written: list[Patch] = []
    for patch in patches:
        layer: Any = patch.layer
        if layer.kind == "diff":
            written.append(patch)
            continue
        factors = layer.factors()
        if factors is None:
            return None
        written.append(Patch(LoRA(*factors), patch.strength * layer.scale, patch.part))
    return written


@functools.cache
def _graft_adapter_class() -> type:
    """A ComfyUI adapter class that applies patches of any kind to a weight, in order. Each of its `weights` is
    (strength, part, packed layer).
    """
    from comfy.weight_adapter import WeightAdapterBase

    class GraftAdapter(WeightAdapterBase):
        name = "graft"

        def __init__(self, loaded_keys: set[str], weights: tuple) -> None:
            self.loaded_keys, self.weights = loaded_keys, weights

        def calculate_weight(
            self,
            weight: torch.Tensor,
            key: str,
            strength: float,
            strength_model: float,
            offset: Any,
            function: Callable,
            intermediate_dtype: torch.dtype = torch.float32,
            original_weight: Any = None,
        ) -> torch.Tensor:
            patches = [Patch(unpack_layer(layer), patch_strength, part) for patch_strength, part, layer in self.weights]
            with torch.no_grad():
                base = weight.float()
                change = apply_in_order(base, patches) - base
                return weight.copy_(base + strength * function(change))

    return GraftAdapter


# --- control LoRAs that enlarge a weight ------------------------------------------------------------------------------


def can_enlarge() -> bool:
    """Whether this host has adapters that enlarge a weight."""
    import comfy.lora

    return hasattr(comfy.lora, "pad_tensor_to_shape")


def enlarges_weight(patch: Any) -> bool:
    """Whether one of ComfyUI's patches is a LoRA that enlarges its weight: the last of its adapter's six values is the
    new shape.
    """
    return getattr(patch, "name", None) == "lora" and len(patch.weights) > 5 and patch.weights[5] is not None


def with_enlarging_loras(model: Model, loras: Iterable[EnlargingLora]) -> Model:
    """A clone with ComfyUI's own patches for LoRAs that enlarge a weight, below every stack; the model itself when
    there is no such LoRA.
    """
    import comfy.lora

    patched = model
    for lora in loras:
        if patched is model:
            patched = model.clone()
        patches = comfy.lora.load_lora(dict(lora.state_dict), dict(lora.layers), log_missing=False)
        patched.add_patches(patches, lora.strength)
    if patched is not model:
        _clear_caches_with(patched)
    return patched


# --- what a model keeps that was computed with its weights ------------------------------------------------------------


def _clear_caches_with(patcher: Model) -> None:
    """Clear what a model keeps of its weights whenever this patcher's patches come and go.

    ComfyUI detaches a patcher before another one of the same model is loaded, and when it ends.
    """
    import comfy.patcher_extension as extension

    for event in (extension.CallbacksMP.ON_LOAD, extension.CallbacksMP.ON_DETACH):
        put_callback(patcher, event, _CACHES, _on_changed_weights)


def _on_changed_weights(patcher: Model, *_: Any) -> None:
    clear_weight_caches(patcher.model)
