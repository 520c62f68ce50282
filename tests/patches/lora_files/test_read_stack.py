"""LoRA stacks on weights of which only names and shapes are known: what may enlarge a weight, what is refused."""

import re
from types import SimpleNamespace

import pytest
import torch
from graft_nodes.patches.lora_files.entry import LoraEntry
from graft_nodes.patches.lora_files.merge import merge_loras
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


def test_only_sums_are_merged_over_quantized_weights():
    assert merged(LoraEntry("x", factors(f"{D}a")), torch.float8_e4m3fn).patches
    dora = {**factors(f"{D}a"), f"{D}a.dora_scale": torch.ones(4, 1)}
    assert merged(LoraEntry("x", dora), torch.bfloat16).patches
    with pytest.raises(ValueError, match=re.escape(f"{D}a.weight: it is quantized (torch.float8_e4m3fn)")):
        merged(LoraEntry("x", dora), torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"lora_adapter_metadata": '{"r": 16, "lora'}, "its metadata lora_adapter_metadata: not JSON"),
        ({"lora_adapter_metadata": "[1, 2]"}, r"its metadata lora_adapter_metadata: expected a JSON object .*\[1, 2\]"),
        ({"adapter_config": "{"}, "adapter_config.json beside it: not JSON"),
        ({"adapter_config": '{"alpha_pattern": 3}'}, "alpha_pattern: expected an object"),
    ],
)
def test_broken_metadata_are_named_with_their_file(metadata, says):
    entries = [LoraEntry(name, factors(f"{D}a"), metadata=metadata if name == "y" else {}) for name in "xyz"]
    with pytest.raises(ValueError, match=f"^y cannot be used:\n- {says}"):
        read_stack(entries, weights(), "auto", lambda state: state)
    with pytest.raises(ValueError, match=f"\n- y: {says}"):
        merge_loras(entries)


def test_a_t_lora_with_broken_metadata_is_named():
    state = {f"{D}a.lora_up.weight": torch.ones(4, 2), f"{D}a.base_lambda": torch.ones(2)}
    entry = LoraEntry("x", state, metadata={"ss_tlora_min_rank": "low"})
    with pytest.raises(ValueError, match=r"^x cannot be used:\n- its metadata ss_tlora_min_rank .* are not numbers"):
        read_stack([entry], weights(), "auto", lambda state: state)


def model_of(layers):
    """The weights of a model with these layers {path: shape}, whose own names the host knows."""
    keys = {f"{D}{path}": Target("model", f"{D}{path}.weight") for path in layers}
    return {"key_map": keys, "shapes": {("model", f"{D}{path}.weight"): shape for path, shape in layers.items()}}


def file_of(layers):
    return {
        f"{layer}.lora_{side}.weight": torch.zeros(shape)
        for layer, (rows, columns) in layers.items()
        for side, shape in (("up", (rows, 1)), ("down", (1, columns)))
    }


FLUX_MODEL = {
    "double_blocks.0.img_attn.qkv": (9216, 3072),
    "single_blocks.0.linear1": (21504, 3072),
    "single_blocks.0.linear2": (3072, 15360),
}
HUNYUAN_MODEL = {**FLUX_MODEL, "txt_in.individual_token_refiner.blocks.0.mlp.0": (12288, 3072)}


def test_names_that_are_unknown_for_the_right_family():
    said = refused(file_of({"transformer.single_transformer_blocks.0.new_layer": (8, 3072)}), **model_of(FLUX_MODEL))
    assert said == (
        "x cannot be used:\n- it is for Flux, as this model is, but all of its names are unknown"
        " (transformer.single_transformer_blocks.0.new_layer); try ComfyUI's own LoRA loader"
    )
    said = refused(file_of({"lora_unet_input_blocks_1_1_attn2_to_k": (8, 768)}), **model_of(FLUX_MODEL))
    assert "no key matches this model, it is for SD1.x (its names and shapes)" in said


def test_a_file_that_fits_is_for_the_models_own_family():
    """Names and shapes of these two are Flux' and HunyuanVideo's alike."""
    layers = {f"{D}double_blocks.0.img_attn.qkv": (9216, 3072), f"{D}double_blocks.0.new_layer": (8, 3072)}
    said = refused(file_of(layers), **model_of(HUNYUAN_MODEL))
    assert said.startswith("x, made for HunyuanVideo (its names and shapes), cannot be used:\n- 1 of 2 names match no")
    assert refused(file_of(layers), **model_of(FLUX_MODEL)).startswith(
        "x, made for Flux (its names and shapes), cannot"
    )
    layers[f"{D}double_blocks.0.img_attn.qkv"] = (9000, 3072)
    assert "made for Flux (its names and shapes)" in refused(file_of(layers), **model_of(HUNYUAN_MODEL))


def test_what_counts_once_and_what_does_nothing_is_reported():
    state = {**factors(f"{D}a"), **factors("a"), f"{D}b.alpha": torch.tensor(1.0)}
    report = read(state).report[0]
    assert "1 name repeats the change of another name, which counts once" in report
    assert f"1 alpha without factors is left out ({D}b)" in report
    pairs = {**factors(f"{D}a"), **factors("a"), **factors(f"{D}b"), **factors("b")}
    state = {**pairs, "c.alpha": torch.tensor(1.0), "d.alpha": torch.tensor(1.0)}
    report = read(state).report[0]
    assert "2 names repeat the changes of another name, which counts once" in report
    assert "2 alphas without factors are left out (c, d)" in report
