"""The step of a slider: its target and both strengths against float64, its noise, its gradients, and runs in parts."""

import copy
from dataclasses import replace

import pytest
import torch
from graft_nodes.training.data import sliders
from graft_nodes.training.data.dataset import Conditioning
from graft_nodes.training.distributed import process_group
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.objective.slider import (
    AI_TOOLKIT,
    BOTH_DIRECTIONS,
    CONCEPT_SLIDERS,
    PICTURE_PAIRS,
    SliderSettings,
)
from graft_nodes.training.random_draws import generator as seeded_generator
from graft_nodes.training.run import step as steps
from graft_nodes.training.run.loop import Callbacks, train
from graft_nodes.training.run.workspace import Workspace
from graft_nodes.training.state import equal
from graft_nodes.training.tasks.registry import task_of
from graft_nodes.training.tasks.slider import losses_at
from graft_nodes.training.trainable.settings import AdapterSettings

VALUES = {"": 0.0, "person": 0.3, "old": 0.9, "young": -0.4, "someone": 0.1, "dog": -0.7, "people": 0.5}
CONTEXTS = {text: Conditioning(torch.full((1, 1, 1), value)) for text, value in VALUES.items()}
SIZE = (48, 48)
ADAPTER = AdapterSettings(targets="all", rank=2)


def settings(method=BOTH_DIRECTIONS, **given):
    texts = {"positive": "old", "negative": "young", "target": "person", "neutral": "", "keep": "", **given}
    return SliderSettings(method, **texts)


def noise(**given):
    return sliders.make_noise_dataset(settings(**given), torch.zeros(4, 6, 6), SIZE, CONTEXTS, ("vae", "clip"))


def pairs(lab, count=5):
    data, draws = lab.pictures(count, held_out=[count - 1]), torch.Generator().manual_seed(8)

    def paired(image):
        return replace(image, extras={"reference_latents": [torch.randn(1, 4, 6, 6, generator=draws)]})

    images, held_out = ([paired(image) for image in group] for group in (data.images, data.held_out))
    data = replace(data, images=tuple(images), held_out=tuple(held_out))
    return sliders.make_pair_dataset(settings(PICTURE_PAIRS), data)


def predicting(lab, prediction):
    """A denoiser that predicts eps, v or flow, and what its network predicts for (module, x, sigma, contexts)."""

    def column(sigma):
        return sigma.view(-1, 1, 1, 1)

    class Model(lab.Flow):
        def noisy(self, clean, noise, sigma):
            if self.prediction == "flow":
                return super().noisy(clean, noise, sigma)
            return clean + column(sigma) * noise

        def denoise(self, x, sigma, conditionings, options):
            contexts = torch.stack([c.context.mean() for c in conditionings])
            out, s = raw(self.module, x, sigma, contexts), column(sigma)
            if self.prediction == "v":
                return x / (s**2 + 1) - s / (s**2 + 1).sqrt() * out
            return x - s * out

    def raw(module, x, sigma, contexts):
        if prediction != "flow":
            x = x / (column(sigma) ** 2 + 1).sqrt()
        return module(x, column(contexts))

    model = Model()
    model.prediction = prediction
    return model, raw


def moved_state(lab, denoiser, data, adapter=ADAPTER, **optimizer):
    """A state whose adapter changes something already."""
    state = lab.state(denoiser, data, adapter, ema=False, **optimizer)
    draws = torch.Generator().manual_seed(4)
    trained = {name: t + 0.3 * torch.randn(t.shape, generator=draws) for name, t in state.trained.items()}
    return replace(state, trained=trained)


def merged(module, state, strength):
    """The module in float64 with `strength` times the LoRA in its weights, by the LoRA's definition."""
    module = copy.deepcopy(module).double()
    for name, down in state.trained.items():
        if name.endswith("lora_down.weight"):
            path = name.removesuffix(".lora_down.weight")
            up = state.trained[f"{path}.lora_up.weight"]
            weight = module.get_submodule(path).weight
            change = up.double().flatten(1) @ down.double().flatten(1)
            weight.data += strength * change.reshape(weight.shape)
    return module


