"""LoRA state dicts of every spelling, and every way in which one can be wrong."""

import functools
import json

import pytest
import torch
from graft_nodes.patches.adapters.diff import Diff
from graft_nodes.patches.adapters.lora import LoRA
from graft_nodes.patches.lora_files.entry import LoraEntry
from graft_nodes.patches.lora_files.merge import merge_loras
from graft_nodes.patches.lora_files.parse import (
    Target,
    add_alphas,
    group_by_layer,
    patches_of,
    read,
    read_layers,
    summarize,
)
from graft_nodes.patches.lora_files.peft_config import peft_configs

D = "diffusion_model."
MODEL = {
    "diffusion_model.a.weight": (6, 8),
    "diffusion_model.a.bias": (6,),
    "diffusion_model.conv.weight": (6, 4, 3, 3),
    "diffusion_model.n.weight": (6,),
}
SHAPES = {("model", name): shape for name, shape in MODEL.items()} | {("clip", "te.b.weight"): (5, 5)}
KEYS = {
    prefix + module: Target("model", f"diffusion_model.{module}.weight")
    for module in ("a", "conv", "n")
    for prefix in ("lora_unet_", "diffusion_model.")
}
CLIP = {"lora_te_b": Target("clip", "te.b.weight")}

SPELLINGS = [
    ("lora_unet_a.lora_up.weight", "lora_unet_a.lora_down.weight"),
    ("diffusion_model.a.lora_B.weight", "diffusion_model.a.lora_A.weight"),
    ("diffusion_model.a.lora_B.default.weight", "diffusion_model.a.lora_A.default.weight"),
    ("diffusion_model.a.lora_B", "diffusion_model.a.lora_A"),
    ("diffusion_model.a.lora.up.weight", "diffusion_model.a.lora.down.weight"),
    ("diffusion_model.a_lora.up.weight", "diffusion_model.a_lora.down.weight"),
    ("diffusion_model.a.lora_linear_layer.up.weight", "diffusion_model.a.lora_linear_layer.down.weight"),
]


def pair(base="lora_unet_a", out=6, columns=8, rank=2, alpha=None):
    state = {f"{base}.lora_up.weight": torch.ones(out, rank), f"{base}.lora_down.weight": torch.ones(rank, columns)}
    return state if alpha is None else {**state, f"{base}.alpha": torch.tensor(alpha)}


def problems(state, keys=KEYS, partial=False):
    with pytest.raises(ValueError) as error:
        read(state, keys, SHAPES, "x.safetensors", partial)
    return str(error.value)


@pytest.mark.parametrize(("up", "down"), SPELLINGS)
def test_spellings(up, down):
    lora = read({up: torch.ones(6, 2), down: torch.ones(2, 8)}, KEYS, SHAPES, "x")
    ((target, (layer,)),) = lora.layers.items()
    assert target.weight == "diffusion_model.a.weight" and isinstance(layer, LoRA) and layer.scale == 1.0


def test_alpha_over_rank():
    ((layer,),) = read(pair(alpha=1.0), KEYS, SHAPES, "x").layers.values()
    assert layer.scale == 0.5


def test_differences_of_weights_and_biases():
    state = {
        "diffusion_model.a.diff": torch.ones(6, 8),
        "diffusion_model.a.diff_b": torch.ones(6),
        "diffusion_model.n.diff": torch.ones(6),
    }
    found = {weight: layer for weight, layer, _ in patches_of(read(state, KEYS, SHAPES, "x"), "model", SHAPES)}
    assert found.keys() == {"diffusion_model.a.weight", "diffusion_model.a.bias", "diffusion_model.n.weight"}
    assert all(isinstance(layer, Diff) for layer in found.values())


def test_the_difference_of_a_blocks_own_parameter():
    keys = {"diffusion_model.blocks.0.modulation": Target("model", "diffusion_model.blocks.0.modulation")}
    shapes = {("model", "diffusion_model.blocks.0.modulation"): (1, 6, 8)}
    ((target, (layer,)),) = read(
        {"diffusion_model.blocks.0.diff_m": torch.ones(1, 6, 8)}, keys, shapes, "x"
    ).layers.items()
    assert target.weight.endswith("modulation") and layer.delta((1, 6, 8)).sum() == 48


