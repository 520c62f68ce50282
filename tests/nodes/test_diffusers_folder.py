"""Save UNet for diffusers against diffusers' own classes: it loads the folder, and predicts the same."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from .conftest import load

SD15 = {"mult": (1, 2, 2, 2), "depth": (1, 1, 1, 0), "blocks": 2, "context": 768}


def predicted(unet, module):
    """What diffusers' UNet and the module predict for the same noise."""
    draw = torch.Generator().manual_seed(0)
    x, context = torch.randn(2, 4, 16, 16, generator=draw), torch.randn(2, 5, 768, generator=draw)
    step = torch.tensor([10, 700])
    with torch.inference_mode():
        return unet(x, step, context).sample, module(x, step, context=context)


@pytest.mark.parametrize("most", [0.0, 0.002])
def test_diffusers_loads_the_folder_and_predicts_the_same(host, small, most):
    diffusers, training_utils = pytest.importorskip("diffusers"), pytest.importorskip("diffusers.training_utils")
    model = small.unet(**SD15)
    before = small.Snapshot(model.model)
    patched = host.call(
        "LoRAStackPatch",
        model=model,
        lora_stack=[(saved_lora(host, small, model), 0.7, 0.7)],
    )[0]
    path = host.call("GraftSaveDiffusers", model=patched, max_shard_gb=most, prefix="diffusers/loaded")[0]
    unet, info = diffusers.UNet2DConditionModel.from_pretrained(path, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    files = sorted(file.name for file in Path(path).iterdir())
    assert ("diffusion_pytorch_model.safetensors.index.json" in files) == bool(most) and "config.json" in files
    load(patched)
    theirs, ours = predicted(unet, patched.model.diffusion_model)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    plain = predicted(unet, load_plain(model))[1]
    assert not torch.allclose(plain, ours, rtol=1e-2, atol=1e-2)
    read = training_utils.EMAModel.from_pretrained(path, diffusers.UNet2DConditionModel, foreach=True)
    assert all(torch.equal(a, b) for a, b in zip(read.shadow_params, unet.parameters(), strict=True))
    before.check(model.model, objects=False)


def saved_lora(host, small, model):
    given = {"lora_model": small.lora(model), "names": "comfyui", "dtype": "float32", "prefix": "loras/for folder"}
    path = host.call("GraftSaveLoRA", **given)[0]
    os.replace(path, os.path.join(host.models, "loras", "for folder.safetensors"))
    return "for folder.safetensors"


def load_plain(model):
    load(model)
    return model.model.diffusion_model


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_are_of_the_chosen_type(host, small, dtype, kind):
    path = host.call("GraftSaveDiffusers", model=small.unet(**SD15), dtype=dtype, prefix="diffusers/typed")[0]
    weights = load_file(os.path.join(path, "diffusion_pytorch_model.safetensors"))
    assert {weight.dtype for weight in weights.values()} == {kind}


def test_the_average_of_full_weights_is_read_by_diffusers(host, small):
    """A LoRA of full weights through EMA Merge: every weight and bias of the folder has moved."""
    diffusers = pytest.importorskip("diffusers")
    model = small.unet(**SD15)
    bases = {name: weight.clone() for name, weight in model.model.diffusion_model.state_dict().items()}
    moved = {name: torch.full_like(weight, 0.01) for name, weight in bases.items()}
    lora = {
        f"diffusion_model.{name.removesuffix('.weight')}.diff": change
        for name, change in moved.items()
        if name.endswith(".weight")
    }
    lora |= {
        f"diffusion_model.{name.removesuffix('.bias')}.diff_b": change
        for name, change in moved.items()
        if name.endswith(".bias")
    }
    save_file(lora, os.path.join(host.models, "loras", "full.safetensors"))
    merged = host.call("EMAMerge", model=model, lora_stack=[("full.safetensors", 1.0, 1.0)], profile="uniform")[0]
    path = host.call("GraftSaveDiffusers", model=merged, prefix="diffusers/average")[0]
    unet = diffusers.UNet2DConditionModel.from_pretrained(path)
    expected = sorted(float(weight.double().sum() + 0.01 * weight.numel()) for weight in bases.values())
    found = sorted(float(weight.double().sum()) for weight in unet.state_dict().values())
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-3)


def test_other_models_and_prefixes_are_refused(host, small):
    with pytest.raises(ValueError, match=r"has SD 1\.x, SD 2\.x and SDXL, and this is another model"):
        host.call("GraftSaveDiffusers", model=small.unet())
    with pytest.raises(ValueError, match="filename prefix"):
        host.call("GraftSaveDiffusers", model=small.unet(**SD15), prefix="../out")
