"""Saved names, spelled out, and the deltas that they stand for."""

import pytest
import torch
from graft_nodes.patches.formats import Target, read
from graft_nodes.patches.naming import renamed, saved_metadata

BASE = "diffusion_model.input_blocks.1.1.proj_in"
LORA = {f"{BASE}.lora_up.weight": torch.randn(6, 4), f"{BASE}.lora_down.weight": torch.randn(4, 8), f"{BASE}.alpha": torch.tensor(2.0)}
FULL = {f"{BASE}.diff": torch.randn(6, 8), f"{BASE}.diff_b": torch.randn(6)}
EXPECTED = {
    "kohya": {f"lora_unet_input_blocks_1_1_proj_in.{end}" for end in ("lora_up.weight", "lora_down.weight", "alpha")},
    "peft": {f"{BASE}.lora_A.weight", f"{BASE}.lora_B.weight"},
    "comfyui": set(LORA),
}


@pytest.mark.parametrize("names", EXPECTED)
def test_names_and_the_same_change(names):
    saved = renamed(LORA, names, torch.float32)
    assert set(saved) == EXPECTED[names]
    target = Target("model", f"{BASE}.weight")
    keys = {BASE: target, "lora_unet_input_blocks_1_1_proj_in": target}
    ((layer,),) = read(saved, keys, {("model", f"{BASE}.weight"): (6, 8)}, "x").layers.values()
    exact = 2.0 / 4 * LORA[f"{BASE}.lora_up.weight"] @ LORA[f"{BASE}.lora_down.weight"]
    assert torch.allclose(layer.delta((6, 8)), exact, atol=1e-6)


def test_types():
    saved = renamed(LORA, "kohya", torch.bfloat16)
    assert {key.rpartition("proj_in.")[2]: tensor.dtype for key, tensor in saved.items()} == {
        "lora_up.weight": torch.bfloat16, "lora_down.weight": torch.bfloat16, "alpha": torch.float32,
    }  # fmt: skip


def test_differences_have_kohya_names_and_no_peft_names():
    assert set(renamed(FULL, "kohya", torch.float32)) == {f"lora_unet_input_blocks_1_1_proj_in.{end}" for end in ("diff", "diff_b")}
    with pytest.raises(ValueError, match="PEFT has no name for diff, diff_b; save with kohya or comfyui names"):
        renamed(FULL, "peft", torch.float32)


def test_text_encoders_keep_the_generic_form():
    state = {"text_encoders.a.lora_up.weight": torch.ones(2, 1), "text_encoders.a.lora_down.weight": torch.ones(1, 2)}
    assert set(renamed(state, "kohya", torch.float32)) == set(state)


@pytest.mark.parametrize(("lora", "message"), [({}, "it is empty"), ({"x": torch.ones(1)}, "x: not a LoRA tensor")])
def test_what_cannot_be_saved(lora, message):
    with pytest.raises(ValueError, match=message):
        renamed(lora, "kohya", torch.float32)


def test_metadata():
    assert saved_metadata(LORA, "graft", {"ss_steps": "9"}) == {
        "format": "pt", "modelspec.sai_model_spec": "1.0.0", "modelspec.title": "graft", "ss_network_module": "networks.lora",
        "ss_network_dim": "4", "ss_network_alpha": "2", "ss_steps": "9",
    }  # fmt: skip
