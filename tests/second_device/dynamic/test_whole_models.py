"""Training with ComfyUI's dynamic VRAM: on a whole copy of the model, read once, of the types that the model computes
with.
"""

import gc
import weakref

import comfy.model_management as management
import pytest
import torch
from graft_nodes import host as wall
from graft_nodes.host import whole_models
from graft_nodes.host.text_encoder_gradients import make_differentiable
from graft_nodes.training.data.dataset import Conditioning
from graft_nodes.training.recipes.facts import facts_of

from ...model_device import CPU, LOAD
from ...nodes import conftest as node_models


@pytest.fixture(autouse=True)
def unloaded():
    yield
    management.unload_all_models()


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(LOAD)


def gradients(denoiser):
    """The gradient of what a UNet predicts with respect to its noisy latents."""
    x = random(2, 4, 8, 8).requires_grad_()
    with torch.inference_mode(False), torch.enable_grad():
        conditionings = [Conditioning(random(1, 5, 24, seed=1))] * 2
        out = denoiser.denoise(x, torch.ones(2, device=LOAD), conditionings, {})
        out.square().sum().backward()
    return x.grad.cpu()


def paged_weights(module):
    return [name for name, part in module.named_modules() if hasattr(part, "_v")]


def test_pages_leave_so_that_gradients_cannot_go_through_them():
    """What the test bed is for: sampling is right, and a backward pass is not."""
    model = node_models.build_unet()
    expected = node_models.forward(node_models.build_unet(disable_dynamic=True))
    assert model.is_dynamic() and torch.allclose(node_models.forward(model), expected, atol=1e-6)
    node_models.load(model)
    assert paged_weights(model.model)
    with torch.inference_mode(False):
        layer = next(part for part in model.model.modules() if hasattr(part, "_v") and part.weight.ndim == 2)
        x = torch.ones(1, layer.weight.shape[1], device=LOAD, requires_grad=True)
        layer(x).sum().backward()
    assert x.grad.isnan().all()


def test_gradients_are_those_of_a_whole_load():
    with wall.denoiser.open_denoiser(node_models.build_unet(disable_dynamic=True)) as denoiser:
        assert not paged_weights(denoiser.module)
        expected = gradients(denoiser)
    with wall.denoiser.open_denoiser(node_models.build_unet()) as denoiser:
        assert not paged_weights(denoiser.module)
        assert {weight.device for weight in denoiser.module.parameters()} == {LOAD}
        assert torch.equal(gradients(denoiser), expected) and expected.abs().max() > 0


def test_the_text_encoder_that_is_trained_is_the_one_that_is_loaded(host):
    model, clip, _ = host.call("GraftDemo")
    assert clip.patcher.is_dynamic() and clip.patcher.load_device == LOAD
    with wall.denoiser.open_denoiser(model, clip=clip) as denoiser:
        encoder = denoiser.encode.clip
        assert encoder.patcher.model is encoder.cond_stage_model is denoiser.text_encoder
        assert not paged_weights(denoiser.text_encoder)
        assert {weight.device for weight in denoiser.text_encoder.parameters()} == {LOAD}
        paged = encoder_gradients(denoiser)
    assert clip.cond_stage_model is clip.patcher.model, "the CLIP that came in is as it was"
    parts, (path,) = host.module("demo.host_model"), model.cached_patcher_init[1]
    whole = parts.demo_patcher(path, disable_dynamic=True), parts.demo_clip(path, disable_dynamic=True)
    with wall.denoiser.open_denoiser(whole[0], clip=whole[1]) as denoiser:
        expected = encoder_gradients(denoiser)
    assert expected.keys() == paged.keys()
    for name, gradient in expected.items():
        assert torch.equal(paged[name], gradient) and gradient.isfinite().all(), name


def encoder_gradients(denoiser):
    """The gradients of every weight of the text encoder for one caption."""
    with make_differentiable(denoiser.encode):
        weights = dict(denoiser.text_encoder.named_parameters())
        for weight in weights.values():
            weight.requires_grad_()
        (found,) = denoiser.encode(["a red square left"], [Conditioning(torch.zeros(1, 1, 1))])
        found.context.square().sum().backward()
        gradients = {name: weight.grad.cpu() for name, weight in weights.items() if weight.grad is not None}
        for weight in weights.values():
            weight.requires_grad_(False).grad = None
    assert len(gradients) > 1
    return gradients


