"""The scale that a LoRA file's trainer used, where its alpha over the rank in the file is another: LyCORIS' own modules
and sd-scripts' rule as oracles.
"""

import copy
import json
import math

import pytest
import torch
from graft_nodes.patches.lora_files.entry import LoraEntry
from graft_nodes.patches.lora_files.merge import merge_loras
from graft_nodes.patches.lora_files.parse import Target, read, read_layers
from graft_nodes.patches.lora_files.trained_scale import restore_trained_scales
from graft_nodes.training.averages import sources
from safetensors.torch import save_file
from torch import nn

RANK, WIDTH = 2, 8
NAME = "lora_unet_double_blocks_0_img_attn_qkv"


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * 0.3


def said(module, dim, alpha, **arguments):
    """What kohya's scripts write about a network: text, and its arguments as text in JSON."""
    return {
        "ss_network_module": module,
        "ss_network_dim": str(dim),
        "ss_network_alpha": str(alpha),
        "ss_network_args": json.dumps({name: str(value) for name, value in arguments.items()}),
    }


def change(state, metadata, shape, name=NAME):
    """The difference that Graft makes of a file with one layer."""
    key = {name: Target("model", "a.weight")}
    parsed = read(restore_trained_scales(state, metadata), key, {("model", "a.weight"): shape}, "file")
    ((layer,),) = parsed.layers.values()
    return layer.delta(shape)


# --- sd-scripts' split_qkv --------------------------------------------------------------------------------------------


def split(heights, alpha, name=NAME, rank=RANK):
    """(what sd-scripts saves of pairs that it trained on one weight, the difference that they make)."""
    ups, downs = (
        [draw(rows, rank, seed=7) for rows in heights],
        [draw(rank, WIDTH, seed=i) for i in range(len(heights))],
    )
    state = {
        f"{name}.lora_down.weight": torch.cat(downs),
        f"{name}.lora_up.weight": torch.block_diag(*ups),
        f"{name}.alpha": torch.tensor(alpha),
    }
    return state, torch.cat([(alpha or rank) / rank * up @ down for up, down in zip(ups, downs, strict=True)])


SPLIT = [
    ("networks.lora_flux", NAME, (8, 8, 8)),
    ("networks.lora_flux", "lora_unet_single_blocks_0_linear1", (8, 8, 8, 32)),
    ("networks.lora_hunyuan_image", NAME, (8, 8, 8)),
    ("networks.lora_sd3", "lora_unet_joint_blocks_0_context_block_attn_qkv", (8, 8, 8)),
    ("networks.lora_lumina", "lora_unet_layers_0_attention_qkv", (24, 8, 8)),
]


@pytest.mark.parametrize("alpha", [1.0, 2.0, 16.0])
@pytest.mark.parametrize(("module", "name", "heights"), SPLIT)
def test_pairs_stored_as_one_have_the_strength_of_each(module, name, heights, alpha):
    state, expected = split(heights, alpha, name)
    found = change(state, said(module, RANK, alpha, split_qkv=True), expected.shape, name)
    assert torch.allclose(found, expected, atol=1e-6)


def test_a_rank_of_its_own_is_no_matter():
    """`img_attn_dim` and `network_reg_dims` give these layers another rank than the file's."""
    state, expected = split((8, 8, 8), 4.0, rank=6)
    metadata = said("networks.lora_flux", 32, 4.0, split_qkv=True, network_reg_dims="qkv=6")
    assert torch.allclose(change(state, metadata, expected.shape), expected, atol=1e-6)


def test_an_alpha_of_0_is_the_rank():
    state, expected = split((8, 8, 8), 0.0)
    state[f"{NAME}.alpha"] = torch.tensor(float(RANK))  # as sd-scripts stores it
    assert torch.allclose(
        change(state, said("networks.lora_flux", RANK, 0.0, split_qkv=True), expected.shape), expected, atol=1e-6
    )


LEFT = {
    "without metadata": {},
    "not split": said("networks.lora_flux", RANK, 2.0),
    "split off": said("networks.lora_flux", RANK, 2.0, split_qkv=False),
    "by nobody that is known": {**said("networks.lora_flux", RANK, 2.0, split_qkv=True), "ss_network_module": "mine"},
    "resized": said("networks.lora_flux", "Dynamic", "Dynamic", split_qkv=True),
    "alpha corrected": said("networks.lora_flux", RANK, 2.0 / 3, split_qkv=True),
    "broken arguments": {**said("networks.lora_flux", RANK, 2.0), "ss_network_args": "{split_qkv"},
    "arguments that are a list": {**said("networks.lora_flux", RANK, 2.0), "ss_network_args": "[1]"},
}


