"""The node tests with their models on the device: pytest in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial

from graft_nodes.dev import parallel

from .case import CHECKED, ROOT, Case, CutShort, Row, Setting, need, row

TESTS = ("tests/nodes",)
TINY_TESTS = ("tests/nodes/test_plot.py",)
SECONDS_LEFT = 5.0  # for reading what pytest said
MOST_PROCESSES = 8  # that share the device
NAMED = 20  # failed tests in the table; the log has all
SETTINGS = {"OMP_NUM_THREADS": "1", "NVIDIA_TF32_OVERRIDE": "0"}  # products in float32 are of float32
ENDS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
OF_A_WORKER = re.compile(rf"\[gw\d+\] \[ *\d+%\] (?P<end>{ENDS}) (?P<test>tests/\S+?::.+?)\s*$")  # pytest-xdist
OF_ONE = re.compile(rf"(?P<test>tests/\S+?::.+?) (?P<end>{ENDS})\b.*\[ *\d+%\]\s*$")


def cases(setting: Setting) -> list[Case]:
    """One run of pytest."""
    return [Case("tests/nodes", partial(tests, setting))]


def command(setting: Setting) -> list[str]:
    """pytest's command line, in several processes where pytest-xdist is installed."""
    words = [sys.executable, "-m", "pytest", "-v", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    words += ["-p", "gpu_parts.deterministic_tests"]
    words += ["-m", "not long"]
    processes = min(MOST_PROCESSES, (os.cpu_count() or 1) // 2)
    if processes > 1 and importlib.util.find_spec("xdist") is not None:
        words += parallel(processes)
    if setting.tiny:
        return [*words, *TINY_TESTS]
    return [*words, *TESTS]


def tests(setting: Setting) -> Iterator[Row]:
    """How many passed, failed and were skipped; AssertionError names those that failed."""
    for package in ("pytest", "hypothesis"):
        need(package, "for the tests")
    environment = {**os.environ, "GRAFT_TEST_DEVICE": setting.device.type, **SETTINGS}
    if setting.comfyui:
        environment["GRAFT_TEST_COMFYUI"] = setting.comfyui
    process = subprocess.Popen(
        command(setting), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    in_time = True
    try:
        output, _ = process.communicate(timeout=max(1.0, setting.left() - SECONDS_LEFT))
    except subprocess.TimeoutExpired:
        in_time = False
        process.kill()
        output, _ = process.communicate()
    print(output, flush=True)
    counts, failed = read(output)
    note = f"models on {setting.device.type}"
    for outcome, count in sorted(counts.items()):
        yield row(outcome.lower(), count, "tests", CHECKED, note=note)
    named = "; ".join(failed[:NAMED])
    assert not failed, f"{len(failed)} tests failed: {named}"
    if not in_time:
        raise CutShort(f"{sum(counts.values())} tests ran, none of them failed; then the part's time was over")
    assert process.returncode == 0 and counts["PASSED"], f"pytest ended with {process.returncode}: {output[-500:]}"


def read(output: str) -> tuple[Counter[str], list[str]]:
    """How many tests ended in each way, and which failed, from what pytest -v prints while it runs."""
    ends: dict[str, str] = {}
    for line in output.splitlines():
        found = OF_A_WORKER.match(line) or OF_ONE.match(line)
        if found:
            ends[found["test"]] = found["end"]
    failed = [name for name, end in ends.items() if end in ("FAILED", "ERROR")]
    return Counter(ends.values()), failed
