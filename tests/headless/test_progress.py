"""Bars on a terminal, plain lines otherwise."""

import io

from graft_nodes.headless.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_name_the_node_and_come_now_and_then(monkeypatch):
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr("graft_nodes.headless.progress.time.monotonic", lambda: float(next(clock)))
    stream = io.StringIO()
    progress = Progress(stream, 2)
    progress.node("4", "train", "TrainStep")
    for value in range(1, 11):
        progress.step(value, 10)
    progress.node("5", "SaveImage", "SaveImage")
    lines = stream.getvalue().splitlines()
    assert lines[0] == '[1/2] node 4 "train" (TrainStep)' and lines[-1] == "[2/2] node 5 SaveImage"
    assert 2 <= len(lines[1:-1]) <= 5 and lines[1].strip().endswith("of 10")


def test_a_bar_on_a_terminal():
    stream = Terminal()
    progress = Progress(stream, 1)
    progress.node("4", "train", "TrainStep")
    for value in (1, 5, 10):
        progress.step(value, 10)
    progress.step(1, 4)
    progress.close()
    assert "10/10" in stream.getvalue() and "/4" in stream.getvalue() and progress.bar is None
