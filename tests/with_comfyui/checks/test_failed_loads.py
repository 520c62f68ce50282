"""A load that fails under dynamic VRAM: ComfyUI's own patcher for it, on the CPU, with its buffers of host memory stood
in for.
"""

import gc
import types

import comfy.model_management
import comfy.model_patcher
import pytest
from graft_nodes.host import lora_stacks
from graft_nodes.patches.lora_files.entry import LoraEntry
from graft_nodes.patches.patching import stack_ledger

from ...nodes import conftest as node_models

pytestmark = pytest.mark.skipif(
    not hasattr(comfy.model_patcher, "ModelPatcherDynamic"), reason="this ComfyUI has no dynamic VRAM"
)


class Buffer:
    """Host memory that nothing is put into."""

    size = 0

    def __init__(self, *_):
        pass

    def truncate(self, *_, **__):
        pass


@pytest.fixture
def dynamic(monkeypatch):
    """`make()`: a model with ComfyUI's dynamic patcher; `fail`: "early" or "late" in the loads that fail, None while
    none does.
    """
    aimdo = types.SimpleNamespace(
        host_buffer=types.SimpleNamespace(HostBuffer=Buffer),
        model_vbar=types.SimpleNamespace(vbar_unpin=lambda _: None),
    )
    monkeypatch.setattr(comfy.model_patcher, "comfy_aimdo", aimdo)
    monkeypatch.setattr(comfy.model_management, "pinned_hostbuf_size", lambda _: 0)
    found = types.SimpleNamespace(fail=None)

    class Dynamic(comfy.model_patcher.ModelPatcherDynamic):
        def __new__(cls, *_, **__):
            return object.__new__(cls)  # ComfyUI's takes the plain patcher on a CPU

        def partially_unload(self, *_, **__):
            return self.restore_loaded_backups()

        def load(self, *args, **kwargs):
            if found.fail == "early":
                raise MemoryError("before anything is loaded")
            super().load(*args, **kwargs)
            if found.fail == "late":
                raise MemoryError("when everything is loaded")

    def make():
        plain = node_models.build_unet()
        return Dynamic(plain.model, plain.load_device, plain.offload_device)

    found.make = make
    yield found
    comfy.model_management.unload_all_models()


@pytest.mark.parametrize("before", ["never loaded", "loaded", "loaded and unloaded"])
@pytest.mark.parametrize("when", ["early", "late"])
def test_a_failed_load_leaves_no_stack_on_the_model(dynamic, before, when):
    model = dynamic.make()
    plain = node_models.forward(dynamic.make())
    comfy.model_management.unload_all_models()
    if before != "never loaded":
        node_models.load(model)
    if before == "loaded and unloaded":
        comfy.model_management.unload_all_models()
    patched = lora_stacks.apply_lora_stack(model, None, [LoraEntry("a", node_models.build_lora(model))]).model
    for _ in range(2):
        dynamic.fail = when
        with pytest.raises(MemoryError):
            node_models.load(patched)
        dynamic.fail = None
        assert not stack_ledger.attached_stacks(model.model) and not any(
            "forward" in module.__dict__ for module in model.model.modules()
        )
        assert (node_models.forward(model) - plain).abs().max() == 0
        assert (node_models.forward(patched) - plain).abs().max() > 1e-2, "the stack still loads"
        assert (node_models.forward(model) - plain).abs().max() == 0
    comfy.model_management.unload_all_models()
    del patched
    gc.collect()
    assert (node_models.forward(model) - plain).abs().max() == 0
