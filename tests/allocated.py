"""What PyTorch's CPU allocator hands out while it is recorded."""

from __future__ import annotations

from typing import Any

import torch


def recorded() -> torch.profiler.profile:
    """A context that records every allocation, for `most_held`."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def most_held(record: Any) -> int:
    """The most bytes that were held at once of what was handed out."""
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
