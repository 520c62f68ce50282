"""A stack through everything that hosts do with models: live is base + what is on it, and the base comes back."""

import copy
import gc
import os
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from ..model_device import LOAD

MODES = ("merge", "bypass")
IN_HOST_MEMORY = pytest.mark.skipif(
    LOAD.type != "cpu", reason="a device has no room for base and patched weights: they change in place and back"
)
RUNS = int(os.environ.get("GRAFT_TEST_SEQUENCES", "40"))


def graft(host, model, state, strength=1.0, mode="merge", clip=None):
    return host.call("LoRAStackPatch", model=model, clip=clip, lora_model=state, lora_strength=strength, mode=mode)[0]


def summed(state, base, strength):
    """{weight: float64 change} of a generic LoRA on base weights."""
    changes = {}
    for key in state:
        if key.endswith(".lora_up.weight"):
            name = key.removesuffix(".lora_up.weight")
            up, down = state[key].double().flatten(1), state[f"{name}.lora_down.weight"].double().flatten(1)
            scale = strength * float(state[f"{name}.alpha"]) / down.shape[0]
            changes[f"{name}.weight"] = (scale * up @ down).reshape(base[f"{name}.weight"].shape)
    return changes


def assert_live(model, base, applied, adapters=False):
    """The model's weights, and what adapters add to them, are base + the applied (state, strength), worked out in
    float64.
    """
    wanted = {name: tensor.double() for name, tensor in base.items()}
    for state, strength in applied:
        for name, change in summed(state, base, strength).items():
            wanted[name] = wanted[name] + change
    live = {name: tensor.cpu().double() for name, tensor in model.state_dict().items()}
    for _, stacks in model.__dict__["_graft_ledger"].entries if adapters and "_graft_ledger" in model.__dict__ else ():
        for name in stacks.calls:
            weight, parts = f"{name}.weight", stacks.adapters[name].parts
            up, down = (part.cpu().double().flatten(1) for part in (parts.up, parts.down))
            live[weight] = live[weight] + (up @ down).view(live[weight].shape)
    worst = max((float((live[name] - wanted[name]).abs().max()), name) for name in wanted)
    assert worst[0] < 1e-5, worst


@pytest.mark.parametrize("mode", MODES)
def test_clone_and_clone_deleted_while_loaded(host, small, mode):
    model = small.unet()
    before, state = small.Snapshot(model.model), small.lora(model)
    patched = graft(host, model, state, mode=mode)
    expected = small.forward(patched)
    clone = patched.clone()
    assert not clone.is_injected
    del clone
    gc.collect()
    assert torch.equal(small.forward(patched), expected)
    copied = patched.clone()
    assert torch.equal(small.forward(copied), expected)
    del patched
    gc.collect()
    assert torch.equal(small.forward(copied), expected)
    small.load(model)
    before.check(model.model)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["at once", "at its end"])
def test_a_load_that_fails(host, small, mode, when, monkeypatch):
    model = small.unet()
    before = small.Snapshot(model.model)
    patched = graft(host, model, small.lora(model), mode=mode)
    kind, real = type(model), type(model).load

    def failing(self, *arguments, **keywords):
        if when == "at its end":
            real(self, *arguments, **keywords)
        raise MemoryError("the host ran out of memory")

    monkeypatch.setattr(kind, "load", failing)
    with pytest.raises(MemoryError):
        small.load(patched)
    monkeypatch.setattr(kind, "load", real)
    before.check(model.model)
    plain, expected = small.forward(model), small.forward(graft(host, small.unet(), small.lora(model), mode=mode))
    assert torch.equal(small.forward(patched), expected) and not torch.equal(plain, expected)
    small.load(model)
    before.check(model.model)


