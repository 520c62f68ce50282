"""Training as a function: equal bytes, any split of the steps, and nothing of the model, the generator or the input
changed.
"""

import copy
import math
import threading
from dataclasses import replace

import pytest
import torch
from graft_nodes.ema.decay import EMASettings
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.run.loop import Callbacks, Stopped, train
from graft_nodes.training.run.step import backward_
from graft_nodes.training.run.workspace import Workspace
from graft_nodes.training.state import advance_position, change_settings, equal
from graft_nodes.training.store import saved_states
from graft_nodes.training.tasks.draws import Draws
from graft_nodes.training.trainable.settings import AdapterSettings

KINDS = {
    "lora": AdapterSettings(targets="attention+ff", rank=2),
    "locon": AdapterSettings("locon", targets="all", rank=2),
    "full": AdapterSettings("full", targets="all"),
    "dropouts": AdapterSettings(
        targets="all", rank=4, rank_dropout=0.3, module_dropout=0.2, network_dropout=0.2, max_norm=0.05
    ),
}


@pytest.mark.parametrize(
    ("settings", "saved"), [({}, []), ({"snapshot_every": 4}, [4, 8]), ({"snapshot_minutes": 2.0}, [2, 4, 6, 8])]
)
def test_snapshots_come_every_so_many_steps_or_minutes(lab, monkeypatch, settings, saved):
    """Each step, which is one forward, takes a minute."""
    denoiser, dataset = lab.Flow(), lab.pictures()
    monkeypatch.setattr("graft_nodes.training.run.loop.time.monotonic", lambda: 60.0 * denoiser.calls)
    kept = []
    callbacks = Callbacks(save_snapshot=lambda state: kept.append(state.step), **settings)
    train(lab.state(denoiser, dataset), denoiser, dataset, 9, callbacks)
    assert kept == saved


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_calls_are_one(lab, kind, accumulation):
    denoiser, dataset = lab.Flow(), lab.pictures(11, held_out=[10])
    start = lab.state(denoiser, dataset, KINDS[kind], accumulation=accumulation)
    callbacks = Callbacks(validate_every=4)
    whole = train(start, denoiser, dataset, 12, callbacks)
    parts = train(train(start, denoiser, dataset, 5, callbacks), denoiser, dataset, 7, callbacks)
    assert equal(whole, parts) and whole.history == parts.history
    assert whole.position == ((start.settings.digest, 12),)
    assert [step for step, _ in whole.history.validation] == [0, 4, 8, 12]
    assert start.step == 0 and not start.optimizer


@pytest.mark.parametrize("precision", ["float32", "fp16", "full-bf16"])
def test_a_step_whose_dropout_leaves_out_every_module_moves_nothing(lab, precision):
    denoiser, dataset = lab.Flow(), lab.pictures()
    adapter = AdapterSettings(targets="attention", rank=2, pattern="blocks.0.attn1.to_q", module_dropout=0.7)
    start = lab.state(denoiser, dataset, adapter, precision=precision)
    whole = train(start, denoiser, dataset, 12)
    assert 0 < sum(norm == 0 for norm in whole.history.norm) < 12 and all(loss > 0 for loss in whole.history.loss)
    assert equal(whole, train(train(start, denoiser, dataset, 5), denoiser, dataset, 7))


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16", "full-bf16"])
def test_previews_change_neither_the_weights_nor_their_average(lab, precision):
    denoiser, dataset, shown = lab.Flow(), lab.pictures(), []

    def preview(denoiser, step, average, at_strength):
        with at_strength(-1.0):
            pass
        shown.append((step, average))

    start = lab.state(denoiser, dataset, precision=precision)
    plain = train(start, denoiser, dataset, 6)
    previewed = train(start, denoiser, dataset, 6, Callbacks(preview=preview, preview_every=2))
    assert shown == [(step, average) for step in (2, 4, 6) for average in (False, True)]
    assert equal(plain, previewed)


