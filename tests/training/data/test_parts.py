"""Latents of several parts: packed and taken apart again, in noise, in the loss, and in batches."""

import numpy as np
import pytest
import torch
from graft_nodes.training.data.batches import make_batches
from graft_nodes.training.data.dataset import Conditioning
from graft_nodes.training.data.folder_settings import SampleSettings
from graft_nodes.training.data.parts import ENTRY, pack_parts, unpack_parts
from graft_nodes.training.data.sample_store import SampleStore
from graft_nodes.training.data.samples import Sample, make_dataset
from graft_nodes.training.objective.loss import losses
from graft_nodes.training.objective.noise import noise_like
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.random_draws import generator

PARTS = ((4, 2, 3, 5), (8, 6, 16))


def _draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_parts_come_back_as_they_were():
    parts = [_draw(3, *shape, seed=number) for number, shape in enumerate(PARTS)]
    whole = pack_parts(parts)
    assert whole.shape == (3, 1, 4 * 2 * 3 * 5 + 8 * 6 * 16)
    assert torch.equal(whole[1, 0, 120:], parts[1][1].flatten())
    assert all(torch.equal(mine, given) for mine, given in zip(unpack_parts(whole, PARTS), parts, strict=True))
    assert unpack_parts(whole, ())[0] is whole


def test_offset_and_pyramid_noise_are_those_of_each_part_in_turn():
    zeros = torch.zeros(2, 1, 888)
    found = unpack_parts(noise_like(zeros, 0.4, 0.6, generator(0, 0, "test"), PARTS), PARTS)
    draws = generator(0, 0, "test")
    for part, shape in zip(found, PARTS, strict=True):
        assert torch.equal(part, noise_like(torch.zeros(2, *shape), 0.4, 0.6, draws))


@pytest.mark.parametrize("loss", ["mse", "huber", "x0-mse"])
def test_the_loss_is_the_sum_of_the_parts_means_and_the_mask_is_the_first_ones(loss):
    settings, sigma = ObjectiveSettings(loss=loss), torch.tensor([0.3, 0.8], dtype=torch.float64)
    given = [[_draw(2, *shape, seed=number + 10 * which) for number, shape in enumerate(PARTS)] for which in (0, 1)]
    mask = _draw(2, 1, 3, 5, seed=30).sigmoid()
    found = losses(settings, "flow", pack_parts(given[0]), pack_parts(given[1]), sigma, mask, PARTS)
    expected = losses(settings, "flow", given[0][0], given[1][0], sigma, mask)
    expected = expected + losses(settings, "flow", given[0][1], given[1][1], sigma)
    assert torch.allclose(found, expected, rtol=1e-12)
    if loss == "mse":
        errors = [((a - b) / sigma.view(-1, *[1] * (a.ndim - 1))).numpy() for a, b in zip(*given, strict=True)]
        masked = (errors[0] ** 2 * mask[:, :, None].numpy()).reshape(2, -1).mean(1)
        assert np.allclose(found.numpy(), masked + (errors[1] ** 2).reshape(2, -1).mean(1), rtol=1e-12)


def _samples(store=None, parts=(PARTS, ((8, 6, 16), (4, 2, 3, 5)), PARTS)):
    """Three samples of one packed size and two kinds of parts, with one conditioning."""
    text = Conditioning(torch.ones(1, 2, 3))
    made = [Sample(_draw(1, 888, seed=number).float(), text, "", None, one) for number, one in enumerate(parts)]
    return make_dataset(made, SampleSettings(validation=0.0), None, store)


def test_samples_of_other_parts_never_share_a_batch_and_their_conditionings_say_which():
    dataset = _samples()
    assert dataset.has_sound and dataset.images[1].shape == (8, 6, 16)
    seen = []
    for step in range(3):
        for batch in make_batches(dataset, 3, 0.0, 0, step, step, "part 0"):
            seen.append((batch.parts, len(batch.latents)))
            assert all(one.extras[ENTRY] == batch.parts for one in batch.conditionings)
    assert set(seen) == {(PARTS, 2), (PARTS[::-1], 1)}


def test_parts_count_in_the_hash():
    plain = _samples().digest
    assert plain == _samples(SampleStore()).digest
    assert plain != _samples(parts=(PARTS, PARTS, PARTS)).digest
