"""Which model a LoRA is for, told from the names and shapes in its file: the families that trainers make LoRAs for
today.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """One kind of model: its name for people, in modelspec's words (architecture, implementation) and in kohya's (base
    model version).

    SD2 has two architectures, by what it predicts, which names and shapes do not tell.
    """

    key: str
    title: str
    architecture: str = ""
    implementation: str = ""
    version: str = ""


_STABILITY = "https://github.com/Stability-AI/generative-models"
FAMILIES = {
    family.key: family
    for family in (
        Family("sd1", "SD1.x", "stable-diffusion-v1", "diffusers", "sd_v1"),
        Family("sd2", "SD2.x", version="sd_v2"),
        Family("sdxl", "SDXL", "stable-diffusion-xl-v1-base", _STABILITY, "sdxl_base_v1-0"),
        Family("refiner", "SDXL's refiner", "stable-diffusion-xl-v1-refiner", _STABILITY, ""),
        Family("cascade", "Stable Cascade"),
        Family("sd3", "SD3", "stable-diffusion-3", _STABILITY, "sd3"),
        Family("flux", "Flux", "flux-1-dev", "https://github.com/black-forest-labs/flux", "flux1"),
        Family("flux2", "Flux 2"),
        Family("chroma", "Chroma"),
        Family("hunyuan", "HunyuanVideo", "hunyuan-video", "https://github.com/Tencent/HunyuanVideo"),
        Family("wan", "Wan", "wan2.1", "https://github.com/Wan-Video/Wan2.1"),
        Family("qwen", "Qwen-Image", "Qwen-Image", "https://github.com/QwenLM/Qwen-Image"),
        Family("lumina", "Lumina 2", "lumina-2", "https://github.com/Alpha-VLLM/Lumina-Image-2.0", "lumina2"),
        Family("z-image", "Z-Image", "Z-Image", "https://github.com/Tongyi-MAI/Z-Image"),
        Family("auraflow", "AuraFlow"),
        Family("cosmos", "Cosmos or Anima"),
        Family("ltx", "LTX-Video or PixArt"),
    )
}
_CONTEXTS = {
    768: "sd1",
    1024: "sd2",
    2048: "sdxl",
    1280: "refiner",
}  # width of the text that a UNet's cross-attention reads
_SIGNS = (  # (pattern of names with underscores, family): the first that any name fits
    (r"prior_unet", "cascade"),
    (r"img_attn_qkv_loras|token_refiner", "hunyuan"),
    (r"distilled_guidance_layer", "chroma"),
    (r"(double|single)_stream_modulation|attn_to_qkv_mlp_proj|blocks_\d+_ff_(context_)?linear_in", "flux2"),
    (r"joint_transformer_blocks_\d|(double|single)_layers_\d", "auraflow"),
    (r"(double|single)_blocks_\d+_|single_transformer_blocks_\d", "flux"),
    (r"joint_blocks_\d|context_block", "sd3"),
    (r"transformer_blocks_\d+_(img|txt)_(mlp|mod)", "qwen"),
    (r"blocks_\d+_(self|cross)_attn_[qkv]_proj|adaln_modulation", "cosmos"),
    (r"blocks_\d+_(self|cross)_attn_([qkvo](?!v?_linear)|norm|[kv]_img)", "wan"),
    (r"(?<!transformer_)blocks_\d+_attn[12]_.*|condition_embedder", "wan"),
)
_WIDTHS = {  # names that several families share, told apart by the width of what goes into attention
    r"transformer_blocks_\d+_attn_(add_)?(to_)?[qkv]": {1536: "sd3", 2432: "sd3", 3072: "flux"},
    r"(layers|context_refiner|noise_refiner)_\d+_(attn|attention)_": {2304: "lumina", 3840: "z-image"},
}
_QWEN = re.compile(
    r"(diffusion_model_|lora_unet_)transformer_blocks_\d|transformer_blocks_(19|[2-5]\d)_"
)  # no names of Flux' 19 blocks
_GATED = (
    (re.compile(r"single_blocks[._]\d+[._]linear1$"), 9),
    (re.compile(r"(img|txt)_mlp[._]0$"), 6),
)  # rows of Flux 2's a column
_UNET = re.compile(r"(input_blocks|output_blocks|middle_block|down_blocks|up_blocks|mid_block)_")
_DOWN = re.compile(
    r"[._](lora_down|lora_A|lora\.down|lora_linear_layer\.down)(\.default)?\.weight$|_lora\.down\.weight$|\.down\.weight$"
)
_UP = re.compile(_DOWN.pattern.replace("down", "up").replace("lora_A", "lora_B"))


def recognised(tensors: Iterable[tuple[str, Sequence[int]]]) -> Family | None:
    """The family that (name, shape) of a LoRA's tensors point to; None when they do not tell."""
    shapes = {name: tuple(shape) for name, shape in tensors}
    flat = {name.removeprefix("transformer.").replace(".", "_"): name for name in shapes}
    inputs = {of: shapes[name][1] for of, name in flat.items() if _DOWN.search(name) and len(shapes[name]) > 1}
    if any(_UNET.search(name) for name in flat) and not any("prior_unet" in name for name in flat):
        return _unet(inputs, flat)
    found = next((key for sign, key in _SIGNS if any(re.search(sign, name) for name in flat)), None)
    if found is not None:
        return FAMILIES["flux2" if found == "flux" and _gated(shapes) else found]
    for sign, widths in _WIDTHS.items():
        families = {widths[width] for name, width in inputs.items() if re.search(sign, name) and width in widths}
        if families == {"flux"} and any(map(_QWEN.search, flat)):
            return FAMILIES["qwen"]
        if len(families) == 1:
            return FAMILIES[families.pop()]
    if any(re.search(r"transformer_blocks_\d+_attn[12]_", name) for name in flat):
        return FAMILIES["ltx"]
    return None


def _gated(shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether feed-forwards of Flux' names are Flux 2's, which are gated."""
    rows = {_UP.sub("", name): shape[0] for name, shape in shapes.items() if _UP.search(name) and len(shape)}
    columns = {_DOWN.sub("", name): shape[1] for name, shape in shapes.items() if _DOWN.search(name) and len(shape) > 1}
    return any(
        rows.get(base) == times * width
        for base, width in columns.items()
        for sign, times in _GATED
        if sign.search(base)
    )


def _unet(inputs: Mapping[str, int], names: Iterable[str]) -> Family | None:
    """A UNet's family: by the width of cross-attention's context, else by the depth of its transformers."""
    contexts = {
        _CONTEXTS.get(width) for name, width in inputs.items() if re.search(r"attn2_(processor_)?to_[kv]", name)
    }
    if len(contexts) == 1:
        key = contexts.pop()
        if key is None:
            return None
        return FAMILIES[key]
    if any(re.search(r"transformer_blocks_[2-9]_", name) for name in names):
        return FAMILIES["sdxl"]
    return None


def context(tensors: Iterable[tuple[str, Sequence[int]]]) -> int | None:
    """The width of the text that a UNet's LoRA reads, known family or not."""
    return next(
        (
            shape[1]
            for name, shape in tensors
            if len(shape) > 1 and _DOWN.search(name) and re.search(r"attn2[._](processor[._])?to_[kv]", name)
        ),
        None,
    )
