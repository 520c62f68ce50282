"""Shows the progress of a run: one rewritten line on a terminal, else plain lines; tells it to programs as events."""

from __future__ import annotations

import json
import shutil
import time
from typing import Any, TextIO

from ..storage.printable import make_printable
from . import log

LINE_EVERY = 10.0  # seconds between plain lines of one node
DRAW_EVERY = 0.1  # between two drawings of the line on a terminal
EVENT_EVERY = 0.5  # between progress events of one node
KEPT_FROM = 1.0  # a node that took so long leaves its line on the terminal


class Events:
    """What happens as JSON objects, one a line; without a stream nothing is written."""

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream

    def send(self, event: str, **data: Any) -> None:
        """Write one event."""
        if self.stream is not None:
            log.write(json.dumps({"event": event, **data}, default=str) + "\n", self.stream)


class Pace:
    """How fast a node goes, measured from the first step that it told, and what that leaves."""

    def __init__(self, value: float, total: float):
        self.value, self.total, self.first = value, total, value
        self.began = time.monotonic()
        self.seconds_each: float | None = None  # a step; unknown until the second one

    def follows(self, value: float, total: float) -> bool:
        """Whether this step is of the same count."""
        return total == self.total and value >= self.value

    def step(self, value: float) -> None:
        """Another step."""
        self.value = value
        if value > self.first:
            self.seconds_each = (time.monotonic() - self.began) / (value - self.first)

    @property
    def seconds_left(self) -> float | None:
        """Of this count, as far as known."""
        if self.seconds_each is None:
            return None
        return max(self.total - self.value, 0) * self.seconds_each

    def __str__(self) -> str:
        parts = [f"{self.value:g} of {self.total:g}"]
        if self.seconds_each:
            parts.append(_speed(self.seconds_each))
        if self.seconds_left is not None:
            parts.append(f"{_clock(self.seconds_left)} left")
        return ", ".join(parts)


def _speed(seconds_each: float) -> str:
    if seconds_each >= 1:
        return f"{seconds_each:.2f} s/it"
    return f"{1 / seconds_each:.2f} it/s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"


class Progress:
    """Writes to `stream` when a node starts and how far it is, and sends the same as events.

    The time left is that of the running node: how long the nodes after it take is not known, so they are counted.
    """

    def __init__(self, stream: TextIO, total: int, events: Events | None = None):
        self.stream, self.total, self.started = stream, total, 0
        self.events = events or Events()
        self.rewrites = stream.isatty()
        self.node_id, self.name = "", ""
        self.pace: Pace | None = None
        self.began = self.shown = self.sent = 0.0
        self.width = 0  # of the line on the terminal

    def node(self, node_id: str, title: str, class_type: str) -> None:
        """A node starts."""
        self.close()
        self.started += 1
        self.node_id, self.pace = node_id, None
        called = f'"{title}" ({class_type})' if title != class_type else class_type
        count = max(self.total, self.started)
        self.name = make_printable(f"[{self.started}/{count}] node {node_id} {called}").replace("\n", " ")
        self.began = self.shown = time.monotonic()
        self.sent = 0.0
        if self.rewrites:
            self._draw(self.name)
            self.shown -= LINE_EVERY  # the first step is shown at once
        else:
            log.say(self.name, self.stream)
        self.events.send("node", node=node_id, title=title, **{"class": class_type}, number=self.started, nodes=count)

    def step(self, value: float, total: float) -> None:
        """The running node is at `value` of `total`."""
        if self.pace is not None and self.pace.follows(value, total):
            self.pace.step(value)
        else:
            self.pace = Pace(value, total)
        now, is_last = time.monotonic(), value >= total
        if self.rewrites and (is_last or now - self.shown >= DRAW_EVERY or self.width == 0):
            self.shown = now
            self._draw(f"{self.name}: {self._describe(self.pace)}")
        elif not self.rewrites and now - self.shown >= LINE_EVERY:
            self.shown = now
            log.say(f"    {self._describe(self.pace)}", self.stream)
        if is_last or now - self.sent >= EVENT_EVERY:
            self.sent = now
            self._tell(self.pace)

    def close(self) -> None:
        """The running node is done: on a terminal its line goes, or stays if it took long."""
        took = time.monotonic() - self.began
        if self.width and took >= KEPT_FROM:
            self._draw(f"{self.name}: {took:.1f} s")
            log.say("", self.stream)
            self.width = 0
        self.clear()

    def clear(self) -> None:
        """Take the line away, so that something else can be written there."""
        if self.width:
            log.write("\r" + " " * self.width + "\r", self.stream)
            self.width = 0

    @property
    def _nodes_left(self) -> int:
        return max(self.total - self.started, 0)

    def _describe(self, pace: Pace) -> str:
        after = {0: "", 1: ", then 1 node"}.get(self._nodes_left, f", then {self._nodes_left} nodes")
        return f"{pace}{after}"

    def _draw(self, text: str) -> None:
        shown = text[: shutil.get_terminal_size().columns - 1]
        log.write("\r" + shown.ljust(self.width), self.stream)
        self.width = len(shown)

    def _tell(self, pace: Pace) -> None:
        each, left = pace.seconds_each, pace.seconds_left
        self.events.send(
            "progress",
            node=self.node_id,
            step=pace.value,
            total=pace.total,
            seconds_per_step=None if each is None else round(each, 4),
            seconds_left=None if left is None else round(left, 1),
            nodes_left=self._nodes_left,
        )
