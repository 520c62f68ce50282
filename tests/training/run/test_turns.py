"""Both experts of a pair in one run: the bytes are those of runs of their own, however often they take turns, and a
stop, an error or a kill of one keeps what both have.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import pytest
from graft_nodes.ema.decay import EMASettings
from graft_nodes.training.expert_pair import ExpertPair, single
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.run import call as runs
from graft_nodes.training.run.loop import Callbacks
from graft_nodes.training.run.turns import train_in_turn
from graft_nodes.training.state import begin, equal
from graft_nodes.training.store.store import Store

EXPERTS = ("high noise", "low noise")
BOUNDARY = 0.6


class Pair:
    """Two flow models, each watched: who is loaded when, and which noise levels it gets."""

    def __init__(self, lab, folder):
        self.lab, self.folder, self.dataset = lab, folder, lab.pictures(held_out=[8, 9])
        self.loaded, self.levels, self.now = [], {name: [] for name in EXPERTS}, []
        self.states = []
        for name in EXPERTS:
            plain = lab.state(
                self.model(name), self.dataset, objective=ObjectiveSettings(expert=name, boundary=BOUNDARY)
            )
            start = replace(plain.start, model=name, ema=EMASettings("ramp", snapshots=4))
            self.states.append(begin(self.model(name).module, start, plain.settings, name.replace(" ", "_")))

    def model(self, name):
        levels = self.levels

        class Watched(self.lab.Flow):
            def denoise(self, x, sigma, conditionings, options):
                levels[name] += sigma.tolist()
                return super().denoise(x, sigma, conditionings, options)

        model = Watched()
        for p in model.module.parameters():
            p.data.mul_(1.0 if name == EXPERTS[0] else 0.7)
        return model

    @contextmanager
    def opened(self, name):
        assert not self.now, "two models are on the device"
        self.now.append(name)
        self.loaded.append(name)
        try:
            yield self.model(name)
        finally:
            self.now.remove(name)

    def store(self, name, state):
        return Store(self.folder / name, state.run)

    def calls(self, stack, steps, states=None, kept=True, keep="best", on_step=None, stop=None, **settings):
        calls = []
        for name, state in zip(EXPERTS, states or self.states, strict=True):
            step = partial(told, on_step, name) if on_step else None
            callbacks = Callbacks(on_step=step, should_stop=stop, validate_every=2, **settings)
            store = self.store("pair", state) if kept else None
            opened = partial(self.opened, name)
            calls.append(runs.open_call(stack, state, steps, opened, self.dataset, store, callbacks, keep))
        return calls

    def trained(self, steps, every, preview=None, preview_every=0, **settings):
        with ExitStack() as stack:
            outcomes = train_in_turn(self.calls(stack, steps, **settings), every, preview, preview_every)
        return outcomes

    def alone(self, steps):
        """Each expert in a run of its own."""
        found = []
        for name, state in zip(EXPERTS, self.states, strict=True):
            callbacks = Callbacks(validate_every=2)
            found.append(
                runs.run(
                    state, steps, partial(self.opened, name), self.dataset, self.store("alone", state), callbacks
                ).state
            )
        return found


def told(on_step, name, step, result, loss):
    on_step(name, step)


@pytest.fixture
def pair(lab, tmp_path):
    return Pair(lab, tmp_path)


def same(outcomes, states):
    pairs = zip(outcomes, states, strict=True)
    return all(equal(o.state, s) and o.state.history == s.history for o, s in pairs)


@pytest.mark.parametrize(("every", "kept"), [(0, True), (1, True), (3, True), (3, False), (50, True)])
def test_in_turn_gives_the_bytes_of_runs_of_their_own(pair, every, kept):
    alone = pair.alone(7)
    pair.loaded.clear()
    pair.levels.update({name: [] for name in EXPERTS})
    outcomes = pair.trained(7, every, kept=kept)
    assert same(outcomes, alone)
    assert not equal(outcomes[0].state, outcomes[1].state)
    turns = -(-7 // every) if every else 1
    assert pair.loaded == [*EXPERTS] * turns
    assert all(level >= BOUNDARY for level in pair.levels[EXPERTS[0]])
    assert all(level < BOUNDARY for level in pair.levels[EXPERTS[1]])
    assert all(len(levels) > 28 for levels in pair.levels.values())
    if kept:
        pair.loaded.clear()
        assert same(pair.trained(7, every), alone) and not pair.loaded, "stored results are taken"
        assert same(pair.trained(3, 2, states=[o.state for o in pair.trained(4, 2)]), alone), "4 + 3 steps are 7"


def test_a_stop_ends_both_and_the_same_call_goes_on(pair):
    alone, seen = pair.alone(8), []
    outcomes = pair.trained(8, 3, on_step=lambda name, step: seen.append((name, step)), stop=lambda: len(seen) >= 10)
    assert [o.state.step for o in outcomes] == [6, 5] and seen[-1] == (EXPERTS[1], 5)
    assert "stopped at step 5 as asked, 3 steps early" in " ".join(outcomes[1].notes)
    assert same(pair.trained(8, 2), alone)
    seen.clear()
    turn = pair.trained(11, 2, on_step=lambda name, step: seen.append((name, step)), stop=lambda: len(seen) >= 1)
    assert [o.state.step for o in turn] == [10, 8], "also when it is asked at the end of a turn"


@pytest.mark.parametrize("at", [("high noise", 5), ("low noise", 3), ("low noise", 6)])
def test_an_error_in_one_keeps_what_both_have(pair, at):
    alone, seen = pair.alone(8), []

    def failing(name, step):
        seen.append((name, step))
        if (name, step) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair.trained(8, 2, on_step=failing)
    trained = {name: max(step for one, step in seen if one == name) for name in EXPERTS}
    again = []
    assert same(pair.trained(8, 2, on_step=lambda name, step: again.append((name, step))), alone)
    assert {name: min(step for one, step in again if one == name) - 1 for name in EXPERTS} == trained


def test_snapshots_come_as_often_as_in_a_run_of_its_own(pair):
    """After a kill nothing is told: only what was saved until then counts."""
    seen = []
    calls = {}

    def saved(name, step):
        seen.append((name, step))
        folder = pair.store("pair", pair.states[EXPERTS.index(name)]).folder
        calls[name, step] = sorted(path.name for path in folder.glob("*/partial/state-*.safetensors"))

    pair.trained(8, 3, on_step=saved, snapshot_every=3, keep="last")
    for name in EXPERTS:
        assert calls[name, 3] == [] and calls[name, 4] == calls[name, 5] == ["state-00000003.safetensors"]
        assert calls[name, 7] == ["state-00000006.safetensors"]


def test_previews_come_when_both_are_at_the_step_and_none_is_loaded(pair):
    shown = []

    def preview(states, step):
        assert not pair.now
        shown.append((step, [state.step for state in states]))

    pair.trained(7, 4, preview, 3)
    assert shown == [(3, [3, 3]), (6, [6, 6])]
    assert pair.loaded == [*EXPERTS] * 4  # up to 3, 4, 6 and 7
    shown.clear()
    pair.trained(9, 0, preview, 3)
    assert shown == [(9, [9, 9])], "those of stored steps were shown already"


def test_a_node_for_one_state_says_what_to_do_with_a_pair(pair):
    assert single(pair.states[0], "EMA Merge") is pair.states[0]
    with pytest.raises(ValueError, match=r"^EMA Merge: .* pair of experts\. Put Split Expert Pair in front"):
        single(ExpertPair(*pair.states), "EMA Merge")
