"""The LoRA nodes on the open host, against the host's own LoRA loader and float64."""

import builtins
import hashlib
import json
import logging
import os
import random
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ..model_device import LOAD
from ..sampling_options import sampling_options

MODES = ("merge", "bypass", "host")


def rows(*listed):
    return json.dumps({"version": 1, "rows": list(listed)})


def foreign(name, columns):
    return {f"{name}.lora_up.weight": torch.ones(8, 2), f"{name}.lora_down.weight": torch.ones(2, columns)}


@pytest.fixture
def files(host, small):
    """Two LoRA files for small.unet() in the loras folder: their names and contents."""
    patcher, contents = small.unet(), {}
    for number in range(2):
        contents[f"lora{number}.safetensors"] = small.lora(patcher, number, rank=4 + number)
        save_file(
            contents[f"lora{number}.safetensors"], os.path.join(host.models, "loras", f"lora{number}.safetensors")
        )
    return contents


def with_host_loader(patcher, *loras):
    """The model with LoRAs through ComfyUI's own loading function."""
    import comfy.sd

    for state, strength in loras:
        patcher, _ = comfy.sd.load_lora_for_models(patcher, None, state, strength, 0)
    return patcher


@pytest.mark.parametrize("mode", ["auto", *MODES])
def test_agrees_with_the_host_and_leaves_the_base(host, small, files, mode):
    model = small.unet()
    before, plain = small.Snapshot(model.model), small.forward(model)
    listed = rows({"file": "lora0.safetensors", "model": 0.7}, {"file": "lora1.safetensors", "model": -0.4})
    stack, _ = host.call("GraftLoRAStack", rows=listed)
    patched, clip, report = host.call("LoRAStackPatch", model=model, lora_stack=stack, mode=mode)
    first, second = files.values()
    expected = small.forward(with_host_loader(small.unet(), (first, 0.7), (second, -0.4)))
    assert clip is None and "lora0.safetensors" in report
    assert (small.forward(patched) - expected).abs().max() < 1e-4
    assert (plain - expected).abs().max() > 1e-2
    assert torch.equal(small.forward(model), plain)
    before.check(model.model, objects=mode != "host")


def test_merge_and_bypass_agree_within_rounding(host, small, files):
    model = small.unet(torch.bfloat16)
    stack = [(name, 0.8, 1.0) for name in files]
    merged, bypassed = (
        small.forward(host.call("LoRAStackPatch", model=model, lora_stack=stack, mode=mode)[0])
        for mode in ("merge", "bypass")
    )
    exact = small.forward(host.call("LoRAStackPatch", model=small.unet(), lora_stack=stack)[0])
    assert (bypassed - exact).abs().mean() <= 1.5 * (merged - exact).abs().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_error_against_float64_is_at_most_the_hosts(host, small, files, dtype):
    """Of every touched weight of a loaded model together, to the fourth digit (float32: no worse than the last bits
    that sums leave).
    """
    model = small.unet(dtype)
    base = {name: tensor.double() for name, tensor in model.model.state_dict().items()}
    exact = dict(base)
    for state, strength in zip(files.values(), (0.7, -0.4), strict=True):
        for name in {key.rsplit(".", 2)[0] for key in state if key.endswith("lora_up.weight")}:
            up, down = state[f"{name}.lora_up.weight"].double(), state[f"{name}.lora_down.weight"].double()
            change = strength * float(state[f"{name}.alpha"]) / down.shape[0] * up.flatten(1) @ down.flatten(1)
            exact[f"{name}.weight"] = exact[f"{name}.weight"] + change.reshape(base[f"{name}.weight"].shape)
    stack = list(zip(files, (0.7, -0.4), (1.0, 1.0), strict=True))

    def error(patcher):
        small.load(patcher)
        touched = [name for name in exact if exact[name] is not base[name]]
        live = patcher.model.state_dict()
        return torch.stack([(live[name].cpu().double() - exact[name]).abs().mean() for name in touched]).mean()

    ours = error(host.call("LoRAStackPatch", model=model, lora_stack=stack, mode="merge")[0])
    first, second = files.values()
    theirs = error(with_host_loader(small.unet(dtype), (first, 0.7), (second, -0.4)))
    assert ours <= (1.01 if dtype == torch.float32 else 1.0001) * theirs


@pytest.mark.parametrize("change", [0.003, 0.01, 0.03, 0.1, 0.3])
def test_error_of_random_stacks_is_at_most_the_hosts(host, change):
    """Stacks of 1 to 8 files of any rank and type that change a bfloat16 weight by this share each, beside the host's
    own arithmetic.
    """
    import comfy.float
    import comfy.lora
    from graft_nodes.patches.adapters.lora import LoRA
    from graft_nodes.patches.patching import fuse

    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        draw = random.Random(seed)
        shape = draw.choice([(160, 320), (320, 160), (48, 24, 3, 3), (256, 256)])
        base = (torch.randn(shape, generator=generator) * 0.05).bfloat16()
        exact, theirs, patches = base.double(), base.float(), []
        for _ in range(draw.randint(1, 8)):
            rank, dtype = draw.choice([1, 4, 16, 64]), draw.choice([torch.float32, torch.float16, torch.bfloat16])
            strength = draw.uniform(-1, 1)
            up = torch.randn(shape[0], rank, *(1,) * (len(shape) - 2), generator=generator)
            down = torch.randn(rank, *shape[1:], generator=generator) * base[0].numel() ** -0.5
            up *= change * base.float().norm() / (up.flatten(1) @ down.flatten(1)).norm()
            up, down = up.to(dtype), down.to(dtype)
            patches.append(fuse.Patch(LoRA(up, down, float(rank)), strength))
            exact = exact + strength * (up.double().flatten(1) @ down.double().flatten(1)).view(shape)
            state = {"a.lora_up.weight": up, "a.lora_down.weight": down, "a.alpha": torch.tensor(float(rank))}
            patch = comfy.lora.load_lora(state, {"a": "a.weight"})["a.weight"]
            theirs = comfy.lora.calculate_weight([(strength, patch, 1.0, None, None)], theirs, "a.weight")
        found = comfy.float.stochastic_rounding(theirs, torch.bfloat16, seed=1), fuse.apply_patches(base, patches)
        core, ours = ((one.double() - exact).abs().mean() for one in found)
        assert 0 < ours <= 1.0001 * core, (seed, shape, len(patches), float(ours / core))


