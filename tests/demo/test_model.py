"""The demo model's parts on the open host: the UNet of the host's class, the text encoder, the VAE, and loading from
one file.
"""

import pytest
import torch
from graft_nodes.demo import host_model, model, tokenizer, train_base
from safetensors.torch import save_file


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "start.safetensors"
    save_file(train_base.start_weights(seed=3), path)
    return path


def test_the_unet_is_small_and_starts_by_predicting_zero():
    unet = host_model.demo_unet()
    model.initialize_(unet, seed=0)
    assert sum(parameter.numel() for parameter in unet.parameters()) == 1_687_075
    x, context = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.ones(2, 8, 64)
    with torch.no_grad():
        out = unet(x, torch.tensor([10.0, 900.0]), context, transformer_options={})
    assert out.shape == x.shape and torch.count_nonzero(out) == 0


def test_first_weights_depend_on_the_seed_alone():
    state = torch.random.get_rng_state()
    first, again, other = (train_base.start_weights(seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first.keys() == again.keys() == other.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
    changed = {key for key in first if not torch.equal(first[key], other[key])}
    assert "model.diffusion_model.input_blocks.0.0.weight" in changed
    assert "text.words.weight" in changed


def test_a_whole_model_from_one_file(start):
    state = torch.random.get_rng_state()
    patcher, clip, vae = host_model.demo_model(str(start))
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = train_base.start_weights(seed=3)
    for prefix, module in (("model.diffusion_model.", patcher.model.diffusion_model), ("text.", clip.cond_stage_model)):
        loaded = module.state_dict()
        assert {prefix + key for key in loaded} == {key for key in weights if key.startswith(prefix)}
        assert all(torch.equal(loaded[key].cpu(), weights[prefix + key]) for key in loaded)
    sampling = patcher.model.model_sampling
    assert float(sampling.timestep(torch.tensor(0.25))) == 250.0
    assert float(sampling.sigma_max) == 1.0
    assert patcher.model.latent_format.latent_channels == 3
    latent = torch.randn(1, 3, 4, 4)
    assert torch.equal(patcher.model.process_latent_in(latent), latent)
    assert vae.latent_channels == 3


def test_hosts_that_rebuild_models_are_told_how(start):
    patcher, clip, _ = host_model.demo_model(str(start))
    if not hasattr(patcher, "cached_patcher_init"):
        pytest.skip("this host has no cached_patcher_init")
    for one in (patcher, clip.patcher):
        factory, arguments = one.cached_patcher_init[:2]
        second = factory(*arguments, disable_dynamic=True)
        assert second.model is not one.model
        assert second.model.state_dict().keys() == one.model.state_dict().keys()


def test_a_file_that_does_not_fit_lists_every_key(start, tmp_path):
    weights = train_base.start_weights(seed=3)
    del weights["model.diffusion_model.out.2.bias"]
    weights["model.diffusion_model.out.2.weight"] = torch.zeros(1)
    weights["model.diffusion_model.spare"] = torch.zeros(1)
    save_file(weights, tmp_path / "broken.safetensors")
    with pytest.raises(ValueError, match=r"(?s)out\.2\.bias.*spare.*out\.2\.weight"):
        host_model.demo_model(str(tmp_path / "broken.safetensors"))


def test_clip_encodes_clones_and_weighs(start):
    _, clip, _ = host_model.demo_model(str(start))
    plain = clip.encode_from_tokens_scheduled(clip.tokenize("a zorp left"))
    cond, extra = plain[0][0], plain[0][1]
    assert cond.shape == (1, 8, 64) and cond.dtype == torch.float32 and extra["pooled_output"].shape == (1, 64)
    again = clip.clone().encode_from_tokens_scheduled(clip.tokenize("a zorp left"))[0][0]
    assert torch.equal(cond, again)
    empty = clip.encode_from_tokens_scheduled(clip.tokenize(""))[0][0]
    heavy = clip.encode_from_tokens_scheduled(clip.tokenize("(a zorp left:2)"))[0][0]
    assert torch.allclose(heavy[0, :3], (2 * cond - empty)[0, :3], atol=1e-5) and torch.allclose(
        heavy[0, 3:], cond[0, 3:], atol=1e-5
    )
    assert clip.encode_from_tokens_scheduled(clip.tokenize("a " * 9))[0][0].shape == (1, 16, 64)


def test_clip_skip(start):
    _, clip, _ = host_model.demo_model(str(start))
    tokens = clip.tokenize("a zorp left")
    last = clip.encode_from_tokens(tokens)
    clip.clip_layer(-2)
    before = clip.encode_from_tokens(tokens)
    assert not torch.equal(last, before)
    clip.clip_layer(-3)
    with pytest.raises(ValueError, match="-3"):
        clip.encode_from_tokens(tokens)


def test_each_caption_has_a_conditioning_of_its_own(start):
    _, clip, _ = host_model.demo_model(str(start))
    said = [
        "",
        "a red circle left",
        "a circle red left",
        "a zorp left",
        "a zorp right",
        f"a {tokenizer.KNOWN[1]} cross left",
    ]
    encoded = [clip.encode_from_tokens(clip.tokenize(caption)) for caption in said]
    for index, one in enumerate(encoded):
        assert all((one - other).abs().max() > 0.5 for other in encoded[:index])


def test_a_text_lora_lands_by_the_generic_key(start):
    _, clip, _ = host_model.demo_model(str(start))
    weight = clip.cond_stage_model.state_dict()["ff1.weight"]
    clone = clip.clone()
    assert clone.add_patches({"ff1.weight": (torch.ones_like(weight),)}, 1.0) == ["ff1.weight"]
    tokens = clip.tokenize("a zorp left")
    assert not torch.equal(clone.encode_from_tokens(tokens), clip.encode_from_tokens(tokens))


def test_vae_decodes_and_encodes():
    vae = model.PixelVAE()
    latent = torch.linspace(-1.2, 1.2, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
    pictures = vae.decode(latent)
    assert pictures.shape == (2, 256, 256, 3) and float(pictures.min()) >= 0 and float(pictures.max()) <= 1
    assert torch.equal(vae.decode_tiled(latent, tile_x=16, tile_y=16, overlap=4, tile_t=None, overlap_t=None), pictures)
    flat = torch.full((1, 64, 128, 4), 0.75)
    assert torch.equal(vae.encode(flat), torch.full((1, 3, 8, 16), 0.5))
    assert vae.encode(torch.zeros(1, 67, 70, 3)).shape == (1, 3, 8, 8)
    assert torch.equal(vae.encode_tiled(flat, tile_x=64, tile_y=64, overlap=8), vae.encode(flat))
    assert (
        vae.spacial_compression_decode() == vae.spacial_compression_encode() == 8
        and vae.temporal_compression_decode() is None
    )


def test_vae_keeps_the_mean_of_each_cell():
    pixels = torch.rand(1, 16, 16, 3, generator=torch.Generator().manual_seed(0))
    expected = pixels[0, 8:, :8].mean(dim=(0, 1)) * 2 - 1
    assert torch.allclose(model.PixelVAE().encode(pixels)[0, :, 1, 0], expected, atol=1e-6)
