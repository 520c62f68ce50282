"""What several ranks cannot do is refused before the first step, by name."""

import argparse
from dataclasses import replace

import pytest
import torch
from graft_nodes.ema.decay import EMASettings
from graft_nodes.headless import command
from graft_nodes.training.distributed import fsdp, process_group
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.optimizers.settings import OptimizerSettings, spread_over_ranks
from graft_nodes.training.state import Settings, Start, TrainState
from graft_nodes.training.trainable.settings import AdapterSettings


class Two(process_group.SingleProcess):
    """A group of two that hold the model together, without the other one."""

    size, shard = 2, True


def state(adapter=None, ema=None, objective=None, **optimizer):
    settings = Settings(OptimizerSettings(**{"accumulation": 2, **optimizer}), objective or ObjectiveSettings())
    return TrainState(Start("model", "data", adapter or AdapterSettings(), ema, 0), settings, {})


def test_the_number_of_ranks_multiplies_the_accumulation():
    assert spread_over_ranks(OptimizerSettings(accumulation=3), 4) == OptimizerSettings(accumulation=12)
    assert spread_over_ranks(OptimizerSettings(accumulation=3), 1) == OptimizerSettings(accumulation=3)


def test_a_fused_backward_pass_is_for_one_process():
    fused = OptimizerSettings(fused_backward=True, clip_norm=0.0)
    with pytest.raises(ValueError, match="before 2 ranks could add up their gradients"):
        spread_over_ranks(fused, 2)
    assert spread_over_ranks(fused, 1) == fused


def test_what_can_be_divided_is_taken():
    fsdp.check(state(), Two())
    fsdp.check(
        state(AdapterSettings(kind="full"), EMASettings(), precision="bf16", offload="optimizer", optimizer="lion"),
        Two(),
    )


FULL = AdapterSettings(kind="full")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"accumulation": 3}, "gradient accumulation 3 is not a multiple of 2 ranks"),
        ({"offload": "layers"}, "offload to CPU memory is layers"),
        ({"offload": "activations"}, "offload to CPU memory is activations"),
        ({"adapter": FULL, "optimizer": "muon"}, "optimizer muon needs whole tensors: use one of adamw"),
        ({"adapter": FULL, "precision": "full-bf16"}, "training precision full-bf16"),
        (
            {"adapter": FULL, "ema": EMASettings(snapshots=5)},
            "snapshot every N steps in EMA Settings is 5, and snapshots need whole weights",
        ),
        ({"adapter": AdapterSettings(kind="full", text_encoder=True)}, "the text encoder is not divided"),
        (
            {"adapter": FULL, "objective": ObjectiveSettings(prior="output-preservation")},
            "prior preservation output-preservation",
        ),
        (
            {"adapter": FULL, "objective": ObjectiveSettings(loss="dpo")},
            "loss function dpo needs the model without what is trained",
        ),
    ],
)
def test_what_cannot_is_named(settings, said):
    with pytest.raises(ValueError, match=said):
        fsdp.check(state(**settings), Two())


def test_fewer_rows_than_ranks_are_named():
    small = replace(state(FULL), trained={"bias": torch.zeros(1)})
    with pytest.raises(ValueError, match="no trained tensor has rows for 2 ranks: start fewer"):
        fsdp.check(small, Two())
    fsdp.check(replace(small, trained={**small.trained, "weight": torch.zeros(2, 1)}), Two())


def test_everything_that_cannot_is_said_at_once():
    with pytest.raises(ValueError) as raised:
        fsdp.check(state(AdapterSettings(kind="full"), accumulation=3, optimizer="prodigy", precision="fp16"), Two())
    assert all(word in str(raised.value) for word in ("accumulation 3", "prodigy", "fp16"))


def test_a_number_of_ranks_is_a_whole_number():
    assert command.rank_count("8") == 8
    for text in ("0", "-2", "two", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a whole number, 1 or more"):
            command.rank_count(text)
