"""ApplyToDo on a small UNet of the open host: exact, without leftovers, and together with other patches, checkpointing
and training.
"""

import json
import math
import os
import re
import types

import pytest
import torch
import torch.nn.functional as F
from graft_nodes import host as wall
from graft_nodes.patches.token_downsampling.tokens import ToDoSettings
from graft_nodes.training.memory.checkpointing import checkpoint_blocks
from PIL import Image

from ..model_device import LOAD
from .conftest import load


def interpolating(factor, depths, mode="nearest-exact"):
    """An attn1 patch written from the definition alone: the tokens as an image through F.interpolate; `depths` are
    downsample levels.
    """

    def patch(q, k, v, extra):
        grid, level = list(extra["original_shape"][2:]), 0
        while grid[0] * grid[1] != k.shape[1]:
            grid, level = [(side + 1) // 2 for side in grid], level + 1
        if level not in depths:
            return q, k, v
        size = [max(1, int(side / factor)) for side in grid]
        image = k.transpose(1, 2).reshape(k.shape[0], -1, *grid)
        small = F.interpolate(image, size=size, mode=mode).flatten(2).transpose(1, 2)
        return q, small, small

    return patch


def with_patch(patcher, patch):
    clone = patcher.clone()
    clone.set_model_attn1_patch(patch)
    return clone


def apply(host, model, **inputs):
    return host.call("ApplyToDo", model=model, **inputs)


@pytest.fixture
def unet(small):
    return small.unet(mult=(1, 2, 2), depth=(1, 1, 1))


@pytest.mark.parametrize("size", [(8, 8), (9, 13), (13, 6), (1, 5), (3, 33)])
@pytest.mark.parametrize("factor", [1.5, 2.0, 4.0])
def test_equal_to_interpolation_at_any_size(host, small, unet, size, factor):
    patched, _ = apply(host, unet, factor=factor)
    assert torch.equal(small.forward(patched, size), small.forward(with_patch(unet, interpolating(factor, {0})), size))


@pytest.mark.parametrize(
    ("mult", "depth"), [((1, 2, 4), (0, 2, 3)), ((1, 2, 4, 4), (0, 2, 2, 0)), ((1, 2, 4, 4), (1, 1, 1, 0))]
)
def test_the_layouts_of_sdxl_its_refiner_and_sd1_and_2(host, small, mult, depth):
    """Depth 1 is the first level that has attention."""
    model = small.unet(mult=mult, depth=depth)
    first = next(level for level, blocks in enumerate(depth) if blocks)
    for factors, levels in (("2", {first}), ("1 2", {first + 1}), ("2 2", {first, first + 1})):
        found = small.forward(apply(host, model, depth_factors=factors)[0], (18, 26))
        wanted = small.forward(with_patch(model, interpolating(2.0, levels)), (18, 26))
        assert torch.allclose(found, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
        assert not torch.allclose(found, small.forward(model, (18, 26)), rtol=0, atol=1e-3 * float(wanted.abs().max()))


def test_two_depths_and_the_methods(host, small, unet):
    for method in ("nearest", "area"):
        patched, _ = apply(host, unet, factor=2.0, max_depth=2, method=method)
        reference = small.forward(with_patch(unet, interpolating(2.0, {0, 1}, method)), (9, 13))
        assert torch.allclose(small.forward(patched, (9, 13)), reference, rtol=0, atol=2e-5)


def test_several_factors_are_those_of_the_depths_in_kohyas_order(host, small, unet):
    """`--todo_factor 4 2`: 4 at the finest depth, 2 at the next; and `--todo_factor 4 --todo_max_depth 2` is 4 4."""
    each = with_patch(with_patch(unet, interpolating(4.0, {0})), interpolating(2.0, {1}))
    both = with_patch(unet, interpolating(4.0, {0, 1}))
    size = (24, 16)
    found = small.forward(apply(host, unet, depth_factors="4 2")[0], size)
    assert torch.equal(found, small.forward(each, size))
    assert not torch.equal(found, small.forward(apply(host, unet, depth_factors="2 4")[0], size))
    expected = small.forward(both, size)
    for inputs in ({"factor": 4.0, "max_depth": 2}, {"depth_factors": "4 4"}):
        assert torch.equal(small.forward(apply(host, unet, **inputs)[0], size), expected)


def test_factor_one_and_removal_change_no_bit_and_runs_alternate(host, small, unet):
    plain, before = small.forward(unet, (9, 13)), small.Snapshot(unet.model)
    assert apply(host, unet, factor=1.0)[0] is unet
    patched, _ = apply(host, unet)
    thinned = small.forward(patched, (9, 13))
    assert not torch.equal(thinned, plain)
    for _ in range(2):
        assert torch.equal(small.forward(unet, (9, 13)), plain)
        assert torch.equal(small.forward(patched, (9, 13)), thinned)
        assert torch.equal(small.forward(patched.clone(), (9, 13)), thinned)
    before.check(unet.model)
    assert "graft_todo" not in str(unet.model_options) and not unet.model_options["transformer_options"].get("patches")


def test_a_second_todo_replaces_the_first(host, small, unet):
    first, _ = apply(host, unet, factor=4.0)
    second, report = apply(host, first, factor=2.0)
    assert torch.equal(small.forward(second), small.forward(apply(host, unet, factor=2.0)[0])) and "replaces" in report
    assert not torch.equal(small.forward(first), small.forward(second))
    off, report = apply(host, first, factor=1.0)
    assert (
        torch.equal(small.forward(off), small.forward(unet))
        and "removes the model's earlier token downsampling" in report
        and wall.token_downsampling.todo_of(off) is None
    )
    assert not torch.equal(small.forward(first), small.forward(off))


def test_other_attn1_patches_before_and_after_work_on_whole_keys(host, small, unet):
    seen = []

    def doubling(q, k, v, extra):
        seen.append(k.shape[1])
        return q, k * 2, v * 2

    before = apply(host, with_patch(unet, doubling))[0]
    after = with_patch(apply(host, unet)[0], doubling)
    reference = with_patch(with_patch(unet, doubling), interpolating(2.0, {0}))
    assert torch.equal(small.forward(before), small.forward(reference))
    assert torch.equal(small.forward(after), small.forward(reference)) and set(seen) == {64, 16, 4}
    assert "other attn1 patches on the model: 1" in apply(host, with_patch(unet, doubling))[1]


@pytest.fixture
def said(caplog):
    """What ApplyToDo has logged since."""
    return lambda: [record.getMessage() for record in caplog.records if "Apply ToDo" in record.getMessage()]


def test_blocks_whose_keys_another_patch_extends_are_left_alone_and_counted(host, small, unet, said):
    def extending(q, k, v, extra):
        return q, torch.cat([k, k[:, :3]], 1), torch.cat([v, v[:, :3]], 1)

    other = with_patch(unet, extending)
    patched, report = apply(host, other)
    assert torch.equal(small.forward(patched), small.forward(other))
    count = int(re.search(r"depth 1: factor 2, (\d+) blocks patched", report)[1])
    assert said() == [f"Apply ToDo left {count} self-attention blocks alone: {count} whose keys another node changed"]


def test_blocks_whose_tokens_another_patch_cuts_into_windows_are_counted(host, small, unet, said):
    """As window attention for high resolutions does, before or after."""

    def windows(q, k, v, extra):
        return tuple(tensor.reshape(4 * tensor.shape[0], -1, tensor.shape[2]) for tensor in (q, k, v))

    def whole(out, extra):
        return out.reshape(out.shape[0] // 4, -1, out.shape[2])

    other = with_patch(unet, windows)
    other.set_model_attn1_output_patch(whole)
    patched, report = apply(host, other)
    assert torch.equal(small.forward(patched), small.forward(other))
    count = int(re.search(r"depth 1: factor 2, (\d+) blocks patched", report)[1])
    assert said() == [f"Apply ToDo left {count} self-attention blocks alone: {count} whose keys another node changed"]


def test_nothing_is_said_of_blocks_that_are_thinned_or_not_asked_for(host, small, unet, said):
    small.forward(apply(host, unet)[0])
    assert said() == []


def test_a_block_whose_attention_is_replaced_is_left_alone_and_counted(host, small, unet, said):
    lengths = {}

    def values_only(q, k, v, extra):  # as perturbed-attention guidance does: it needs a value for every query
        lengths[extra["block"]] = (q.shape[1], k.shape[1])
        return v

    patched, _ = apply(host, unet, factor=2.0)
    for name, number in (("input", 1), ("output", 5)):
        patched.set_model_attn1_replace(values_only, name, number)
    for _ in range(2):
        small.forward(patched)
    assert lengths == {("input", 1): (64, 64), ("output", 5): (64, 64)}
    assert said() == ["Apply ToDo left 2 self-attention blocks alone: 2 whose attention another node computes"]


def test_what_is_left_alone_is_logged_once_a_run(host, unet, said):
    import comfy.sample

    noise, prompt = torch.zeros(1, 4, 8, 8), [[torch.zeros(1, 5, 24), {}]]
    for run in (1, 2):
        patched, _ = apply(host, unet)
        patched.set_model_attn1_replace(lambda q, k, v, extra: v, "input", 1)
        for _ in range(2):
            with torch.inference_mode():
                comfy.sample.sample(
                    patched, noise, 3, 4.0, "euler", "normal", prompt, prompt, torch.zeros_like(noise), seed=1
                )
        one = "Apply ToDo left 1 self-attention blocks alone: 1 whose attention another node computes"
        assert said() == [one] * 2 * run


def test_an_override_that_needs_equal_lengths_is_named(host, unet, small):
    def picky_kernel(kernel, q, k, v, *args, **kwargs):
        if q.shape[1] == 64 and k.shape[1] == 16:
            raise ValueError("lengths differ")
        return kernel(q, k, v, *args, **kwargs)

    patched, _ = apply(host, unet)
    patched.model_options["transformer_options"]["optimized_attention_override"] = picky_kernel
    with pytest.raises(RuntimeError, match=r"picky_kernel.*fewer keys than queries.*lengths differ"):
        small.forward(patched)


def train_forward(patcher, step=0, total=10, size=(9, 13), **options):
    load(patcher)
    generator = torch.Generator().manual_seed(3)
    x, context = (torch.randn(*shape, generator=generator).to(LOAD) for shape in ((2, 4, *size), (2, 5, 24)))
    options = {
        **patcher.model_options["transformer_options"],
        "graft_training": {"step": step, "total_steps": total},
        **options,
    }
    return patcher.model.apply_model(
        x, torch.ones(2, device=LOAD), c_crossattn=context, transformer_options=options
    ).float()


def test_an_inference_only_kernel_is_refused_by_name_while_training(host, unet):
    def attention_sage(kernel, *args, **kwargs):
        return kernel(*args, **kwargs)

    from comfy.ldm.modules.attention import attention_pytorch

    patched, kind = apply(host, unet)[0], host.module("patches.models.attention_kernels").TrainingKernel
    train_forward(patched, optimized_attention_override=kind(attention_pytorch))
    with pytest.raises(ValueError, match=r"SageAttention \(--use-sage-attention\) is for inference only"):
        train_forward(patched, optimized_attention_override=kind(attention_pytorch, attention_sage))


def test_phase_and_disable_after(host, small, unet):
    plain, plain_training = small.forward(unet, (9, 13)), train_forward(unet)
    training, _ = apply(host, unet, phase="training", disable_after=0.5)
    assert torch.equal(small.forward(training, (9, 13)), plain)
    assert not torch.equal(train_forward(training, 4), plain_training)
    assert torch.equal(train_forward(training, 5), plain_training)
    sampling, _ = apply(host, unet, phase="sampling")
    assert torch.equal(train_forward(sampling), plain_training)
    assert not torch.equal(small.forward(sampling, (9, 13)), plain)
    stopped, _ = apply(host, unet, disable_after=3.0)
    assert not torch.equal(train_forward(stopped, 2), plain_training) and torch.equal(
        train_forward(stopped, 3), plain_training
    )


def test_start_and_end_follow_the_noise(host, small, unet):
    sampling = unet.get_model_object("model_sampling")
    patched, _ = apply(host, unet, start_percent=0.3, end_percent=0.7)

    def thins(percent):
        sigma = torch.full((2,), float(sampling.percent_to_sigma(percent)), device=LOAD)
        options = {"sigmas": sigma}
        x, context = torch.ones(2, 4, 8, 8, device=LOAD), torch.ones(2, 5, 24, device=LOAD)
        small.load(unet)
        results = [
            model.model.apply_model(
                x,
                sigma,
                c_crossattn=context,
                transformer_options={**model.model_options["transformer_options"], **options},
            )
            for model in (unet, patched)
        ]
        return not torch.equal(*results)

    with torch.no_grad():
        assert [thins(percent) for percent in (0.1, 0.35, 0.65, 0.9)] == [False, True, True, False]


def test_what_was_trained_without_it_does_not_say_that_it_was(host, unet):
    for phase, said in (("both", True), ("training", True), ("sampling", False)):
        patched, _ = apply(host, unet, phase=phase)
        assert bool(wall.token_downsampling.todo_metadata(patched)) is said


def test_gradients_are_those_of_interpolation_with_and_without_checkpointing(host, small):
    from torch.utils.checkpoint import checkpoint

    unet = small.unet(mult=(1, 2, 2), depth=(1, 1, 1), disable_dynamic=True)  # as models are loaded to train
    weight = unet.model.diffusion_model.input_blocks[1][1].transformer_blocks[0].attn1.to_k.weight
    weight.requires_grad_(True)
    patched, reference = apply(host, unet)[0], with_patch(unet, interpolating(2.0, {0}))

    def gradient(patcher, way=train_forward):
        weight.grad = None
        way(patcher).square().mean().backward()
        return weight.grad.clone()

    def whole(patcher):
        return checkpoint(train_forward, patcher, use_reentrant=False)

    wanted = gradient(reference)
    assert wanted.abs().sum() > 0
    assert torch.equal(gradient(patched), wanted) and torch.equal(gradient(patched, whole), wanted)
    with checkpoint_blocks(unet.model.diffusion_model):  # as TrainStep does: block by block
        assert torch.equal(gradient(patched), wanted)
    weight.requires_grad_(False)


def test_sampling_with_guidance_areas_and_mixed_prompts(host, small, unet):
    import comfy.sample

    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(1, 4, 12, 10, generator=generator)
    one, two, three = ([torch.randn(1, 5, 24, generator=generator), {}] for _ in range(3))
    two[1] = {"area": (5, 6, 3, 2), "strength": 1.0}  # a region of its own: the model sees a crop of another size

    def sample(model):
        return comfy.sample.sample(
            model, noise, 2, 4.0, "euler", "normal", [one, two], [three], torch.zeros_like(noise), seed=1
        )

    with torch.inference_mode():
        plain, wanted = sample(unet), sample(with_patch(unet, interpolating(2.0, {0})))
        assert torch.equal(sample(apply(host, unet)[0]), wanted) and not torch.equal(wanted, plain)
        assert torch.equal(sample(unet), plain)


def test_report_and_data_for_the_editor(host, unet):
    with torch.inference_mode():
        result = host.node("ApplyToDo").execute(
            model=unet, depth_factors="4 2", latent={"samples": torch.zeros(1, 4, 9, 13)}
        )
    _, text = result.args
    assert (
        "depth 1: factor 4, 3 blocks patched, 0 left alone, K/V tokens 117 (9x13) -> 6 (2x3)" in text
        and "saved: about" in text
    )
    (data,) = result.ui["graft_todo"]
    assert data["depths"][1] == {
        "depth": 2,
        "factor": 2.0,
        "cell": 2,
        "before": [5, 7],
        "after": [2, 3],
        "frames": 1,
        "width": 64,
        "own": 3,
        "patched": 3,
        "skipped": 0,
    }
    assert all(row["before"] == [math.ceil(side / row["cell"]) for side in (9, 13)] for row in data["depths"])
    assert 0 < data["saving"] < 1 and data["transformer"] is None and data["version"] == 1


class _Unknown(torch.nn.Module):
    """A transformer of a class that nobody knows."""


def _given(host, name, patcher):
    """A node of the old form that gives a MODEL."""
    found = type(
        name,
        (),
        {
            "INPUT_TYPES": classmethod(lambda cls: {"required": {}}),
            "RETURN_TYPES": ("MODEL",),
            "FUNCTION": "give",
            "CATEGORY": "test",
            "give": lambda self: (patcher,),
        },
    )
    host.nodes.NODE_CLASS_MAPPINGS[name] = found
    return {"class_type": name, "inputs": {}}


def execute(host, patcher, name, **inputs):
    """What the host's executor makes of a workflow in which ApplyToDo gets a MODEL."""
    values = {**host.defaults("ApplyToDo"), **inputs, "model": ["1", 0]}
    prompt = {"1": _given(host, name, patcher), "2": {"class_type": "ApplyToDo", "inputs": values}}
    return host.run(prompt, capture={"model": ["2", 0], "report": ["2", 1]})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"depth_factors": "2 2 2 2"},
            "4 depths asked for, but this UNetModel has self-attention at 3 (depth 1 = latent / 1",
        ),
        ({"max_depth": 4}, "set maximum depth to 3, or give at most 3 factors"),
        ({"depth_factors": "4 two"}, "expected numbers separated by spaces, such as '4 2', got 'two'"),
        ({"depth_factors": "nan"}, "factors by depth: expected a factor from 1 (off) to 16, got nan"),
        ({"depth_factors": "0.5"}, "expected a factor from 1 (off) to 16, got 0.5"),
        ({"factor": float("nan")}, "factor is nan, expected a number from 1.0 to 16.0"),
        ({"factor": 0.5}, "smaller than min"),  # the host's own check of the widget, as the next two
        ({"factor": "much"}, "much"),
        ({"method": "best"}, "best"),
    ],
)
def test_bad_input_stops_the_workflow_with_a_message_that_says_what_there_is(host, unet, inputs, message):
    result = execute(host, unet, "GraftTestUNet", **inputs)
    assert not result["success"] and list(result["errors"]) == ["2"]
    for error in result["errors"]["2"]:  # several: a host says what a node itself refuses at each input it checks
        assert message in " ".join(str(error.get(key, "")) for key in ("exception_message", "message", "details"))
        assert result["valid"] == ("exception_message" in error)