@pytest.mark.parametrize("mode", MODES)
def test_a_stack_that_fails_leaves_nothing_loaded(host, small, mode, monkeypatch):
    """As when the host's own part of a load fails; what nobody counts could not be unloaded."""
    import comfy.model_management

    model = small.unet()
    before, state = small.Snapshot(model.model), small.lora(model)
    patched, weights, calls = graft(host, model, state, mode=mode), host.module("patches.patching.stack_ledger"), []
    name = {"merge": "apply_patches", "bypass": "Bypass"}[mode]

    def failing(*arguments, **keywords):
        calls.append(1)
        return exec_fail() if len(calls) == 3 else real(*arguments, **keywords)

    real = getattr(weights, name)
    monkeypatch.setattr(weights, name, failing)
    with pytest.raises(MemoryError):
        small.load(patched)
    monkeypatch.setattr(weights, name, real)
    assert not patched.is_injected and not patched.backup
    paged = bool(
        getattr(model, "is_dynamic", bool)()
    )  # ComfyUI notes a paged model's patches, and loads it anew anyway
    assert paged or model.model.current_weight_patches_uuid is None
    assert not getattr(model.model, "model_loaded_weight_memory", 0)
    assert not any(entry.model is patched for entry in comfy.model_management.current_loaded_models)
    before.check(model.model)
    expected = small.forward(graft(host, small.unet(), state, mode=mode))
    assert torch.equal(small.forward(patched), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", ["host", "graft"])
def test_the_hosts_own_loader_before_and_after(host, small, mode, first):
    import comfy.sd

    model = small.unet()
    before, theirs, ours = small.Snapshot(model.model), small.lora(model, 1), small.lora(model, 2)

    def with_theirs(patcher):
        return comfy.sd.load_lora_for_models(patcher, None, theirs, 0.5, 0)[0]

    both = (
        graft(host, with_theirs(model), ours, mode=mode)
        if first == "host"
        else with_theirs(graft(host, model, ours, mode=mode))
    )
    expected = small.forward(graft(host, graft(host, small.unet(), theirs, 0.5), ours))
    for _ in range(2):
        assert (small.forward(both) - expected).abs().max() < 1e-4
        small.forward(model)
    import comfy.model_management

    comfy.model_management.unload_all_models()
    before.check(model.model, objects=False)
    assert torch.equal(
        small.forward(graft(host, model, ours, mode=mode)), small.forward(graft(host, small.unet(), ours, mode=mode))
    )


def test_an_ejected_model_is_the_base_and_then_the_patched_one_again(host, small):
    model = small.unet()
    before, state = small.Snapshot(model.model), small.lora(model)
    patched = graft(host, model, state)
    expected = small.forward(patched)
    for _ in range(2):
        with patched.use_ejected():
            before.check(model.model)
        assert_live(model.model, before.bytes, [(state, 1.0)])
    assert torch.equal(small.forward(patched), expected)


@IN_HOST_MEMORY
def test_ejected_views_show_the_base(host, small):
    model = small.unet()
    before = small.Snapshot(model.model)
    patched = graft(host, model, small.lora(model))
    small.load(patched)
    state = patched.model_state_dict()
    assert all(torch.equal(state[name].cpu(), before.bytes[name]) for name in before.bytes)
    assert_live(model.model, before.bytes, [(small.lora(model), 1.0)])


def test_two_loaded_clones_with_different_stacks_alternate(host, small):
    model = small.unet()
    before, states = small.Snapshot(model.model), [small.lora(model, seed) for seed in range(2)]
    one, two = graft(host, model, states[0]), graft(host, model, states[1], 0.5)
    for _ in range(2):
        small.load(one)
        assert_live(model.model, before.bytes, [(states[0], 1.0)])
        small.load(two)
        assert_live(model.model, before.bytes, [(states[1], 0.5)])
    small.load(model)
    before.check(model.model)


@IN_HOST_MEMORY
def test_an_unchanged_model_computes_nothing_anew(host, small, monkeypatch):
    model = small.unet()
    patched = graft(host, model, small.lora(model))
    expected = small.forward(patched)
    weights = host.module("patches.patching.stack_ledger")
    monkeypatch.setattr(weights, "apply_patches", lambda *_, **__: pytest.fail("computed again"))
    assert torch.equal(small.forward(patched), expected)
    patched.model_state_dict()
    with patched.use_ejected():
        pass
    small.forward(model)
    assert torch.equal(small.forward(patched), expected)


def test_kept_weights_go_when_the_model_is_unloaded(host, small):
    import comfy.model_management

    model = small.unet()
    patched = graft(host, model, small.lora(model))
    small.load(patched)
    weights = host.module("patches.patching.stack_ledger")
    assert weights.is_kept(model.model)
    comfy.model_management.unload_all_models()
    assert not weights.is_kept(model.model)
    small.forward(patched)


@pytest.mark.parametrize("mode", MODES)
def test_kept_weights_go_with_the_model_when_the_clone_has_gone_before(host, small, mode):
    """Its node was deleted: the host unloads through the clone's parent."""
    import comfy.model_management

    model, weights = small.unet(), host.module("patches.patching.stack_ledger")
    patched = graft(host, model, small.lora(model), mode=mode).clone()
    small.load(patched)
    del patched
    gc.collect()
    small.load(model)
    assert weights.is_kept(model.model), "a changed strength is a new clone that finds the memory"
    comfy.model_management.unload_all_models()
    assert not weights.is_kept(model.model)


def test_two_imports_of_the_pack_share_the_models_ledger(host, small):
    import graft_nodes.host as other
    from graft_nodes.patches.lora_files.entry import LoraEntry

    assert other is not host.module("host")
    model = small.unet()
    before, states = small.Snapshot(model.model), [small.lora(model, seed) for seed in range(2)]
    one = graft(host, model, states[0])
    both = other.lora_stacks.apply_lora_stack(one, None, [LoraEntry("second", states[1])], "merge").model
    small.load(both)
    assert_live(model.model, before.bytes, [(states[0], 1.0), (states[1], 1.0)])
    small.load(one)
    assert_live(model.model, before.bytes, [(states[0], 1.0)])
    small.load(model)
    before.check(model.model)


@pytest.mark.parametrize("mode", ["merge", "bypass", "host"])
def test_what_merging_extracting_and_saving_see(host, small, mode):
    """As the help page has it: ComfyUI's own nodes see mode host everywhere, a merge when the loaded weights are saved,
    and Graft's all.
    """
    model = small.unet(channels=32, mult=(1,), depth=(1,))
    before, state = small.Snapshot(model.model), small.lora(model)
    patched = graft(host, model, state, mode=mode)
    seen = [(state, 1.0)] if mode == "host" else []

    def merged(one, two):
        """All of two, none of one: what ModelMergeSimple makes at ratio 0."""
        result = one.clone()
        for name, patches in two.get_key_patches("diffusion_model.").items():
            result.add_patches({name: patches}, 1.0, 0.0)
        return result

    report = host.call("LoRAStackPatch", model=model, lora_model=state, mode=mode)[2]
    assert {
        "merge": "a saved checkpoint holds the stack; a merge of models keeps the stack of its first model",
        "bypass": "a saved checkpoint holds the base without the stack; a merge of models keeps the stack of its first",
        "host": "merging, extracting and saving see them",
    }[mode] in report
    result = merged(model, patched)  # the second model's stack
    small.load(result)
    assert_live(model.model, before.bytes, seen, adapters=True)
    result = merged(patched, model)  # the first model's stack stays on the result, at full strength
    small.load(result)
    assert_live(model.model, before.bytes, [] if mode == "host" else [(state, 1.0)], adapters=True)
    small.load(patched)
    assert_live(
        model.model, before.bytes, [] if mode == "bypass" else [(state, 1.0)]
    )  # what a checkpoint is saved from
    result = merged(small.unet(channels=32, mult=(1,), depth=(1,)), model)  # the base of a model whose stack is loaded
    for _ in range(2):
        small.load(graft(host, model, state, 0.3, mode))
        small.load(result)
        assert_live(result.model, before.bytes, [])
    small.load(patched)
    found = host.module("host.model_difference").model_difference(patched, model)
    wanted = summed(state, before.bytes, 1.0)
    assert set(found) == set(wanted)
    assert all(torch.allclose(found[name]().cpu().double(), wanted[name], atol=1e-5) for name in found)


def test_mode_host_is_what_other_nodes_see(host, small):
    model, state = small.unet(), small.lora(small.unet())
    assert not graft(host, model, state, mode="merge").patches
    patched = graft(host, model, state, mode="host")
    assert set(patched.patches) == {
        f"{name.removesuffix('.lora_up.weight')}.weight" for name in state if name.endswith(".lora_up.weight")
    }
    assert not patched.injections


def test_model_options_can_be_copied(host, small):
    patched = graft(host, small.unet(), small.lora(small.unet()))
    copy.deepcopy(patched.model_options)


@pytest.fixture
def demo(host):
    model, clip, _ = host.call("GraftDemo")
    return model, clip


@pytest.mark.parametrize("mode", MODES)
def test_text_encoders_too(host, small, demo, mode):
    model, clip = demo
    before, state = small.Snapshot(clip.cond_stage_model), {}
    with torch.inference_mode():
        plain = clip.encode_from_tokens(clip.tokenize("a red circle left"))
    for name, weight in clip.cond_stage_model.named_parameters():
        if name.endswith(".weight") and weight.ndim == 2 and "emb" not in name and "token" not in name:
            base = f"text_encoders.{name.removesuffix('.weight')}"
            state[f"{base}.lora_up.weight"] = torch.ones(weight.shape[0], 1)
            state[f"{base}.lora_down.weight"] = torch.full((1, weight.shape[1]), 0.1)
    assert state
    save_file(state, os.path.join(host.models, "loras", "text.safetensors"))
    with pytest.raises(ValueError, match="text encoder only"):
        host.call("LoRAStackPatch", model=model, lora_stack=[("text.safetensors", 1.0, 0.5)])
    same, patched, report = host.call(
        "LoRAStackPatch", model=model, clip=clip, lora_stack=[("text.safetensors", 1.0, 0.5)], mode=mode
    )
    assert same is model and "of the text encoder at 0.5" in report
    with torch.inference_mode():
        changed = patched.encode_from_tokens(patched.tokenize("a red circle left"))
        again = clip.encode_from_tokens(clip.tokenize("a red circle left"))
    assert not torch.equal(changed, plain) and torch.equal(again, plain)
    before.check(clip.cond_stage_model)


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_load_leaves_no_other_packs_injection(host, small, mode):
    """An injection of another pack that changes a weight, as AnimateDiff's does, is ejected as often as it was
    injected.
    """
    from comfy.patcher_extension import PatcherInjection

    model = small.unet()
    before, weight, on = small.Snapshot(model.model), model.model.diffusion_model.time_embed[0].weight, []

    def inject(_):
        weight.data.mul_(2)
        on.append(True)

    def eject(_):
        weight.data.div_(2)
        on.pop()

    other = model.clone()
    other.set_injections("other", [PatcherInjection(inject=inject, eject=eject)])
    patched = graft(host, other, small.lora(model), mode=mode)
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(model), "load", lambda *_, **__: exec_fail())
            with pytest.raises(MemoryError):
                small.load(patched)
    assert not on
    small.load(patched)
    assert len(on) == 1
    unload()
    before.check(model.model)


