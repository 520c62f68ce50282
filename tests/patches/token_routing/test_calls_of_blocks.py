"""Tokens around blocks of each way to be called, against a block called row by row with the tokens that stay."""

import pytest
import torch
from graft_nodes.patches.models.routed_blocks import REFERENCES, RoutedBlocks
from graft_nodes.patches.models.token_layout import Layout, Place
from graft_nodes.patches.token_routing.route import RoutedPass
from graft_nodes.patches.token_routing.token_choice import choose_kept, kept_count
from torch import nn

SEED, RATIO, WIDTH = 3, 0.5, 4


def mixed(tokens, positions, weight):
    """What a block computes: every token sees the mean of all."""
    return (tokens + tokens.mean(dim=1, keepdim=True)) @ weight * positions


class Block(nn.Module):
    """Tokens (B, N, C) and positions (B or 1, N, 1)."""

    def __init__(self, seed):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)))
        self.lengths = []

    def forward(self, x, positions=None, step=None, beside=None):
        self.lengths.append(x.shape[1])
        return mixed(x, positions, self.weight)


class Grid(Block):
    def forward(self, x, positions=None):
        return super().forward(x.flatten(1, 3), positions).view(x.shape)


class Pair(Block):
    """Tokens of two kinds in a tuple, and positions in tuples."""

    def forward(self, x, positions=None):
        image, sound = x
        return super().forward(image, positions[0][0]), sound + 1


class Streams(Block):
    """The image and the text, which are one sequence for the positions: the image first."""

    def forward(self, image, text, positions=None):
        length = image.shape[1]
        out = super().forward(torch.cat((image, text), 1), positions)
        return out[:, :length], out[:, length:]


class Shared(Block):
    """Positions (N, 1) without rows."""

    def forward(self, x, positions=None):
        return super().forward(x, positions.unsqueeze(0))


class Window(nn.Module):
    def __init__(self, sliding_window):
        super().__init__()
        self.sliding_window = sliding_window

    def forward(self, x):
        places = torch.arange(x.shape[1])
        near = (places.unsqueeze(1) - places).abs() <= self.sliding_window
        return near.to(x.dtype) @ x


