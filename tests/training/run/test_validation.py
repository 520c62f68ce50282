"""Validation: the held-out loss of the weights and of their running average, the best step by it, and nothing moved."""

import copy
import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from graft_nodes.storage.safetensors import load_safetensors
from graft_nodes.tests.faults import tried
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.random_draws import generator as seeded_generator
from graft_nodes.training.reports import text
from graft_nodes.training.run import call as runs
from graft_nodes.training.run.loop import Callbacks, train
from graft_nodes.training.run.validation import HeldOut
from graft_nodes.training.run.workspace import Workspace
from graft_nodes.training.state import History, change_settings, equal
from graft_nodes.training.store import saved_states
from graft_nodes.training.store.store import Store, load
from graft_nodes.training.trainable.settings import AdapterSettings

ADAPTERS = {
    "lora": AdapterSettings(targets="attention+ff", rank=2),
    "full": AdapterSettings("full", targets="all"),
}
MEANS = {"a": 0.5, "b": -0.5, "": 0.0}  # of the contexts of Lab's captions


def put_on(module, weights):
    """Trained tensors, applied to the weights of a module by hand: whole weights, or W + up @ down."""
    with torch.no_grad():
        for name, tensor in weights.items():
            if name.endswith(".lora_down.weight"):
                layer = name.removesuffix(".lora_down.weight")
                up = weights[f"{layer}.lora_up.weight"]
                weight = module.get_parameter(f"{layer}.weight")
                weight.add_((up.flatten(1).double() @ tensor.flatten(1).double()).view(weight.shape))
            elif ".lora_" not in name:
                module.get_parameter(name).copy_(tensor)


def loss_by_hand(lab, dataset, seed, weights):
    """The mean squared error of the velocity in float64, at four levels an image that depend on its number alone."""
    module = copy.deepcopy(lab.Flow().module).double()
    put_on(module, weights)
    means = []
    for number, picture in enumerate(dataset.held_out):
        draws = seeded_generator(seed, number, "validation")
        clean = picture.latent.double() * 0.5
        levels = ((torch.arange(4) + torch.rand((), generator=draws)) / 4).clamp(min=1e-3).double().view(4, 1, 1, 1)
        noise = torch.randn((4, *clean.shape), generator=draws).double()
        with torch.no_grad():
            velocity = module((1 - levels) * clean + levels * noise, torch.tensor(MEANS[picture.caption]).double())
        means.append((velocity - (noise - clean)).square().mean())
    return float(torch.stack(means).mean())


@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_average_is_measured_as_the_weights_are(lab, tmp_path, kind):
    dataset = lab.pictures(11, held_out=[0, 5])
    start = lab.state(lab.Flow(), dataset, ADAPTERS[kind])
    history = train(start, lab.Flow(), dataset, 8, Callbacks(validate_every=4)).history
    assert [step for step, _ in history.validation] == [step for step, _ in history.average_validation] == [0, 4, 8]
    for number, step in enumerate((0, 4, 8)):
        folder = Store(tmp_path, f"run{step}").save(train(start, lab.Flow(), dataset, step))
        stored, _ = load_safetensors(str(folder / "state.safetensors"))
        losses = {}
        for group in ("trained", "average"):
            weights = {name.partition("/")[2]: t for name, t in stored.items() if name.startswith(f"{group}/")}
            losses[group] = loss_by_hand(lab, dataset, start.start.seed, weights)
        assert history.validation[number][1] == pytest.approx(losses["trained"], rel=1e-5)
        assert history.average_validation[number][1] == pytest.approx(losses["average"], rel=1e-5)
        assert step == 0 or losses["trained"] != pytest.approx(losses["average"], rel=1e-4)


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16", "full-bf16"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_validation_changes_neither_the_weights_nor_their_average(lab, kind, precision):
    dataset = lab.pictures(11, held_out=[0, 5])
    start = lab.state(lab.Flow(), dataset, ADAPTERS[kind], precision=precision)
    plain = train(start, lab.Flow(), dataset, 6)
    validated = train(start, lab.Flow(), dataset, 6, Callbacks(validate_every=1))
    assert equal(plain, validated) and len(validated.history.average_validation) == 7


def test_the_best_step_is_that_of_the_average(lab, tmp_path, monkeypatch):
    dataset, kept = lab.pictures(held_out=[9]), []
    losses = iter([9, 9.0, 8, 5.0, 7, 6.0, 6, 4.0, 5, 4.0, 1, 8.0])  # weights, average, weights, average …
    monkeypatch.setattr("graft_nodes.training.run.validation.validate", lambda work: HeldOut(next(losses)))
    callbacks = Callbacks(validate_every=2, save_best=lambda state: kept.append(state.step))
    state = train(lab.state(lab.Flow(), dataset), lab.Flow(), dataset, 10, callbacks)
    assert kept == [2, 6] and state.history.best == (6, 4.0)
    assert [loss for _, loss in state.history.validation] == [9, 8, 7, 6, 5, 1]
    folder = saved_states.save(state, tmp_path, "mine")
    again = saved_states.load(folder.parent, "mine", "model", dataset.digest)
    assert again.history == state.history


