"""LoRAs on quantised bases (fp8 weights that are cast, fp8 and int8 weights of the host's own type) and on bases in host memory."""

from __future__ import annotations

import json

import families
import pytest
import torch
from graft_nodes import host
from graft_nodes.training import offload
from graft_nodes.training.adapters import AdapterSettings
from graft_nodes.training.dataset import Conditioning, Dataset
from graft_nodes.training.loop import train
from graft_nodes.training.optimizer import OptimizerSettings
from graft_nodes.training.state import Settings, Start, begin


def _trained(patcher, family, steps=2, **optimizer):
    conditionings = {text: Conditioning(*families.conditions(family, n)) for n, text in enumerate(("", "a"))}
    dataset = Dataset.of([families.latent(family, n) for n in range(2)], ["a"] * 2, conditionings)
    settings = Settings(OptimizerSettings(learning_rate=1e-2, batch_size=2, **optimizer))
    state = begin(patcher.model.diffusion_model, Start("model", dataset.digest, AdapterSettings(rank=4)), settings)
    with torch.inference_mode(), host.denoiser.denoiser(patcher) as denoiser:
        return train(state, denoiser, dataset, steps)


def _same(left, right):
    return all(torch.equal(tensor, right.trained[name]) for name, tensor in left.trained.items())


def _ups(state):
    return torch.cat([tensor.flatten() for name, tensor in state.trained.items() if "lora_up" in name])


@pytest.mark.parametrize("family", ["sd1", "flux"])
def test_a_base_in_fp8_trains_as_the_numbers_it_holds(family):
    with torch.inference_mode():
        quantised, plain = families.build(family, torch.float8_e4m3fn, torch.float32), families.build(family)
        numbers = quantised.model.diffusion_model.state_dict()
        for name, tensor in plain.model.diffusion_model.state_dict().items():
            tensor.copy_(numbers[name].float())
    before = {name: p.view(torch.uint8).clone() for name, p in quantised.model.diffusion_model.named_parameters()}
    found, expected = _trained(quantised, family), _trained(plain, family)
    assert _same(found, expected) and found.history == expected.history
    assert {p.dtype for p in quantised.model.diffusion_model.parameters()} == {torch.float8_e4m3fn}
    assert all(torch.equal(before[name], p.view(torch.uint8)) for name, p in quantised.model.diffusion_model.named_parameters())


def _with_quantised_layers(family, kind):
    """(a model whose layers are of the host's quantised type, the same numbers in float32)."""
    quant = pytest.importorskip("comfy.quant_ops")
    if kind not in getattr(quant, "QUANT_ALGOS", {}) or not hasattr(quant.QuantizedTensor, "__tensor_flatten__"):
        pytest.skip(f"this ComfyUI has no {kind}")
    import comfy.model_patcher
    import comfy.supported_models

    own, layout = families.FAMILIES[family], quant.QUANT_ALGOS[kind]["comfy_tensor_layout"]
    with torch.inference_mode():
        plain = families.build(family)
        config = getattr(comfy.supported_models, own.supported)(families._accepted(dict(own.config)))
        config.set_inference_dtype(torch.float32, None)
        config.quant_config = {"mixed_ops": True}
        model = config.get_model(dict(own.weights), "", device=None)
        modules, weights = dict(plain.model.diffusion_model.named_modules()), {}
        for name, tensor in plain.model.diffusion_model.state_dict().items():
            path, _, role = name.rpartition(".")
            weights[name] = tensor.clone()
            fits = role == "weight" and isinstance(modules[path], torch.nn.Linear) and not any(side % 16 for side in tensor.shape)
            if fits and "blocks" in name:
                made = quant.QuantizedTensor.from_float(tensor, layout)
                weights[name], weights[f"{path}.weight_scale"] = made._qdata, made._params.scale
                weights[f"{path}.comfy_quant"] = torch.tensor(list(json.dumps({"format": kind}).encode()), dtype=torch.uint8)
                tensor.copy_(made.dequantize())
        assert not any(model.diffusion_model.load_state_dict(weights, strict=False))
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu), plain


def _parts(p):
    """The bytes of the tensors that a weight is made of."""
    names = p.__tensor_flatten__()[0] if hasattr(p, "__tensor_flatten__") else []
    return [part.detach().contiguous().view(-1).view(torch.uint8) for part in ([getattr(p, name) for name in names] or [p])]


@pytest.mark.parametrize(("kind", "close"), [("float8_e4m3fn", 0.9999), ("int8_tensorwise", 0.98)])
def test_quantised_layers_of_the_host_train_as_the_numbers_they_hold(kind, close):
    quantised, plain = _with_quantised_layers("flux", kind)
    assert sum(hasattr(p, "__tensor_flatten__") for p in quantised.model.diffusion_model.parameters()) > 8
    before = {name: [part.clone() for part in _parts(p)] for name, p in quantised.model.diffusion_model.named_parameters()}
    found, expected = _trained(quantised, "flux"), _trained(plain, "flux")
    assert found.history.loss == pytest.approx(expected.history.loss, rel=2e-2)  # int8 layers round what goes in, too
    assert torch.cosine_similarity(_ups(found), _ups(expected), dim=0) > close
    for name, p in quantised.model.diffusion_model.named_parameters():
        assert all(torch.equal(old, new) for old, new in zip(before[name], _parts(p), strict=True)), name


@pytest.mark.parametrize("family", ["sd1", "flux"])
def test_layers_in_host_memory_train_to_the_same_bytes(monkeypatch, family):
    with torch.inference_mode():
        patcher = families.build(family)
    plain = _trained(patcher, family, checkpointing=True)  # which layers implies
    monkeypatch.setattr(host.denoiser, "to_host_memory", lambda p: p.partially_unload(p.offload_device, p.model_size()))
    monkeypatch.setattr(offload, "_elsewhere", lambda tensor, device: True)  # this machine's memory stands for the device's, too
    real, fetched = offload._fetched, []
    monkeypatch.setattr(offload, "_fetched", lambda forward, parts, *a, **k: fetched.append(len(parts)) or real(forward, parts, *a, **k))
    opened = host.denoiser.denoiser
    monkeypatch.setattr(host.denoiser, "denoiser", lambda p: opened(p, layers=True))
    away = _trained(patcher, family, offload="layers")
    assert _same(plain, away) and len(fetched) > 8 and patcher.model.model_lowvram
    monkeypatch.undo()
    assert _same(plain, _trained(patcher, family, checkpointing=True))  # and the model is fit for what comes next
