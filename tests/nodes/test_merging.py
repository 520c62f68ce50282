"""Merged and extracted LoRAs on the open host, against the stack or the model they were made of."""

import os

import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture
def stack(host, small):
    for number in range(2):
        save_file(small.lora(small.unet(), number), os.path.join(host.models, "loras", f"part{number}.safetensors"))
    return [("part0.safetensors", 0.7, 1.0), ("part1.safetensors", -0.4, 1.0)]


@pytest.mark.parametrize("rank", [0, 8])
def test_merged_is_the_stack(host, small, stack, rank):
    made, report = host.call("GraftMergeLoRAs", lora_stack=stack, rank=rank)
    ours = small.forward(host.call("LoRAStackPatch", model=small.unet(), lora_model=made)[0])
    direct = small.forward(host.call("LoRAStackPatch", model=small.unet(), lora_stack=stack)[0])
    assert (ours - direct).abs().max() < 1e-4 and "largest rank 8" in report


def test_block_weights_are_merged_too(host, small, stack):
    row = host.call("GraftLoRAStack", rows='{"version": 1, "rows": [{"file": "part0.safetensors", "blocks": "IN=0, M=0.5, OUT01=2"}]}')[0]
    made, _ = host.call("GraftMergeLoRAs", lora_stack=[*row, stack[1]])
    ours = small.forward(host.call("LoRAStackPatch", model=small.unet(), lora_model=made)[0])
    direct = small.forward(host.call("LoRAStackPatch", model=small.unet(), lora_stack=[*row, stack[1]])[0])
    assert (ours - direct).abs().max() < 1e-4
    row[0].schedule = "0-0.5"
    with pytest.raises(ValueError, match=r"part0\.safetensors: a schedule over sampling cannot be merged"):
        host.call("GraftMergeLoRAs", lora_stack=row)


def test_a_lower_rank_says_what_is_lost(host, small, stack):
    assert "of the change (its norm) left out" in host.call("GraftMergeLoRAs", lora_stack=stack, rank=2)[1]


@pytest.mark.parametrize("mode", ["merge", "bypass", "host"])
def test_extracted_is_what_was_put_on(host, small, stack, mode):
    model = small.unet()
    before = small.Snapshot(model.model)
    patched = host.call("LoRAStackPatch", model=model, lora_stack=stack, mode=mode)[0]
    made, report = host.call("GraftExtractLoRA", model=patched, base=model, rank=8)
    before.check(model.model)
    ours = small.forward(host.call("LoRAStackPatch", model=small.unet(), lora_model=made)[0])
    assert (ours - small.forward(patched)).abs().max() < 1e-3 and "largest rank 8" in report


def test_two_models(host, small):
    model, base = small.unet(seed=1), small.unet()
    made, _ = host.call("GraftExtractLoRA", model=model, base=base, rank=256)
    ours = small.forward(host.call("LoRAStackPatch", model=base, lora_model=made)[0])
    assert torch.allclose(ours, small.forward(model), atol=2e-2)
    with pytest.raises(ValueError, match="no difference that a LoRA can hold"):
        host.call("GraftExtractLoRA", model=small.unet(mult=(1,), depth=(1,)), base=base)
    with pytest.raises(ValueError, match="zero everywhere"):
        host.call("GraftExtractLoRA", model=base, base=base)
