"""Which files may be added to the loras folder."""

import pytest
import torch
from graft_nodes.patches.lora_files import upload_check
from safetensors.torch import save_file


@pytest.mark.parametrize("name", ["a.safetensors", "Paper cut (v2) 墨水.SAFETENSORS", "console.safetensors"])
def test_names_that_every_system_takes(name):
    upload_check.check_name(name)


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "a:b.safetensors", "con.safetensors", ".a.safetensors", "a\n.safetensors"]
)
def test_names_that_some_system_refuses(name):
    with pytest.raises(ValueError, match="cannot be the name of a file on every system"):
        upload_check.check_name(name)


def test_a_long_name_and_another_kind_of_file():
    with pytest.raises(ValueError, match="too long"):
        upload_check.check_name("ü" * 130 + ".safetensors")
    with pytest.raises(ValueError, match=r"'a\.ckpt' is not a safetensors file"):
        upload_check.check_name("a.ckpt")


@pytest.mark.parametrize(
    ("keys", "is_lora"),
    [
        (("lora_unet_a.lora_up.weight", "lora_unet_a.lora_down.weight"), True),
        (("base_model.model.a.lora_A.weight", "base_model.model.a.lora_B.weight"), True),
        (("lora_unet_a.hada_w1_a", "lora_unet_a.hada_w1_b", "lora_unet_a.hada_w2_a", "lora_unet_a.hada_w2_b"), True),
        (("model.diffusion_model.a.weight", "model.diffusion_model.a.bias"), False),
        (("emb_params",), False),
        (("bundle_emb.hat.clip_l",), True),
        ((), False),
    ],
)
def test_a_lora_is_known_by_its_names(tmp_path, keys, is_lora):
    path = str(tmp_path / "draft")
    save_file({key: torch.zeros(2, 2) for key in keys}, path)
    if is_lora:
        upload_check.check_lora(path, "a.safetensors")
        return
    with pytest.raises(ValueError, match=r"^a.safetensors is not a LoRA: none of its"):
        upload_check.check_lora(path, "a.safetensors")


def test_a_damaged_file_is_named_without_its_folder(tmp_path):
    path = str(tmp_path / "draft")
    (tmp_path / "draft").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"^a.safetensors is not a whole safetensors file") as wrong:
        upload_check.check_lora(path, "a.safetensors")
    assert str(tmp_path) not in str(wrong.value)
