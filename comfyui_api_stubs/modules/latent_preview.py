"""The callback that samplers call after each step: progress, and a preview picture where previews are on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import comfy.utils
import torch
from comfy.cli_args import LatentPreviewMethod, args

MAX_PREVIEW_RESOLUTION = args.preview_size
default_preview_method = args.preview_method


class LatentPreviewer:
    """Makes a picture of a latent."""

    def decode_latent_to_preview(self, x0: torch.Tensor) -> Any:
        """A PIL picture of the first latent of the batch."""

    def decode_latent_to_preview_image(self, preview_format: str, x0: torch.Tensor) -> tuple:
        """(format, PIL picture, largest side)."""
        return ("JPEG", self.decode_latent_to_preview(x0), MAX_PREVIEW_RESOLUTION)


class Latent2RGBPreviewer(LatentPreviewer):
    """A linear map from latent channels to red, green and blue."""

    def __init__(self, latent_rgb_factors: list, latent_rgb_factors_bias: list | None = None):
        self.factors = torch.tensor(latent_rgb_factors).T
        self.bias = None if latent_rgb_factors_bias is None else torch.tensor(latent_rgb_factors_bias)

    def decode_latent_to_preview(self, x0: torch.Tensor) -> Any:
        from PIL import Image

        pixels = torch.nn.functional.linear(x0[0].float().cpu().movedim(0, -1), self.factors, self.bias)
        return Image.fromarray(((pixels + 1) * 127.5).clamp(0, 255).to(torch.uint8).numpy())


def get_previewer(device: Any, latent_format: Any) -> LatentPreviewer | None:
    """The previewer for a latent format, or None when previews are off or the format has no colours."""
    factors = getattr(latent_format, "latent_rgb_factors", None)
    if args.preview_method == LatentPreviewMethod.NoPreviews or factors is None:
        return None
    return Latent2RGBPreviewer(factors, getattr(latent_format, "latent_rgb_factors_bias", None))


def prepare_callback(model: Any, steps: int, x0_output_dict: dict | None = None) -> Callable:
    """A sampler callback (step, x0, x, total_steps) that reports progress; the latest x0 goes into `x0_output_dict`."""
    previewer = get_previewer(model.load_device, model.model.latent_format)
    bar = comfy.utils.ProgressBar(steps)

    def callback(step: int, x0: torch.Tensor, x: torch.Tensor, total_steps: int) -> None:
        if x0_output_dict is not None:
            x0_output_dict["x0"] = x0
        bar.update_absolute(
            step + 1, total_steps, previewer.decode_latent_to_preview_image("JPEG", x0) if previewer else None
        )

    return callback


def set_preview_method(override: str | None = None) -> None:
    """Use a preview method from now on ("none", "auto", "latent2rgb" or "taesd"); without one, or with "default", the
    host's own.
    """
    method = None
    if override and override != "default":
        method = LatentPreviewMethod.from_string(override)
        if method is None:
            logging.warning("there is no preview method %r", override)
    args.preview_method = method or default_preview_method