def test_every_pair_of_a_step_counts_the_same_at_both_strengths(lab):
    """Of five pairs, four are in the first micro-batch and one in the second."""
    data, denoiser = pairs(lab, 6), lab.Flow()
    work = Workspace(moved_state(lab, denoiser, data, accumulation=2), denoiser, data)
    with work.install():
        loss = steps.backward_(work)
        accumulated = {name: tensor.grad.clone() for name, tensor in work.trained.items()}
        each = []
        for part in range(2):
            (batch,) = work.loader.take(0, part)
            for strength in (1.0, -1.0):
                generator = seeded_generator(work.start_state.start.seed, 0, f"noise part {part}")
                with work.at_strength(strength):
                    each.append(steps.batch_losses(work, batch, generator, {}))
        mean = torch.cat(each).mean()
        grads = torch.autograd.grad(mean, list(work.trained.values()))
    assert sorted(len(losses) for losses in each) == [1, 1, 4, 4]
    assert loss == pytest.approx(float(mean.detach()), rel=1e-5)
    for (name, gradient), expected in zip(accumulated.items(), grads, strict=True):
        assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("prediction", ["eps", "v", "flow"])
@pytest.mark.parametrize("strength", [1.0, -1.0])
def test_the_loss_is_that_of_the_papers_target(lab, prediction, strength):
    """arXiv 2311.12092: e*(x, target) + eta (e*(x, positive) - e*(x, negative)), in the network's own prediction; at
    strength -1 the other way.
    """
    found, predicted = _measured(lab, prediction, strength, noise(neutral="someone"))
    target = predicted("someone", 0) + strength * 3.0 * (predicted("old", 0) - predicted("young", 0))
    expected = (predicted("person", strength) - target).square().flatten(1).mean(1)
    assert torch.allclose(found.double(), expected, rtol=2e-4)


def _measured(lab, prediction, strength, data):
    """(the losses of four rows, what the network predicts for a prompt with the adapter at a strength in float64)."""
    denoiser, raw = predicting(lab, prediction)
    state = moved_state(lab, denoiser, data)
    base = copy.deepcopy(denoiser.module)
    draws = torch.Generator().manual_seed(6)
    x, sigma = torch.randn(4, 4, 6, 6, generator=draws), torch.rand(4, generator=draws) * 0.9 + 0.05
    work = Workspace(state, denoiser, data)
    with work.install():
        (batch,) = work.loader.take(0, 0)
        with work.at_strength(strength):
            found = losses_at(work, batch, x, sigma, {})
    work.close()

    def predicted(text, at):
        contexts = torch.full((4,), VALUES[text], dtype=torch.float64)
        with torch.no_grad():
            return raw(merged(base, state, at), x.double(), sigma.double(), contexts)

    return found, predicted


@pytest.mark.parametrize("prediction", ["eps", "v", "flow"])
@pytest.mark.parametrize("strength", [1.0, -1.0])
@pytest.mark.parametrize("anchor", ["", "people"])
def test_the_loss_is_ai_toolkits(lab, prediction, strength, anchor):
    """`get_guided_loss` of AI-Toolkit's ConceptSliderTrainer, written anew in float64: four targets around the
    prediction for the target class, each with that prediction's mean and deviation over the batch; at each polarity a
    third of the error against the target that enhances its end, against the one that erases the other, and against the
    anchor.
    """
    data = noise(method=AI_TOOLKIT, anchor=anchor, anchor_strength=0.7)
    found, predicted = _measured(lab, prediction, strength, data)
    neutral, positive, negative = (predicted(text, 0).numpy() for text in ("person", "old", "young"))
    steered = predicted("person", strength).numpy()

    def like_neutral(values):
        return neutral.mean() + neutral.std(ddof=1) * (values - values.mean()) / (values.std(ddof=1) + 1e-8)

    toward = positive - negative
    if strength > 0:
        enhanced, erased = like_neutral(neutral + 3.0 * toward), like_neutral(neutral - 3.0 * -toward)
    else:
        enhanced, erased = like_neutral(neutral + 3.0 * -toward), like_neutral(neutral - 3.0 * toward)
    held = 0.0
    if anchor:
        held = 0.7 * ((predicted(anchor, strength) - predicted(anchor, 0)).numpy() ** 2).mean()
    expected = (((steered - enhanced) ** 2).mean() + ((steered - erased) ** 2).mean() + held) / 3
    assert float(found.detach().double().mean()) == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("method", [BOTH_DIRECTIONS, CONCEPT_SLIDERS])
def test_an_anchor_counts_a_third_with_every_method_of_prompts(lab, method):
    data = noise(method=method, anchor="people", anchor_strength=2.0)
    found, predicted = _measured(lab, "flow", 1.0, data)
    target = predicted("person", 0) + 3.0 * (predicted("old", 0) - predicted("young", 0))
    direction, held = predicted("person", 1.0) - target, predicted("people", 1.0) - predicted("people", 0)
    parts = [error.square().flatten(1).mean(1) for error in (direction, held)]
    assert torch.allclose(found.double(), (2 * parts[0] + 2.0 * parts[1]) / 3, rtol=2e-4)


