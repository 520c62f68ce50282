"""The rounding of averages of stored snapshots, measured against float64, and how a search holds it down."""

import math

import pytest
import torch
from graft_nodes.ema import post_hoc
from graft_nodes.storage.float16 import apply_scales, to_float16
from graft_nodes.training.averages import search
from graft_nodes.training.averages.sources import Source, Sources
from graft_nodes.training.averages.storage_noise import StorageNoise

RANK = 4


def slow_run(count, step=0.01, seed=0, small=1.0):
    """Snapshots of two layers that change little from one to the next, float64: a LORA_MODEL each."""
    draws = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=draws, dtype=torch.float64)

    start = {
        "diffusion_model.a.lora_up.weight": 1e-3 * drawn(64, RANK),
        "diffusion_model.a.lora_down.weight": 0.05 * drawn(RANK, 48),
        "diffusion_model.b.lora_up.weight": small * 1e-3 * drawn(32, RANK),
        "diffusion_model.b.lora_down.weight": small * drawn(RANK, 32),
    }
    snapshots = []
    for _ in range(count):
        for name, tensor in start.items():
            start[name] = tensor + step * tensor.norm() / tensor.numel() ** 0.5 * drawn(*tensor.shape)
        snapshots.append({**start, "diffusion_model.a.alpha": torch.tensor(float(RANK))})
    return snapshots


def change(snapshots, shares):
    """The changes of both layers of an average, float64."""
    mean = {}
    for name in snapshots[0]:
        mean[name] = sum(share * file[name].double() for share, file in zip(shares, snapshots, strict=True))
    layers = (mean[f"diffusion_model.{x}.lora_up.weight"] @ mean[f"diffusion_model.{x}.lora_down.weight"] for x in "ab")
    return torch.cat([layer.flatten() for layer in layers])


@pytest.mark.parametrize("small", [1.0, 1e-3])
@pytest.mark.parametrize(
    "shares",
    [
        [40.0, -39.0, 0.0, 0.0],
        [0.25, 0.25, 0.25, 0.25],
        [0.0, 0.0, 0.0, 1.0],
        [300.0, -500.0, 150.0, 51.0],
        [-3.0, 2.5, -1.5, 3.0],
    ],
)
def test_what_is_said_is_what_float64_measures(shares, small):
    whole = slow_run(4, small=small)
    stored = [apply_scales(to_float16(file)) for file in whole]
    expected = change(whole, shares)
    measured = float((change(stored, shares) - expected).norm() / expected.norm())
    told = StorageNoise(stored).of(torch.tensor(shares, dtype=torch.float64))
    assert measured / 1.2 < told < 2.2 * measured


def test_a_layer_without_a_change_is_no_number_too_few(shares=(0.5, 0.5)):
    files = slow_run(2)
    for file in files:
        file["diffusion_model.b.lora_up.weight"] = torch.zeros(32, RANK)
    assert 0 < StorageNoise(files).of(torch.tensor(shares, dtype=torch.float64)) < 1e-3
    for file in files:
        file["diffusion_model.a.lora_up.weight"] = torch.zeros(64, RANK)
    assert StorageNoise(files).of(torch.tensor(shares, dtype=torch.float64)) < 1


class _Stored(Source):
    """A snapshot in memory."""

    files = ()

    def load_as_stored(self):
        return self.files[self.step - 1]


@pytest.mark.parametrize("pull", [50.0, 2000.0])
def test_a_search_stays_where_the_rounding_is_small(monkeypatch, pull):
    """The loss falls toward huge shares of both signs; the average that is taken does not go there."""
    whole = slow_run(6, step=0.002)
    stored = [apply_scales(to_float16(file)) for file in whole]
    monkeypatch.setattr(_Stored, "files", stored)
    profiles = [post_hoc.Profile(100 * number, 0.1) for number in range(1, 7)]
    monkeypatch.setattr(Sources, "profiles", profiles)
    found = Sources(tuple(_Stored(f"{number}", "", number) for number in range(1, 7)), True)
    goal = [*(0.0,) * 4, 1 - pull, pull]
    name = "diffusion_model.a.lora_up.weight"
    wanted = sum(share * file[name] for share, file in zip(goal, whole, strict=True))

    def score(lora, numbers):
        return float((lora[name].double() - wanted).norm())

    searched = search.search(found, [0.1], score, (range(2), range(2)), 400, 0)
    shares = torch.tensor(searched.shares, dtype=torch.float64)
    expected = change(whole, searched.shares)
    measured = float((change(stored, searched.shares) - expected).norm() / expected.norm())
    assert measured <= post_hoc.TOLERANCE
    assert float(shares.abs().sum()) > 20  # there is something to win there, up to the limit
    told = [line for line in searched.lines if "float16 rounding counts" in line]
    size, fold, share = float(shares.abs().sum()), float(shares.norm()), StorageNoise(stored).of(shares)
    assert told == [
        f"the shares add up to {size:.1f} in size, so the snapshots' float16 rounding counts {fold:.1f}-fold: about"
        f" {share:.2%} of the change"
    ]
    assert any(line.startswith("left out ") for line in searched.lines) == (pull > 1000)
    assert math.isclose(float(shares.sum()), 1, abs_tol=1e-9)
