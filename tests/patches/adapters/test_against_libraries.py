"""Every kind of layer against the library that makes such files: lycoris' and PEFT's own merged weights, from the files
they write.
"""

import pytest
import torch
from graft_nodes.patches.lora_files import open_file
from graft_nodes.patches.lora_files.parse import Target, patches_of, read
from graft_nodes.patches.lora_files.peft_config import peft_configs
from graft_nodes.patches.lora_files.trainer import oft_trainer
from graft_nodes.patches.patching import stack_ledger
from graft_nodes.patches.patching.fuse import Patch, Stack, apply_patches, are_additive
from torch import nn

LINEAR, CONV, POINT = (
    (lambda: nn.Linear(24, 32)),
    (lambda: nn.Conv2d(8, 16, 3, padding=1)),
    (lambda: nn.Conv2d(8, 16, 1)),
)


@pytest.fixture
def lycoris():
    """Its layers; whoever has not installed it runs the other tests."""
    return pytest.importorskip("lycoris.modules")


def scrambled(module, seed, scale=0.3):
    """Every trainable number of a module drawn anew, so that nothing is zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        around = 1.0 if parameter.min() == parameter.max() == 1.0 else 0.0
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale + around
    return module


def base(build, seed=0):
    torch.manual_seed(seed)
    return build().requires_grad_(False)


def named(module, state, strength=1.0, name="lora_unet_a", said=None):
    """(weight, patch) of a file's tensors and what its metadata says."""
    keys = {name: Target("model", "a.weight")}
    shapes = {("model", f"a.{key}"): tuple(value.shape) for key, value in module.named_parameters()}
    said = said or {}
    parsed = read(state, keys, shapes, "file", configs=peft_configs(said), trainer=oft_trainer(state, said))
    found = patches_of(parsed, "model", shapes)
    return [(weight, Patch(layer, strength, part)) for weight, layer, part in found]


def grafted(module, state, strength=1.0, name="lora_unet_a", said=None):
    """(the weight that Graft makes of a module's, all patches)."""
    patches = named(module, state, strength, name, said)
    return apply_patches(module.weight, [patch for weight, patch in patches if weight == "a.weight"]), [
        patch for _, patch in patches
    ]


ALGORITHMS = [
    ("LoConModule", LINEAR, {}),
    ("LoConModule", CONV, {}),
    ("LoConModule", CONV, {"use_tucker": True}),
    ("LoConModule", LINEAR, {"weight_decompose": True}),
    ("LoConModule", CONV, {"weight_decompose": True}),
    ("LoConModule", LINEAR, {"weight_decompose": True, "wd_on_out": False}),
    ("LoConModule", CONV, {"weight_decompose": True, "wd_on_out": False}),
    ("LohaModule", LINEAR, {}),
    ("LohaModule", LINEAR, {"lora_dim": 9}),
    ("LohaModule", CONV, {}),
    ("LohaModule", CONV, {"use_tucker": True}),
    ("LohaModule", LINEAR, {"weight_decompose": True}),
    ("LokrModule", LINEAR, {}),
    ("LokrModule", LINEAR, {"lora_dim": 1}),
    ("LokrModule", LINEAR, {"decompose_both": True, "lora_dim": 1}),
    ("LokrModule", LINEAR, {"full_matrix": True}),
    ("LokrModule", CONV, {}),
    ("LokrModule", CONV, {"lora_dim": 1}),
    ("LokrModule", CONV, {"lora_dim": 1, "use_tucker": True}),
    ("LokrModule", POINT, {"lora_dim": 1}),
    ("LokrModule", LINEAR, {"weight_decompose": True}),
    ("DiagOFTModule", LINEAR, {}),
    ("DiagOFTModule", LINEAR, {"constraint": 0.01}),
    ("DiagOFTModule", CONV, {"rescaled": True}),
    ("ButterflyOFTModule", LINEAR, {}),
    ("ButterflyOFTModule", CONV, {"rescaled": True}),
    ("ButterflyOFTModule", LINEAR, {"constraint": 0.01}),
    ("GLoRAModule", LINEAR, {}),
    ("GLoRAModule", CONV, {}),
    ("GLoRAModule", CONV, {"use_tucker": True}),
    ("IA3Module", LINEAR, {}),
    ("IA3Module", LINEAR, {"train_on_input": True}),
    ("IA3Module", CONV, {}),
    ("IA3Module", CONV, {"train_on_input": True}),
]


