"""LTX-Video and PixArt, whose LoRA files use the same names."""

from __future__ import annotations

from .block_names import plain_blocks
from .family import Missing, ModelFamily, TrainingTargets
from .layer_names import LayerNames, same_name
from .recognition import Recognition, SharedNames

FAMILY = ModelFamily(
    name="ltx",
    title="LTX-Video or PixArt",
    recognition=Recognition(shared_names=SharedNames(r"transformer_blocks_\d+_attn[12]_", None)),
    modelspec=Missing("the files do not tell which of the two it is"),
    kohya=Missing("the files do not tell which of the two it is"),
    layer_names=LayerNames(prefix="transformer.", rename=same_name),
    blocks=plain_blocks("transformer_blocks", "blocks"),
    token_layout=Missing("nobody has tried token downsampling with either"),
    training=TrainingTargets(attention=("attn1", "attn2"), feed_forward=("ff",)),
    examples=({"transformer.transformer_blocks.3.attn1.to_q": (2048, 2048)},),
)