def test_a_model_that_cannot_be_thinned_stops_the_workflow_with_its_name(host, small, unet):
    bare, strange = small.unet(mult=(1, 2), depth=(0, 0)), unet.clone()
    parts = {"diffusion_model": _Unknown(), "model_sampling": unet.model.model_sampling}
    strange.model = types.SimpleNamespace(**{**vars(unet.model), **parts})
    for name, patcher, message in (
        ("GraftTestBare", bare, "token downsampling needs self-attention; this UNetModel has no attention at all"),
        ("GraftTestStrange", strange, "does not know where _Unknown keeps its image tokens"),
    ):
        (error,) = execute(host, patcher, name)["errors"]["2"]
        assert message in error["exception_message"]


def test_the_executor_hands_the_report_to_the_editor(host, unet):
    result = execute(host, unet, "GraftTestUNet", depth_factors="2 2")
    (data,) = result["history"]["2"]["graft_todo"]
    assert [row["patched"] for row in data["depths"]] == [3, 3, 0] and data["saving"] is None
    assert data["text"] == result["captured"]["report"] and json.loads(json.dumps(data)) == data


def test_metadata_as_given(unet):
    patched, todo, _ = wall.token_downsampling.apply_todo(unet, ToDoSettings(depth_factors="4,  2"))
    assert wall.token_downsampling.todo_of(patched) is todo and wall.token_downsampling.todo_of(unet) is None
    assert wall.token_downsampling.todo_metadata(patched) == {"ss_todo_factor": "4 2", "ss_todo_max_depth": "2"}


