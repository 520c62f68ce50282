"""Shows the progress of a run: a bar for the running node on a terminal, else plain lines."""

from __future__ import annotations

import importlib.util
import time
from typing import Any, TextIO

LINE_EVERY = 5.0  # seconds between plain lines of one node


class Progress:
    """Writes to `stream` when a node starts and how far it is."""

    def __init__(self, stream: TextIO, total: int):
        self.stream, self.total, self.started = stream, total, 0
        self.bars = stream.isatty() and importlib.util.find_spec("tqdm") is not None
        self.bar: Any = None
        self.shown = 0.0

    def node(self, node_id: str, title: str, class_type: str) -> None:
        """A node starts."""
        self.close()
        self.started += 1
        if title != class_type:
            name = f'"{title}" ({class_type})'
        else:
            name = class_type
        print(f"[{self.started}/{max(self.total, self.started)}] node {node_id} {name}", file=self.stream, flush=True)
        self.shown = time.monotonic()

    def step(self, value: float, total: float) -> None:
        """The running node is at `value` of `total`."""
        if self.bars:
            self._draw(value, total)
        elif time.monotonic() - self.shown >= LINE_EVERY:
            self.shown = time.monotonic()
            print(f"    {value:g} of {total:g}", file=self.stream, flush=True)

    def close(self) -> None:
        """The running node is done."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _draw(self, value: float, total: float) -> None:
        if self.bar is None or self.bar.total != total or value < self.bar.n:
            self.close()
            from tqdm import tqdm

            self.bar = tqdm(total=total, file=self.stream, leave=False, dynamic_ncols=True)
        self.bar.update(value - self.bar.n)
        if value >= total:
            self.bar.refresh()
