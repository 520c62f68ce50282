"""The UNet against attention and embeddings written out by hand, and the contracts of its patches."""

import math

import pytest
import torch
import torch.nn.functional as F
from comfy.ldm.modules.attention import CrossAttention, SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from comfy.ldm.modules.diffusionmodules.util import timestep_embedding

CONFIG = {
    "image_size": 32,
    "in_channels": 3,
    "out_channels": 3,
    "model_channels": 32,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [0, 2],
    "transformer_depth_output": [0, 0, 1, 1],
    "transformer_depth_middle": 1,
    "context_dim": 16,
    "num_heads": 4,
    "use_spatial_transformer": True,
    "use_linear_in_transformer": True,
    "legacy": False,
}


def fill(module, seed=0):
    """Random weights for a module, whose own are uninitialized."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=g)
                * (parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.3)
            )
    return module.eval()


def run(unet, x, options=None, **more):
    timesteps, context = torch.full((len(x),), 500.0), torch.ones(len(x), 5, 16)
    with torch.no_grad():
        return unet(x, timesteps, context, transformer_options={} if options is None else options, **more)


@pytest.fixture
def unet():
    return fill(UNetModel(**CONFIG))


@pytest.fixture
def x():
    return torch.randn(2, 3, 13, 11, generator=torch.Generator().manual_seed(1))


def test_timestep_embedding():
    out = timestep_embedding(torch.tensor([0.0, 3.5]), 6)
    angles = [3.5 * frequency for frequency in (1, 10000 ** (-1 / 3), 10000 ** (-2 / 3))]
    torch.testing.assert_close(out[1], torch.tensor([*map(math.cos, angles), *map(math.sin, angles)]))
    assert out[0].tolist() == [1, 1, 1, 0, 0, 0]


def test_cross_attention_by_hand():
    attention = fill(CrossAttention(8, context_dim=6, heads=2, dim_head=5))
    g = torch.Generator().manual_seed(2)
    x, context = torch.randn(3, 7, 8, generator=g), torch.randn(3, 4, 6, generator=g)
    q, k, v = (x @ attention.to_q.weight.T, context @ attention.to_k.weight.T, context @ attention.to_v.weight.T)
    heads = []
    for h in range(2):
        part = slice(5 * h, 5 * h + 5)
        weights = torch.softmax(q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(5), dim=-1)
        heads.append(weights @ v[..., part])
    expected = F.linear(torch.cat(heads, -1), attention.to_out[0].weight, attention.to_out[0].bias)
    torch.testing.assert_close(attention(x, context=context), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("linear", [False, True])
def test_spatial_transformer_by_hand(linear):
    block = fill(SpatialTransformer(32, 4, 8, depth=1, context_dim=6, use_linear=linear))
    x, context = torch.randn(2, 32, 3, 5, generator=torch.Generator().manual_seed(3)), torch.ones(2, 4, 6)
    inner = block.transformer_blocks[0]

    def project(layer, tokens):
        return tokens @ layer.weight.flatten(1).T + layer.bias

    tokens = project(block.proj_in, block.norm(x).flatten(2).transpose(1, 2))
    tokens = tokens + inner.attn1(inner.norm1(tokens))
    tokens = tokens + inner.attn2(inner.norm2(tokens), context=context)
    hidden, gate = project(inner.ff.net[0].proj, inner.norm3(tokens)).chunk(2, -1)
    tokens = tokens + project(inner.ff.net[2], hidden * F.gelu(gate))
    expected = x + project(block.proj_out, tokens).transpose(1, 2).reshape(x.shape)
    options = {}
    torch.testing.assert_close(block(x, context=context, transformer_options=options), expected, rtol=1e-5, atol=1e-5)
    assert options["activations_shape"] == [2, 32, 3, 5] and options["block_index"] == 0


def test_key_layout(unet):
    keys = set(unet.state_dict())
    assert {key.split(".")[0] for key in keys} == {"time_embed", "input_blocks", "middle_block", "output_blocks", "out"}
    expected = {
        "input_blocks.0.0.weight": (32, 3, 3, 3),
        "input_blocks.1.0.in_layers.2.weight": (32, 32, 3, 3),
        "input_blocks.2.0.op.bias": (32,),
        "input_blocks.3.0.skip_connection.weight": (64, 32, 1, 1),
        "input_blocks.3.1.transformer_blocks.1.attn2.to_k.weight": (64, 16),
        "middle_block.1.proj_in.weight": (64, 64),
        "middle_block.2.emb_layers.1.weight": (64, 128),
        "output_blocks.0.1.transformer_blocks.0.ff.net.0.proj.weight": (512, 64),
        "output_blocks.1.2.conv.weight": (64, 64, 3, 3),
        "out.2.weight": (3, 32, 3, 3),
    }
    assert {key: tuple(unet.state_dict()[key].shape) for key in expected} == expected


def test_conditional_model_needs_y(x):
    unet = fill(UNetModel(**CONFIG, num_classes="sequential", adm_in_channels=8))
    assert "label_emb.0.2.bias" in unet.state_dict()
    assert run(unet, x, y=torch.ones(2, 8)).shape == x.shape
    with pytest.raises((ValueError, AssertionError), match="class-conditional"):
        run(unet, x)


def test_what_attention_patches_are_told(unet, x):
    seen = []

    def patch(q, context, value, extra):
        assert context.shape == q.shape and value.shape == q.shape
        seen.append(
            (extra["block"], extra["block_index"], extra["transformer_index"], extra["activations_shape"], q.shape[1])
        )
        assert (
            extra["original_shape"] == [2, 3, 13, 11]
            and (extra["n_heads"], extra["dim_head"]) == (4, 16)
            and extra["mine"] == 1
        )
        assert "patches" not in extra
        return q, context, value

    plain = run(unet, x)
    same = run(unet, x, {"patches": {"attn1_patch": [patch]}, "mine": 1})
    assert torch.equal(plain, same)
    shape = [2, 64, 7, 6]  # halved and rounded up
    blocks = [("input", 3, 0, 0), ("input", 3, 1, 0), ("middle", 0, 0, 1), ("output", 0, 0, 2), ("output", 1, 0, 3)]
    assert seen == [((name, number), index, transformer, shape, 42) for name, number, index, transformer in blocks]


def test_attention_patches_chain_and_change_keys(unet, x):
    def half(q, context, value, extra):
        return q, context[:, ::2], value[:, ::2]

    def check(q, context, value, extra):
        assert context.shape[1] == 21
        return q, context, value

    assert not torch.equal(run(unet, x, {"patches": {"attn1_patch": [half, check]}}), run(unet, x))


def test_replacement_and_override(unet, x):
    calls = []

    def replace(q, k, v, extra):
        calls.append("replace")
        parts = [t.reshape(*t.shape[:2], 4, 16).transpose(1, 2) for t in (q, k, v)]
        return F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)

    def override(function, *args, **kwargs):
        calls.append("override")
        assert kwargs["transformer_options"]["block"][0] in ("input", "middle", "output")
        return function(*args, **kwargs)

    plain = run(unet, x)
    options = {
        "patches_replace": {"attn1": {("middle", 0): replace, ("input", 3, 1): replace}},
        "optimized_attention_override": override,
    }
    torch.testing.assert_close(run(unet, x, options), plain, rtol=1e-4, atol=1e-5)
    assert (
        calls.count("replace") == 2 and calls.count("override") == 8
    )  # five blocks with two attentions each, less the two replaced


def test_block_patches_and_control(unet, x):
    order = []

    def note(name):
        def patch(h, *rest):
            order.append(name)
            return (h, rest[0]) if name == "output" else h

        return patch

    patches = {
        "input_block_patch": [note("input")],
        "input_block_patch_after_skip": [note("skip")],
        "output_block_patch": [note("output")],
        "emb_patch": [note("emb")],
        "middle_patch": [note("middle")],
    }
    assert torch.equal(run(unet, x, {"patches": patches}), run(unet, x))
    assert order == [
        "emb",
        *["input", "skip"] * 3,
        "middle",
        "middle",
        "input",
        "skip",
        "middle",
        "output",
        "middle",
        "output",
        "middle",
        "output",
        "output",
    ]
    zeros = {"middle": [torch.zeros(2, 64, 7, 6)], "output": [torch.zeros(2, 64, 7, 6)]}
    assert torch.equal(run(unet, x, control=zeros), run(unet, x))
    ones = {"middle": [torch.ones(2, 64, 7, 6)]}
    assert not torch.equal(run(unet, x, control=ones), run(unet, x))
    assert ones == {"middle": []}


def test_gradients_reach_input_and_weights(unet, x):
    unet.requires_grad_(True)
    x.requires_grad_(True)
    unet(x, torch.full((2,), 10.0), torch.ones(2, 5, 16), transformer_options={}).square().mean().backward()
    assert x.grad.abs().max() > 0
    assert [name for name, parameter in unet.named_parameters() if parameter.grad is None] == []


def test_wrapper_around_the_diffusion_model(unet, x):
    def wrapper(executor, *args, **kwargs):
        assert executor.class_obj is unet
        return executor(*args, **kwargs) + 1

    options = {"wrappers": {"diffusion_model": {"key": [wrapper, wrapper]}}}
    torch.testing.assert_close(run(unet, x, options), run(unet, x) + 2)
