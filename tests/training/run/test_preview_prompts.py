"""The preview prompts of Train Step, one a line."""

import pytest
from graft_nodes.training.run.preview_prompts import LONGEST, MOST, preview_prompts


def test_each_line_is_a_prompt():
    text = "  a red square \n\n# a blue circle\r\na cat, (best:1.2)  # by night\n   # off\n"
    assert preview_prompts(text) == ["a red square", "a cat, (best:1.2)  # by night"]
    assert preview_prompts("") == preview_prompts(" \n#\n") == []


def test_too_many_and_too_long_prompts_are_refused_with_what_to_do():
    lines = [f"prompt {number}" for number in range(MOST)]
    assert preview_prompts("\n".join([*lines, "# one more"])) == lines
    with pytest.raises(ValueError, match=f"has {MOST + 1} prompts, at most {MOST} are allowed.*put a # in front"):
        preview_prompts("\n".join([*lines, "one more"]))
    assert preview_prompts("x" * LONGEST)
    with pytest.raises(ValueError, match=f"prompt 2 has {LONGEST + 1} characters, at most {LONGEST}"):
        preview_prompts("a\n#\n" + "x" * (LONGEST + 1))
