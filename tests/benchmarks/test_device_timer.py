"""The timer of the benchmarks: seconds of work on a device, and its peak memory."""

import pytest
import torch
from device_timer import MB, Timer, peak_mb, reset_peak, wait

CPU = torch.device("cpu")


class Clock:
    """A clock that work moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds


class Event:
    """A CUDA event that notes when the device passes it."""

    log: list = []  # noqa: RUF012

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.at = len(Event.log)
        Event.log.append(("record", stream))

    def synchronize(self):
        Event.log.append("synchronize")

    def elapsed_time(self, last):
        return 1000.0 * (last.at - self.at)


@pytest.mark.parametrize("measure", ["seconds", "device_seconds"])
def test_work_on_the_cpu_takes_what_the_clock_says(measure):
    clock = Clock()
    assert getattr(Timer(CPU, clock), measure)(lambda: clock.pass_(2.5)) == 2.5


def test_the_clock_is_read_while_the_device_is_idle(monkeypatch):
    clock, device, waits = Clock(), torch.device("cuda", 0), []

    def synchronize(of):
        waits.append((of, clock.now))
        clock.pass_(10.0)  # what was queued

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert Timer(device, clock).seconds(lambda: clock.pass_(1.0)) == 11.0
    assert waits == [(device, 100.0), (device, 111.0)]


def test_the_device_s_own_seconds_are_between_two_events(monkeypatch):
    Event.log = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    found = Timer(torch.device("cuda", 1)).device_seconds(lambda: Event.log.append("work"))
    record = ("record", "stream of cuda:1")
    assert Event.log == [record, "work", record, "synchronize"] and found == 2.0


def test_the_peak_of_this_process_never_falls():
    before = peak_mb(CPU)
    held = torch.ones(MB)
    reset_peak(CPU)
    wait(CPU)
    assert peak_mb(CPU) >= before > held.nbytes / MB


def test_the_peak_of_cuda_is_counted_again(monkeypatch):
    counts = {"peak": 7 * MB}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: counts.update(peak=2 * MB))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: counts["peak"])
    device = torch.device("cuda", 0)
    assert peak_mb(device) == 7
    reset_peak(device)
    assert peak_mb(device) == 2