def test_a_trained_lora_goes_on_top(host, small, files):
    model, state = small.unet(), small.lora(small.unet(), 7)
    stack = [("lora0.safetensors", 0.5, 0.5)]
    patched = host.call("LoRAStackPatch", model=model, lora_stack=stack, lora_model=state, lora_strength=0.25)[0]
    expected = small.forward(with_host_loader(small.unet(), (files["lora0.safetensors"], 0.5), (state, 0.25)))
    assert (small.forward(patched) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_full_weights_as_differences(host, small, mode):
    model, state = small.unet(), {}
    generator = torch.Generator().manual_seed(3)
    for name, weight in model.model.named_parameters():
        if "diffusion_model.input_blocks.1." in name or "norm" in name:
            change = torch.randn(weight.shape, generator=generator) * 0.02
            state[
                (
                    name.removesuffix(".weight") + ".diff"
                    if name.endswith(".weight")
                    else name.removesuffix(".bias") + ".diff_b"
                )
            ] = change
    other = small.unet()
    for name, weight in other.model.named_parameters():
        key = (
            name.removesuffix(".weight") + ".diff"
            if name.endswith(".weight")
            else name.removesuffix(".bias") + ".diff_b"
        )
        if key in state:
            weight.data += state[key]
    patched, _, _ = host.call("LoRAStackPatch", model=model, lora_model=state, mode=mode)
    assert (small.forward(patched) - small.forward(other)).abs().max() < 1e-4


def test_nothing_to_apply_gives_the_model_itself(host, small, files):
    model = small.unet()
    assert host.call("LoRAStackPatch", model=model)[0] is model
    assert host.call("LoRAStackPatch", model=model, lora_stack=[("lora0.safetensors", 0.0, 1.0)])[0] is model


def test_two_nodes_in_a_row_are_one_stack(host, small, files):
    model = small.unet()
    before = small.Snapshot(model.model)
    once = host.call("LoRAStackPatch", model=model, lora_stack=[("lora0.safetensors", 0.7, 1.0)], mode="merge")[0]
    twice = host.call("LoRAStackPatch", model=once, lora_stack=[("lora1.safetensors", -0.4, 1.0)], mode="bypass")[0]
    first, second = files.values()
    assert (
        small.forward(twice) - small.forward(with_host_loader(small.unet(), (first, 0.7), (second, -0.4)))
    ).abs().max() < 1e-4
    assert (small.forward(once) - small.forward(with_host_loader(small.unet(), (first, 0.7)))).abs().max() < 1e-4
    small.forward(model)
    before.check(model.model)


def of_kind(name, patcher):
    """A file of one kind for every square attention output and one convolution of small.unet()."""
    state, generator = {}, torch.Generator().manual_seed(11)

    def random(*shape):
        return torch.randn(*shape, generator=generator) * 0.2

    for key, weight in patcher.model.named_parameters():
        if not (key.endswith("to_out.0.weight") or key.endswith("input_blocks.1.0.in_layers.2.weight")):
            continue
        base, (out, columns), kernel = key.removesuffix(".weight"), weight.shape[:2], weight.shape[2:]
        flat, ones = columns * kernel.numel(), [1 for _ in kernel]
        state |= {
            f"{base}.{role}": value
            for role, value in {
                "LoHa": {
                    "hada_w1_a": random(out, 4),
                    "hada_w1_b": random(4, flat),
                    "hada_w2_a": random(out, 4),
                    "hada_w2_b": random(4, flat),
                    "alpha": torch.tensor(2.0),
                },
                "LoKr": (
                    {"lokr_w1": random(4, 4), "alpha": torch.tensor(2.0)}
                    | (  # ComfyUI cannot multiply a convolution's w2_a, w2_b
                        {"lokr_w2": random(out // 4, columns // 4, *kernel)}
                        if kernel
                        else {"lokr_w2_a": random(out // 4, 3), "lokr_w2_b": random(3, columns // 4)}
                    )
                ),
                "DoRA": {
                    "lora_up.weight": random(out, 4, *kernel[:0]),
                    "lora_down.weight": random(4, columns, *kernel),
                    "dora_scale": random(1, columns, *(1 for _ in kernel)).abs() + 1,
                },
                "LoCon with a core": {
                    "lora_up.weight": random(out, 4, *ones),
                    "lora_down.weight": random(4, columns, *ones),
                    "alpha": torch.tensor(2.0),
                }
                | ({"lora_mid.weight": random(4, 4, *kernel)} if kernel else {}),
                "IA3": {"weight": random(out), "on_input": torch.tensor(False)},
                "PEFT's OFT": {"oft_R.default.weight": random(flat // 4, 6)},
                "PEFT's BOFT": {"boft_R": random(1, flat // 4, 4, 4), "boft_s": random(out, 1) + 1},
                "OFT": {"oft_blocks": random(4, out // 4, out // 4)},
                "BOFT": {"oft_blocks": random(2, out // 4, 4, 4), "alpha": torch.tensor(0.0)},
                "GLoRA": {
                    "a1.weight": random(columns, 4),
                    "a2.weight": random(4, columns),
                    "b1.weight": random(out, 4),
                    "b2.weight": random(4, flat),
                },
                "set_weight": {"set_weight": random(*weight.shape)},
                "norm weights": {"w_norm": random(*weight.shape), "b_norm": random(out)},
            }[name].items()
        }
    return state


KINDS = [
    "LoCon with a core",
    "LoHa",
    "LoKr",
    "norm weights",
    "DoRA",
    "OFT",
    "BOFT",
    "GLoRA",
    "set_weight",
    "IA3",
    "PEFT's OFT",
    "PEFT's BOFT",
]
HOSTS_OWN = ("LoCon with a core", "DoRA", "set_weight", "norm weights")  # of the embedded host, which has one adapter
FOREIGN = (
    "IA3",
    "PEFT's OFT",
    "PEFT's BOFT",
)  # to every host: merging is the truth, which tests/patches/adapters/test_against_libraries.py holds


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_in_every_mode_as_the_host_applies_it(host, small, name, mode):
    import comfy.weight_adapter

    model = small.unet()
    before, state = small.Snapshot(model.model), of_kind(name, model)
    patched, _, report = host.call("LoRAStackPatch", model=model, lora_model=state, mode=mode)
    ours = small.forward(patched)
    if name in FOREIGN:
        merged = host.call("LoRAStackPatch", model=small.unet(), lora_model=state, mode="merge")[0]
        assert (ours - small.forward(merged)).abs().max() < 1e-3
    elif name in HOSTS_OWN or len(comfy.weight_adapter.adapters) > 1:
        assert (ours - small.forward(with_host_loader(small.unet(), (state, 1.0)))).abs().max() < 1e-3
    assert (ours - small.forward(small.unet())).abs().max() > 1e-2
    if mode == "bypass":
        assert "model: 0 weights merged" in report
    small.forward(model)
    before.check(model.model, objects=mode != "host")


@pytest.mark.parametrize("mode", ["auto", *MODES])
@pytest.mark.parametrize("name", ["OFT", "BOFT"])
@pytest.mark.parametrize("strength", [0.5, -0.7])
def test_oft_as_in_comfyui(host, small, name, mode, strength):
    """Against a real ComfyUI's own loader; against the square of the strength where the host has no OFT (OFT alone)."""
    import comfy.weight_adapter

    model = small.unet()
    before, state = small.Snapshot(model.model), of_kind(name, model)
    given = {"lora_model": state, "lora_strength": strength, "mode": mode}
    patched, _, report = host.call("LoRAStackPatch", model=model, **given, comfyui_oft=True)
    ours, usual = small.forward(patched), host.call("LoRAStackPatch", model=model, **given)
    assert "OFT as in ComfyUI's loader" in report and "OFT as in ComfyUI's loader" not in usual[2]
    assert (ours - small.forward(usual[0])).abs().max() > 1e-2
    if len(comfy.weight_adapter.adapters) > 1:
        expected = small.forward(with_host_loader(small.unet(), (state, strength)))
        assert (ours - expected).abs().max() < 1e-3
    elif name == "OFT":
        squared = host.call("LoRAStackPatch", model=small.unet(), **{**given, "lora_strength": strength**2})[0]
        assert (ours - small.forward(squared)).abs().max() < 1e-3
    merged = host.call("LoRAStackPatch", model=small.unet(), **{**given, "mode": "merge"}, comfyui_oft=True)[0]
    assert (ours - small.forward(merged)).abs().max() < 1e-3
    small.forward(model)
    before.check(model.model, objects=mode != "host")


def test_oft_as_in_comfyui_leaves_other_kinds_alone(host, small, files):
    model, stack = small.unet(), [("lora0.safetensors", 0.7, 1.0)]
    usual, _, report = host.call("LoRAStackPatch", model=model, lora_stack=stack)
    patched, _, report_on = host.call("LoRAStackPatch", model=model, lora_stack=stack, comfyui_oft=True)
    assert torch.equal(small.forward(patched), small.forward(usual)) and report_on == report


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_beside_weights_that_are_inference_tensors(host, small, name):
    """As the executor makes models: at the activations, in bfloat16, and what a merge of the same numbers gives."""
    with torch.inference_mode():
        model = small.unet(torch.bfloat16, channels=32, mult=(1,), depth=(1,))
    assert next(model.model.parameters()).is_inference()
    before, state, plain = small.Snapshot(model.model), of_kind(name, model), small.forward(model)
    merged, bypassed = (
        small.forward(host.call("LoRAStackPatch", model=model, lora_model=state, mode=mode)[0]) for mode in MODES[:2]
    )
    assert (bypassed - merged).abs().mean() < 0.05 * (merged - plain).abs().mean() + 0.01
    assert torch.equal(small.forward(model), plain)
    before.check(model.model)


def test_block_weights(host, small, files):
    model, state = small.unet(), files["lora0.safetensors"]
    stack, _ = host.call(
        "GraftLoRAStack", rows=rows({"file": "lora0.safetensors", "model": 0.8, "blocks": "IN=0, M=0.5, OUT01=0"})
    )
    ours = small.forward(host.call("LoRAStackPatch", model=model, lora_stack=stack)[0])
    scaled = {}
    for key, value in state.items():
        block = (
            0.0 if ".input_blocks." in key or ".output_blocks.1." in key else 0.5 if ".middle_block." in key else 1.0
        )
        scaled[key] = value * block if "lora_up" in key else value
    assert (ours - small.forward(with_host_loader(small.unet(), (scaled, 0.8)))).abs().max() < 1e-4
    stack = [type(stack[0])("lora0.safetensors", 1.0, 1.0, ",".join("1" * 17))]
    with pytest.raises(ValueError, match="this model has no IN04"):
        host.call("LoRAStackPatch", model=model, lora_stack=stack)


@pytest.mark.parametrize("mode", ["auto", *MODES])
@pytest.mark.parametrize("blocks", ["NONE", "BASE=0"])
def test_block_weights_that_leave_nothing_are_said(host, small, files, caplog, blocks, mode):
    model = small.unet()
    stack, _ = host.call("GraftLoRAStack", rows=rows({"file": "lora0.safetensors", "blocks": blocks}))
    with caplog.at_level(logging.WARNING):
        patched, _, report = host.call("LoRAStackPatch", model=model, lora_stack=stack, mode=mode)
    nothing = f"it changes nothing: its strength or its block weights ({blocks}) are 0 for every weight that the file"
    assert "lora0.safetensors: 0 of 84 weights of the model at 1" in report and nothing in report
    assert nothing in caplog.text
    assert torch.equal(small.forward(patched), small.forward(small.unet()))


def test_the_report_counts_the_weights_that_block_weights_leave(host, small, files, caplog):
    state = files["lora0.safetensors"]
    left = [key for key in state if key.endswith("lora_up.weight") and ".input_blocks." not in key]
    stack, _ = host.call("GraftLoRAStack", rows=rows({"file": "lora0.safetensors", "blocks": "IN=0"}))
    with caplog.at_level(logging.WARNING):
        report = host.call("LoRAStackPatch", model=small.unet(), lora_stack=stack)[2]
    assert f"lora0.safetensors: {len(left)} of 84 weights of the model at 1" in report
    assert "changes nothing" not in report + caplog.text and 0 < len(left) < 84


def test_mode_host_works_out_each_layers_factors_once(host, small, monkeypatch):
    """A Tucker core and a LoHa are products of their own before they are factors of the weight."""
    counted = []
    for module, name in (("lora", "LoRA"), ("loha", "LoHa")):
        layer_class = getattr(host.module(f"patches.adapters.{module}"), name)

        def factors(layer, *args, of=layer_class.factors):
            if getattr(layer, "mid", None) is not None or hasattr(layer, "w1_a"):
                counted.append(layer)
            return of(layer, *args)

        monkeypatch.setattr(layer_class, "factors", factors)
    for kind in ("LoHa", "LoCon with a core"):
        counted.clear()
        model = small.unet()
        host.call("LoRAStackPatch", model=model, lora_model=of_kind(kind, model), mode="host")
        assert counted and len(counted) == len({id(layer) for layer in counted}), kind


def test_the_report_says_what_the_file_says(host, small):
    path = os.path.join(host.models, "loras", "said.safetensors")
    tags = json.dumps({"10_zorp": {"a zorp": 12, "left": 3}})
    save_file(
        small.lora(small.unet()),
        path,
        {"ss_network_dim": "4", "modelspec.trigger_phrase": "zorp", "ss_tag_frequency": tags},
    )
    report = host.call("GraftLoRAStack", rows=rows({"file": "said.safetensors"}))[1]
    assert "trigger zorp" in report and "rank 4" in report and "tags a zorp (12), left (3)" in report
    report = host.call("LoRAStackPatch", model=small.unet(), lora_stack=[("said.safetensors", 0.5, 0.5)])[
        2
    ]  # of another pack's stack
    assert (
        "said.safetensors: 84 weights of the model at 0.5 (14 LoCon, 70 LoRA)\n  trigger zorp; rank 4; tags a zorp"
        " (12), lef" in report
    )


@pytest.mark.parametrize(
    ("state", "said", "expected"),
    [
        (foreign("lora_unet_down_blocks_9_attentions_0_transformer_blocks_0_attn2_to_k", 2048), {}, "it is for SDXL"),
        (foreign("lora_unet_double_blocks_0_img_attn_qkv", 8), {}, "it is for Flux"),
        (foreign("x", 8), {"ss_base_model_version": "sd_v2"}, "it is for sd_v2"),
    ],
)
def test_a_file_for_another_model_is_told(host, small, state, said, expected):
    path = os.path.join(host.models, "loras", "other.safetensors")
    save_file(state, path, said)
    with pytest.raises(ValueError, match=expected):
        host.call("LoRAStackPatch", model=small.unet(), lora_stack=[("other.safetensors", 1.0, 1.0)])


@pytest.mark.parametrize("prefix", ["lycoris", "lycoris_unet", "oft_unet", "base_model.model."])
def test_other_trainers_names(host, small, prefix):
    state = {}
    for key, value in small.lora(small.unet(), part="input_blocks.1").items():
        path, _, role = key.removeprefix("diffusion_model.").partition(".lora_" if ".lora_" in key else ".alpha")
        name = f"{prefix}{path}" if prefix.endswith(".") else f"{prefix}_{path.replace('.', '_')}"
        state[f"{name}.lora_{role}" if role else f"{name}.alpha"] = value
    report = host.call("LoRAStackPatch", model=small.unet(), lora_model=state)[2]
    assert f"trained LoRA: {len(state) // 3} weights" in report


# --- bad input ---


GONE = {"lora_unet_gone.lora_up.weight": torch.ones(2, 2), "lora_unet_gone.lora_down.weight": torch.ones(2, 2)}


def truncated(path, state):
    save_file(state, path)
    os.truncate(path, 900)


def of_rank_0(state):
    """The pairs of a LoRA without any rank."""
    ups = {k: v[:, :0] for k, v in state.items() if "lora_up" in k}
    return {**ups, **{k: v[:0] for k, v in state.items() if "lora_down" in k}}


def with_rank(state, rank):
    """The state with the rank of its first two up matrices changed."""
    names = [key for key in state if "lora_up" in key][:2]
    return {key: value[:, :rank].clone() if key in names else value for key, value in state.items()}


def with_context(state, columns):
    """The state with cross-attention that reads a text of another width."""
    wide = ("attn2.to_k.lora_down.weight", "attn2.to_v.lora_down.weight")
    return {key: torch.ones(value.shape[0], columns) if key.endswith(wide) else value for key, value in state.items()}


def renamed_pickle(path, state):
    torch.save(state, path.replace(".safetensors", ".pt"))
    os.replace(path.replace(".safetensors", ".pt"), path)


BAD = {
    "truncated": (truncated, ["not a whole safetensors file", "download or save it again"]),
    "empty": (lambda path, state: Path(path).write_bytes(b""), ["not a whole safetensors file", "it is empty"]),
    "no tensors": (lambda path, state: save_file({}, path), ["it is empty"]),
    "foreign": (lambda path, state: Path(path).write_bytes(b"GIF89a" * 40), ["not a whole safetensors file"]),
    "a checkpoint": (
        lambda path, state: save_file({"model.out.2.weight": torch.ones(2)}, path),
        ["it holds no LoRA layer"],
    ),
    "a pickle by another name": (renamed_pickle, ["is a pickle", "safetensors.torch.save_file"]),
    "another model": (lambda path, state: save_file(GONE, path), ["no key matches this model"]),
    "mixed": (
        lambda path, state: save_file(state | foreign("lora_unet_double_blocks_0_img_attn_qkv", 3072), path),
        ["1 of 85 names match no weight", "double_blocks_0", "mark the row as partial"],
    ),
    "shapes of another model": (
        lambda path, state: save_file(with_context(state, 768), path),
        ["made for SD1.x (its names and shapes), cannot be used", "expected a weight"],
    ),
    "every shape of another model": (
        lambda path, state: save_file({k: v for k, v in with_context(state, 768).items() if ".attn2.to_k." in k}, path),
        ["made for SD1.x (its names and shapes), cannot be used"],
    ),
    "shapes": (
        lambda path, state: save_file({k: v[:-1].clone() if "lora_up" in k else v for k, v in state.items()}, path),
        ["expected a weight"] * 24,
    ),
    "ranks": (lambda path, state: save_file(with_rank(state, 2), path), ["ranks differ"] * 2),
    "nan": (
        lambda path, state: save_file({k: v * torch.nan for k, v in state.items()}, path),
        ["NaN or infinite"] * 48,
    ),
    "rank 0": (
        lambda path, state: save_file({**state, **of_rank_0(state)}, path),
        ["expected real numbers, got none"] * 48,
    ),
    "huge alpha": (
        lambda path, state: save_file(
            {k: torch.tensor(1e30) if k.endswith("alpha") else v for k, v in state.items()}, path
        ),
        ["alpha: is 1e+30, expected at most 1e+08"] * 24,
    ),
    "beyond float32": (
        lambda path, state: save_file({k: v.double() * 1e300 for k, v in state.items()}, path),
        ["NaN or infinite"] * 48,
    ),
    "infinite": (
        lambda path, state: save_file({k: v / 0 if "lora_up" in k else v for k, v in state.items()}, path),
        ["NaN or inf"] * 24,
    ),
}


@pytest.fixture
def workflow(host, small):
    """(a model, runs a workflow that puts one file on it and captures the MODEL and the reports)."""
    model = small.unet()

    class Given:
        """A node that gives the test's model."""

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {}}

        RETURN_TYPES = ("MODEL",)
        FUNCTION = "give"
        CATEGORY = "test"

        def give(self):
            return (model,)

    host.nodes.NODE_CLASS_MAPPINGS.update(GraftTestModel=Given)
    host.fresh()

    def run(name, mode="auto"):
        inputs = {"model": ["1", 0], "lora_stack": ["2", 0], "lora_strength": 1.0, "mode": mode}
        prompt = {
            "1": {"class_type": "GraftTestModel", "inputs": {}},
            "2": {"class_type": "GraftLoRAStack", "inputs": {"rows": rows({"file": name})}},
            "3": {"class_type": "LoRAStackPatch", "inputs": inputs},
        }
        return host.run(prompt, {"model": ["3", 0], "stack report": ["2", 1], "report": ["3", 2]})

    return model, run


def messages_of(result):
    """What a failed workflow says, without tracebacks."""
    return "\n".join(data["exception_message"] for of in result["errors"].values() for data in of)


@pytest.mark.parametrize(("write", "messages"), BAD.values(), ids=BAD)
def test_bad_files(host, small, workflow, write, messages):
    """Through the executor: refused with every problem at once (a message that is expected n times is there at least n
    times), and nothing is changed.
    """
    (model, run), path = workflow, os.path.join(host.models, "loras", "bad.safetensors")
    before = small.Snapshot(model.model)
    write(path, small.lora(model))
    result = run("bad.safetensors")
    said = messages_of(result)
    assert not result["success"] and "bad.safetensors" in said
    assert all(said.count(message) >= messages.count(message) for message in messages), said
    before.check(model.model)
    assert not model.injections and not model.patches
    os.remove(path)


@pytest.mark.parametrize("node", ["GraftLoRAStack", "LoRAStackPatch", "GraftMergeLoRAs"])
def test_every_file_that_cannot_be_read_is_named_once_with_its_rows(host, small, files, node):
    for name in ("gif", "short"):
        Path(os.path.join(host.models, "loras", f"{name}.safetensors")).write_bytes(b"GIF89a" * 40)
    names = ["gif.safetensors", "lora0.safetensors", "short.safetensors", "gif.safetensors"]
    stack = [(name, 1.0, 1.0) for name in names]
    inputs = {
        "GraftLoRAStack": {"rows": rows(*({"file": name} for name in names))},
        "LoRAStackPatch": {"model": small.unet(), "lora_stack": stack},
        "GraftMergeLoRAs": {"lora_stack": stack},
    }[node]
    with pytest.raises(
        ValueError,
        match=r"(?s)- rows 1, 4: .*gif\.safetensors is not a whole.*\n- row 3: .*short\.safetensors is not a whole",
    ) as error:
        host.call(node, **inputs)
    assert str(error.value).count("gif.safetensors") == 1


@pytest.mark.parametrize("strength", [float("nan"), float("inf")])
def test_a_strength_that_is_no_number_changes_nothing(host, small, strength):
    model = small.unet()
    with pytest.raises(
        ValueError, match=f"trained LoRA strength is {strength}, expected a number from -100.0 to 100.0"
    ):
        host.call("LoRAStackPatch", model=model, lora_model=small.lora(model), lora_strength=strength)
    assert not model.injections


@pytest.mark.parametrize("extension", ["pt", "ckpt"])
def test_pickles_are_refused_by_name(host, small, workflow, extension):
    path = os.path.join(host.models, "loras", f"old.{extension}")
    torch.save(small.lora(small.unet()), path)
    result = workflow[1](f"old.{extension}")
    said = messages_of(result)
    assert (
        not result["success"]
        and f"old.{extension} is a pickle, which can run any program" in said
        and "To convert a file" in said
    )
    os.remove(path)


def test_a_file_that_changes_between_two_runs(host, small, workflow):
    """The second run of the same workflow has the new contents; a third one, of unchanged ones, runs nothing again."""
    (model, run), path = workflow, os.path.join(host.models, "loras", "between.safetensors")
    save_file(small.lora(model, 1), path)
    first = run("between.safetensors")["captured"]
    save_file(small.lora(model, 2, rank=6), path)
    second = run("between.safetensors")["captured"]
    assert "rank 4" in first["stack report"] and "rank 6" in second["stack report"]
    expected = small.forward(with_host_loader(small.unet(), (small.lora(model, 2, rank=6), 1.0)))
    assert (small.forward(second["model"]) - expected).abs().max() < 1e-4
    assert run("between.safetensors")["captured"]["model"] is second["model"]


def test_a_missing_file_in_a_saved_workflow(host, files):
    """Before anything runs every missing row is named, by its place in the list with the rows that are off, and with
    what is near.
    """
    listed = rows(
        {"file": "off.safetensors", "on": False},
        {"file": "lora_0.safetensors"},
        {"file": "lora0.safetensors"},
        {"file": "styles/lora1.safetensors"},
        {"file": "qqqq.safetensors"},
    )
    result = host.run({"1": {"class_type": "GraftLoRAStack", "inputs": {"rows": listed}}}, {"stack": ["1", 0]})
    errors = str(result["errors"])
    assert not result["valid"]
    for said in (
        "row 2: no LoRA file 'lora_0.safetensors'; did you mean lora0.safetensors",
        "row 4: no LoRA file 'styles/lora1.safetensors'; did you mean lora1.safetensors",
        "row 5: no LoRA file 'qqqq.safetensors' in ComfyUI's loras folders",
    ):
        assert said in errors.replace("\\", ""), said
    assert "off.safetensors" not in errors and "row 3" not in errors


class ForeignStack:
    """A stack node of another pack: plain tuples."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"names": ("STRING",)}}

    RETURN_TYPES = ("LORA_STACK",)
    FUNCTION = "stack"
    CATEGORY = "test"

    def stack(self, names):
        return ([(name, 1.0, 1.0) for name in names.split()],)


def test_a_missing_file_in_another_packs_stack(host, files):
    """It is found when the stack is used: the node fails, with the row's place in the stack."""
    host.nodes.NODE_CLASS_MAPPINGS.update(GraftTestStack=ForeignStack)
    prompt = {
        "1": {"class_type": "GraftDemo", "inputs": {}},
        "2": {"class_type": "GraftTestStack", "inputs": {"names": "lora0.safetensors lora_1.safetensors"}},
        "3": {
            "class_type": "LoRAStackPatch",
            "inputs": {"model": ["1", 0], "lora_stack": ["2", 0], "lora_strength": 1.0, "mode": "auto"},
        },
    }
    result = host.run(prompt, {"model": ["3", 0]})
    assert result["valid"] and not result["success"]
    assert "row 2: no LoRA file 'lora_1.safetensors'; did you mean lora1.safetensors" in str(result["errors"]).replace(
        "\\", ""
    )


def test_a_second_queue_reads_nothing(host, small, files):
    """What the file's name leads to is garbage by then, of the same size and time: a changed strength still gives the
    first contents.
    """
    path = os.path.join(host.models, "loras", "lora0.safetensors")
    model = small.unet()
    exact = small.forward(with_host_loader(small.unet(), (files["lora0.safetensors"], 0.25)))
    host.call(
        "LoRAStackPatch",
        model=model,
        lora_stack=host.call("GraftLoRAStack", rows=rows({"file": "lora0.safetensors"}))[0],
    )
    found = os.stat(path)
    with open(path + ".new", "wb") as file:
        file.write(b"\xff" * found.st_size)
    os.utime(path + ".new", ns=(found.st_atime_ns, found.st_mtime_ns))
    os.replace(path + ".new", path)
    stack, report = host.call("GraftLoRAStack", rows=rows({"file": "lora0.safetensors", "model": 0.25}))
    again = host.call("LoRAStackPatch", model=model, lora_stack=stack)[0]
    assert (small.forward(again) - exact).abs().max() < 1e-4 and "0.25" in report
    os.utime(path)  # changed on disk: noticed
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        host.call("LoRAStackPatch", model=model, lora_stack=stack)


@pytest.mark.parametrize("mode", ["merge", "bypass", "host"])
def test_a_changed_strength_opens_no_file_and_checks_no_tensor(host, small, files, monkeypatch, mode):
    """Counted: what is opened, and the numbers that are looked at for NaN."""
    model, loaded = small.unet(), None
    looked_at, opened, real_finite, real_open = [], [], torch.isfinite, builtins.open

    def finite(tensor):
        looked_at.append(tensor.numel())
        return real_finite(tensor)

    def opening(path, *arguments, **settings):
        opened.append(str(path))
        return real_open(path, *arguments, **settings)

    monkeypatch.setattr(torch, "isfinite", finite)
    monkeypatch.setattr(builtins, "open", opening)
    counts = []
    for strength in (1.0, 0.25, -0.5):
        listed = rows({"file": "lora0.safetensors", "model": strength}, {"file": "lora1.safetensors", "model": 0.5})
        stack, _ = host.call("GraftLoRAStack", rows=listed)
        loaded = host.call("LoRAStackPatch", model=model, lora_stack=stack, mode=mode)[0]
        small.load(loaded)
        counts.append((len(looked_at), len([path for path in opened if path.endswith(".safetensors")])))
    assert counts[0][0] > 0 and counts[0] == counts[1] == counts[2]
    path = os.path.join(host.models, "loras", "lora0.safetensors")
    state = {key: value.clone() for key, value in files["lora0.safetensors"].items()}
    damaged = next(key for key in state if "lora_up" in key)
    state[damaged].view(-1)[0] = float("nan")
    save_file(state, path)
    with pytest.raises(ValueError, match="NaN or infinite"):
        host.call("LoRAStackPatch", model=model, lora_stack=stack, mode=mode)


def test_a_trained_lora_that_changes_in_place_is_checked_again(host, small):
    model, state = small.unet(), small.lora(small.unet(), 3)
    host.call("LoRAStackPatch", model=model, lora_model=state)
    next(tensor for key, tensor in state.items() if "lora_up" in key).view(-1)[0] = float("inf")
    with pytest.raises(ValueError, match="NaN or infinite"):
        host.call("LoRAStackPatch", model=model, lora_model=state)


def test_a_partial_row_applies_and_counts(host, small):
    model, path = small.unet(), os.path.join(host.models, "loras", "part.safetensors")
    save_file(small.lora(model) | GONE, path)
    stack, _ = host.call("GraftLoRAStack", rows=rows({"file": "part.safetensors", "partial": True}))
    said = "part.safetensors: partial: 1 names match no weight and are left out"
    assert said.removeprefix("part.safetensors: ") in host.call("LoRAStackPatch", model=model, lora_stack=stack)[2]
    made, report = host.call("GraftMergeLoRAs", lora_stack=stack, model=model)
    assert said in report and not [key for key in made if "gone" in key]


def test_onetrainers_embeddings_are_left_out_and_counted(host, small):
    """Its files may hold textual inversions beside the LoRA: patching and merging say which, and use the rest
    as it is.
    """
    model, state = small.unet(), small.lora(small.unet())
    bundled = {
        f"bundle_emb.{name}.{encoder}": torch.ones(2, 8)
        for name in ("zorp", "blick")
        for encoder in ("clip_l", "clip_g")
    }
    save_file(state | bundled, os.path.join(host.models, "loras", "bundled.safetensors"))
    stack = [("bundled.safetensors", 0.7, 1.0)]
    patched, _, report = host.call("LoRAStackPatch", model=model, lora_stack=stack)
    assert "2 embeddings in the file are left out (blick, zorp): to use them" in report
    plain = small.forward(host.call("LoRAStackPatch", model=small.unet(), lora_model=state, lora_strength=0.7)[0])
    assert torch.equal(small.forward(patched), plain)
    made, report = host.call("GraftMergeLoRAs", lora_stack=stack)
    assert "2 embeddings in the file are left out (blick, zorp)" in report and not [
        key for key in made if "bundle" in key
    ]


def test_rows_are_checked_before_anything_runs(host, files):
    stack = host.node("GraftLoRAStack")
    assert stack.validate_inputs(rows=rows({"file": "lora0.safetensors"})) is True
    assert "did you mean lora0.safetensors" in stack.validate_inputs(rows=rows({"file": "lora_0.safetensors"}))
    assert "expected a list of 17" in stack.validate_inputs(rows=rows({"file": "lora0.safetensors", "blocks": "1"}))
    assert "expected start-end" in stack.validate_inputs(rows=rows({"file": "lora0.safetensors", "schedule": "0 1"}))
    assert (
        stack.validate_inputs(rows=rows({"file": "lora0.safetensors", "schedule": "0.2-0.8", "blocks": "OUTALL"}))
        is True
    )
    for name in (
        "../secret.safetensors",
        "/etc/passwd",
        "a/../../b",
        "C:\\x.safetensors",
        "..\\x",
        "output/loras/../../x",
    ):
        assert "is outside the loras folder" in stack.validate_inputs(rows=rows({"file": name})), name


LISTS = {
    "two with blocks": (
        {"file": "lora0.safetensors", "model": 0.7, "clip": 0.2, "blocks": "IN=0, M=0.5, OUT01=0"},
        {"file": "lora1.safetensors", "on": False},
        {"file": "lora1.safetensors", "model": -0.4},
    ),
    "one with a schedule": ({"file": "lora0.safetensors", "schedule": "0.2-0.8"},),
    "none": (),
    "none that changes anything": ({"file": "lora0.safetensors", "model": 0, "clip": 0},),
}


@pytest.mark.parametrize("listed", LISTS.values(), ids=LISTS)
def test_load_loras_is_the_two_nodes_in_one(host, small, files, listed):
    def weights(patched):
        small.load(patched)
        return {name: tensor.clone() for name, tensor in patched.model.state_dict().items()}

    stack, _ = host.call("GraftLoRAStack", rows=rows(*listed))
    two = host.call("LoRAStackPatch", model=small.unet(torch.bfloat16), lora_stack=stack)
    one = host.call("GraftLoadLoRAs", model=small.unet(torch.bfloat16), rows=rows(*listed))
    assert one[1] is two[1] is None and one[2] == two[2]
    expected, found = weights(two[0]), weights(one[0])
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(small.forward(one[0]), small.forward(two[0]))


def test_load_loras_checks_its_rows_as_the_stack_does_and_names_them_as_the_widget_counts(host, small, files):
    stack, loader = host.node("GraftLoRAStack"), host.node("GraftLoadLoRAs")
    off = {"file": "lora1.safetensors", "on": False}
    for row in ({"file": "gone.safetensors"}, {"file": "lora0.safetensors", "blocks": "1"}, {"file": "../x"}):
        said = loader.validate_inputs(rows=rows(off, row))
        assert said == stack.validate_inputs(rows=rows(off, row)) and "row 2" in said
    assert loader.validate_inputs(rows=rows(off)) is True
    text = rows({"file": "lora0.safetensors"})
    assert loader.fingerprint_inputs(model=None, rows=text, clip=None) == stack.fingerprint_inputs(rows=text)
    path = os.path.join(host.models, "loras", "lora0.safetensors")
    Path(path).write_bytes(b"no LoRA")
    with pytest.raises(ValueError, match=r"row 2: .*lora0\.safetensors is not a whole safetensors file"):
        host.call("GraftLoadLoRAs", model=small.unet(), rows=rows(off, {"file": "lora0.safetensors"}))


def test_the_executor_refuses_bad_rows(host):
    result = host.run({"1": {"class_type": "GraftLoRAStack", "inputs": {"rows": "{"}}}, {"stack": ["1", 0]})
    assert not result["valid"] and "not JSON" in str(result["errors"])


def test_a_changed_file_is_noticed(host, small):
    path, stack = os.path.join(host.models, "loras", "changing.safetensors"), host.node("GraftLoRAStack")
    save_file(small.lora(small.unet(), 0), path)
    first = stack.fingerprint_inputs(rows=rows({"file": "changing.safetensors"}))
    assert first == stack.fingerprint_inputs(rows=rows({"file": "changing.safetensors"}))
    save_file(small.lora(small.unet(), 1, rank=5), path)
    assert first != stack.fingerprint_inputs(rows=rows({"file": "changing.safetensors"}))


# --- saving ---


@pytest.mark.parametrize("names", ["kohya", "peft", "comfyui"])
def test_what_is_saved_loads_everywhere(host, small, names, caplog):
    model, state = small.unet(), small.lora(small.unet(), 5)
    path = host.call("GraftSaveLoRA", lora_model=state, names=names, dtype="float32", prefix=f"loras/{names}")[0]
    assert os.path.dirname(path) == os.path.join(host.output, "loras")
    name = "output/loras/" + os.path.basename(path)
    ours = small.forward(host.call("LoRAStackPatch", model=model, lora_stack=[(name, 0.9, 1.0)])[0])
    direct = small.forward(host.call("LoRAStackPatch", model=small.unet(), lora_model=state, lora_strength=0.9)[0])
    assert torch.allclose(ours, direct, rtol=0, atol=1e-5)
    save_file(load_file(path), os.path.join(host.models, "loras", "saved.safetensors"))
    with caplog.at_level(logging.WARNING):
        loaded = host.call(
            "LoraLoaderModelOnly", model=small.unet(), lora_name="saved.safetensors", strength_model=0.9
        )[0]
    assert not [record for record in caplog.records if "not loaded" in record.getMessage()]
    assert (small.forward(loaded) - ours).abs().max() < 1e-4


def test_equal_input_gives_equal_bytes(host, small):
    state = small.lora(small.unet(), 5)
    first, second = (host.call("GraftSaveLoRA", lora_model=lora)[0] for lora in (state, dict(reversed(state.items()))))
    with open(first, "rb") as a, open(second, "rb") as b:
        assert first != second and a.read() == b.read()


def test_differences_that_comfyuis_loaders_ignore_are_said(host, caplog):
    names = ("blocks.0.modulation", "blocks.1.modulation", "blocks.2.modulation", "head.modulation", "x_embedder")
    with caplog.at_level(logging.WARNING):
        host.call("GraftSaveLoRA", lora_model={f"diffusion_model.{name}.diff": torch.ones(2, 2) for name in names})
    (said,) = [record.getMessage() for record in caplog.records if "ignore" in record.getMessage()]
    assert "ignore 4 of these differences" in said and "blocks.2.modulation …" in said
    assert "load the file with LoRA Stack and Patch Model with LoRA Stack" in said
    caplog.clear()
    host.call("GraftSaveLoRA", lora_model={"diffusion_model.x_embedder.diff": torch.ones(2, 2)})
    assert not caplog.records


def test_a_state_is_saved_with_its_metadata(host, small, monkeypatch):
    from graft_nodes.training.objective.settings import ObjectiveSettings
    from safetensors import safe_open

    class State:
        task = "denoising"
        settings = types.SimpleNamespace(objective=ObjectiveSettings())

        def lora_model(self, ema):
            return small.lora(small.unet(), 5)

    monkeypatch.setattr(host.module("training.lora_metadata"), "lora_metadata", lambda state: {"ss_steps": "250"})
    path = host.call("GraftSaveLoRA", state=State())[0]
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    with open(path, "rb") as file:
        content = file.read()
    data = content[8 + int.from_bytes(content[:8], "little") :]
    assert metadata["sshs_model_hash"] == hashlib.sha256(data).hexdigest() and len(metadata["sshs_legacy_hash"]) == 8
    assert metadata["ss_steps"] == "250" and metadata["ss_network_dim"] == "4" and metadata["ss_network_alpha"] == "2"
    with pytest.raises(ValueError, match="exactly one"):
        host.call("GraftSaveLoRA")
    with pytest.raises(ValueError, match="exactly one"):
        host.call("GraftSaveLoRA", state=State(), lora_model={})
    with pytest.raises(ValueError, match="inside ComfyUI's output folder"):
        host.call("GraftSaveLoRA", state=State(), prefix="../loras/x")


def test_a_file_of_at_most_a_size_is_read_whole_from_any_of_its_shards(host, small):
    unet = small.unet()
    lora = small.lora(unet, 5)
    whole = host.call("GraftSaveLoRA", lora_model=lora, prefix="loras/whole", dtype="float32")[0]
    given = {"lora_model": lora, "dtype": "float32", "max_shard_gb": os.path.getsize(whole) / 2.5e9}
    first = host.call("GraftSaveLoRA", prefix="loras/parts", **given)[0]
    folder, (name, _, end) = os.path.dirname(first), os.path.basename(first).rpartition("-00001-of-")
    parts = sorted(file for file in os.listdir(folder) if file.startswith(f"{name}-"))
    assert end.startswith("0000") and len(parts) == int(end[:5]) > 2
    assert all(os.path.getsize(os.path.join(folder, part)) < os.path.getsize(whole) / 2 for part in parts)
    from graft_nodes.patches.lora_files import open_file

    expected, metadata = open_file.load(whole)
    for part in parts:
        path = os.path.join(folder, part)
        found, said = open_file.load(path)
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
        assert said["sshs_model_hash"] == metadata["sshs_model_hash"]
        assert open_file.read_lora_header(path)[0].keys() == expected.keys()
    version = open_file.file_version(first)
    os.utime(os.path.join(folder, parts[-1]), ns=(0, 0))
    assert open_file.file_version(first) != version
    os.remove(os.path.join(folder, parts[-1]))
    with pytest.raises(ValueError, match=f"{parts[-1]}: missing"):
        open_file.load(first)


def test_a_row_with_a_schedule(host, small):
    """On in the second half of sampling: the base before, the whole LoRA after, without anything loaded or computed in
    between.
    """
    from graft_nodes.patches.lora_files.stack_rows import StackRow

    model = small.unet(channels=32, mult=(1,), depth=(1,))
    before, states = small.Snapshot(model.model), [small.lora(model, seed) for seed in (1, 2)]
    for number, state in enumerate(states):
        save_file(state, os.path.join(host.models, "loras", f"scheduled{number}.safetensors"))

    def stack(first, schedule=""):
        rows = [
            StackRow(f"scheduled{n}.safetensors", 1.0, 1.0, schedule="" if n else schedule)
            for n in ((0, 1) if first else (1,))
        ]
        return host.call("LoRAStackPatch", model=model, lora_stack=rows)

    patched, _, report = stack(True, "0.5-1")
    assert "at the activations because their strength changes while sampling" in report
    sampling = model.get_model_object("model_sampling")

    def predicted(patcher, percent):
        small.load(patcher)
        x = torch.linspace(-1, 1, 512, device=LOAD).view(2, 4, 8, 8)
        context = torch.linspace(-1, 1, 240, device=LOAD).view(2, 5, 24)
        sigma = torch.full((2,), float(sampling.percent_to_sigma(percent)), device=LOAD)
        options = {**sampling_options(patcher), "sigmas": sigma}
        with torch.inference_mode():
            return patcher.model.apply_model(x, sigma, c_crossattn=context, transformer_options=options)

    without, whole = stack(False)[0], stack(True)[0]
    for percent, wanted in ((0.1, without), (0.49, without), (0.5, whole), (0.9, whole), (0.3, without)):
        assert torch.allclose(predicted(patched, percent), predicted(wanted, percent), atol=1e-4), percent
    assert not torch.allclose(predicted(without, 0.9), predicted(whole, 0.9), atol=1e-4)
    with pytest.raises(ValueError, match="which patch mode merge cannot do"):
        host.call(
            "LoRAStackPatch",
            model=model,
            lora_stack=[StackRow("scheduled0.safetensors", 1.0, 1.0, schedule="0.5-1")],
            mode="merge",
        )
    small.load(model)
    before.check(model.model)


def test_a_schedule_on_the_model_that_a_guider_has_for_the_negative(host, small):
    """ComfyUI's DualModelGuider calls its second model with the options, and so the wrappers, of the first."""
    import comfy.sampler_helpers
    import comfy.samplers
    from graft_nodes.patches.lora_files.stack_rows import StackRow

    first, second = small.unet(channels=32, mult=(1,), depth=(1,)), small.unet(channels=32, mult=(1,), depth=(1,))
    save_file(small.lora(second, 1), os.path.join(host.models, "loras", "negative.safetensors"))
    scheduled, whole = (
        host.call(
            "LoRAStackPatch",
            model=second,
            lora_stack=[StackRow("negative.safetensors", 1.0, 1.0, schedule=schedule)],
            mode="bypass",
        )[0]
        for schedule in ("0.5-1", "")
    )
    seen = []

    class TwoModels(comfy.samplers.CFGGuider):
        def outer_sample(self, noise, *args, **kwargs):
            conds = {"negative": [dict(entry) for entry in self.conds["negative"]]}
            self.other, conds, _ = comfy.sampler_helpers.prepare_sampling(
                scheduled, noise.shape, conds, scheduled.model_options
            )
            scheduled.pre_run()
            self.negative = comfy.samplers.process_conds(self.other, noise, conds, scheduled.load_device)["negative"]
            try:
                return super().outer_sample(noise, *args, **kwargs)
            finally:
                scheduled.cleanup()

        def predict_noise(self, x, timestep, model_options=None, seed=None):
            positive = self.conds["positive"]
            (cond,) = comfy.samplers.calc_cond_batch(self.inner_model, [positive], x, timestep, model_options)
            (uncond,) = comfy.samplers.calc_cond_batch(self.other, [self.negative], x, timestep, model_options)
            seen.append((x.clone(), timestep.clone(), uncond.clone()))
            return uncond + 3 * (cond - uncond)

    context, noise = torch.linspace(-1, 1, 120).view(1, 5, 24), torch.linspace(-1, 1, 256).view(1, 4, 8, 8)
    guider = TwoModels(first)
    guider.set_conds([[context, {}]], [[context, {}]])
    guider.set_cfg(3.0)
    sampling = second.get_model_object("model_sampling")
    sigmas = comfy.samplers.calculate_sigmas(sampling, "normal", 6)
    share, halves = host.module("host.lora_schedules").sampled_share, set()
    with torch.inference_mode():
        guider.sample(noise, torch.zeros_like(noise), comfy.samplers.sampler_object("euler"), sigmas, seed=0)
        for x, sigma, uncond in seen:
            is_on = share(sampling, float(sigma)) >= 0.5
            halves.add(is_on)
            reference = whole if is_on else second
            small.load(reference)
            options = {**sampling_options(reference), "sigmas": sigma}
            wanted = reference.model.apply_model(x, sigma, c_crossattn=context.to(LOAD), transformer_options=options)
            torch.testing.assert_close(uncond, wanted, rtol=0, atol=1e-4)
    assert halves == {False, True}


@pytest.mark.parametrize("percent", [0.25, 0.5, 0.75])
def test_a_schedule_begins_at_the_level_where_the_hosts_own_begin(host, small, percent):
    sampling, share = small.unet().get_model_object("model_sampling"), host.module("host.lora_schedules").sampled_share
    level = float(sampling.percent_to_sigma(percent))
    assert share(sampling, level * 1.0004) < percent <= share(sampling, level) <= share(sampling, level * 0.9996)


@pytest.mark.parametrize(
    ("order", "refused"), [("scheduled lora, dora", True), ("scheduled dora", True), ("dora, scheduled lora", False)]
)
def test_a_schedule_beside_what_changes_the_weight_that_it_finds(host, small, order, refused):
    from graft_nodes.patches.lora_files.stack_rows import StackRow

    model = small.unet(channels=32, mult=(1,), depth=(1,))
    for name, state in (("lora", small.lora(model, part="to_out")), ("dora", of_kind("DoRA", model))):
        save_file(state, os.path.join(host.models, "loras", f"{name}.safetensors"))
    words = [row.split() for row in order.split(", ")]
    stack = [StackRow(f"{row[-1]}.safetensors", 1.0, 1.0, schedule="0-1" if len(row) > 1 else "") for row in words]
    if refused:
        with pytest.raises(
            ValueError, match=r"move rows with a schedule to the end:\n- diffusion_model\..*weight: DoRA"
        ):
            host.call("LoRAStackPatch", model=model, lora_stack=stack)
        return
    found = small.forward(host.call("LoRAStackPatch", model=model, lora_stack=stack)[0])
    wanted = small.forward(host.call("LoRAStackPatch", model=model, lora_stack=[StackRow(*row) for row in stack])[0])
    assert (found - wanted).abs().max() < 1e-4
    with pytest.raises(
        ValueError, match="move rows with a schedule to the end"
    ):  # also where the schedule is an earlier node's
        host.call(
            "LoRAStackPatch",
            model=host.call("LoRAStackPatch", model=model, lora_stack=stack[1:])[0],
            lora_stack=stack[:1],
        )


@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
@pytest.mark.parametrize("way", ["partly", "paged"])
def test_a_model_that_is_not_wholly_on_the_device(host, small, monkeypatch, way, kind):
    """What the host streams or pages in from elsewhere is patched at the activations, whatever the layer, and the
    report says why.
    """
    model = small.unet(channels=32, mult=(1,), depth=(1,))
    if way == "partly":
        model.model.model_lowvram = True
    else:
        monkeypatch.setattr(type(model), "is_dynamic", lambda self: True, raising=False)
    why = {
        "partly": "only a part of the model is loaded on the device",
        "paged": "ComfyUI moves the weights in and out of VRAM",
    }[way]
    state = small.lora(model) if kind == "LoRA" else of_kind(kind, model)
    _, _, report = host.call("LoRAStackPatch", model=model, lora_model=state)
    assert f"at the activations because {why}" in report and "model: 0 weights merged" in report
    with pytest.raises(ValueError, match=f"cannot be merged, {why}"):
        host.call("LoRAStackPatch", model=model, lora_model=small.lora(model), mode="merge")


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_files_of_unusual_types(host, small, kind, dtype):
    """Are what their numbers in float32 are, merged and at the activations."""
    model, names = small.unet(dtype, channels=32, mult=(1,), depth=(1,)), ("unusual", "plain")
    state = {
        key: value if key.endswith("alpha") else value.to(kind) for key, value in small.lora(model, scale=0.2).items()
    }
    for name, values in zip(names, (state, {key: value.float() for key, value in state.items()}), strict=True):
        save_file(values, os.path.join(host.models, "loras", f"{name}.safetensors"))
    for mode in ("merge", "bypass"):
        stacks = ([(f"{name}.safetensors", 1.0, 1.0)] for name in names)
        one, other = (
            small.forward(host.call("LoRAStackPatch", model=model, lora_stack=stack, mode=mode)[0]) for stack in stacks
        )
        assert torch.isfinite(one).all() and torch.equal(one, other) and not torch.equal(one, small.forward(model))


def _of_every_kind(model, kind):
    """Layers of one kind on every query of self-attention."""
    state, generator = {}, torch.Generator().manual_seed(3)
    for name, weight in model.model.named_parameters():
        if name.endswith("attn1.to_q.weight"):
            base, (out, columns) = name.removesuffix(".weight"), weight.shape
            up, down = (0.1 * torch.randn(*sides, generator=generator) for sides in ((out, 2), (2, columns)))
            state |= {
                f"{base}.{key}": tensor
                for key, tensor in {
                    "LoRA": {"lora_up.weight": up, "lora_down.weight": down},
                    "DoRA": {
                        "lora_up.weight": up,
                        "lora_down.weight": down,
                        "dora_scale": 1.1 * weight.detach().norm(dim=1, keepdim=True),
                    },
                    "OFT": {"oft_blocks": 0.2 * torch.randn(out // 8, 8, 8, generator=generator)},
                    "IA3": {"weight": torch.full((out,), 0.5), "on_input": torch.tensor(0)},
                    "set": {"set_weight": 0.1 * torch.randn(out, columns, generator=generator)},
                }[kind].items()
            }
    return state


@pytest.mark.parametrize("first", ["host", "graft"])
@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "OFT", "IA3", "set"])
def test_every_kind_finds_the_same_weight_however_much_is_loaded(host, small, kind, first):
    """What the host's own LoRA makes of a weight comes first, also where the host applies it only as the weight is
    used.
    """
    import comfy.sd

    def theirs(patcher):
        return comfy.sd.load_lora_for_models(patcher, None, small.lora(model, seed=9, scale=0.3), 1.0, 0)[0]

    def ours(patcher):
        return host.call("LoRAStackPatch", model=patcher, lora_model=_of_every_kind(model, kind), mode="auto")[0]

    model = small.unet()
    before, both = small.Snapshot(model.model), ours(theirs(model)) if first == "host" else theirs(ours(model))
    whole, alone = small.forward(both), small.forward(theirs(model))
    assert not torch.allclose(whole, alone, atol=1e-2)
    import comfy.model_management

    comfy.model_management.unload_all_models()
    both.partially_load(model.load_device, extra_memory=model.model_size() // 3)
    assert torch.allclose(small.predict(both), whole, rtol=0, atol=2e-5 * float(whole.abs().max()))
    both.detach()
    before.check(model.model, objects=False)


@pytest.mark.parametrize("mode", ["auto", "bypass"])
@pytest.mark.parametrize("why", ["is_dynamic", "model_lowvram"])
def test_a_norm_beside_weights_that_cannot_be_merged_is_left_to_the_host(host, small, mode, why):
    """LyCORIS' files and those of distilled models change norms, which have no bypass."""
    model = small.unet()
    norm = "diffusion_model.middle_block.1.transformer_blocks.0.norm1"
    state = {**small.lora(model), f"{norm}.diff": torch.full_like(model.model.get_parameter(f"{norm}.weight"), 0.3)}
    wanted = small.forward(host.call("LoRAStackPatch", model=model, lora_model=state)[0])
    import comfy.model_management

    comfy.model_management.unload_all_models()
    with pytest.MonkeyPatch.context() as patch:
        if why == "is_dynamic":
            patch.setattr(type(model), "is_dynamic", lambda _: True, raising=False)
        else:
            patch.setattr(model.model, "model_lowvram", True, raising=False)
        patched, _, report = host.call("LoRAStackPatch", model=model, lora_model=state, mode=mode)
        patch.setattr(host.module("storage.problem_list"), "SHOWN", 1000)
        with pytest.raises(ValueError, match=r"norm1\.weight: cannot be merged"):
            host.call("LoRAStackPatch", model=model, lora_model=state, mode="merge")
    reason = {"is_dynamic": "ComfyUI moves the weights", "model_lowvram": "only a part of the model"}[why]
    assert f"1 through ComfyUI's own patches because LayerNorm has no bypass and {reason}" in report
    assert torch.allclose(small.forward(patched), wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
    assert not torch.allclose(
        small.forward(host.call("LoRAStackPatch", model=model, lora_model=small.lora(model))[0]), wanted, atol=1e-3
    )


def test_mode_host_keeps_a_kronecker_product_as_small_as_its_file(host, small):
    model = small.unet()
    name, weight = next(
        (name, weight) for name, weight in model.model.named_parameters() if name.endswith("attn1.to_q.weight")
    )
    base, (out, columns) = name.removesuffix(".weight"), weight.shape
    state = {f"{base}.lokr_w1": torch.randn(4, 4), f"{base}.lokr_w2": 0.1 * torch.randn(out // 4, columns // 4)}
    patched = host.call("LoRAStackPatch", model=model, lora_model=state, mode="host")[0]
    (patch,) = patched.patches[name]
    assert type(patch[1]).__name__ == "GraftAdapter"
    wanted = small.forward(host.call("LoRAStackPatch", model=model, lora_model=state, mode="merge")[0])
    assert torch.allclose(small.forward(patched), wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("beside", ["alone", "beside the host's own LoRA"])
@pytest.mark.parametrize("mode", ["merge", "bypass"])
def test_a_model_that_the_host_loads_in_part(host, small, mode, beside):
    """A stack is whole while the host loads half of the model, gives some back, and loads the rest; the embedded host
    loads all at once.
    """
    import comfy.model_patcher
    import comfy.sd

    def patched():
        model = small.unet()
        base = (
            model
            if beside == "alone"
            else comfy.sd.load_lora_for_models(model, None, small.lora(model, seed=5), 1.0, 0)[0]
        )
        return model, host.call("LoRAStackPatch", model=base, lora_model=small.lora(model), mode=mode)[0]

    wanted = small.forward(patched()[1])
    model, stacked = patched()
    before, whole = small.Snapshot(model.model), model.model_size()

    def check(partly):
        assert getattr(model.model, "model_lowvram", False) == (partly and hasattr(comfy.model_patcher, "LowVramPatch"))
        found = small.predict(stacked)
        assert torch.allclose(found, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))

    for _ in range(2):
        stacked.partially_load(model.load_device, extra_memory=whole // 2)
        check(partly=True)
        stacked.partially_unload(model.offload_device, whole // 4)
        check(partly=True)
        stacked.partially_load(model.load_device, extra_memory=2 * whole)
        check(partly=False)
        stacked.detach()
        before.check(model.model, objects=beside == "alone")
        model.model.to(model.load_device)
        assert not torch.allclose(small.predict(model), wanted, rtol=0, atol=1e-3)
        model.model.to(model.offload_device)
