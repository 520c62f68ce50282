"""Decoded latents become one batch of pictures, also those of a VAE for video."""

from types import SimpleNamespace

import pytest
import torch
from graft_nodes.host.previews import decode_alone


@pytest.mark.parametrize("shape", [(2, 4, 5, 3), (2, 3, 4, 5, 3)])
def test_frames_of_clips_are_pictures_one_after_another(shape):
    decoded = torch.rand(*shape, dtype=torch.float64, requires_grad=True)
    pictures = decode_alone(SimpleNamespace(decode=lambda latents: decoded * latents), torch.tensor(2.0))
    assert pictures.dtype == torch.float32 and not pictures.requires_grad
    assert torch.equal(pictures, (2 * decoded.detach()).flatten(0, -4).float())
