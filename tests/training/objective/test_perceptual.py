"""LPIPS: what the package gets and gives, and what is said without it."""

import sys

import pytest
import torch
from graft_nodes.tests import fake_lpips
from graft_nodes.training.objective import perceptual

# ImageNet's, which VGG was trained with.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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


def _features(layers, pictures):
    """VGG's activations after each of its five groups of convolutions, by the places of their last ReLU."""
    found = []
    for place, layer in enumerate(layers):
        pictures = layer(pictures)
        if place in (3, 8, 15, 22, 29):
            found.append(pictures)
    return found


def test_the_real_package_gives_the_papers_distance(monkeypatch):
    """Runs where `lpips` and its torchvision are installed; VGG has random weights here, so nothing is downloaded.

    arXiv 1801.03924, equation 1, in float64: activations of unit length at each place, their squared differences
    weighted by channel, the mean over places, the sum over layers.
    """
    lpips = pytest.importorskip("lpips")
    vgg16 = lpips.pretrained_networks.tv.vgg16

    def undownloaded(**_):
        torch.manual_seed(1)
        return vgg16(weights=None)

    monkeypatch.setattr(lpips.pretrained_networks.tv, "vgg16", undownloaded)
    network = perceptual.network(torch.device("cpu"))
    draws = torch.Generator().manual_seed(0)
    left, right = (torch.rand(2, 3, 32, 32, generator=draws) * 2 - 1 for _ in range(2))
    left.requires_grad_()
    found = perceptual.distances(network, left, right)
    layers = undownloaded().features.double()
    mean, deviation = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, DEVIATION))
    sides = [_features(layers, ((side.detach().double() / 2 + 0.5) - mean) / deviation) for side in (left, right)]
    expected = torch.zeros(2, dtype=torch.float64)
    for number, (ours, theirs) in enumerate(zip(*sides, strict=True)):
        (weights,) = (tensor for name, tensor in network.named_parameters() if name.startswith(f"lin{number}."))
        unit = [one / one.square().sum(1, keepdim=True).sqrt() for one in (ours, theirs)]
        expected += ((unit[0] - unit[1]).square() * weights.double()).sum(1).mean((1, 2)).detach()
    assert torch.allclose(found.detach().double(), expected, rtol=1e-4), (found, expected)
    found.sum().backward()
    slope, way = float(left.grad.norm()), left.grad / left.grad.norm()
    with torch.no_grad():
        ends = [float(perceptual.distances(network, left + step * way, right).double().sum()) for step in (0.02, -0.02)]
    assert (ends[0] - ends[1]) / 0.04 == pytest.approx(slope, rel=3e-2)
    assert float(perceptual.distances(network, right, right).abs().max()) < 1e-6


def test_a_torchvision_of_another_torch_is_named(monkeypatch, tmp_path):
    (tmp_path / "lpips.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')", "utf-8")
    monkeypatch.delitem(sys.modules, "lpips", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match=r"needs the torchvision of this torch .*nms does not exist.*: .*-m pip install"
    ):
        perceptual.check_installed()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lpips", None)
    with pytest.raises(ValueError, match="-m pip install lpips torchvision, or set LPIPS weight to 0"):
        perceptual.check_installed()
