"""Changes that a file holds under two names."""

import pytest
import torch
from graft_nodes.patches.adapters.diff import Diff
from graft_nodes.patches.adapters.dora import DoRA
from graft_nodes.patches.adapters.lora import LoRA
from graft_nodes.patches.lora_files.repeated_changes import Claim, drop_repeated
from graft_nodes.patches.lora_files.target import Target

SHAPES = {("model", "qkv.weight"): (6, 4), ("model", "out.weight"): (4, 4)}
draws = torch.Generator().manual_seed(0)
UP, DOWN = torch.randn(6, 2, generator=draws), torch.randn(2, 4, generator=draws)
WHOLE = Claim("qkv", Target("model", "qkv.weight"), LoRA(UP, DOWN))
PARTS = [
    Claim(f"to_{letter}", Target("model", "qkv.weight", (0, start, 2)), LoRA(UP[start : start + 2], DOWN))
    for letter, start in zip("qkv", (0, 2, 4), strict=True)
]


@pytest.mark.parametrize("order", [[WHOLE, *PARTS], [*PARTS, WHOLE], [PARTS[1], WHOLE, PARTS[0], PARTS[2]]])
def test_the_name_for_more_rows_counts(order):
    used, repeated, problems = drop_repeated(order, SHAPES)
    assert used == [WHOLE] and sorted(repeated) == ["to_k", "to_q", "to_v"] and not problems


def test_of_equals_the_first_one_counts():
    again = WHOLE._replace(base="again")
    assert drop_repeated([WHOLE, again], SHAPES) == ([WHOLE], ("again",), [])


def test_the_same_change_in_other_factors_is_the_same():
    """As a full difference, and with the product's two sides scaled against each other."""
    for layer in (Diff(UP @ DOWN), LoRA(4 * UP, DOWN, alpha=0.5)):
        assert drop_repeated([WHOLE, Claim("other", WHOLE.target, layer)], SHAPES)[1] == ("other",)


@pytest.mark.parametrize(
    "other",
    [
        PARTS[0]._replace(layer=LoRA(UP[:2] * 1.001, DOWN)),
        PARTS[0]._replace(layer=LoRA(UP[2:4], DOWN)),
        Claim("other", WHOLE.target, LoRA(UP, DOWN, alpha=1.0)),
        Claim("other", WHOLE.target._replace(function=torch.flipud), LoRA(UP, DOWN)),
        Claim("other", WHOLE.target, DoRA(LoRA(UP, DOWN), torch.ones(6, 1))),
    ],
)
def test_different_changes_of_the_same_rows_are_named(other):
    _, repeated, problems = drop_repeated([WHOLE, other], SHAPES)
    assert not repeated
    assert problems == [
        f"{other.base}: changes the same rows as qkv (qkv.weight) in another way; remove one of the two from the file"
    ]


def test_rows_that_only_overlap_are_different():
    parts = [Claim(str(start), Target("model", "qkv.weight", (0, start, 4)), LoRA(UP[:4], DOWN)) for start in (0, 2)]
    assert len(drop_repeated(parts, SHAPES)[2]) == 1


def test_rows_of_another_order_are_compared_in_the_models_own():
    flipped = Claim("flipped", WHOLE.target._replace(function=torch.flipud), LoRA(UP.flip(0), DOWN))
    assert drop_repeated([WHOLE, flipped], SHAPES)[1] == ("flipped",)


def test_magnitudes_must_be_the_same_numbers():
    whole = WHOLE._replace(layer=DoRA(LoRA(UP, DOWN), torch.arange(1.0, 7.0)))
    part = PARTS[1]._replace(layer=DoRA(LoRA(UP[2:4], DOWN), torch.tensor([3.0, 4.0])))
    other = PARTS[1]._replace(layer=DoRA(LoRA(UP[2:4], DOWN), torch.tensor([3.0, 5.0])))
    assert drop_repeated([whole, part], SHAPES)[1] == ("to_k",)
    assert len(drop_repeated([whole, other], SHAPES)[2]) == 1


def test_other_rows_other_weights_and_layers_of_one_name_are_kept():
    out = Claim("out", Target("model", "out.weight"), LoRA(UP[:4], DOWN))
    beside = WHOLE._replace(layer=Diff(torch.ones(6, 4)))
    for claims in (PARTS, [WHOLE, beside], [WHOLE, out]):
        assert drop_repeated(claims, SHAPES) == (claims, (), [])
