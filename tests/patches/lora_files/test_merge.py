"""Merged and extracted LoRAs against products in float64, numpy's SVD, and the layers put on a weight one after the
other.
"""

import math

import numpy as np
import pytest
import torch
from graft_nodes.patches.lora_files.average import average
from graft_nodes.patches.lora_files.entry import LoraEntry
from graft_nodes.patches.lora_files.low_rank import best_factors
from graft_nodes.patches.lora_files.merge import WeightChange, extract_lora, merge_changes, merge_loras
from graft_nodes.patches.lora_files.merge_methods import MergeSettings
from graft_nodes.patches.lora_files.parse import Target, patches_of, read
from graft_nodes.patches.patching.fuse import Patch, apply_in_order

from ..patching.test_compose import KINDS, layer

SHAPES = [(12, 10), (12, 6, 3, 3)]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lora(base, seed, rank=3, shape=(12, 10), alpha=1.5):
    return {
        f"{base}.lora_up.weight": random(shape[0], rank, *(1 for _ in shape[2:]), seed=seed),
        f"{base}.lora_down.weight": random(rank, *shape[1:], seed=seed + 1),
        f"{base}.alpha": torch.tensor(alpha),
    }


def change(state, shape):
    """The whole change that a state dict of one layer makes to a weight, in float64."""
    total = torch.zeros(shape, dtype=torch.float64)
    up = next((value for key, value in state.items() if key.endswith("lora_up.weight")), None)
    if up is not None:
        down = next(value for key, value in state.items() if key.endswith("lora_down.weight"))
        alpha = next(float(value) for key, value in state.items() if key.endswith("alpha"))
        total += (alpha / down.shape[0] * up.double().flatten(1) @ down.double().flatten(1)).reshape(shape)
    return total + sum(value.double() for key, value in state.items() if key.endswith(".diff"))


@pytest.mark.parametrize("shape", [(12, 10), (12, 6, 3, 3)])
def test_exact(shape):
    first, second = lora("lora_unet_a_b", 1, shape=shape), lora("diffusion_model.a.b", 5, rank=2, shape=shape)
    made = merge_loras([LoraEntry("x", first, 0.7), LoraEntry("y", second, -0.4)])
    assert made.rank == 5 and made.lost == 0 and set(key.split(".")[0] for key in made.state) == {"lora_unet_a_b"}
    assert torch.allclose(
        change(made.state, shape), 0.7 * change(first, shape) - 0.4 * change(second, shape), atol=1e-5
    )
    target = Target("model", "a.weight")
    parsed = read(made.state, {"lora_unet_a_b": target}, {("model", "a.weight"): shape}, "merged")
    assert len(list(patches_of(parsed, "model", {("model", "a.weight"): shape}))) == 1


