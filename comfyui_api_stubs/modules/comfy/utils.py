"""Files, nested attributes, resizing, progress and the diffusers names of UNet weights (ComfyUI's `comfy.utils`)."""

import math

import numpy as np
import safetensors
import safetensors.torch
import torch


def load_torch_file(ckpt, safe_load=False, device=None, return_metadata=False):
    """The state dict of a safetensors file, memory-mapped; other formats run code when loaded and are refused."""
    name = str(ckpt)
    if not name.lower().endswith((".safetensors", ".sft")):
        raise ValueError(f"{name}: the embedded host loads .safetensors only; convert the file, or use a real ComfyUI")
    device = torch.device("cpu") if device is None else torch.device(device)
    try:
        with safetensors.safe_open(name, framework="pt", device=str(device)) as file:
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
            metadata = file.metadata()
    except safetensors.SafetensorError as error:
        raise ValueError(f"{name} is not a whole safetensors file ({error}); copy or download it again") from error
    return (state, metadata) if return_metadata else state


def save_torch_file(sd, ckpt, metadata=None):
    """Write a state dict as safetensors."""
    safetensors.torch.save_file(sd, str(ckpt), metadata=metadata)


def calculate_parameters(sd, prefix=""):
    """The number of elements of all tensors under a prefix."""
    return sum(tensor.nelement() for key, tensor in sd.items() if key.startswith(prefix))


def weight_dtype(sd, prefix=""):
    """The type that most elements under a prefix have, None when there are none."""
    counts: dict[torch.dtype, int] = {}
    for key, tensor in sd.items():
        if key.startswith(prefix):
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    return max(counts, key=counts.__getitem__) if counts else None


def state_dict_prefix_replace(state_dict, replace_prefix, filter_keys=False):
    """Move keys with one of the prefixes to the new prefix; filter_keys returns the moved ones alone (and removes them
    here).
    """
    out = {} if filter_keys else state_dict
    for old, new in replace_prefix.items():
        for key in [key for key in state_dict if key.startswith(old)]:
            out[new + key[len(old) :]] = state_dict.pop(key)
    return out


def _owner(obj, attr):
    *path, name = attr.split(".")
    for part in path:
        obj = getattr(obj, part)
    return obj, name


def get_attr(obj, attr: str):
    """The value at a dotted path."""
    for name in attr.split("."):
        obj = getattr(obj, name)
    return obj


def set_attr(obj, attr, value):
    """Set the value at a dotted path; returns the previous one."""
    owner, name = _owner(obj, attr)
    previous = getattr(owner, name)
    setattr(owner, name, value)
    return previous


def set_attr_param(obj, attr, value):
    """Put a new frozen Parameter around `value` at a dotted path; returns the previous one."""
    if value.is_inference() and not torch.is_inference_mode_enabled():
        value = value.clone()  # a Parameter cannot be made around an inference tensor out here
    return set_attr(obj, attr, torch.nn.Parameter(value, requires_grad=False))


def copy_to_param(obj, attr, value):
    """Copy `value` into the parameter at a dotted path."""
    owner, name = _owner(obj, attr)
    getattr(owner, name).data.copy_(value)


def repeat_to_batch_size(tensor, batch_size, dim=0):
    """Cut or repeat `tensor` along `dim` to the given size."""
    size = tensor.shape[dim]
    if size < batch_size:
        repeats = [1] * tensor.ndim
        repeats[dim] = math.ceil(batch_size / size)
        tensor = tensor.repeat(repeats)
    return tensor if tensor.shape[dim] == batch_size else tensor.narrow(dim, 0, batch_size)


def resize_to_batch_size(tensor, batch_size):
    """Pick evenly spaced entries of a batch so that there are batch_size of them."""
    size = tensor.shape[0]
    if size == batch_size:
        return tensor
    if batch_size <= 1:
        return tensor[:batch_size]
    if batch_size < size:
        index = [min(round(i * (size - 1) / (batch_size - 1)), size - 1) for i in range(batch_size)]
    else:
        index = [min(math.floor((i + 0.5) * size / batch_size), size - 1) for i in range(batch_size)]
    return tensor[index]


def _lanczos(samples, width, height):
    from PIL import Image

    def resized(image):
        pixels = np.clip(255.0 * image.movedim(0, -1).cpu().numpy(), 0, 255).astype(np.uint8)
        picture = Image.fromarray(pixels).resize((width, height), resample=Image.Resampling.LANCZOS)
        return torch.from_numpy(np.array(picture).astype(np.float32) / 255.0).movedim(-1, 0)

    return torch.stack([resized(image) for image in samples]).to(samples.device, samples.dtype)


def common_upscale(samples, width, height, upscale_method, crop):
    """Resize (B, C, H, W); crop "center" first cuts to the target's aspect ratio."""
    if upscale_method == "bislerp":
        raise NotImplementedError(
            "bislerp needs a real ComfyUI; choose nearest-exact, bilinear, area, bicubic or lanczos"
        )
    if crop == "center":
        old_height, old_width = samples.shape[-2:]
        ratio = (old_width / old_height) / (width / height)
        x = round((old_width - old_width / ratio) / 2) if ratio > 1 else 0
        y = round((old_height - old_height * ratio) / 2) if ratio < 1 else 0
        samples = samples.narrow(-2, y, old_height - 2 * y).narrow(-1, x, old_width - 2 * x)
    if upscale_method == "lanczos":
        return _lanczos(samples, width, height)
    return torch.nn.functional.interpolate(samples, size=(height, width), mode=upscale_method)


