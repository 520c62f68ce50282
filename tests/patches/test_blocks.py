"""Block weights: lists and names, and the blocks that they mean."""

import pytest
from graft_nodes.patches.blocks import LAYOUTS, block_of, fitting, parse, strength

SD1 = [*(f"diffusion_model.input_blocks.{n}.1.w" for n in range(12)), "diffusion_model.middle_block.1.w",
       *(f"diffusion_model.output_blocks.{n}.1.w" for n in range(12))]  # fmt: skip


def test_blocks_of_weights():
    assert [block_of(f"diffusion_model.{path}.x.weight") for path in ("input_blocks.4", "middle_block.1", "output_blocks.11",
            "double_blocks.0", "single_blocks.37", "time_embed.0")] == ["IN04", "M00", "OUT11", "D00", "S37", "BASE"]  # fmt: skip


@pytest.mark.parametrize("length", LAYOUTS)
def test_lists_have_a_strength_a_block(length):
    assert len(set(LAYOUTS[length][1])) == length
    assert list(parse(",".join(str(n) for n in range(length))).values()) == list(range(length))


def test_a_list_of_17():
    found = fitting(",".join(str(n) for n in range(17)), SD1)
    assert strength(found, "diffusion_model.input_blocks.1.1.w") == 1 and strength(found, "diffusion_model.output_blocks.11.1.w") == 16
    assert strength(found, "diffusion_model.input_blocks.0.0.w") == strength(found, None) == 0


def test_names_and_beginnings_of_names():
    found = fitting("IN=0, IN04=0.5, BASE=2", SD1)
    assert [strength(found, weight) for weight in (SD1[3], SD1[4], SD1[12], None)] == [0, 0.5, 2, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [("1,2", "got 2"), ("X3=1", "X3 is no block"), ("IN=a", "expected numbers, got 'a'"), ("nan" + ",1" * 16, "expected numbers"),
     (",".join("1" * 20), None), (",".join("1" * 58), "no D00.*expected a list of 17")],
)  # fmt: skip
def test_wrong_lists(text, message):
    if message is None:
        assert fitting(text, SD1)
        return
    with pytest.raises(ValueError, match=message):
        fitting(text, SD1)