def test_losses_of_the_average_with_an_earlier_objective_are_not_compared(lab):
    dataset, kept = lab.pictures(12, held_out=[0, 5]), []
    callbacks = Callbacks(validate_every=2, save_best=lambda state: kept.append(state.step))
    start = lab.state(lab.Flow(), dataset, objective=ObjectiveSettings(loss="x0-mse"))
    first = train(start, lab.Flow(), dataset, 4, callbacks)
    kept.clear()
    second = train(change_settings(first, None, ObjectiveSettings(loss="mse")), lab.Flow(), dataset, 4, callbacks)
    assert min(loss for _, loss in second.history.average_validation) < second.history.best[1]
    assert [step for step, _ in second.history.comparable_average] == [6, 8]
    assert second.history.best == min(second.history.comparable_average, key=lambda row: row[1]) and kept[0] == 6


def test_a_run_without_an_average_has_the_passes_and_the_record_of_before(lab, tmp_path):
    denoiser, dataset = lab.Flow(), lab.pictures(held_out=[9])
    state = train(lab.state(denoiser, dataset, ema=False), denoiser, dataset, 4, Callbacks(validate_every=2))
    assert denoiser.calls == 4 + 3 and state.history.best == min(state.history.validation, key=lambda row: row[1])
    record = json.loads((Store(tmp_path, "run").save(state) / "state.json").read_bytes())
    assert record["history"].keys() == {"blocks", "outdated", "loss", "rate", "norm", "validation"}


def test_the_report_says_both_losses_and_the_best_of_the_average(lab):
    state = lab.state(lab.Flow(), lab.pictures(held_out=[9]))
    measured = History(
        (0.5,) * 4, (1e-3,) * 4, (1.0,) * 4, ((0, 0.9), (2, 0.7), (4, 0.6)), 0, ((0, 0.9), (2, 0.5), (4, 0.55))
    )
    report = text.step(state, runs.Outcome(replace(state, step=4, history=measured), None, 4, 1.0), ())
    assert "held-out loss 0.9 at step 0, 0.6 at 4\n" in report
    assert "held-out loss of the running average 0.9 at step 0, 0.55 at 4, best 0.5 at 2" in report
    measured = replace(measured, average_validation=())
    report = text.step(state, runs.Outcome(replace(state, step=4, history=measured), None, 4, 1.0), ())
    assert "held-out loss 0.9 at step 0, 0.6 at 4, best 0.6 at 4" in report and "running average" not in report
    measured = replace(measured, validation=((0, 0.9),))
    report = text.step(state, runs.Outcome(replace(state, step=4, history=measured), None, 4, 1.0), ())
    assert "held-out loss 0.9 at step 0, best 0.9 at 0" in report


class Planted(Exception):
    """What a forward raises."""


@pytest.mark.parametrize("kind", [Planted, KeyboardInterrupt])
@pytest.mark.parametrize("forward", range(1, 11))  # of four steps and three validations of weights and average
def test_an_interruption_in_any_forward_leaves_the_weights_and_the_way_to_the_same_bytes(tmp_path, forward, kind):
    run = tried.Run(tmp_path)
    run.denoiser.calls = 0
    whole = go_on(run, tmp_path / "whole")
    assert run.denoiser.calls == 10 == tried.STEPS + 2 * len(whole.state.history.validation)
    run.denoiser.calls, denoise = 0, run.denoiser.denoise

    def raising(*arguments):
        if run.denoiser.calls + 1 == forward:
            run.denoiser.calls += 1
            raise kind("planted")
        return denoise(*arguments)

    run.denoiser.denoise = raising
    with pytest.raises(kind, match="planted"):
        go_on(run, tmp_path / "broken")
    assert tried.hash_of(run.denoiser.module) == run.base
    for record in (tmp_path / "broken").rglob("partial/state.json"):
        kept, _ = load(record.parent, run.start)
        assert equal(kept, train(run.start, run.denoiser, run.dataset, kept.step))
    again = go_on(run, tmp_path / "broken")
    assert equal(again.state, whole.state) and again.state.history == whole.state.history
    assert tried.contents(tmp_path / "broken") == tried.contents(tmp_path / "whole")


def go_on(run, folder):
    callbacks = Callbacks(validate_every=2, snapshot_every=3)
    return runs.run(
        run.start, tried.STEPS, lambda: nullcontext(run.denoiser), run.dataset, Store(folder, "run"), callbacks, "best"
    )


def test_a_state_whose_exchange_with_the_average_broke_off_is_not_saved(lab, monkeypatch):
    denoiser, dataset, kept = lab.Flow(), lab.pictures(held_out=[9]), []
    entered = Workspace.use_average

    def broken(work):
        if work.step == 2:
            copy_ = torch.Tensor.copy_
            copies = iter(range(3))

            def failing(tensor, *arguments):
                if next(copies) == 1:
                    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
                    raise KeyboardInterrupt
                return copy_(tensor, *arguments)

            monkeypatch.setattr(torch.Tensor, "copy_", failing)
        return entered(work)

    monkeypatch.setattr(Workspace, "use_average", broken)
    callbacks = Callbacks(save_snapshot=kept.append, validate_every=2)
    with pytest.raises(KeyboardInterrupt):
        train(lab.state(denoiser, dataset), denoiser, dataset, 4, callbacks)
    assert not kept
