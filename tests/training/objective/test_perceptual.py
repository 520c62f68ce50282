"""LPIPS: what the package gets and gives, and what is said without it."""

import sys

import pytest
import torch
from graft_nodes.tests import fake_lpips
from graft_nodes.training.objective import perceptual


def test_the_package_gets_pictures_and_gives_distances(monkeypatch):
    fake_lpips.installed(monkeypatch)
    before = torch.get_rng_state()
    perceptual.check_installed()
    network = perceptual.network(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    assert not network.training and not any(weight.requires_grad for weight in network.parameters())
    draws = torch.Generator().manual_seed(0)
    left, right = (torch.rand(3, 3, 24, 24, generator=draws) * 2 - 1 for _ in range(2))
    left.requires_grad_()
    found = perceptual.distances(network, left, right)
    assert found.shape == (3,) and torch.equal(found, network(left, right)[:, 0, 0, 0])
    assert float(perceptual.distances(network, right, right).abs().max()) < 1e-6 < float(found.detach().min())
    found.sum().backward()
    assert left.grad.abs().sum() > 0


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lpips", None)
    with pytest.raises(ValueError, match="pip install lpips torchvision, or set LPIPS weight to 0"):
        perceptual.check_installed()