def test_an_alpha_without_factors_is_left_out():
    state = pair() | {"lora_unet_conv.alpha": torch.tensor(4.0), "lora_unet_gone.alpha": torch.tensor(4.0)}
    lora = read(state, KEYS, SHAPES, "x")
    assert len(lora.layers) == 1 and lora.idle == ("lora_unet_conv", "lora_unet_gone")
    assert "it holds no LoRA layer" in problems({"lora_unet_a.alpha": torch.tensor(4.0)})


def test_a_tensor_that_is_there_twice_counts_once():
    """As `lora_up` and as `lora_B`; other values under the second name are refused."""
    again = {"lora_unet_a.lora_B.weight": torch.ones(6, 2), "lora_unet_a.lora_A.weight": torch.ones(2, 8)}
    ((layer,),) = read(pair() | again, KEYS, SHAPES, "x").layers.values()
    assert torch.equal(layer.delta((6, 8)), torch.full((6, 8), 2.0))
    again["lora_unet_a.lora_B.weight"] = torch.zeros(6, 2)
    assert "lora_unet_a.lora_up.weight is the same tensor of the same layer, with other values" in problems(
        pair() | again
    )


QKV = Target(
    "model", f"{D}q.weight", None, None, (Target("model", f"{D}kv.weight", (0, 0, 2)), Target("model", f"{D}v.weight"))
)
QKV_SHAPES = {
    ("model", f"{D}q.weight"): (4, 8),
    ("model", f"{D}q.bias"): (4,),
    ("model", f"{D}kv.weight"): (5, 8),
    ("model", f"{D}kv.bias"): (5,),
    ("model", f"{D}v.weight"): (2, 8),
    ("model", f"{D}v.bias"): (2,),
}


def rows_apart(state, weights):
    """{weight: what the layers of a file make of it}, of one whose layer `a` stands for rows of three weights."""
    lora = read(state, {"a": QKV}, QKV_SHAPES, "x")
    changed = {name: weight.clone() for name, weight in weights.items()}
    for weight, layer, part in patches_of(lora, "model", QKV_SHAPES):
        rows = changed[weight][part[1] : part[1] + part[2]] if part else changed[weight]
        rows.copy_(rows + layer.delta(rows.shape) if layer.is_additive else layer.apply(rows))
    return changed


@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "LoKr", "diff"])
def test_a_layer_for_several_weights_in_one(kind):
    """Against the same formula on the joined matrix."""
    draws = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=draws) for (_, name), shape in QKV_SHAPES.items()}
    joined = torch.cat([weights[f"{D}q.weight"], weights[f"{D}kv.weight"][:2], weights[f"{D}v.weight"]])
    up, down = torch.randn(8, 2, generator=draws), torch.randn(2, 8, generator=draws)
    state = {"a.lora_up.weight": up, "a.lora_down.weight": down, "a.alpha": torch.tensor(1.0)}
    expected = joined + 0.5 * (up @ down)
    if kind == "DoRA":
        state["a.dora_scale"] = torch.rand(8, 1, generator=draws) + 1
        expected = state["a.dora_scale"] * expected / expected.norm(dim=1, keepdim=True)
    elif kind == "LoKr":
        state = {"a.lokr_w1": torch.randn(4, 2, generator=draws), "a.lokr_w2": torch.randn(2, 4, generator=draws)}
        expected = joined + torch.kron(state["a.lokr_w1"], state["a.lokr_w2"])
    elif kind == "diff":
        state = {"a.diff": up @ down, "a.diff_b": torch.arange(8.0)}
        expected = joined + up @ down
    changed = rows_apart(state, weights)
    found = torch.cat([changed[f"{D}q.weight"], changed[f"{D}kv.weight"][:2], changed[f"{D}v.weight"]])
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(changed[f"{D}kv.weight"][2:], weights[f"{D}kv.weight"][2:])
    if kind == "diff":
        assert torch.equal(changed[f"{D}v.bias"], weights[f"{D}v.bias"] + torch.tensor([6.0, 7.0]))


def test_what_cannot_be_cut_into_rows_is_refused():
    """A magnitude for each column, whose norms are those of all rows, and factors of another height."""
    state = {
        "a.lora_up.weight": torch.ones(8, 2),
        "a.lora_down.weight": torch.ones(2, 8),
        "a.dora_scale": torch.ones(1, 8),
    }
    with pytest.raises(ValueError, match=r"a: DoRA on .*q\.weight, .*kv\.weight, .*v\.weight in one, which this model"):
        read(state, {"a": QKV}, QKV_SHAPES, "x")
    with pytest.raises(ValueError, match=r"a: expected a weight 8x8, got up 9x2"):
        read(pair("a", 9), {"a": QKV}, QKV_SHAPES, "x")


