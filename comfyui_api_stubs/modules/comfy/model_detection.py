"""Reads a UNet's configuration off its state dict (ComfyUI's `comfy.model_detection`)."""

import re

import comfy.supported_models
import comfy.supported_models_base


def count_blocks(state_dict_keys, prefix_string):
    """How many of prefix_string.format(0), (1), … start some key, counted until the first that does not."""
    count = 0
    while any(key.startswith(prefix_string.format(count)) for key in state_dict_keys):
        count += 1
    return count


def _transformer(state_dict, block):
    """(depth, context width, whether projections are linear) of a block's SpatialTransformer; depth 0 without one."""
    pattern = re.compile(re.escape(f"{block}1.transformer_blocks.") + r"(\d+)\.")
    depth = len({match.group(1) for match in map(pattern.match, state_dict) if match})
    if not depth:
        return 0, None, False
    context = state_dict[f"{block}1.transformer_blocks.0.attn2.to_k.weight"].shape[1]
    return depth, context, state_dict[f"{block}1.proj_in.weight"].ndim == 2


def detect_unet_config(state_dict, key_prefix, metadata=None):
    """The UNetModel arguments of a state dict in ComfyUI's key layout, None when it is none."""
    stem = f"{key_prefix}input_blocks.0.0.weight"
    if stem not in state_dict:
        return None
    if any(".time_stack." in key for key in state_dict):
        raise NotImplementedError("video UNets (SVD) need a real ComfyUI")
    label, out = state_dict.get(f"{key_prefix}label_emb.0.0.weight"), state_dict.get(f"{key_prefix}out.2.weight")
    channels, in_channels = state_dict[stem].shape[:2]
    levels, mults, depth_in, depth_out, context, linear = [0], [0], [], [], None, False

    inputs = count_blocks(state_dict, f"{key_prefix}input_blocks.{{}}.")
    for i in range(inputs):
        block, mirror = f"{key_prefix}input_blocks.{i}.", f"{key_prefix}output_blocks.{inputs - i - 1}."
        if f"{mirror}0.in_layers.0.weight" in state_dict:
            depth_out.append(_transformer(state_dict, mirror)[0])
        if f"{block}0.op.weight" in state_dict:
            levels.append(0)
            mults.append(0)
        elif f"{block}0.in_layers.0.weight" in state_dict:
            levels[-1] += 1
            mults[-1] = state_dict[f"{block}0.out_layers.3.weight"].shape[0] // channels
            depth, width, is_linear = _transformer(state_dict, block)
            depth_in.append(depth)
            if depth and context is None:
                context, linear = width, is_linear

    if f"{key_prefix}middle_block.1.proj_in.weight" in state_dict:
        middle = _transformer(state_dict, f"{key_prefix}middle_block.")[0]
    else:
        middle = -1 if f"{key_prefix}middle_block.0.in_layers.0.weight" in state_dict else -2
    config = {
        "use_checkpoint": False,
        "image_size": 32,
        "use_spatial_transformer": True,
        "legacy": False,
        "in_channels": in_channels,
        "out_channels": 4 if out is None else out.shape[0],
        "model_channels": channels,
        "num_res_blocks": levels,
        "channel_mult": mults,
        "transformer_depth": depth_in,
        "transformer_depth_output": depth_out,
        "transformer_depth_middle": middle,
        "use_linear_in_transformer": linear,
        "context_dim": context,
        "adm_in_channels": None if label is None else label.shape[1],
        "use_temporal_resblock": False,
        "use_temporal_attention": False,
    }
    return config if label is None else {**config, "num_classes": "sequential"}


def model_config_from_unet_config(unet_config, state_dict=None):
    """The family of a UNet configuration, None when it is none the embedded host knows."""
    return next(
        (kind(unet_config) for kind in comfy.supported_models.models if kind.matches(unet_config, state_dict)), None
    )


def model_config_from_unet(state_dict, unet_key_prefix, use_base_if_no_match=False, metadata=None):
    """The family of a state dict, None when it is none the embedded host knows."""
    unet_config = detect_unet_config(state_dict, unet_key_prefix, metadata=metadata)
    if unet_config is None:
        return None
    model_config = model_config_from_unet_config(unet_config, state_dict)
    if model_config is None and use_base_if_no_match:
        model_config = comfy.supported_models_base.BASE(unet_config)
    return model_config


def unet_prefix_from_state_dict(state_dict):
    """What a checkpoint's UNet keys start with."""
    prefix = "model.diffusion_model."
    return prefix if sum(key.startswith(prefix) for key in state_dict) > 5 else "model."