def test_equal_input_gives_equal_bytes_and_the_input_is_not_changed(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    state = train(lab.state(denoiser, dataset), denoiser, dataset, 3)
    before = copy.deepcopy((dict(state.trained), dict(state.optimizer), dict(state.average)))
    first, second = (train(state, denoiser, dataset, 4) for _ in range(2))
    assert equal(first, second)
    assert all(
        torch.equal(a[k], b[k])
        for a, b in zip(before, (state.trained, state.optimizer, state.average), strict=True)
        for k in a
    )


@pytest.mark.parametrize(
    "change", [{"seed": 4}, {"batch_size": 2}, {"learning_rate": 2e-2}, {"weight_decay": 0.5}, {"clip_norm": 1e-3}]
)
def test_settings_change_the_bytes_and_the_key(lab, change):
    denoiser, dataset = lab.Flow(), lab.pictures()
    plain = train(lab.state(denoiser, dataset), denoiser, dataset, 5)
    other = train(lab.state(denoiser, dataset, **change), denoiser, dataset, 5)
    assert plain.key != other.key
    assert not torch.equal(plain.trained["blocks.0.ff.lora_up.weight"], other.trained["blocks.0.ff.lora_up.weight"])


def test_losses_that_are_not_finite_are_never_the_best(lab):
    denoiser, dataset, kept = lab.Flow(), lab.pictures(11, held_out=[10]), []
    denoiser.fail_at = 1  # the validation at step 0
    state = train(
        lab.state(denoiser, dataset, ema=False),
        denoiser,
        dataset,
        4,
        Callbacks(validate_every=2, save_best=lambda state: kept.append(state.step)),
    )
    (_, first), (_, second), (_, third) = state.history.validation
    assert math.isnan(first) and kept == ([2, 4] if third < second else [2])
    assert state.history.best == min(((2, second), (4, third)), key=lambda row: row[1])
    held_out = tuple(replace(picture, latent=picture.latent * math.nan) for picture in dataset.held_out)
    broken = replace(dataset, held_out=held_out)
    kept.clear()
    for ema in (False, True):
        state = train(
            lab.state(denoiser, broken, ema=ema),
            denoiser,
            broken,
            4,
            Callbacks(validate_every=2, save_best=lambda state: kept.append(state.step)),
        )
        assert len(state.history.validation) == 3 and state.history.best is None and not kept


def test_the_best_is_among_losses_of_the_objective_that_holds(lab, tmp_path):
    denoiser, dataset, kept = lab.Flow(), lab.pictures(12, held_out=[0, 5]), []
    callbacks = Callbacks(validate_every=2, save_best=lambda state: kept.append(state.step))
    first = train(
        lab.state(denoiser, dataset, ema=False, objective=ObjectiveSettings(loss="x0-mse")),
        denoiser,
        dataset,
        4,
        callbacks,
    )
    kept.clear()
    second = train(change_settings(first, None, ObjectiveSettings(loss="mse")), denoiser, dataset, 4, callbacks)
    assert (
        min(loss for _, loss in second.history.validation) < second.history.best[1]
    )  # numbers of another objective are smaller
    assert second.history.best[0] in (6, 8) and kept[0] == 6 and second.history.outdated == 3
    again = saved_states.load(saved_states.save(second, tmp_path, "mine").parent, "mine", "model", dataset.digest)
    assert again.history == second.history
    faster = replace(second.settings.optimizer, learning_rate=2e-2)
    assert change_settings(second, faster, None).history == second.history


def _traces(module):
    state = {name: t.clone() for name, t in module.state_dict().items()}
    flags = {name: (id(p), p.requires_grad, p.grad) for name, p in module.named_parameters()}
    parts = {
        name: (type(m), m.training, sorted(m.__dict__), len(m._forward_hooks)) for name, m in module.named_modules()
    }
    return state, flags, {name: id(b) for name, b in module.named_buffers()}, parts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("ending", ["whole", "interrupted", "diverged"])
def test_the_model_and_the_global_generator_are_as_before(lab, kind, checkpointing, ending):
    denoiser, dataset = lab.Flow(), lab.pictures(held_out=[9])
    denoiser.module.blocks[0].train()
    denoiser.module.blocks[1].eval()
    denoiser.module.blocks[0].ff.weight.requires_grad_(False)
    state = lab.state(denoiser, dataset, KINDS[kind], checkpointing=checkpointing)
    before, rng, grad = _traces(denoiser.module), torch.random.get_rng_state(), torch.is_grad_enabled()

    class Interrupted(Exception):
        pass

    def stepped(step, moved, validation):
        if ending == "interrupted" and step == 3:
            raise Interrupted

    if ending == "diverged":
        denoiser.fail_at = 12  # step 6: a validation has a pass for the weights and one for their average
    outcome = {"whole": None, "interrupted": Interrupted, "diverged": Stopped}[ending]
    if outcome is None:
        train(state, denoiser, dataset, 5, Callbacks(stepped, validate_every=2))
    else:
        with pytest.raises(outcome):
            train(state, denoiser, dataset, 9, Callbacks(stepped, validate_every=2))
    after = _traces(denoiser.module)
    assert before[0].keys() == after[0].keys() and all(torch.equal(before[0][k], after[0][k]) for k in before[0])
    assert before[1:] == after[1:]
    assert torch.equal(rng, torch.random.get_rng_state()) and torch.is_grad_enabled() == grad


@pytest.mark.parametrize("kind", ["lora", "locon", "full"])
def test_weights_made_in_inference_mode_train_to_the_same_bytes(lab, kind):
    plain, dataset = lab.Flow(), lab.pictures()
    with torch.inference_mode():
        frozen = lab.Flow()
    assert frozen.module.norm.weight.is_inference()
    expected = train(lab.state(plain, dataset, KINDS[kind]), plain, dataset, 4)
    with torch.inference_mode():
        found = train(lab.state(frozen, dataset, KINDS[kind]), frozen, dataset, 4)
    assert equal(expected, found)
    assert frozen.module.norm.weight.is_inference()


def test_checkpointing_gives_the_same_bytes(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    runs = [
        train(lab.state(denoiser, dataset, KINDS["dropouts"], checkpointing=on), denoiser, dataset, 4)
        for on in (False, True)
    ]
    assert all(torch.equal(runs[0].trained[k], runs[1].trained[k]) for k in runs[0].trained)


@pytest.mark.parametrize("kind", ["lora", "locon", "full"])
def test_every_trained_tensor_has_a_gradient_at_step_1(lab, kind):
    denoiser, dataset = lab.Flow(), lab.pictures()
    work = Workspace(lab.state(denoiser, dataset, KINDS[kind]), denoiser, dataset)
    with work.install():
        backward_(work)
    assert [name for name, t in work.trained.items() if t.grad is None] == []
    moving = [
        name for name in work.trained if not name.endswith("lora_down.weight")
    ]  # while up is zero, down stands still
    assert all(work.trained[name].grad.abs().max() > 0 for name in moving)


def test_a_closed_workspace_leaves_no_thread_of_its_loader(lab):
    denoiser, dataset = lab.Flow(), replace(lab.pictures(), workers=2)
    work, before = Workspace(lab.state(denoiser, dataset), denoiser, dataset), set(threading.enumerate())
    work.loader.until = 4
    assert len(work.loader.take(0, 0)) > 0
    started = set(threading.enumerate()) - before
    assert started
    work.close()
    assert not [thread.name for thread in started if thread.is_alive()]


def test_interruption_keeps_the_last_whole_step_and_going_on_gives_the_same_bytes(lab):
    denoiser, dataset, kept = lab.Flow(), lab.pictures(held_out=[9]), []
    state = lab.state(denoiser, dataset)

    def stepped(step, moved, validation):
        if step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(state, denoiser, dataset, 12, Callbacks(stepped, kept.append, validate_every=2, snapshot_every=4))
    assert [one.step for one in kept] == [4, 7]
    callbacks = Callbacks(validate_every=2)
    assert equal(train(kept[-1], denoiser, dataset, 5, callbacks), train(state, denoiser, dataset, 12, callbacks))
    assert (
        train(kept[-1], denoiser, dataset, 5, callbacks).history
        == train(state, denoiser, dataset, 12, callbacks).history
    )


class Interrupted(BaseException):
    """As ComfyUI's, which is not an Exception in every version."""


@pytest.mark.parametrize("during", ["a step", "validation"])
def test_an_interruption_is_noticed_between_micro_batches_and_between_held_out_pictures(lab, during):
    """After two whole steps of six forwards; the third, or the validation after it, is left in the middle."""
    denoiser, dataset, kept = lab.Flow(), lab.pictures(held_out=[7, 8, 9]), []
    state = lab.state(denoiser, dataset, accumulation=6, batch_size=1)
    last, validate_every = {"a step": (2 * 6 + 2, 0), "validation": (3 * 6 + 3 + 1, 3)}[during]

    def raise_if_interrupted():
        if denoiser.calls == last:
            raise Interrupted

    callbacks = Callbacks(raise_if_interrupted=raise_if_interrupted, save_snapshot=kept.append)
    if validate_every:
        state = train(state, lab.Flow(), dataset, 1)  # past step 0, at which validation is due too
        last -= 6 + 3
    with pytest.raises(Interrupted):
        train(state, denoiser, dataset, 5, replace(callbacks, validate_every=validate_every))
    (snapshot,) = kept
    step = {"a step": 2, "validation": 3}[during]
    assert denoiser.calls == last and snapshot.step == step
    whole = lab.state(lab.Flow(), dataset, accumulation=6, batch_size=1)
    assert equal(snapshot, train(whole, lab.Flow(), dataset, step))
    assert equal(train(snapshot, lab.Flow(), dataset, 2), train(whole, lab.Flow(), dataset, step + 2))


@pytest.mark.parametrize(("snapshot_every", "steps"), [(1, [1, 2]), (2, [2]), (0, [])])
def test_an_interruption_inside_the_optimizer_keeps_nothing_half_moved(lab, monkeypatch, snapshot_every, steps):
    denoiser, dataset, kept = lab.Flow(), lab.pictures(), []
    real, calls = torch.optim.AdamW.step, []

    def step(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            next(iter(self.param_groups[0]["params"])).data.add_(1.0)
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(KeyboardInterrupt):
        callbacks = Callbacks(None, kept.append, snapshot_every=snapshot_every)
        train(lab.state(denoiser, dataset), denoiser, dataset, 9, callbacks)
    assert [one.step for one in kept] == steps


def test_a_loss_that_is_not_finite_stops_with_the_last_good_state(lab):
    denoiser, dataset, kept = lab.Flow(), lab.pictures(), []
    state = lab.state(denoiser, dataset)
    good = train(state, denoiser, dataset, 3)
    denoiser.calls, denoiser.fail_at = 0, 4
    with pytest.raises(Stopped, match=r"Step 4 has loss nan.*after step 3 is kept.*learning rate") as caught:
        train(state, denoiser, dataset, 9, Callbacks(None, kept.append))
    assert equal(caught.value.state, good) and equal(kept[-1], good)


def test_training_tells_the_model_its_step_and_validation_does_not(lab):
    denoiser, dataset = lab.Flow(), lab.pictures(held_out=[9])
    train(lab.state(denoiser, dataset), denoiser, dataset, 3, Callbacks(validate_every=2))
    evaluating = [options.get("graft_evaluating", False) for options in denoiser.seen]
    assert evaluating == [True, True, False, False, True, True, False]
    steps = [options.get("graft_training") for options in denoiser.seen]
    seeds = [step.pop("routing") for step in steps if step is not None]
    assert len(set(seeds)) == len(seeds), "patches draw something else in each step"
    assert steps == [
        None,
        None,
        {"step": 0, "total_steps": 30},
        {"step": 1, "total_steps": 30},
        None,
        None,
        {"step": 2, "total_steps": 30},
    ]


class Recorded:
    """A denoiser that remembers what its network saw and should have predicted, to compute it once more in float64."""

    def __init__(self, denoiser, monkeypatch):
        self.denoiser, self.seen, self.own = denoiser, [], []
        denoise, noisy = denoiser.denoise, denoiser.noisy
        monkeypatch.setattr(denoiser, "denoise", lambda *call: (self.seen.append(call), denoise(*call))[1])
        monkeypatch.setattr(denoiser, "noisy", lambda *call: (self.own.append(call), noisy(*call))[1])

    def losses(self, weights):
        """The flow loss of every image in float64, with these weights of the network."""
        per_image = []
        for (x, _, conditionings, _), (clean, noise, _) in zip(self.seen, self.own, strict=True):
            context = torch.stack([c.context.mean().double() for c in conditionings]).view(-1, 1, 1, 1)
            module = copy.deepcopy(self.denoiser.module).double()
            velocity = torch.func.functional_call(module, weights, (x.double(), context))
            per_image.append((velocity - (noise - clean).double()).square().flatten(1).mean(1))
        return torch.cat(per_image)


def _of_sizes(lab, counts, **settings):
    """A dataset with so many pictures of each size, and its own batch size for one of them."""
    datasets = [lab.pictures(count, (4, 6, 4 + 2 * number), number) for number, count in enumerate(counts)]
    return replace(datasets[0], images=sum((dataset.images for dataset in datasets), ()), **settings)


@pytest.mark.parametrize(
    "case", ["equal", "the end of an epoch", "sizes", "regularization images", "regularization batches"]
)
def test_accumulated_gradients_are_those_of_one_large_batch(lab, monkeypatch, case):
    """However the images of a step are divided among its micro-batches, each counts the same."""
    objective, batch_size, accumulation = ObjectiveSettings(conditioning_dropout=0.0), 2, 2
    dataset = lab.pictures(8)
    if case == "the end of an epoch":
        dataset, batch_size, accumulation = lab.pictures(7), 4, 2
    elif case == "sizes":
        dataset, batch_size, accumulation = _of_sizes(lab, (4, 2, 1)), 4, 3
    elif case == "regularization images":
        objective = replace(objective, prior="regularization", prior_weight=0.5)
        dataset, batch_size, accumulation = (
            lab.pictures(5, regularization=lab.pictures(4, seed=7), regularization_share=0.5),
            4,
            3,
        )
    elif case == "regularization batches":
        objective = replace(objective, prior="regularization", prior_weight=0.5)
        dataset = _of_sizes(lab, (1, 1), regularization=lab.pictures(3, seed=7), regularization_share=0.5)
        batch_size, accumulation = 1, 5
    denoiser = lab.Flow()
    batches = {"batch_size": batch_size, "accumulation": accumulation}
    state = lab.state(denoiser, dataset, KINDS["full"], objective=objective, **batches)
    work = Workspace(state, denoiser, dataset)
    recorded, counts, regular = Recorded(denoiser, monkeypatch), [], []
    for part in range(accumulation):
        groups = work.loader.take(0, part)
        counts.append(sum(len(group.captions) for group in groups))
        regular += [group.is_regularization for group in groups]
    with work.install():
        loss = backward_(work)
        accumulated = {name: t.grad.double() for name, t in work.trained.items()}
    assert (len(set(counts)) == 1) == case.startswith(("equal", "regularization batches")), counts
    weights = {name: t.detach().double().requires_grad_() for name, t in work.trained.items()}
    losses = recorded.losses(weights)
    if objective.prior != "none":
        losses = torch.where(torch.cat(regular), losses * objective.prior_weight, losses)
    large = losses.mean()
    assert len(losses) == sum(counts) and loss == pytest.approx(float(large.detach()), rel=1e-5)
    grads = torch.autograd.grad(large, list(weights.values()), allow_unused=True)
    for name, grad in zip(weights, grads, strict=True):
        assert torch.allclose(accumulated[name], grad, rtol=1e-4, atol=1e-6), name


def test_positions_join_equal_neighbors():
    assert advance_position(advance_position((), "a", 100), "a", 150) == (("a", 250),)
    assert advance_position(advance_position((("a", 100),), "b", 5), "a", 1) == (("a", 100), ("b", 5), ("a", 1))


def test_the_average_is_that_of_a_plain_loop(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    state = lab.state(denoiser, dataset)
    average = {name: t.double() for name, t in state.trained.items()}
    for n in range(1, 8):
        state = train(state, denoiser, dataset, 1)
        decay = 0.0 if n == 1 else min(0.999, n / (9 + n))
        average = {name: decay * average[name] + (1 - decay) * t.double() for name, t in state.trained.items()}
    assert all(torch.allclose(average[name].float(), state.average[name], atol=1e-6) for name in average)
    assert state.start.ema == EMASettings("ramp")


def test_a_run_without_an_average_trains_the_same_weights_and_keeps_nothing_else(lab):
    denoiser, dataset, saved = lab.Flow(), lab.pictures(6, held_out=[5]), []
    callbacks = Callbacks(validate_every=2, save_average=lambda *average: saved.append(average))

    def trained(ema):
        state = train(lab.state(denoiser, dataset, ema=ema), denoiser, dataset, 4, callbacks)
        return train(state, denoiser, dataset, 0, callbacks)  # nothing is left to do

    averaging, plain = trained(True), trained(False)
    assert all(torch.equal(plain.trained[name], tensor) for name, tensor in averaging.trained.items())
    assert plain.history.validation == averaging.history.validation
    assert averaging.average and averaging.history.average_validation
    assert not (plain.average or plain.powers or plain.history.average_validation or saved)


def test_memory_that_runs_out_before_the_first_step_gives_the_advice_of_a_step(lab, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GB")

    monkeypatch.setattr("graft_nodes.training.run.workspace.OptimizerStepper", full)
    denoiser, dataset = lab.Flow(), lab.pictures()
    expected = r"Memory ran out while the model was loaded \(CUDA out of memory.*No step was made yet.*checkpointing on"
    with pytest.raises(Stopped, match=expected):
        train(lab.state(denoiser, dataset), denoiser, dataset, 2)


def test_any_other_error_before_the_first_step_is_itself(lab, monkeypatch):
    def broken(*_):
        raise RuntimeError("what happened")

    monkeypatch.setattr("graft_nodes.training.run.workspace.OptimizerStepper", broken)
    denoiser, dataset = lab.Flow(), lab.pictures()
    with pytest.raises(RuntimeError, match=r"^what happened$"):
        train(lab.state(denoiser, dataset), denoiser, dataset, 2)


def test_of_noise_candidates_each_picture_keeps_the_nearest_and_the_levels_stay(lab):
    """The first candidate is the noise that is drawn without others."""
    clean = lab.pictures(5).images[0].latent.expand(5, -1, -1, -1)

    def drawn(count, **others):
        objective = ObjectiveSettings(noise_candidates=count, **others)
        return Draws(torch.Generator().manual_seed(8), {}).draw(objective, lab.Flow(), clean, ())

    by_hand = torch.Generator().manual_seed(8)
    torch.rand(5, generator=by_hand)  # the levels
    candidates = torch.stack([torch.randn(clean.shape, generator=by_hand) for _ in range(6)])
    nearest = (candidates - clean).flatten(2).norm(dim=2).argmin(0)
    assert len(set(nearest.tolist())) > 1
    assert torch.equal(drawn(6).noise, candidates[nearest, torch.arange(5)])
    assert torch.equal(drawn(1).noise, candidates[0]) and torch.equal(drawn(6).sigma, drawn(1).sigma)
    far, near = drawn(1, offset_noise=0.5), drawn(6, offset_noise=0.5)
    assert (near.noise - clean).norm() < (far.noise - clean).norm()
