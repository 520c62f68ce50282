"""Merged and extracted LoRAs on the open host, against the stack or the model they were made of."""

import os
import re

import pytest
import torch
from graft_nodes.patches.lora_files.merge_methods import METHODS
from graft_nodes.storage.digest import sha256_of_tensors
from safetensors.torch import save_file

from .test_lora import KINDS, of_kind


@pytest.fixture
def stack(host, small):
    for number in range(2):
        save_file(small.lora(small.unet(), number), os.path.join(host.models, "loras", f"part{number}.safetensors"))
    return [("part0.safetensors", 0.7, 1.0), ("part1.safetensors", -0.4, 1.0)]


@pytest.mark.parametrize("rank", [0, 8])
def test_merged_is_the_stack(host, small, stack, rank):
    made, report = host.call("GraftMergeLoRAs", lora_stack=stack, rank=rank)
    ours = small.forward(host.call("LoRAStackPatch", model=small.unet(), lora_model=made)[0])
    direct = small.forward(host.call("LoRAStackPatch", model=small.unet(), lora_stack=stack)[0])
    assert (ours - direct).abs().max() < 1e-4 and "largest rank 8" in report


def test_block_weights_are_merged_too(host, small, stack):
    row = host.call(
        "GraftLoRAStack",
        rows='{"version": 1, "rows": [{"file": "part0.safetensors", "blocks": "IN=0, M=0.5, OUT01=2"}]}',
    )[0]
    made, _ = host.call("GraftMergeLoRAs", lora_stack=[*row, stack[1]])
    ours = small.forward(host.call("LoRAStackPatch", model=small.unet(), lora_model=made)[0])
    direct = small.forward(host.call("LoRAStackPatch", model=small.unet(), lora_stack=[*row, stack[1]])[0])
    assert (ours - direct).abs().max() < 1e-4
    row[0].schedule = "0-0.5"
    with pytest.raises(ValueError, match=r"part0\.safetensors: a LoRA with a sampling schedule cannot be merged"):
        host.call("GraftMergeLoRAs", lora_stack=row)


def test_a_lower_rank_says_what_is_lost(host, small, stack):
    assert "of the change left out (by norm)" in host.call("GraftMergeLoRAs", lora_stack=stack, rank=2)[1]


def test_what_is_lost_never_reads_as_none_nor_rounding_as_a_loss(host, small, stack):
    state = small.lora(small.unet(), 0)
    for key, tensor in state.items():
        if key.endswith("lora_down.weight"):
            tensor[2:] *= 1e-5
    save_file(state, os.path.join(host.models, "loras", "tail.safetensors"))
    report = host.call("GraftMergeLoRAs", lora_stack=[("tail.safetensors", 1.0, 1.0)], rank=2)[1]
    assert re.search(
        r", less than 0\.01% of the change left out \(by norm\), most in \S+ \(less than 0\.01%\)$", report
    )
    both = [("part0.safetensors", 0.7, 1.0), ("part0.safetensors", -0.7, -1.0)]
    assert host.call("GraftMergeLoRAs", lora_stack=both, rank=2)[1].endswith("nothing left out")
    twice = host.call("GraftMergeLoRAs", lora_stack=[both[0], both[0]], method="karcher")[1].splitlines()
    assert twice[1:] == ["part0.safetensors: karcher leaves nothing out"] * 2


def test_the_report_says_of_a_change_of_zero_what_karcher_makes_of_it(host, small, stack):
    """Layers that were never trained are zero in many files."""
    state = small.lora(small.unet(), 0)
    ups = [key for key in state if key.endswith("lora_up.weight")]
    for key in ups[:2]:
        state[key].zero_()
    save_file(state, os.path.join(host.models, "loras", "untrained.safetensors"))
    both = [("part0.safetensors", 1.0, 1.0), ("untrained.safetensors", 1.0, 1.0)]
    lines = host.call("GraftMergeLoRAs", lora_stack=both, method="karcher")[1].splitlines()
    assert lines[-1] == (
        "untrained.safetensors: its change is zero in 2 layers. There karcher counts it neither in the direction nor in"
        " the length; mergekit counts it in the length, with 0"
    )
    assert not any("zero" in line for line in lines[:-1])
    assert "zero" not in host.call("GraftMergeLoRAs", lora_stack=both, method="ties")[1]