def run(module, build, weight=None):
    """The output for fixed input, of a module's forward or of a weight in its place."""
    shape = (2, 24) if build is LINEAR else (2, 8, 5, 5)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    if weight is None:
        return module(x)
    return (
        nn.functional.linear(x, weight, module.bias)
        if build is LINEAR
        else module._conv_forward(x, weight, module.bias)
    )


def bypassed(module, patches, build):
    """The module's own output with (weight, patch) pairs at its activations; the module is as it was afterwards."""
    model, of = nn.ModuleDict({"a": module}), {}
    for weight, patch in patches:
        of.setdefault(weight, []).append(patch)
    stack_ledger.attach(model, "test", [Stack(of, bypass=of)])
    output = run(module, build)
    stack_ledger.detach(model, "test")
    assert "forward" not in module.__dict__
    return output


IDS = [f"{name}-{build().__class__.__name__}-{'-'.join(options)}" for name, build, options in ALGORITHMS]


@pytest.mark.parametrize(("name", "build", "options"), ALGORITHMS, ids=IDS)
def test_lycoris(lycoris, name, build, options):
    """Against the forward that lycoris trains (its merge scales LoHa and LoKr twice)."""
    module, trained = base(build), base(build)
    others = {key: value for key, value in options.items() if key != "lora_dim"}
    network = scrambled(getattr(lycoris, name)("a", trained, 1.0, options.get("lora_dim", 4), 2.0, **others), 1).eval()
    with torch.no_grad():
        state = network.custom_state_dict() if "custom_state_dict" in type(network).__dict__ else network.state_dict()
        state = {f"lora_unet_a.{key}": value.clone() for key, value in state.items() if key != "scalar"}
        network.apply_to()
        expected = run(trained, build)
        ours, patches = grafted(module, state)
        assert torch.allclose(run(module, build, ours), expected, rtol=0, atol=5e-5)
        assert torch.allclose(bypassed(module, named(module, state), build), expected, rtol=0, atol=5e-5)
        half, weight = bypassed(module, named(module, state, 0.5), build), grafted(module, state, 0.5)[0]
        assert torch.allclose(half, run(module, build, weight), rtol=0, atol=5e-5)
        assert not torch.allclose(run(module, build), expected, atol=1e-2)
        if are_additive(patches):  # then half the strength is half the change
            assert torch.allclose(grafted(module, state, 0.5)[0], (ours + module.weight) / 2, rtol=0, atol=2e-5)


def test_lycoris_norm(lycoris):
    norm = nn.LayerNorm(12)
    network = scrambled(lycoris.NormModule("a", norm, 1.0), 1)
    state = {f"lora_unet_a.{key}": value for key, value in network.state_dict().items()}
    assert {"lora_unet_a.w_norm", "lora_unet_a.b_norm"} <= state.keys()
    ours, patches = grafted(norm, state)
    assert torch.allclose(ours, norm.weight + state["lora_unet_a.w_norm"]) and len(patches) == 2


@pytest.mark.parametrize("strength", [0.25, 0.7, 1.0, 1.5])
def test_oft_at_a_strength_squared_is_comfyuis_at_that_strength(strength):
    """As the help page says: ComfyUI multiplies R - 1 by the strength, and what it does to the weight once more."""
    module, generator = base(LINEAR), torch.Generator().manual_seed(7)
    blocks = torch.randn(4, 8, 8, generator=generator) * 0.2
    skew = (blocks - blocks.transpose(1, 2)).double()
    identity = torch.eye(8, dtype=torch.float64)
    turn = (identity + skew) @ torch.linalg.inv(identity - skew)
    rows = module.weight.double().view(4, 8, -1)
    change = torch.einsum("knm,kn...->km...", turn * strength - strength * identity, rows).view(32, 24)
    expected = module.weight.double() + strength * change
    ours = grafted(module, {"lora_unet_a.oft_blocks": blocks}, strength**2)[0]
    assert torch.allclose(ours.double(), expected, rtol=0, atol=1e-5)


def comfyuis_turns(blocks, alpha):
    """The rotations of ComfyUI's OFT and BOFT adapters in float64: their limit is alpha itself."""
    skew = (blocks - blocks.mT).double()
    norm = skew.norm() + 1e-8
    if 0 < alpha < norm:
        skew = skew * alpha / norm
    identity = torch.eye(blocks.shape[-1], dtype=torch.float64)
    return (identity + skew) @ torch.linalg.inv(identity - skew), identity


