"""GraftDemo and what the bundled base model can do: its file, its outputs, its score by the pixel rule."""

import hashlib
import os
import shutil

import numpy as np
import pytest
import torch
from graft_nodes.demo import draw, rule, score, tokenizer
from graft_nodes.nodes import demo as node
from safetensors import safe_open
from safetensors.torch import load_file

PREFIXES = ("model.diffusion_model.", "text.")


@pytest.fixture(scope="module")
def loaded(host):
    return host.call("GraftDemo")


def test_the_file_is_small_and_holds_the_unet_and_the_text_encoder():
    assert node.BASE.stat().st_size <= 8_000_000
    with safe_open(node.BASE, "pt") as file:
        assert all(key.startswith(PREFIXES) for key in file.keys())  # noqa: SIM118 - safe_open is not a mapping
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.float32}  # noqa: SIM118


def test_it_gives_model_clip_and_vae_with_the_file_s_weights(loaded):
    model, clip, vae = loaded
    weights = load_file(node.BASE)
    modules = (model.model.diffusion_model, clip.cond_stage_model)
    for prefix, module in zip(PREFIXES, modules, strict=True):
        assert all(torch.equal(weights[prefix + key], tensor.cpu()) for key, tensor in module.state_dict().items())
    assert vae.latent_channels == 3
    assert model.model.model_type.name == "FLOW"


def test_two_loads_share_nothing(host, loaded):
    model, clip, _ = host.call("GraftDemo")
    assert model.model is not loaded[0].model and clip.cond_stage_model is not loaded[1].cond_stage_model


def test_a_changed_file_changes_the_fingerprint(tmp_path, monkeypatch):
    assert node.GraftDemo.fingerprint_inputs() == hashlib.sha256(node.BASE.read_bytes()).hexdigest()
    copied = tmp_path / "base.safetensors"
    shutil.copy(node.BASE, copied)
    monkeypatch.setattr(node, "BASE", copied)
    before = node.GraftDemo.fingerprint_inputs()
    with open(copied, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert node.GraftDemo.fingerprint_inputs() != before


def test_a_missing_file_says_where_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(node, "BASE", tmp_path / "none.safetensors")
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors is missing.*train_base"):
        node.GraftDemo.execute()


@pytest.mark.long
def test_the_base_draws_what_it_was_taught_and_no_concept(loaded):
    """At least 43 of its 48 captions right by the pixel rule; at most a tenth of 16 samples of the concept's."""
    assert score.base_score(*loaded) >= 43
    assert score.concept_score(*loaded) <= 1


def test_sampling_through_the_graph(host):
    """The whole of a text-to-image graph on the open host, the VAE's tiled nodes and a picture's way there and back
    among it.
    """
    prompt = {
        "1": {"class_type": "GraftDemo", "inputs": {}},
        "2": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": "a red circle left"}},
        "3": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": ""}},
        "4": {"class_type": "EmptyLatentImage", "inputs": {"width": 256, "height": 256, "batch_size": 2}},
        "5": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["1", 0],
                "positive": ["2", 0],
                "negative": ["3", 0],
                "latent_image": ["4", 0],
                "seed": 1,
                "steps": 20,
                "cfg": 2.0,
                "sampler_name": "euler",
                "scheduler": "simple",
                "denoise": 1.0,
            },
        },
        "6": {"class_type": "VAEDecode", "inputs": {"samples": ["5", 0], "vae": ["1", 2]}},
        "7": {"class_type": "VAEEncode", "inputs": {"pixels": ["6", 0], "vae": ["1", 2]}},
    }
    result = host.run(prompt, capture={"pictures": ["6", 0], "again": ["7", 0]})
    assert result["success"], result["errors"]
    pictures = result["captured"]["pictures"]
    assert pictures.shape == (2, 256, 256, 3)
    assert score.rule.score(pictures.numpy(), ["a red circle left"] * 2) == 2
    assert result["captured"]["again"]["samples"].shape == (2, 3, 32, 32)


def test_the_concept_pictures_are_what_the_rule_asks_for():
    assert all(
        score.rule.satisfies(picture.astype(np.float64) / 255, caption) for _, caption, picture in draw.concept()
    )


def test_the_second_lora_paints_the_four_shapes_mauve(host, loaded):
    model, clip, vae = loaded
    file = node.BASE.parent / "mauve.safetensors"
    assert file.stat().st_size < 100_000
    captions = [f"a mauve {shape} middle" for shape in tokenizer.SHAPES]
    patched = host.call("LoRAStackPatch", model=model, lora_model=load_file(file))[0]

    def purple(sampled):
        return sum(rule.detect(picture).color == "purple" for picture in score.sample(sampled, clip, vae, captions))

    assert purple(model) <= 1 and purple(patched) >= 3
