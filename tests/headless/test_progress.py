"""One line that is rewritten on a terminal, plain lines otherwise, events for programs; and the time that is left."""

import io
import json
import logging

import pytest
from graft_nodes.headless import log
from graft_nodes.headless.progress import Events, Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    """A clock that stands until the test moves it."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("graft_nodes.headless.progress.time.monotonic", clock)
    monkeypatch.setenv("COLUMNS", "80")
    return clock


def run(progress, clock, steps, seconds):
    """Steps that take so many seconds each, the first told when it is done."""
    for value in range(1, steps + 1):
        clock.now += seconds
        progress.step(value, steps)


def screen(stream):
    """What a terminal shows in the end, line by line."""
    lines = []
    for line in stream.getvalue().split("\n"):
        shown = ""
        for text in line.split("\r"):
            shown = text + shown[len(text) :]
        lines.append(shown.rstrip())
    return lines


def test_plain_lines_name_the_node_and_come_every_ten_seconds(clock):
    stream = io.StringIO()
    progress = Progress(stream, 2)
    progress.node("4", "train", "TrainStep")
    run(progress, clock, 10, 4.0)
    progress.node("5", "SaveImage", "SaveImage")
    assert stream.getvalue().splitlines() == [
        '[1/2] node 4 "train" (TrainStep)',
        "    3 of 10, 4.00 s/it, 0:28 left, then 1 node",
        "    6 of 10, 4.00 s/it, 0:16 left, then 1 node",
        "    9 of 10, 4.00 s/it, 0:04 left, then 1 node",
        "[2/2] node 5 SaveImage",
    ]


def test_a_terminal_has_one_line_with_speed_and_time_left(clock):
    stream = Terminal()
    progress = Progress(stream, 3)
    progress.node("4", "KSampler", "KSampler")
    progress.step(1, 20)
    assert screen(stream) == ["[1/3] node 4 KSampler: 1 of 20, then 2 nodes"]
    clock.now += 0.5
    progress.step(2, 20)
    assert screen(stream) == ["[1/3] node 4 KSampler: 2 of 20, 2.00 it/s, 0:09 left, then 2 nodes"]
    progress.node("5", "Short", "Short")
    assert screen(stream) == ["[2/3] node 5 Short"]
    progress.node("6", "Long", "Long")
    run(progress, clock, 3, 2000.0)
    assert screen(stream) == ["[3/3] node 6 Long: 3 of 3, 2000.00 s/it, 0:00 left"]
    progress.close()
    assert screen(stream) == ["[3/3] node 6 Long: 6000.0 s", ""]
    assert "\n" not in stream.getvalue()[:-1] and "2 of 3, 2000.00 s/it, 33:20 left" in stream.getvalue()


def test_another_count_is_measured_anew(clock):
    stream = Terminal()
    progress = Progress(stream, 1)
    progress.node("4", "KSampler", "KSampler")
    run(progress, clock, 4, 1.0)
    clock.now += 60
    run(progress, clock, 4, 2.0)
    assert screen(stream) == ["[1/1] node 4 KSampler: 4 of 4, 2.00 s/it, 0:00 left"]


def test_a_line_is_no_wider_than_the_terminal_and_leaves_for_a_message(clock, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("COLUMNS", "30")
    with log.shown(verbose=False):
        progress = Progress(stream, 1)
        progress.node("4", "a very long title of a node", "KSampler")
        assert max(map(len, screen(stream))) <= 29
        with log.preceded_by(progress.clear):
            logging.warning("something is odd")
        clock.now += 1
        progress.step(1, 2)
    first, second = screen(stream)
    assert first == "something is odd" and second.startswith("[1/1] node 4")


def test_events_tell_speed_and_time_left_now_and_then(clock):
    out = io.StringIO()
    progress = Progress(io.StringIO(), 2, Events(out))
    progress.node("4", "train", "TrainStep")
    run(progress, clock, 100, 0.1)
    node, *told = [json.loads(line) for line in out.getvalue().splitlines()]
    assert node == {"event": "node", "node": "4", "title": "train", "class": "TrainStep", "number": 1, "nodes": 2}
    assert 18 <= len(told) <= 22 and {event["event"] for event in told} == {"progress"}
    assert (told[0]["step"], told[0]["seconds_left"]) == (1, None)
    assert told[1] == {
        "event": "progress",
        "node": "4",
        "step": told[1]["step"],
        "total": 100,
        "seconds_per_step": 0.1,
        "seconds_left": round((100 - told[1]["step"]) * 0.1, 1),
        "nodes_left": 1,
    }
    assert (told[-1]["step"], told[-1]["seconds_left"]) == (100, 0.0)