@pytest.mark.parametrize("method", METHODS.names())
def test_methods_say_what_they_lose_with_and_without_a_model(host, small, stack, method):
    """With a model and without one the same LoRA is made; at full rank nothing is cut."""
    given = {"lora_stack": stack, "method": method, "rank": 4096, "density": 0.6}
    made, report = host.call("GraftMergeLoRAs", **given)
    with_model, _ = host.call("GraftMergeLoRAs", model=small.unet(), **given)
    lines = report.splitlines()
    if method == "sum":
        assert len(lines) == 1
    else:
        assert lines[0].startswith(f"{method} of part0.safetensors at 0.7 + part1.safetensors at -0.4: ")
        for name, line in zip(("part0", "part1"), lines[1:], strict=True):
            assert (
                line.startswith(f"{name}.safetensors: {method} leaves out ")
                and "% of its change (by norm), most in" in line
            )
    assert lines[0].endswith("nothing left out")
    if method not in ("dare_linear", "dare_ties", "della"):  # there the layer's name seeds its masks
        ours = small.forward(host.call("LoRAStackPatch", model=small.unet(), lora_model=made)[0])
        theirs = small.forward(host.call("LoRAStackPatch", model=small.unet(), lora_model=with_model)[0])
        assert (ours - theirs).abs().max() < 1e-4


def test_every_setting_of_a_method_changes_the_result(host, small, stack):
    def made(**given):
        given = {"lora_stack": stack, "method": "della", "resize": "energy"} | given
        return sha256_of_tensors(host.call("GraftMergeLoRAs", **given)[0])

    before = made()
    assert made() == before
    flips = {
        "method": "dare_ties",
        "density": 0.6,
        "resize": "sv_fro",
        "resize_to": 0.5,
        "epsilon": 0.4,
        "mask_seed": 1,
        "rank": 2,
    }
    inputs = {entry.id for entry in host.node("GraftMergeLoRAs").define_schema().inputs}
    assert inputs == {"lora_stack", "model", "clip", *flips}
    for name, value in flips.items():
        assert made(**{name: value}) != before, name


def test_resize_says_the_ranks(host, small, stack):
    _, report = host.call("GraftMergeLoRAs", lora_stack=stack, resize="energy", resize_to=0.7)
    assert re.search(r"largest rank \d, lowest \d, \d+\.\d\d% of the change left out \(by norm\), most in ", report)


