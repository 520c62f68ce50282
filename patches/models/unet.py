"""LDM-layout UNets: SD1.x, SD2.x, SDXL and SDXL's refiner."""

from __future__ import annotations

import re

from .block_names import REST, BlockNames, NumberedBlocks, numbered
from .diffusers_names import LayerNames
from .family import Kohya, Missing, ModelFamily, ModelSpec, TrainingTargets
from .recognition import Recognition
from .token_layout import UNetLayout

_STABILITY = "https://github.com/Stability-AI/generative-models"
_MIDDLE = {"0": "resnets.0", "1": "attentions.0", "2": "resnets.1"}
_RESIDUAL = {  # layers of a residual block; those of transformers have the same name in both
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_KINDS = ("resnets", "attentions")  # first and second part of a block
_DOWNSAMPLER = {"op": "conv"}
_OUTSIDE = {  # layers outside the blocks
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
}


def diffusers_name(path: str) -> str:
    """diffusers' name for a layer of a UNet with two residual blocks per level, from LDM's name."""
    match = re.fullmatch(r"(input_blocks|output_blocks)\.(\d+)\.(\d)\.(.+)|middle_block\.(\d)\.(.+)", path)
    if match is None:
        return _OUTSIDE.get(path, path)
    if match[5] is not None:
        return f"mid_block.{_MIDDLE[match[5]]}.{_RESIDUAL.get(match[6], match[6])}"
    number, place, rest = int(match[2]), int(match[3]), match[4]
    if match[1] == "input_blocks":
        level, index = divmod(number - 1, 3)
        if index == 2:
            return f"down_blocks.{level}.downsamplers.0.{_DOWNSAMPLER.get(rest, rest)}"
        return f"down_blocks.{level}.{_KINDS[place]}.{index}.{_RESIDUAL.get(rest, rest)}"
    level, index = divmod(number, 3)
    if rest == "conv":
        return f"up_blocks.{level}.upsamplers.0.conv"
    return f"up_blocks.{level}.{_KINDS[place]}.{index}.{_RESIDUAL.get(rest, rest)}"


_LAYER_NAMES = LayerNames(prefix="unet.", rename=diffusers_name)


def _blocks(
    weight_lists: dict[int, tuple[str, tuple[str, ...]]], presets: dict[str, dict[str, float]] | None = None
) -> BlockNames:
    return BlockNames(
        kinds=("IN", "M", "OUT"),
        lists={"input_blocks": "IN", "output_blocks": "OUT"},
        single={"middle_block": "M00"},
        files=(
            NumberedBlocks(r"(?:middle_block|mid_block)_", "M"),
            NumberedBlocks(r"^conv_in_", "IN"),
            NumberedBlocks(r"down_blocks_(\d+)_(?:attentions|resnets)_(\d+)_", "IN", 3, 1),
            NumberedBlocks(r"down_blocks_(\d+)_downsamplers_0_", "IN", 3, 3),
            NumberedBlocks(r"up_blocks_(\d+)_(?:attentions|resnets)_(\d+)_", "OUT", 3, 0),
            NumberedBlocks(r"up_blocks_(\d+)_upsamplers_0_", "OUT", 3, 2),
        ),
        weight_lists=weight_lists,
        presets=presets or {},
    )


_17 = (REST, *numbered("IN", (1, 2, 4, 5, 7, 8)), "M00", *numbered("OUT", range(3, 12)))
_PRESET_DIGITS = {  # sd-webui-lora-block-weight's presets, one digit a block of the list of 17
    "INS": "11100000000000000",
    "IND": "10001110000000000",
    "INALL": "11111110000000000",
    "MIDD": "10001111111100000",
    "OUTD": "10000000111100000",
    "OUTS": "10000000000011111",
    "OUTALL": "10000000111111111",
}


def _presets() -> dict[str, dict[str, float]]:
    presets: dict[str, dict[str, float]] = {"NONE": {"": 0.0}, "ALL": {"": 1.0}, "ALL0.5": {"": 0.5}}
    for name, digits in _PRESET_DIGITS.items():
        presets[name] = dict(zip(_17, map(float, digits), strict=True))
    return presets


_SD1_BLOCKS = _blocks(
    {
        17: ("SD1.x", _17),
        26: ("SD1.x with LoCon", (REST, *numbered("IN", range(12)), "M00", *numbered("OUT", range(12)))),
    },
    _presets(),
)
_SDXL_BLOCKS = _blocks(
    {
        12: ("SDXL", (REST, *numbered("IN", (4, 5, 7, 8)), "M00", *numbered("OUT", range(6)))),
        20: ("SDXL with LoCon", (REST, *numbered("IN", range(9)), "M00", *numbered("OUT", range(9)))),
    }
)
_TRAINING = TrainingTargets(
    attention=(r"attn\d*",),
    feed_forward=("ff", "ff_net", r"(?<=\.)proj_in", r"(?<=\.)proj_out"),
)

SD1 = ModelFamily(
    name="sd1",
    title="SD1.x",
    recognition=Recognition(text_widths=(768,)),
    modelspec=ModelSpec("stable-diffusion-v1", "diffusers"),
    kohya=Kohya("sd_v1", v2=False, diffusers_blocks=True, one_text_encoder=True),
    layer_names=_LAYER_NAMES,
    blocks=_SD1_BLOCKS,
    token_layout=UNetLayout(),
    token_routing=UNetLayout(),
    training=_TRAINING,
    examples=(
        {"lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k": (320, 768)},
        {"diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_v": (320, 768)},
    ),
)
SD2 = ModelFamily(
    name="sd2",
    title="SD2.x",
    recognition=Recognition(text_widths=(1024,)),
    modelspec=Missing("modelspec has two architectures, by what SD2.x predicts; names and shapes do not tell which"),
    kohya=Kohya("sd_v2", v2=True, diffusers_blocks=True, one_text_encoder=True),
    layer_names=_LAYER_NAMES,
    blocks=_SD1_BLOCKS,
    token_layout=UNetLayout(),
    token_routing=UNetLayout(),
    training=_TRAINING,
    examples=({"lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k": (320, 1024)},),
)
SDXL = ModelFamily(
    name="sdxl",
    title="SDXL",
    recognition=Recognition(text_widths=(2048,), unet_names=r"transformer_blocks_[2-9]_"),
    modelspec=ModelSpec("stable-diffusion-xl-v1-base", _STABILITY),
    kohya=Kohya("sdxl_base_v1-0", v2=False),
    layer_names=_LAYER_NAMES,
    blocks=_SDXL_BLOCKS,
    token_layout=UNetLayout(),
    token_routing=UNetLayout(),
    training=_TRAINING,
    examples=(
        {"lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k": (640, 2048)},
        {"lora_unet_input_blocks_4_1_transformer_blocks_5_attn1_to_k": (640, 640)},
    ),
)
REFINER = ModelFamily(
    name="refiner",
    title="SDXL's refiner",
    recognition=Recognition(text_widths=(1280,)),
    modelspec=ModelSpec("stable-diffusion-xl-v1-refiner", _STABILITY),
    kohya=Kohya(Missing("sd-scripts trains no refiner"), one_text_encoder=True),
    layer_names=_LAYER_NAMES,
    blocks=_blocks({}),
    token_layout=UNetLayout(),
    token_routing=UNetLayout(),
    training=_TRAINING,
    examples=({"lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k": (768, 1280)},),
)
FAMILIES = (SD1, SD2, SDXL, REFINER)
