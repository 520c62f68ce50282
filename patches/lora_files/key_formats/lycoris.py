"""lycoris on its own: its own prefix, with underscores for dots."""

from .key_format import KeyFormat

FORMAT = KeyFormat(
    name="lycoris",
    title="lycoris",
    examples={"lycoris_blocks_0_self_attn_q.lora_up.weight": "diffusion_model.blocks.0.self_attn.q.weight"},
    prefixes=("lycoris_unet_", "lycoris_"),
    text_encoder=r"lycoris_te(\d?)",
)
