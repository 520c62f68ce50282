"""The speed of a run: steps per second and the time left, from the steps so far."""

from __future__ import annotations

import time


class Throughput:
    """Measure the speed: call it after each step to get (steps per second, seconds left).

    The time between steps counts, the wait before the first does not.
    """

    def __init__(self, until: int) -> None:
        self.until = until
        self.last: float | None = None
        self.each = 0.0

    def __call__(self, step: int, seconds: float) -> tuple[float, float]:
        now = time.monotonic()
        step_seconds = seconds if self.last is None else now - self.last
        self.each = step_seconds if self.last is None else 0.9 * self.each + 0.1 * step_seconds
        self.last = now
        return (1 / self.each if self.each else 0.0), (self.until - step) * self.each
