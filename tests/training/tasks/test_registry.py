"""Which kind of training a state is of: what its run's identity says, what a loss function changes, what is refused."""

from dataclasses import dataclass, replace

import pytest
import torch
from graft_nodes.tests.training.tasks.test_slider import noise
from graft_nodes.training.distributed.process_group import SingleProcess
from graft_nodes.training.objective.loss_kinds import LOSSES
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.state import Start, change_settings, companion_tensors, name_companions
from graft_nodes.training.tasks.denoising import DenoisingTask
from graft_nodes.training.tasks.preference import PreferenceTask
from graft_nodes.training.tasks.registry import TASKS, task_for, task_of, trains_vae
from graft_nodes.training.tasks.slider import SliderTask

DPO = ObjectiveSettings(loss="dpo")


@dataclass(frozen=True)
class Own:
    """The settings of some kind."""

    weight: float = 1.0


def test_every_kind_of_a_loss_function_is_listed():
    assert {kind.task for kind in LOSSES} - {""} <= set(TASKS.names())
    assert [kind.name for kind in TASKS if kind.network == "VAE"] == ["vae"]


def test_a_run_that_denoises_becomes_one_of_pairs_with_their_loss_and_back(lab):
    state = lab.state(lab.Flow(), lab.pictures())
    assert type(task_of(state)) is DenoisingTask and not trains_vae(state)
    pairs = change_settings(state, None, DPO)
    assert pairs.task == "preference" and type(task_of(pairs)) is PreferenceTask
    assert pairs.start == state.start and pairs.settings.digest != state.settings.digest
    assert change_settings(pairs, None, ObjectiveSettings()).task == "denoising"


def test_a_slider_stays_one_whatever_the_loss_is_and_refuses_that_of_pairs(lab):
    denoiser, data = lab.Flow(), noise()
    assert task_for(data) == "slider" and task_for(lab.pictures()) == "denoising"
    state = lab.state(denoiser, data, ema=False, objective=DPO)
    assert type(task_of(state)) is SliderTask
    with pytest.raises(ValueError, match="loss function dpo compares the pictures of pairs"):
        task_of(state).check(state, denoiser, data, SingleProcess())
    plain = replace(state, start=replace(state.start, task="denoising"), settings=type(state.settings)())
    with pytest.raises(ValueError, match="Slider is connected, and this run is of denoising: begin another run"):
        task_of(plain).check(plain, denoiser, data, SingleProcess())


def test_a_runs_identity_names_its_kind_and_the_kinds_settings():
    start = Start("model", "data")
    other = replace(start, task="vae", task_settings=Own())
    assert "task" not in start.identity() and "task_settings" not in start.identity()
    assert other.identity() == {**start.identity(), "task": "vae", "task_settings": {"weight": 1.0}}
    assert len({one.digest for one in (start, other, replace(other, task_settings=Own(2.0)))}) == 3


def test_an_unknown_kind_is_named(lab):
    state = lab.state(lab.Flow(), lab.pictures())
    with pytest.raises(ValueError, match="kind of training is 'made up', expected one of denoising, preference"):
        task_of(replace(state, start=replace(state.start, task="made up")))


def test_what_learns_beside_the_model_outlives_another_optimizer(lab):
    state = lab.state(lab.Flow(), lab.pictures())
    own = {"critic": {"weights/a": torch.ones(2), "b": torch.zeros(1)}, "critics": {"b": torch.ones(1)}}
    state = replace(state, optimizer={"exp_avg/blocks.0.ff": torch.ones(3), **name_companions(own)})
    state = change_settings(state, OptimizerSettings(optimizer="sgd"), None)
    assert len(state.optimizer) == 3 and companion_tensors(state, "other") == {}
    for name, tensors in own.items():
        found = companion_tensors(state, name)
        assert found.keys() == tensors.keys() and all(torch.equal(found[key], tensors[key]) for key in found)
