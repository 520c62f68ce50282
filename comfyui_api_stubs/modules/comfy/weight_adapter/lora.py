"""LoRA (Hu 2021) and LoCon, with Tucker's middle factor and DoRA's magnitude."""

import torch

import comfy.model_management

from .base import WeightAdapterBase, weight_decompose

# (up, down, mid) as the trainers name them; mid only where it exists
_NAMES = (
    ("{}.lora_up.weight", "{}.lora_down.weight", "{}.lora_mid.weight"),
    ("{}_lora.up.weight", "{}_lora.down.weight", None),
    ("{}.lora_B.weight", "{}.lora_A.weight", None),
    ("{}.lora.up.weight", "{}.lora.down.weight", None),
    ("{}.lora_B", "{}.lora_A", None),
    ("{}.lora_linear_layer.up.weight", "{}.lora_linear_layer.down.weight", None),
    ("{}.lora_B.default.weight", "{}.lora_A.default.weight", None),
)


class LoRAAdapter(WeightAdapterBase):
    """strength * alpha / rank * up @ down; weights = (up, down, alpha, mid, dora_scale, reshape)."""

    name = "lora"

    def __init__(self, loaded_keys, weights):
        self.loaded_keys, self.weights = loaded_keys, weights

    @classmethod
    def load(cls, x, lora, alpha, dora_scale, loaded_keys=None):
        """The adapter of a key in a LoRA's state dict, None when it has no such key."""
        keys = set() if loaded_keys is None else loaded_keys
        for names in _NAMES:
            up, down, mid = (None if name is None else name.format(x) for name in names)
            if up in lora:
                found = {name for name in (up, down, mid, f"{x}.reshape_weight") if name in lora}
                keys.update(found)
                reshape = lora[f"{x}.reshape_weight"].tolist() if f"{x}.reshape_weight" in lora else None
                return cls(keys, (lora[up], lora[down], alpha, lora.get(mid), dora_scale, reshape))
        return None

    def calculate_weight(
        self,
        weight,
        key,
        strength,
        strength_model,
        offset,
        function,
        intermediate_dtype=torch.float32,
        original_weight=None,
    ):
        """The changed weight, in place."""
        up, down, alpha, mid, dora_scale, reshape = self.weights
        if reshape is not None:
            raise NotImplementedError(f"{key}: LoRAs that enlarge a weight need a real ComfyUI")

        def cast(tensor):
            return comfy.model_management.cast_to_device(tensor, weight.device, intermediate_dtype)

        scale = 1.0 if alpha is None else alpha / down.shape[0]
        up, down = cast(up), cast(down)
        if mid is not None:
            down = torch.einsum("ij...,jk->ik...", cast(mid), down.flatten(1))
        delta = torch.mm(up.flatten(1), down.flatten(1))
        if delta.numel() != weight.numel():
            raise ValueError(
                f"{key}: weight of shape {tuple(weight.shape)} cannot take a LoRA of {tuple(self.weights[0].shape)} x "
                f"{tuple(self.weights[1].shape)}; it was made for another model"
            )
        delta = delta.reshape(weight.shape)
        if dora_scale is not None:
            return weight_decompose(dora_scale, weight, delta, scale, strength, intermediate_dtype, function)
        return weight.add_(function(((strength * scale) * delta).type(weight.dtype)))
