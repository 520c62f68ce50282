"""LoRA Conflicts on the open host: real files against dense float64, the stack that it suggests, and refusals."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file


def changes_of(state):
    changes = {}
    for name in {key.rsplit(".", 2)[0] for key in state if key.endswith("lora_up.weight")}:
        up, down = state[f"{name}.lora_up.weight"].double(), state[f"{name}.lora_down.weight"].double()
        changes[name] = float(state[f"{name}.alpha"]) / down.shape[0] * up.flatten(1) @ down.flatten(1)
    return changes


@pytest.fixture
def stack(host, small):
    """Three rows: two that are partly against each other in the output blocks, and one on its own."""
    model = small.unet()
    states = [small.lora(model, number, scale=0.1) for number in range(3)]
    for key, tensor in states[0].items():
        if "output_blocks" in key and "lora_up" in key:
            states[1][key] = -tensor
        elif "output_blocks" in key:
            states[1][key] = tensor + 0.5 * states[1][key] if "lora_down" in key else tensor
    for number, state in enumerate(states):
        contiguous = {key: tensor.contiguous() for key, tensor in state.items()}
        save_file(contiguous, os.path.join(host.models, "loras", f"conflict{number}.safetensors"))
    rows = [{"file": f"conflict{number}.safetensors", "model": strength} for number, strength in enumerate((1, 0.5, 1))]
    rows.insert(0, {"file": "conflict2.safetensors", "model": 0.0, "blocks": "IN=0.5"})
    return host.call("GraftLoRAStack", rows=json.dumps({"version": 1, "rows": rows}))[0], states


def run(host, model, **given):
    """(stack, report, picture, panel) of the node."""
    node = host.node("GraftLoRAConflicts")
    with torch.inference_mode():
        output = node.PREPARE_CLASS_CLONE(None).execute(model=model, **given)
    return (*output.args, output.ui["graft_conflicts"][0])


def test_pairs_blocks_and_suggestion(host, small, stack):
    listed, states = stack
    model = small.unet()
    before = small.Snapshot(model.model)
    suggested, report, picture, panel = run(host, model, lora_stack=listed)
    assert [pair["rows"] for pair in panel["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    dense = [changes_of(state) for state in states]
    signs = torch.tensor([1.0, 0.5, 1.0])
    for pair in panel["pairs"]:
        first, second = pair["rows"]
        vectors = [
            torch.cat([dense[row][name].flatten() * signs[row] for name in sorted(dense[0])]) for row in (first, second)
        ]
        expected = float(vectors[0] @ vectors[1] / vectors[0].norm() / vectors[1].norm())
        assert pair["cosine"] == pytest.approx(expected, abs=1e-6)
    cosines = {block: cosine for block, cosine, _, _ in panel["pairs"][0]["blocks"]}
    fighting = {block for block, cosine in cosines.items() if cosine < -0.1}
    assert fighting and all(block.startswith("OUT") for block in fighting) and "rows 1 and 2 cancel" in report
    assert [tuple(row) for row in suggested] == [tuple(row) for row in listed]
    unused, strong, weak, alone = suggested
    assert (unused.blocks, strong.blocks, alone.blocks) == ("IN=0.5", "", "") and weak.blocks == panel["after"][1]
    again = run(host, model, lora_stack=suggested)[3]["pairs"][0]
    assert abs(again["cosine"]) < abs(panel["pairs"][0]["cosine"]), "they fight less"
    assert panel["worst"][0][0] == [0, 1] and panel["fights"] >= len(panel["worst"]) > 0
    assert [row["before"] for row in panel["rows"]] == ["", "", ""]
    assert picture.shape[0] == 1 and picture.std() > 0
    assert run(host, model, lora_stack=listed, threshold=1.0)[3]["fights"] == 0
    before.check(model.model)


@pytest.mark.parametrize("count", [0, 1])
def test_it_takes_two(host, small, stack, count):
    listed, _ = stack
    with pytest.raises(ValueError, match=f"the stack has {count} rows that change the model, and it takes two"):
        run(host, small.unet(), lora_stack=listed[: count + 1])


def test_refusals_name_the_file(host, small, stack):
    listed, _ = stack
    foreign = {"lora_unet_x.lora_up.weight": torch.ones(8, 2), "lora_unet_x.lora_down.weight": torch.ones(2, 8)}
    save_file(foreign, os.path.join(host.models, "loras", "foreign.safetensors"))
    for name, message in (
        ("gone.safetensors", r"row \d+: .*gone"),
        ("foreign.safetensors", "no key matches this model"),
    ):
        with pytest.raises(ValueError, match=message):
            run(host, small.unet(), lora_stack=[*listed, (name, 1.0, 1.0)])
    listed[1].blocks = "OUT99=0"
    with pytest.raises(ValueError, match="this model has no OUT99"):
        run(host, small.unet(), lora_stack=listed)
