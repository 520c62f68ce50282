"""Tencent's own trainer for HunyuanVideo-I2V: kohya's names with a prefix of its own."""

from .key_format import KeyFormat

FORMAT = KeyFormat(
    name="tencent",
    title="Tencent, for HunyuanVideo-I2V",
    examples={
        "Hunyuan_video_I2V_lora_blocks_0_self_attn_q.lora_up.weight": "diffusion_model.blocks.0.self_attn.q.weight"
    },
    prefixes=("Hunyuan_video_I2V_lora_",),
)
