"""AuraFlow."""

from __future__ import annotations

from .block_names import plain_blocks
from .family import Missing, ModelFamily, TrainingTargets
from .layer_names import LayerNames, same_name
from .recognition import Recognition

FAMILY = ModelFamily(
    name="auraflow",
    title="AuraFlow",
    recognition=Recognition(names=(r"joint_transformer_blocks_\d", r"(double|single)_layers_\d")),
    modelspec=Missing("modelspec names no AuraFlow"),
    kohya=Missing("sd-scripts does not train it"),
    layer_names=LayerNames(prefix="transformer.", rename=same_name),
    blocks=plain_blocks("layers", "transformer_blocks"),
    token_layout=Missing("nobody has tried token downsampling with it"),
    training=TrainingTargets(attention=("attn",), feed_forward=("mlp",)),
    examples=(
        {"joint_transformer_blocks.0.attn.to_q": (3072, 3072)},
        {"diffusion_model.double_layers.0.attn.w1q": (3072, 3072)},
    ),
)