def test_tucker_core_is_read():
    state = {
        "lora_unet_conv.lora_up.weight": torch.ones(6, 2, 1, 1),
        "lora_unet_conv.lora_mid.weight": torch.ones(2, 2, 3, 3),
        "lora_unet_conv.lora_down.weight": torch.ones(2, 4, 1, 1),
    }
    lora = read(state, KEYS, SHAPES, "x")
    assert next(iter(lora.layers.values()))[0].mid is not None and lora.kinds == {"LoCon": 1}


def test_parts_of_fused_weights_and_their_permutation():
    keys = {"lora_unet_a": Target("model", "diffusion_model.a.weight", (0, 2, 4), torch.neg)}
    ((_, layer, part),) = patches_of(read(pair(out=4), keys, SHAPES, "x"), "model", SHAPES)
    assert part == (0, 2, 4) and torch.equal(layer.diff, -2 * torch.ones(4, 8))
    assert "got up 6x2" in problems(pair(), keys)


def test_a_text_encoder_that_is_not_here_is_counted_apart():
    state = pair() | pair("lora_te_b", 5, 5)
    assert read(state, KEYS, SHAPES, "x").text_encoder == ("lora_te_b",)
    assert {target.model for target in read(state, KEYS | CLIP, SHAPES, "x").layers} == {"model", "clip"}
    assert "text encoder only" in problems(pair("lora_te_b", 5, 5))


def test_partial_matches_only_when_allowed():
    state = pair() | pair("lora_unet_gone")
    assert "1 of 2 names match no weight of this model (lora_unet_gone); mark the row as partial" in problems(state)
    assert read(state, KEYS, SHAPES, "x", partial=True).unmatched == ("lora_unet_gone",)


def test_partial_leaves_out_what_does_not_fit():
    """A layer of another width, and a bias that this model's layer lacks; as long as anything fits."""
    state = (
        pair()
        | pair("lora_unet_conv")
        | {
            "diffusion_model.n.diff": torch.ones(6),
            "diffusion_model.n.diff_b": torch.ones(6),
        }
    )
    said = problems(state)
    assert "lora_unet_conv: " in said and "diffusion_model.n: the model has no diffusion_model.n.bias" in said
    assert said.endswith("mark the row as partial to use the rest")
    found = read(state, KEYS, SHAPES, "x", partial=True)
    assert {target.weight for target in found.layers} == {"diffusion_model.a.weight", "diffusion_model.n.weight"}
    assert [misfit.partition(":")[0] for misfit in found.misfits] == ["lora_unet_conv", "diffusion_model.n"]
    assert "mark the row" not in problems(pair("lora_unet_conv"), partial=True)


def test_an_infinite_alpha_of_whole_lokr_factors_counts_for_nothing():
    """ai-toolkit's 9999999999 in float16."""
    state = {
        "lora_unet_a.lokr_w1": torch.ones(2, 2),
        "lora_unet_a.lokr_w2": torch.ones(3, 4),
        "lora_unet_a.alpha": torch.tensor(torch.inf),
    }
    ((layer,),) = read(state, KEYS, SHAPES, "x").layers.values()
    assert torch.equal(layer.delta((6, 8)), torch.ones(6, 8))
    assert "alpha: holds NaN or infinite values" in problems(pair(alpha=torch.inf))


def test_ai_toolkits_embeddings_are_no_layers():
    embedding = {"emb_params": torch.ones(2, 8), "clip_l": torch.ones(2, 8)}
    assert read(pair() | embedding, KEYS, SHAPES, "x").embeddings == ("clip_l", "emb_params")
    assert "it holds embeddings only (clip_l, emb_params)" in problems(embedding)


@pytest.mark.parametrize("pattern", ["a", "^a", "^b|a"])
def test_pefts_anchored_patterns_mean_the_modules_name(pattern):
    """`^` is where the name of the module begins, behind what the file puts before it (PEFT's
    docs of alpha_pattern).
    """
    for prefix, key, content in (
        ("base_model.model.", "adapter_config", {"lora_alpha": 2, "r": 2, "alpha_pattern": {pattern: 8}}),
        ("unet.", "lora_adapter_metadata", {"unet.lora_alpha": 2, "unet.r": 2, "unet.alpha_pattern": {pattern: 8}}),
    ):
        configs = peft_configs({key: json.dumps(content)})
        ((layer,),) = read(
            pair(f"{prefix}a"),
            {f"{prefix}a": Target("model", "diffusion_model.a.weight")},
            SHAPES,
            "x",
            configs=configs,
        ).layers.values()
        assert layer.scale == 4.0


