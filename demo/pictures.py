"""Drawn pictures as a training dataset, without files between: latents by the demo's VAE, captions by
its text encoder.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ..training.data.dataset import Conditioning, Dataset


def encoded(clip: Any, vae: Any, drawn: Iterable[tuple[str, str, np.ndarray]], **more: Any) -> Dataset:
    """The dataset of (name, caption, picture (256, 256, 3) uint8) triples; `more` goes to `Dataset.of`."""
    listed = list(drawn)
    latents = [vae.encode(torch.from_numpy(pixels.astype(np.float32) / 255.0)[None])[0] for _, _, pixels in listed]
    captions = [caption for _, caption, _ in listed]
    with torch.no_grad():
        said = {
            caption: Conditioning(clip.encode_from_tokens(clip.tokenize(caption)))
            for caption in sorted({*captions, ""})
        }
    return Dataset.from_latents(latents, captions, said, **more)
