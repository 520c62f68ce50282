"""A model family that is registered by one file of its own takes part in everything: recognition, options, LoRA files,
block weights, training targets, saving and token downsampling.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ..file_as_module import file_as_module
from .made_up_model import PATCH, RowanTransformer, build_model

FILE = Path(__file__).resolve().parents[1] / "patches" / "models" / "made_up_family.py"
D = "diffusion_model."


@pytest.fixture
def rowan(host):
    """The family, in the pack as the host has loaded it, as if its file lay beside the others."""
    registry = host.module("patches.models.registry")
    with file_as_module(FILE, registry.__package__) as module, registry.FAMILIES.registered(module.FAMILY):
        yield module.FAMILY


@pytest.fixture
def model(small):
    return build_model()


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def lora(model, rank=2):
    """A LoRA in ComfyUI's generic names on every layer of the branches and the last modulation."""
    state = {}
    for number, (name, weight) in enumerate(model.model.named_parameters()):
        if weight.ndim == 2 and ("branches" in name or "last_modulation" in name):
            base = name.removesuffix(".weight")
            state[f"{base}.lora_up.weight"] = random(weight.shape[0], rank, seed=number)
            state[f"{base}.lora_down.weight"] = random(rank, weight.shape[1], seed=number + 100)
            state[f"{base}.alpha"] = torch.tensor(float(rank))
    return state


def write(host, name, state):
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, os.path.join(host.models, "loras", name))


def with_changes(state, strength=lambda base: 1.0):
    """A model whose weights have a LoRA's change added by hand."""
    patcher = build_model()
    weights = dict(patcher.model.named_parameters())
    for key, up in state.items():
        base = key.removesuffix(".lora_up.weight")
        if base != key:
            weights[f"{base}.weight"].data += strength(base) * (up @ state[f"{base}.lora_down.weight"])
    return patcher


def apply(host, model, name, blocks="", mode="merge"):
    rows = json.dumps({"version": 1, "rows": [{"file": name, "model": 1.0, "blocks": blocks}]})
    stack, _ = host.call("GraftLoRAStack", rows=rows)
    return host.call("LoRAStackPatch", model=model, lora_stack=stack, mode=mode)[0]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_lora_file_is_recognized(host, model, rowan):
    write(host, "rowan.safetensors", lora(model))
    path = os.path.join(host.models, "loras", "rowan.safetensors")
    described = host.module("patches.lora_files.metadata").describe(path)
    assert (described["family"], described["base"]) == ("rowan", "Rowan")


def test_texts_name_it(host, small, model, rowan):
    weights = host.module("patches.lora_files.block_weights")
    with pytest.raises(ValueError, match=r"3 \(Rowan\).*ROWANTOP"):
        weights.parse("1,2")
    with pytest.raises(ValueError, match="T5, R, IN"):
        host.module("patches.lora_files.block_weights").parse("X=1")
    other = type("OakTransformer", (RowanTransformer,), {})
    model.model.diffusion_model.__class__ = other
    with pytest.raises(TypeError, match="RowanTransformer"):
        host.call("ApplyToDo", model=model)


@pytest.mark.parametrize("names", ["kohya", "peft", "comfyui"])
@pytest.mark.parametrize("mode", ["merge", "bypass"])
def test_a_saved_lora_is_loaded_again(host, small, model, rowan, names, mode):
    state = lora(model)
    written, *_ = host.call("GraftSaveLoRA", lora_model=state, names=names, dtype="float32")
    tensors = load_file(written)
    spelled = {
        "kohya": "lora_unet_branches_0_mixer_qkv.lora_up.weight",
        "peft": "transformer.rowan_stages.0.attn.to_k.lora_B.weight",
        "comfyui": f"{D}branches.0.mixer.qkv.lora_up.weight",
    }
    assert spelled[names] in tensors
    if names == "peft":
        up = state[f"{D}last_modulation.lora_up.weight"]
        assert torch.equal(tensors["transformer.norm_out.linear.lora_B.weight"], up.roll(len(up) // 2, 0))
    said = host.module("patches.lora_files.save").build_metadata(state, "x", {})
    assert said["modelspec.architecture"] == "rowan-v1/lora" and said["ss_base_model_version"] == "rowan1"
    write(host, "again.safetensors", tensors)
    plain = small.forward(model)
    changed = small.forward(apply(host, model, "again.safetensors", mode=mode))
    close(changed, small.forward(with_changes(state)))
    assert (changed - plain).abs().max() > 1e-2
    close(small.forward(model), plain)


@pytest.mark.parametrize(
    ("blocks", "strengths"),
    [
        ("R=0.5, BASE=0", {"branches.0": 0.5, "branches.1": 0.5, "last": 0.0}),
        ("2, 0, 0.25", {"branches.0": 0.0, "branches.1": 0.25, "last": 2.0}),
        ("rowantop", {"branches.0": 0.0, "branches.1": 1.0, "last": 1.0}),
    ],
)
def test_block_weights(host, small, model, rowan, blocks, strengths):
    state = lora(model)
    write(host, "blocks.safetensors", state)
    expected = with_changes(state, lambda base: next(of for part, of in strengths.items() if f".{part}" in base))
    close(small.forward(apply(host, model, "blocks.safetensors", blocks)), small.forward(expected))


def test_training_targets(host, model, rowan):
    targets = host.module("training.trainable.targets").adapter_targets
    settings = host.module("training.trainable.settings").AdapterSettings
    chosen = {preset: set(targets(model.model.diffusion_model, settings(targets=preset))) for preset in TARGETS}
    assert chosen == TARGETS


ATTENTION = {f"branches.{number}.mixer.{layer}" for number in range(2) for layer in ("qkv", "out")}
TARGETS = {
    "attention": ATTENTION,
    "attention+ff": ATTENTION | {f"branches.{number}.swish.{layer}" for number in range(2) for layer in (0, 2)},
}


def test_token_downsampling(host, small, model, rowan):
    patched, report = host.call("ApplyToDo", model=model, factor=2.0)
    assert "RowanTransformer" in report and "2 blocks patched" in report
    size = (8, 12)
    height, width = size[0] // PATCH, size[1] // PATCH
    kept = [row * width + column for row in range(1, height, 2) for column in range(1, width, 2)]

    def thinned(kernel, q, k, v, *args, **kwargs):
        rows = torch.tensor([*kept, *range(height * width, k.shape[1])])
        return kernel(q, k[:, rows], v[:, rows], *args, **kwargs)

    by_hand = build_model()
    by_hand.model_options["transformer_options"]["optimized_attention_override"] = thinned
    close(small.forward(patched, size), small.forward(by_hand, size))
    assert (small.forward(patched, size) - small.forward(model, size)).abs().max() > 1e-3


def test_nothing_is_left_of_it(host, model):
    registry = host.module("patches.models.registry")
    assert "rowan" not in registry.FAMILIES
    with pytest.raises(TypeError, match="RowanTransformer"):
        host.call("ApplyToDo", model=model)
