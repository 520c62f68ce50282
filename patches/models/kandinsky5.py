"""Kandinsky 5: Lite and Pro, image and video."""

from __future__ import annotations

from .block_names import plain_blocks
from .family import ModelFamily, ModelSpec, TrainingTargets
from .recognition import Recognition
from .routed_blocks import RoutedBlocks, RoutedClass, TokenRouting

_ROUTED = RoutedBlocks("visual_transformer_blocks", "visual_embed", positions=("freqs",))
FAMILY = ModelFamily(
    name="kandinsky5",
    title="Kandinsky 5",
    recognition=Recognition(names=(r"(visual|text)_transformer_blocks_\d+_",)),
    modelspec=ModelSpec("Kandinsky-5", "https://github.com/kandinskylab/kandinsky-5"),
    blocks=plain_blocks("visual_transformer_blocks"),
    token_routing=TokenRouting({"Kandinsky5": RoutedClass((_ROUTED,))}),
    training=TrainingTargets(attention=("self_attention", "cross_attention"), feed_forward=("feed_forward",)),
    examples=(
        {"lora_unet_visual_transformer_blocks_0_self_attention_to_query": (1792, 1792)},
        {"diffusion_model.visual_transformer_blocks.31.cross_attention.to_key": (2560, 2560)},
        {"transformer.text_transformer_blocks.0.feed_forward.in_layer": (16384, 4096)},
        {"visual_transformer_blocks.0.self_attention.out_layer": (1792, 1792)},
    ),
)
