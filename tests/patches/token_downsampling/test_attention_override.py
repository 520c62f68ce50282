"""Attention with thinned keys, values and masks, against attention over keys that are picked by hand."""

import pytest
import torch
from graft_nodes.patches.models.token_layout import Layout, Place
from graft_nodes.patches.token_downsampling.attention_override import Thinning

TEXT, SIDE, ROWS, WIDTH = 3, 4, 2, 6
WHOLE = TEXT + SIDE * SIDE


def attention(q, k, v, heads, mask=None):
    """One head, with a mask that is added to the scores."""
    scores = q @ k.transpose(1, 2)
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ v


def numbers(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kept():
    """The text, and the tokens that torch itself calls the nearest of every second row and column."""
    places = torch.arange(float(SIDE * SIDE)).view(1, 1, SIDE, SIDE)
    nearest = torch.nn.functional.interpolate(places, size=(SIDE // 2, SIDE // 2), mode="nearest-exact")
    return torch.cat([torch.arange(TEXT), TEXT + nearest.flatten().long()])


@pytest.fixture
def thinning():
    return Thinning(Layout(1, (SIDE, SIDE), {WHOLE: Place(TEXT)}), (SIDE // 2, SIDE // 2), "nearest-exact", None)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("mask", [None, (ROWS, 1, WHOLE), (ROWS, WHOLE, WHOLE), (1, WHOLE, 1)], ids=str)
def test_keys_values_and_the_mask_lose_the_same_tokens(thinning, mask, by_name):
    q, k, v = (numbers(ROWS, WHOLE, WIDTH, seed=seed) for seed in range(3))
    short = mask = None if mask is None else numbers(*mask, seed=3)
    if mask is not None and mask.shape[-1] == WHOLE:
        short = mask[..., kept()]
    if by_name:
        found = thinning(attention, q, k, v, heads=1, mask=mask)
    else:
        found = thinning(attention, q, k, v, 1, mask)
    assert torch.equal(found, attention(q, k[:, kept()], v[:, kept()], 1, short)) and thinning.thinned
    assert not torch.allclose(found, attention(q, k, v, 1, mask), atol=1e-3)


def test_attention_of_another_length_keeps_all_tokens(thinning):
    q, k, v = (numbers(ROWS, WHOLE - 1, WIDTH, seed=seed) for seed in range(3))
    assert torch.equal(thinning(attention, q, k, v, heads=1), attention(q, k, v, 1))
    assert thinning.met and not thinning.thinned
