"""The fuzzing finds what is planted: wrong errors, crashes, hangs, growth, files elsewhere; a case comes back by its
number.
"""

import multiprocessing
import os
import subprocess
import time
from pathlib import Path

import pytest
from graft_nodes.tests.fuzz import engine
from graft_nodes.tests.fuzz.damage import damaged_bytes, damaged_json, text_of
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="plants live in forks")


def room_below_the_peak():
    """Bytes that this process can use again before its peak grows: tests that ran in it may have freed much."""
    status = Path("/proc/self/status")
    if not status.exists():  # only Linux tells
        return 0
    sizes = status.read_text(encoding="utf-8")
    peak, now = (int(sizes.partition(f"{name}:")[2].split()[0]) << 10 for name in ("VmHWM", "VmRSS"))
    return peak - now


class Planted(engine.Target):
    """Goes wrong for every number that ends in 7, in the way that `how` says."""

    name = "planted"
    how = ""

    def cases(self):
        return st.integers(0, 99)

    def attempt(self, case):
        if case % 10 == 7:
            getattr(self, self.how)()
        if case % 2:
            raise ValueError("odd")

    def wrong(self):
        raise KeyError("planted")

    def killed(self):
        os.abort()

    def hangs(self):
        time.sleep(60)

    def works_on(self):
        while True:
            pass

    def grows(self):
        # More than malloc ever takes from memory that was freed before: 32 MiB.
        self.held = b"x" * (room_below_the_peak() + (64 << 20))

    def writes(self):
        Path(self.place.parent / "escaped").write_text("")

    def starts(self):
        subprocess.run(["true"], check=True)

    def nothing(self):
        """All is well."""


def of(how):
    return type("Planted", (Planted,), {"how": how})


def run(how, monkeypatch, cases=60):
    monkeypatch.setattr(engine, "GROWTH", 2 << 20)
    if how == "hangs":
        monkeypatch.setattr(engine, "SILENCE", 3.0)
    if how == "works_on":
        monkeypatch.setattr(engine, "PATIENCE", 1.0)
    return engine.watched(of(how), 3, cases)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("wrong", "KeyError: 'planted'"),
        ("killed", "ended the process (-6)"),
        ("hangs", "took longer than"),
        ("works_on", "took longer than 1 s of work"),
        ("grows", "memory in use grew"),
        ("writes", "escaped is outside"),
        ("starts", "subprocess.Popen"),
    ],
)
def test_what_is_planted_is_found_with_the_case_that_brings_it_back(how, said, monkeypatch):
    report = run(how, monkeypatch)
    assert report.failures and said in report.failures[0]
    assert report.failures[0].startswith("python dev.py fuzz planted --seed 3 --case ")
    if how == "wrong":
        number = int(report.failures[0].splitlines()[0].split()[-1])
        again = engine.replayed(of(how), 3, number)
        assert "failed" in again and said in again and "7\n" in again.splitlines()[0] + "\n"


def test_without_a_fault_every_case_is_counted(monkeypatch):
    report = run("nothing", monkeypatch)
    assert not report.failures and report.ran == 60 == report.used + report.refused and report.used and report.refused


def test_the_same_seed_draws_the_same_cases(tmp_path):
    found = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        runner = engine.Runner(of("nothing"), 9, tmp_path / place)
        found.append([(runner.run(number), runner.case)[1] for number in range(30)])
    assert found[0] == found[1] and len(set(found[0])) > 15


def test_json_that_no_writer_writes():
    text = text_of({"a": "@deep@", "b": "@huge@", "c": 1}, "c").decode()
    assert text.count("[") == 3000 and "9" * 5000 in text and text.count('"c"') == 2


@pytest.mark.parametrize(
    "strategy", [damaged_bytes([b"abcdef"], 6, 1), damaged_json(['{"a": [1, {"b": 2}]}'], 4, 1).map(text_of)]
)
def test_damage_differs_and_is_damage(strategy):
    import hypothesis

    found = set()

    @hypothesis.settings(database=None, max_examples=60, derandomize=True)
    @hypothesis.given(strategy)
    def collect(body):
        found.add(body)

    collect()
    assert len(found) > 20
