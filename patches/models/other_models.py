"""diffusers' names for the layers of models that Graft puts LoRAs on and knows nothing else of: CogVideoX, Mochi 1 and
HunyuanDiT.
"""

from __future__ import annotations

from .diffusers_names import LayerNames, SwappedHalves, equal_kv, equal_qkv, rename_by_table

_COGVIDEOX = (
    (r"^blocks\.(\d+)\.([qkv])$", r"transformer_blocks.\1.attn1.to_\2"),
    (r"^blocks\.(\d+)\.attn_out$", r"transformer_blocks.\1.attn1.to_out.0"),
    (r"^blocks\.(\d+)\.norm_([qk])$", r"transformer_blocks.\1.attn1.norm_\2"),
    (r"^blocks\.(\d+)\.ff_proj$", r"transformer_blocks.\1.ff.net.0.proj"),
    (r"^blocks\.(\d+)\.ff_out$", r"transformer_blocks.\1.ff.net.2"),
    (r"^blocks\.", "transformer_blocks."),
    (r"^(time|ofs)_embedding_linear_([12])$", r"\1_embedding.linear_\2"),
)
_MOCHI = (
    (r"^blocks\.(\d+)\.attn\.proj_x$", r"transformer_blocks.\1.attn1.to_out.0"),
    (r"^blocks\.(\d+)\.attn\.proj_y$", r"transformer_blocks.\1.attn1.to_add_out"),
    (r"^blocks\.(\d+)\.attn\.([qk])_norm_x$", r"transformer_blocks.\1.attn1.norm_\2"),
    (r"^blocks\.(\d+)\.attn\.([qk])_norm_y$", r"transformer_blocks.\1.attn1.norm_added_\2"),
    (r"^blocks\.(\d+)\.mod_x$", r"transformer_blocks.\1.norm1.linear"),
    (r"^blocks\.(\d+)\.mod_y$", r"transformer_blocks.\1.norm1_context.linear"),
    (r"^blocks\.(\d+)\.mlp_x\.w1$", r"transformer_blocks.\1.ff.net.0.proj"),
    (r"^blocks\.(\d+)\.mlp_x\.w2$", r"transformer_blocks.\1.ff.net.2"),
    (r"^blocks\.(\d+)\.mlp_y\.w1$", r"transformer_blocks.\1.ff_context.net.0.proj"),
    (r"^blocks\.(\d+)\.mlp_y\.w2$", r"transformer_blocks.\1.ff_context.net.2"),
    (r"^x_embedder\.proj$", "patch_embed.proj"),
    (r"^t_embedder\.mlp\.0$", "time_embed.timestep_embedder.linear_1"),
    (r"^t_embedder\.mlp\.2$", "time_embed.timestep_embedder.linear_2"),
    (r"^t5_y_embedder\.", "time_embed.pooler."),
    (r"^t5_yproj$", "time_embed.caption_proj"),
    (r"^final_layer\.mod$", "norm_out.linear"),
    (r"^final_layer\.linear$", "proj_out"),
)
_MOCHI_SIGN = r"(^|\.)blocks\.0\.attn\.qkv_x\."
_HUNYUAN_DIT = (
    (r"^(blocks\.\d+\.attn\d)\.out_proj$", r"\1.to_out.0"),
    (r"^(blocks\.\d+\.attn2)\.q_proj$", r"\1.to_q"),
    (r"^(blocks\.\d+\.attn\d)\.([qk])_norm$", r"\1.norm_\2"),
    (r"^(blocks\.\d+)\.mlp\.fc1$", r"\1.ff.net.0.proj"),
    (r"^(blocks\.\d+)\.mlp\.fc2$", r"\1.ff.net.2"),
    (r"^(blocks\.\d+)\.default_modulation\.1$", r"\1.norm1.linear"),
    (r"^mlp_t5\.0$", "text_embedder.linear_1"),
    (r"^mlp_t5\.2$", "text_embedder.linear_2"),
    (r"^pooler\.", "time_extra_emb.pooler."),
    (r"^t_embedder\.mlp\.0$", "time_extra_emb.timestep_embedder.linear_1"),
    (r"^t_embedder\.mlp\.2$", "time_extra_emb.timestep_embedder.linear_2"),
    (r"^extra_embedder\.0$", "time_extra_emb.extra_embedder.linear_1"),
    (r"^extra_embedder\.2$", "time_extra_emb.extra_embedder.linear_2"),
    (r"^x_embedder\.proj$", "pos_embed.proj"),
    (r"^final_layer\.linear$", "proj_out"),
    (r"^final_layer\.adaLN_modulation\.1$", "norm_out.linear"),
)
LAYER_NAMES = (
    LayerNames(rename=rename_by_table(_COGVIDEOX), model_sign=r"(^|\.)blocks\.0\.attn_out\."),
    LayerNames(
        rename=rename_by_table(_MOCHI),
        fused=(
            equal_qkv(r"^blocks\.(\d+)\.attn\.qkv_x$", r"transformer_blocks.\1.attn1.to_{}"),
            equal_qkv(r"^blocks\.(\d+)\.attn\.qkv_y$", r"transformer_blocks.\1.attn1.add_{}_proj"),
        ),
        swapped=(SwappedHalves(r"^final_layer\.mod$"), SwappedHalves(r"\.mlp_[xy]\.w1$")),
        model_sign=_MOCHI_SIGN,
    ),
    LayerNames(  # of the last block, whose text goes no further
        rename=rename_by_table(((r"^blocks\.(\d+)\.mod_y$", r"transformer_blocks.\1.norm1_context.linear_1"),)),
        model_sign=_MOCHI_SIGN,
    ),
    LayerNames(
        rename=rename_by_table(_HUNYUAN_DIT),
        fused=(
            equal_qkv(r"^(blocks\.\d+\.attn1)\.Wqkv$", r"\1.to_{}"),
            equal_kv(r"^(blocks\.\d+\.attn2)\.kv_proj$", r"\1.to_{}"),
        ),
        swapped=(SwappedHalves(r"^final_layer\.adaLN_modulation\.1$"),),
        model_sign=r"(^|\.)blocks\.0\.attn1\.Wqkv\.",
    ),
)
