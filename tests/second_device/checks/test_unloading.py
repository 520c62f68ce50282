"""While a model trains, no other model is on its device."""

import comfy.model_management as management
import comfy.model_patcher
import torch
from graft_nodes import host as wall
from graft_nodes.tests.second_device.device import DEVICE, meter


def loaded():
    return [entry.real_model() for entry in management.current_loaded_models if entry.device.type == DEVICE.type]


def test_another_model_leaves_the_device_and_comes_back_as_it_was(host):
    model = host.call("GraftDemo")[0]
    layer = torch.nn.Linear(4, 4)
    weight = layer.weight.detach().clone()
    other = comfy.model_patcher.ModelPatcher(layer, load_device=DEVICE, offload_device=torch.device("cpu"))
    management.load_models_gpu([other])
    assert layer in loaded() and layer.weight.device.type == DEVICE.type
    with wall.denoiser.open_denoiser(model):
        assert loaded() == [model.model]
        assert layer.weight.device.type == "cpu" and layer.weight.equal(weight)
    management.load_models_gpu([other])
    assert layer.weight.device.type == DEVICE.type and layer.weight.cpu().equal(weight)


def test_layers_in_host_memory_are_loaded_there(host):
    model = host.call("GraftDemo")[0]
    loads_whole = "vram_state" not in vars(management)  # the embedded host
    meter.clear()
    with wall.denoiser.open_denoiser(model, layers=True):
        places = {parameter.device.type for parameter in model.model.diffusion_model.parameters()}
        assert places == ({DEVICE.type} if loads_whole else {"cpu"})
        assert bool(meter.uploaded) == loads_whole and meter.downloaded == 0


def test_a_previews_decoder_leaves_the_device_when_it_is_done(host):
    model = host.call("GraftDemo")[0]
    decoder, beside = (
        comfy.model_patcher.ModelPatcher(torch.nn.Linear(4, 4), load_device=DEVICE, offload_device=torch.device("cpu"))
        for _ in range(2)
    )

    class Vae:
        patcher = decoder

        def decode(self, latents):
            management.load_models_gpu([decoder])
            assert decoder.model in loaded()
            return torch.zeros(1, 8, 8, 3)

    with wall.denoiser.open_denoiser(model) as denoiser:
        management.load_models_gpu([beside])  # as a text encoder that is trained too
        wall.previews.decode(Vae(), torch.zeros(1, 4, 1, 1), denoiser.patcher)
        assert set(loaded()) == {model.model, beside.model} and beside.model.weight.device.type == DEVICE.type
        assert decoder.model.weight.device.type == "cpu"
