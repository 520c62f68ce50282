"""DiffSynth-Studio: the model's own names, prefixed by its pipeline's name."""

from .key_format import KeyFormat

FORMAT = KeyFormat(
    name="diffsynth",
    title="DiffSynth-Studio",
    examples={"pipe.dit.blocks.0.self_attn.q.lora_A.default.weight": "diffusion_model.blocks.0.self_attn.q.weight"},
    prefixes=("pipe.dit.", "dit."),
)
