"""Files that lycoris, PEFT and diffusers make, put on a model by the nodes in every mode, beside the weights that the
library makes.
"""

import json
import os

import pytest
import torch
from graft_nodes.ema.decay import EMASettings, decay_at
from safetensors.torch import load_file, save_file
from torch import nn

from .conftest import load

LINEAR, CONV = "input_blocks.1.1.transformer_blocks.0.attn1.to_out.0", "input_blocks.1.0.out_layers.3"
ALGORITHMS = {
    "lora": ("LoConModule", {}),
    "tucker": ("LoConModule", {"use_tucker": True}),
    "dora of columns": ("LoConModule", {"weight_decompose": True, "wd_on_out": False}),
    "loha": ("LohaModule", {}),
    "lokr": ("LokrModule", {}),
    "oft": ("DiagOFTModule", {}),
    "boft": ("ButterflyOFTModule", {}),
    "glora": ("GLoRAModule", {}),
    "ia3": ("IA3Module", {}),
    "dora of rows": ("LoConModule", {"weight_decompose": True}),
}
# What ComfyUI applies otherwise (the norm of DoRA's rows is that of W there) or not at all (IA3): the library alone is
# the truth.
NOT_THE_HOSTS = ("ia3", "dora of rows")


def by_lycoris(kind, patcher):
    """(file, {weight: what the library makes of it}) of a linear layer and a convolution, every trained number drawn
    anew.
    """
    lycoris = pytest.importorskip("lycoris.modules")
    name, options = ALGORITHMS[kind]
    state, made, generator = {}, {}, torch.Generator().manual_seed(1)
    for path in (LINEAR, CONV):
        original = patcher.model.diffusion_model.get_submodule(path)
        kind_of = nn.Linear if original.weight.ndim == 2 else nn.Conv2d
        layer = kind_of(
            *original.weight.shape[1::-1], *(() if original.weight.ndim == 2 else (3, 1, 1))
        ).requires_grad_(False)
        layer.load_state_dict(original.state_dict())
        network = getattr(lycoris, name)("a", layer, 1.0, 4, 2.0, **options).eval()
        for parameter in network.parameters():
            around = 1.0 if parameter.min() == parameter.max() == 1.0 else 0.0
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2 + around
        with torch.no_grad():
            own = network.custom_state_dict() if "custom_state_dict" in type(network).__dict__ else network.state_dict()
            state |= {
                f"diffusion_model.{path}.{key}": value.clone().contiguous()
                for key, value in own.items()
                if key != "scalar"
            }
            made[f"diffusion_model.{path}.weight"] = weight_of(network, layer)
    return state, made


def weight_of(network, layer):
    """The weight that lycoris' forward computes with, by what it makes of unit vectors (its merge scales LoHa and LoKr
    twice).
    """
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
        found = small.forward(
            host.call("LoRAStackPatch", model=model, lora_stack=[("lycoris.safetensors", 1.0, 1.0)], mode=mode)[0]
        )
        assert (found - wanted).abs().max() < 1e-3, mode
    if kind not in NOT_THE_HOSTS and (
        len(comfy.weight_adapter.adapters) > 1 or kind in ("lora", "tucker", "dora of columns")
    ):
        theirs, _ = comfy.sd.load_lora_for_models(small.unet(), None, state, 1.0, 0)
        assert (small.forward(theirs) - wanted).abs().max() < 1e-3
    small.load(model)
    before.check(model.model, objects=False)


FOLDERS = [
    ("LoraConfig", {"r": 4, "lora_alpha": 6}),
    ("LoraConfig", {"r": 4, "lora_alpha": 4, "use_dora": True}),
    ("LoHaConfig", {"r": 4, "alpha": 8}),
    ("LoKrConfig", {"r": 4, "alpha": 8}),
    ("LoKrConfig", {"r": 99, "alpha": 33}),
    ("LoKrConfig", {"r": 2, "alpha": 8, "decompose_both": True, "decompose_factor": 4}),
    ("LoKrConfig", {"r": 2, "alpha": 8, "use_effective_conv2d": True}),
    ("OFTConfig", {"r": 0, "oft_block_size": 4}),
    ("BOFTConfig", {"boft_block_size": 4}),
    ("BOFTConfig", {"boft_block_num": 4, "boft_block_size": 0}),
    ("IA3Config", {"feedforward_modules": []}),
    ("IA3Config", {"feedforward_modules": ["a"]}),
]


