"""Which results are kept: the options, and the host's executor."""

import argparse
import types

import pytest

from comfyui_api_stubs import caching
from comfyui_api_stubs.host_error import HostError

GB = 1024**3


def asked(*words):
    parser = argparse.ArgumentParser(exit_on_error=False)
    caching.add_options(parser)
    return caching.chosen(parser.parse_args(words))


def test_the_options_are_comfyuis():
    assert asked() == asked("--cache-classic") == caching.Caching("CLASSIC")
    assert asked("--cache-lru", "9") == caching.Caching("LRU", results=9)
    assert asked("--cache-lru", "0") == caching.Caching("CLASSIC")
    assert asked("--cache-none") == caching.Caching("NONE")
    assert asked("--cache-ram") == caching.Caching("RAM_PRESSURE")
    assert asked("--cache-ram", "7.5") == caching.Caching("RAM_PRESSURE", free_gb=7.5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cache-lru", "some"), "whole number of results"),
        (("--cache-ram", "workflow.json"), "write --cache-ram after the workflow's name"),
        (("--cache-ram", "-1"), "expected"),
        (("--cache-none", "--cache-lru", "3"), "not allowed with"),
    ],
)
def test_what_they_cannot_mean_is_refused(words, said, capsys):
    with pytest.raises((argparse.ArgumentError, SystemExit)) as refused:
        asked(*words)
    assert said in str(refused.value) + capsys.readouterr().err


def test_how_much_memory_stays_free():
    usual = caching.Caching("RAM_PRESSURE")
    assert usual.limits(64 * GB) == {"lru": 0, "ram": pytest.approx(6.4), "ram_inactive": 64.0}
    assert usual.limits(8 * GB)["ram"] == 2.0 and usual.limits(1000 * GB)["ram"] == 10.0
    assert usual.limits(1000 * GB)["ram_inactive"] == 128.0
    assert caching.Caching("RAM_PRESSURE", free_gb=200.0).limits(64 * GB)["ram_inactive"] == 200.0


def a_host(cache_types, executor):
    execution = types.SimpleNamespace(CacheType=types.SimpleNamespace(**cache_types), PromptExecutor=executor)
    management = types.SimpleNamespace(get_total_memory=lambda device: 64 * GB)
    return types.SimpleNamespace(execution=execution, management=management, server="server")


class Newer:
    def __init__(self, server, cache_type=False, cache_args=None):
        self.made = (server, cache_type, cache_args["lru"])


class Older:
    def __init__(self, server, cache_type=False, cache_size=None):
        self.made = (server, cache_type, cache_size)


def test_newer_and_older_hosts_get_the_executor_that_was_asked_for():
    newer = a_host({"CLASSIC": 0, "LRU": 1, "NONE": 2, "RAM_PRESSURE": 3}, Newer)
    older = a_host({"CLASSIC": 0, "LRU": 1, "DEPENDENCY_AWARE": 2}, Older)
    for host, way, made in (
        (newer, caching.Caching("LRU", results=5), ("server", 1, 5)),
        (newer, caching.Caching("NONE"), ("server", 2, 0)),
        (older, caching.Caching(), ("server", False, None)),
        (older, caching.Caching("LRU", results=5), ("server", 1, 5)),
        (older, caching.Caching("NONE"), ("server", 2, 0)),
    ):
        host.caching = way
        assert caching.new_executor(host).made == made
    older.caching = caching.Caching("RAM_PRESSURE")
    with pytest.raises(HostError, match="this ComfyUI cannot keep results as --cache-ram says"):
        caching.new_executor(older)