def test_both_directions_count_alike_and_get_the_same_noise(lab):
    denoiser, data = lab.Flow(), noise(steps=3)
    work = Workspace(moved_state(lab, denoiser, data), denoiser, data)
    with work.install():
        total = steps.backward_(work)
        gradients = {name: tensor.grad.clone() for name, tensor in work.trained.items()}
        means, sums = [], {}
        for strength in (1.0, -1.0):
            work.stepper.drop_gradients()
            work.purpose = "part 0"
            (batch,) = work.loader.take(0, 0)
            with work.at_strength(strength):
                draws = steps.seeded_generator(3, 0, "noise part 0")
                loss = steps.batch_losses(work, batch, draws, {steps.TRAINING: {}}).mean()
                loss.backward()
            means.append(float(loss.detach()))
            for name, tensor in work.trained.items():
                sums[name] = sums.get(name, 0) + tensor.grad / 2
    work.close()
    assert total == pytest.approx(sum(means) / 2, rel=1e-6)
    assert all(torch.allclose(gradients[name], sums[name], rtol=1e-5, atol=1e-7) for name in gradients)


@pytest.mark.parametrize("kind", ["lora", "locon", "loha", "lokr", "tlora"])
def test_the_model_computes_with_the_adapter_at_that_strength(lab, kind):
    """At strength -1 it is the run whose tensors give -1 times the change of every weight."""
    denoiser, data = lab.Flow(), noise()
    adapter = AdapterSettings(kind, targets="all", rank=2)
    state = moved_state(lab, denoiser, data, adapter)
    opposite = {}
    for name, tensor in state.trained.items():
        scaled = any(name.endswith(f".{suffix}") for suffix in adapter.adapter.all_scale_tensors)
        opposite[name] = -tensor if scaled else tensor
    x, context = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(2, 1, 1, 1)
    outputs = []
    for trained, strength in ((state.trained, -1.0), (opposite, 1.0), (state.trained, 1.0)):
        work = Workspace(replace(state, trained=trained), denoiser, data)
        with work.install(), work.at_strength(strength), torch.no_grad():
            outputs.append(denoiser.module(x, context))
        work.close()
    assert torch.allclose(outputs[0], outputs[1], atol=1e-6) and not torch.allclose(outputs[0], outputs[2], atol=1e-3)


def test_a_pair_is_learned_at_both_strengths_with_the_same_noise(lab):
    """Each side is an ordinary step on its pictures."""
    data = pairs(lab)
    denoiser = lab.Flow()
    work = Workspace(moved_state(lab, denoiser, data), denoiser, data)
    with work.install():
        (batch,) = work.loader.take(0, 0)
        work.purpose = "part 0"
        for strength, latents in ((1.0, batch.latents), (-1.0, batch.worse)):
            draws = steps.seeded_generator(3, 0, "noise part 0")
            with work.at_strength(strength):
                found = steps.batch_losses(work, batch, draws, {steps.TRAINING: {}})
                plain = replace(batch, latents=latents, worse=None)
                draws = steps.seeded_generator(3, 0, "noise part 0")
                assert torch.equal(found, steps.batch_losses(work, plain, draws, {steps.TRAINING: {}}))
    work.close()
    partners = [image.worse.latent for image in data.images]
    assert all(any(torch.equal(row, partner) for partner in partners) for row in batch.worse)
    assert all("reference_latents" not in one.extras for one in batch.conditionings)


@pytest.mark.parametrize("method", [BOTH_DIRECTIONS, CONCEPT_SLIDERS, PICTURE_PAIRS, AI_TOOLKIT, "pictures"])
def test_two_calls_are_one_and_the_model_is_left_as_it_was(lab, method):
    denoiser = lab.Flow()
    if method == PICTURE_PAIRS:
        data = pairs(lab)
    elif method == "pictures":
        data = sliders.make_picture_dataset(settings(), lab.pictures(5, held_out=[4]), CONTEXTS, sliders_clip())
    else:
        anchor = "people" if method == AI_TOOLKIT else ""
        data = noise(method=method, positive="old\ndog", negative="young", steps=3, anchor=anchor)
    before = {name: tensor.clone() for name, tensor in denoiser.module.state_dict().items()}
    start = lab.state(denoiser, data, AdapterSettings(targets="all", rank=4, rank_dropout=0.3, network_dropout=0.2))
    callbacks = Callbacks(validate_every=2)
    whole = train(start, denoiser, data, 5, callbacks)
    parts = train(train(start, denoiser, data, 2, callbacks), denoiser, data, 3, callbacks)
    assert equal(whole, parts) and whole.history == parts.history
    assert [step for step, _ in whole.history.validation] == [0, 2, 4]
    assert all(torch.equal(tensor, before[name]) for name, tensor in denoiser.module.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in denoiser.module.modules())


