"""Batch Latents: two batches of latents as one."""

from __future__ import annotations

from typing import Any

import comfy.utils
import torch
from comfy_api.latest import io


class LatentBatch(io.ComfyNode):
    """Puts the second batch behind the first, in the first one's size."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "LatentBatch",
            display_name="Batch Latents",
            category="latent/batch",
            inputs=[io.Latent.Input("samples1"), io.Latent.Input("samples2")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, samples1: dict[str, Any], samples2: dict[str, Any]) -> io.NodeOutput:
        first, second = samples1["samples"], samples2["samples"]
        if second.shape[1:] != first.shape[1:]:
            second = comfy.utils.common_upscale(second, first.shape[-1], first.shape[-2], "bilinear", "center")
        places = [*_places(samples1), *_places(samples2)]
        return io.NodeOutput({**samples1, "samples": torch.cat((first, second)), "batch_index": places})


def _places(latent: dict[str, Any]) -> list[int]:
    """Where in its own batch each latent was: the noise of a seed depends on it."""
    return list(latent.get("batch_index", range(len(latent["samples"]))))