class Fails:
    """A node that raises where sampling has just used the model."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",)}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "fail"
    OUTPUT_NODE = True
    CATEGORY = "test"

    def fail(self, samples):
        raise RuntimeError("a node in the middle failed")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fails", [False, True])
def test_a_workflow_leaves_the_files_bytes(host, small, demo, mode, fails):
    """Through the executor, under inference mode, with weights that are inference tensors."""
    host.nodes.NODE_CLASS_MAPPINGS.update(GraftTestFails=Fails)
    save_file(small.lora(demo[0], scale=0.3), os.path.join(host.models, "loras", "demo.safetensors"))
    prompt = {
        "1": {"class_type": "GraftDemo", "inputs": {}},
        "2": {
            "class_type": "GraftLoRAStack",
            "inputs": {"rows": '{"version": 1, "rows": [{"file": "demo.safetensors"}]}'},
        },
        "3": {
            "class_type": "LoRAStackPatch",
            "inputs": {"model": ["1", 0], "lora_stack": ["2", 0], "lora_strength": 1.0, "mode": mode},
        },
        "4": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": "a red circle left"}},
        "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 256, "height": 256, "batch_size": 1}},
        "6": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["3", 0],
                "positive": ["4", 0],
                "negative": ["4", 0],
                "latent_image": ["5", 0],
                "seed": 1,
                "steps": 2,
                "cfg": 2.0,
                "sampler_name": "euler",
                "scheduler": "normal",
                "denoise": 1.0,
            },
        },
        "7": {
            "class_type": "GraftTestFails" if fails else "PreviewAny",
            "inputs": {"samples" if fails else "source": ["6", 0]},
        },
    }
    if not fails:
        del prompt["7"]
    host.fresh()
    result = host.run(prompt, {"model": ["1", 0]} if fails else {"model": ["1", 0], "latent": ["6", 0]})
    assert result["success"] is not fails, result["errors"]
    model = demo[0] if "model" not in result["captured"] else result["captured"]["model"]
    gc.collect()
    small.load(model)
    file = load_file(host.module("nodes.demo").BASE)
    base = {name.removeprefix("model."): tensor for name, tensor in file.items() if name.startswith("model.")}
    live = model.model.state_dict()
    assert all(torch.equal(live[name].cpu(), base[name]) for name in base)
    assert not [key for key in model.model.__dict__ if "graft" in key]


class Sequence:
    """One model, patchers on it with what each should apply, and random things that hosts and users do with them.

    A move between devices is played on the CPU: the host puts new Parameter objects with the same bytes in while stacks
    are ejected (as `Module.to` may), and in every other sequence all weights are treated as if they were on a device,
    patched in place.
    """

    def __init__(self, host, small, model, states, seed):
        self.host, self.small, self.model, self.states = host, small, model, states
        self.draw = random.Random(seed)
        self.before = small.Snapshot(model.model)
        self.patchers = [(model, [])]
        self.done = []  # for a failure's message
        self.replaced = False  # whether the host itself has put other Parameter objects in

    def check(self, applied=()):
        if not applied:
            self.before.check(self.model.model, objects=not self.replaced)
        assert_live(self.model.model, self.before.bytes, applied, adapters=True)

    def step(self):
        patcher, applied = self.draw.choice(self.patchers)
        action = self.draw.choice(self.ACTIONS)
        self.done.append((action, len(applied)))
        getattr(self, action)(patcher, applied)

    def attach(self, patcher, applied):
        state, strength = self.draw.choice(self.states), self.draw.choice([1.0, -0.5])
        mode = self.draw.choice(["merge", "merge", "bypass", "bypass", "host"])
        self.replaced |= mode == "host"
        self.patchers.append((graft(self.host, patcher, state, strength, mode), [*applied, (state, strength)]))

    def change(self, patcher, applied):
        """Another strength, from the plain model, loaded at once where the first is loaded."""
        state = self.draw.choice(self.states)
        for strength in (0.5, 0.25):
            changed = graft(self.host, self.model, state, strength, self.draw.choice(MODES))
            self.small.load(changed)
            self.check([(state, strength)])

    def load(self, patcher, applied):
        self.small.load(patcher)
        self.check(applied)

    def detach(self, patcher, applied):
        self.small.load(self.model)
        self.check()

    def clone(self, patcher, applied):
        self.patchers.append((patcher.clone(), applied))

    def delete(self, patcher, applied):
        if len(self.patchers) > 1:
            self.patchers.pop(self.draw.randrange(1, len(self.patchers)))

    def failed_load(self, patcher, applied):
        unload()
        late, real = self.draw.random() < 0.5, type(self.model).load
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(self.model), "load", lambda *a, **k: (late and real(*a, **k), exec_fail()))
            with pytest.raises(MemoryError):
                self.small.load(patcher)
        self.check()

    def exception(self, patcher, applied):
        """Memory runs out while a stack is computed: everything comes off."""
        state = self.draw.choice(self.states)
        wanting = graft(self.host, self.model, state, self.draw.choice([0.75, 0.6]))
        unload()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                self.host.module("patches.patching.stack_ledger"), "apply_patches", lambda *_, **__: exec_fail()
            )
            with pytest.raises(MemoryError):
                self.small.load(wanting)
        self.small.load(self.model)  # the host counts as loaded what failed at the last moment
        self.check()
        unload()

    def host_lora(self, patcher, applied):
        import comfy.sd

        state = self.draw.choice(self.states)
        self.replaced = True
        self.patchers.append(
            (comfy.sd.load_lora_for_models(patcher, None, state, 0.25, 0)[0], [*applied, (state, 0.25)])
        )

    def hook(self, patcher, applied):
        import comfy.hooks

        if not hasattr(comfy.hooks, "create_hook_lora"):
            return
        hooked = self.draw.choice(self.states)
        group = comfy.hooks.create_hook_lora(hooked, strength_model=0.5, strength_clip=0.0)
        clone = patcher.clone()
        registered = clone.register_all_hook_patches(
            group, comfy.hooks.create_target_dict(comfy.hooks.EnumWeightTarget.Model)
        )
        self.small.load(clone)
        clone.apply_hooks(registered if registered is not None else group)
        self.check([*applied, (hooked, 0.5)])
        clone.apply_hooks(None)
        self.check(applied)

    def eject(self, patcher, applied):
        patcher.model_state_dict()

    def move(self, patcher, applied):
        unload()
        for module in self.model.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = torch.nn.Parameter(
                        parameter.data.clone(), requires_grad=parameter.requires_grad
                    )
        if not self.replaced:
            self.before = self.small.Snapshot(self.model.model)
        self.small.load(patcher)
        self.check(applied)

    def unload(self, patcher, applied):
        unload()
        self.check()

    ACTIONS = (
        "attach",
        "attach",
        "attach",
        "change",
        "load",
        "load",
        "load",
        "detach",
        "clone",
        "delete",
        "failed_load",
        "exception",
        "host_lora",
        "hook",
        "eject",
        "move",
        "unload",
    )


def unload():
    import comfy.model_management

    comfy.model_management.unload_all_models()


@pytest.mark.parametrize("in_place", [False, True])
def test_random_sequences(host, small, monkeypatch, in_place):
    """Whatever is done, live is base + what is on it; after the last detach the model is what it was, to the byte and
    the object.
    """
    model = small.unet(channels=32, mult=(1,), depth=(1,))
    states = [small.lora(model, 1, part="attn1"), small.lora(model, 2, part="attn"), small.lora(model, 3, part="to_q")]
    original = small.Snapshot(model.model)
    if in_place:
        monkeypatch.setattr(host.module("patches.patching.stack_ledger"), "is_patched_in_place", lambda base: True)
    gc.collect()
    gc.freeze()  # what is there now needs no looking at in every sequence's collections
    try:
        for seed in range(int(in_place), 2 * (RUNS // 2), 2):
            sequence = Sequence(host, small, model, states, seed)
            for _ in range(10):
                try:
                    sequence.step()
                except BaseException:
                    print(f"sequence {seed}: {sequence.done}")  # how it came to this
                    raise
            sequence.patchers.clear()
            unload()
            sequence.check()
    finally:
        gc.unfreeze()
    original.check(model.model, objects=False)


def exec_fail():
    raise MemoryError("the host ran out of memory")


def test_lora_hooks(host, small):
    """A hooked LoRA comes and goes while a stack is on: the host writes into the base's own memory."""
    import comfy.hooks

    if not hasattr(comfy.hooks, "create_hook_lora"):
        pytest.skip("this host has no LoRA hooks")
    model = small.unet()
    before, ours, hooked = small.Snapshot(model.model), small.lora(model, 1), small.lora(model, 2)
    patched = graft(host, model, ours)
    group = comfy.hooks.create_hook_lora(hooked, strength_model=0.5, strength_clip=0.0)
    clone = patched.clone()
    target = comfy.hooks.create_target_dict(comfy.hooks.EnumWeightTarget.Model)
    registered = clone.register_all_hook_patches(group, target)
    small.load(clone)
    assert_live(model.model, before.bytes, [(ours, 1.0)])
    for _ in range(2):
        clone.apply_hooks(registered if registered is not None else group)
        assert_live(model.model, before.bytes, [(ours, 1.0), (hooked, 0.5)])
        clone.apply_hooks(None)
        assert_live(model.model, before.bytes, [(ours, 1.0)])
    small.load(model)
    before.check(model.model)


