"""OneTrainer: kohya's names with its own prefixes for transformers and Stable Cascade, and bundled embeddings."""

from .key_format import KeyFormat

FORMAT = KeyFormat(
    name="onetrainer",
    title="OneTrainer",
    examples={
        "lora_transformer_blocks_0_self_attn_q.lora_up.weight": "diffusion_model.blocks.0.self_attn.q.weight",
        "lora_prior_unet_blocks_0_self_attn_q.lora_up.weight": "diffusion_model.blocks.0.self_attn.q.weight",
    },
    prefixes=("lora_transformer_", "lora_prior_unet_"),
    text_encoder=r"(?:lora_|lycoris_)?prior_te(\d?)",
    text_encoder_prefixes=("lora_prior_te",),
    # sd-webui reads `string_to_param.*` there; a name may have dots of its own
    embeddings=r"bundle_emb\.(?P<name>.*?)(?:\.(?P<encoder>string_to_param\..*|[^.]*))?",
)
