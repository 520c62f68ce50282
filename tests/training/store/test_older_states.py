"""States that version 0.1.0 stored open, and go on with the bytes that the same run has today."""

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from graft_nodes.ema.decay import EMASettings
from graft_nodes.storage.digest import sha256_of_file
from graft_nodes.storage.safetensors import load_safetensors
from graft_nodes.tests.training.conftest import Lab
from graft_nodes.training.averages import snapshots
from graft_nodes.training.run.loop import Callbacks, train
from graft_nodes.training.state import Start, advance_position, begin, equal, state_key
from graft_nodes.training.store import listing, saved_states, store
from graft_nodes.training.trainable.install import AdapterSettings

STORED = Path(__file__).parent / "stored_by_0_1_0"  # file names with __ for every /
KEY = "5fcb4ec30f8bd0f3cc038a2f3ff1b74b"  # of the run's state at step 4, as version 0.1.0 named it
STEPS = 4
GROUPS = ("trained", "optimizer", "average", "powers")  # of a state's tensors


@dataclass
class Run:
    """The run whose state was stored, as it is begun today, and a folder with the files of before."""

    folder: Path
    denoiser: object = field(default_factory=Lab.Flow)
    dataset: object = field(default_factory=lambda: Lab.pictures(held_out=[9]))

    @property
    def start(self):
        adapter = AdapterSettings(targets="all", rank=1, pattern="blocks.0.ff")
        settings = Lab.state(self.denoiser, self.dataset, adapter, ema=False, optimizer="sgd").settings
        ema = EMASettings("ramp", snapshots=2, widths=(0.1, 0.2))
        return begin(self.denoiser.module, Start("model", self.dataset.digest, adapter, ema, 3), settings)

    def train(self, state, steps):
        return train(state, self.denoiser, self.dataset, steps)

    def as_if_trained_here(self, stored):
        """The state that the run reaches today, with the stored tensors: processors differ in the last bit."""
        here = self.train(self.start, STEPS)
        ours, theirs = store.group_tensors(here), store.group_tensors(stored)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(tensor, ours[name], rtol=1e-4, atol=1e-8)
        return replace(here, **{group: getattr(stored, group) for group in GROUPS})


@pytest.fixture
def run(tmp_path):
    for path in STORED.iterdir():
        target = tmp_path / "stored" / path.name.replace("__", "/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return Run(tmp_path / "stored")


def test_the_run_has_the_key_of_before(run):
    position = advance_position((), run.start.settings.digest, STEPS)
    assert state_key(run.start.start.digest, position)[:32] == KEY
    assert {state["key"][:32] for state in listing.states(run.folder, "run")} == {KEY}


def test_a_stored_state_opens_and_goes_on_with_equal_bytes(run):
    found, problems = store.Store(run.folder, "run").furthest(run.start, STEPS)
    assert not problems and not found.partial and found.state.step == STEPS
    stored, _ = load_safetensors(str(found.folder / "state.safetensors"))
    assert stored and stored.keys() == store.group_tensors(found.state).keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in store.group_tensors(found.state).items())
    assert equal(run.train(found.state, 2), run.train(run.as_if_trained_here(found.state), 2))


def test_a_stored_state_goes_on_that_trains_a_layer_which_is_left_out_today(run):
    """Once, layers of a model were chosen that nothing reads."""
    name = next(iter(run.start.trained))
    today = replace(run.start, trained={key: t for key, t in run.start.trained.items() if key != name})
    found, problems = store.Store(run.folder, "run").furthest(today, STEPS)
    assert not problems and list(found.state.trained) == list(run.start.trained)
    assert equal(run.train(found.state, 2), run.train(run.as_if_trained_here(found.state), 2))
    more = replace(run.start, trained={**run.start.trained, "new.lora_up.weight": run.start.trained[name]})
    found, problems = store.Store(run.folder, "run").furthest(more, STEPS)
    assert found is None and "it trains other tensors than this run" in str(problems)


def test_a_stored_state_goes_on_with_the_loss_of_its_average(run):
    """Version 0.1.0 measured the weights alone: from here on the best is the average's, and older losses stay."""
    found, _ = store.Store(run.folder, "run").furthest(run.start, STEPS)
    before = found.state.history
    assert before.validation and not before.average_validation
    assert before.best == min(before.validation, key=lambda row: row[1])
    after = train(found.state, run.denoiser, run.dataset, 4, Callbacks(validate_every=2))
    assert after.history.validation[: len(before.validation)] == before.validation
    assert [step for step, _ in after.history.average_validation] == [6, 8]
    assert after.history.best == min(after.history.average_validation, key=lambda row: row[1])
    assert equal(after, run.train(found.state, 4))


def test_a_saved_state_opens_and_is_saved_with_the_bytes_of_before(run, tmp_path):
    loaded = saved_states.load(run.folder, "saved", "model", run.dataset.digest)
    found, _ = store.Store(run.folder, "run").furthest(run.start, STEPS)
    assert equal(loaded, found.state) and loaded.history == found.state.history
    assert equal(run.train(loaded, 2), run.train(found.state, 2))
    again = saved_states.save(loaded, tmp_path, "again", 60, {"torch": "1"})
    before = json.loads((run.folder / "saved" / "state.json").read_bytes())
    assert json.loads((again / "state.json").read_bytes())["tensors"] == before["tensors"]
    for name, expected in before["tensors"]["files"].items():
        assert sha256_of_file(again / name) == expected


def test_a_result_is_stored_with_the_bytes_of_before(run, tmp_path):
    found, _ = store.Store(run.folder, "run").furthest(run.start, STEPS)
    again = store.Store(tmp_path, "run", found.versions).save(found.state)
    assert (again / "state.safetensors").read_bytes() == (found.folder / "state.safetensors").read_bytes()


def test_snapshots_of_averages_open(run):
    kept = snapshots.found(run.folder / "run")
    assert [(snapshot.profile.step, snapshot.width) for snapshot in kept] == [(2, 0.1), (2, 0.2), (4, 0.1), (4, 0.2)]
    for snapshot in kept:
        assert all(tensor.dtype == torch.float32 for tensor in snapshots.read(snapshot).values())
