"""HiDream-I1 and HiDream-E1, which edits. HiDream-O1 is another model, with other names."""

from __future__ import annotations

from . import flux
from .block_names import BlockNames
from .family import Missing, ModelFamily, TrainingTargets
from .layer_names import LayerNames, same_name
from .recognition import Recognition

FAMILY = ModelFamily(
    name="hidream",
    title="HiDream-I1",
    recognition=Recognition(names=(r"(double|single)_stream_blocks_\d+_block_",)),
    modelspec=Missing("modelspec names HiDream-O1 alone, which is another model"),
    kohya=Missing("neither sd-scripts nor musubi trains it"),
    layer_names=LayerNames(prefix="transformer.", rename=same_name),
    blocks=BlockNames(
        kinds=flux.BLOCKS.kinds,
        lists={"double_stream_blocks": "D", "single_stream_blocks": "S"},
        last=("final_layer",),
    ),
    token_layout=Missing("nobody has tried token downsampling with it"),
    training=TrainingTargets(
        attention=("attn1",),
        feed_forward=("ff_i", "ff_t"),
        on_request=("visual",),  # of HiDream-O1: it reads nothing but reference pictures
    ),
    examples=(
        {"lycoris_double_stream_blocks_0_block_attn1_to_q": (2560, 2560)},
        {"diffusion_model.single_stream_blocks.31.block.ff_i.experts.0.w1": (6912, 2560)},
        {"transformer.double_stream_blocks.15.block.attn1.to_out_t": (2560, 2560)},
    ),
)
