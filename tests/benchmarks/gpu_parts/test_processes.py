"""Parts in processes of their own: an error ends one case, the others go on, and nothing runs longer than it may."""

import json
import math
import os
import time
from pathlib import Path

import pytest
import torch
from gpu_parts import child, processes
from gpu_parts.case import CHECKED, Setting, at_least, at_most, row
from gpu_parts.processes import (
    CANNOT,
    CUT,
    DONE,
    FAILED,
    Options,
    PartResult,
    limits,
    read_cases,
    read_events,
    run_part,
)
from gpu_parts.registry import PARTS, Part, by_name

from . import made_up_part

HERE = Path(__file__).resolve().parent


@pytest.fixture
def options(tmp_path, monkeypatch):
    """The CPU, and made-up parts on the path."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    return Options("cpu", True, "", tmp_path)


@pytest.mark.slow
def test_each_case_ends_in_its_own_way_and_the_others_go_on(options):
    part = Part("made-up", "Made up", "made_up_part", 10.0)
    result = run_part(part, options, 120.0)
    ends = {case.name: (case.status, case.reason) for case in result.cases}
    assert ends == {
        "good": (DONE, ""),
        "cannot": (CANNOT, "there is one GPU"),
        "wrong": (FAILED, "AssertionError: one is not two"),
        "dies": (FAILED, ends["dies"][1]),
        "short": (CUT, "1 of 2 tests ran"),
        "good_again": (DONE, ""),
        "slow": (DONE, ""),
    }
    rows = {case.name: [row["name"] for row in case.rows] for case in result.cases}
    assert rows["good"] == ["one", "two"] and rows["wrong"] == ["half"] and rows["good_again"] == ["three"]
    assert result.status == FAILED and result.cases[2].error.startswith("Traceback")
    assert [row["broken"] for row in result.cases[-1].rows] == [True, True], "tiny sizes only try the command"
    assert 0 < result.seconds < 120 and all(case.peak_mb > 0 for case in result.cases if case.status == DONE)


def test_a_row_beyond_its_bound_fails_its_case_where_the_setting_decides(tmp_path, monkeypatch):
    """A GPU with the real sizes; the rows are there all the same."""
    monkeypatch.setattr(child, "reset_peak", lambda device: None)
    monkeypatch.setattr(child, "peak_mb", lambda device: 1.0)
    setting = Setting(torch.device("cuda", 0), False, "", 0.0)
    assert setting.decides and not Setting(torch.device("cpu"), False, "", 0.0).decides
    assert not Setting(torch.device("cuda", 0), True, "", 0.0).decides
    good, *_, slow = made_up_part.cases(setting)
    events = child.Events(tmp_path / "events.jsonl")
    with pytest.raises(
        AssertionError, match=r"^twice is 2 s, expected at most 1.1; hidden is 0.5, expected at least 0.8"
    ):
        child.run([good, slow], events, setting, set())
    cases = read_cases(read_events(tmp_path / "events.jsonl"))
    assert cases["good"].status == DONE and [row["name"] for row in cases["slow"].rows] == ["twice", "hidden"]


@pytest.mark.parametrize(
    ("bound", "number", "broken"),
    [
        (at_most(1.1), 1.1, False),
        (at_most(1.1), 1.11, True),
        (at_least(0.8), 0.8, False),
        (at_least(0.8), 0.79, True),
        (at_most(1.0), math.nan, True),
        (CHECKED, 1e9, False),
    ],
)
def test_a_bound_is_for_the_ratio_and_else_for_the_value(bound, number, broken):
    assert row("a", number, "s", bound)["broken"] == broken
    assert row("a", 0.0, "s", bound, number)["broken"] == broken


@pytest.mark.long
def test_a_case_that_never_ends_is_stopped_and_the_rest_is_named(options):
    begun = time.monotonic()
    result = run_part(Part("hanging", "Hanging", "hanging_part", 10.0), options, 25.0)
    assert time.monotonic() - begun < 30
    ends = {case.name: (case.status, case.reason) for case in result.cases}
    assert ends == {
        "good": (DONE, ""),
        "hangs": (FAILED, "it was still running when the part's 25 s were over"),
        "never begun": (CUT, "the part's 25 s were over"),
    }
    assert [row["name"] for row in result.cases[1].rows] == ["before"]


@pytest.mark.slow
def test_a_part_that_cannot_be_read_is_named(options):
    result = run_part(Part("none", "None", "no_such_part", 10.0), options, 60.0)
    assert [(case.name, case.status) for case in result.cases] == [("the process itself", FAILED)]
    assert "no_such_part" in result.cases[0].reason


def test_what_was_written_before_a_stop_counts(tmp_path):
    events = [{"event": "plan", "cases": ["a", "b"]}, {"event": "begin", "case": "a"}]
    events.append({"event": "row", "case": "a", "row": {"name": "x"}})
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "en', encoding="utf-8")
    cases = read_cases(read_events(path))
    assert cases["a"].rows == [{"name": "x"}] and cases["a"].status == "begun" and cases["b"].status == CUT
    assert read_events(tmp_path / "none.jsonl") == []


def test_time_that_a_part_leaves_goes_to_those_after_it(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
    given = limits([1.0, 1.0, 2.0], 100.0)
    assert next(given) == 25
    now[0] = 5.0
    assert next(given) == pytest.approx(95 / 3)
    now[0] = 99.0
    assert next(given) == 1
    given = limits([1.0, 1.0], 100.0)
    assert next(given) == 50
    now[0] = 200.0
    assert next(given) == 0


def test_all_parts_together_take_less_than_nine_minutes():
    assert sum(part.share for part in PARTS) < 9 * 60
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_parts_are_asked_for_by_name():
    assert by_name([]) == list(PARTS)
    assert [part.name for part in by_name(["lane", "stack"])] == ["stack", "lane"]
    with pytest.raises(ValueError, match=r"stak: no such part; the parts are step, "):
        by_name(["stak"])


def test_without_cuda_in_its_name_a_device_sees_none(tmp_path):
    options = Options("cpu", False, "", tmp_path)
    found = processes.environment(options, {"ONE": "1"})
    assert found["CUDA_VISIBLE_DEVICES"] == "" and found["ONE"] == "1"
    package = found["PYTHONPATH"].split(os.pathsep)[1]
    assert (Path(package) / "graft_nodes" / "dev.py").exists()
    on_cuda = processes.environment(Options("cuda", False, "", tmp_path), {})
    assert on_cuda.get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("statuses", "whole"),
    [([DONE, CANNOT], DONE), ([CANNOT], CANNOT), ([DONE, CUT], CUT), ([CUT, FAILED, DONE], FAILED), ([], CANNOT)],
)
def test_a_part_is_as_good_as_its_worst_case(statuses, whole):
    cases = [processes.CaseResult(str(number), status) for number, status in enumerate(statuses)]
    assert PartResult("a", "A", 1.0, 2.0, cases).status == whole