def draw(module, scale):
    """Every trained number of a module that PEFT made; magnitudes and scales stay away from zero."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            drawn = torch.randn(parameter.shape, generator=generator) * scale
            parameter.data = (
                drawn.abs() + 0.5 if any(word in name for word in ("magnitude", "ia3", "boft_s")) else drawn
            )


def check(host, small, model, exact, file):
    """The file on the model predicts what the exact model does, to the last bits of float32, in every mode."""
    wanted, plain = small.forward(exact), small.forward(model)
    assert (wanted - plain).abs().max() > 1e-2
    for mode in ("merge", "bypass", "host"):
        found = small.forward(host.call("LoRAStackPatch", model=model, lora_stack=[(file, 1.0, 1.0)], mode=mode)[0])
        assert (found - wanted).abs().max() < 2e-6 * wanted.abs().max(), mode


@pytest.mark.parametrize("path", [LINEAR, CONV], ids=["linear", "conv"])
@pytest.mark.parametrize(("config", "options"), FOLDERS)
def test_a_folder_of_peft(host, small, tmp_path, config, options, path):
    """As PEFT saves it, adapter_model.safetensors beside adapter_config.json, against what it merges in float64."""
    peft = pytest.importorskip("peft")
    model, exact = small.unet(), small.unet()
    original = model.model.diffusion_model.get_submodule(path)
    sizes = original.weight.shape[1::-1]
    layer = (nn.Linear(*sizes) if path == LINEAR else nn.Conv2d(*sizes, 3, padding=1)).requires_grad_(False)
    layer.load_state_dict(original.state_dict())
    tree = peft.get_peft_model(nn.ModuleDict({"a": layer}), getattr(peft, config)(target_modules=["a"], **options))
    draw(tree, 0.3)
    tree.save_pretrained(tmp_path)
    folder = os.path.join(host.models, "loras", "peft")
    os.makedirs(folder, exist_ok=True)
    state = {
        key.replace("model.a.", f"model.{path}."): value
        for key, value in load_file(tmp_path / "adapter_model.safetensors").items()
    }
    save_file(state, os.path.join(folder, "adapter_model.safetensors"))
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    said = {
        key: [path if one == "a" else one for one in value] if isinstance(value, list) else value
        for key, value in said.items()
    }
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as file:
        json.dump(said, file)
    merged = tree.double().base_model.model["a"]
    merged.merge()
    exact.model.diffusion_model.get_submodule(path).load_state_dict(merged.get_base_layer().state_dict())
    check(host, small, model, exact, "peft/adapter_model.safetensors")


def as_diffusers(patcher, is_sd15=False):
    """(diffusers' own UNet with the patcher's weights, {name of a weight there: its name in the patcher's diffusion
    model}); in SD 1.5's layout or in that of two small levels.
    """
    diffusers, single_file = (
        pytest.importorskip("diffusers"),
        pytest.importorskip("diffusers.loaders.single_file_utils"),
    )
    blocks = dict(
        down_block_types=["CrossAttnDownBlock2D"] * 2, up_block_types=["CrossAttnUpBlock2D"] * 2, layers_per_block=1
    )
    channels, context = (32, 64), 24
    if is_sd15:
        down, up = ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"], ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3
        blocks = dict(down_block_types=down, up_block_types=up, layers_per_block=2)
        channels, context = (32, 64, 64, 64), 768
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=channels,
        cross_attention_dim=context,
        attention_head_dim=4,
        norm_num_groups=32,
        **blocks,
    )
    own = patcher.model.diffusion_model.state_dict()
    numbered = {f"model.diffusion_model.{name}": torch.tensor(number) for number, name in enumerate(own)}
    config = {**blocks, "class_embed_type": None, "addition_embed_type": None}
    names = {
        theirs: list(own)[int(number)]
        for theirs, number in single_file.convert_ldm_unet_checkpoint(numbered, config).items()
    }
    unet.load_state_dict({theirs: own[name].clone() for theirs, name in names.items()})
    return unet.requires_grad_(False), names


def saved_by_pipeline(unet, folder):
    """As the training scripts of diffusers save: the names of its pipelines, PEFT's settings in the header."""
    import diffusers
    import peft

    state = diffusers.utils.convert_state_dict_to_diffusers(peft.get_peft_model_state_dict(unet))
    settings = unet.peft_config["default"].to_dict()
    diffusers.StableDiffusionPipeline.save_lora_weights(
        folder, unet_lora_layers=state, unet_lora_adapter_metadata=settings
    )


def saved_by_unet(unet, folder):
    """As the UNet saves an adapter by itself: PEFT's names without a prefix."""
    unet.save_lora_adapter(folder)