def sliders_clip():
    class Hash:
        digest, unhashed = "clip", ()

    return Hash()


@pytest.mark.parametrize("given", [{}, {"method": AI_TOOLKIT, "anchor": "people"}], ids=["plain", AI_TOOLKIT])
def test_gradients_are_those_of_finite_differences(lab, given):
    denoiser, data = lab.Flow(), noise(steps=2, **given)
    work = Workspace(moved_state(lab, denoiser, data, learning_rate=1e-3), denoiser, data)
    x = torch.randn(4, 4, 6, 6, generator=torch.Generator().manual_seed(6))
    sigma = torch.full((4,), 0.6)
    with work.install():
        (batch,) = work.loader.take(0, 0)
        for strength in (1.0, -1.0):

            def loss(strength=strength):
                with work.at_strength(strength):
                    return losses_at(work, batch, x, sigma, {}).double().sum()

            work.stepper.drop_gradients()
            loss().backward()
            for name, tensor in work.trained.items():
                gradient, begun = tensor.grad.clone(), tensor.detach().clone()
                way = gradient / gradient.norm()
                values = []
                for sign in (1, -1):
                    with torch.no_grad():
                        tensor.copy_(begun + sign * 5e-3 * way)
                    values.append(float(loss()))
                with torch.no_grad():
                    tensor.copy_(begun)
                assert float(gradient.norm()) == pytest.approx((values[0] - values[1]) / 1e-2, rel=1e-2), name
    work.close()


def test_strength_moves_the_prediction_one_way_and_the_other(lab):
    """A direction that the network has is learned: the prediction at a strength goes along positive - negative."""
    denoiser, data = lab.Flow(), noise(guidance=0.5, steps=3)
    state = train(lab.state(denoiser, data, learning_rate=1e-2, batch_size=8, warmup=0), denoiser, data, 120)
    x = torch.randn(16, 4, 6, 6, generator=torch.Generator().manual_seed(9))
    shape = (16, 1, 1, 1)
    with torch.no_grad():
        base = denoiser.module(x, torch.full(shape, VALUES["person"]))
        way = denoiser.module(x, torch.full(shape, VALUES["old"])) - denoiser.module(
            x, torch.full(shape, VALUES["young"])
        )
    along = []
    work = Workspace(state, denoiser, data)
    for strength in (-2.0, -1.0, 0.0, 1.0, 2.0):
        with work.install(), work.at_strength(strength), torch.no_grad():
            change = denoiser.module(x, torch.full(shape, VALUES["person"])) - base
        along.append(float((change * way).sum() / way.square().sum()))
    work.close()
    assert along == sorted(along) and along[2] == pytest.approx(0, abs=1e-6)
    assert along[3] > 0.03 and along[1] < -0.03


@pytest.mark.parametrize(
    ("adapter", "objective", "said"),
    [
        (AdapterSettings("dora"), {}, "adapter type dora has no strength below 0"),
        (AdapterSettings("oft"), {}, "adapter type oft has no strength below 0"),
        (AdapterSettings("full"), {}, "adapter type full has no strength below 0"),
        (AdapterSettings(text_encoder=True), {}, "train text encoder is on in Adapter Settings: switch it off"),
        (ADAPTER, {"ip_noise": 0.1}, "input perturbation is above 0"),
        (ADAPTER, {"target": "differential"}, "training target is differential in Objective Settings"),
        (ADAPTER, {"noise_candidates": 4}, "noise candidates is above 1 in Objective Settings"),
        (ADAPTER, {"expert": "high noise", "boundary": 0.9}, "expert is high noise in Objective Settings"),
    ],
)
def test_what_a_slider_cannot_be_trained_with_is_refused(adapter, objective, said):
    with pytest.raises(ValueError, match=f"Slider is connected, and {said}"):
        sliders.check(noise(), adapter, False, ObjectiveSettings(**objective))


@pytest.mark.parametrize("made", [noise, pairs], ids=["noise", "pairs"])
def test_ranks_that_divide_the_model_are_refused(lab, made):
    class Two(process_group.SingleProcess):
        size, shard = 2, False

    data = noise() if made is noise else pairs(lab)
    state = lab.state(lab.Flow(), data, ADAPTER, ema=False, accumulation=2)
    task_of(state).check(state, lab.Flow(), data, Two())
    Two.shard = True
    with pytest.raises(ValueError, match="Slider: --shard divides the model among ranks: start without --shard"):
        task_of(state).check(state, lab.Flow(), data, Two())
