"""The reports of the training nodes, of states and outcomes that the nodes' own tests do not reach."""

from dataclasses import replace

import pytest
from graft_nodes.ema.decay import EMASettings
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.reports import text
from graft_nodes.training.run.call import Outcome
from graft_nodes.training.trainable.vae_parts import VaeSettings

NO_SNAPSHOTS = "so no snapshots of averages were kept either"


@pytest.mark.parametrize(
    ("ema", "said"), [(None, []), (EMASettings("ramp"), []), (EMASettings("ramp", snapshots=5), [NO_SNAPSHOTS])]
)
def test_what_cannot_be_hashed_is_neither_stored_nor_are_its_snapshots(lab, ema, said):
    state = lab.state(lab.Flow(), lab.pictures())
    state = replace(state, start=replace(state.start, ema=ema))
    report = text.step(state, Outcome(state, None, 0, 0.0), ("CLIP", "hooks"))
    _, _, end = report.partition("MODEL has the last weights (for the average use EMA Merge)\n")
    assert end.splitlines() == ["not stored, because these cannot be hashed: CLIP, hooks", *said]


@pytest.mark.parametrize("averaged", [False, True])
def test_a_vae_has_an_average_where_there_is_one(lab, averaged):
    state = lab.state(lab.Flow(), lab.pictures(), ema=averaged)
    state = replace(state, start=replace(state.start, task="vae", task_settings=VaeSettings()))
    report = text.step(state, Outcome(state, None, 0, 0.0), ())
    assert report.endswith("Trained VAE has the last weights" + averaged * " and the average")


@pytest.mark.parametrize(
    ("weighting", "terminal", "said"),
    [("min-snr", True, True), ("min-snr", False, False), ("none", True, False), ("debiased", True, False)],
)
def test_a_weighting_that_leaves_nothing_of_pure_noise_is_said(lab, weighting, terminal, said):
    """Min-SNR weighs the v loss by min(SNR, gamma) / (SNR + 1), and at the last level SNR is 4.9e-8."""
    objective = ObjectiveSettings(weighting=weighting, zero_terminal_snr=terminal)
    dataset = lab.pictures()
    state = lab.state(lab.Flow(), dataset, objective=objective)
    for report in (text.beginning(state, dataset, ()), text.step(state, Outcome(state, None, 0, 0.0), ())):
        lines = [line for line in report.splitlines() if line.startswith(f"loss weighting {weighting} counts")]
        assert len(lines) == said and all("pure noise, 5e-08 times" in line for line in lines)


def test_the_decay_that_reaches_a_start_share_is_said(lab):
    state = lab.state(lab.Flow(), lab.pictures(), total_steps=200)
    state = replace(state, start=replace(state.start, ema=EMASettings("target", target=0.1)))
    assert f"EMA: target, updated every step with decay {0.1 ** (1 / 200):.6g}" in text.beginning(
        state, lab.pictures(), ()
    )


def test_batches_that_are_not_full_are_counted(lab):
    """Groups of 4, 2, 2 and 5 images in batches of 6: a batch each, and none is filled."""
    dataset = lab.pictures(13)
    groups = [name for name, count in (("horses", 4), ("cows", 2), ("", 2), ("pigs", 5)) for _ in range(count)]
    images = tuple(replace(one, batch_id=group) for one, group in zip(dataset.images, groups, strict=True))
    dataset = replace(dataset, images=images)
    state = lab.state(lab.Flow(), dataset, batch_size=6)
    (said,) = [line for line in text.beginning(state, dataset, ()).splitlines() if "not full" in line]
    assert said.startswith("4 of 4 batches of an epoch are not full: ")
    for name, count in (("horses", 4), ("cows", 2), ("pigs", 5)):
        assert f"{count} of 6 (6x6, batch_id {name})" in said
    assert "2 of 6 (6x6), " in said
    for size, full in ((1, True), (2, False), (4, False)):
        report = text.beginning(lab.state(lab.Flow(), dataset, batch_size=size), dataset, ())
        assert ("not full" not in report) == full


def test_of_many_batches_that_are_not_full_some_are_named(lab):
    dataset = lab.pictures(9)
    images = tuple(replace(one, batch_id=str(number)) for number, one in enumerate(dataset.images))
    dataset = replace(dataset, images=images)
    report = text.beginning(lab.state(lab.Flow(), dataset, batch_size=2), dataset, ())
    assert "9 of 9 batches" in report and " and 4 more. None is filled" in report


@pytest.mark.parametrize(("accumulation", "ranks", "said"), [(1, 1, 0), (4, 1, 1), (4, 4, 0), (8, 4, 1)])
def test_accumulation_is_said_to_be_a_larger_batch_and_no_better(lab, accumulation, ranks, said):
    """The batches of several ranks are not an accumulation that somebody chose."""
    dataset = lab.pictures()
    state = lab.state(lab.Flow(), dataset, accumulation=accumulation)
    lines = text.beginning(state, dataset, (), ranks=ranks).splitlines()
    notes = [line for line in lines if line.startswith("gradient accumulation")]
    assert len(notes) == said and all(f"takes {accumulation // ranks} batches" in note for note in notes)


@pytest.mark.parametrize("precision", ["auto", "fp16", "bf16"])
def test_fp16_for_a_vae_is_warned_of(lab, precision):
    dataset = lab.pictures()
    state = lab.state(lab.Flow(), dataset, precision=precision)
    state = replace(state, start=replace(state.start, task="vae", task_settings=VaeSettings()))
    report = text.beginning(state, dataset, ())
    assert ("a VAE's loss may become NaN" in report) == (precision == "fp16")
