"""Token downsampling of a UNet together with ComfyUI's own patches: HyperTile, Deep Shrink, PAG, SAG, EasyCache, ToMe,
a ControlNet.
"""

import importlib

import comfy.sample
import pytest
import torch
from graft_nodes import host as wall
from graft_nodes.patches.token_downsampling.tokens import ToDoSettings

from ...nodes import conftest as node_models

UNET = dict(mult=(1, 2, 2), depth=(1, 1, 1))


@pytest.fixture
def small():
    """The node tests' small models."""
    return node_models


def todo(patcher, factors="2 2"):
    return wall.token_downsampling.apply_todo(patcher, ToDoSettings(depth_factors=factors))[0]


def node(module, name, *arguments):
    """The MODEL that a core node gives."""
    result = getattr(importlib.import_module(f"comfy_extras.{module}"), name).execute(*arguments)
    return result[0] if isinstance(result, tuple) else result.args[0]


def watched(patcher):
    """A clone whose attention notes (queries, keys) of every self-attention call."""
    clone, seen = patcher.clone(), []

    def note(kernel, q, k, v, *args, **kwargs):
        if k.shape[1] != 5:
            seen.append((q.shape[0], q.shape[1], k.shape[1]))
        return kernel(q, k, v, *args, **kwargs)

    clone.model_options["transformer_options"]["optimized_attention_override"] = note
    return clone, seen


def sample(patcher, size=(16, 16), steps=3, positive=None):
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(1, 4, *size, generator=generator)
    one, two = ([torch.randn(1, 5, 24, generator=generator), {}] for _ in range(2))
    with torch.inference_mode():
        found = comfy.sample.sample(
            patcher,
            noise,
            steps,
            4.0,
            "euler",
            "normal",
            [one] if positive is None else positive(one),
            [two],
            torch.zeros_like(noise),
            seed=1,
        )
    assert torch.isfinite(found).all()
    return found


