"""ai-toolkit: generic names with PEFT's factors, and the one embedding that it trains with a LoRA."""

from .key_format import KeyFormat

FORMAT = KeyFormat(
    name="ai-toolkit",
    title="ai-toolkit",
    examples={"diffusion_model.layers.0.attention.out.lora_A.weight": "diffusion_model.layers.0.attention.out.weight"},
    embeddings="(?P<encoder>emb_params|clip_l|clip_g)",
)
