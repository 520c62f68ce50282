"""The host's settings, `comfy.cli_args.args`: ComfyUI's option names with their defaults, set by whoever starts the
host.
"""

import argparse
import enum


class LatentPreviewMethod(enum.Enum):
    """How previews of latents are made."""

    NoPreviews = "none"
    Auto = "auto"
    Latent2RGB = "latent2rgb"
    TAESD = "taesd"

    @classmethod
    def from_string(cls, value):
        """The member of that value, or None."""
        return next((member for member in cls if member.value == value), None)


_FLAGS = (
    "cpu",
    "cpu_vae",
    "gpu_only",
    "highvram",
    "normalvram",
    "lowvram",
    "novram",
    "disable_smart_memory",
    "deterministic",
    "force_fp32",
    "force_fp16",
    "fp32_unet",
    "fp16_unet",
    "bf16_unet",
    "fp64_unet",
    "fp16_vae",
    "fp32_vae",
    "bf16_vae",
    "fp16_text_enc",
    "fp32_text_enc",
    "bf16_text_enc",
    "force_channels_last",
    "disable_metadata",
    "disable_all_custom_nodes",
    "disable_api_nodes",
    "dont_print_server",
    "quick_test_for_ci",
    "multi_user",
)

args = argparse.Namespace(
    **dict.fromkeys(_FLAGS, False),
    listen="127.0.0.1",
    port=8188,
    base_directory=None,
    output_directory=None,
    input_directory=None,
    temp_directory=None,
    user_directory=None,
    extra_model_paths_config=None,
    preview_method=LatentPreviewMethod.NoPreviews,
    preview_size=512,
    reserve_vram=None,
    fast=set(),
    verbose="INFO",
    cache_classic=False,
    cache_lru=0,
    cache_none=False,
    cache_ram=[],
    default_device=None,
    cuda_device=None,
)
