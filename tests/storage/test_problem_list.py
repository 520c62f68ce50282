"""Long lists of problems in errors: the first ones, and the number of the others."""

import pytest
from graft_nodes.headless.embedded import Problem, WorkflowError
from graft_nodes.storage import shards
from graft_nodes.storage.problem_list import SHOWN, problem_lines


def test_a_short_list_is_whole():
    assert problem_lines(["one", "two"]) == "- one\n- two"
    assert problem_lines(["one"], "") == "one" and problem_lines([]) == ""
    assert problem_lines([str(number) for number in range(SHOWN)]).count("\n") == SHOWN - 1


def test_of_a_long_list_the_first_and_a_count():
    lines = problem_lines([f"problem {number}" for number in range(100_000)], "  ").split("\n")
    assert lines[:2] == ["  problem 0", "  problem 1"] and len(lines) == SHOWN + 1
    assert lines[-1] == f"  and {100_000 - SHOWN:,} more"


def test_errors_with_100_000_problems_stay_short(tmp_path):
    missing = ", ".join(f'"{number}": "part-{number}.safetensors"' for number in range(100_000))
    (tmp_path / "x.safetensors.index.json").write_text(f'{{"weight_map": {{{missing}}}}}')
    with pytest.raises(ValueError, match=r"and 99,950 more$") as caught:
        shards.load_shards(tmp_path, "x")
    assert len(str(caught.value)) < 10_000
    error = WorkflowError([Problem("unknown", node=str(number)) for number in range(100_000)])
    assert len(error.problems) == 100_000 and len(str(error)) < 10_000