@pytest.mark.parametrize(
    ("file", "computes"),
    [
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float32, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float32),
    ],
)
def test_weights_have_the_type_that_the_model_was_loaded_with(file, computes):
    """Not that of its file, which lazy layers would keep."""
    model = unet_of(file, computes)
    assert {weight.dtype for weight in model.model.diffusion_model.parameters()} == {file}
    whole = whole_models.whole_model(model)
    assert {weight.dtype for weight in whole.model.diffusion_model.parameters()} == {computes}
    count = sum(weight.numel() for weight in whole.model.parameters())
    sampling = sum(buffer.nbytes for buffer in whole.model.model_sampling.buffers())
    assert whole.model_size() == count * computes.itemsize + sampling
    for name, weight in whole.model.named_parameters():
        assert torch.equal(weight.float(), model.model.get_parameter(name).to(computes).float()), name


def unet_of(file, computes):
    """A UNet whose file has one type, loaded as another."""
    return node_models.build_unet(computes, file=file)


def test_the_file_is_read_once_for_all_train_steps():
    model, reads = node_models.build_unet(), []
    load, given = model.cached_patcher_init

    def counted(*given, **options):
        reads.append(given)
        return load(*given, **options)

    model.cached_patcher_init = counted, given
    for _ in range(3):
        with wall.denoiser.open_denoiser(model) as denoiser:
            network = denoiser.module
        management.unload_all_models()
        assert {weight.device for weight in network.parameters()} == {CPU}, "it waits in host memory"
    with wall.denoiser.open_denoiser(model.clone(), terminal=True) as denoiser:
        assert denoiser.module is network
    assert len(reads) == 1


def test_the_copy_ends_with_the_model():
    model = node_models.build_unet()
    with wall.denoiser.open_denoiser(model) as denoiser:
        network = weakref.ref(denoiser.module)
    management.unload_all_models()
    del denoiser
    gc.collect()
    assert network() is not None
    del model
    gc.collect()
    assert network() is None


def test_the_copy_carries_the_patches_of_each_model(host):
    model = node_models.build_unet()
    with wall.denoiser.open_denoiser(model) as denoiser:
        plain = gradients(denoiser)
    patched = host.call("LoRAStackPatch", model=model, lora_model=node_models.build_lora(model))[0]
    with wall.denoiser.open_denoiser(patched) as denoiser:
        changed = gradients(denoiser)
    with wall.denoiser.open_denoiser(model) as denoiser:
        assert torch.equal(gradients(denoiser), plain)
    assert not torch.allclose(changed, plain, rtol=1e-2)
    whole = node_models.build_unet(disable_dynamic=True)
    whole = host.call("LoRAStackPatch", model=whole, lora_model=node_models.build_lora(whole), mode="bypass")[0]
    with wall.denoiser.open_denoiser(whole) as denoiser:
        assert torch.allclose(gradients(denoiser), changed, rtol=1e-4, atol=1e-6)


def test_a_model_that_cannot_be_loaded_again_is_refused_with_what_to_do():
    model = node_models.build_unet()
    model.cached_patcher_init = None
    with (
        pytest.raises(ValueError, match=r"BaseModel.*dynamic VRAM.*Load Checkpoint.*--disable-dynamic-vram"),
        wall.denoiser.open_denoiser(model),
    ):
        pass


def test_memory_is_counted_in_the_types_of_training():
    """Not in those of the file, of which the copy keeps nothing."""
    model = unet_of(torch.float32, torch.bfloat16)
    loaded = node_models.build_unet(torch.bfloat16, disable_dynamic=True)
    before = {name: id(weight) for name, weight in model.model.named_parameters()}
    with whole_models.set_types(model):
        found = facts_of(model.model.diffusion_model, None, "eps")
    assert found == facts_of(loaded.model.diffusion_model, None, "eps")
    assert {name: id(weight) for name, weight in model.model.named_parameters()} == before


def test_a_stack_on_a_paged_model_samples_as_a_merged_one_and_the_report_says_where_it_is(host):
    model, whole = node_models.build_unet(), node_models.build_unet(disable_dynamic=True)
    lora = node_models.build_lora(whole)
    patched, _, report = host.call("LoRAStackPatch", model=model, lora_model=lora)
    assert "at the activations because ComfyUI moves the weights in and out of VRAM (dynamic VRAM)" in report
    merged, _, on_whole = host.call("LoRAStackPatch", model=whole, lora_model=lora)
    assert "dynamic VRAM" not in on_whole and " 0 weights merged" not in on_whole
    expected = node_models.forward(merged)
    assert torch.allclose(node_models.forward(patched), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    assert not torch.allclose(node_models.forward(model), expected, atol=1e-3)
