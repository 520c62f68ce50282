"""Every picture's own loss, computed again in float64: with the trained weights, without them, without the caption."""

import copy
from dataclasses import replace

import pytest
import torch
from graft_nodes.tests.training.run.test_validation import ADAPTERS, MEANS, put_on
from graft_nodes.training.random_draws import generator as seeded_generator
from graft_nodes.training.run.loop import train
from graft_nodes.training.run.picture_losses import by_name, passes, picture_losses


def by_hand(module, latent, caption, seed):
    """The mean squared error of the velocity in float64 at four levels, the same for every picture."""
    draws = seeded_generator(seed, 0, "validation")
    clean = latent.double() * 0.5
    levels = ((torch.arange(4) + torch.rand((), generator=draws)) / 4).clamp(min=1e-3).double().view(4, 1, 1, 1)
    noise = torch.randn((4, *clean.shape), generator=draws).double()
    with torch.no_grad():
        velocity = module((1 - levels) * clean + levels * noise, torch.tensor(MEANS[caption]).double())
    return float((velocity - (noise - clean)).square().mean())


@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_losses_are_those_of_a_computation_in_float64(lab, kind):
    dataset = lab.pictures(7, held_out=[0, 5])
    dataset = replace(dataset, images=(replace(dataset.images[0], caption=""), *dataset.images[1:]))
    denoiser = lab.Flow()
    state = train(lab.state(denoiser, dataset, ADAPTERS[kind]), denoiser, dataset, 6)
    before = {name: tensor.clone() for name, tensor in denoiser.module.state_dict().items()}
    calls = []
    found = picture_losses(state, denoiser, dataset, on_pass=lambda: calls.append(1))
    assert len(calls) == passes(dataset) == 7 + 7 + 6
    assert all(torch.equal(tensor, before[name]) for name, tensor in denoiser.module.state_dict().items())
    base = copy.deepcopy(lab.Flow().module).double()
    trained = copy.deepcopy(base)
    put_on(trained, state.trained)
    assert [one.image for one in found] == [*dataset.images, *dataset.held_out]
    assert [one.is_held_out for one in found] == [False] * 5 + [True] * 2
    for one in found:
        latent, caption = one.image.latent, one.image.caption
        assert one.before == pytest.approx(by_hand(base, latent, caption, state.start.seed), rel=1e-5)
        assert one.after == pytest.approx(by_hand(trained, latent, caption, state.start.seed), rel=1e-5)
        assert one.before != pytest.approx(one.after, rel=1e-3)
        if caption:
            bare = by_hand(trained, latent, "", state.start.seed)
            assert one.without_caption == pytest.approx(bare, rel=1e-5)
            assert one.caption_help == pytest.approx(1 - one.after / bare, abs=1e-4)
        else:
            assert one.without_caption is None and one.caption_help is None
    assert picture_losses(state, denoiser, dataset) == found, "the same each time"


def test_a_picture_at_several_resolutions_has_their_mean(lab):
    dataset = lab.pictures(6)
    dataset = replace(dataset, images=(*dataset.images[:5], replace(dataset.images[5], name=dataset.images[2].name)))
    losses = picture_losses(lab.state(lab.Flow(), dataset), lab.Flow(), dataset)
    names = by_name(losses)
    assert len(names) == 5 and [one.after for one in names.values()] == sorted(
        (one.after for one in names.values()), reverse=True
    )
    both = names[dataset.images[2].name]
    assert both.after == pytest.approx((losses[2].after + losses[5].after) / 2)
    assert both.before == pytest.approx((losses[2].before + losses[5].before) / 2)


def test_an_interruption_ends_it_with_the_model_as_it_was(lab):
    dataset, denoiser = lab.pictures(6), lab.Flow()
    state = train(lab.state(denoiser, dataset), denoiser, dataset, 2)
    before = {name: tensor.clone() for name, tensor in denoiser.module.state_dict().items()}
    asked = iter([None] * 14)

    def interrupt():
        if next(asked, "now") == "now":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        picture_losses(state, denoiser, dataset, interrupt)
    assert all(torch.equal(tensor, before[name]) for name, tensor in denoiser.module.state_dict().items())
