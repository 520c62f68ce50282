"""What every weight adapter has, and DoRA's rescaling."""

import torch

import comfy.model_management


class WeightAdapterBase:
    """Tensors from a file that change a weight."""

    name: str
    loaded_keys: set
    weights: tuple

    @classmethod
    def load(cls, x, lora, alpha, dora_scale):
        """The adapter of a key in a LoRA's state dict, None when it has no such key."""
        raise NotImplementedError

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
        """The changed weight; `weight` may be changed in place."""
        raise NotImplementedError


class WeightAdapterTrainBase(torch.nn.Module):
    """An adapter that is trained; the embedded host has none of its own."""


def weight_decompose(dora_scale, weight, lora_diff, alpha, strength, intermediate_dtype, function):
    """DoRA (Liu 2024): the changed weight rescaled to the trained magnitude, along the axis that the magnitude's shape
    names.
    """
    dora_scale = comfy.model_management.cast_to_device(dora_scale, weight.device, intermediate_dtype)
    changed = weight + function(lora_diff * alpha).type(weight.dtype)
    if dora_scale.shape[0] == weight.shape[0]:
        norm = weight.flatten(1).norm(dim=1).reshape(-1, *(1 for _ in weight.shape[1:]))
    else:
        norm = changed.transpose(0, 1).flatten(1).norm(dim=1).reshape(1, -1, *(1 for _ in weight.shape[2:]))
    changed = changed * (dora_scale / (norm + torch.finfo(weight.dtype).eps)).type(weight.dtype)
    return weight.add_(changed - weight, alpha=strength)
