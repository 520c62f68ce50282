"""Whether PEFT or OneTrainer trained an OFT, from a file's metadata and names."""

import json

import pytest
from graft_nodes.patches.lora_files.trainer import oft_trainer

PEFT_SETTINGS = {"adapter_config": json.dumps({"peft_type": "OFT"})}

FILES = [
    ("lora_unet_a.oft_R.weight", {}, "OneTrainer"),
    ("lora_transformer_a.oft_R.weight", {"format": "pt"}, "OneTrainer"),
    ("transformer.a.oft_R.scaled_oft", {}, "OneTrainer"),
    ("diffusion_model.a.oft_R.weight", {"ot_revision": "c0638361"}, "OneTrainer"),
    ("diffusion_model.a.oft_R.weight", {"ot_revision": "c0638361"} | PEFT_SETTINGS, "OneTrainer"),
    ("base_model.model.a.oft_R.weight", {}, "PEFT"),
    ("unet.a.oft_R.default.weight", {}, "PEFT"),
    ("unet.a.oft_R.weight", PEFT_SETTINGS, "PEFT"),
    ("unet.a.oft_R.weight", {"lora_adapter_metadata": json.dumps({"unet.r": 4})}, "PEFT"),
    ("unet.a.oft_R.weight", {"format": "pt"}, ""),
    ("lora_unet_a.lora_up.weight", {}, ""),
]


@pytest.mark.parametrize(("key", "metadata", "trainer"), FILES)
def test_the_trainer(key, metadata, trainer):
    assert oft_trainer([key, "other.alpha"], metadata) == trainer


def test_names_that_contradict_each_other_tell_nothing():
    assert oft_trainer(["lora_unet_a.oft_R.weight", "base_model.model.b.oft_R.weight"], {}) == ""
