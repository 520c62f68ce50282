"""Rows of a LoRA stack, from JSON and from other packs."""

import copy
import json

import pytest
from graft_nodes.patches.lora_files.stack_rows import EMPTY, StackRow, parse, parse_schedule, read_stack_rows
from graft_nodes.patches.patching.strength_schedule import Schedule


def rows(*listed, version=1):
    return json.dumps({"version": version, "rows": list(listed)})


def test_a_row_is_a_tuple_of_three_with_extras():
    row = StackRow("a.safetensors", 0.5, 0.25, partial=True)
    name, model, clip = row
    assert (name, model, clip) == ("a.safetensors", 0.5, 0.25) == row and row.partial and row.blocks == ""
    assert copy.deepcopy(row).partial


def test_defaults_and_rows_that_are_off():
    parsed = parse(
        rows(
            {"file": "a"},
            {"file": "b", "on": False, "blocks": "1,0"},
            {"file": "c", "model": 0.5},
            {"file": "d", "clip": 0},
        )
    )
    assert parsed == [("a", 1.0, 1.0), ("c", 0.5, 0.5), ("d", 1.0, 0.0)]
    assert [row.number for row in parsed] == [1, 3, 4]
    assert parse(EMPTY) == [] == parse("  ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object"),
        (rows(version=2), "expected version 1, got 2"),
        (rows("a"), "row 1: expected an object"),
        (rows({"file": "a", "model": "1"}), r"row 1 \(a\): model: expected a number, got '1'"),
        (rows({"file": "a", "model": True}), "got True"),
        ('{"version": 1, "rows": [{"file": "a", "clip": NaN}]}', "clip: expected a strength from -100 to 100, got nan"),
        (rows({"file": "a", "model": 1e300}), "model: expected a strength from -100 to 100"),
        (rows({"file": "a", "clip": -(10**400)}), "clip: expected a strength from -100 to 100"),
        (rows({"file": "a", "schedule": "0:1, 0.5:101"}), "schedule: expected strengths from -100 to 100, got '101'"),
        (rows({"file": "a", "strength": 1}), "unknown field 'strength'"),
        (rows({"file": "a", "blocks": "1,0"}), "expected a list of 17"),
        (rows({"file": "a", "schedule": "x"}), r"schedule: expected start-end such as 0\.2-0\.8"),
        (rows({"file": "a", "schedule": "0.8-0.2"}), "a start before an end"),
        (rows({"file": "a", "schedule": "0:1, 2:0"}), "points in order, from 0 to 1"),
        (rows({"file": "a", "schedule": "0:1, 0.5:x"}), "expected numbers, got 'x'"),
    ],
)
def test_bad_json(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_every_row_is_in_the_one_error():
    with pytest.raises(ValueError) as error:
        parse(rows({"file": "a", "on": 1}, {"file": "b"}, {"model": 1}, {"file": "c", "clip": "x", "partial": 2}))
    assert str(error.value).count("\n- ") == 4


def test_rows_of_other_packs():
    assert read_stack_rows([("a", 1, 0.5), ["b", 2, 2]]) == [("a", 1.0, 0.5), ("b", 2.0, 2.0)]
    assert read_stack_rows([StackRow("a", 1, 1, partial=True)])[0].partial
    assert [row.number for row in read_stack_rows([("a", 1, 1), StackRow("b", 1, 1)])] == [1, 2]
    with pytest.raises(ValueError, match=r"row 1: expected .*\n.*row 2 .*schedule: expected start-end"):
        read_stack_rows([("a", 1), StackRow("b", 1, 1, schedule="x")])


def test_schedules():
    assert parse_schedule(" ") is None
    assert parse_schedule("20%-80%") == parse_schedule("0.2 - 0.8") == Schedule.from_range(0.2, 0.8)
    assert parse_schedule("0:1, 50%:0.3,\n1:0").points == ((0.0, 1.0), (0.5, 0.3), (1.0, 0.0))
    assert parse(rows({"file": "a", "schedule": "0-0.5"}))[0].schedule == "0-0.5"