class Windowed(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.attn = Window(size)

    def forward(self, x):
        return self.attn(x)


def tokens(rows=2, count=8, seed=0):
    return torch.randn(rows, count, WIDTH, generator=torch.Generator().manual_seed(seed))


def kept(rows, count):
    return choose_kept(SEED, rows, count, kept_count(count, RATIO), torch.device("cpu"))


def routed(blocks, called, layout=None):
    return RoutedPass([[(block, called) for block in blocks]], layout, RATIO, SEED).enter()


def row_by_row(x, positions, blocks, stays):
    """Each row called by itself with the tokens `stays` (rows, kept) of the whole sequence."""
    rows = []
    for row, staying in enumerate(stays):
        part = x[row : row + 1, staying]
        for block in blocks:
            part = mixed(part, positions[:, staying] if len(positions) == 1 else positions[row, staying], block.weight)
        rows.append(x[row].index_copy(0, staying, part[0]))
    return torch.stack(rows)


def test_a_grid_is_a_grid_again():
    blocks, x, positions = [Grid(1), Grid(2)], tokens().view(2, 2, 2, 2, WIDTH), tokens(1)[..., :1]
    with routed(blocks, RoutedBlocks("", "x", grid=True, positions=("positions",))):
        out = blocks[1](blocks[0](x, positions), positions)
    assert [block.lengths for block in blocks] == [[4], [4]]
    torch.testing.assert_close(out.flatten(1, 3), row_by_row(x.flatten(1, 3), positions, blocks, kept(2, 8)))
    assert out.shape == x.shape


def test_the_image_is_taken_from_a_tuple_and_positions_may_be_in_tuples():
    blocks, x, positions = [Pair(1), Pair(2)], tokens(), tokens(2, 8, 1)[..., :1]
    sound, given = tokens(2, 3), ((positions, True), None)
    with routed(blocks, RoutedBlocks("", ("x", 0), positions=("positions",), returned=0)):
        out, heard = blocks[1](blocks[0]((x, sound), given), given)
    torch.testing.assert_close(out, row_by_row(x, positions, blocks, kept(2, 8)))
    assert torch.equal(heard, sound + 1 + 1)


@pytest.mark.parametrize("apart", [False, True])
def test_an_image_in_front_of_its_text(apart):
    blocks, image, text = [Streams(1), Streams(2)], tokens(), tokens(2, 3, 1)
    positions, lengths = tokens(2, 11, 2)[..., :1], []
    called = RoutedBlocks("", "image", joint=False, positions=("positions",), returned=0, apart=apart)
    layout, x, words = Layout(1, (2, 4), {11: Place(0, stream=(0, 8))}), image, text
    with routed(blocks, called, layout):
        for block in blocks:
            x, words = block(x, words, positions)
            lengths.append(x.shape[1])
    stays = torch.cat((kept(2, 8), torch.arange(8, 11).expand(2, -1)), 1)
    wanted = row_by_row(torch.cat((image, text), 1), positions, blocks, stays)
    torch.testing.assert_close(torch.cat((x, words), 1), wanted)
    assert lengths == ([8, 8] if apart else [4, 8]) and [block.lengths for block in blocks] == [[7], [7]]


def test_rows_share_their_draw_where_positions_have_no_rows():
    blocks, x, positions = [Shared(1)], tokens(), tokens(1)[0, :, :1]
    with routed(blocks, RoutedBlocks("", "x", positions=("positions",), shared=True)):
        out = blocks[0](x, positions)
    torch.testing.assert_close(out, row_by_row(x, positions.unsqueeze(0), blocks, kept(1, 8).expand(2, -1)))


def test_windows_see_the_places_that_tokens_have_with_all_others():
    blocks, x = [Windowed(2), Windowed(None), Windowed(2)], tokens(count=12)
    blocks[1].attn.forward = lambda x: x
    called = RoutedBlocks("", "x", shared=True, window="attn")
    call = RoutedPass([[(block, called) for block in blocks]], None, RATIO, SEED)
    with call.enter():
        out = x
        for block in blocks:
            out = block(out)
    (stays,) = kept(1, 12)
    near = ((stays.unsqueeze(1) - stays).abs() <= 2).to(x.dtype)
    assert 0 < near.mean() < 1
    torch.testing.assert_close(out, x.index_copy(1, stays, near @ near @ x[:, stays]))
    assert [block.attn.sliding_window for block in blocks] == [2, None, 2]
    with call.enter():  # as when a block runs again in the backward pass
        torch.testing.assert_close(type(blocks[0]).forward(blocks[0], x[:, stays]), near @ x[:, stays])
    assert [block.attn.sliding_window for block in blocks] == [2, None, 2]


def test_as_many_heads_as_tokens_are_refused():
    blocks = [Block(1)]
    with (
        routed(blocks, RoutedBlocks("", "x", positions=("positions",))),
        pytest.raises(RuntimeError, match="as many tokens as heads, 8, it cannot tell them apart"),
    ):
        blocks[0](tokens(), torch.zeros(1, 8, 8, 2))


@pytest.mark.parametrize(("does", "hint"), [(REFERENCES, ", or choose another reference method"), ("adds things", "")])
def test_what_tokens_cannot_skip_is_said(does, hint):
    blocks = [Block(1)]
    called = RoutedBlocks("", "x", positions=("positions",), absent={"beside": does})
    with (
        routed(blocks, called),
        pytest.raises(RuntimeError, match=f"Block {does}, so tokens cannot skip it. Take Apply TREAD off{hint}$"),
    ):
        blocks[0](tokens(), torch.ones(1, 8, 1), beside=torch.zeros(1))


@pytest.mark.parametrize(("shape", "refused"), [((2, 1, 5), False), ((2, 3, 5), True), ((2, 3, 5, 1), False)])
def test_a_noise_level_for_each_frame_is_refused(shape, refused):
    blocks = [Block(1)]
    called = RoutedBlocks("", "x", positions=("positions",), one_step={"step": 3})
    with routed(blocks, called):
        if not refused:
            blocks[0](tokens(), torch.ones(1, 8, 1), torch.zeros(shape))
            return
        with pytest.raises(RuntimeError, match="gets a noise level for each frame"):
            blocks[0](tokens(), torch.ones(1, 8, 1), torch.zeros(shape))


def test_a_sequence_of_another_length_is_refused():
    blocks = [Block(1)]
    with (
        routed(blocks, RoutedBlocks("", "x"), Layout(1, (2, 4), {11: Place(3)})),
        pytest.raises(RuntimeError, match="Block got 8 tokens, expected a sequence of 11"),
    ):
        blocks[0](tokens(), torch.ones(1, 8, 1))