def test_dora_at_the_activations_is_of_the_weights_that_hooks_have_changed(host, small):
    """Its norms are those of the weight that it is on, whichever hook was on before."""
    import comfy.hooks

    if not hasattr(comfy.hooks, "create_hook_lora"):
        pytest.skip("this host has no LoRA hooks")
    found = {}
    for mode in MODES:
        model = small.unet()
        state = small.lora(model, 1)
        for name in [key.removesuffix(".lora_up.weight") for key in state if key.endswith("to_q.lora_up.weight")]:
            weight = model.model.state_dict()[f"{name}.weight"]
            state[f"{name}.dora_scale"] = 1.3 * weight.norm(dim=1, keepdim=True)
        clone = graft(host, model, state, 0.7, mode).clone()
        target, groups = comfy.hooks.create_target_dict(comfy.hooks.EnumWeightTarget.Model), []
        for seed in (2, 3):
            group = comfy.hooks.create_hook_lora(small.lora(model, seed), strength_model=0.8, strength_clip=0.0)
            registered = clone.register_all_hook_patches(group, target)
            groups.append(registered if registered is not None else group)
            clone.hook_patches_backup = None
        small.load(clone)
        for number, group in enumerate((*groups, None, groups[1], groups[0], None)):
            clone.apply_hooks(group)
            found[mode, number] = small.predict(clone)
    assert all(torch.allclose(found["merge", number], found["bypass", number], atol=1e-4) for number in range(6))
    assert not torch.allclose(found["merge", 0], found["merge", 1], atol=1e-2)


