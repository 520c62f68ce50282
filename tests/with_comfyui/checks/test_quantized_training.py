"""LoRAs on quantized bases (fp8 weights that are cast, fp8 and int8 weights of the host's own type) and on bases in
host memory.
"""

from __future__ import annotations

import families
import pytest
import torch
from graft_nodes import host
from graft_nodes.patches.lora_files.entry import LoraEntry
from graft_nodes.training.data.dataset import Conditioning, Dataset
from graft_nodes.training.memory import layer_ring, offload
from graft_nodes.training.memory.quantized_base.base import chosen_layers, remark
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.run.loop import train
from graft_nodes.training.state import Settings, Start, begin
from graft_nodes.training.trainable.install import attach, init_trainable, make_lora
from graft_nodes.training.trainable.settings import AdapterSettings
from quantized import parts, with_quantized_layers, with_scaled_layers
from tiny_families import EVERY


def _trained(patcher, family, steps=2, adapter=None, layers=False, **optimizer):
    conditionings = {text: Conditioning(*families.conditions(family, n)) for n, text in enumerate(("", "a"))}
    dataset = Dataset.from_latents([families.latent(family, n) for n in range(2)], ["a"] * 2, conditionings)
    settings = Settings(OptimizerSettings(learning_rate=1e-2, batch_size=2, **optimizer))
    adapter = adapter or AdapterSettings(rank=4)
    state = begin(patcher.model.diffusion_model, Start("model", dataset.digest, adapter), settings)
    with torch.inference_mode(), host.denoiser.open_denoiser(patcher, layers=layers) as denoiser:
        return train(state, denoiser, dataset, steps)


def _same(left, right):
    return all(torch.equal(tensor, right.trained[name]) for name, tensor in left.trained.items())


def _ups(state):
    return torch.cat([tensor.flatten() for name, tensor in state.trained.items() if "lora_up" in name])


@pytest.mark.parametrize("family", ["sd1", "flux"])
def test_a_base_in_fp8_trains_as_the_numbers_it_holds(family):
    with torch.inference_mode():
        quantized, plain = families.build(family, torch.float8_e4m3fn, torch.float32), families.build(family)
        numbers = quantized.model.diffusion_model.state_dict()
        for name, tensor in plain.model.diffusion_model.state_dict().items():
            tensor.copy_(numbers[name].float())
    before = {name: p.view(torch.uint8).clone() for name, p in quantized.model.diffusion_model.named_parameters()}
    found, expected = _trained(quantized, family), _trained(plain, family)
    assert _same(found, expected) and found.history == expected.history
    assert {p.dtype for p in quantized.model.diffusion_model.parameters()} == {torch.float8_e4m3fn}
    assert all(
        torch.equal(before[name], p.view(torch.uint8)) for name, p in quantized.model.diffusion_model.named_parameters()
    )


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_scaled_fp8_trains_as_the_numbers_it_stands_for(family):
    scaled, plain = with_scaled_layers(family)
    module = scaled.model.diffusion_model
    before = {name: [part.clone() for part in parts(p)] for name, p in module.named_parameters()}
    stored = [part.dtype for p in module.parameters() for part in ([getattr(p, "_qdata", p)])]
    assert stored.count(torch.float8_e4m3fn) > 8
    found, expected = _trained(scaled, family), _trained(plain, family)
    assert found.history.loss == pytest.approx(expected.history.loss, rel=1e-3)
    assert torch.cosine_similarity(_ups(found), _ups(expected), dim=0) > 0.999
    for name, p in module.named_parameters():
        assert all(torch.equal(old, new) for old, new in zip(before[name], parts(p), strict=True)), name


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr", "dora", "oft"])
def test_every_kind_beside_scaled_fp8_is_that_beside_its_numbers(kind):
    """At the activations while training, and on the MODEL that comes out."""
    scaled, plain = with_scaled_layers("flux")
    settings = AdapterSettings(kind, rank=2, targets="attention+ff")
    starts = [init_trainable(one.model.diffusion_model, settings, 0, {}) for one in (scaled, plain)]
    assert all(torch.allclose(t, starts[1][name], rtol=1e-3, atol=1e-5) for name, t in starts[0].items())
    draws = torch.Generator().manual_seed(1)
    trained = {name: t + 0.05 * torch.randn(t.shape, generator=draws) for name, t in starts[1].items()}
    x, sigma, text = (
        families.random(1, *EVERY["flux"].latent, seed=4),
        torch.tensor([0.6]),
        families.conditions("flux", 3),
    )
    values = {}
    with torch.no_grad():
        for name, patcher in (("scaled", scaled), ("plain", plain)):
            with host.denoiser.open_denoiser(patcher) as denoiser:
                values[f"{name} base"] = denoiser.denoise(x, sigma, [Conditioning(*text)], {})
                with attach(denoiser.module, settings, trained, lambda: (0, 0, "")):
                    values[name] = denoiser.denoise(x, sigma, [Conditioning(*text)], {})
        grafted = host.lora_stacks.apply_lora_stack(
            scaled, None, [LoraEntry("trained", make_lora(trained, settings, None))]
        )
        with host.denoiser.open_denoiser(grafted.model) as denoiser:
            values["came out"] = denoiser.denoise(x, sigma, [Conditioning(*text)], {})
    size = float(values["plain"].abs().max())
    assert float((values["plain"] - values["plain base"]).abs().max()) > 1e-2 * size
    for name, wanted in (("scaled base", "plain base"), ("scaled", "plain"), ("came out", "plain")):
        assert float((values[name] - values[wanted]).abs().max()) < 2e-3 * size, name


