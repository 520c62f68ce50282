"""Tiny models of ComfyUI's own classes whose layers are quantized as its versions keep them, beside the same numbers in
float32.
"""

from __future__ import annotations

import json
from typing import Any

import families
import pytest
import torch
from tiny_families import EVERY

OPTIONS = {"convrot_w4a4": {"convrot_groupsize": 16}, "asym_w4a8_int8": {"convrot_groupsize": 16}}  # for narrow layers
MULTIPLE = {"convrot_w4a4": 64}  # of a layer's sides; 16 elsewhere


def with_quantized_layers(family: str, kind: str) -> tuple[Any, Any]:
    """(a model whose layers are of the host's quantized type, the same numbers in float32)."""
    quant = pytest.importorskip("comfy.quant_ops")
    if kind not in getattr(quant, "QUANT_ALGOS", {}) or not hasattr(quant.QuantizedTensor, "__tensor_flatten__"):
        pytest.skip(f"this ComfyUI has no {kind}")
    import comfy.model_patcher
    import comfy.supported_models

    own, layout = EVERY[family], quant.QUANT_ALGOS[kind]["comfy_tensor_layout"]
    options, multiple = OPTIONS.get(kind, {}), MULTIPLE.get(kind, 16)
    with torch.inference_mode():
        plain = families.build(family)
        config = getattr(comfy.supported_models, own.supported)(families.accepted(dict(own.config)))
        config.set_inference_dtype(torch.float32, None)
        config.quant_config = {"mixed_ops": True}
        model = config.get_model(dict(own.weights), "", device=None)
        modules, weights = dict(plain.model.diffusion_model.named_modules()), {}
        for name, tensor in plain.model.diffusion_model.state_dict().items():
            path, _, role = name.rpartition(".")
            weights[name] = tensor.clone()
            fits = (
                role == "weight"
                and isinstance(modules[path], torch.nn.Linear)
                and not any(side % multiple for side in tensor.shape)
            )
            if fits and ("blocks" in name or "layers" in name):
                made = quant.QuantizedTensor.from_float(tensor, layout, **options)
                weights.update(made.state_dict(name))
                described = json.dumps({"format": kind, **options})
                weights[f"{path}.comfy_quant"] = torch.tensor(list(described.encode()), dtype=torch.uint8)
                tensor.copy_(made.dequantize())
        assert not any(model.diffusion_model.load_state_dict(weights, strict=False))
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu), plain


def with_scaled_layers(family: str) -> tuple[Any, Any]:
    """(a model of a "scaled fp8" file, as this version loads it: each linear layer in fp8 with a scale of its own, the
    same in float32).
    """
    import comfy.model_patcher
    import comfy.supported_models
    import comfy.utils

    own = EVERY[family]
    with torch.inference_mode():
        plain = families.build(family)
        modules, weights = (
            dict(plain.model.diffusion_model.named_modules()),
            {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)},
        )
        for name, tensor in plain.model.diffusion_model.state_dict().items():
            path, _, role = name.rpartition(".")
            weights[name] = tensor.clone()
            if role == "weight" and isinstance(modules[path], torch.nn.Linear):
                scale = tensor.abs().max() / 448
                weights[name], weights[f"{path}.scale_weight"] = (tensor / scale).to(torch.float8_e4m3fn), scale
                tensor.copy_(weights[name].float() * scale)
        config = getattr(comfy.supported_models, own.supported)(families.accepted(dict(own.config)))
        config.set_inference_dtype(torch.float32, torch.float32)
        if hasattr(comfy.utils, "convert_old_quants"):
            weights, _ = comfy.utils.convert_old_quants(weights)
            config.quant_config = {"mixed_ops": True}
        else:
            config.scaled_fp8 = weights.pop("scaled_fp8").dtype
        model = config.get_model(dict(own.weights), "", device=None)
        assert not any(model.diffusion_model.load_state_dict(weights, strict=False))
        for path, part in model.diffusion_model.named_modules():  # one version keeps biases in fp8 too
            if getattr(part, "bias", None) is not None:
                modules[path].bias.copy_(part.bias.float())
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu), plain


def parts(p: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of the tensors that a weight is made of."""
    names = p.__tensor_flatten__()[0] if hasattr(p, "__tensor_flatten__") else []
    return [
        part.detach().contiguous().view(-1).view(torch.uint8) for part in ([getattr(p, name) for name in names] or [p])
    ]
