"""Training gives the same bytes whichever results are kept."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

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