@pytest.mark.parametrize("metadata", LEFT.values(), ids=LEFT)
def test_a_file_that_does_not_say_it_is_left_as_it_is(metadata):
    state, _ = split((8, 8, 8), 2.0)
    assert restore_trained_scales(state, metadata) is state


def test_a_pair_that_is_none_of_several_is_left_as_it_is():
    """Whoever went on training the stored pair as one, or resized it, has no blocks in it."""
    metadata = said("networks.lora_flux", 6, 2.0, split_qkv=True)
    state, _ = split((8, 8, 8), 2.0)
    whole = {**state, f"{NAME}.lora_up.weight": draw(24, 6)}
    other = {key.replace("_qkv", "_proj"): tensor for key, tensor in state.items()}
    for each in (whole, other):
        assert restore_trained_scales(each, metadata) is each


# --- LyCORIS ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lycoris():
    return pytest.importorskip("lycoris.modules")


def made(lycoris, algorithm, *, rank, alpha, rs_lora, layer=None, **settings):
    """(a layer without the module, the trained module on a copy of it, what LyCORIS saves of it)."""
    layer = (layer or nn.Linear(24, 32)).requires_grad_(False)
    trained = copy.deepcopy(layer)
    module = getattr(lycoris, algorithm)("a", trained, 1.0, rank, alpha, rs_lora=rs_lora, **settings).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    state = {f"{NAME}.{key}": tensor.detach().clone() for key, tensor in module.custom_state_dict().items()}
    module.apply_to()
    return layer, trained, state


def check(state, metadata, layer, trained):
    """Graft's weight in the layer computes what LyCORIS' forward does (its merge scales LoHa and LoKr twice)."""
    x = torch.randn(3, 24, *(5,) * (layer.weight.ndim - 2), generator=torch.Generator().manual_seed(5))
    key, shape = {NAME: Target("model", "a.weight")}, tuple(layer.weight.shape)
    parsed = read(restore_trained_scales(state, metadata), key, {("model", "a.weight"): shape}, "file")
    ((patch,),) = parsed.layers.values()
    plain, expected = layer(x), trained(x)
    if patch.is_additive:
        layer.weight += patch.delta(shape)
    else:
        layer.weight.copy_(patch.apply(layer.weight))
    assert not torch.allclose(plain, expected, atol=1e-2)
    assert torch.allclose(layer(x), expected, rtol=1e-4, atol=1e-4)


ALGORITHMS = ["LoConModule", "LohaModule", "LokrModule", "GLoRAModule"]


