"""Which tokens stay, and how they leave a sequence and come back: against loops over single tokens."""

import math

import pytest
import torch
from graft_nodes.patches.token_routing.token_choice import choose_kept, kept_count, put_back, sequence_indices, take

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("count", "ratio", "kept"),
    [(10, 0.5, 5), (10, 0.7, 3), (10, 0.0, 10), (7, 0.5, 4), (1, 0.95, 1), (4096, 0.5, 2048)],
)
def test_the_ratio_of_the_tokens_skips(count, ratio, kept):
    assert kept_count(count, ratio) == kept


def test_a_sequence_gets_no_length_by_which_others_know_other_attention():
    assert kept_count(20, 0.5, others=10, taken=(20, 30)) == 9
    assert kept_count(20, 0.5, others=10, taken=(19, 20)) == 8


def test_a_draw_depends_on_its_seed_alone_and_rows_differ():
    before = torch.get_rng_state()
    one = choose_kept(7, 3, 50, 20, CPU)
    assert torch.equal(one, choose_kept(7, 3, 50, 20, CPU)) and not torch.equal(one, choose_kept(8, 3, 50, 20, CPU))
    assert not torch.equal(one[0], one[1])
    assert all(row.tolist() == sorted(set(row.tolist())) for row in one)
    assert torch.equal(torch.get_rng_state(), before), "the global generator is left alone"


def test_every_token_stays_equally_often():
    rows, count, kept = 4000, 40, 10
    share = (
        torch.zeros(count).index_add_(0, choose_kept(1, rows, count, kept, CPU).flatten(), torch.ones(rows * kept))
        / rows
    )
    deviation = math.sqrt(0.25 * 0.75 / rows)
    assert (share - 0.25).abs().max() < 5 * deviation


@pytest.mark.parametrize(("start", "after"), [(0, 0), (3, 0), (0, 2), (3, 2)])
def test_what_leaves_a_sequence_comes_back_in_its_place(start, after):
    rows, count, kept = 2, 6, 4
    values = torch.randn(rows, start + count + after, 5, dtype=torch.float64)
    staying = choose_kept(3, rows, count, kept, CPU)
    indices = sequence_indices(staying, start, count, values.shape[1])
    short = take(values, indices, 1)
    for row in range(rows):
        left = [
            n for n in range(values.shape[1]) if not start <= n < start + count or n - start in staying[row].tolist()
        ]
        assert indices[row].tolist() == left
        assert torch.equal(short[row], values[row, left])
    image = put_back(values[:, start : start + count], staying, -short[:, start : start + kept])
    for row in range(rows):
        for token in range(count):
            sign = -1 if token in staying[row].tolist() else 1
            assert torch.equal(image[row, token], sign * values[row, start + token])


def test_values_for_all_rows_are_taken_for_each():
    values = torch.randn(1, 1, 6, 2, 2)
    indices = torch.tensor([[0, 2], [1, 5]])
    assert torch.equal(take(values, indices, 2), torch.stack((values[0, :, [0, 2]], values[0, :, [1, 5]])))
