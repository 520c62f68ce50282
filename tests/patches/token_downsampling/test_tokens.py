"""Token downsampling against F.interpolate, and its settings."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from graft_nodes.patches.token_downsampling.tokens import (
    DepthReport,
    Span,
    ToDoSettings,
    attention_saving,
    target_grid,
    thin,
    thin_span,
    thin_span_mask,
)
from hypothesis import given, settings
from hypothesis import strategies as st

FACTORS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 7.0, 16.0)


def image_of(grid, channels=3, seed=0):
    return torch.randn(2, channels, *grid, generator=torch.Generator().manual_seed(seed))


def tokens_of(image):
    return image.flatten(2).transpose(1, 2)


def interpolated(image, target, method):
    if method == "blend":
        return torch.lerp(
            F.interpolate(image, size=target, mode="nearest"), F.interpolate(image, size=target, mode="area"), 0.5
        )
    return F.interpolate(image, size=target, mode=method)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 65),
    st.integers(1, 65),
    st.sampled_from(FACTORS),
    st.sampled_from(["nearest-exact", "nearest", "area", "blend"]),
)
def test_equal_to_interpolate_bit_for_bit(height, width, factor, method):
    grid, image = (height, width), image_of((height, width))
    target = target_grid(grid, factor)
    expected = tokens_of(interpolated(image, target, method))
    assert target == (max(1, math.floor(height / factor)), max(1, math.floor(width / factor)))
    assert torch.equal(thin(tokens_of(image), grid, target, method), expected)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["nearest-exact", "nearest", "area", "blend"])
def test_every_grid_from_1_to_65_by_every_factor(method):
    for height in range(1, 66):
        for width in range(1, 66):
            image = torch.arange(height * width, dtype=torch.float32).view(1, 1, height, width)
            tokens = tokens_of(image)
            for factor in FACTORS:
                target = target_grid((height, width), factor)
                thinned = thin(tokens, (height, width), target, method)
                if not torch.equal(thinned, tokens_of(interpolated(image, target, method))):
                    pytest.fail(f"{height}x{width} by {factor}: {thinned.flatten().tolist()}")


SPANS = st.tuples(st.integers(0, 7), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(0, 5))


@settings(max_examples=100, deadline=None)
@given(SPANS, st.sampled_from(FACTORS), st.sampled_from(["nearest-exact", "nearest", "area", "blend"]), st.booleans())
def test_of_a_longer_sequence_only_the_span_is_thinned_frame_by_frame(shape, factor, method, heads):
    before, frames, height, width, after = shape
    span, target = Span(before, frames, (height, width)), target_grid((height, width), factor)
    tokens = (
        torch.randn(2, 3, before + span.count + after, 4) if heads else torch.randn(2, before + span.count + after, 4)
    )
    first, image, last = tokens.split([before, span.count, after], dim=-2)
    thinned = [
        thin(frame.reshape(-1, height * width, 4), span.grid, target, method) for frame in image.chunk(frames, dim=-2)
    ]
    expected = torch.cat([first, *(frame.reshape(*tokens.shape[:-2], -1, 4) for frame in thinned), last], dim=-2)
    assert torch.equal(thin_span(tokens, span, target, method), expected)


@pytest.mark.parametrize("method", ["nearest-exact", "nearest"])
def test_a_mask_is_thinned_as_its_keys_are(method):
    span, target = Span(3, 2, (4, 5)), (2, 2)
    keys = torch.arange(46.0).view(1, 46, 1)
    assert torch.equal(
        thin_span_mask(keys.transpose(1, 2), span, target, method),
        thin_span(keys, span, target, method).transpose(1, 2),
    )


def test_the_mask_of_a_mean_is_that_of_its_middle():
    mask = torch.arange(16.0).view(1, 16)
    assert thin_span_mask(mask, Span(0, 1, (4, 4)), (2, 2), "area").tolist() == [[5, 7, 13, 15]]


def test_a_sequence_that_is_too_short_for_the_span():
    with pytest.raises(ValueError, match="expected 20 image tokens from token 5 on, got a sequence of 24"):
        thin_span(torch.randn(1, 24, 2), Span(5, 1, (4, 5)), (2, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("method", ["nearest-exact", "nearest", "area", "blend"])
def test_equal_to_interpolate_in_other_types(dtype, method):
    image = image_of((13, 22)).to(dtype)
    target = target_grid((13, 22), 2.5)
    assert torch.equal(thin(tokens_of(image), (13, 22), target, method), tokens_of(interpolated(image, target, method)))


def test_nearest_exact_takes_the_middle_and_nearest_the_first():
    row = torch.arange(8.0).view(1, 8, 1)
    assert thin(row, (1, 8), (1, 4), "nearest-exact").flatten().tolist() == [1, 3, 5, 7]
    assert thin(row, (1, 8), (1, 2), "nearest-exact").flatten().tolist() == [2, 6]
    assert thin(row, (1, 8), (1, 4), "nearest").flatten().tolist() == [0, 2, 4, 6]


def test_factor_one_returns_the_very_tokens():
    tokens = torch.randn(1, 12, 4)
    assert thin(tokens, (3, 4), target_grid((3, 4), 1.0)) is tokens


def test_indices_made_in_inference_mode_serve_backward_later():
    with torch.inference_mode():
        thin(torch.randn(1, 30, 2), (5, 6), (2, 3))
    tokens = torch.randn(1, 30, 2, requires_grad=True)
    thin(tokens, (5, 6), (2, 3)).sum().backward()
    assert tokens.grad.sum() == 2 * 3 * 2


def test_wrong_number_of_tokens():
    with pytest.raises(ValueError, match="expected 3x4 = 12 tokens, got 13"):
        thin(torch.randn(1, 13, 4), (3, 4), (1, 2))


def test_one_factor_is_broadcast_and_a_list_overrides():
    assert ToDoSettings(4.0, 2).factors == (4.0, 4.0) and ToDoSettings(4.0, 1).factors == (4.0,)
    assert ToDoSettings(4.0, 3, "4, 2").factors == (4.0, 2.0)


def test_metadata_is_as_given():
    assert ToDoSettings(4.0, 2).metadata() == {"ss_todo_factor": "4", "ss_todo_max_depth": "2"}
    assert ToDoSettings(2.0, 1, "4 2").metadata() == {"ss_todo_factor": "4 2", "ss_todo_max_depth": "2"}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"factor": 0.5}, "downsampling factor is 0.5, expected from 1.0 to 16.0"),
        ({"factor": math.nan}, "downsampling factor is nan, expected a number from 1.0 to 16.0"),
        ({"depth_factors": "4 two"}, "got 'two'"),
        ({"depth_factors": "nan"}, "got nan"),
        ({"depth_factors": "1 2 3 4 5"}, "at most 4 factors, got 5"),
        ({"max_depth": 5}, "maximum depth is 5, expected from 1 to 4"),
        ({"start_percent": 0.6, "end_percent": 0.5}, "start <= end, got 0.6 and 0.5"),
        ({"end_percent": 1.01}, r"end is 1\.01, expected from 0\.0 to 1\.0"),
        ({"start_percent": -0.01}, r"start is -0\.01, expected from 0\.0 to 1\.0"),
        ({"method": "bicubic"}, "downsampling method is 'bicubic', expected one of"),
        ({"disable_after": -1.0}, "disable after is -1.0, expected from 0.0 to "),
    ],
)
def test_bad_settings(inputs, message):
    with pytest.raises(ValueError, match=message):
        ToDoSettings(**inputs)


def test_every_problem_is_in_the_one_error():
    with pytest.raises(ValueError) as error:
        ToDoSettings(0.5, 9, method="x", phase="y")
    assert str(error.value).count("; ") == 3


def test_disable_after_share_and_steps():
    share, steps, never = (ToDoSettings(2.0, disable_after=after) for after in (0.5, 3.0, 0.0))
    assert [share.is_active_while_training(step, 4) for step in range(4)] == [True, True, False, False]
    assert [steps.is_active_while_training(step, 99) for step in range(5)] == [True, True, True, False, False]
    assert never.is_active_while_training(10**6, 10)
    assert sum(ToDoSettings(2.0, disable_after=0.55).is_active_while_training(step, 100) for step in range(100)) == 55
    assert not ToDoSettings(2.0, phase="sampling").is_active_while_training(0, 10)


def test_identity_tells_settings_apart():
    assert ToDoSettings(2.0, 2).identity == ToDoSettings(1.0, 1, "2 2").identity
    changes = [
        {},
        {"factor": 2.5},
        {"max_depth": 2},
        {"depth_factors": "2 3"},
        {"method": "area"},
        {"start_percent": 0.1},
        {"end_percent": 0.9},
        {"phase": "training"},
        {"disable_after": 0.5},
    ]
    assert len(changes) == len(dataclasses.fields(ToDoSettings)) + 1
    assert len({ToDoSettings(**change).identity for change in changes}) == len(changes)


def test_saving_counts_queries_times_keys():
    rows = [DepthReport(1, 2.0, (8, 8), (4, 4), 1, 1), DepthReport(2, 1.0, (4, 4), (4, 4), 0, 2)]
    full, kept = 2 * 64 * 64 + 2 * 16 * 16, 64 * 16 + 64 * 64 + 2 * 16 * 16
    assert attention_saving(rows) == pytest.approx(1 - kept / full)


def test_saving_takes_both_sides_of_a_grid():
    rows = [DepthReport(1, 2.0, (4, 6), (2, 2), 3, 0, frames=2), DepthReport(2, 1.0, None, None, 0, 2)]
    assert attention_saving(rows) == pytest.approx(1 - 4 / 24)


def test_saving_weighs_depths_by_their_width():
    """Products of queries and keys are sums over the width: SDXL's second depth has twice the first one's."""
    rows = [
        DepthReport(1, 2.0, (8, 8), (4, 4), 10, 0, width=640),
        DepthReport(2, 1.0, (4, 4), (4, 4), 0, 60, width=1280),
    ]
    full, kept = 10 * 64 * 64 * 640 + 60 * 16 * 16 * 1280, 10 * 64 * 16 * 640 + 60 * 16 * 16 * 1280
    assert attention_saving(rows) == pytest.approx(1 - kept / full)


@pytest.mark.parametrize(
    ("side", "factor", "expected"), [(66, 2.2, 30), (33, 1.1, 30), (81, 2.7, 30), (65, 2.2, 29), (7, 16.0, 1)]
)
def test_a_factor_is_the_decimal_that_was_typed(side, factor, expected):
    assert target_grid((side, side), factor) == (expected, expected)
