"""Sliders: which sets of prompts come of a node's texts, what is refused, and the partial denoising in float64."""

from itertools import pairwise

import pytest
import torch
from graft_nodes.training.objective.slider import (
    AI_TOOLKIT,
    BOTH_DIRECTIONS,
    CONCEPT_SLIDERS,
    METHODS,
    PICTURE_PAIRS,
    PromptSet,
    SliderSettings,
    denoise_partly,
    denoised_of,
    prediction_of,
)


def _read(positive="old", negative="young", target="person", neutral="", keep="", method=BOTH_DIRECTIONS, **settings):
    return SliderSettings(method, positive, negative, target, neutral, keep, **settings)


def test_lines_are_partners_and_what_is_kept_is_in_front_of_each():
    found = _read("old man\nold dog", "young man\n\n young dog ", "man\ndog", keep="black\nwhite").sets
    assert found == (
        PromptSet("black man", "black old man", "black young man", "black man"),
        PromptSet("black dog", "black old dog", "black young dog", "black dog"),
        PromptSet("white man", "white old man", "white young man", "white man"),
        PromptSet("white dog", "white old dog", "white young dog", "white dog"),
    )


def test_one_line_stands_for_all_and_the_negative_may_be_empty():
    assert _read("old\nancient", "", neutral="someone").sets == (
        PromptSet("person", "old", "", "someone"),
        PromptSet("person", "ancient", "", "someone"),
    )


def test_the_strengths_of_each_method():
    both = (1.0, -1.0)
    wanted = {BOTH_DIRECTIONS: both, CONCEPT_SLIDERS: (1.0,), PICTURE_PAIRS: both, AI_TOOLKIT: both}
    assert {method: _read(method=method).strengths for method in METHODS} == wanted
    assert _read(method=PICTURE_PAIRS).identity == SliderSettings(PICTURE_PAIRS).identity, "pairs have no prompts"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"positive": ""}, "positive prompt is empty: write what strength 1 gives"),
        ({"target": " "}, "target prompt is empty: write what the slider is for"),
        ({"positive": "a\nb\nc", "negative": "d\ne"}, "negative prompt has 2 lines and positive prompt 3"),
        ({"target": "a\nb"}, "target prompt has 2 lines and positive prompt 1"),
        ({"negative": "old"}, r"line 1 of positive and negative prompt is the same \('old'\)"),
        ({"guidance": 0.0}, "guidance is 0.0, expected from 0.01 to 100.0"),
        ({"cfg": 0.5}, "denoising CFG is 0.5, expected from 1.0 to 100.0"),
        ({"steps": 0}, "denoising steps is 0, expected from 1 to 1000"),
        ({"anchor": "a\nb"}, "anchor prompt has 2 lines and positive prompt 1"),
        ({"anchor_strength": 0.0}, "anchor strength is 0.0, expected from 0.01 to 100.0"),
        (
            {"method": "none"},
            "slider method is 'none', expected one of both directions, concept sliders, picture pairs, ai-toolkit",
        ),
    ],
)
def test_wrong_settings_are_refused(given, said):
    with pytest.raises(ValueError, match=f"Slider: {said}"):
        _read(**given)


def test_an_anchor_has_the_words_to_keep_in_front_and_none_is_none():
    (one, two) = _read(anchor="people", keep="black\nwhite").sets
    assert (one.anchor, two.anchor) == ("black people", "white people")
    assert [prompts.anchor for prompts in _read(keep="black\nwhite").sets] == ["", ""]


def test_settings_without_an_anchor_have_the_identity_of_before_anchors():
    fields = {"method", "positive", "negative", "target", "neutral", "keep", "guidance", "steps", "cfg"}
    assert _read().identity.keys() == fields
    assert _read(anchor="people").identity.keys() == fields | {"anchor", "anchor_strength"}


@pytest.mark.parametrize("prediction", ["eps", "v", "flow"])
def test_what_the_network_gives_is_told_from_denoised_latents_and_back(prediction):
    """ComfyUI's own definitions: x - sigma e (eps, flow), and x / (sigma^2 + 1) - v sigma / sqrt(sigma^2 + 1) (v)."""
    draws = torch.Generator().manual_seed(2)
    x, output = torch.randn(2, 3, 4, 5, 5, generator=draws, dtype=torch.float64)
    sigma = torch.tensor([0.05, 0.5, 0.97], dtype=torch.float64)
    s = sigma.view(-1, 1, 1, 1)
    denoised = x - s * output
    if prediction == "v":
        denoised = x / (s**2 + 1) - output * s / (s**2 + 1).sqrt()
    assert torch.allclose(prediction_of(prediction, x, denoised, sigma), output, rtol=1e-12, atol=1e-12)
    assert torch.allclose(denoised_of(prediction, x, output, sigma), denoised, rtol=1e-12, atol=1e-12)


def test_each_row_is_denoised_to_its_own_level():
    """Against Euler's method row by row (Karras 2022, algorithm 1 without churn), each on its own way down."""
    draws = torch.Generator().manual_seed(2)
    levels = torch.tensor([9.0, 5.0, 2.0, 1.0, 0.4, 0.1], dtype=torch.float64)
    sigma = torch.tensor([1.5, 0.1, 9.0, 0.4], dtype=torch.float64)
    x = torch.randn(4, 2, 3, 3, generator=draws, dtype=torch.float64) * 9

    def denoised(x, sigma):
        return torch.tanh(x) / (1 + sigma.view(-1, 1, 1, 1))

    for row, wanted in enumerate(sigma.tolist()):
        one = x[row : row + 1]
        path = [level for level in levels.tolist() if level > wanted] + [wanted]
        for high, low in pairwise(path):
            slope = (one - denoised(one, torch.tensor([high], dtype=torch.float64))) / high
            one = one + (low - high) * slope
        found = denoise_partly(denoised, x, levels, sigma)[row : row + 1]
        assert torch.allclose(found, one, rtol=1e-12, atol=1e-12)
