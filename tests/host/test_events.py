"""Events to the front end, and the JSON that browsers read: a loss that is no number arrives as null."""

import json
import math

import pytest
from graft_nodes.host import browser_json, events


class Sent(list):
    """Stands for the running server: what it was given to send."""

    def send_sync(self, name, data, sid=None):
        self.append((name, data))


@pytest.fixture
def sent(monkeypatch):
    import server

    there = Sent()
    monkeypatch.setattr(server.PromptServer, "instance", there, raising=False)
    return there


def test_an_event_holds_no_nan(sent):
    given = {"step": 3, "loss": math.nan, "sizes": (1.5, math.inf), "more": {"validation": -math.inf, "run": "r"}}
    events.send_event("graft.step", given)
    ((name, data),) = sent
    assert name == "graft.step" and data == {
        "step": 3,
        "loss": None,
        "sizes": [1.5, None],
        "more": {"validation": None, "run": "r"},
    }
    assert math.isnan(given["loss"]), "what was given stays as it is"
    json.dumps(data, allow_nan=False)


def test_text_for_browsers():
    assert browser_json.text_of({"a": [1, math.nan, 2.5]}) == '{"a": [1, null, 2.5]}'
    assert browser_json.text_of({"a": math.inf, "b": {3}}, default=str) == '{"a": null, "b": "{3}"}'
    with pytest.raises(TypeError):
        browser_json.text_of({3})
