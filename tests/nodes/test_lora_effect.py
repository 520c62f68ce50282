"""LoRA Effect on the open host: against weights merged by hand in float64; the model stays as it was."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

CONTEXT = torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(9))
POSITIVE = [[CONTEXT, {}]]


@pytest.fixture
def given(host, small):
    """The inputs of a small measurement, but for the model: two rows, one of them with block weights."""
    for number in range(2):
        save_file(small.lora(small.unet(), number), os.path.join(host.models, "loras", f"effect{number}.safetensors"))
    rows = [{"file": "effect0.safetensors", "model": 0.8}, {"file": "effect1.safetensors", "model": -0.5, "clip": 0.25}]
    rows[1]["blocks"] = "IN01=0.5"
    stack, _ = host.call("GraftLoRAStack", rows=json.dumps({"version": 1, "rows": rows}))
    return {"lora_stack": stack, "positive": POSITIVE, "latent": {"samples": torch.zeros(1, 4, 8, 8)}, "levels": 2}


def run(host, model, given, **more):
    """(stack, report, picture, panel) of the node."""
    node = host.node("GraftLoRAEffect")
    values = {**host.defaults("GraftLoRAEffect"), **given, **more}
    with torch.inference_mode():
        output = node.PREPARE_CLASS_CLONE(None).execute(model=model, **values)
    return (*output.args, output.ui["graft_effect"][0])


def block_of(name):
    path = name.removeprefix("diffusion_model.").split(".")
    kinds = {"input_blocks": "IN", "middle_block": "M", "output_blocks": "OUT"}
    if path[0] not in kinds:
        return "BASE"
    return f"{kinds[path[0]]}{0 if path[0] == 'middle_block' else int(path[1]):02}"


def changes_of(state, strength, weights):
    """The change of each weight of a LoRA in float64, with block weights."""
    changes = {}
    for name in {key.rsplit(".", 2)[0] for key in state if key.endswith("lora_up.weight")}:
        up, down = state[f"{name}.lora_up.weight"].double(), state[f"{name}.lora_down.weight"].double()
        change = float(state[f"{name}.alpha"]) / down.shape[0] * up.flatten(1) @ down.flatten(1)
        weight = f"{name}.weight"
        changes[weight] = (strength * weights.get(block_of(weight), 1.0) * change).view(*up.shape[:1], *down.shape[1:])
    return changes


def dense(small, changes, sigmas, start=None, seed=0):
    """The denoised latents of a float64 model with changes added to its weights, at each noise level."""
    patcher = small.unet(torch.float64)
    weights = dict(patcher.model.named_parameters())
    for name, change in changes.items():
        weights[name].data += change
    clean = torch.zeros(1, 4, 8, 8) if start is None else patcher.model.process_latent_in(start)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed))
    small.load(patcher)
    predictions, device = [], patcher.load_device
    for sigma in sigmas:
        with torch.inference_mode():
            x, level = (clean + sigma * noise).to(device), torch.tensor([sigma], device=device)
            predictions.append(patcher.model.apply_model(x, level, c_crossattn=CONTEXT.to(device)).cpu().double())
    return predictions


def relative(on, off):
    return [float((a - b).norm() / b.norm()) for a, b in zip(on, off, strict=True)]


@pytest.mark.parametrize("picture", [False, True])
def test_the_effect_is_that_of_weights_merged_by_hand(host, small, given, picture):
    model, start = small.unet(), None
    if picture:
        start = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
        given["latent"] = {"samples": start}
    _, _, _, panel = run(host, model, given)
    base = dense(small, {}, panel["levels"], start)
    assert panel["levels"][0] > 2 * panel["levels"][1] > 0.1
    for number, (strength, weights) in enumerate(((0.8, {}), (-0.5, {"IN01": 0.5}))):
        changes = changes_of(small.lora(small.unet(), number), strength, weights)
        row = panel["rows"][number]
        assert row["file"] == f"effect{number}.safetensors" and row["strength"] == strength
        whole = relative(dense(small, changes, panel["levels"], start), base)
        assert row["whole"] == pytest.approx(sum(whole) / 2, rel=1e-3)
        assert {block["name"] for block in row["blocks"]} == {block_of(name) for name in changes}
        for block in row["blocks"]:
            part = {name: change for name, change in changes.items() if block_of(name) == block["name"]}
            expected = relative(dense(small, part, panel["levels"], start), base)
            assert block["levels"] == pytest.approx(expected, rel=1e-3), block["name"]


def test_what_is_kept_comes_out_as_a_stack(host, small, given):
    stack, report, picture, panel = run(host, small.unet(), given, keep=0.6)
    assert [tuple(row) for row in stack] == [tuple(row) for row in given["lora_stack"]]
    for row, shown in zip(stack, panel["rows"], strict=True):
        assert row.blocks == shown["after"] and f"block weights: {row.blocks}" in report
        off = [block["name"] for block in shown["blocks"] if not block["kept"]]
        assert off and sum(block["share"] for block in shown["blocks"] if block["kept"]) >= 0.6
    patched = host.call("LoRAStackPatch", model=small.unet(), lora_stack=stack)[0]
    expected = {}
    for number, (strength, weights) in enumerate(((0.8, {}), (-0.5, {"IN01": 0.5}))):
        kept = {block["name"] for block in panel["rows"][number]["blocks"] if block["kept"]}
        for name, change in changes_of(small.lora(small.unet(), number), strength, weights).items():
            if block_of(name) in kept:
                expected[name] = expected.get(name, 0.0) + change
    by_hand = small.unet()
    for name, change in expected.items():
        dict(by_hand.model.named_parameters())[name].data += change.float()
    assert (small.forward(patched) - small.forward(by_hand)).abs().max() < 1e-4
    assert picture.shape[0] == 1 and picture.shape[-1] == 3 and picture.std() > 0
    before = given["lora_stack"]
    assert [row.blocks for row in run(host, small.unet(), given, keep=1.0)[0]] == [row.blocks for row in before]


@pytest.mark.parametrize("at", [None, 0, 1, 5])
def test_the_model_is_as_it_was_also_after_an_interruption(host, small, given, monkeypatch, at):
    import comfy.model_management as management

    model = small.unet()
    before, plain = small.Snapshot(model.model), small.forward(model)
    state = torch.random.get_rng_state()
    if at is None:
        run(host, model, given)
    else:
        counted = iter(range(100))

        def interrupted():
            if next(counted) == at:
                raise management.InterruptProcessingException

        monkeypatch.setattr(host.module("host.lora_effect"), "raise_if_interrupted", interrupted)
        with pytest.raises(management.InterruptProcessingException):
            run(host, model, given)
    before.check(model.model)
    assert torch.equal(small.forward(model), plain)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    "change", [{"levels": 3}, {"keep": 0.3}, {"measure_seed": 7}, {"latent": 16}, {"positive": 2.0}]
)
def test_every_input_counts(host, small, given, change):
    first = run(host, small.unet(), given)
    if "latent" in change:
        change = {"latent": {"samples": torch.zeros(1, 4, 16, 16)}}
    if "positive" in change:
        change = {"positive": [[CONTEXT * 2, {}]]}
    second = run(host, small.unet(), {**given, **change})
    assert first[3] != second[3] and first[1] != second[1]
    assert run(host, small.unet(), given)[3] == first[3], "the same inputs, the same numbers"


def test_rows_without_a_model_strength_pass_through(host, small, given):
    name = "effect0.safetensors"
    stack, _, _, panel = run(
        host, small.unet(), {**given, "lora_stack": [(name, 0.0, 1.0), (name, 0.5, 1.0)]}, keep=0.5
    )
    assert [tuple(row) for row in stack] == [(name, 0.0, 1.0), (name, 0.5, 1.0)]
    assert stack[0].blocks == "" and stack[1].blocks == panel["rows"][0]["after"] != ""
    assert panel["stack"] == [name]


@pytest.mark.parametrize(
    ("stack", "message"),
    [
        ([], "the stack has no row that changes the model"),
        ([("effect0.safetensors", 0.0, 1.0)], "the stack has no row that changes the model"),
        ([("gone.safetensors", 1.0, 1.0)], r"row 1: .*gone\.safetensors"),
        ([("foreign.safetensors", 1.0, 1.0)], r"foreign\.safetensors cannot be used:\n- no key matches this model"),
    ],
)
def test_refusals(host, small, given, stack, message):
    foreign = {"lora_unet_x.lora_up.weight": torch.ones(8, 2), "lora_unet_x.lora_down.weight": torch.ones(2, 8)}
    save_file(foreign, os.path.join(host.models, "loras", "foreign.safetensors"))
    model = small.unet()
    before = small.Snapshot(model.model)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run(host, model, {**given, "lora_stack": stack})
    before.check(model.model)