def saved_for_kohya(unet, folder):
    """By diffusers' conversion for other programs: kohya's names, alphas beside the factors."""
    import diffusers
    import peft

    state = peft.get_peft_model_state_dict(unet)
    save_file(
        diffusers.utils.convert_state_dict_to_kohya({f"unet.{key}": value for key, value in state.items()}),
        os.path.join(folder, "pytorch_lora_weights.safetensors"),
    )


LAYERS = [  # every layer of the UNet that is linear or a convolution
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "proj_in",
    "proj_out",
    "ff.net.0.proj",
    "ff.net.2",
    "conv1",
    "conv2",
    "conv_shortcut",
    "time_emb_proj",
    "linear_1",
    "linear_2",
    "conv",
    "conv_in",
    "conv_out",
]


@pytest.mark.parametrize(
    ("save", "options"),
    [
        (saved_by_pipeline, {"r": 4, "lora_alpha": 6}),
        (saved_by_pipeline, {"r": 4, "lora_alpha": 6, "use_dora": True}),
        (
            saved_by_pipeline,
            {"r": 4, "lora_alpha": 6, "rank_pattern": {"attn2.to_k": 2}, "alpha_pattern": {"attn1.to_q": 9}},
        ),
        (saved_by_unet, {"r": 4, "lora_alpha": 6, "use_rslora": True}),
        (saved_for_kohya, {"r": 4, "lora_alpha": 4}),
    ],
)
def test_a_file_of_diffusers(host, small, tmp_path, save, options):
    """Against the weights that its UNet fuses in float64."""
    peft = pytest.importorskip("peft")
    model, exact = small.unet(), small.unet()
    unet, names = as_diffusers(model)
    unet.add_adapter(peft.LoraConfig(target_modules=LAYERS, init_lora_weights=False, **options))
    draw(unet, 0.1)
    save(unet, tmp_path)
    os.replace(
        tmp_path / "pytorch_lora_weights.safetensors", os.path.join(host.models, "loras", "diffusers.safetensors")
    )
    unet.double().fuse_lora()
    unet.unload_lora()
    for theirs, weight in unet.state_dict().items():
        exact.model.diffusion_model.get_parameter(names[theirs]).data.copy_(weight)
    check(host, small, model, exact, "diffusers.safetensors")


def test_an_average_of_loras_is_read_by_diffusers_and_its_ema_model(host, small, tmp_path):
    """EMA Merge, Save LoRA with key format peft, fused by diffusers, saved in shards, and read by
    EMAModel.from_pretrained: every parameter is Graft's, and the decay has the same settings.
    """
    training_utils = pytest.importorskip("diffusers.training_utils")
    pytest.importorskip("peft")
    model, files = small.unet(mult=(1, 2, 2, 2), depth=(1, 1, 1, 0), blocks=2, context=768), []
    for number in range(2):
        given = {"lora_model": small.lora(model, number), "names": "comfyui", "dtype": "float32"}
        files.append(host.call("GraftSaveLoRA", prefix=f"loras/averaged{number}", **given)[0])
        os.replace(files[-1], os.path.join(host.models, "loras", f"averaged{number}.safetensors"))
    rows = [(f"averaged{number}.safetensors", 1.0, 1.0) for number in range(2)]
    patched, _, average = host.call("EMAMerge", model=model, lora_stack=rows, profile="uniform")[:3]
    path = host.call("GraftSaveLoRA", lora_model=average, names="peft", dtype="float32", prefix="loras/average")[0]
    unet, names = as_diffusers(model, is_sd15=True)
    kind, before = type(unet), {name: weight.clone() for name, weight in unet.named_parameters()}
    unet.load_lora_adapter(load_file(path), prefix="unet")
    unet.fuse_lora()
    unet.unload_lora()
    chosen = EMASettings("warmup", 0.9995, inv_gamma=2.0, power=0.75)
    settings = {"decay": chosen.decay, "inv_gamma": chosen.inv_gamma, "power": chosen.power, "use_ema_warmup": True}
    unet.register_to_config(**settings, min_decay=0.0, update_after_step=0, optimization_step=300)
    unet.save_pretrained(tmp_path, max_shard_size="2MB")
    read = training_utils.EMAModel.from_pretrained(tmp_path, kind, foreach=True)
    load(patched)
    ours = patched.model.diffusion_model
    changed = []
    for theirs, shadow in zip(before, read.shadow_params, strict=True):
        torch.testing.assert_close(shadow, ours.get_parameter(names[theirs]).float().cpu(), rtol=1e-5, atol=1e-6)
        changed.append(not torch.equal(before[theirs], shadow))
    assert any(changed)
    assert read.get_decay(301) == pytest.approx(decay_at(chosen, 301, 1000))
