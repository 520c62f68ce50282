"""Settings from a file at each epoch, against a run that was given them by hand at the same step: the same bytes. Also
after a run broke off, and with files that cannot be used.
"""

import contextlib
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from graft_nodes.training.data.dataset import Conditioning
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.run import call as runs
from graft_nodes.training.run.epoch_settings import FIELDS, EpochSettings, find_values, report
from graft_nodes.training.run.loop import Callbacks, train
from graft_nodes.training.settings import StepSettings
from graft_nodes.training.state import change_settings, equal
from graft_nodes.training.store import saved_states
from graft_nodes.training.store.store import Store

SAMPLE = Path(__file__).parents[1] / "data" / "samples" / "everydream2_train.json"
EPOCH = 4  # steps: 16 pictures, 4 in a batch


class Bench:
    """A run whose file of settings is written between its steps."""

    def __init__(self, lab, folder):
        self.lab, self.denoiser, self.dataset = lab, lab.Flow(), lab.pictures(17, held_out=[16])
        self.path, self.store = folder / "run" / "train.json", Store(folder, "run")
        begun = lab.state(self.denoiser, self.dataset)
        self.state = replace(begun, settings=replace(begun.settings, from_file=True))
        self.said, self.before = [], {}  # what to write after a step, by step

    @contextlib.contextmanager
    def open(self):
        yield self.denoiser

    def write(self, content):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        self.path.write_text(text, encoding="utf-8")

    def settings(self, **given):
        given = {"fit": with_other_captions, "count_clip_skip": int, "check": lambda settings: None, **given}
        return EpochSettings(self.path, Fraction(EPOCH), StepSettings(), say=self.said.append, **given)

    def run(self, steps, state=None, fail_after=None, **given):
        own = self.settings(**given)

        def stepped(step, result, validation):
            if step in self.before:
                self.write(self.before[step])
            if step == fail_after:
                raise KeyboardInterrupt

        callbacks = Callbacks(epoch_settings=own, on_step=stepped, validate_every=3, snapshot_every=3)
        return runs.run(state or self.state, steps, self.open, self.dataset, self.store, callbacks, "best")

    def by_hand(self, *pieces):
        """A plain run of (steps, settings of the objective, of the optimizer, CLIP skip) one after the other."""
        state = self.lab.state(self.denoiser, self.dataset)
        dataset = self.dataset
        for steps, objective, optimizer, skip in pieces:
            now = state.settings
            state = change_settings(state, replace(now.optimizer, **optimizer), replace(now.objective, **objective))
            if skip is not None:
                dataset = with_other_captions(dataset, skip)
            state = train(state, self.denoiser, dataset, steps, Callbacks(validate_every=3))
        return state


def with_other_captions(dataset, skip):
    """A dataset as its captions would be encoded at a CLIP skip."""
    known = dataset.conditionings
    moved = {text: Conditioning(known[text].context + 0.3 * skip) for text in known}
    return replace(dataset, conditionings=moved, clip_skip=skip)


def same_bytes(left, right):
    for group in ("trained", "optimizer", "average"):
        a, b = getattr(left, group), getattr(right, group)
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert left.history.loss == right.history.loss and left.history.rate == right.history.rate
    assert left.history.validation == right.history.validation and left.history.outdated == right.history.outdated


@pytest.fixture
def bench(lab, tmp_path):
    return Bench(lab, tmp_path)


def test_values_count_from_the_next_epoch_on_as_if_given_by_hand(bench):
    bench.before = {2: {"cond_dropout": 0.5, "lr": 0.002}, 5: {"zero_frequency_noise_ratio": 0.2, "clip_skip": 2}}
    result = bench.run(11).state
    first = {"conditioning_dropout": 0.5}, {"learning_rate": 0.002}
    expected = bench.by_hand((4, {}, {}, None), (4, *first, None), (3, {**first[0], "offset_noise": 0.2}, first[1], 2))
    same_bytes(result, expected)
    assert result.taken == (
        (4, {"learning_rate": 0.002, "conditioning_dropout": 0.5}),
        (8, {"offset_noise": 0.2, "clip_skip": 2}),
    )
    assert not torch.equal(
        result.trained["blocks.0.ff.lora_up.weight"],
        bench.run(11, bench.lab.state(bench.denoiser, bench.dataset)).state.trained["blocks.0.ff.lora_up.weight"],
    )


