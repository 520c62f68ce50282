"""The key format registry: every format leads its examples to their weights, and one record adds a format."""

import re
from dataclasses import fields

import pytest
import torch
from graft_nodes.patches.lora_files import layer_matching, parse, save
from graft_nodes.patches.lora_files.key_formats import registry
from graft_nodes.patches.lora_files.key_formats.key_format import KeyFormat, KeySpelling

RECOGNIZED_BY = ("prefixes", "text_encoder", "text_encoder_prefixes", "spellings", "embeddings")


def read(key, weight):
    """The targets of a LoRA of one layer, for a model of that weight alone."""
    other = _OTHER_FACTOR[next(end for end in _OTHER_FACTOR if end in key)]
    state = {key: torch.ones(8, 2), key.replace(*other): torch.ones(2, 8)}
    if other[0] in (".lora_A", ".down"):
        state = {key: torch.ones(2, 8), key.replace(*other): torch.ones(8, 2)}
    shapes = {("model", weight): (8, 8)}
    state = registry.generic_keys(state)
    targets = layer_matching.find_targets(parse.layer_names(state), {}, shapes)
    return [(target.model, target.weight) for target in parse.read(state, targets, shapes, "x").layers]


_OTHER_FACTOR = {
    ".lora_A": (".lora_A", ".lora_B"),
    ".lora_up": (".lora_up", ".lora_down"),
    ".up": (".up", ".down"),
}


@pytest.mark.parametrize("key_format", list(registry.FORMATS), ids=lambda key_format: key_format.name)
def test_every_field_says_something(key_format):
    assert re.fullmatch(r"[a-z-]+", key_format.name) and key_format.title and key_format.examples
    assert key_format.name == "ai-toolkit" or any(getattr(key_format, name) for name in RECOGNIZED_BY)
    assert {field.name for field in fields(key_format)} >= {*RECOGNIZED_BY, "writer", "holds_every_kind"}
    for key, weight in key_format.examples.items():
        assert read(key, weight) == [("model", weight)]


def test_save_lora_lists_the_formats_that_can_be_written():
    assert list(registry.writable_formats()) == ["kohya", "peft", "comfyui", "t-lora"]


def test_embeddings_in_a_file():
    keys = ("bundle_emb.cat.t5", "bundle_emb..x", "emb_params", "clip_l", "clip_l.x", "bundle_emb")
    assert [registry.embedding_name(key) for key in keys] == ["cat", "", "emb_params", "clip_l", None, None]
    assert registry.embedding_names(["clip_g", "bundle_emb.cat.a", "bundle_emb.cat.b", "a.alpha"]) == ["cat", "clip_g"]


class ShoutingWriter:
    """Writes generic names in capitals."""

    def problems(self, groups, instead):
        return [f"{base}: too quiet; save with {instead} names" for base in groups if base == "quiet"]

    def write(self, groups, dtype, family):
        return {f"{base.upper()}.UP": group["up"][1].to(dtype) for base, group in groups.items()}


def test_a_format_of_ones_own_is_one_record():
    """A made-up trainer's file is loaded, its own prefix and its own whole keys alike, and saved."""
    weight = "diffusion_model.blocks.0.attn.weight"
    keys = re.compile(r"acme/(.+)/(up|down)")
    acme = KeyFormat(
        name="acme",
        title="a trainer that nobody has",
        examples={"acme_net_blocks_0_attn.lora_up.weight": weight},
        prefixes=("acme_net_",),
        spellings=(KeySpelling(keys, lambda match: f"{match[1].replace('/', '.')}.lora_{match[2]}.weight"),),
        writer=ShoutingWriter(),
    )
    own = {"acme/blocks/0/attn/up": torch.ones(8, 2), "acme/blocks/0/attn/down": torch.ones(2, 8)}
    with pytest.raises(ValueError):
        read("acme_net_blocks_0_attn.lora_up.weight", weight)
    with registry.FORMATS.registered(acme):
        assert read("acme_net_blocks_0_attn.lora_up.weight", weight) == [("model", weight)]
        assert sorted(registry.generic_keys(own)) == ["blocks.0.attn.lora_down.weight", "blocks.0.attn.lora_up.weight"]
        assert list(save.to_key_format(registry.generic_keys(own), "acme", torch.float32)) == ["BLOCKS.0.ATTN.UP"]
        with pytest.raises(ValueError, match="already registered"):
            registry.FORMATS.register(acme)
    assert "acme" not in registry.writable_formats() and registry.generic_keys(own) is own