@pytest.mark.parametrize("rs_lora", [False, True])
@pytest.mark.parametrize("alpha", [0, 1, 2, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lycoris_scale_with_and_without_rs_lora(lycoris, algorithm, alpha, rs_lora):
    layer, trained, state = made(lycoris, algorithm, rank=2, alpha=alpha, rs_lora=rs_lora)
    check(state, said("lycoris.kohya", 2, alpha, algo="lora", rs_lora=rs_lora), layer, trained)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [0, 1, 3])
@pytest.mark.parametrize("rs_lora", [False, True])
@pytest.mark.parametrize("alpha", [1, 8, 32])
def test_a_lokr_of_two_whole_matrices(lycoris, alpha, rs_lora, kernel, dtype):
    layer = nn.Conv2d(24, 32, kernel) if kernel else nn.Linear(24, 32)
    settings = {"layer": layer, "rank": 12 if kernel == 3 else 32, "alpha": alpha, "factor": 4, "full_matrix": True}
    layer, trained, state = made(lycoris, "LokrModule", rs_lora=rs_lora, **settings)
    state[f"{NAME}.alpha"] = state[f"{NAME}.alpha"].to(dtype)
    check(state, said("lycoris.kohya", 32, alpha, algo="lokr", rs_lora=rs_lora, conv_dim=12, factor=4), layer, trained)


@pytest.mark.parametrize("rs_lora", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_alpha_saved_as_given_with_rs_lora(lycoris, algorithm, rs_lora):
    """GLoRA saves it so to this day, and the others did before LyCORIS 3.0: alpha over the root of the rank."""
    layer, trained, state = made(lycoris, algorithm, rank=2, alpha=3, rs_lora=rs_lora)
    state[f"{NAME}.alpha"] = torch.tensor(3.0)
    check(state, said("lycoris.kohya", 2, 3, algo="lora", rs_lora=rs_lora), layer, trained)


def test_dylora_divides_by_the_rank_whatever_rs_lora_says():
    state, _ = split((8, 8, 8), 2.0)
    assert restore_trained_scales(state, said("lycoris.kohya", 6, 2.0, algo="dylora", rs_lora=True)) is state


W1, W2 = draw(4, 4), draw(8, 6)


def whole_lokr(alpha):
    return {f"{NAME}.lokr_w1": W1, f"{NAME}.lokr_w2": W2, f"{NAME}.alpha": torch.tensor(float(alpha))}


# (stored alpha, ss_network_dim, ss_network_alpha, arguments): the scale
WHOLE = [
    ((1, 32, 1, {}), 1 / 32),  # a trainer made from LyCORIS that keeps alpha
    ((8, 32, 8, {}), 1 / 4),
    ((32, 32, 1, {}), 1.0),
    ((32**1.5, 32, 1, {"rs_lora": True}), 32**0.5),
    ((32, 32, 1, {"rs_lora": True}), 32**0.5),  # LyCORIS before 3.0
    ((8 * 32**0.5, 32, 8, {"rs_lora": True}), 8 / 32**0.5),
    ((8, 32, 8, {"rs_lora": True}), 8 / 32**0.5),
    ((16, 32, 1, {"preset": "/presets/mine.toml"}), 1.0),  # which gives the layer a rank of 16
    ((16**1.5, 32, 1, {"preset": "/presets/mine.toml", "rs_lora": True}), 4.0),
    ((1, 32, 1, {"preset": "/presets/mine.toml"}), 1 / 32),
    ((math.inf, 100000, 1, {}), 1.0),  # in float16
    ((1, "Dynamic", 1, {}), 1.0),
    ((1, "None", "None", {}), 1.0),
]


@pytest.mark.parametrize(("given", "scale"), WHOLE)
def test_the_scale_of_whole_factors(given, scale):
    alpha, dim, network_alpha, arguments = given
    metadata = said("lycoris.kohya", dim, network_alpha, algo="lokr", **arguments)
    found = change(whole_lokr(alpha), metadata, (32, 24))
    assert torch.allclose(found, scale * torch.kron(W1, W2), rtol=1e-4, atol=1e-7)


def test_ranks_by_layer_of_sd_scripts_own_lokr():
    metadata = said("networks.lokr", 32, 1, network_reg_dims="qkv=16")
    assert torch.allclose(change(whole_lokr(16), metadata, (32, 24)), torch.kron(W1, W2))


@pytest.mark.parametrize("metadata", [{}, {"ss_network_dim": "32", "ss_network_alpha": "1"}])
def test_whole_factors_of_an_unknown_trainer_are_not_scaled(metadata):
    state = whole_lokr(1)
    assert restore_trained_scales(state, metadata) is state


def test_grafts_own_files_say_their_scale_by_themselves():
    state = whole_lokr(1)
    assert restore_trained_scales(state, {**said("lycoris.kohya", 32, 1, algo="lokr"), "graft_state": "x"}) is state


ODD = (
    torch.ones(()),
    torch.ones(6),
    torch.ones(2, 3, dtype=torch.complex64),
    torch.empty(0),
    torch.empty(6, 0),
    torch.ones(6, 6),
)


@pytest.mark.parametrize("alpha", [torch.tensor(2.0), torch.ones(2), torch.tensor(1j), torch.tensor(math.nan)])
@pytest.mark.parametrize("odd", ODD, ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}")
def test_tensors_that_fit_nothing_are_left_to_whoever_reads_the_file(odd, alpha):
    metadata = [
        said("networks.lora_flux", 2, 2.0, split_qkv=True),
        said("lycoris.kohya", 2, 2.0, rs_lora=True),
    ]
    for roles in (
        ("lora_up.weight", "lora_down.weight"),
        ("lokr_w1", "lokr_w2_a", "lokr_w2_b"),
        ("a1.weight", "a2.weight"),
    ):
        state = {f"{NAME}.{role}": odd for role in roles} | {f"{NAME}.alpha": alpha}
        if odd.shape == (6, 0) and "lora_down.weight" in roles:
            state[f"{NAME}.lora_down.weight"] = torch.empty(0, 8)
        for each in metadata:
            assert restore_trained_scales(state, each).keys() == state.keys()


# --- wherever files are read ------------------------------------------------------------------------------------------


def test_merged_and_averaged_files_have_it_too(tmp_path):
    state, expected = split((8, 8, 8), 2.0)
    metadata = said("networks.lora_flux", RANK, 2.0, split_qkv=True)
    merged = merge_loras([LoraEntry("x", state, metadata=metadata)])
    ((_, _, layer),) = read_layers(merged.state)[0]
    assert torch.allclose(layer.delta(expected.shape), expected, atol=1e-5)
    path = tmp_path / "x.safetensors"
    save_file(state, path, metadata)
    averaged = sources.Source("x", str(path)).load()
    ((_, _, layer),) = read_layers(averaged)[0]
    assert torch.allclose(layer.delta(expected.shape), expected, atol=1e-5)
