"""The soak itself: it works with a real server, and it notices what grows or changes."""

import os
import sys

import pytest
from graft_nodes.tests.faults import soak

FLAT = {"memory": 400_000_000, "disk": 1_000_000, "files": 8, "threads": 5, "base": "a"}


def rows(**changes):
    """A hundred measurements in which `changes` grow by so much each time."""
    grown = [{**FLAT, **{name: FLAT[name] + step * number for name, step in changes.items()}} for number in range(100)]
    return [soak.Measured(float(number), **values) for number, values in enumerate(grown)]


def test_what_is_flat_passes_though_it_rises_at_first_and_is_not_even():
    assert soak.verdict(rows()) == []
    warming = [
        soak.Measured(
            row.seconds, row.memory - max(0, 2_000_000 * (20 - number)), row.disk + number % 7 * 500_000, 8, 5, "a"
        )
        for number, row in enumerate(rows())
    ]
    assert soak.verdict(warming) == []


@pytest.mark.parametrize(("name", "step"), [("memory", 1_500_000), ("disk", 200_000), ("files", 1), ("threads", 1)])
def test_what_grows_is_named(name, step):
    assert [one.split()[0] for one in soak.verdict(rows(**{name: step}))] == [name]


def test_a_changed_base_is_named():
    changed = [*rows()[:-1], soak.Measured(100.0, **{**FLAT, "base": "b"})]
    assert "the base's hash has changed: ['a', 'b']" in soak.verdict(changed)


@pytest.mark.skipif(
    "GRAFT_TEST_COMFYUI" in os.environ or sys.platform != "linux", reason="works with the editor's server and /proc"
)
def test_everything_once(capsys):
    pytest.importorskip("aiohttp")
    assert soak.soak(0.0, 1) == 0
    said = capsys.readouterr().out
    assert all(
        f"'{act}': 1" in said for act in ("train", "stop", "interrupt", "stack", "wrong", "pages", "files", "free")
    )
    assert "nothing has grown or changed" in said and "| minutes | memory MB |" in said
