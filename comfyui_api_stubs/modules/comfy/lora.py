"""Names of weights in LoRA files, and patched weights (ComfyUI's `comfy.lora`)."""

import logging

import torch

import comfy.model_management
import comfy.utils
from comfy import weight_adapter

LORA_CLIP_MAP = {
    "mlp.fc1": "mlp_fc1",
    "mlp.fc2": "mlp_fc2",
    "self_attn.k_proj": "self_attn_k_proj",
    "self_attn.q_proj": "self_attn_q_proj",
    "self_attn.v_proj": "self_attn_v_proj",
    "self_attn.out_proj": "self_attn_out_proj",
}


def _bias(weight_key):
    return weight_key.removesuffix(".weight") + ".bias"


def load_lora(lora, to_load, log_missing=True):
    """{weight key: patch} of a LoRA's state dict, given {name in the file: weight key}; names left over are logged."""
    patches, used = {}, set()

    def take(key):
        if key in lora:
            used.add(key)
        return lora.get(key)

    for name, target in to_load.items():
        alpha, dora_scale = take(f"{name}.alpha"), take(f"{name}.dora_scale")
        for kind in weight_adapter.adapters:
            adapter = kind.load(name, lora, None if alpha is None else alpha.item(), dora_scale, used)
            if adapter is not None:
                patches[target] = adapter
        weight, bias = take(f"{name}.w_norm"), take(f"{name}.b_norm")
        if weight is not None:
            patches[target] = ("diff", (weight,))
            if bias is not None:
                patches[_bias(target)] = ("diff", (bias,))
        for suffix, change, key in (("diff", "diff", target), ("diff_b", "diff", None), ("set_weight", "set", target)):
            value = take(f"{name}.{suffix}")
            if value is not None:
                patches[_bias(target) if key is None else key] = (change, (value,))

    if log_missing:
        for key in lora:
            if key not in used:
                logging.warning("lora key not loaded: %s", key)
    return patches


def model_lora_keys_clip(model, key_map=None):
    """{name in LoRA files: weight key} of a text encoder, added to key_map."""
    key_map = {} if key_map is None else key_map
    keys = model.state_dict().keys()
    key_map.update({f"text_encoders.{key.removesuffix('.weight')}": key for key in keys if key.endswith(".weight")})
    clip_l = any(key.startswith("clip_l.transformer.text_model.encoder.layers.") for key in keys)
    for key in keys:
        encoder, found, layer = key.partition(".transformer.text_model.encoder.layers.")
        index, _, part = layer.removesuffix(".weight").partition(".")
        if not found or not key.endswith(".weight") or part not in LORA_CLIP_MAP:
            continue
        kohya = f"text_model_encoder_layers_{index}_{LORA_CLIP_MAP[part]}"
        diffusers = f"text_model.encoder.layers.{index}.{part}"
        names: tuple[str, ...] = ()
        if encoder in ("clip_h", "clip_l"):
            names = (f"lora_te_{kohya}", f"lora_te1_{kohya}", f"text_encoder.{diffusers}")
        elif encoder == "clip_g" and clip_l:
            names = (f"lora_te2_{kohya}", f"text_encoder_2.{diffusers}")
        elif encoder == "clip_g":
            names = (f"lora_te_{kohya}", f"text_encoder.{diffusers}", f"lora_prior_te_{kohya}")
        key_map.update(dict.fromkeys(names, key))
    for encoder, names in (
        ("clip_g", ("lora_prior_te_text_projection", "lora_te2_text_projection")),
        ("clip_l", ("lora_te1_text_projection",)),
    ):
        key = f"{encoder}.transformer.text_projection.weight"
        if key in keys:
            key_map.update(dict.fromkeys(names, key))
    return key_map


def model_lora_keys_unet(model, key_map=None):
    """{name in LoRA files: weight key} of a diffusion model, added to key_map: ComfyUI's own names, kohya's and
    diffusers'.
    """
    key_map = {} if key_map is None else key_map
    for key in model.state_dict():
        if key.startswith("diffusion_model."):
            name = key.removesuffix(".weight")
            if name != key:
                key_map["lora_unet_" + name.removeprefix("diffusion_model.").replace(".", "_")] = key
            key_map[name] = key

    for theirs, ours in comfy.utils.unet_to_diffusers(model.model_config.unet_config).items():
        if not theirs.endswith(".weight"):
            continue
        name, key = theirs.removesuffix(".weight"), f"diffusion_model.{ours}"
        flat, processor = name.replace(".", "_"), name.replace(".to_", ".processor.to_")
        if processor.endswith(".to_out.0"):
            processor = processor.removesuffix(".0")
        key_map.update(dict.fromkeys((f"lora_unet_{flat}", f"lycoris_{flat}", processor, f"unet.{processor}"), key))
    return key_map


def calculate_weight(patches, weight, key, intermediate_dtype=torch.float32, original_weights=None):
    """A weight with (strength, patch, strength of the weight, offset, function) patches applied in order, in place
    where it can be.
    """
    for strength, patch, strength_model, offset, function in patches:
        function = (lambda value: value) if function is None else function
        part = weight if offset is None else weight.narrow(*offset)
        if strength_model != 1.0:
            part *= strength_model
        if isinstance(patch, list):  # the patches of another model: its patched weight is a difference
            (base, convert), *rest = patch
            base = convert(
                comfy.model_management.cast_to_device(base, weight.device, intermediate_dtype, copy=True), inplace=True
            )
            patch = (calculate_weight(rest, base, key, intermediate_dtype=intermediate_dtype),)
        if isinstance(patch, weight_adapter.WeightAdapterBase):
            part = patch.calculate_weight(
                part, key, strength, strength_model, offset, function, intermediate_dtype, original_weights
            )
        else:
            kind, values = ("diff", patch) if len(patch) == 1 else patch
            _apply(kind, values, part, key, strength, function, intermediate_dtype, original_weights)
        if offset is None:
            weight = part
    return weight


def _apply(kind, values, weight, key, strength, function, intermediate_dtype, original_weights):
    """Change `weight` in place by a plain patch."""

    def cast(tensor):
        return comfy.model_management.cast_to_device(tensor, weight.device, weight.dtype)

    if kind == "set":
        weight.copy_(values[0])
    elif kind == "model_as_lora":
        weight += function(strength * (cast(values[0]) - cast(original_weights[key][0][0])))
    elif kind != "diff":
        raise ValueError(f"{key}: unknown patch {kind!r}; the embedded host knows diff, set, model_as_lora and LoRA")
    elif len(values) > 1 and values[1].get("pad_weight"):
        raise NotImplementedError(f"{key}: patches that enlarge a weight need a real ComfyUI")
    elif strength != 0.0:
        if values[0].shape != weight.shape:
            logging.warning(
                "%s: weight of shape %s not merged with a difference of %s",
                key,
                tuple(weight.shape),
                tuple(values[0].shape),
            )
        else:
            weight += function(strength * cast(values[0]))
