"""The discriminator of a run: it moves as Adam says, learns to tell pictures apart, and goes on from its state."""

import pytest
import torch
from graft_nodes.training.objective.patch_discriminator import adversarial_losses, hinge_losses
from graft_nodes.training.tasks.discriminator import Discriminator

CPU = torch.device("cpu")


def _pictures(seed, count=2):
    draws = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, 24, 32, generator=draws) * 2 - 1


def _begun(saved=None, rate=1e-3):
    return Discriminator(rate, saved or {}, CPU, 7)


def _weights(state):
    return {name.rpartition("/")[2]: tensor for name, tensor in state.items() if name.startswith("weights/")}


def _step(judge, step, *groups):
    """One step on groups of (pictures, their reconstructions); the adversarial losses."""
    judge.prepare(step)
    losses = []
    for pixels, decoded in groups:
        last = torch.ones(1, requires_grad=True)
        losses.append(judge.losses(pixels, decoded * last, ((decoded * last - pixels).abs()).flatten(1).mean(1), last))
    norm = judge.finish_gradients()
    judge.step_()
    return losses, norm


def test_its_steps_are_those_of_torchs_adam_with_the_mean_of_all_pictures():
    judge = _begun()
    first = _weights(judge.state())
    own = {name: tensor.clone().requires_grad_() for name, tensor in first.items()}
    adam = torch.optim.Adam(own.values(), lr=1e-3, betas=(0.5, 0.9))
    groups = [(_pictures(1), _pictures(2)), (_pictures(3, 3), _pictures(4, 3))]
    for step in range(3):
        _, norm = _step(judge, step, *groups)
        adam.zero_grad()
        total = 0
        for pixels, decoded in groups:
            total = total + hinge_losses(*(judge.network.judge(one, own) for one in (pixels, decoded))).sum()
        (total / 5).backward()
        expected = sum(float(tensor.grad.double().square().sum()) for tensor in own.values()) ** 0.5
        assert norm == pytest.approx(expected, rel=1e-5)
        adam.step()
        for name, tensor in _weights(judge.state()).items():
            off, moved = (tensor - own[name].detach()).norm(), (tensor - first[name]).norm()
            assert off <= 1e-4 * moved, (step, name)


def test_it_learns_to_tell_pictures_from_their_reconstructions():
    judge = _begun()
    pixels, decoded = _pictures(1, 4), _pictures(2, 4) * 0.3
    for step in range(20):
        (losses, _) = _step(judge, step, (pixels, decoded))
    weights = _weights(judge.state())
    real, fake = (judge.network.judge(one, weights) for one in (pixels, decoded))
    assert float(real.mean()) > 0.8 and float(fake.mean()) < -0.8
    assert float(losses[0].detach().mean()) > 0  # the VAE is told to look more real


def test_it_goes_on_from_its_state_and_keeps_its_gradients_to_itself():
    groups = (_pictures(1), _pictures(2))
    whole = _begun()
    for step in range(4):
        _step(whole, step, groups)
    half = _begun()
    for step in range(2):
        _step(half, step, groups)
    saved = half.state()
    assert {name.partition("/")[0] for name in saved} == {"weights", "optimizer"}
    other = _begun(saved)
    for step in range(2, 4):
        _step(other, step, groups)
    assert whole.state().keys() == other.state().keys()
    assert all(torch.equal(tensor, other.state()[name]) for name, tensor in whole.state().items())


def test_the_vaes_losses_do_not_move_it():
    judge = _begun()
    pixels, last = _pictures(1), torch.ones(1, requires_grad=True)
    decoded = _pictures(2) * last
    judge.prepare(0)
    losses = judge.losses(pixels, decoded, (decoded - pixels).abs().flatten(1).mean(1), last)
    norm = judge.finish_gradients()
    losses.sum().backward()
    assert last.grad.abs() > 0 and judge.finish_gradients() == pytest.approx(norm / 2)  # the mean of 2 again, no more
    fake = judge.network.judge(decoded, _weights(judge.state()))
    ratio = losses.detach() / adversarial_losses(fake).detach()
    assert torch.allclose(ratio, ratio[0].expand(2))


def test_before_its_first_pictures_nothing_moves():
    judge = _begun()
    before = judge.state()
    judge.prepare(0)
    assert judge.finish_gradients() == 0
    judge.step_()
    assert before.keys() == judge.state().keys()
    assert all(torch.equal(tensor, judge.state()[name]) for name, tensor in before.items())