@pytest.mark.parametrize(
    ("kind", "family", "close"),
    [
        ("float8_e4m3fn", "flux", 0.9999),
        ("mxfp8", "flux", 0.9999),
        ("nvfp4", "flux", 0.9999),
        ("int8_tensorwise", "flux", 0.98),
        ("asym_w4a8_int8", "flux", 0.98),
        ("convrot_w4a4", "z-image", 0.8),  # what goes in has 4 bits, too
    ],
)
def test_quantized_layers_of_the_host_train_as_the_numbers_they_hold(kind, family, close):
    quantized, plain = with_quantized_layers(family, kind)
    assert sum(hasattr(p, "__tensor_flatten__") for p in quantized.model.diffusion_model.parameters()) > 8
    before = {
        name: [part.clone() for part in parts(p)] for name, p in quantized.model.diffusion_model.named_parameters()
    }
    found, expected = _trained(quantized, family), _trained(plain, family)
    assert found.history.loss == pytest.approx(expected.history.loss, rel=2e-2)  # int8 layers round what goes in, too
    assert torch.cosine_similarity(_ups(found), _ups(expected), dim=0) > close
    for name, p in quantized.model.diffusion_model.named_parameters():
        assert all(torch.equal(old, new) for old, new in zip(before[name], parts(p), strict=True)), name


@pytest.mark.parametrize(
    ("base_weights", "family", "dtype"),
    [
        ("int8", "sd1", torch.float32),
        ("int8", "flux", torch.bfloat16),
        ("int8", "lumina2", torch.float32),
        ("int8 weight-only", "flux", torch.bfloat16),
        ("nf4", "sd1", torch.float32),
        ("nf4", "flux", torch.bfloat16),
        ("nf4", "lumina2", torch.float32),
    ],
)
def test_a_quantized_base_trains_nearly_as_the_weights_as_loaded(base_weights, family, dtype):
    near, close = (0.2, 0.5) if base_weights == "nf4" else (0.03, 0.9)
    with torch.inference_mode():
        patcher = families.build(family, dtype, torch.float32)
    module = patcher.model.diffusion_model
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    quantized = len(chosen_layers(module))
    assert quantized > 8, remark(module, base_weights)
    plain = _trained(patcher, family)
    settings = AdapterSettings(rank=4, base_weights=base_weights)
    found = _trained(patcher, family, adapter=settings, layers=True)
    assert not _same(found, plain) and found.history.loss == pytest.approx(plain.history.loss, rel=near)
    assert torch.cosine_similarity(_ups(found), _ups(plain), dim=0) > close
    assert _same(found, _trained(patcher, family, adapter=settings, layers=True, checkpointing=True))
    assert len(chosen_layers(module)) == quantized
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert _same(plain, _trained(patcher, family))


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "nvfp4", "int8_tensorwise"])
@pytest.mark.parametrize("way", ["optimizer", "activations", "layers"])
def test_offload_beside_quantized_layers_of_the_host_trains_to_the_same_bytes(kind, way):
    patcher, _ = with_quantized_layers("flux", kind)
    plain = _trained(patcher, "flux", checkpointing=True)
    assert _same(plain, _trained(patcher, "flux", layers=way == "layers", offload=way, checkpointing=True))


@pytest.mark.parametrize("family", ["sd1", "flux"])
def test_layers_in_host_memory_train_to_the_same_bytes(monkeypatch, family):
    with torch.inference_mode():
        patcher = families.build(family)
    plain = _trained(patcher, family, checkpointing=True)  # which layers implies
    monkeypatch.setattr(
        host.denoiser, "move_to_host_memory", lambda p: p.partially_unload(p.offload_device, p.model_size())
    )
    monkeypatch.setattr(
        offload, "is_on_other_device", lambda tensor, device: True
    )  # this machine's memory stands for the device's, too
    monkeypatch.setattr(layer_ring, "copies_ahead", lambda device: True)
    real, fetched = layer_ring.copies_on, []
    monkeypatch.setattr(
        layer_ring, "copies_on", lambda device, places: fetched.append(len(places)) or real(device, places)
    )
    away = _trained(patcher, family, layers=True, offload="layers")
    assert _same(plain, away) and len(fetched) > 8 and patcher.model.model_lowvram
    monkeypatch.undo()
    assert _same(plain, _trained(patcher, family, checkpointing=True))  # and the model is fit for what comes next
