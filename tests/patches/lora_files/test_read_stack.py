"""LoRA stacks on weights of which only names and shapes are known: what may enlarge a weight, what is refused."""

import re
from types import SimpleNamespace

import pytest
import torch
from graft_nodes.patches.lora_files.entry import LoraEntry
from graft_nodes.patches.lora_files.parse import Target
from graft_nodes.patches.lora_files.read_stack import ModelWeights, read_stack, read_stack_to_merge

D = "diffusion_model."
SHAPES = {("model", f"{D}{name}.weight"): (4, 3) for name in "ab"} | {("clip", "clip_l.x.a.weight"): (4, 3)}
KEYS = {f"{D}{name}": Target("model", f"{D}{name}.weight") for name in "ab"}
TEXT = {"clip_l.x.a": Target("clip", "clip_l.x.a.weight")}


def factors(name):
    return {f"{name}.lora_up.weight": torch.ones(4, 2), f"{name}.lora_down.weight": torch.ones(2, 3)}


def enlarging(name=f"{D}a", **more):
    wider = {f"{name}.lora_up.weight": torch.ones(4, 2), f"{name}.lora_down.weight": torch.ones(2, 6)}
    return {**wider, f"{name}.reshape_weight": torch.tensor([4, 6]), **more}


def weights(**more):
    return ModelWeights(**{"key_map": KEYS, "shapes": SHAPES, "can_enlarge": True, **more})


def read(*states, **more):
    entries = [LoraEntry(name, state, 0.5) for name, state in zip("xyz", states, strict=False)]
    return read_stack(entries, weights(**more), "auto", lambda state: state)


def refused(*states, **more):
    with pytest.raises(ValueError) as caught:
        read(*states, **more)
    return str(caught.value)


def test_a_lora_that_enlarges_a_weight_is_left_to_comfyui():
    found = read(enlarging(**{f"{D}a.diff_b": torch.ones(4)}), factors(f"{D}b"))
    [lora] = found.enlarging
    assert (lora.name, lora.layers, lora.strength) == ("x", {f"{D}a": f"{D}a.weight"}, 0.5)
    assert lora.changed == [f"{D}a.weight", f"{D}a.bias"] and set(lora.state_dict) == {
        *enlarging(),
        f"{D}a.diff_b",
    }
    assert list(found.patches) == ["model"] and list(found.patches["model"]) == [f"{D}b.weight"]
    assert [line for line in found.report if "ComfyUI's own adapters at 0.5" in line] == [
        f"x: {D}a.weight, {D}a.bias through ComfyUI's own adapters at 0.5, because it enlarges the weight"
    ]


def test_layers_beside_one_that_enlarges_are_patches_of_the_same_file():
    found = read({**enlarging(), **factors(f"{D}b")})
    assert len(found.enlarging) == 1 and list(found.patches["model"]) == [f"{D}b.weight"]
    assert set(found.enlarging[0].state_dict) == set(enlarging())


def test_a_weight_is_not_enlarged_and_changed_at_its_old_size():
    said = refused(enlarging(), factors(f"{D}a"))
    assert said == f"y changes {D}a.weight, which x enlarges: use only one of them on this model"
    said = refused(factors(f"{D}b"), enlarged=frozenset({f"{D}b.weight"}))
    assert f"x changes {D}b.weight, which a LoRA that the model carries enlarges" in said
    text = {"clip_l.x.a.lora_up.weight": torch.ones(4, 2), "clip_l.x.a.lora_down.weight": torch.ones(2, 3)}
    clip = {"key_map": KEYS | TEXT, "has_clip": True}
    assert list(read(text, enlarged=frozenset({"clip_l.x.a.weight"}), **clip).patches) == ["clip"]


@pytest.mark.parametrize(
    ("state", "more", "says"),
    [
        (enlarging(), {"can_enlarge": False}, f"it enlarges {D}a; only a real ComfyUI can do that"),
        (enlarging(f"{D}c"), {}, f"it enlarges {D}c, which this model does not have"),
        (enlarging(**{f"{D}a.diff_b": torch.full((4,), torch.nan)}), {}, f"{D}a.diff_b: holds NaN or infinite"),
    ],
)
def test_what_cannot_enlarge_is_refused_by_name(state, more, says):
    said = refused(state, **more)
    assert said.startswith("x cannot be used:\n") and says in said


def test_block_weights_count_for_a_weight_that_is_enlarged():
    name = f"{D}double_blocks.3.img_mod.lin"
    known = {"key_map": {name: Target("model", f"{name}.weight")}, "shapes": {("model", f"{name}.weight"): (4, 3)}}
    entry = LoraEntry("x", enlarging(name), 0.5, blocks="D03=0.5")
    [lora] = read_stack([entry], weights(**known), "auto", lambda state: state).enlarging
    assert lora.strength == 0.25


@pytest.mark.parametrize("mode", ["merge", "host", "auto", "bypass"])
def test_a_schedule_needs_a_mode_that_can_change_its_strength(mode):
    entries = [LoraEntry("x", factors(f"{D}a"), schedule=SimpleNamespace())]
    if mode in ("auto", "bypass"):
        assert read_stack(entries, weights(), mode, lambda state: state).patches
        return
    with pytest.raises(ValueError, match=f"x: .*which patch mode {mode} cannot do; use auto or bypass"):
        read_stack(entries, weights(), mode, lambda state: state)


@pytest.mark.parametrize("strengths", [(float("nan"), 1.0), (1.0, float("inf"))])
def test_strengths_are_finite(strengths):
    entries = [LoraEntry("x", factors(f"{D}a"), *strengths)]
    with pytest.raises(ValueError, match="x: expected finite strengths, got"):
        read_stack(entries, weights(), "auto", lambda state: state)


def merged(entry, dtype=torch.float32, **more):
    base = {"model": {f"{D}a.weight": torch.ones(4, 3).to(dtype)}, "clip": {}}
    return read_stack_to_merge([entry], weights(**more), base, lambda state: state)


def test_what_one_lora_cannot_hold_is_not_merged():
    with pytest.raises(ValueError, match=re.escape("x enlarges weights, which no other LoRA can hold")):
        merged(LoraEntry("x", enlarging()))
    text = {"lora_te1_a.lora_up.weight": torch.ones(4, 2), "lora_te1_a.lora_down.weight": torch.ones(2, 3)}
    both = {**factors(f"{D}a"), **text}
    without = {"shapes": {key: shape for key, shape in SHAPES.items() if key[0] == "model"}}
    with pytest.raises(ValueError, match="x: 1 of its layers are for a text encoder: connect CLIP, or set the row's"):
        merged(LoraEntry("x", both), **without)
    assert list(merged(LoraEntry("x", both, 1.0, 0.0), **without).patches) == ["model"]


def test_only_sums_are_merged_over_quantised_weights():
    assert merged(LoraEntry("x", factors(f"{D}a")), torch.float8_e4m3fn).patches
    dora = {**factors(f"{D}a"), f"{D}a.dora_scale": torch.ones(4, 1)}
    assert merged(LoraEntry("x", dora), torch.bfloat16).patches
    with pytest.raises(ValueError, match=re.escape(f"{D}a.weight: it is quantised (torch.float8_e4m3fn)")):
        merged(LoraEntry("x", dora), torch.float8_e4m3fn)