@pytest.mark.parametrize("tens", range(10))
def test_a_hundred_random_stacks_are_dense_float64(tens):
    """Files of random ranks, alphas, strengths and layers, summed into one: each layer's change within 1e-6."""
    for seed in range(10 * tens, 10 * tens + 10):
        draws = np.random.default_rng(seed)
        shapes = {f"lora_unet_{letter}": SHAPES[draws.integers(len(SHAPES))] for letter in "abc"}
        entries, total = [], {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        for number in range(draws.integers(1, 6)):
            state, strength = {}, float(draws.uniform(-1.5, 1.5))
            for place, name in enumerate(draws.permutation(list(shapes))[: draws.integers(1, 4)]):
                alpha, rank = float(draws.uniform(0.1, 8)), int(draws.integers(1, 9))
                one = lora(str(name), 1000 * seed + 10 * number + 2 * place, rank, shapes[name], alpha)
                total[name] += strength * change(one, shapes[name])
                state |= one
            entries.append(LoraEntry(f"file{number}", state, strength))
        made = merge_loras(entries).state
        for name, expected in total.items():
            layer_state = {key: value for key, value in made.items() if key.startswith(f"{name}.")}
            error = float((change(layer_state, shapes[name]) - expected).norm())
            assert error <= 1e-6 * float(expected.norm()), (seed, name)


@pytest.mark.parametrize("difference", [False, True])
def test_cut_is_the_best_of_its_rank(difference):
    states = [lora("a", 1), lora("a", 5)] + ([{"a.diff": random(12, 10, seed=9)}] if difference else [])
    made = merge_loras([LoraEntry(str(n), state) for n, state in enumerate(states)], rank=2)
    exact = sum(change(state, (12, 10)) for state in states).numpy()
    values = np.linalg.svd(exact, compute_uv=False)
    error = np.linalg.norm(exact - change(made.state, (12, 10)).numpy())
    assert made.rank == 2 and np.isclose(error, np.linalg.norm(values[2:]), rtol=1e-4)
    assert np.isclose(made.lost, error / np.linalg.norm(exact), rtol=1e-3)


def test_large_matrices_are_cut_well_and_always_alike():
    matrix = random(700, 500) @ torch.diag(0.97 ** torch.arange(500.0)) @ random(500, 600, seed=1)
    up, down, left = best_factors(matrix, 8)
    values = np.linalg.svd(matrix.double().numpy(), compute_uv=False)
    error = float((matrix - up @ down).norm())
    assert error <= 1.001 * np.linalg.norm(values[8:]) and np.isclose(left**0.5, error, rtol=1e-3)
    assert torch.equal(best_factors(matrix, 8)[0], up)


@pytest.mark.parametrize("layer", ["lora_te_a", "text_encoder_2.a", "lycoris_te1_a"])
def test_text_encoders_take_their_own_strength(layer):
    made = merge_loras([LoraEntry("x", lora(layer, 1), 0.0, 0.5)])
    assert torch.allclose(change(made.state, (12, 10)), 0.5 * change(lora(layer, 1), (12, 10)), atol=1e-5)


def test_a_name_that_only_begins_like_a_text_encoders_takes_the_models_strength():
    """Wan's text_embedding and time_embedding are the diffusion model's."""
    made = merge_loras(
        [LoraEntry("x", lora("text_embedding.0", 1), 1.0, 0.0), LoraEntry("y", lora("te.a", 5), 0.0, 1.0)]
    )
    assert {key.rpartition(".lora")[0] for key in made.state if "lora_up" in key} == {"text_embedding.0", "te.a"}


def test_extraction():
    weight, bias, conv = random(12, 4) @ random(4, 10), random(12), random(8, 4, 3, 3)
    changes = {
        "m.a.weight": lambda: weight,
        "m.a.bias": lambda: bias,
        "m.c.weight": lambda: conv,
        "m.n.weight": lambda: bias,
        "m.same.weight": lambda: torch.zeros(3, 3),
    }
    made = extract_lora(changes, 4)
    layer = {key: value for key, value in made.state.items() if key.startswith("m.a.lora") or key == "m.a.alpha"}
    assert torch.allclose(change(layer, (12, 10)), weight.double(), atol=1e-4)
    assert torch.equal(made.state["m.a.diff_b"], bias) and torch.equal(made.state["m.n.diff"], bias)
    assert made.state["m.c.lora_down.weight"].shape == (4, 4, 3, 3) and not any("same" in key for key in made.state)
    assert 0 < made.lost < 1
    with pytest.raises(ValueError, match="zero everywhere"):
        extract_lora({"m.a.weight": lambda: torch.zeros(2, 2)}, 4)


def test_what_cannot_be_merged_is_listed():
    dora, oft = (
        lora("lora_unet_d", 1) | {"lora_unet_d.dora_scale": torch.ones(12, 1)},
        {"lora_unet_o.oft_blocks": torch.ones(3, 4, 4)},
    )
    states = [
        LoraEntry("x", lora("lora_unet_input_blocks_1", 1) | {"lora_unet_a.hada_w1_a": torch.ones(2)} | dora),
        LoraEntry(
            "y",
            lora("lora_unet_down_blocks_1", 1) | {"z.lora_up.weight": torch.ones(2, 2), "what": torch.ones(1)} | oft,
            blocks="D00=1.0",
        ),
        LoraEntry("z", lora("a", 1) | {"a.lora_down.weight": torch.ones(2, 10)}),
    ]
    with pytest.raises(ValueError) as error:
        merge_loras(states)
    for said in (
        "x: lora_unet_a: LoHa: hada_w1_b is missing",
        "y: z: expected an up and a down matrix",
        "y: what is not a LoRA tensor",
        "x and y name the model's layers differently",
        "x: DoRA (lora_unet_d) changes the weight that it finds: connect model",
        "y: OFT (lora_unet_o) changes the weight that it finds",
        "z: a: ranks differ",
        "y: blocks: it has no D00",
    ):
        assert said in str(error.value), said
    with pytest.raises(ValueError, match=r"- a: these LoRAs are for different models[^\n]*\n- b: these"):
        merge_loras(
            [
                LoraEntry(name, lora("a", 1, shape=shape) | lora("b", 1, shape=shape))
                for name, shape in (("x", (12, 10)), ("y", (9, 10)))
            ]
        )


@pytest.mark.parametrize(
    "names",
    [
        (
            "lora_transformer_transformer_blocks_0_attn_to_out_0",
            "transformer.transformer_blocks.0.attn.to_out.0",
            "lycoris_transformer_blocks_0_attn_to_out_0",
        ),
        (
            "lora_unet__blocks_0_self_attn_q",
            "diffusion_model.blocks.0.self_attn.q",
            "model.diffusion_model.blocks.0.self_attn.q",
            "pipe.dit.blocks.0.self_attn.q",
            "base_model.model.blocks.0.self_attn.q",
        ),
        (
            "lora_te1_text_model_a",
            "text_encoder.text_model.a",
            "lora_te_text_model_a",
            "text_encoders.clip_l.transformer.text_model.a",
        ),
        (
            "lora_te2_text_model_a",
            "text_encoder_2.text_model.a",
            "te2.text_model.a",
            "text_encoders.clip_g.transformer.text_model.a",
        ),
    ],
)
def test_layers_are_paired_whatever_their_prefix(names):
    states = [lora(name, 5 * place) for place, name in enumerate(names)]
    made = merge_loras([LoraEntry(name, state, 0.5, 0.5) for name, state in zip(names, states, strict=True)]).state
    assert {key.rpartition(".lora")[0] for key in made if "lora_up" in key} == {names[0]}
    assert torch.allclose(change(made, (12, 10)), 0.5 * sum(change(state, (12, 10)) for state in states), atol=1e-5)


@pytest.mark.parametrize(
    ("own", "diffusers"),
    [
        ("lora_unet_double_blocks_0_img_attn_proj", "transformer.transformer_blocks.0.attn.to_out.0"),
        ("lora_unet_single_blocks_0_linear2", "lora_transformer_single_transformer_blocks_0_proj_out"),
        ("diffusion_model.joint_blocks.0.x_block.attn.proj", "transformer.transformer_blocks.0.attn.to_out.0"),
        ("diffusion_model.blocks.0.self_attn.q", "transformer.blocks.0.attn1.to_q"),
        ("lora_unet_blocks_0_ffn_0", "transformer.blocks.0.ffn.net.0.proj"),
        ("diffusion_model.layers.0.attention.qkv", "transformer.layers.0.attention.to_q"),
        ("lora_unet_middle_block_1_proj_in", "unet.mid_block.attentions.0.proj_in"),
    ],
)
def test_two_spellings_of_one_model_need_it(own, diffusers):
    with pytest.raises(
        ValueError, match="x and y name the model's layers differently, one as diffusers does: connect model"
    ):
        merge_loras([LoraEntry("x", lora(own, 1)), LoraEntry("y", lora(diffusers, 5))])
    mixed = lora(own, 1) | lora(diffusers, 5)  # a file of its own that has both is not two files
    assert len(merge_loras([LoraEntry("x", mixed), LoraEntry("y", lora(own, 9))]).state) == 6


@pytest.mark.parametrize(
    "names",
    [
        ("unet.down_blocks.0.attn1.processor.to_out", "lora_unet_down_blocks_0_attn1_to_out_0"),
        ("text_encoders.clip_h.transformer.text_model.a", "lora_te_text_model_a"),
        ("lora_te2_encoder_block_0_layer_0_SelfAttention_q", "lora_te3_encoder_block_0_layer_0_SelfAttention_q"),
        ("text_encoders.t5xxl.transformer.encoder.block.0.q", "lora_te3_encoder_block_0_q"),
        ("text_encoders.gemma2_2b.transformer.model.layers.0.q", "lora_te_layers_0_q"),
        ("lora_unet_double_blocks_0_img_mlp_fc2", "diffusion_model.double_blocks.0.img_mlp.2"),
    ],
)
def test_other_spellings_of_one_layer_are_paired(names):
    files = [lora(name, 10 * number) for number, name in enumerate(names)]
    made = merge_loras([LoraEntry(name, state) for name, state in zip(names, files, strict=True)])
    assert {key.rpartition(".lora")[0] or key.removesuffix(".alpha") for key in made.state} == {names[0]}
    assert torch.allclose(change(made.state, (12, 10)), sum(change(state, (12, 10)) for state in files), atol=1e-5)


def test_xlabs_files_are_merged():
    shapes = {("up", 1): (12, 3), ("down", 1): (3, 10)}
    state = {
        f"double_blocks.0.processor.proj_lora2.{side}.weight": random(*shape, seed=9)
        for (side, _), shape in shapes.items()
    }
    other = lora("lora_unet_double_blocks_0_txt_attn_proj", 1)
    made = merge_loras([LoraEntry("x", state), LoraEntry("y", other)]).state
    theirs = (
        state["double_blocks.0.processor.proj_lora2.up.weight"]
        @ state["double_blocks.0.processor.proj_lora2.down.weight"]
    )
    assert {key.rpartition(".lora")[0] for key in made if "lora_up" in key} == {
        "diffusion_model.double_blocks.0.txt_attn.proj"
    }
    assert torch.allclose(change(made, (12, 10)), theirs.double() + change(other, (12, 10)), atol=1e-5)
    single = {
        key.replace("double", "single").replace("proj_lora2", "qkv_lora"): tensor for key, tensor in state.items()
    }
    with pytest.raises(
        ValueError, match=r"x: diffusion_model\.single_blocks\.0\.linear1_qkv is for a part of a weight: connect model"
    ):
        merge_loras([LoraEntry("x", single)])


def test_block_weights():
    """The layers of each block with their own strength, whichever way the file names its blocks; what is zero is left
    out.
    """
    names = ("input_blocks_4_1_proj_in", "middle_block_1_proj_in", "output_blocks_3_1_proj_in")
    diffusers = (
        "down_blocks_1_attentions_0_proj_in",
        "mid_block_attentions_0_proj_in",
        "up_blocks_1_attentions_0_proj_in",
    )
    blocks = "IN=0.5, M=0, OUT03=2"
    for spelled in (names, diffusers):
        state = {
            key: value for seed, name in enumerate(spelled) for key, value in lora(f"lora_unet_{name}", seed).items()
        }
        made = merge_loras([LoraEntry("x", state, 0.7, blocks=blocks)]).state
        for name, factor in zip(spelled, (0.5, None, 2.0), strict=True):
            base = f"lora_unet_{name}"
            if factor is None:
                assert not any(key.startswith(base) for key in made)
                continue
            scale = (
                float(state[f"{base}.alpha"]) / state[f"{base}.lora_down.weight"].shape[0]
                if f"{base}.alpha" in state
                else 1.0
            )
            exact = (
                0.7
                * factor
                * scale
                * state[f"{base}.lora_up.weight"].flatten(1)
                @ state[f"{base}.lora_down.weight"].flatten(1)
            )
            ours = made[f"{base}.lora_up.weight"].flatten(1) @ made[f"{base}.lora_down.weight"].flatten(1)
            assert torch.allclose(ours, exact, atol=1e-5)
    some = {
        key: value for key, value in state.items() if "middle" not in key
    }  # a list fits a file that lacks some of its blocks
    assert (
        merge_loras([LoraEntry("x", some, blocks=",".join("1" * 17))]).state.keys()
        == merge_loras([LoraEntry("x", some)]).state.keys()
    )
    with pytest.raises(ValueError, match=r"x: blocks: it has no D00; its blocks are BASE, IN, M, OUT"):
        merge_loras([LoraEntry("x", state, blocks="D00=1.0")])


def of_family(kind, shape, seed):
    """A file of one layer `a`, with a bias."""
    out, columns, kernel = shape[0], shape[1], shape[2:]
    flat = torch.Size(shape[1:]).numel()
    return {
        "lora": lambda: lora("a", seed, shape=shape),
        "loha": lambda: {
            "a.hada_w1_a": random(out, 9, seed=seed),
            "a.hada_w1_b": random(9, flat, seed=seed + 1),
            "a.hada_w2_a": random(out, 9, seed=seed + 2),
            "a.hada_w2_b": random(9, flat, seed=seed + 3),
        },
        "small loha": lambda: {
            "a.hada_w1_a": random(out, 2, seed=seed),
            "a.hada_w1_b": random(2, flat, seed=seed + 1),
            "a.hada_w2_a": random(out, 2, seed=seed + 2),
            "a.hada_w2_b": random(2, flat, seed=seed + 3),
        },
        "lokr": lambda: {
            "a.lokr_w1": random(4, 2, seed=seed),
            "a.lokr_w2": random(out // 4, columns // 2, *kernel, seed=seed + 1),
        },
        "diff": lambda: {"a.diff": random(*shape, seed=seed), "a.diff_b": random(out, seed=seed + 1)},
    }[kind]() | {"a.alpha": torch.tensor(1.5)}


@pytest.mark.parametrize("shape", [(12, 10), (12, 6, 3, 3)])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(
    "kinds", [("loha",), ("small loha", "lora"), ("lokr", "lora"), ("lora", "diff", "lokr", "loha")]
)
def test_what_adds_is_merged_without_a_model(kinds, rank, shape):
    """Rank 0: the sum to the last bits, as factors where every layer has some; a rank: the best of it, and the error
    that is said.
    """
    keys, shapes, sources, total = (
        {"a": Target("model", "a.weight")},
        {("model", "a.weight"): shape, ("model", "a.bias"): shape[:1]},
        [],
        0,
    )
    for seed, kind in enumerate(kinds):
        state = of_family(kind, shape, 10 * seed)
        found = patches_of(read(state, keys, shapes, kind), "model", shapes)
        total = total + 0.5 * sum(one.delta(shape).double() for weight, one, _ in found if weight == "a.weight")
        sources.append(LoraEntry(kind, state, 0.5))
    made = merge_loras(sources, rank)
    found = patches_of(read(made.state, keys, shapes, "merged"), "model", shapes)
    ours = sum(one.delta(shape).double() for weight, one, _ in found if weight == "a.weight")
    values = np.linalg.svd(total.flatten(1).numpy(), compute_uv=False)
    least = float(np.linalg.norm(values[rank:])) if rank else 0.0
    assert float((ours - total).norm()) <= least * (1 + 1e-4) + 1e-4
    whole = "diff" in kinds or (
        len(shape) > 2 and "lokr" in kinds
    )  # else a difference has the form of factors: it may be a convolution's
    assert ("a.diff" in made.state) == (not rank and whole)
    assert not {"a.diff", "a.lora_up.weight"} <= made.state.keys()  # of both ComfyUI's loader keeps only the difference
    assert (
        np.isclose(made.lost, least / float(np.linalg.norm(values)), atol=1e-3) or "diff" in kinds
    )  # a bias counts too
    if "diff" in kinds:
        assert torch.allclose(made.state["a.diff_b"], 0.5 * random(12, seed=10 * kinds.index("diff") + 1))


def test_pefts_alpha_counts_in_merging():
    state = {
        "base_model.model.a.lora_A.weight": random(2, 10),
        "base_model.model.a.lora_B.weight": random(12, 2, seed=1),
    }
    made = merge_loras([LoraEntry("x", state, metadata={"adapter_config": '{"r": 2, "lora_alpha": 6}'})])
    ours = made.state["base_model.model.a.lora_up.weight"] @ made.state["base_model.model.a.lora_down.weight"]
    assert torch.allclose(
        ours, 3.0 * state["base_model.model.a.lora_B.weight"] @ state["base_model.model.a.lora_A.weight"], atol=1e-5
    )


@pytest.mark.parametrize("rank", [0, 8, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_merged_with_a_model(kind, rank):
    """Three layers on one weight, in order, against the same ones put on it."""
    shape, generator = (24, 16), torch.Generator().manual_seed(1)
    base = torch.randn(shape, generator=generator)
    patches = [Patch(layer("lora", shape, generator), 0.5), Patch(layer(kind, shape, generator), 0.7)]
    patches.append(Patch(layer("lora", (12, 16), generator), 1.0, (0, 8, 12)))
    made = merge_changes({"diffusion_model.a.weight": WeightChange(patches, shape, lambda: base)}, rank)
    parsed = read(
        made.state, {"diffusion_model.a": Target("model", "a.weight")}, {("model", "a.weight"): shape}, "merged"
    )
    found = [Patch(one, 1.0) for _, one, _ in patches_of(parsed, "model", {("model", "a.weight"): shape})]
    error = float((apply_in_order(base, found) - apply_in_order(base, patches)).norm())
    values = np.linalg.svd((apply_in_order(base, patches) - base).numpy(), compute_uv=False)
    least = float(np.linalg.norm(values[rank:])) if rank else 0.0
    assert error <= least * (1 + 1e-3) + 1e-4 and np.isclose(
        made.lost, least / float(np.linalg.norm(values)), atol=1e-3
    )
    assert made.rank <= (rank or 16)


# --- what is left out, down to rounding -------------------------------------------------------------------------------


def falling(rows, columns, kept, tail, seed=0):
    """A matrix in float64 with `kept` large singular values, and a tail of this share of its norm."""
    generator = torch.Generator().manual_seed(seed)
    small = min(rows, columns)
    sides = [
        torch.linalg.qr(torch.randn(side, small, generator=generator, dtype=torch.float64)).Q
        for side in (rows, columns)
    ]
    values = torch.zeros(small, dtype=torch.float64)
    values[:kept] = torch.linspace(1, 0.5, kept, dtype=torch.float64)
    values[kept:] = tail / math.sqrt(1 - tail**2) * float(values.norm()) / math.sqrt(small - kept)
    return sides[0] * values @ sides[1].T


@pytest.mark.parametrize("tail", [1e-2, 3e-4, 1e-4, 2e-5])
@pytest.mark.parametrize("shape", [(300, 300), (120, 500), (700, 420)])  # the last one is large: a randomized SVD
def test_an_extract_says_how_small_a_tail_is(shape, tail):
    matrix = falling(*shape, 16, tail)
    made = extract_lora({"diffusion_model.x.weight": lambda: matrix.float()}, 16)
    assert made.lost == pytest.approx(tail, rel=0.05) and made.cut.worst_share == pytest.approx(tail, rel=0.05)


@pytest.mark.parametrize("tail", [1e-2, 3e-4, 1e-4, 2e-5])
@pytest.mark.parametrize("resize", ["none", "sv_ratio"])
def test_a_merge_says_how_small_a_tail_is(resize, tail):
    left, values, right = torch.linalg.svd(falling(60, 50, 4, tail), full_matrices=False)
    state = {"a.lora_up.weight": (left * values).float(), "a.lora_down.weight": right.float()}
    made = merge_loras([LoraEntry("x", state)], 4, settings=MergeSettings(resize=resize, resize_to=5.0))
    assert made.rank == 4 and made.lost == pytest.approx(tail, rel=0.05)
    assert average([state], [1.0], ["x"], "products", 4).lost == pytest.approx(tail, rel=0.05)


@pytest.mark.parametrize("shape", [(320, 320, 3, 3), (640, 320)])
def test_all_ranks_of_models_in_fp16_leave_nothing_out(shape):
    """The largest singular values and the smallest differ by so much that float32 cannot take one sum off another."""
    first = (random(*shape) * 0.03).half()
    second = (first.float() + random(*shape, seed=1) * 0.006).half()
    assert extract_lora({"a.weight": lambda: second.float() - first.float()}, 4096).lost == 0


@pytest.mark.parametrize(
    "settings", [MergeSettings(), MergeSettings(resize="energy"), MergeSettings(resize="sv_ratio", resize_to=20)]
)
@pytest.mark.parametrize("kind", ["LoRA", "convolution", "LoKr", "LoHa"])
@pytest.mark.parametrize("strength", [1.0, 0.37])
def test_a_file_and_its_negative_are_no_change(kind, settings, strength):
    files = {
        "LoRA": lora("a", 1, 8, (60, 50), 3.0),
        "convolution": lora("a", 1, 8, (16, 12, 3, 3), 3.0),
        "LoKr": {"a.lokr_w1": random(4, 5), "a.lokr_w2": random(6, 7)},
        "LoHa": {f"a.hada_w{n}_{f}": random(*s, seed=n) for n in (1, 2) for f, s in (("a", (20, 3)), ("b", (3, 30)))},
    }
    state = files[kind]
    made = merge_loras([LoraEntry("x", state, strength), LoraEntry("y", state, -strength)], 2, settings=settings)
    assert made.lost == 0 and all(not tensor.any() for key, tensor in made.state.items() if "up" in key)
    if "a.lora_up.weight" in state:  # of which products can be averaged
        assert average([state] * 2, [strength, -strength], ["x", "y"], "products", 2).lost == 0
