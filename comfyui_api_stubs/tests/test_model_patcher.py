"""Patching, loading, restoring, clones, injections and callbacks of the model patcher: same bytes after everything."""

import copy
import gc

import comfy.model_management as management
import comfy.model_patcher
import comfy.ops
import pytest
import torch
from comfy.patcher_extension import CallbacksMP, PatcherInjection

CPU = torch.device("cpu")


class Model(torch.nn.Module):
    """Two layers and a parameter that belongs to no layer."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.first = comfy.ops.disable_weight_init.Linear(4, 3)
        self.second = comfy.ops.disable_weight_init.Linear(3, 2)
        self.stray = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.setting = "original"
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            parameter.copy_(torch.randn(parameter.shape, generator=g))


@pytest.fixture
def patcher():
    management.unload_all_models()
    yield comfy.model_patcher.ModelPatcher(Model(), load_device=CPU, offload_device=CPU)
    management.unload_all_models()


def snapshot(patcher):
    return {key: value.clone() for key, value in patcher.model.state_dict().items()}


def same(patcher, state):
    return all(torch.equal(value, state[key]) for key, value in patcher.model.state_dict().items())


def diff(shape, value=1.0):
    return ("diff", (torch.full(shape, value),))


def injection(log, name):
    return PatcherInjection(inject=lambda p: log.append(f"+{name}"), eject=lambda p: log.append(f"-{name}"))


def test_add_patches_says_what_it_found(patcher):
    found = patcher.add_patches({"first.weight": diff((3, 4)), "missing.weight": diff((1,))})
    assert found == ["first.weight"] and list(patcher.patches) == ["first.weight"]


def test_load_and_unload_restore_every_byte(patcher):
    before = snapshot(patcher)
    loaded = patcher.clone()
    loaded.add_patches(
        {"first.weight": diff((3, 4)), "second.bias": diff((2,), 0.5)}, strength_patch=0.5, strength_model=2.0
    )
    assert same(patcher, before)
    management.load_models_gpu([loaded])
    after = snapshot(patcher)
    torch.testing.assert_close(after["first.weight"], before["first.weight"] * 2 + 0.5)
    torch.testing.assert_close(after["second.bias"], before["second.bias"] * 2 + 0.25)
    assert torch.equal(after["second.weight"], before["second.weight"])
    assert patcher.model.current_weight_patches_uuid == loaded.patches_uuid
    assert set(patcher.backup) == {"first.weight", "second.bias"} and patcher.backup is loaded.backup

    management.load_models_gpu([loaded])
    assert same(patcher, after)
    management.load_models_gpu([patcher])
    assert same(patcher, before)
    management.load_models_gpu([loaded])
    management.unload_all_models()
    assert same(patcher, before) and not patcher.backup and patcher.model.current_weight_patches_uuid is None
    assert patcher.loaded_size() == 0


def test_patches_of_one_weight_add_up_and_slices_are_patched(patcher):
    base = patcher.model.first.weight.clone()
    loaded = patcher.clone()
    loaded.add_patches({"first.weight": diff((3, 4))}, 0.25)
    loaded.add_patches({("first.weight", (0, 1, 2)): diff((2, 4), 10.0)})
    management.load_models_gpu([loaded])
    expected = base + 0.25
    expected[1:] += 10
    torch.testing.assert_close(patcher.model.first.weight.data, expected)


def test_key_patches_give_the_base_while_patched(patcher):
    base = patcher.model.first.weight.clone()
    patcher.add_patches({"first.weight": diff((3, 4))})
    management.load_models_gpu([patcher])
    (weight, convert), patch = patcher.get_key_patches("first.w")["first.weight"]
    assert torch.equal(weight, base) and convert(weight, inplace=True) is weight and patch[0] == 1.0
    assert not torch.equal(patcher.model_state_dict()["first.weight"], base)


def test_inplace_update_keeps_the_parameter():
    management.unload_all_models()
    patcher = comfy.model_patcher.ModelPatcher(Model(), CPU, CPU, weight_inplace_update=True)
    parameter, base = patcher.model.first.weight, patcher.model.first.weight.clone()
    patcher.add_patches({"first.weight": diff((3, 4))})
    patcher.patch_model(CPU)
    assert patcher.model.first.weight is parameter and torch.equal(parameter, base + 1)
    patcher.unpatch_model(CPU)
    assert patcher.model.first.weight is parameter and torch.equal(parameter, base)


def test_object_patches(patcher):
    other = patcher.clone()
    other.add_object_patch("setting", "patched")
    assert other.get_model_object("setting") == "patched" and patcher.get_model_object("setting") == "original"
    management.load_models_gpu([other])
    assert patcher.model.setting == "patched" and patcher.get_model_object("setting") == "original"
    management.load_models_gpu([patcher])
    assert patcher.model.setting == "original"


def test_clones_are_independent(patcher):
    def patch(*args):
        raise AssertionError

    patcher.set_model_attn1_patch(patch)
    other = patcher.clone()
    other.set_model_attn1_patch(patch)
    other.set_model_patch_replace(patch, "attn2", "input", 1)
    other.add_patches({"first.weight": diff((3, 4))})
    other.set_attachments("mine", 1)
    assert len(patcher.model_options["transformer_options"]["patches"]["attn1_patch"]) == 1
    assert len(other.model_options["transformer_options"]["patches"]["attn1_patch"]) == 2
    assert "patches_replace" not in patcher.model_options["transformer_options"]
    assert patcher.patches == {} and patcher.get_attachment("mine") is None
    assert (
        other.is_clone(patcher)
        and other.patches_uuid != patcher.patches_uuid
        and not other.clone_has_same_weights(patcher)
    )
    assert patcher.clone().clone_has_same_weights(patcher)
    assert copy.deepcopy(other.model_options)["transformer_options"]["patches"]["attn1_patch"][0] is patch


def test_injections_go_in_on_load_and_come_out_in_the_same_order(patcher):
    log = []
    patcher.set_injections("a", [injection(log, "a1"), injection(log, "a2")])
    patcher.set_injections("b", [injection(log, "b")])
    management.load_models_gpu([patcher])
    assert log == ["+a1", "+a2", "+b"] and patcher.is_injected
    log.clear()
    with patcher.use_ejected():
        assert log == ["-a1", "-a2", "-b"]
        with patcher.use_ejected():
            assert len(log) == 3
    assert log[3:] == ["+a1", "+a2", "+b"]
    log.clear()
    patcher.detach()
    assert log == ["-a1", "-a2", "-b"] and not patcher.is_injected


def test_use_ejected_injects_again_after_an_exception(patcher):
    log = []
    patcher.set_injections("a", [injection(log, "a")])
    patcher.inject_model()
    with pytest.raises(KeyError), patcher.use_ejected():
        raise KeyError
    assert log == ["+a", "-a", "+a"]
    with pytest.raises(KeyError), patcher.use_ejected(skip_and_inject_on_exit_only=True):
        patcher.inject_model()
        assert not patcher.is_injected
        raise KeyError
    assert patcher.is_injected and not patcher.skip_injection
    patcher.detach()


def test_changing_injections_keeps_the_model_loaded(patcher):
    log = []
    management.load_models_gpu([patcher])
    identity, other = patcher.model.current_weight_patches_uuid, patcher.clone()
    other.set_injections("a", [injection(log, "a")])
    other.add_callback(CallbacksMP.ON_LOAD, lambda *args: log.append("load"))
    management.load_models_gpu([other])
    assert log == ["+a"] and patcher.model.current_weight_patches_uuid == identity
    management.load_models_gpu([patcher])
    assert log == ["+a", "-a"]


def test_a_clone_of_an_injected_patcher_ejects_when_it_dies(patcher):
    log = []
    patcher.set_injections("a", [injection(log, "a")])
    management.load_models_gpu([patcher])
    clone = patcher.clone()
    assert clone.is_injected
    del clone
    gc.collect()
    assert log == ["+a", "-a"]  # as in ComfyUI


def test_a_failed_load_detaches_and_injects_again(patcher):
    before, log = snapshot(patcher), []
    patcher.set_injections("a", [injection(log, "a")])
    patcher.add_patches({"first.weight": diff((3, 4))})
    patcher.add_callback(CallbacksMP.ON_LOAD, lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        management.load_models_gpu([patcher])
    assert same(patcher, before) and patcher.model.current_weight_patches_uuid is None
    assert log[-1] == "+a"  # as in ComfyUI
    patcher.eject_model()


def test_callbacks_and_wrappers_by_key(patcher):
    log = []
    patcher.add_callback_with_key(
        CallbacksMP.ON_CLONE, "k", lambda old, new: log.append((old is patcher, new is not patcher))
    )
    patcher.add_callback(CallbacksMP.ON_CLEANUP, lambda p: log.append("cleanup"))
    patcher.add_callback(CallbacksMP.ON_PRE_RUN, lambda p: log.append("run"))
    patcher.add_callback(CallbacksMP.ON_DETACH, lambda p, unpatch_all: log.append(("detach", unpatch_all)))
    clone = patcher.clone()
    clone.pre_run()
    clone.cleanup()
    clone.detach()
    assert log == [(True, True), "run", "cleanup", ("detach", True)]
    clone.remove_callbacks_with_key(CallbacksMP.ON_CLONE, "k")
    assert (
        clone.get_all_callbacks(CallbacksMP.ON_CLONE) == []
        and len(patcher.get_callbacks(CallbacksMP.ON_CLONE, "k")) == 1
    )
    patcher.add_wrapper_with_key("apply_model", "k", len)
    patcher.add_wrapper("apply_model", abs)
    assert patcher.get_all_wrappers("apply_model") == [len, abs] and patcher.get_wrappers("apply_model", "k") == [len]
    patcher.remove_wrappers_with_key("apply_model", "k")
    assert patcher.get_all_wrappers("apply_model") == [abs]


def test_additional_models_are_loaded_and_cloned(patcher):
    other = comfy.model_patcher.ModelPatcher(Model(), CPU, CPU)
    patcher.set_additional_models("k", [other])
    clone = patcher.clone()
    (copied,) = clone.get_additional_models_with_key("k")
    assert copied is not other and copied.model is other.model and clone.get_nested_additional_models() == [copied]


def test_a_weight_function_sees_every_use(patcher):
    x = torch.ones(1, 4)
    plain = patcher.model.first(x)
    patcher.add_weight_wrapper("first.weight", lambda weight: weight * 2)
    management.load_models_gpu([patcher])
    torch.testing.assert_close(patcher.model.first(x), plain + x @ patcher.model.first.weight.T)


def test_a_dead_clone_leaves_its_parent_loaded(patcher):
    clone = patcher.clone()
    management.load_models_gpu([clone])
    del clone
    gc.collect()
    assert [loaded.model for loaded in management.current_loaded_models if loaded.model is patcher] == [patcher]


def test_casting_layers_compute_in_the_input_type():
    layer = comfy.ops.manual_cast.Linear(4, 3, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(12.0).reshape(3, 4))
        layer.bias.fill_(1.0)
    out = layer(torch.full((1, 4), 1 / 3))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, torch.tensor([[3.0, 25 / 3, 41 / 3]]))
