"""Captions as ComfyUI's tokenizers read them: brackets are text unless they are to weigh."""

from types import SimpleNamespace

import pytest
from graft_nodes.host.encoding import frame_step, prompt_of


@pytest.mark.parametrize(
    ("caption", "prompt"),
    [
        ("saber (fate)", r"saber \(fate\)"),
        ("tag_(thing:0.2), (a:1.3)", r"tag_\(thing:0.2\), \(a:1.3\)"),
        ("((deep) :)", r"\(\(deep\) :\)"),
        (r"saber \(fate\)", r"saber \(fate\)"),  # as taggers write it for prompts
        (r"saber \(fate (a)", r"saber \(fate \(a\)"),
        ("", ""),
        (r"a \o/ [b] {c} embedding:name", r"a \o/ [b] {c} embedding:name"),
    ],
)
def test_brackets_are_escaped_unless_they_weigh(caption, prompt):
    assert prompt_of(caption, False) == prompt
    assert prompt_of(caption, True) == caption
    assert prompt_of(prompt, False) == prompt


@pytest.mark.parametrize(
    ("facts", "step"),
    [
        ({"latent_dim": 3}, 4),
        ({"latent_dim": 3, "not_video": False}, 4),
        ({"latent_dim": 3, "not_video": True}, 0),  # Qwen-Image's has frames in its latents, and takes pictures only
        ({"latent_dim": 2}, 0),
        ({}, 0),
    ],
)
def test_in_which_steps_a_vae_takes_frames(facts, step):
    assert frame_step(SimpleNamespace(temporal_compression_decode=lambda: 4, **facts)) == step
    assert frame_step(SimpleNamespace(temporal_compression_decode=lambda: None, **facts)) == 0