def test_values_count_before_the_first_step_too(bench):
    bench.write({"clip_grad_norm": 0.01, "pyramid_noise_discount": 0.3})
    result = bench.run(3).state
    same_bytes(result, bench.by_hand((3, {"pyramid_noise": 0.3}, {"clip_norm": 0.01}, None)))


@pytest.mark.parametrize("fail_after", range(1, 11))
def test_a_run_that_broke_off_goes_on_to_the_same_bytes(bench, tmp_path, fail_after):
    bench.before = {2: {"cond_dropout": 0.5}, 6: {"cond_dropout": 0.5, "clip_skip": 1}}
    with pytest.raises(KeyboardInterrupt):
        bench.run(11, fail_after=fail_after)
    result = bench.run(11).state
    moved = {"conditioning_dropout": 0.5}
    same_bytes(result, bench.by_hand((4, {}, {}, None), (4, moved, {}, None), (3, moved, {}, 1)))
    again = bench.run(11)
    assert again.trained == 0 and equal(again.state, result) and again.state.taken == result.taken
    assert again.state.settings == result.settings
    assert report(again.state, 0) == [
        "from step 5 on, by train.json: conditioning dropout 0.5",
        "from step 9 on, by train.json: CLIP skip 1",
    ]


def test_what_was_taken_stays_though_the_file_is_another_now(bench):
    bench.write({"cond_dropout": 0.5})
    with pytest.raises(KeyboardInterrupt):
        bench.run(11, fail_after=6)
    bench.write({"cond_dropout": 0.9})
    result = bench.run(11).state
    expected = (8, {"conditioning_dropout": 0.5}, {}, None), (3, {"conditioning_dropout": 0.9}, {}, None)
    same_bytes(result, bench.by_hand(*expected))


def test_more_steps_and_a_further_call_go_on_from_what_was_taken(bench):
    bench.write({"cond_dropout": 0.5})
    half = bench.run(6).state
    bench.write({"cond_dropout": 0.1})
    whole = bench.run(11)
    assert whole.trained == 5
    expected = (8, {"conditioning_dropout": 0.5}, {}, None), (3, {"conditioning_dropout": 0.1}, {}, None)
    same_bytes(whole.state, bench.by_hand(*expected))
    same_bytes(bench.run(5, half).state, whole.state)


def test_a_run_that_reads_no_file_does_not_take_the_states_of_one_that_does(bench):
    bench.write({"cond_dropout": 0.5})
    bench.run(6)
    plain = replace(bench.state, settings=replace(bench.state.settings, from_file=False))
    outcome = runs.run(plain, 6, bench.open, bench.dataset, bench.store, Callbacks(validate_every=3))
    assert outcome.trained == 6 and outcome.state.taken == ()


def test_a_saved_state_has_what_was_taken(bench, tmp_path):
    bench.write({"cond_dropout": 0.5, "clip_skip": 2})
    state = bench.run(5).state
    saved_states.save(state, tmp_path / "states", "one")
    loaded = saved_states.load(tmp_path / "states", "one", "model", bench.dataset.digest)
    assert loaded.taken == state.taken and loaded.settings.clip_skip == 2
    assert loaded.settings.objective.conditioning_dropout == 0.5


BAD = [
    ("{", "is not JSON"),
    ("[1]", "is not a table of settings"),
    ({"cond_dropout": 4}, "conditioning dropout is 4, expected from 0.0 to 1.0"),
    ({"cond_dropout": "much"}, "conditioning dropout is 'much', expected a number"),
    ({"lr": True}, "learning rate is True"),
    ({"lr": float("nan")}, "learning rate is nan"),
    ({"zero_frequency_noise_ratio": -1}, "zero_frequency_noise_ratio -1 is zero terminal SNR"),
    ({"clip_skip": 1.5}, "CLIP skip is 1.5, expected a whole number from 0 to 24"),
    ({"save_every_n_epochs": -1}, "keep a state every N epochs is -1"),
    ({"cond_dropout": 0.5, "lr": -1}, "learning rate is -1"),
]


