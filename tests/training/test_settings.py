"""The settings of a training as one value: what was chosen, and what a node refuses."""

from dataclasses import fields, replace

import pytest
from graft_nodes.ema.decay import EMASettings
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.settings import NODES, TrainingSettings


def test_nothing_is_chosen_at_first():
    assert TrainingSettings().chosen() == ()


def test_a_part_that_was_set_is_chosen_and_the_others_stay():
    settings = replace(TrainingSettings(ema=EMASettings()), optimizer=OptimizerSettings(batch_size=3))
    assert settings.chosen() == ("optimizer", "ema")
    assert settings.optimizer.batch_size == 3 and settings.adapter is None


def test_a_training_only_stack_without_rows_is_chosen_too():
    assert TrainingSettings(training_only=[]).chosen() == ("training_only",)


def test_a_part_that_a_node_cannot_use_is_named_as_the_editor_does():
    settings = TrainingSettings(optimizer=OptimizerSettings(), ema=EMASettings(), training_only=[])
    settings.refuse_others(("optimizer", "ema", "training_only"), "Node", "why")
    with pytest.raises(
        ValueError, match=r"^Node: settings has EMA Settings and Training-only LoRA, which it has not\.$"
    ):
        settings.refuse_others(("optimizer",), "Node", "which it has not")


def test_every_part_has_its_node():
    assert {one.name for one in fields(TrainingSettings)} == NODES.keys()
