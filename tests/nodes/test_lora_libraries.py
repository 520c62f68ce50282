"""Files that lycoris and PEFT make, put on a model by the nodes in every mode, beside the host's own loader and the library's layers."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

lycoris, peft = pytest.importorskip("lycoris.modules"), pytest.importorskip("peft")

LINEAR, CONV = "input_blocks.1.1.transformer_blocks.0.attn1.to_out.0", "input_blocks.1.0.in_layers.2"
ALGORITHMS = {
    "lora": ("LoConModule", {}), "tucker": ("LoConModule", {"use_tucker": True}),
    "dora of columns": ("LoConModule", {"weight_decompose": True, "wd_on_out": False}), "loha": ("LohaModule", {}),
    "lokr": ("LokrModule", {}), "oft": ("DiagOFTModule", {}), "boft": ("ButterflyOFTModule", {}), "glora": ("GLoRAModule", {}),
    "ia3": ("IA3Module", {}), "dora of rows": ("LoConModule", {"weight_decompose": True}),
}  # fmt: skip
# What ComfyUI applies otherwise (the norm of DoRA's rows is that of W there) or not at all (IA3): the library alone is the truth.
NOT_THE_HOSTS = ("ia3", "dora of rows")


def by_lycoris(kind, patcher):
    """(file, {weight: what the library makes of it}) of a linear layer and a convolution, every trained number drawn anew."""
    name, options = ALGORITHMS[kind]
    state, made, generator = {}, {}, torch.Generator().manual_seed(1)
    for path in (LINEAR, CONV):
        original = patcher.model.diffusion_model.get_submodule(path)
        kind_of = nn.Linear if original.weight.ndim == 2 else nn.Conv2d
        layer = kind_of(*original.weight.shape[1::-1], *(() if original.weight.ndim == 2 else (3, 1, 1))).requires_grad_(False)
        layer.load_state_dict(original.state_dict())
        network = getattr(lycoris, name)("a", layer, 1.0, 4, 2.0, **options).eval()
        for parameter in network.parameters():
            around = 1.0 if parameter.min() == parameter.max() == 1.0 else 0.0
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2 + around
        with torch.no_grad():
            own = network.custom_state_dict() if "custom_state_dict" in type(network).__dict__ else network.state_dict()
            state |= {f"diffusion_model.{path}.{key}": value.clone().contiguous() for key, value in own.items() if key != "scalar"}
            made[f"diffusion_model.{path}.weight"] = weight_of(network, layer)
    return state, made


def weight_of(network, layer):
    """The weight that lycoris' forward computes with, by what it makes of unit vectors (its merge scales LoHa and LoKr twice)."""
    network.apply_to()
    if layer.weight.ndim == 2:
        units = torch.eye(layer.weight.shape[1])
        return (layer(units) - layer(torch.zeros_like(units))).T
    units = torch.eye(layer.weight[0].numel()).view(-1, *layer.weight.shape[1:])
    return (layer(units) - layer(torch.zeros_like(units)))[:, :, 1, 1].T.reshape(layer.weight.shape)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_a_file_of_lycoris(host, small, kind):
    import comfy.sd
    import comfy.weight_adapter

    model = small.unet()
    before = small.Snapshot(model.model)
    state, made = by_lycoris(kind, model)
    save_file(state, os.path.join(host.models, "loras", "lycoris.safetensors"))
    exact = small.unet()
    for name, weight in made.items():
        exact.model.get_parameter(name).data.copy_(weight)
    wanted, plain = small.forward(exact), small.forward(model)
    assert (wanted - plain).abs().max() > 1e-2
    for mode in ("merge", "bypass", "host"):
        found = small.forward(host.call("LoRAStackPatch", model=model, lora_stack=[("lycoris.safetensors", 1.0, 1.0)], mode=mode)[0])
        assert (found - wanted).abs().max() < 1e-3, mode
    if kind not in NOT_THE_HOSTS and (len(comfy.weight_adapter.adapters) > 1 or kind in ("lora", "tucker", "dora of columns")):
        theirs, _ = comfy.sd.load_lora_for_models(small.unet(), None, state, 1.0, 0)
        assert (small.forward(theirs) - wanted).abs().max() < 1e-3
    small.load(model)
    before.check(model.model, objects=False)


FOLDERS = [
    ("LoraConfig", {"r": 4, "lora_alpha": 6}), ("LoraConfig", {"r": 4, "lora_alpha": 4, "use_dora": True}),
    ("LoHaConfig", {"r": 4, "alpha": 8}), ("OFTConfig", {"r": 0, "oft_block_size": 4}), ("IA3Config", {"feedforward_modules": []}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "options"), FOLDERS)
def test_a_folder_of_peft(host, small, tmp_path, config, options):
    """As PEFT saves it, adapter_model.safetensors beside adapter_config.json."""
    model = small.unet()
    original = model.model.diffusion_model.get_submodule(LINEAR)
    layer = nn.Linear(original.in_features, original.out_features).requires_grad_(False)
    layer.load_state_dict(original.state_dict())
    tree = peft.get_peft_model(nn.ModuleDict({"a": layer}), getattr(peft, config)(target_modules=["a"], **options))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in tree.named_parameters():
        if parameter.requires_grad:
            drawn = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.data = drawn.abs() + 0.5 if any(word in name for word in ("magnitude", "ia3")) else drawn
    tree.save_pretrained(tmp_path)
    folder = os.path.join(host.models, "loras", "peft")
    os.makedirs(folder, exist_ok=True)
    state = {key.replace("model.a.", f"model.{LINEAR}."): value for key, value in load_file(tmp_path / "adapter_model.safetensors").items()}
    save_file(state, os.path.join(folder, "adapter_model.safetensors"))
    os.replace(tmp_path / "adapter_config.json", os.path.join(folder, "adapter_config.json"))
    merged = tree.base_model.model["a"]
    merged.merge()
    exact = small.unet()
    target = exact.model.diffusion_model.get_submodule(LINEAR)
    target.load_state_dict(merged.get_base_layer().state_dict())
    wanted = small.forward(exact)
    assert (wanted - small.forward(model)).abs().max() > 1e-2
    for mode in ("merge", "bypass", "host"):
        stack = [("peft/adapter_model.safetensors", 1.0, 1.0)]
        found = small.forward(host.call("LoRAStackPatch", model=model, lora_stack=stack, mode=mode)[0])
        assert (found - wanted).abs().max() < 1e-3, mode
