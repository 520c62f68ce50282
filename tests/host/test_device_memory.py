"""The memory that training could have: what is free, and what ComfyUI's loaded models give back."""

import types

import comfy.model_management
import comfy.model_patcher
import pytest
import torch
from graft_nodes.host import denoiser, memory_planning
from graft_nodes.host.device_memory import half_type, training_device, unload_others

MODEL = types.SimpleNamespace(loaded_size=lambda: 300)
GONE = types.SimpleNamespace(device=torch.device("mps"), model=None)


@pytest.fixture
def management(monkeypatch):
    """ComfyUI's account of a device with 1000 bytes free."""
    loaded = [types.SimpleNamespace(device=torch.device(kind), model=MODEL) for kind in ("mps", "cpu", "mps")]
    monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda device: 1000)
    monkeypatch.setattr(comfy.model_management, "get_torch_device_name", lambda device: f"the {device.type}")
    monkeypatch.setattr(comfy.model_management, "current_loaded_models", [*loaded, GONE])


def patcher(kind):
    return types.SimpleNamespace(load_device=torch.device(kind), model_size=lambda: 70)


def test_models_on_the_same_device_count_as_free(management):
    device = training_device(patcher("mps"))
    assert (device.kind, device.name, device.free, device.bf16) == ("mps", "the mps", 1600, False)
    assert device.shares_memory


def test_on_the_cpu_the_models_own_weights_count_as_free(management):
    device = training_device(patcher("cpu"))
    assert (device.kind, device.free) == ("cpu", 1070)


CARD = torch.device("cuda", 0)


def emulated(including_emulation=True):
    """What torch says of a card before compute capability 8.0."""
    return including_emulation


def own(including_emulation=True):
    """What torch says of a newer card."""
    return True


@pytest.mark.parametrize(("card", "dtype"), [(emulated, torch.float16), (own, torch.bfloat16)])
def test_a_card_that_would_emulate_bf16_computes_in_fp16(management, monkeypatch, card, dtype):
    """One answer for the step, the recipe and the plan."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", card)
    assert half_type(CARD) == dtype
    assert training_device(patcher("cuda")).bf16 == (dtype == torch.bfloat16)
    assert denoiser.half_type is memory_planning.half_type is half_type


@pytest.mark.parametrize(("has_bf16", "dtype"), [(False, torch.float16), (True, torch.bfloat16)])
def test_of_amd_s_cards_comfyui_knows(monkeypatch, has_bf16, dtype):
    """torch says that each of them has bf16."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", own)
    asked = []
    monkeypatch.setattr(comfy.model_management, "should_use_bf16", lambda device, **_: asked.append(device) or has_bf16)
    assert half_type(CARD) == dtype and asked == [CARD]


@pytest.mark.parametrize("kind", ["cpu", "mps", "xpu", "privateuseone"])
def test_elsewhere_training_leaves_the_model_s_own_types(monkeypatch, kind):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", own)
    assert half_type(torch.device(kind)) is None


def _loaded(network):
    return types.SimpleNamespace(device=torch.device("mps"), model=MODEL, real_model=lambda: network)


def test_all_but_the_models_that_train_leave_the_device(monkeypatch):
    network, text_encoder, vae = object(), object(), object()
    loaded = {name: _loaded(item) for name, item in zip("ntv", (network, text_encoder, vae), strict=True)}
    calls = []
    monkeypatch.setattr(comfy.model_management, "current_loaded_models", list(loaded.values()))
    monkeypatch.setattr(comfy.model_management, "free_memory", lambda *given: calls.append(given))

    def trained(item, kind="mps"):
        return types.SimpleNamespace(load_device=torch.device(kind), model=item)

    unload_others([trained(network)])
    unload_others([trained(network), trained(text_encoder)])
    unload_others([trained(network), trained(text_encoder, "cpu")])
    unload_others([trained(network, "cpu")])
    mps = torch.device("mps")
    assert [(memory > 1e15, device, kept) for memory, device, kept in calls] == [
        (True, mps, [loaded["n"]]),
        (True, mps, [loaded["n"], loaded["t"]]),
        (True, mps, [loaded["n"], loaded["t"]]),
    ]


def test_the_host_lets_go_of_text_encoder_and_vae_before_the_steps(monkeypatch):
    """The host's own account of loaded models, which are on the CPU and said to be on another device."""
    management, cpu, mps = comfy.model_management, torch.device("cpu"), torch.device("mps")
    patchers = [
        comfy.model_patcher.ModelPatcher(torch.nn.Linear(4, 4), load_device=cpu, offload_device=cpu) for _ in range(3)
    ]
    account = []
    for patcher in patchers:
        loaded = management.LoadedModel(patcher)
        loaded.model_load()
        patcher.load_device = loaded.device = mps
        account.append(loaded)
    monkeypatch.setattr(management, "current_loaded_models", account)
    monkeypatch.setattr(management, "get_free_memory", lambda *given, **more: 0)
    assert [patcher.loaded_size() for patcher in patchers] == [80, 80, 80]
    unload_others(patchers[1:2])
    assert [loaded.model for loaded in management.current_loaded_models] == [patchers[1]]
    assert [patcher.loaded_size() for patcher in patchers] == [0, 80, 0]