@pytest.mark.parametrize("first", ["todo", "other"])
def test_hypertile(small, first):
    patcher = small.build_unet(**UNET)

    def hypertile(model):
        return node("nodes_hypertile", "HyperTile", model, 64, 2, 0, False)

    both, seen = watched(hypertile(todo(patcher)) if first == "todo" else todo(hypertile(patcher)))
    found = sample(both, (16, 16))
    assert (2, 64, 16) in seen, "the second level, which HyperTile leaves alone, is thinned"
    assert (8, 64, 64) in seen and (8, 64, 256) not in seen, (
        "four tiles of queries, whose keys are four thinned strips of four rows"
    )

    def by_hand(q, k, v, extra):
        side = {256: 16, 64: 8}.get(k.shape[1])
        if side is None:
            return q, k, v
        strips = q.shape[0] // k.shape[0]
        image = k.unflatten(1, (strips, side // strips, side)).flatten(0, 1).permute(0, 3, 1, 2)
        small = torch.nn.functional.interpolate(image, size=(side // strips // 2, side // 2), mode="nearest-exact")
        small = small.flatten(2).transpose(1, 2).reshape(k.shape[0], -1, k.shape[2])
        return q, small, small

    reference = hypertile(patcher)
    reference.set_model_attn1_patch(by_hand)
    assert torch.equal(found, sample(reference, (16, 16))) and not torch.equal(
        found, sample(hypertile(patcher), (16, 16))
    )


@pytest.mark.parametrize("first", ["todo", "other"])
def test_deep_shrink(small, first):
    patcher = small.build_unet(**UNET)

    def shrink(model):
        return node(
            "nodes_model_downscale", "PatchModelAddDownscale", model, 1, 2.0, 0.0, 0.6, True, "bicubic", "bicubic"
        )

    both, seen = watched(shrink(todo(patcher)) if first == "todo" else todo(shrink(patcher)))
    sample(both, (17, 13))
    pairs = {(queries, keys) for _, queries, keys in seen}
    assert (17 * 13, 8 * 6) in pairs, "at full size once Deep Shrink has ended"
    assert len({queries for queries, _ in pairs}) > 3 and all(
        keys < queries or queries <= 20 for queries, keys in pairs
    ), pairs


@pytest.mark.parametrize(
    ("module", "name", "inputs"),
    [("nodes_pag", "PerturbedAttentionGuidance", (3.0,)), ("nodes_sag", "SelfAttentionGuidance", (0.5, 2.0))],
)
def test_guidance_by_replaced_attention(small, module, name, inputs):
    patcher = small.build_unet(**UNET)

    def guided(model):
        return node(module, name, model, *inputs)

    one, seen = watched(guided(todo(patcher, "2 2 2")))
    found = sample(one)
    assert {keys for _, queries, keys in seen if queries == 256} == {64}
    assert torch.equal(found, sample(todo(guided(patcher), "2 2 2"))), "whatever the order of the nodes"
    assert not torch.equal(found, sample(guided(patcher))) and not torch.equal(found, sample(todo(patcher, "2 2 2")))


@pytest.mark.parametrize("first", ["todo", "other"])
@pytest.mark.parametrize("name", ["EasyCacheNode", "LazyCacheNode"])
def test_easycache(small, first, name):
    patcher = small.build_unet(**UNET)

    def cached(model):
        return node("nodes_easycache", name, model, 10.0, 0.15, 0.95, False)

    both, seen = watched(cached(todo(patcher)) if first == "todo" else todo(cached(patcher)))
    sample(both, steps=8)
    alone, every = watched(todo(patcher))
    sample(alone, steps=8)
    assert 0 < len(seen) < len(every), "some steps come from the cache, the others are computed"
    assert {keys for _, queries, keys in seen if queries == 256} == {64}


@pytest.mark.parametrize("refuses", [False, True])
def test_sage_attention(small, monkeypatch, caplog, refuses):
    """ComfyUI's own function around it, with a stand-in for the kernel: with fewer keys, and refusing them as some
    versions do.
    """
    import comfy.ldm.modules.attention as attention

    pairs = []

    def sageattn(q, k, v, attn_mask=None, is_causal=False, tensor_layout="HND", sm_scale=None, **_):
        q, k, v = (tokens.transpose(1, 2) if tensor_layout == "NHD" else tokens for tokens in (q, k, v))
        if refuses and q.shape[2] != k.shape[2]:
            raise AssertionError("qo_len and kv_len differ")
        pairs.append((q.shape[2], k.shape[2]))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=sm_scale)
        return found.transpose(1, 2) if tensor_layout == "NHD" else found

    patcher = small.build_unet(**UNET)
    plain, wanted = small.forward(patcher), small.forward(todo(patcher))
    monkeypatch.setattr(attention, "sageattn", sageattn, raising=False)
    monkeypatch.setattr(attention, "SAGE_ATTENTION_SUPPORTS_MASK", True, raising=False)
    monkeypatch.setattr(attention, "optimized_attention", attention.attention_sage)
    patched, _, notes = wall.token_downsampling.apply_todo(patcher, ToDoSettings(depth_factors="2 2"))
    found = small.forward(patched)
    assert (found - wanted).abs().max() < 1e-3 < (found - plain).abs().max()
    assert any("SageAttention is on: some of its versions refuse fewer keys" in note for note in notes)
    assert ((64, 16) in pairs) is not refuses and ("qo_len and kv_len differ" in caplog.text) is refuses


VIDEO = {
    "in_channels": 8,
    "adm_in_channels": 768,
    "num_classes": "sequential",
    "use_temporal_attention": True,
    "use_temporal_resblock": True,
    "extra_ff_mix_layer": True,
    "video_kernel_size": [3, 1, 1],
    "merge_strategy": "learned_with_images",
    "use_spatial_context": True,
    "merge_factor": 0.0,
    "disable_temporal_crossattention": False,
    "use_linear_in_transformer": True,
}


def test_attention_over_a_videos_frames_is_nobodys_to_thin(small, caplog):
    """Stable Video Diffusion's blocks attend to the picture, then, place by place, to its frames."""
    import comfy.model_base

    class Video(comfy.model_base.SVD_img2vid):
        def __init__(self, config, *arguments, device=None):
            config.unet_config |= VIDEO
            config.sampling_settings = {"sigma_max": 700.0, "sigma_min": 0.002}
            super().__init__(config, device=device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.model_base, "BaseModel", Video)
        patcher = small.build_unet()
    patched, seen = watched(todo(patcher))
    frames, generator = 6, torch.Generator().manual_seed(1)
    x, concat, y = (torch.randn(frames, *shape, generator=generator) for shape in ((4, 8, 8), (4, 8, 8), (768,)))
    context = torch.randn(1, 5, 24, generator=generator)
    options = {**patched.model_options["transformer_options"], "sigmas": torch.ones(1)}
    with torch.inference_mode():
        patcher.model.apply_model(
            x,
            torch.ones(frames),
            c_concat=concat,
            c_crossattn=context.expand(frames, -1, -1),
            y=y,
            num_video_frames=frames,
            image_only_indicator=torch.zeros(1, frames),
            time_context=context,
            transformer_options=options,
        )
    assert set(seen) == {(frames, 64, 16), (frames, 16, 4), (64, frames, frames), (16, frames, frames)}
    assert not [record for record in caplog.records if "Apply ToDo" in record.getMessage()]


@pytest.mark.parametrize("first", ["todo", "other"])
def test_core_tome(small, first):
    """It merges half of the queries at the finest level, and leaves keys and values to be thinned."""
    patcher = small.build_unet(**UNET)

    def tome(model):
        return node("nodes_tomesd", "TomePatchModel", model, 0.5)

    patched, seen = watched(tome(todo(patcher)) if first == "todo" else todo(tome(patcher)))
    sample(patched)
    assert {(queries, keys) for _, queries, keys in seen} == {(128, 64), (64, 16), (16, 16)}


def test_a_controlnet_is_not_thinned(small):
    import comfy.cldm.cldm
    import comfy.controlnet
    import comfy.ops

    patcher = small.build_unet(**UNET)
    config = dict(patcher.model.model_config.unet_config)
    for key in ("out_channels", "transformer_depth_output", "use_temporal_attention"):
        config.pop(key)
    control = comfy.cldm.cldm.ControlNet(**config, hint_channels=3, operations=comfy.ops.manual_cast)
    generator = torch.Generator().manual_seed(7)
    for parameter in control.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    hint = torch.rand(1, 3, 128, 128, generator=generator)

    def controlled(one):
        net = comfy.controlnet.ControlNet(
            control, load_device=torch.device("cpu"), manual_cast_dtype=None, compression_ratio=8
        )
        return [[one[0], {"control": net.set_cond_hint(hint, 1.0), "control_apply_to_uncond": True}]]

    lengths, keys = [], control.input_blocks[1][1].transformer_blocks[0].attn1.to_k
    keys.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    plain, thinned = sample(patcher, positive=controlled), sample(todo(patcher), positive=controlled)
    assert set(lengths) == {256}
    assert not torch.equal(plain, thinned) and not torch.equal(sample(todo(patcher)), thinned)
    assert not any("graft" in str(key) for key in vars(control))
