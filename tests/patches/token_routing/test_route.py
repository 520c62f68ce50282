"""Blocks of a made-up transformer on the tokens that stay, against the same blocks called by hand, row by row."""

import pytest
import torch
from graft_nodes.patches.models.routed_blocks import RoutedBlocks
from graft_nodes.patches.models.token_layout import Layout, Place
from graft_nodes.patches.token_routing.route import RoutedPass
from graft_nodes.patches.token_routing.token_choice import choose_kept, kept_count
from torch import nn

TEXT, GRID, ROWS, WIDTH, RATIO, SEED = 3, (2, 5), 2, 4, 0.4, 7
IMAGE = GRID[0] * GRID[1]
WHOLE = TEXT + IMAGE
LAYOUT = Layout(1, GRID, {WHOLE: Place(TEXT)})
CALLED = RoutedBlocks("blocks", "x", positions=("places",), masks=("mask",))


class Block(nn.Module):
    """Attention with places and a mask that is added to the scores."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x, places, mask=None):
        q = x + places + self.number
        scores = q @ q.transpose(1, 2)
        if mask is not None:
            scores = scores + mask.view(-1, *mask.shape[-2:])
        return x + scores.softmax(-1) @ x


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(blocks, x, places, mask):
    """Each row by itself: its tokens that stay, through all blocks, and back among the others."""
    kept = choose_kept(SEED, ROWS, IMAGE, kept_count(IMAGE, RATIO), x.device)
    rows = []
    for row in range(ROWS):
        staying = torch.cat([torch.arange(TEXT), TEXT + kept[row]])
        own = None
        if mask is not None:
            own = mask.view(-1, WHOLE, WHOLE).expand(ROWS, -1, -1)[row][staying][:, staying]
        short = x[row : row + 1, staying]
        for block in blocks:
            short = block(short, places.expand(ROWS, -1, -1)[row : row + 1, staying], own)
        rows.append(x[row].index_copy(0, staying, short[0]))
    return torch.stack(rows)


@pytest.mark.parametrize("places", [(1, WHOLE, WIDTH), (ROWS, WHOLE, WIDTH)], ids=str)
@pytest.mark.parametrize("mask", [None, (WHOLE, WHOLE), (ROWS, WHOLE, WHOLE), (ROWS, 1, WHOLE, WHOLE)], ids=str)
def test_places_and_masks_are_those_of_the_tokens_that_stay(places, mask):
    blocks = nn.ModuleList([Block(0.1), Block(0.2)])
    x, places = numbers(ROWS, WHOLE, WIDTH), numbers(*places, seed=1)
    if mask is not None:
        mask = numbers(*mask, seed=2)
    expected = by_hand(blocks, x, places, mask)
    with RoutedPass([[(block, CALLED) for block in blocks]], LAYOUT, RATIO, SEED).enter():
        found = x
        for block in blocks:
            found = block(found, places, mask)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12) and not torch.equal(found, x)
    assert all("forward" not in vars(block) for block in blocks)
