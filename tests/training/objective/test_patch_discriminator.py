"""The patch discriminator and its losses, against the papers' formulas in float64 and finite differences."""

import pytest
import torch
import torch.nn.functional as F
from graft_nodes.training.objective.patch_discriminator import (
    LEAST_SIDE,
    PatchDiscriminator,
    adaptive_weight,
    adversarial_losses,
    hinge_losses,
)


def _weights(seed=0):
    network = PatchDiscriminator()
    weights = network.first_weights(torch.Generator().manual_seed(seed))
    return network, {name: tensor.double() for name, tensor in weights.items()}


def _pictures(seed, count=2, side=32):
    draws = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, side, side, generator=draws, dtype=torch.float64) * 2 - 1


def _expected(weights, pictures):
    """C64-C128-C256-C512 of pix2pix (1611.07004, 6.1.2): kernels of 4, no batch norm on the first layer, slopes of
    0.2, then one number for each patch.
    """
    values = list(weights.values())
    found = F.leaky_relu(F.conv2d(pictures, values[0], values[1], stride=2, padding=1), 0.2)
    for layer, stride in ((0, 2), (1, 2), (2, 1)):
        kernel, scale, bias = values[2 + 3 * layer : 5 + 3 * layer]
        found = F.conv2d(found, kernel, stride=stride, padding=1)
        mean, variance = found.mean((0, 2, 3), keepdim=True), found.var((0, 2, 3), unbiased=False, keepdim=True)
        found = (found - mean) / (variance + 1e-5).sqrt() * scale.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)
        found = torch.where(found > 0, found, 0.2 * found)
    return F.conv2d(found, values[-2], values[-1], padding=1)


def test_it_is_the_network_of_pix2pix():
    network, weights = _weights()
    shapes = [tuple(tensor.shape) for tensor in weights.values() if tensor.ndim == 4]
    assert shapes == [(64, 3, 4, 4), (128, 64, 4, 4), (256, 128, 4, 4), (512, 256, 4, 4), (1, 512, 4, 4)]
    pictures = _pictures(0, side=48)
    judged = network.judge(pictures, weights)
    assert judged.shape == (2, 1, 4, 4)
    assert torch.allclose(judged, _expected(weights, pictures), rtol=1e-9, atol=1e-12)


def test_a_number_sees_a_patch_of_70_pixels():
    network, weights = _weights()
    pictures = torch.zeros(1, 3, 256, 256, dtype=torch.float64, requires_grad=True)
    weights = {name: tensor.abs() if tensor.ndim == 4 else tensor for name, tensor in weights.items()}
    module = torch.nn.Sequential(*(layer for layer in network.layers if isinstance(layer, torch.nn.Conv2d)))
    kernels = [tensor for tensor in weights.values() if tensor.ndim == 4]
    for layer, kernel in zip(module, kernels, strict=True):
        layer.weight = torch.nn.Parameter(kernel)
        layer.bias = None
    module(pictures)[0, 0, 15, 15].backward()
    rows = pictures.grad[0, 0].abs().sum(1).nonzero().flatten()
    assert int(rows[-1] - rows[0]) + 1 == 70


def test_its_first_weights_are_those_of_the_papers_and_draw_from_no_global_generator():
    before = torch.get_rng_state()
    _, weights = _weights(3)
    assert torch.equal(torch.get_rng_state(), before)
    kernels = torch.cat([tensor.flatten() for tensor in weights.values() if tensor.ndim == 4])
    assert float(kernels.std()) == pytest.approx(0.02, rel=0.01) and abs(float(kernels.mean())) < 1e-4
    scales = torch.cat([t for name, t in weights.items() if t.ndim == 1 and name.endswith("weight")])
    assert float(scales.mean()) == pytest.approx(1, abs=0.005) and float(scales.std()) == pytest.approx(0.02, rel=0.1)
    assert all(not tensor.any() for name, tensor in weights.items() if name.endswith("bias"))
    assert not torch.equal(_weights(4)[1]["layers.0.weight"], weights["layers.0.weight"])


def test_the_losses_are_the_hinge_losses():
    real, fake = _pictures(1)[:, :1] * 3, _pictures(2)[:, :1] * 3
    expected = []
    for one, other in zip(real, fake, strict=True):
        too_low = [max(0.0, 1.0 - value) for value in one.flatten().tolist()]
        too_high = [max(0.0, 1.0 + value) for value in other.flatten().tolist()]
        expected.append((sum(too_low) / len(too_low) + sum(too_high) / len(too_high)) / 2)
    assert hinge_losses(real, fake).tolist() == pytest.approx(expected, rel=1e-12)
    assert adversarial_losses(fake).tolist() == pytest.approx([-float(one.mean()) for one in fake], rel=1e-12)


def test_the_adaptive_weight_is_the_ratio_of_the_gradients_norms():
    draws = torch.Generator().manual_seed(5)
    inputs = torch.randn(6, 4, generator=draws, dtype=torch.float64)
    last = torch.randn(4, 3, generator=draws, dtype=torch.float64, requires_grad=True)
    wanted = torch.randn(6, 3, generator=draws, dtype=torch.float64)
    direction = torch.randn(3, generator=draws, dtype=torch.float64)
    made = inputs @ last
    found = adaptive_weight((made - wanted).square().mean(), -(made @ direction).mean(), last)
    of_error = inputs.T @ (2 * (made.detach() - wanted) / made.numel())
    of_judge = -torch.outer(inputs.mean(0), direction)
    assert float(found) == pytest.approx(float(of_error.norm() / (of_judge.norm() + 1e-4)), rel=1e-6)
    assert not found.requires_grad and last.grad is None
    made = inputs @ last
    assert float(adaptive_weight(1e9 * made.square().sum(), 1e-9 * made.sum(), last)) == 1e4


def test_gradients_of_both_losses_are_those_of_finite_differences():
    network, weights = _weights()
    pictures, decoded = _pictures(1), _pictures(2)

    def of_judge(values):
        judged = [network.judge(one, values) for one in (pictures, decoded)]
        return hinge_losses(*judged).sum()

    def of_decoder(values):
        return adversarial_losses(network.judge(values, weights)).sum()

    live = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    of_judge(live).backward()
    for name, tensor in live.items():
        way = tensor.grad / tensor.grad.norm().clamp(min=1e-30)
        ends = [of_judge({**weights, name: weights[name] + sign * 1e-6 * way}) for sign in (1, -1)]
        assert float(ends[0] - ends[1]) / 2e-6 == pytest.approx(float(tensor.grad.norm()), rel=1e-4, abs=1e-9), name
    decoded = decoded.requires_grad_()
    of_decoder(decoded).backward()
    way = decoded.grad / decoded.grad.norm()
    ends = [of_decoder(decoded.detach() + sign * 1e-6 * way) for sign in (1, -1)]
    assert float(ends[0] - ends[1]) / 2e-6 == pytest.approx(float(decoded.grad.norm()), rel=1e-4)


def test_the_least_side_is_the_least_that_it_takes():
    network, weights = _weights()
    assert network.judge(_pictures(0, 1, LEAST_SIDE), weights).shape == (1, 1, 1, 1)
    with pytest.raises((ValueError, RuntimeError)):
        network.judge(_pictures(0, 1, LEAST_SIDE - 1), weights)