def test_dora_that_is_merged_is_of_a_weight_that_the_host_changes_at_each_use(host, small):
    """Then it comes after that change, at the activations, and as often as the model is called."""
    model, changed = small.unet(), small.unet()
    state = small.lora(model, 1)
    names = [key.removesuffix(".lora_up.weight") for key in state if key.endswith("to_q.lora_up.weight")]
    weights = changed.model.state_dict()
    for name in names:
        state[f"{name}.dora_scale"] = 1.3 * weights[f"{name}.weight"].norm(dim=1, keepdim=True)
        model.add_weight_wrapper(f"{name}.weight", lambda weight: 2 * weight + 0.1)
        weights[f"{name}.weight"].mul_(2).add_(0.1)
    patched, expected = graft(host, model, state, 0.7), small.forward(graft(host, changed, state, 0.7))
    for _ in range(2):
        assert torch.allclose(small.forward(patched), expected, atol=1e-4)
    assert not torch.allclose(small.forward(model), expected, atol=1e-2)


def test_stochastic_rounding_is_an_option(host, small, monkeypatch):
    """The environment asks for it: other bytes, the same ones each time, none where nothing is merged; the base comes
    back.
    """
    model = small.unet(torch.bfloat16, channels=32, mult=(1,), depth=(1,))
    before, state = small.Snapshot(model.model), small.lora(model)
    expected = small.forward(graft(host, model, state))
    small.load(model)
    monkeypatch.setenv("GRAFT_ROUNDING", "stochastic")
    patched, _, report = host.call("LoRAStackPatch", model=model, lora_model=state, mode="merge")
    found = small.forward(patched)
    assert "half precision is rounded stochastically (GRAFT_ROUNDING)" in report and not torch.equal(found, expected)
    assert (found - expected).abs().max() < 0.1 and torch.equal(small.forward(patched), found)
    small.load(model)
    before.check(model.model)
    monkeypatch.setenv("GRAFT_ROUNDING", "up")
    with pytest.raises(ValueError, match="GRAFT_ROUNDING is 'up', expected nearest or stochastic"):
        graft(host, model, state)
    monkeypatch.delenv("GRAFT_ROUNDING")
    assert torch.equal(small.forward(graft(host, model, state)), expected)