def reshape_mask(input_mask, output_shape):
    """A mask resized, given channels and repeated to a latent's shape (B, C, H, W)."""
    if len(output_shape) != 4:
        raise NotImplementedError(f"masks for latents of {len(output_shape)} dimensions need a real ComfyUI")
    mask = input_mask.reshape((-1, 1, *input_mask.shape[-2:]))
    mask = torch.nn.functional.interpolate(mask, size=output_shape[2:], mode="bilinear")
    mask = mask.repeat(1, output_shape[1], 1, 1)[:, : output_shape[1]]
    return repeat_to_batch_size(mask, output_shape[0])


PROGRESS_BAR_ENABLED = True
PROGRESS_BAR_HOOK = None


def set_progress_bar_enabled(enabled):
    """Switch console progress bars of samplers on or off."""
    global PROGRESS_BAR_ENABLED
    PROGRESS_BAR_ENABLED = enabled


def set_progress_bar_global_hook(function):
    """Set the function (value, total, preview, node_id=) that new progress bars report to."""
    global PROGRESS_BAR_HOOK
    PROGRESS_BAR_HOOK = function


class ProgressBar:
    """Reports how far a node has come to the global hook."""

    def __init__(self, total, node_id=None):
        self.total, self.current, self.hook, self.node_id = total, 0, PROGRESS_BAR_HOOK, node_id

    def update_absolute(self, value, total=None, preview=None):
        """Say that `value` of `total` is done."""
        if total is not None:
            self.total = total
        self.current = min(value, self.total)
        if self.hook is not None:
            self.hook(self.current, self.total, preview, node_id=self.node_id)

    def update(self, value):
        """Say that `value` more is done."""
        self.update_absolute(self.current + value)


_RESNET_NAMES = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_TRANSFORMER_NAMES = ("norm", "proj_in", "proj_out")
_BLOCK_NAMES = ("norm1", "norm2", "norm3", "attn1.to_out.0", "attn2.to_out.0", "ff.net.0.proj", "ff.net.2")
_BLOCK_NAMES_NO_BIAS = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn2.to_q", "attn2.to_k", "attn2.to_v")
_BASIC_NAMES = {
    "class_embedding.linear_1": "label_emb.0.0",
    "class_embedding.linear_2": "label_emb.0.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
}


def unet_to_diffusers(unet_config):
    """{diffusers weight name: ComfyUI weight name} of a UNet's possible weights (some of the names may not exist in
    it).
    """
    if "num_res_blocks" not in unet_config:
        return {}
    names = {}

    def both(theirs, ours):
        names[f"{theirs}.weight"], names[f"{theirs}.bias"] = f"{ours}.weight", f"{ours}.bias"

    def resnet(theirs, ours):
        for our_part, their_part in _RESNET_NAMES.items():
            both(f"{theirs}.{their_part}", f"{ours}.{our_part}")

    def transformer(theirs, ours, depth):
        for part in _TRANSFORMER_NAMES:
            both(f"{theirs}.{part}", f"{ours}.{part}")
        for block in (f"transformer_blocks.{i}" for i in range(depth)):
            for part in _BLOCK_NAMES:
                both(f"{theirs}.{block}.{part}", f"{ours}.{block}.{part}")
            for part in _BLOCK_NAMES_NO_BIAS:
                names[f"{theirs}.{block}.{part}.weight"] = f"{ours}.{block}.{part}.weight"

    res_blocks, levels = unet_config["num_res_blocks"], len(unet_config["channel_mult"])
    depth_in, depth_out = list(unet_config["transformer_depth"]), list(unet_config["transformer_depth_output"])
    for level in range(levels):
        first = 1 + (res_blocks[level] + 1) * level
        for i in range(res_blocks[level]):
            resnet(f"down_blocks.{level}.resnets.{i}", f"input_blocks.{first + i}.0")
            depth = depth_in.pop(0)
            if depth > 0:
                transformer(f"down_blocks.{level}.attentions.{i}", f"input_blocks.{first + i}.1", depth)
        both(f"down_blocks.{level}.downsamplers.0.conv", f"input_blocks.{first + res_blocks[level]}.0.op")

    transformer("mid_block.attentions.0", "middle_block.1", unet_config.get("transformer_depth_middle"))
    resnet("mid_block.resnets.0", "middle_block.0")
    resnet("mid_block.resnets.1", "middle_block.2")

    for level, blocks in enumerate(reversed(res_blocks)):
        first = (blocks + 1) * level
        for i in range(blocks + 1):
            resnet(f"up_blocks.{level}.resnets.{i}", f"output_blocks.{first + i}.0")
            depth = depth_out.pop()
            if depth > 0:
                transformer(f"up_blocks.{level}.attentions.{i}", f"output_blocks.{first + i}.1", depth)
        both(f"up_blocks.{level}.upsamplers.0.conv", f"output_blocks.{first + blocks}.{2 if depth > 0 else 1}.conv")
    for theirs, ours in _BASIC_NAMES.items():
        both(theirs, ours)
    return names
