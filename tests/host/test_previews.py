"""Decoded latents become one batch of pictures, also those of a VAE for video."""

from types import SimpleNamespace

import pytest
import torch
from graft_nodes.host.previews import check_inputs, decode_alone
from graft_nodes.training.run.preview_prompts import PromptLine


@pytest.mark.parametrize("shape", [(2, 4, 5, 3), (2, 3, 4, 5, 3)])
def test_frames_of_clips_are_pictures_one_after_another(shape):
    decoded = torch.rand(*shape, dtype=torch.float64, requires_grad=True)
    pictures = decode_alone(SimpleNamespace(decode=lambda latents: decoded * latents), torch.tensor(2.0))
    assert pictures.dtype == torch.float32 and not pictures.requires_grad
    assert torch.equal(pictures, (2 * decoded.detach()).flatten(0, -4).float())


@pytest.mark.parametrize(
    ("positive", "negative", "said"),
    [
        ({"control": None}, {}, ""),
        ({"control": "a net"}, {}, "positive prompt has control, which needs more weights in memory. Connect"),
        ({}, {"hooks": "some"}, "negative prompt has hooks, which needs more weights in memory. Connect"),
        (
            {"control": "a net", "hooks": "some"},
            {},
            "positive prompt has control, which needs more weights in memory; positive prompt has hooks, which",
        ),
    ],
)
def test_prompts_that_need_more_weights_are_refused(positive, negative, said):
    def checked():
        latent = {"samples": torch.zeros(1, 4, 2, 2)}
        check_inputs([["text", positive]], [["text", negative]], latent, "vae", (), None)

    if said:
        with pytest.raises(ValueError, match=f"preview every N steps is above 0, and {said}"):
            checked()
    else:
        checked()


def test_all_that_previews_lack_is_said_at_once():
    lacks = "positive prompt is not connected; latent is not connected; VAE .* is not connected. Connect what"
    with pytest.raises(ValueError, match=lacks):
        check_inputs(None, None, None, None, (), None)
    with pytest.raises(ValueError, match=r"0, and CLIP .* encodes more preview prompts, is not connected\. Connect"):
        check_inputs(None, None, {"samples": torch.zeros(1, 4, 2, 2)}, "vae", (PromptLine("a cat"),), None)
