"""The settings of Apply TREAD: what is refused, when it works, and which blocks tokens skip."""

import pytest
from graft_nodes.patches.token_routing.settings import RoutingSettings


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ratio": -0.1}, "skip ratio is -0.1, expected from 0.0 to 0.95"),
        ({"ratio": 0.96}, "skip ratio is 0.96, expected from 0.0 to 0.95"),
        ({"ratio": float("nan")}, "skip ratio is nan, expected a number from 0.0 to 0.95"),
        ({"start_layer": 3, "end_layer": 2}, "start layer 3 comes after end layer 2: no block would be skipped"),
        ({"start_layer": -2, "end_layer": -3}, "start layer -2 comes after end layer -3"),
        ({"start_layer": 1001}, "start layer is 1001, expected from -1000 to 1000"),
        ({"disable_after": float("inf")}, "disable after is inf, expected a number from 0.0 to"),
        ({"disable_after": -1.0}, "disable after is -1.0"),
    ],
)
def test_wrong_settings_are_refused_with_what_is_expected(given, said):
    with pytest.raises(ValueError) as refused:
        RoutingSettings(**given)
    assert said in str(refused.value)


def test_every_wrong_setting_is_said_at_once():
    with pytest.raises(ValueError) as refused:
        RoutingSettings(ratio=2.0, start_layer=2000, disable_after=-1.0)
    assert str(refused.value).count("; ") == 2


@pytest.mark.parametrize(
    ("start", "end", "count", "blocks"),
    [
        (2, -2, 57, range(2, 56)),
        (0, -1, 3, range(3)),
        (0, 0, 3, range(1)),
        (-1, -1, 3, range(2, 3)),
        (-100, 100, 3, range(3)),
        (1, 1, 4, range(1, 2)),
    ],
)
def test_layers_count_from_either_end(start, end, count, blocks):
    assert RoutingSettings(0.5, start, end).blocks(count) == blocks


def test_layers_without_a_block_between_them_are_refused():
    with pytest.raises(
        ValueError, match="no block lies between start layer 2 and end layer -2: this model has 3 blocks"
    ):
        RoutingSettings(0.5, 2, -2).blocks(3)


@pytest.mark.parametrize(
    ("after", "total", "steps"), [(0.0, 10, 10), (0.5, 10, 5), (0.55, 100, 55), (3.0, 10, 3), (1.0, 10, 1)]
)
def test_it_works_until_a_share_or_a_step(after, total, steps):
    settings = RoutingSettings(0.5, disable_after=after)
    assert [settings.is_active_at(step, total) for step in range(total)] == [step < steps for step in range(total)]


def test_every_setting_is_in_the_identity():
    given = {"ratio": 0.25, "start_layer": 3, "end_layer": -3, "disable_after": 0.5}
    texts = {RoutingSettings(**{name: value}).identity for name, value in given.items()}
    assert len(texts | {RoutingSettings().identity}) == 5
