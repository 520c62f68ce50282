"""The plan for a UNet, and the patch called as ComfyUI's attention blocks call it."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from graft_nodes.patches.token_downsampling.attention_override import ToDoCall, plan_todo
from graft_nodes.patches.token_downsampling.report import report_data, report_rows, report_text
from graft_nodes.patches.token_downsampling.tokens import ToDoSettings, thin
from graft_nodes.patches.token_downsampling.unet import attention_depths, is_active
from torch import nn


class Attention(nn.Module):
    heads, dim_head = 8, 40


class Transformer(nn.Module):
    def __init__(self, own=True):
        super().__init__()
        self.disable_self_attn, self.attn1 = not own, Attention()


class Spatial(nn.Module):
    def __init__(self, own=(True,)):
        super().__init__()
        self.transformer_blocks = nn.ModuleList(Transformer(each) for each in own)


class Downsample(nn.Module):
    pass


class UNetModel(nn.Module):
    """Blocks laid out as LDM's UNets are: `levels` tells for each level what its transformer blocks attend to, or None
    for no attention.
    """

    def __init__(self, levels, middle=(True,), res=2):
        super().__init__()
        self.input_blocks = nn.ModuleList([nn.ModuleList([nn.Identity()])])
        outputs = []
        for number, own in enumerate(levels):
            for _ in range(res):
                self.input_blocks.append(self.block(own))
            if number < len(levels) - 1:
                self.input_blocks.append(nn.ModuleList([Downsample()]))
            outputs = [self.block(own) for _ in range(res + 1)] + outputs
        self.middle_block = self.block(middle)
        self.output_blocks = nn.ModuleList(outputs)

    @staticmethod
    def block(own):
        return nn.ModuleList([nn.Identity(), *([] if own is None else [Spatial(own)])])


def sd15():
    return UNetModel([(True,), (True,), (True,), None])


def sdxl():
    return UNetModel([None, (True, True), (True,) * 10], middle=(True,) * 10)


def call(patch, grid, block=("input", 1), tokens=None, value=None, **options):
    context = torch.randn(2, grid[0] * grid[1] if tokens is None else tokens, 4)
    options = {"block": block, "block_index": 0, "activations_shape": [2, 4, *grid], **options}
    q, k, v = patch(context, context, context if value is None else value, options)
    return context, q, k, v


def test_sd15_has_four_depths():
    depths = attention_depths(sd15())
    assert {
        block: depths[block]
        for block in (("input", 1), ("input", 5), ("input", 8), ("middle", 0), ("output", 3), ("output", 11))
    } == {
        ("input", 1): 1,
        ("input", 5): 2,
        ("input", 8): 3,
        ("middle", 0): 4,
        ("output", 3): 3,
        ("output", 11): 1,
    }
    assert ("input", 0) not in depths and ("output", 2) not in depths


def test_sdxl_has_two_depths_and_depth_one_is_half_the_latent():
    depths = attention_depths(sdxl())
    assert max(depths.values()) == 2
    assert depths["input", 4] == 1 and depths["input", 7] == 2 and depths["middle", 0] == 2
    rows = report_rows(plan_todo(sdxl(), ToDoSettings(depth_factors="2.0 4.0")), (128, 96))
    assert [(row.before, row.after) for row in rows] == [((64, 48), (32, 24)), ((32, 24), (8, 6))]
    assert [row.patched for row in rows] == [2 * 2 + 3 * 2, 2 * 10 + 10 + 3 * 10]


def test_grids_are_rounded_up_at_each_halving():
    rows = report_rows(plan_todo(sd15(), ToDoSettings(2.0, 4)), (65, 41))
    assert [row.before for row in rows] == [(65, 41), (33, 21), (17, 11), (9, 6)]


def test_keys_and_values_are_thinned_and_queries_kept():
    context, q, k, v = call(plan_todo(sd15(), ToDoSettings(2.0)), (6, 5))
    assert q is context and v is k
    assert torch.equal(k, thin(context, (6, 5), (3, 2)))


def test_a_value_of_its_own_is_thinned_too():
    value = torch.randn(2, 30, 4)
    _, _, k, v = call(plan_todo(sd15(), ToDoSettings(2.0)), (6, 5), value=value)
    assert k.shape == v.shape and torch.equal(v, thin(value, (6, 5), (3, 2)))


@pytest.mark.parametrize("tokens", [77, 60, 15])
def test_a_context_that_is_not_the_grid_is_left_alone(tokens):
    context, q, k, v = call(plan_todo(sd15(), ToDoSettings(2.0)), (6, 5), tokens=tokens)
    assert q is context and k is context and v is context


def test_a_block_with_a_context_of_its_own_is_left_alone_even_when_the_count_fits():
    patch = plan_todo(UNetModel([(True, False)], middle=None), ToDoSettings(2.0))
    assert call(patch, (6, 5), block_index=0)[2].shape[1] == 6
    assert call(patch, (6, 5), block_index=1)[2].shape[1] == 30
    assert [(row.patched, row.skipped) for row in report_rows(patch)] == [(2 + 3, 2 + 3)]


def test_depths_that_are_not_asked_for_and_factor_one_are_left_alone():
    patch = plan_todo(sd15(), ToDoSettings(depth_factors="1.0 2.0"))
    assert call(patch, (6, 5), block=("input", 1))[2].shape[1] == 30
    assert call(patch, (6, 5), block=("input", 4))[2].shape[1] == 6
    assert call(patch, (6, 5), block=("input", 7))[2].shape[1] == 30


def test_noise_levels():
    def levels(start, end):
        settings = ToDoSettings(2.0, start_percent=start, end_percent=end)
        sigmas = [
            torch.tensor([sigma, sigma]) for sigma in (1.5, 6 / 7, 0.5, 6 / 27, 0.0)
        ]  # the first is above all: samplers add noise
        return [
            is_active(settings, {"sigmas": now}, lambda share: 6 * (1 - share) / (6 - 5 * share)) for now in sigmas
        ]  # SD3's, shift 6

    assert levels(0.0, 1.0) == [True] * 5
    assert levels(0.5, 1.0) == [False, True, True, True, True]
    assert levels(0.0, 0.5) == [True, True, False, False, False]
    assert levels(0.5, 6 / 7) == [False, True, True, False, False]


def test_phases():
    training = {"graft_training": {"step": 5, "total_steps": 10}}
    for phase, sampled, trained in (("both", True, True), ("training", False, True), ("sampling", True, False)):
        settings = ToDoSettings(2.0, phase=phase)
        assert is_active(settings, {}, float) == sampled
        assert is_active(settings, {"sigmas": torch.tensor([9.0]), **training}, float) == trained
    assert not is_active(ToDoSettings(2.0, disable_after=0.5), training, float)


def test_a_call_without_noise_levels_is_at_no_point_of_sampling():
    """Whoever calls the model without telling them has them thinned all the way."""
    settings = ToDoSettings(2.0, start_percent=0.4, end_percent=0.6)
    assert is_active(settings, {}, float) and is_active(settings, {"sigmas": None}, float)


def test_a_deep_copy_is_the_patch_itself():
    patch = plan_todo(sd15(), ToDoSettings(2.0))
    assert copy.deepcopy({"patches": [patch]})["patches"][0] is patch
    assert pickle.loads(pickle.dumps(patch)).identity == patch.identity  # noqa: S301 (our own object)


def test_a_call_is_called_as_its_settings():
    """What another process computes is found again by it."""
    patch, other = (plan_todo(sd15(), ToDoSettings(factor)) for factor in (2.0, 3.0))
    assert ToDoCall(patch).identity == patch.identity != ToDoCall(other).identity


def test_a_class_that_is_no_unet_is_named():
    class Flux(nn.Module):
        pass

    with pytest.raises(TypeError, match="this Flux has no double_blocks and no single_blocks"):
        plan_todo(Flux(), ToDoSettings(2.0))


def test_what_a_model_without_self_attention_has_is_said():
    with pytest.raises(ValueError, match="this UNetModel has no attention at all"):
        plan_todo(UNetModel([None, None], middle=None), ToDoSettings(2.0))
    with pytest.raises(ValueError, match="each with a context of its own"):
        plan_todo(UNetModel([(False,)], middle=(False,)), ToDoSettings(2.0))


def test_more_factors_than_depths():
    with pytest.raises(
        ValueError,
        match=r"3 depths asked for, but this UNetModel has self-attention at 2 \(depth 1 = latent / 2, depth 2",
    ):
        plan_todo(sdxl(), ToDoSettings(2.0, 3))


def test_report_text():
    text = report_text(plan_todo(sd15(), ToDoSettings(2.0, disable_after=0.5)), (64, 64))
    assert "depth 1: factor 2, 5 blocks patched, 0 left alone, K/V tokens 4096 (64x64) -> 1024 (32x32)" in text
    assert "off after 50% of the training run" in text


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"start_percent": 1.0}, "sampling is never downsampled: start is 1"),
        ({"end_percent": 0.0}, "sampling is downsampled in one step at most: start and end are the same"),
        (
            {"start_percent": 0.2, "end_percent": 0.6},
            "sampling is downsampled from 20% to 60%: about 30% saved over all of it",
        ),
        (
            {"phase": "training", "end_percent": 0.5},
            "sampling is never downsampled (active during training): start and end",
        ),
        (
            {"phase": "sampling", "disable_after": 0.5},
            "training is never downsampled (active during sampling): disable after",
        ),
        ({"disable_after": 0.25}, "off after 25% of the training run: about 19% saved over all of it"),
        ({"disable_after": 300.0}, "off after 300 training steps"),
        ({"phase": "sampling"}, "active during sampling"),
    ],
)
def test_a_saving_is_claimed_where_there_is_one(settings, line):
    """One depth of 64x64 tokens, thinned to 32x32: three quarters of the products."""
    todo = plan_todo(UNetModel([(True,)], middle=None), ToDoSettings(2.0, **settings))
    text = report_text(todo, (64, 64))
    assert line in text and "saved: about 75% in each step that it works in" in text
    assert ("off after" in text) == ("disable_after" in settings and "phase" not in settings)


def test_a_saving_of_no_step_is_none():
    for nowhere in ({"start_percent": 1.0}, {"end_percent": 0.0}):
        todo = plan_todo(UNetModel([(True,)], middle=None), ToDoSettings(2.0, phase="sampling", **nowhere))
        data = report_data(todo, (64, 64))
        assert "saved: about 0%\n" in data["text"] and data["saving"] == data["sampling_share"] == 0
    whole = report_data(plan_todo(UNetModel([(True,)], middle=None), ToDoSettings(2.0)), (64, 64))
    assert "saved: about 75%\n" in whole["text"] and whole["sampling_share"] == whole["training_share"] == 1


@pytest.mark.parametrize("method", ["nearest-exact", "area"])
def test_the_keys_of_tiled_queries_are_thinned_strip_by_strip(method):
    patch, context = plan_todo(sd15(), ToDoSettings(2.0, method=method)), torch.randn(2, 12 * 6, 4)
    options = {"block": ("input", 1), "block_index": 0, "activations_shape": [2, 4, 12, 6]}
    q, k, v = patch(torch.randn(8, 18, 4), context, context, options)
    strips = [context[:, 18 * i : 18 * (i + 1)].unflatten(1, (3, 6)).permute(0, 3, 1, 2) for i in range(4)]
    wanted = torch.cat(
        [F.interpolate(strip, size=(1, 3), mode=method).flatten(2).transpose(1, 2) for strip in strips], 1
    )
    assert q.shape == (8, 18, 4) and torch.allclose(k, wanted, rtol=0, atol=1e-6) and v is k
    for tiles, rows in ((8, 9), (3, 12)):  # strips of a row and a half; queries that are not all of the grid
        q, k, _ = patch(torch.randn(2 * tiles, rows, 4), context, context, options)
        assert k is context


def test_blocks_that_another_patch_computes_are_counted_as_left_alone():
    everything = plan_todo(sd15(), ToDoSettings(2.0)).depths[1]
    some = plan_todo(sd15(), ToDoSettings(2.0), {("input", 1): 0, ("input", 2, 0): 0, ("middle", 0): 0}).depths[1]
    assert some == (everything[0] - 2, everything[1] + 2)
    assert "4 blocks patched, 1 left alone" in report_text(plan_todo(sd15(), ToDoSettings(2.0), {("input", 1): 0}))