@pytest.fixture(scope="module")
def dataset(host):
    """(MODEL, VAE, prompt, GRAFT_DATASET) of two plain pictures, one of them held out."""
    folder = os.path.join(host.input, "todo pictures")
    os.makedirs(folder, exist_ok=True)
    for number, color in enumerate(("red", "blue")):
        Image.new("RGB", (128, 128), color).save(os.path.join(folder, f"{number}.png"))
        with open(os.path.join(folder, f"{number}.txt"), "w", encoding="utf-8") as file:
            file.write(f"a {color} square left")
    model, clip, vae = host.call("GraftDemo")
    pictures = host.call("GraftDataset", folder="todo pictures", vae=vae, clip=clip, resolution=128, validation=0.5)[0]
    return model, vae, host.call("CLIPTextEncode", clip=clip, text="a red square left")[0], pictures


@pytest.mark.parametrize(
    ("phase", "thinned"), [("both", {"training"}), ("training", {"training"}), ("sampling", {"evaluating"})]
)
def test_inside_train_step_only_its_steps_are_thinned_unless_sampling_is_asked_for(host, dataset, phase, thinned):
    model, vae, prompt, pictures = dataset
    keys = {"training": set(), "evaluating": set()}

    def note(kernel, q, k, v, *args, **kwargs):
        options = kwargs["transformer_options"]
        assert ("graft_training" in options) != bool(options.get("graft_evaluating"))
        if q.shape[1] == 64:  # the finest level with attention
            keys["training" if "graft_training" in options else "evaluating"].add(k.shape[1])
        return kernel(q, k, v, *args, **kwargs)

    clone = model.clone()
    clone.model_options["transformer_options"]["optimized_attention_override"] = note
    state = host.call(
        "GraftTrainStart",
        model=apply(host, clone, phase=phase, depth_factors="2 2")[0],
        dataset=pictures,
        vae=vae,
        run=f"todo {phase}",
        optimizer=host.call("GraftOptimizer", total_steps=1)[0],
    )[0]
    latent = host.call("EmptyLatentImage", width=128, height=128, batch_size=1)[0]
    host.call("TrainStep", state=state, steps=1, validate_every=1, preview_every=1, positive=prompt, latent=latent)
    assert all(keys.values())
    assert {name for name, lengths in keys.items() if 64 not in lengths} == thinned


def test_disable_after_is_a_share_of_the_whole_run(host, dataset):
    """Half of four steps, in two Train Steps of which the second takes three."""
    model, _, _, pictures = dataset
    keys = {}

    def note(kernel, q, k, v, *args, **kwargs):
        if q.shape[1] == 64:
            keys.setdefault(kwargs["transformer_options"]["graft_training"]["step"], set()).add(k.shape[1])
        return kernel(q, k, v, *args, **kwargs)

    clone = model.clone()
    clone.model_options["transformer_options"]["optimized_attention_override"] = note
    state = host.call(
        "GraftTrainStart",
        model=apply(host, clone, depth_factors="2 2", disable_after=0.5)[0],
        dataset=pictures,
        run="todo for a while",
        optimizer=host.call("GraftOptimizer", total_steps=4)[0],
    )[0]
    for steps in (1, 3):
        state = host.call("TrainStep", state=state, steps=steps, validate_every=0)[0]
    own = {step: {length for length in lengths if length in (16, 64)} for step, lengths in keys.items()}
    assert own == {0: {16}, 1: {16}, 2: {64}, 3: {64}}