def comfyuis_oft(weight, blocks, alpha, rescale, strength):
    """What ComfyUI's loader makes of a weight with an OFT file: the strength twice, and no rescale."""
    turns, identity = comfyuis_turns(blocks, alpha)
    rows = weight.double().unflatten(0, blocks.shape[:2])
    change = torch.einsum("knm,kn...->km...", strength * turns - strength * identity, rows).flatten(0, 1)
    return weight.double() + strength * change


def comfyuis_boft(weight, blocks, alpha, rescale, strength):
    """The same of a BOFT file: the strength in every stage, then the rescale, and the strength once more."""
    turns, identity = comfyuis_turns(blocks, alpha)
    turned, side = weight.double(), blocks.shape[-1]
    for stage, turn in enumerate(turns):
        apart = 2**stage * (side // 2)
        pairs = turned.unflatten(0, (-1, 2, apart)).transpose(1, 2)
        rows = pairs.flatten(0, 2).unflatten(0, (-1, side))
        rows = torch.einsum("bij,bj...->bi...", strength * turn + (1 - strength) * identity, rows)
        turned = rows.flatten(0, 1).unflatten(0, (-1, apart, 2)).transpose(1, 2).flatten(0, 2)
    return weight.double() + strength * (turned * rescale.double() - weight.double())


@pytest.mark.parametrize("build", [LINEAR, CONV])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 100.0])
@pytest.mark.parametrize("strength", [-0.7, 0.25, 1.0, 1.5])
@pytest.mark.parametrize("kind", ["OFT", "BOFT"])
def test_oft_as_comfyui_applies_it(kind, strength, alpha, build):
    module, generator = base(build), torch.Generator().manual_seed(7)
    out = module.weight.shape[0]
    comfyuis, shape = {
        "OFT": (comfyuis_oft, (out // 8, 8, 8)),
        "BOFT": (comfyuis_boft, (2, out // 4, 4, 4)),
    }[kind]
    state = {
        "lora_unet_a.oft_blocks": torch.randn(shape, generator=generator) * 0.2,
        "lora_unet_a.rescale": torch.rand(out, *(1 for _ in module.weight.shape[1:]), generator=generator) + 0.5,
        "lora_unet_a.alpha": torch.tensor(alpha),
    }
    ((weight, patch),) = named(module, state, strength)
    patch = Patch(patch.layer.to_comfyui(strength), strength, patch.part)
    blocks, rescale = state["lora_unet_a.oft_blocks"], state["lora_unet_a.rescale"]
    expected = comfyuis(module.weight, blocks, alpha, rescale, strength)
    assert torch.allclose(apply_patches(module.weight, [patch]).double(), expected, rtol=0, atol=1e-5)
    at_activations = bypassed(module, [(weight, patch)], build)
    assert torch.allclose(at_activations, run(module, build, expected.float()), rtol=0, atol=5e-5)
    if kind == "OFT" or strength != 1.0 or alpha == 0.3:
        assert not torch.allclose(grafted(module, state, strength)[0].double(), expected, atol=1e-3)


def test_rotations_that_lycoris_2_wrote(lycoris):
    """`oft_diag` is what its get_r gives (rescale in it); the weight is its einsum, and BOFT's file is
    one of stages.
    """
    module = base(LINEAR)
    network = scrambled(lycoris.DiagOFTModule("a", module, 1.0, 4, 2.0, rescaled=True), 1)
    rotations = network.rescale.detach().view(network.block_num, network.block_size, 1) * network.get_r().detach()
    rows = module.weight.unflatten(0, (network.block_num, network.block_size))
    expected = torch.einsum("k n m, k n ... -> k m ...", rotations, rows).flatten(0, 1)
    assert torch.allclose(grafted(module, {"lora_unet_a.oft_diag": rotations})[0], expected, atol=1e-5)
    butterfly = scrambled(lycoris.ButterflyOFTModule("a", module, 1.0, 4, 2.0), 1)
    made = butterfly.make_weight(scale=1, device=module.weight.device).detach()
    assert torch.allclose(grafted(module, {"lora_unet_a.oft_diag": butterfly.get_r().detach()})[0], made, atol=1e-5)


def test_rotations_of_fused_parts(lycoris):
    """kohya's OFT for Flux: Q, K and V have blocks of their own."""
    module, generator = base(lambda: nn.Linear(24, 48)), torch.Generator().manual_seed(3)
    state = {f"lora_unet_a.oft_blocks.{n}": torch.randn(4, 4, 4, generator=generator) * 0.2 for n in range(3)}
    state["lora_unet_a.alpha"] = torch.tensor(0.02)
    patches = grafted(module, state)[0]
    for number, rows in enumerate(module.weight.split(16)):
        part = nn.Linear(24, 16)
        part.weight.data = rows.data.clone()
        network = lycoris.DiagOFTModule("a", part, 1.0, 4, 2.0, constraint=0.02)
        network.oft_blocks.data = state[f"lora_unet_a.oft_blocks.{number}"]
        made = network.make_weight(scale=1).detach() + 0.0
        assert torch.allclose(patches[number * 16 : number * 16 + 16], made, atol=1e-5)


@pytest.mark.parametrize("build", [CONV, POINT], ids=["conv", "point"])
@pytest.mark.parametrize("rank", [4, 9])
def test_onetrainers_loha_of_a_convolution(build, rank):
    """Its factors are those of two convolutions: (out, rank, 1, 1) and (rank, in, kernel)."""
    module, generator = base(build), torch.Generator().manual_seed(4)
    out, columns, *kernel = module.weight.shape
    state, products = {"lora_unet_a.alpha": torch.tensor(2.0)}, []
    for number in "12":
        up = torch.randn(out, rank, 1, 1, generator=generator)
        down = torch.randn(rank, columns, *kernel, generator=generator)
        state |= {f"lora_unet_a.hada_w{number}_a": up, f"lora_unet_a.hada_w{number}_b": down}
        products.append((up.double().view(out, -1) @ down.double().view(rank, -1)).view(module.weight.shape))
    expected = module.weight.double() + products[0] * products[1] * (2.0 / rank)
    assert torch.allclose(grafted(module, state)[0].double(), expected, rtol=0, atol=1e-4)
    at_activations = bypassed(module, named(module, state), build)
    assert torch.allclose(at_activations, run(module, build, expected.float()), rtol=0, atol=1e-3)


def onetrainers_oft(module, upper, side, scaled, shared):
    """The weight that OneTrainer's OFT computes with, in float64: of a linear layer it rotates the input, of a
    convolution the weight.
    """
    rows, columns = torch.triu_indices(side, side, 1)
    skew = torch.zeros(len(upper), side, side, dtype=torch.float64)
    skew[:, rows, columns] = upper.double() / (2 * (side - 1) ** 0.5 if scaled else 1)
    skew = skew - skew.transpose(1, 2)
    square = skew @ skew
    rotation = torch.eye(side, dtype=torch.float64) + 2 * skew + 2 * square + 2 * square @ skew + square @ square
    weight = module.weight.double()
    blocks = weight.reshape(len(weight), -1, side)
    if shared:
        rotation = rotation.repeat(blocks.shape[1], 1, 1)
    if weight.ndim == 2:  # the layer's output for every unit vector, rotated
        units = torch.eye(weight.shape[1], dtype=torch.float64)
        rotated = torch.einsum("nrk,rkc->nrc", units.reshape(len(units), -1, side), rotation).reshape(units.shape)
        return nn.functional.linear(rotated, weight).T
    return torch.einsum("ork,rkc->orc", blocks, rotation).reshape(weight.shape)


ONETRAINERS_NAMES = [("lora_unet_a", {}), ("lora_transformer_a", {}), ("unet.a", {"ot_branch": "master"})]


@pytest.mark.parametrize(("name", "said"), ONETRAINERS_NAMES, ids=["kohya", "legacy", "metadata"])
@pytest.mark.parametrize("build", [LINEAR, CONV, POINT], ids=["linear", "conv", "point"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("shared", [False, True], ids=["", "block_share"])
def test_onetrainers_oft(build, scaled, shared, name, said):
    module, generator = base(build), torch.Generator().manual_seed(6)
    blocks = 1 if shared else module.weight[0].numel() // 4
    upper = torch.randn(blocks, 6, generator=generator) * (1.0 if scaled else 0.3)
    state = {f"{name}.oft_R.weight": upper}
    if scaled:
        state[f"{name}.oft_R.scaled_oft"] = torch.tensor(1.0)
    ours = grafted(module, state, name=name, said=said)[0]
    expected = onetrainers_oft(module, upper, 4, scaled, shared)
    assert torch.allclose(ours.double(), expected, rtol=0, atol=2e-6)
    assert not torch.allclose(module.weight.double(), expected, atol=1e-2)
    at_activations = bypassed(module, named(module, state, name=name, said=said), build)
    assert torch.allclose(at_activations, run(module, build, expected.float()), rtol=0, atol=2e-5)


@pytest.mark.parametrize("build", [CONV, POINT], ids=["conv", "point"])
def test_oft_of_a_convolution_whose_trainer_is_unknown_is_refused(build):
    """PEFT's and OneTrainer's are turned in opposite directions; a linear layer is turned the same way by both."""
    module = base(build)
    state = {"unet.a.oft_R.weight": torch.full((module.weight[0].numel() // 4, 6), 0.1)}
    with pytest.raises(ValueError, match="neither the names nor the metadata of this file say which"):
        named(module, state, name="unet.a")
    linear = base(LINEAR)
    assert named(linear, {"unet.a.oft_R.weight": torch.full((6, 6), 0.1)}, name="unet.a")


peft = pytest.importorskip("peft")

PEFT = [  # configuration, settings, whether the file alone says everything
    ("LoraConfig", {"r": 4, "lora_alpha": 4}, True),
    ("LoraConfig", {"r": 4, "lora_alpha": 6}, False),
    ("LoraConfig", {"r": 4, "lora_alpha": 6, "use_rslora": True}, False),
    ("LoraConfig", {"r": 4, "lora_alpha": 6, "rank_pattern": {"a": 2}, "alpha_pattern": {"a": 3}}, False),
    ("LoraConfig", {"r": 4, "lora_alpha": 4, "use_dora": True}, True),
    ("LoraConfig", {"r": 4, "lora_alpha": 4, "lora_bias": True}, True),
    ("LoHaConfig", {"r": 4, "alpha": 4}, True),
    ("LoHaConfig", {"r": 4, "alpha": 8}, False),
    ("LoKrConfig", {"r": 4, "alpha": 4}, True),
    ("LoKrConfig", {"r": 2, "alpha": 8, "decompose_both": True}, False),
    ("LoKrConfig", {"r": 99, "alpha": 33}, False),
    ("IA3Config", {"feedforward_modules": []}, True),
    ("IA3Config", {"feedforward_modules": ["a"]}, True),
    ("OFTConfig", {"r": 0, "oft_block_size": 4}, True),
    ("OFTConfig", {"r": 0, "oft_block_size": 4, "block_share": True}, True),
    ("OFTConfig", {"r": 0, "oft_block_size": 4, "use_cayley_neumann": False}, False),
    ("OFTConfig", {"r": 0, "oft_block_size": 4, "num_cayley_neumann_terms": 3}, False),
    ("OFTConfig", {"r": 0, "oft_block_size": 4, "coft": True, "eps": 1.0}, False),
    ("BOFTConfig", {"boft_block_size": 4}, True),
]


@pytest.mark.parametrize("build", [LINEAR, CONV], ids=["linear", "conv"])
@pytest.mark.parametrize(("config", "options", "plain"), PEFT)
def test_peft(tmp_path, build, config, options, plain):
    """The weights that PEFT merges and its forward, from the folder that it saves."""
    module = base(build)
    model = peft.get_peft_model(
        nn.ModuleDict({"a": base(build)}), getattr(peft, config)(target_modules=["a"], **options)
    )
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            drawn = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.data = (
                drawn.abs() + 0.5 if any(kind in name for kind in ("magnitude", "ia3", "boft_s")) else drawn
            )
    model.save_pretrained(tmp_path)
    state, said = open_file.load(str(tmp_path / "adapter_model.safetensors"))
    ours, patches = grafted(module, state, name="base_model.model.a", said=said)
    layer = model.base_model.model["a"]
    around, unmerged = (
        bypassed(module, named(module, state, name="base_model.model.a", said=said), build),
        run(layer.eval(), build),
    )
    layer.merge()
    assert torch.allclose(around, run(layer, build), atol=5e-5)
    if not (
        config == "OFTConfig" and build is CONV
    ):  # where PEFT folds patches that overlap, and differs from what it merges
        assert torch.allclose(around, unmerged, atol=5e-5)
    assert torch.allclose(ours, layer.get_base_layer().weight, rtol=0, atol=2e-5)
    assert not torch.allclose(module.weight, layer.get_base_layer().weight, atol=1e-3)
    assert torch.allclose(grafted(module, state, name="base_model.model.a")[0], ours, atol=1e-5) == plain
    if config == "IA3Config" and not options["feedforward_modules"]:
        assert torch.allclose(patches[1].layer.apply(module.bias), layer.get_base_layer().bias, atol=1e-6)
    if options.get("lora_bias"):
        (bias,) = [patch for patch in patches if patch.layer.kind == "diff"]
        assert torch.allclose(module.bias + bias.layer.delta(module.bias.shape), layer.get_base_layer().bias, atol=1e-6)


def test_the_settings_that_diffusers_keeps_in_the_header(tmp_path):
    """As its own pipelines save them: each part of the model has its alpha."""
    loaders = pytest.importorskip("diffusers.loaders")
    state = {"a.lora_A.weight": torch.randn(4, 24), "a.lora_B.weight": torch.randn(32, 4)}
    configs = {
        part: peft.LoraConfig(r=4, lora_alpha=alpha, target_modules=["a"]).to_dict()
        for part, alpha in (("unet", 2), ("te", 12))
    }
    loaders.StableDiffusionLoraLoaderMixin.save_lora_weights(
        str(tmp_path),
        unet_lora_layers=state,
        text_encoder_lora_layers={key: value.clone() for key, value in state.items()},
        unet_lora_adapter_metadata=configs["unet"],
        text_encoder_lora_adapter_metadata=configs["te"],
    )
    saved, said = open_file.load(str(tmp_path / "pytorch_lora_weights.safetensors"))
    module = base(LINEAR)
    for part, scale in (("unet", 0.5), ("text_encoder", 3.0)):
        own = {key: value for key, value in saved.items() if key.startswith(f"{part}.")}
        ours, _ = grafted(module, own, name=f"{part}.a", said=said)
        assert torch.allclose(
            ours, module.weight + scale * state["a.lora_B.weight"] @ state["a.lora_A.weight"], atol=1e-5
        )


def test_pefts_butterfly_of_several_stages():
    """PEFT applies more than one stage only with its CUDA kernel; its own permutations and rotations, multiplied out
    here.
    """
    module, generator = base(lambda: nn.Linear(32, 24)), torch.Generator().manual_seed(1)
    layer = peft.tuners.boft.layer.Linear(
        base(lambda: nn.Linear(32, 24)), "x", peft.BOFTConfig(boft_block_size=4, boft_block_num=0)
    )
    blocks, rescale = torch.randn(3, 8, 4, 4, generator=generator), torch.rand(24, 1, generator=generator) + 0.5
    product = torch.eye(32)
    for stage in range(3):
        mixed = layer.perm2mat(layer.block_butterfly_perm(32, 8 // 2**stage, 2, 2))
        product = mixed @ torch.block_diag(*layer.cayley_batch(blocks[stage])) @ mixed.T @ product
    ours, _ = grafted(module, {"lora_unet_a.boft_R": blocks, "lora_unet_a.boft_s": rescale})
    assert torch.allclose(ours, (product @ module.weight.T).T * rescale, atol=1e-5)


def test_order_counts_where_it_must_and_only_there():
    """A LoRA before a DoRA is inside its norm, one after it is not; two LoRAs commute."""
    module = base(LINEAR)
    lora = {"lora_unet_a.lora_up.weight": torch.randn(32, 2), "lora_unet_a.lora_down.weight": torch.randn(2, 24)}
    dora = lora | {"lora_unet_a.dora_scale": torch.rand(32, 1) + 1}
    (_, (first,)), (_, (second,)) = grafted(module, lora, 0.5), grafted(module, dora, 0.7)
    weight = module.weight.double()
    up, down = lora["lora_unet_a.lora_up.weight"].double(), lora["lora_unet_a.lora_down.weight"].double()

    def with_dora(value):
        changed = value + up @ down
        made = dora["lora_unet_a.dora_scale"].double() * changed / changed.norm(dim=1, keepdim=True)
        return value + 0.7 * (made - value)

    assert torch.allclose(
        apply_patches(module.weight, [first, second]).double(), with_dora(weight + 0.5 * up @ down), atol=1e-5
    )
    assert torch.allclose(
        apply_patches(module.weight, [second, first]).double(), with_dora(weight) + 0.5 * up @ down, atol=1e-5
    )


def test_set_weight_goes_from_the_base_to_its_value():
    module, value = base(LINEAR), torch.randn(32, 24)
    assert torch.allclose(grafted(module, {"lora_unet_a.set_weight": value})[0], value, atol=1e-6)
    assert torch.allclose(
        grafted(module, {"lora_unet_a.set_weight": value}, 0.25)[0], torch.lerp(module.weight, value, 0.25), atol=1e-6
    )
