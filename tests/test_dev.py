"""What dev.py's commands start."""

import pytest
from graft_nodes import dev


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["test"]),
        (["--quick"], ["test", "--quick"]),
        (["tests/storage", "-k", "host"], ["test", "tests/storage", "-k", "host"]),
        (["host", "-k", "lora"], ["host", "-k", "lora"]),
        (["browser"], ["browser"]),
    ],
)
def test_a_newer_torch_runs_the_tier_that_is_named(monkeypatch, arguments, expected):
    started = []
    monkeypatch.setattr(dev.subprocess, "call", lambda words, env: started.append((words[2:], env["GRAFT_TORCH"])))
    dev.newer_torch(arguments)
    assert started == [(expected, dev.NEWER_TORCH)]
