"""Which results are kept: the options, the host's executor, and that training gives the same bytes."""

import argparse
import os
import shutil
import types
from pathlib import Path

import numpy as np
import pytest
from graft_nodes.headless.embedded import HostError, caching
from PIL import Image

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


# --- training ---------------------------------------------------------------------------------------------------------

WAYS = {"CLASSIC": {}, "LRU": {"lru": 50}, "NONE": {}, "RAM_PRESSURE": {"ram": 10_000.0, "ram_inactive": 10_000.0}}


def training(host):
    """Two Train Steps, one after the other, and the LoRA of the second, saved."""

    def node(class_type, **inputs):
        return {"class_type": class_type, "inputs": {**host.defaults(class_type), **inputs}}

    model = {"model": ["1", 0], "clip": ["1", 1]}
    return {
        "1": node("GraftDemo"),
        "2": node("GraftDataset", folder="kept", vae=["1", 2], clip=["1", 1], resolution=64, validation=0.0),
        "3": node("GraftAdapter", rank=2),
        "4": node("GraftOptimizer", settings=["3", 0], learning_rate=2e-3, batch_size=1, total_steps=4, warmup=0),
        "5": node("GraftTrainStart", **model, dataset=["2", 0], settings=["4", 0], run="kept"),
        "6": node("TrainStep", state=["5", 0], steps=2, validate_every=0),
        "7": node("TrainStep", state=["6", 0], steps=2, validate_every=0),
        "8": node("GraftSaveLoRA", state=["7", 0]),
    }


@pytest.mark.slow
def test_training_gives_the_same_bytes_whatever_is_kept(host):
    """Each way from nothing, then again with the states on disk, then again with a third Train Step behind them."""
    folder = Path(host.input, "kept")
    folder.mkdir(exist_ok=True)
    for seed, name in enumerate("ab"):
        noise = np.random.default_rng(seed).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"a picture {name}", encoding="utf-8")

    def saved(prompt):
        result = host.run(prompt, capture={"path": ["8", 0]})
        assert result["success"], result["errors"]
        return Path(result["captured"]["path"]).read_bytes()

    found = {}
    try:
        for way, limits in WAYS.items():
            if way not in host.execution.CacheType.__members__:
                continue
            shutil.rmtree(os.path.join(host.output, "graft"), ignore_errors=True)
            host.fresh(way, **limits)
            prompt = training(host)
            first, again = saved(prompt), saved(prompt)
            prompt["7"]["inputs"]["steps"] = 1
            prompt["9"] = {"class_type": "TrainStep", "inputs": {**prompt["7"]["inputs"], "state": ["7", 0]}}
            prompt["8"]["inputs"]["state"] = ["9", 0]
            found[way] = (first, again, saved(prompt))
    finally:
        host.fresh()
    assert len({files[0] for files in found.values()}) == 1
    assert all(len(set(files)) == 1 for files in found.values()), "in two steps or in one and one"