def test_impossible_settings_are_refused_before_the_run(host):
    node = host.node("GraftMergeLoRAs")
    assert node.validate_inputs() is True
    assert node.validate_inputs(method="sum", density=0.0, resize_to=50.0) is True  # they do nothing there
    assert "density is 0" in node.validate_inputs(method="ties", density=0.0)
    assert "density is 2, expected from 0.0 to 1.0" in node.validate_inputs(density=2)
    assert "merge method is 'mean', expected one of" in node.validate_inputs(method="mean")
    assert "resize to is 20" in node.validate_inputs(resize="sv_fro", resize_to=20.0)
    assert node.validate_inputs(resize="sv_ratio", resize_to=20.0) is True
    assert "epsilon is 0.5" in node.validate_inputs(method="della", density=0.9, epsilon=0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_merged_with_a_model(host, small, stack, kind):
    """Between two LoRAs, in order, on a model that carries a stack of its own already."""
    save_file(of_kind(kind, small.unet()), os.path.join(host.models, "loras", "kind.safetensors"))
    listed, model = [stack[0], ("kind.safetensors", 0.5, 1.0), stack[1]], small.unet()
    before, carrying = small.Snapshot(model.model), host.call("LoRAStackPatch", model=model, lora_stack=stack[1:])[0]
    made, report = host.call("GraftMergeLoRAs", lora_stack=listed, model=carrying)
    ours = small.forward(host.call("LoRAStackPatch", model=carrying, lora_model=made)[0])
    direct = small.forward(host.call("LoRAStackPatch", model=carrying, lora_stack=listed)[0])
    assert (
        (ours - direct).abs().max() < 1e-3
        and (direct - small.forward(carrying)).abs().max() > 1e-2
        and "nothing left out" in report
    )
    _, report = host.call("GraftMergeLoRAs", lora_stack=listed, model=carrying, rank=4)
    assert "largest rank 4" in report and "of the change left out (by norm)" in report
    small.load(model)
    before.check(model.model)


def test_what_needs_the_model_says_so(host, small, stack):
    save_file(of_kind("DoRA", small.unet()), os.path.join(host.models, "loras", "dora.safetensors"))
    with pytest.raises(
        ValueError, match=r"dora\.safetensors: DoRA \(.*and \d+ more\) changes the weight that it finds: connect model"
    ):
        host.call("GraftMergeLoRAs", lora_stack=[*stack, ("dora.safetensors", 1.0, 1.0)])


def test_text_encoders_are_merged_with_the_model(host, small):
    model, clip, _ = host.call("GraftDemo")
    name, weight = next(
        (name, weight)
        for name, weight in clip.cond_stage_model.named_parameters()
        if name.endswith("q_proj.weight")
        or (name.endswith(".weight") and weight.ndim == 2 and "emb" not in name and "token" not in name)
    )
    base = f"text_encoders.{name.removesuffix('.weight')}"
    state = {
        f"{base}.lora_up.weight": torch.ones(weight.shape[0], 1),
        f"{base}.lora_down.weight": torch.full((1, weight.shape[1]), 0.1),
    }
    state[f"{base}.dora_scale"] = torch.ones(weight.shape[0], 1)
    save_file(state, os.path.join(host.models, "loras", "text.safetensors"))
    listed = [("text.safetensors", 1.0, 0.5)]
    with pytest.raises(ValueError, match="connect CLIP"):
        host.call("GraftMergeLoRAs", lora_stack=listed, model=model)
    with pytest.raises(ValueError, match="CLIP is connected without model"):
        host.call("GraftMergeLoRAs", lora_stack=listed, clip=clip)
    made, _ = host.call("GraftMergeLoRAs", lora_stack=listed, model=model, clip=clip)

    def encoded(**given):
        patched = host.call("LoRAStackPatch", model=model, clip=clip, **given)[1]
        with torch.inference_mode():
            return patched.encode_from_tokens(patched.tokenize("a red circle left"))

    assert torch.allclose(encoded(lora_model=made), encoded(lora_stack=listed), atol=1e-4)
    assert not torch.allclose(encoded(lora_model=made), encoded(), atol=1e-3)


def test_extraction_says_that_a_schedule_counts_in_full(host, small, stack):
    from graft_nodes.patches.lora_files.stack_rows import StackRow

    model = small.unet()
    patched = host.call("LoRAStackPatch", model=model, lora_stack=[StackRow(stack[0][0], 0.7, 1.0, schedule="0-0.5")])[
        0
    ]
    made, report = host.call("GraftExtractLoRA", model=patched, base=model, rank=8)
    assert "ignores the sampling schedule of" in report and " weights" in report
    whole = host.call("LoRAStackPatch", model=model, lora_stack=stack[:1])[0]
    ours = host.call("LoRAStackPatch", model=model, lora_model=made)[0]
    assert (small.forward(ours) - small.forward(whole)).abs().max() < 1e-3


@pytest.mark.parametrize("mode", ["merge", "bypass", "host"])
def test_extracted_is_what_was_put_on(host, small, stack, mode):
    model = small.unet()
    before = small.Snapshot(model.model)
    patched = host.call("LoRAStackPatch", model=model, lora_stack=stack, mode=mode)[0]
    made, report = host.call("GraftExtractLoRA", model=patched, base=model, rank=8)
    before.check(model.model)
    ours = small.forward(host.call("LoRAStackPatch", model=small.unet(), lora_model=made)[0])
    assert (ours - small.forward(patched)).abs().max() < 1e-3 and "largest rank 8" in report


def test_two_models(host, small):
    model, base = small.unet(seed=1), small.unet()
    made, _ = host.call("GraftExtractLoRA", model=model, base=base, rank=256)
    ours = small.forward(host.call("LoRAStackPatch", model=base, lora_model=made)[0])
    assert torch.allclose(ours, small.forward(model), atol=2e-2)
    with pytest.raises(ValueError, match="no difference that a LoRA can hold"):
        host.call("GraftExtractLoRA", model=small.unet(mult=(1,), depth=(1,)), base=base)
    with pytest.raises(ValueError, match="zero everywhere"):
        host.call("GraftExtractLoRA", model=base, base=base)
