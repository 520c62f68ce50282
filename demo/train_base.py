"""Trains the demo's base model with Graft's own training core."""

from __future__ import annotations

import torch
from torch import Tensor

from . import model


def start_weights(seed: int = 0) -> dict[str, Tensor]:
    """The first weights of the whole file: a UNet to be trained and the text encoder, which stays as it is."""
    from .. import host

    with torch.random.fork_rng(devices=[]):  # modules draw weights of their own when they are built
        unet, encoder = host.demo_unet(), model.TextEncoder()
    model.initialise_(unet, seed)
    model.initialise_text_(encoder, seed)
    weights = {f"model.diffusion_model.{key}": tensor.contiguous() for key, tensor in unet.state_dict().items()}
    return weights | {f"text.{key}": tensor.contiguous() for key, tensor in encoder.state_dict().items()}