@pytest.mark.parametrize("rslora", [False, True])
def test_pefts_scales_written_into_the_file(rslora):
    """Whoever reads it without the settings beside it applies the same change."""
    configs = peft_configs(
        {"adapter_config": json.dumps({"lora_alpha": 8, "r": 4, "use_rslora": rslora, "rank_pattern": {"conv": 2}})}
    )
    state = (
        pair("base_model.model.a", rank=4)
        | {
            "base_model.model.conv.lora_B.weight": torch.ones(6, 2, 1, 1),
            "base_model.model.conv.lora_A.weight": torch.ones(2, 4, 3, 3),
        }
        | {"base_model.model.n.diff": torch.ones(6)}
    )
    keys = {
        f"base_model.model.{module}": Target("model", f"diffusion_model.{module}.weight")
        for module in ("a", "conv", "n")
    }
    one, two = (
        read(each, keys, SHAPES, "x", configs=of).layers
        for each, of in ((state, configs), (add_alphas(state, configs), ()))
    )
    scales = [[layer.scale for (layer,) in of.values() if isinstance(layer, LoRA)] for of in (one, two)]
    assert scales[0] == pytest.approx(scales[1]) and scales[1] == pytest.approx(
        [8 / 4**0.5, 8 / 2**0.5] if rslora else [2.0, 4.0]
    )
    assert add_alphas(pair(alpha=1.0), configs)["lora_unet_a.alpha"] == 1.0, "what the file itself says counts"


LOKR_FACTORS = {
    "lokr_w1": (2, 2),
    "lokr_w1_a": (2, 1),
    "lokr_w1_b": (1, 2),
    "lokr_w2": (3, 4),
    "lokr_w2_a": (3, 2),
    "lokr_w2_b": (2, 4),
}


