"""The estimate of Training Recipe beside what `plan` says of the same models at their published sizes."""

import pytest
from graft_nodes.tests.with_comfyui import full_sizes, planned_sizes
from graft_nodes.training.recipes.estimate import GB, Plan, estimate
from graft_nodes.training.recipes.facts import Pictures
from graft_nodes.training.recipes.family_shares import share_of

TITLES = tuple(planned_sizes.TEXTS)


def _plans(title):
    """(what the plan says by part, the estimate) of everything that was planned of a model."""
    facts = full_sizes.stored()[title][full_sizes.BF16]
    for key, by_how in planned_sizes.stored()[title].items():
        pixels, _, targets = key.partition(" ")
        for how, parts in by_how.items():
            targets = targets or "attention"
            checkpointing = how == planned_sizes.CHECKPOINTED
            pictures = (Pictures(int(pixels)),)
            plan = Plan("adamw", targets, planned_sizes.RANK, 1, 1, pictures, 2, checkpointing, average_on_host=True)
            yield parts, estimate(facts, plan)


@pytest.mark.parametrize("title", TITLES)
def test_the_estimate_is_the_plan_and_a_little_more(title):
    for parts, estimated in _plans(title):
        assert 1 <= estimated.parts["activations"] / parts["activations"] < 1.25
        assert 1 <= estimated.total / sum(parts.values()) < 1.2
        assert estimated.parts["model"] == pytest.approx(parts["weights"], rel=0.001)
        assert estimated.parts["optimizer"] == pytest.approx(parts["optimizer"], rel=0.001)


@pytest.mark.parametrize(
    ("title", "checkpointing", "planned"),
    [("Flux.1 dev", False, 58.86), ("Flux.1 dev", True, 14.02), ("Z-Image", False, 44.73), ("Z-Image", True, 8.49)],
)
def test_of_weights_in_fp8_autograd_keeps_copies_unless_checkpointing_drops_them(title, checkpointing, planned):
    """`planned` is what `plan` says in GB of 1,024 pixels."""
    facts = full_sizes.stored()[title][full_sizes.FP8]
    plan = Plan("adamw", "attention", planned_sizes.RANK, 1, 1, (Pictures(1024),), 2, checkpointing, True)
    assert 0.96 < estimate(facts, plan).total / GB / planned < 1.15


def test_a_small_model_of_a_planned_family_has_the_formula():
    facts = full_sizes.stored()["Flux.1 dev"][full_sizes.BF16]
    small = type(facts)(**{**vars(facts), "parameters": facts.parameters // 4})
    assert share_of(facts, "attention", False) and share_of(small, "attention", False) is None
    assert share_of(facts, "all", False) is None
