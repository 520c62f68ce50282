"""Encodes drawn images as a dataset, without files: latents by the demo's VAE, captions by its text encoder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ..training.data.dataset import Conditioning, Dataset


def encode_dataset(clip: Any, vae: Any, drawn: Iterable[tuple[str, str, np.ndarray]], **settings: Any) -> Dataset:
    """The dataset of (name, caption, image (256, 256, 3) uint8) triples; `settings` go to `Dataset.from_latents`."""
    latents, captions = [], []
    for _, caption, pixels in drawn:
        image = torch.from_numpy(pixels.astype(np.float32) / 255.0)
        latents.append(vae.encode(image[None])[0])
        captions.append(caption)
    conditionings: dict[str, Conditioning] = {}
    with torch.no_grad():
        for caption in sorted({*captions, ""}):
            conditionings[caption] = Conditioning(clip.encode_from_tokens(clip.tokenize(caption)))
    return Dataset.from_latents(latents, captions, conditionings, **settings)