@pytest.mark.parametrize("first", [["lokr_w1"], ["lokr_w1_a", "lokr_w1_b"]], ids=["whole", "product"])
@pytest.mark.parametrize("second", [["lokr_w2"], ["lokr_w2_a", "lokr_w2_b"]], ids=["whole", "product"])
def test_pefts_scale_of_a_lokr_written_into_the_file(first, second):
    """PEFT multiplies by alpha / r whether a factor is a product or not; who reads the file without the settings
    beside it, as an average of files does, finds the same change.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = {role: torch.randn(LOKR_FACTORS[role], generator=generator) for role in first + second}
    whole = [functools.reduce(torch.matmul, [tensors[role] for role in roles]) for roles in (first, second)]
    expected = 8 / 5 * torch.kron(*whole)
    state = {f"base_model.model.a.{role}": tensor for role, tensor in tensors.items()}
    configs = peft_configs({"adapter_config": json.dumps({"alpha": 8, "r": 5})})
    keys = {"base_model.model.a": Target("model", "diffusion_model.a.weight")}
    for written, settings in ((state, configs), (add_alphas(state, configs), ())):
        ((layer,),) = read(written, keys, SHAPES, "x", configs=settings).layers.values()
        assert torch.allclose(layer.delta((6, 8)), expected, atol=1e-5)
    merged = merge_loras([LoraEntry("x", state, metadata={"adapter_config": json.dumps({"alpha": 8, "r": 5})})])
    ((_, _, layer),) = read_layers(merged.state)[0]
    assert torch.allclose(layer.delta((6, 8)), expected, atol=1e-5)


def test_no_match_at_all():
    assert "no key matches this model" in problems(pair("lora_unet_gone"), partial=True)
    assert "it holds no LoRA layer (some.weight)" in problems({"some.weight": torch.ones(2)})
    assert "it is empty" in problems({})


def test_every_wrong_shape_is_listed():
    text = problems(pair(out=7) | pair("lora_unet_conv", columns=35) | {"diffusion_model.n.diff": torch.ones(5)})
    assert "lora_unet_a: expected a weight 6x8, got up 7x2 x down 2x8 = 7x8" in text
    assert (
        "lora_unet_conv: expected a weight 6x4x3x3" in text
        and "diffusion_model.n: expected a difference 6, got 5" in text
    )


def test_ranks_that_differ():
    state = pair()
    state["lora_unet_a.lora_down.weight"] = torch.ones(3, 8)
    assert "ranks differ: up 6x2, down 3x8" in problems(state)


def test_every_bad_tensor_is_named():
    bad = {
        "lora_up.weight": (torch.ones(6, 0), "expected real numbers, got none (6, 0)"),
        "lora_down.weight": (torch.ones(0, 8), "expected real numbers, got none (0, 8)"),
        "diff": (torch.ones(6, 8, dtype=torch.complex64), "expected real numbers, got complex ones (6, 8)"),
        "ia3_l": (torch.tensor(1.0), "expected a vector or more, got ia3_l ()"),
    }
    text = problems(
        {f"lora_unet_a.{role}": tensor for role, (tensor, _) in bad.items()} | {"lora_unet_a.alpha": torch.tensor(1.0)}
    )
    assert text.count("\n- ") == len(bad) and all(
        f"- lora_unet_a.{role}: {said}" in text for role, (_, said) in bad.items()
    )
    on_input = {"lora_unet_a.weight": torch.ones(8), "lora_unet_a.on_input": torch.ones(2)}
    assert "lora_unet_a.on_input: expected one number, got (2,)" in problems(on_input)
    for wrong in (torch.tensor(1.0), torch.ones(2, 2)):
        assert "expected (blocks, b, b), got oft_blocks.0" in problems({"lora_unet_a.oft_blocks.0": wrong})
    for stages in (torch.zeros(2, 6, 1, 1), torch.zeros(1, 2, 3, 3)):
        assert "lora_unet_a: a butterfly of" in problems({"lora_unet_a.oft_blocks": stages})
    assert "2x8 rotations of 1 columns" in problems(
        {"lora_unet_a.boft_R": torch.zeros(2, 8, 1, 1), "lora_unet_a.boft_s": torch.ones(6, 1)}
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(value):
    state = pair()
    state["lora_unet_a.lora_up.weight"][0, 0] = value
    assert "lora_unet_a.lora_up.weight: holds NaN or infinite values" in problems(state)


def test_numbers_that_float32_cannot_hold():
    state = pair()
    state["lora_unet_a.lora_up.weight"] = state["lora_unet_a.lora_up.weight"].double() * 1e39
    assert "lora_unet_a.lora_up.weight: holds NaN or infinite values" in problems(state)
    state["lora_unet_a.lora_up.weight"] /= 1e39
    read(state, KEYS, SHAPES, "x")


def test_an_alpha_that_no_trainer_writes():
    for alpha in (1.01e8, -1e30):
        assert f"lora_unet_a.alpha: is {alpha:g}, expected at most 1e+08; it is damaged" in problems(pair(alpha=alpha))
    for alpha in (1e8, -1e8, 0.0):
        ((layer,),) = read(pair(alpha=alpha), KEYS, SHAPES, "x").layers.values()
        assert layer.alpha == alpha


def test_ai_toolkits_magnitude_of_a_dora():
    """Its network computes magnitude * (W + change) / norm of the rows, and saves `.magnitude` (out)."""
    generator = torch.Generator().manual_seed(0)
    weight, up, down = (torch.randn(shape, generator=generator) for shape in ((6, 8), (6, 2), (2, 8)))
    magnitude = torch.rand(6, generator=generator) + 0.5
    name = "diffusion_model.a"
    state = {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up, f"{name}.magnitude": magnitude}
    (((layer,),)) = read(state, KEYS, SHAPES, "x").layers.values()
    changed = weight.double() + up.double() @ down.double()
    expected = magnitude.double()[:, None] * changed / changed.norm(dim=1, keepdim=True)
    assert torch.allclose(layer.apply(weight).double(), expected, rtol=0, atol=1e-5)


def test_half_a_pair_and_two_names_for_one_weight():
    half = {"lora_unet_a.lora_up.weight": torch.ones(6, 2)}
    assert "expected an up and a down matrix, got only lora_unet_a.lora_up.weight" in problems(half)
    other = {key: 2 * tensor for key, tensor in pair("diffusion_model.a").items()}
    expected = "diffusion_model.a: changes the same rows as lora_unet_a (diffusion_model.a.weight) in another way"
    for partial in (False, True):
        assert expected in problems(pair() | other, partial=partial)
    assert "alpha: expected one number" in problems(pair() | {"lora_unet_a.alpha": torch.ones(3)})


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("hada_w1_a", "LoHa"),
        ("lokr_w1", "LoKr"),
        ("dora_scale", "DoRA"),
        ("lora_magnitude_vector", "DoRA"),
        ("magnitude", "DoRA"),
        ("oft_blocks", "OFT or BOFT"),
        ("a1.weight", "GLoRA"),
        ("w_norm", "norm weights"),
        ("set_weight", "set_weight"),
    ],
)
def test_other_kinds_are_refused_where_only_pairs_will_do(key, kind):
    assert (
        f"{kind} is not available here (lora_unet_a.{key})"
        in group_by_layer(pair() | {f"lora_unet_a.{key}": torch.ones(6)})[2][0]
    )


@pytest.mark.parametrize("adapter", ["", ".default"])
def test_a_boft_is_read_with_and_without_the_name_of_pefts_adapter(adapter):
    [(_, _, layer)], stray = read_layers(
        {f"a.boft_R{adapter}": torch.zeros(1, 2, 4, 4), f"a.boft_s{adapter}": torch.ones(6, 1)}
    )
    assert not stray and torch.equal(layer.apply(torch.ones(6, 8)), torch.ones(6, 8))


def test_a_boft_in_float8_is_that_of_its_values():
    turns = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    made = [read_layers({"a.boft_R": of, "a.boft_s": torch.ones(6, 1)})[0][0][2] for of in (turns, turns.float())]
    assert torch.equal(*(layer.apply(torch.eye(6, 8)) for layer in made)) and not torch.equal(
        made[0].apply(torch.eye(6, 8)), torch.eye(6, 8)
    )


@pytest.mark.parametrize("key", ["oft_R", "reshape_weight", "lora_A.bias"])
def test_what_is_not_known_is_refused_by_name(key):
    assert f"is not available in this version of Graft (lora_unet_a.{key})" in problems(
        pair() | {f"lora_unet_a.{key}": torch.ones(6)}
    )


def test_a_summary_counts_layers_by_kind_and_lists_every_rank():
    shapes = {"x.emb": (3,)}
    for name, rank in (("a", 4), ("b", 2), ("c", 4)):
        shapes |= {f"lora_unet_{name}.lora_down.weight": (rank, 8), f"lora_unet_{name}.lora_up.weight": (6, rank)}
    shapes |= {f"lora_unet_d.hada_w{n}_a": (6, 3) for n in (1, 2)} | {
        f"lora_unet_d.hada_w{n}_b": (3, 8) for n in (1, 2)
    }
    assert summarize(shapes) == ({"LoRA": 3, "LoHa": 1}, [2, 3, 4])


def test_incomplete_and_mixed_layers():
    assert "LoHa: hada_w1_b is missing" in problems({"lora_unet_a.hada_w1_a": torch.ones(6, 2)})
    assert "expected lokr_w2, or lokr_w2_a and lokr_w2_b" in problems({"lora_unet_a.lokr_w1": torch.ones(2, 2)})
    assert "expected one kind of layer, got LoRA and LoKr" in problems(
        pair() | {"lora_unet_a.lokr_w1": torch.ones(2, 2)}
    )
    assert "expected one kind of layer, got LoRA and T-LoRA" in problems(
        pair() | {"lora_unet_a.q_layer.weight": torch.ones(2, 6)}
    )
    assert "a DoRA magnitude beside nothing" in problems({"lora_unet_a.dora_scale": torch.ones(6, 1)})
    assert "PEFT's BOFT: boft_s is missing" in problems({"lora_unet_a.boft_R": torch.ones(1, 2, 4, 4)})
    assert "expected (stages, blocks, b, b), got boft_R (6,)" in problems(
        {f"lora_unet_a.boft_{n}": torch.ones(6) for n in "Rs"}
    )
    for shape in ((1, 2, 4, 3), (1, 2, 3, 4), (2, 4, 4), (1, 1, 2, 4, 4)):
        assert f"expected (stages, blocks, b, b), got boft_R {shape}" in problems(
            {"lora_unet_a.boft_R": torch.zeros(shape), "lora_unet_a.boft_s": torch.ones(6, 1)}
        )
    assert "expected upper triangles" in problems({"lora_unet_a.oft_R.weight": torch.ones(2, 7)})
    assert "expected a weight 6x8, got 1x3 rotations of 4 columns" in problems(
        {"lora_unet_a.oft_R.weight": torch.ones(3, 6)}
    )
    assert "expected a magnitude of 6 rows" in problems(pair() | {"lora_unet_a.dora_scale": torch.ones(5, 1)})


def test_all_problems_come_in_one_error():
    state = pair(out=7) | {"lora_unet_conv.lora_up.weight": torch.ones(6, 2), "lora_unet_n.oft_R": torch.ones(6)}
    assert problems(state).count("\n- ") == 3
