"""Events to the front end, and the JSON that browsers read: a loss that is not a number arrives as null."""

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


def test_without_a_server_nothing_is_sent(monkeypatch):
    import server

    monkeypatch.setattr(server.PromptServer, "instance", None, raising=False)
    events.send_event("graft.step", {"step": 1})


def test_progress_is_of_the_total(monkeypatch):
    import comfy.utils

    shown = []
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda value, total, *_, **__: shown.append((value, total)))
    done = events.progress_bar(5)
    done(3)
    done(5)
    assert shown == [(3, 5), (5, 5)]


def test_interruptions_of_other_processes_are_the_hosts_own():
    import comfy.model_management as management

    for kind in ("InterruptProcessingException", "KeyboardInterrupt"):
        with pytest.raises(management.InterruptProcessingException):
            events.interrupt_as(kind)
        events.raise_if_interrupted()  # asked once, raised once
    events.interrupt_as("ValueError")
    management.interrupt_current_processing(True)
    with pytest.raises(management.InterruptProcessingException):
        events.raise_if_interrupted()


def _call(run):
    return events.TrainingCall("7", "w", run, "k" * 64, "s" * 64, 4)


def test_steps_of_a_run_are_stopped_together_and_counted():
    before = events.stop_count()
    assert not events.stop_run("mine")
    with (
        events.announce_call(_call("mine")) as first,
        events.announce_call(_call("mine")) as second,
        events.announce_call(_call("other")) as other,
    ):
        assert not (first() or second())
        assert events.stop_run("mine") and first() and second() and not other()
    assert events.stop_count() == before + 1 and not events.stop_run("mine")
    with events.announce_call(_call("mine")) as again:
        assert not again()


def test_a_step_whose_previews_are_sampled_by_nodes_still_runs_until_its_execution_ends(sent):
    import types

    queue = types.SimpleNamespace(currently_running={0: (1, "p", {})})
    sent.prompt_queue = queue
    call = _call("mine")
    call.prompt = "p"
    with events.announce_call(call) as asked:
        call.is_paused = True
    assert events.running_calls() == [call] and sent == [] and events.stop_run("mine")
    with events.announce_call(call) as again:
        assert again() and asked() and events.running_calls() == [call], "what was asked meanwhile counts"
        call.is_paused = True
    queue.currently_running = {1: (2, "other", {})}
    assert events.running_calls() == [] and not events.stop_run("mine")
    assert [(name, data["ended"]) for name, data in sent] == [("graft.end", "interrupted")]


def test_a_page_that_comes_later_gets_all_of_a_running_step_and_hears_of_its_end(monkeypatch):
    import types

    sent = []
    monkeypatch.setattr(events, "send_event", lambda name, data: sent.append((name, dict(data))))
    call = events.TrainingCall("7", "w", "mine", "k" * 64, "s" * 64, 4)
    before = types.SimpleNamespace(loss=(0.5, 0.4), rate=(1.0, 1.0), norm=(3.0, 2.0), validation=((0, 0.9),))
    before.average_validation, before.accuracy = (), ((0, 0.5),)
    with events.announce_call(call):
        assert events.running_calls() == [call]
        call.take_history(before)
        held_out = {"validation": 0.8, "average": None, "accuracy": 0.75}
        call.report_step({"step": 3, "loss": 0.3, "rate": 1.0, "norm": 1.0, **held_out, "speed": 2.0})
        told = call.state_so_far()
        assert told["history"]["norm"] == [3.0, 2.0, 1.0]
        assert told["history"]["accuracy"] == [(0, 0.5), (3, 0.75)] and told["history"]["average_validation"] == []
        assert told["step"] == 3 and told["until"] == 4 and told["start"] == "s" * 64 and told["speed"] == 2.0
        call.result = "r" * 64
        assert told["history"]["loss"] == [0.5, 0.4, 0.3] and told["history"]["validation"] == [(0, 0.9), (3, 0.8)]
    assert events.running_calls() == []
    with pytest.raises(ZeroDivisionError), events.announce_call(call):
        _ = 1 / 0
    assert [(name, data.get("step"), data.get("ended")) for name, data in sent] == [
        ("graft.step", 3, None),
        ("graft.end", None, "done"),
        ("graft.end", None, "error"),
    ]
    assert sent[1][1]["result"] == "r" * 64, "its key stays, by which a page knows whose end it is"
    assert all(data["key"] == "k" * 64 and data["workflow"] == "w" for _, data in sent)


def test_a_notice_names_the_node_and_the_run(sent):
    from comfy_execution.utils import CurrentNodeContext

    assert events.running_node() is None
    with CurrentNodeContext("run", "12:3"):
        assert events.running_node() == "12:3"
        events.say_at_node("7", "words")
    assert sent == [("graft.notice", {"node": "7", "text": "words", "prompt": "run"})]
