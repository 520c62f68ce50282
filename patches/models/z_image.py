"""Z-Image: Lumina 2's class in ComfyUI, with its own names in diffusers."""

from __future__ import annotations

from . import lumina
from .diffusers_names import LayerNames, grouped_qkv, rename_by_table
from .family import ModelFamily, ModelSpec
from .recognition import Recognition, SharedNames

_RENAMES = (
    (r"attention\.out$", "attention.to_out.0"),
    (r"attention\.([qk])_norm$", r"attention.norm_\1"),
    (r"^final_layer\.", "all_final_layer.2-1."),
    (r"^x_embedder$", "all_x_embedder.2-1"),
)
FAMILY = ModelFamily(
    name="z-image",
    title="Z-Image",
    recognition=Recognition(shared_names=SharedNames(lumina.SHARED, (3840,))),
    modelspec=ModelSpec("Z-Image", "https://github.com/Tongyi-MAI/Z-Image"),
    layer_names=LayerNames(
        rename=rename_by_table(_RENAMES),
        fused=(grouped_qkv(r"^(.*)attention\.qkv$", r"\1attention.to_{}"),),
        model_sign=lumina.MODEL_SIGN,
    ),
    blocks=lumina.BLOCKS,
    token_layout=lumina.TOKENS,
    token_routing=lumina.ROUTING,
    training=lumina.TARGETS,
    examples=({"diffusion_model.layers.0.attention.qkv": (11520, 3840)},),
)
