"""A setting that is declared once: its checks, what it reads, and what a dataclass of settings lists."""

import math
from dataclasses import FrozenInstanceError, dataclass, fields

import numpy as np
import pytest
from graft_nodes.settings.declaration import read_values, setting, settings_of, value_error


def _two_numbers(text):
    return tuple(float(word) for word in text.split())


@dataclass(frozen=True)
class Made:
    rank: int = setting("rank (dim)", 16, "The rank.", low=1, high=64, kohya="--network_dim")
    rate: float = setting("learning rate", 0.1, "How fast.", low=0.0, high=10.0, step=0.1)
    kind: str = setting("kind", "a", "Which.", choices=("a", "b"))
    listed: str = setting("listed", "x", "Which, by a function.", choices=lambda: ["x", "y"])
    on: bool = setting("switch", False, "Whether.")
    widths: tuple[float, ...] = setting("widths", "0.5 1", "Two numbers.", read=_two_numbers)
    noted: str = ""  # no setting

    def __post_init__(self):
        errors = read_values(self)
        if errors:
            raise ValueError("; ".join(errors))


def test_defaults_are_those_that_are_declared():
    made = Made()
    assert (made.rank, made.rate, made.kind, made.on, made.widths) == (16, 0.1, "a", False, (0.5, 1.0))


def test_declared_lists_settings_in_order_and_nothing_else():
    assert [*settings_of(Made)] == ["rank", "rate", "kind", "listed", "on", "widths"]
    assert [*settings_of(Made())] == [*settings_of(Made)]
    assert settings_of(Made)["rank"].elsewhere == {"kohya": "--network_dim"}
    assert [one.kind for one in settings_of(Made).values()] == [int, float, str, str, bool, str]
    assert settings_of(Made)["listed"].options() == ["x", "y"] and settings_of(Made)["rank"].options() is None
    assert len(fields(Made)) == 7


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rank": 0}, "rank (dim) is 0, expected from 1 to 64"),
        ({"rank": 65}, "rank (dim) is 65, expected from 1 to 64"),
        ({"rank": 2.5}, "rank (dim) is 2.5, expected a whole number from 1 to 64"),
        ({"rank": "4"}, "rank (dim) is '4', expected a whole number from 1 to 64"),
        ({"rank": True}, "rank (dim) is True, expected a whole number"),
        ({"rank": None}, "rank (dim) is None, expected a whole number"),
        ({"rate": math.nan}, "learning rate is nan, expected a number from 0.0 to 10.0"),
        ({"rate": math.inf}, "learning rate is inf, expected a number"),
        ({"rate": -0.1}, "learning rate is -0.1, expected from 0.0 to 10.0"),
        ({"rate": [0.1]}, "learning rate is [0.1], expected a number"),
        ({"kind": "c"}, "kind is 'c', expected one of a, b"),
        ({"kind": None}, "kind is None, expected text"),
        ({"listed": "z"}, "listed is 'z', expected one of x, y"),
        ({"on": 1}, "switch is 1, expected true or false"),
        ({"widths": "0.5 wide"}, "widths: could not convert"),
        ({"widths": ""}, ""),
    ],
)
def test_a_wrong_value_is_named_by_its_label(given, words):
    if not words:
        assert Made(**given).widths == ()
        return
    with pytest.raises(ValueError) as error:
        Made(**given)
    assert str(error.value).startswith(words)


def test_every_wrong_value_is_named_at_once():
    with pytest.raises(ValueError, match=r"rank \(dim\) is 0.*; kind is 'c'"):
        Made(rank=0, kind="c")


def test_numbers_of_another_kind_become_what_they_mean():
    made = Made(rank=4.0, rate=1)
    assert (type(made.rank), made.rank, type(made.rate), made.rate) == (int, 4, float, 1.0)
    made = Made(rank=np.int64(8), rate=np.float32(0.5))
    assert (type(made.rank), type(made.rate)) == (int, float)


def test_a_value_that_was_read_may_be_given_again():
    assert Made(widths=Made(widths="0.25 0.5").widths).widths == (0.25, 0.5)


def test_settings_stay_frozen():
    with pytest.raises(FrozenInstanceError):
        Made().rank = 3


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (None, None, "n is 'x', expected a number"),
        (0, None, "n is 'x', expected a number 0 or more"),
        (None, 5, "n is 'x', expected a number at most 5"),
    ],
)
def test_open_bounds_are_said_as_they_are(low, high, words):
    assert value_error("n", float, "x", low, high) == words


def test_a_number_at_a_bound_is_right():
    assert not value_error("seed", int, 2**64 - 1, 0, 2**64 - 1) and value_error("seed", int, 2**64, 0, 2**64 - 1)
    assert not value_error("n", int, 1, 1, 64) and not value_error("n", int, 64, 1, 64)


def test_the_help_may_be_written_by_records_that_come_later():
    @dataclass(frozen=True)
    class Chosen:
        kind: str = setting("kind", "a", lambda: f"One of {', '.join(names)}.", choices=lambda: names)

    names = ["a"]
    assert settings_of(Chosen)["kind"].help == "One of a."
    names.append("b")
    assert settings_of(Chosen)["kind"].help == "One of a, b." and settings_of(Chosen)["kind"].options() == ["a", "b"]


def test_large_whole_numbers_are_compared_as_they_are():
    """As floats both are 2^64."""
    assert not value_error("seed", int, 2**64 - 1, 0, 2**64 - 1)
    assert value_error("seed", int, 2**64, 0, 2**64 - 1) == f"seed is {2**64}, expected from 0 to {2**64 - 1}"