@pytest.mark.parametrize(("content", "said"), BAD)
def test_a_file_that_cannot_be_used_changes_nothing_and_is_named_once(bench, content, said):
    bench.write(content)
    outcome = bench.run(9)
    same_bytes(outcome.state, bench.by_hand((9, {}, {}, None)))
    assert outcome.state.taken == () and len(bench.said) == 1
    assert said in bench.said[0] and str(bench.path) in bench.said[0]
    assert any(said in note for note in outcome.notes)


def test_values_that_do_not_suit_the_model_are_refused_together(bench):
    def check(settings):
        if settings.objective.weighting != "none":
            raise ValueError("no signal-to-noise ratio")

    bench.write({"min_snr_gamma": 5, "cond_dropout": 0.5})
    outcome = bench.run(5, check=check)
    assert outcome.state.taken == () and "no signal-to-noise ratio" in bench.said[0]


def test_captions_that_cannot_be_encoded_anew_are_named(bench):
    def fit(dataset, skip):
        raise ValueError("captions that came encoded")

    bench.write({"clip_skip": 2})
    outcome = bench.run(5, fit=fit)
    assert outcome.state.taken == () and "captions that came encoded" in "".join(outcome.notes)


def test_the_last_good_values_stay_until_the_file_is_right_again(bench):
    bench.before = {2: {"cond_dropout": 0.5}, 6: "{", 9: {"cond_dropout": 0.2}}
    moved = [(4, {}), (8, {"conditioning_dropout": 0.5}), (2, {"conditioning_dropout": 0.2})]
    same_bytes(bench.run(14).state, bench.by_hand(*[(steps, own, {}, None) for steps, own in moved]))


def test_null_leaves_a_setting_and_switches_min_snr_off():
    assert find_values({"lr": None, "cond_dropout": 0}, "none") == {"conditioning_dropout": 0}
    assert find_values({"min_snr_gamma": 5}, "none") == {"gamma": 5, "weighting": "min-snr"}
    for off in (None, 0):
        assert find_values({"min_snr_gamma": off}, "min-snr") == {"weighting": "none"}
        assert find_values({"min_snr_gamma": off}, "debiased") == {}


def test_which_states_stay_changes_with_the_file(bench):
    bench.before = {2: {"save_every_n_epochs": 1, "save_ckpts_from_n_epochs": 2}}
    own = bench.settings()
    state, _ = own.take(bench.state, bench.dataset)
    assert state is bench.state and own.step_settings == StepSettings()
    bench.write(bench.before[2])
    state, _ = own.take(replace(bench.state, step=4, position=((bench.state.settings.digest, 4),)), bench.dataset)
    assert (own.step_settings.keep_epochs, own.step_settings.keep_from) == (1, 2)
    assert state.settings == bench.state.settings


def test_everydream2s_own_file_works_as_it_is(bench):
    bench.write(SAMPLE.read_text(encoding="utf-8"))
    own = bench.settings()
    state, _ = own.take(bench.state, bench.dataset)
    assert dict(state.taken[0][1]) == {
        "conditioning_dropout": 0.04,
        "offset_noise": 0.02,
        "pyramid_noise": 0.03,
        "weighting": "min-snr",
        "keep_epochs": 20,
    }
    assert ObjectiveSettings().gamma == 5.0  # so it is not a change
    [ignored] = [note for note in own.notes if "not taken" in note]
    content = json.loads(SAMPLE.read_text(encoding="utf-8"))
    always = {"save_full_precision", "save_optimizer"}
    assert all((repr(key) in ignored) == (key not in FIELDS and key not in always) for key in content)


def test_every_epoch_of_a_run_is_asked_and_no_other_step(bench):
    own = bench.settings()
    assert [step for step in range(13) if own.begins_epoch(step)] == [0, 4, 8, 12]
    odd = EpochSettings(bench.path, Fraction(5, 2), StepSettings(), None, None, None)
    assert [step for step in range(11) if odd.begins_epoch(step)] == [0, 3, 5, 8, 10]
