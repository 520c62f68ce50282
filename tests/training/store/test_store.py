"""States on disk: the same bytes back, damage noticed, a full disk leaving nothing, a killed run going on."""

import contextlib
import errno
import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from graft_nodes.ema.decay import EMASettings
from graft_nodes.storage.bounded_read import read_bounded
from graft_nodes.storage.digest import sha256_of_json
from graft_nodes.training.data.conditionings import Conditionings
from graft_nodes.training.data.dataset import Conditioning
from graft_nodes.training.data.tags import Caption, CaptionRules
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.reports.text import beginning
from graft_nodes.training.run import call as runs
from graft_nodes.training.run.loop import Callbacks, Stopped, train
from graft_nodes.training.run.validation import HeldOut
from graft_nodes.training.state import advance_position, change_settings, equal, state_key
from graft_nodes.training.store import listing
from graft_nodes.training.store.store import (
    Damaged,
    DiskUse,
    NewerFormat,
    Store,
    group_tensors,
    load,
    read_record,
    remove,
    restore,
)


class Bench:
    """A store in a folder, a model that counts how often it is opened, and a run to repeat."""

    def __init__(self, lab, folder):
        self.lab, self.folder = lab, folder
        self.denoiser, self.dataset, self.opened = lab.Flow(), lab.pictures(held_out=[9]), 0
        self.state = lab.state(self.denoiser, self.dataset)
        self.store = Store(folder, "run", {"torch": "1"})

    @contextlib.contextmanager
    def open(self):
        self.opened += 1
        yield self.denoiser

    def run(self, steps, state=None, keep="last", **settings):
        settings = {"validate_every": 2, "snapshot_every": 3, **settings}
        return runs.run(state or self.state, steps, self.open, self.dataset, self.store, Callbacks(**settings), keep)

    def files(self):
        return sorted(
            os.path.relpath(os.path.join(at, name), self.folder)
            for at, _, names in os.walk(self.folder)
            for name in names
        )


@pytest.fixture
def bench(lab, tmp_path):
    return Bench(lab, tmp_path)


def test_a_state_comes_back_as_it_was(bench):
    state = train(bench.state, bench.denoiser, bench.dataset, 4, Callbacks(validate_every=2))
    again, versions = load(bench.store.save(state), bench.state)
    assert equal(state, again) and again.history == state.history and again.position == state.position
    assert versions == {"torch": "1"}


def test_equal_states_are_equal_files(bench, tmp_path):
    state = train(bench.state, bench.denoiser, bench.dataset, 2)
    folders = [Store(tmp_path / name, "run", {}).save(state) for name in "ab"]
    for name in ("state.safetensors", "state.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_a_result_is_used_again_and_the_model_stays_closed(bench):
    first = bench.run(7)
    assert bench.opened == 1 and first.trained == 7
    second = bench.run(7)
    assert bench.opened == 1 and second.trained == 0 and equal(first.state, second.state)
    assert "stored result of step 7: nothing was trained" in second.notes
    assert bench.files() == [f"run/{first.state.key[:32]}/state.json", f"run/{first.state.key[:32]}/state.safetensors"]


def test_asking_for_more_goes_on_from_the_furthest_and_for_fewer_finds_it(bench):
    five, nine = bench.run(5), bench.run(9)
    assert nine.trained == 4 and "stored result of step 5: went on from there" in nine.notes
    assert equal(nine.state, train(bench.state, bench.denoiser, bench.dataset, 9))
    assert equal(bench.run(5).state, five.state) and bench.opened == 2
    assert bench.run(4, five.state).trained == 0  # 5 + 4 is 9
    assert bench.run(3).trained == 3


def test_other_settings_in_the_middle_are_another_position(bench):
    five = bench.run(5)
    other = change_settings(five.state, OptimizerSettings(learning_rate=1e-3, batch_size=2), None)
    changed = bench.run(4, other)
    assert changed.trained == 4 and not equal(changed.state, bench.run(9).state)
    assert bench.run(4, other).trained == 0


def test_steps_that_do_not_end_with_their_schedule_are_said_before_the_first_one(bench):
    said = []

    def opened():
        assert said, "the model is opened only after it was said"
        return bench.open()

    def run(steps, state):
        said.clear()
        notes = runs.run(state, steps, opened, bench.dataset, None, Callbacks(), say=said.append).notes
        assert said and set(said) <= set(notes)
        return " ".join(said)

    state = bench.lab.state(bench.denoiser, bench.dataset, learning_rate=1e-3)  # cosine over 30
    text = run(10, state)
    assert "(cosine) is planned for 30 steps and these end at step 10, at learning rate 0.000" in text
    assert "set total steps (schedule) to 10, or to 0 for the steps asked for" in text
    text = run(35, state)
    assert "5 of these 35 steps come after the 30 of the schedule (cosine), at learning rate 0: set total" in text


@pytest.mark.parametrize(("total_steps", "said"), [(0, True), (30, False)])
def test_an_average_that_hardly_moves_in_the_steps_asked_for_is_said(bench, total_steps, said):
    """Where total steps are open: with a number, Start Training says it of the whole run, of which these are a part."""
    state = bench.lab.state(bench.denoiser, bench.dataset, total_steps=total_steps, schedule="constant")
    state = replace(state, start=replace(state.start, ema=EMASettings(decay=0.999)))
    notes = runs.run(state, 10, bench.open, bench.dataset, None, Callbacks()).notes
    assert any(note.startswith("after 10 steps the average still has 99% of the starting") for note in notes) == said


@pytest.mark.parametrize(("schedule", "steps"), [("cosine", 30), ("constant", 4)])
def test_nothing_is_said_of_a_schedule_that_ends_with_its_steps(bench, schedule, steps):
    state, said = bench.lab.state(bench.denoiser, bench.dataset, schedule=schedule), []
    assert not runs.run(state, steps, bench.open, bench.dataset, None, Callbacks(), say=said.append).notes and not said


def test_without_total_steps_a_schedule_ends_with_the_steps_asked_for(bench):
    start = bench.lab.state(bench.denoiser, bench.dataset, total_steps=0)
    six = bench.run(6, start)
    planned = bench.lab.state(bench.denoiser, bench.dataset, total_steps=6)
    assert equal(six.state, bench.run(6, planned).state) and bench.opened == 1 and not six.notes
    assert 0.0 < six.state.history.rate[-1] < six.state.history.rate[-2] < six.state.history.rate[-3]
    ten = bench.run(4, six.state)  # a later call plans anew
    assert ten.trained == 4 and ten.state.history.rate[6] > six.state.history.rate[-1]
    assert bench.run(4, six.state).trained == 0


@pytest.mark.parametrize("schedule", ["linear", "cosine", "cosine-restarts", "polynomial"])
def test_a_schedule_that_is_planned_anew_in_a_chain_is_said_before_the_first_step(bench, schedule):
    """Four and four steps with an open schedule are not the eight of one: it falls to its end twice."""
    start, said = bench.lab.state(bench.denoiser, bench.dataset, total_steps=0, warmup=0, schedule=schedule), []
    report = beginning(start, bench.dataset, ())
    assert f"the schedule ({schedule}) falls to its end in each Train Step" in report
    first = bench.run(4, start)
    assert not first.notes

    def opened():
        assert said, "the model is opened only after it was said"
        return bench.open()

    second = runs.run(first.state, 4, opened, bench.dataset, None, Callbacks(), say=said.append)
    assert said == [note for note in second.notes if "planned anew" in note]
    before, after = second.state.history.rate[3:5]
    assert f"step 4 had learning rate {before:g}, and step 5 has {after:g}" in said[0] and after >= before
    assert "set total steps (schedule) to 8" in said[0]
    planned = bench.lab.state(bench.denoiser, bench.dataset, total_steps=8, warmup=0, schedule=schedule)
    assert "in each Train Step" not in beginning(planned, bench.dataset, ())
    parts = bench.run(4, bench.run(4, planned).state)
    assert equal(parts.state, bench.run(8, planned).state) and not any("anew" in note for note in parts.notes)


def test_an_open_schedule_that_never_falls_has_nothing_to_say(bench):
    start = bench.lab.state(bench.denoiser, bench.dataset, total_steps=0, warmup=0, schedule="constant")
    assert "in each Train Step" not in beginning(start, bench.dataset, ())
    assert not bench.run(4, bench.run(4, start).state).notes


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"optimizer": "adamw", "warmup": 5}, "begin at step 7, so it is over: step 7 has learning rate 0.001"),
        ({"warmup": 5}, "begin at step 7, so it is over: step 7 has learning rate 0.001"),
        ({"warmup": 10}, "begin at step 7, so only 4 of them are left: step 7 has learning rate 0.0007"),
        ({"warmup": 0}, None),
    ],
)
def test_a_warmup_that_is_over_when_its_settings_begin_is_said_before_the_first_step(bench, changed, said):
    settings = {"optimizer": "sgd", "schedule": "constant", "learning_rate": 1e-3, "warmup": 0}
    start = bench.lab.state(bench.denoiser, bench.dataset, **settings)
    other = OptimizerSettings(**{**settings, "batch_size": 4, **changed})
    later, heard = change_settings(bench.run(6, start).state, other, None), []
    notes = runs.run(later, 6, bench.open, bench.dataset, None, Callbacks(), say=heard.append).notes
    found = [note for note in notes if "warmup" in note]
    assert found == heard and (said in found[0] if said else not found)


def test_a_warmup_that_the_steps_before_have_made_is_not_said_to_be_over(bench):
    start = bench.lab.state(bench.denoiser, bench.dataset, schedule="constant", warmup=3)
    six = bench.run(6, start)
    assert not bench.run(6, six.state).notes
    other = change_settings(six.state, None, ObjectiveSettings(loss="huber"))
    assert not bench.run(6, other).notes


def test_a_schedule_without_length_is_refused_where_nothing_planned_it(bench):
    with pytest.raises(
        ValueError, match=r"total steps \(schedule\) is 0, so the length of learning rate schedule cosine is open"
    ):
        train(bench.lab.state(bench.denoiser, bench.dataset, total_steps=0), bench.denoiser, bench.dataset, 5)


def test_other_versions_are_said(bench):
    bench.run(2)
    bench.store = Store(bench.folder, "run", {"torch": "2"})
    assert "it was made with torch 1, now 2" in bench.run(2).notes


@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_a_broken_off_run_goes_on_from_what_was_kept(bench, how):
    expected = train(bench.state, bench.denoiser, bench.dataset, 9, Callbacks(validate_every=2))

    class Broken(BaseException):
        pass

    def stepped(step, moved, validation):
        if step == 5:
            raise Broken

    if how == "killed":  # nothing after the snapshot is written, as if the process were gone
        save = bench.store.save_partial
        bench.store.save_partial = lambda state, target: None if state.step == 5 else save(state, target)
    with pytest.raises(Broken):
        bench.run(9, on_step=stepped)
    bench.store = Store(bench.folder, "run", {"torch": "1"})
    again = bench.run(9)
    at = 5 if how == "interrupted" else 3
    assert again.trained == 9 - at and f"went on from the snapshot at step {at}" in again.notes
    assert equal(again.state, expected) and again.state.history == expected.history
    assert not [name for name in bench.files() if "partial" in name]


def test_another_target_uses_the_snapshot_too(bench):
    def stepped(step, moved, validation):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(20, on_step=stepped)
    assert bench.run(7).trained == 2
    assert not [name for name in bench.files() if "partial" in name]


def test_a_diverged_run_says_where_its_last_good_state_is(bench):
    bench.denoiser.fail_at = 8
    with pytest.raises(Stopped, match=r"is kept.*It is stored in .*partial") as caught:
        bench.run(9, validate_every=0)
    assert caught.value.state.step == 7
    assert bench.run(7, validate_every=0).trained == 0


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6, 7, 8])
def test_a_full_disk_leaves_nothing_half_written(bench, monkeypatch, call, number):  # noqa: C901  (the failing calls are functions inside)
    expected = train(bench.state, bench.denoiser, bench.dataset, 8, Callbacks(validate_every=2))
    counts = {"write": 0, "fsync": 0, "replace": 0}

    def failing(name, real, *args, **kwargs):
        counts[name] += 1
        if name == call and counts[name] == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    real_open = open

    def opening(path, mode="r", *args, **kwargs):
        file = real_open(path, mode, *args, **kwargs)
        if "w" in mode and str(path).startswith(str(bench.folder)):
            file = Writing(file, partial(failing, "write", file.write))
        return file

    class Writing:
        def __init__(self, file, write):
            self.file, self.write = file, write

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

    monkeypatch.setattr("builtins.open", opening)
    monkeypatch.setattr(os, "fsync", partial(failing, "fsync", os.fsync))
    monkeypatch.setattr(os, "replace", partial(failing, "replace", os.replace))
    try:
        outcome = bench.run(8)
    except OSError as error:
        assert error.errno == errno.ENOSPC
    else:
        assert counts[call] < number and equal(outcome.state, expected)
    monkeypatch.undo()
    assert not [name for name in bench.files() if name.endswith(".partial")]
    for at, _, names in os.walk(bench.folder):
        if "state.json" in names:  # whatever is there can be read
            load(type(bench.folder)(at), bench.state)
        else:
            assert not names
    assert equal(bench.run(8).state, expected)


@pytest.mark.parametrize("what", ["cut", "bit", "json", "pickle", "elsewhere"])
def test_damage_is_named_and_not_used(bench, what):
    folder = bench.run(3).folder
    tensors, record = folder / "state.safetensors", folder / "state.json"
    if what == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-7])
    elif what == "bit":
        content = bytearray(tensors.read_bytes())
        content[-1] ^= 1
        tensors.write_bytes(content)
    elif what == "json":
        record.write_text(record.read_text().replace('"step": 3', '"step": 4'))
    elif what == "pickle":
        torch.save({}, tensors)
    else:
        body = json.loads(record.read_text())
        body["tensors"]["file"] = "../../x.safetensors"
        record.write_text(json.dumps(body))
    with pytest.raises(Damaged, match=r"state\.(safetensors|json)"):
        load(folder, bench.state)
    again = bench.run(3)
    assert again.trained == 3 and any(note.startswith("not used: ") for note in again.notes)


@pytest.mark.parametrize("file", ["state.safetensors", "state.json"])
def test_a_bit_that_flips_anywhere_in_a_state_is_found_or_changes_nothing(bench, file):
    folder = bench.run(3).folder
    path = folder / file
    kept, whole, refused = load(folder, bench.state), path.read_bytes(), 0
    places = range(0, len(whole), max(1, len(whole) // 200))
    for number, place in enumerate(places):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << number % 8
        path.write_bytes(damaged)
        try:
            found = load(folder, bench.state)
        except Damaged:
            refused += 1
        else:
            assert equal(found, kept) and found.history == kept.history, place
    assert refused > len(places) / 2


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\\b", "C:x", " x", "x.", "a\0b", "日" * 90, "a\ud800"])
def test_a_run_is_a_plain_folder_name(tmp_path, name):
    with pytest.raises(ValueError, match="plain folder name"):
        Store(tmp_path, name)


def _kinds(bench):
    """Step and kind of every state that is kept as more than a snapshot on the way."""
    records = [json.loads(path.read_bytes()) for path in bench.store.folder.glob("*/state.json")]
    return sorted((record["step"], record["kind"]) for record in records)


def test_the_best_state_is_kept_and_is_the_one_of_its_step(bench):
    outcome = bench.run(12, keep="best")
    history = outcome.state.history
    step, loss = min(history.average_validation, key=lambda row: row[1])
    assert history.best == (step, loss) and 0 < step <= 12
    kinds = _kinds(bench)
    if step == 12:
        assert kinds == [(12, "result")] and outcome.best == outcome.folder
    else:
        assert kinds == [(step, "best"), (12, "result")] and outcome.best is not None
    again, _ = load(outcome.best, bench.state)
    assert equal(again, train(bench.state, bench.denoiser, bench.dataset, step, Callbacks(validate_every=2)))
    assert outcome.used.states == len(kinds) and outcome.used.run == sum(
        (bench.folder / name).stat().st_size for name in bench.files()
    )
    assert bench.run(step).trained == 0 and (step, "result") in _kinds(bench)  # asked for, it is a result and stays


def _measure(monkeypatch, losses):
    """Validations that measure these losses of the average, and others of the weights: the last of them is the best."""
    pairs = iter([value for number, loss in enumerate(losses) for value in (10.0 - number, loss)])
    monkeypatch.setattr("graft_nodes.training.run.validation.validate", lambda work: HeldOut(next(pairs)))


def test_a_better_state_takes_the_place_of_the_best_before(bench, monkeypatch):
    _measure(monkeypatch, [9.0, 5.0, 6.0, 4.0, 7.0, 8.0])
    outcome = bench.run(10, keep="best")
    assert _kinds(bench) == [(6, "best"), (10, "result")] and outcome.state.history.best == (6, 4.0)
    assert not [name for name in bench.files() if "partial" in name]


@pytest.mark.parametrize("steps", [6, 10])
def test_what_is_stored_on_a_disk_that_can_only_be_read_is_given(bench, monkeypatch, steps):
    _measure(monkeypatch, [9.0, 5.0, 6.0, 4.0, 7.0, 8.0])
    bench.run(10, keep="best")
    bench.store.save(train(bench.state, bench.denoiser, bench.dataset, 2), "best")  # what a killed run left
    kinds = [(2, "best"), (6, "best"), (10, "result")]

    def read_only(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", read_only)
        patch.setattr("graft_nodes.training.store.store.write_whole", read_only)
        outcome = bench.run(steps)
    assert outcome.trained == 0 and outcome.state.step == steps and _kinds(bench) == kinds


def test_a_step_never_removes_the_best_of_the_step_before(bench, monkeypatch):
    _measure(monkeypatch, [9.0, 5.0, 6.0, 4.0, 7.0])
    first = bench.run(4, keep="best")
    bench.run(4, first.state, keep="best")
    assert _kinds(bench) == [(2, "best"), (4, "result"), (6, "best"), (8, "result")]


def test_a_removal_that_breaks_off_leaves_no_record_of_what_is_gone(bench, monkeypatch):
    """At every file in turn: tensors without a record are swept up, a record without its tensors would be damage."""
    whole = bench.run(3).folder
    count, unlink = len(list(whole.iterdir())), Path.unlink
    assert count > 1
    for left in range(count + 1):
        folder = bench.folder / f"copy {left}"
        shutil.copytree(whole, folder)
        gone = []

        def dying(path, left=left, gone=gone, **options):
            if path.exists() and len(gone) == left:
                raise KeyboardInterrupt
            if path.exists():
                gone.append(path.name)
            unlink(path, **options)

        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr(Path, "unlink", dying)
            remove(folder)
        assert len(gone) == left and gone[:1] in ([], ["state.json"])
        assert folder.exists() == (left < count)


def test_every_snapshot_can_be_kept(bench):
    outcome = bench.run(8, keep="every", validate_every=0)
    assert _kinds(bench) == [(3, "snapshot"), (6, "snapshot"), (8, "result")]
    bench.store = Store(bench.folder, "run", {"torch": "1"})
    assert bench.run(7, validate_every=0).trained == 1 and bench.run(8, validate_every=0).folder == outcome.folder


def test_two_rules_at_once_overwrite_some_and_keep_others(bench):
    """Every 2 steps one that is overwritten, every 5 steps one that stays: until the end, and after an interruption."""

    def fail(step, *_):
        if step == 9:
            raise KeyboardInterrupt

    settings = {"validate_every": 0, "snapshot_every": 2, "is_kept": lambda step: step % 5 == 0}
    with pytest.raises(KeyboardInterrupt):
        bench.run(12, on_step=fail, **settings)
    assert _kinds(bench) == [(5, "snapshot")]
    outcome = bench.run(12, **settings)
    assert outcome.trained == 3 and _kinds(bench) == [(5, "snapshot"), (10, "snapshot"), (12, "result")]
    assert equal(outcome.state, train(bench.state, bench.denoiser, bench.dataset, 12))


def test_a_snapshot_that_was_the_best_first_is_kept_among_every(bench, monkeypatch):
    _measure(monkeypatch, [9.0, 5.0, 4.0, 6.0, 7.0])
    bench.run(8, keep="every", validate_every=2, snapshot_every=2)
    assert _kinds(bench) == [(2, "snapshot"), (4, "snapshot"), (6, "snapshot"), (8, "result")]


def test_some_states_are_kept_for_good_and_others_take_the_place_of_the_one_before(bench, monkeypatch):
    """LunNova's two rules at once, and the best by a measure beside them."""
    _measure(monkeypatch, [9.0, 5.0, 4.0, 6.0, 7.0, 8.0])
    partial, seen = bench.store.save_partial, []
    monkeypatch.setattr(
        bench.store, "save_partial", lambda state, target: seen.append(state.step) or partial(state, target)
    )
    bench.run(11, keep="best", validate_every=2, snapshot_every=2, keep_every=5)
    assert _kinds(bench) == [(4, "best"), (5, "snapshot"), (10, "snapshot"), (11, "result")] and seen == [2, 4, 6, 8]


LASTING = ["best", "snapshot", "result"]  # the least first


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("second", LASTING)
@pytest.mark.parametrize("first", LASTING)
def test_of_two_roles_of_a_state_the_lasting_one_counts(bench, first, second, damaged):
    folder = bench.store.save(bench.state, first)
    if damaged:
        (folder / "state.safetensors").write_bytes(b"")
    assert bench.store.save(bench.state, second) == folder
    assert read_record(folder)["kind"] == max(first, second, key=LASTING.index)
    assert equal(load(folder, bench.state)[0], bench.state)


@pytest.mark.parametrize("snapshot_every", [0, 2])
def test_of_snapshots_by_minutes_every_keeps_the_newest_alone(bench, monkeypatch, snapshot_every):
    minutes = iter(range(1000))
    monkeypatch.setattr("graft_nodes.training.run.loop.time.monotonic", lambda: next(minutes) * 60.0)

    def fail(step, *_):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(8, keep="every", validate_every=0, snapshot_every=snapshot_every, snapshot_minutes=1.0, on_step=fail)
    assert _kinds(bench) == [(step, "snapshot") for step in range(2, 5, 2) if snapshot_every]
    (on_the_way,) = bench.store.folder.glob("*/partial/state.json")
    assert read_record(on_the_way.parent)["step"] == 5


@pytest.mark.parametrize("kind", ["result", "best"])
def test_what_is_saved_again_is_read_once(bench, monkeypatch, kind):
    bench.store.save(bench.state)
    reads = []

    def counted(path, most):
        reads.append(path.name)
        return read_bounded(path, most)

    monkeypatch.setattr("graft_nodes.training.store.store.read_bounded", counted)
    folder = bench.store.save(bench.state, kind)
    assert reads == ["state.json"] and read_record(folder)["kind"] == "result"


@pytest.mark.parametrize("kept", ["best", "every"])
def test_a_damaged_state_is_written_again(bench, kept):
    bench.run(8, keep=kept)
    kinds = _kinds(bench)
    whole = {path: path.read_bytes() for path in bench.store.folder.glob("*/state.safetensors")}
    for path, content in whole.items():
        path.write_bytes(content[:-4] + b"\1\2\3\4")
    outcome = bench.run(8, keep=kept)
    assert outcome.trained == 8 and _kinds(bench) == kinds
    assert {path: path.read_bytes() for path in bench.store.folder.glob("*/state.safetensors")} == whole


def test_what_runs_take_of_the_disk_is_counted(bench):
    bench.run(8, keep="every", validate_every=0)
    Store(bench.folder, "other", {}).save(bench.state)
    (bench.folder / "run" / "notes.txt").write_text("mine")
    sizes = {name: os.path.getsize(bench.folder / name) for name in bench.files()}
    run = sum(size for name, size in sizes.items() if name.startswith("run/"))
    assert bench.store.measure_disk() == DiskUse(3, run, sum(sizes.values()), bench.store.limit)


def test_a_snapshot_comes_after_so_many_minutes(bench, monkeypatch):
    clock = iter(range(0, 100000, 20))  # seconds
    monkeypatch.setattr("graft_nodes.training.run.loop.time.monotonic", lambda: next(clock))
    kept = []
    save = bench.store.save_partial
    bench.store.save_partial = lambda state, target: kept.append(state.step) or save(state, target)
    bench.run(10, snapshot_every=0, snapshot_minutes=1.0)
    assert kept == [3, 6, 9][: len(kept)] and len(kept) >= 2


def test_asked_to_stop_it_ends_with_the_state_so_far(bench):
    asked = iter([False, False, False, True])
    outcome = bench.run(9, should_stop=lambda: next(asked))
    assert outcome.state.step == 4 and outcome.trained == 4
    assert "stopped at step 4 as asked, 5 steps early; the state so far is passed on" in outcome.notes
    assert equal(outcome.state, train(bench.state, bench.denoiser, bench.dataset, 4))
    again = bench.run(9)
    assert again.trained == 5 and equal(again.state, train(bench.state, bench.denoiser, bench.dataset, 9))


def test_what_a_step_led_to_is_shown_where_it_was_stopped(bench):
    before = bench.run(3).state
    goal = state_key(before.start.digest, advance_position(before.position, before.settings.digest, 6))
    stopped = bench.run(6, before, should_stop=iter([False, True]).__next__).state
    assert stopped.step == 5 and stopped.key != goal
    assert listing.describe_state(bench.folder, "run", goal, until=9)["key"] == stopped.key
    for key, until in ((goal, 0), (goal, 8), (goal, 10), ("0" * 64, 9)):
        with pytest.raises(FileNotFoundError, match="no stored state"):
            listing.describe_state(bench.folder, "run", key, until)
    whole = bench.run(6, before).state
    assert whole.key == goal and listing.describe_state(bench.folder, "run", goal, until=9)["step"] == 9


def test_a_long_history_lies_in_blocks_and_comes_back(bench, monkeypatch):
    monkeypatch.setattr("graft_nodes.training.store.store.BLOCK", 4)
    sizes = []
    save = bench.store.save_partial

    def saving(state, target):
        sizes.append(len((save(state, target) / "state.json").read_bytes()))

    bench.store.save_partial = saving
    outcome = bench.run(23, validate_every=1, snapshot_every=2)
    again, _ = load(outcome.folder, bench.state)
    assert (
        again.history == outcome.state.history and len(again.history.loss) == 23 and len(again.history.validation) == 24
    )
    assert len(again.history.average_validation) == 24
    blocks = [name for name in bench.files() if "history" in name]
    assert len(blocks) == 5
    assert sizes[10] < sizes[0] + 5 * 85  # what grows is the name of a block now and then
    damaged = bench.folder / blocks[2]
    damaged.write_bytes(damaged.read_bytes()[:-3])
    with pytest.raises(Damaged, match=r"history.*its hash is not its name"):
        load(outcome.folder, bench.state)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_memory_that_runs_out_says_what_to_change_and_the_state_is_kept(bench, error):
    denoise, bench.denoiser.calls = bench.denoiser.denoise, 0

    def short(*arguments):
        if bench.denoiser.calls == 5:
            raise error
        return denoise(*arguments)

    bench.denoiser.denoise = short
    expected = r"Memory ran out at step 6.*after step 5 is kept.*gradient checkpointing on.*batch size.*resolution"
    with pytest.raises(Stopped, match=expected) as caught:
        bench.run(9, validate_every=0)
    assert caught.value.state.step == 5 and "partial" in str(caught.value)
    bench.denoiser.denoise = denoise
    again = bench.run(9, validate_every=0)
    assert again.trained == 4 and equal(again.state, train(bench.state, bench.denoiser, bench.dataset, 9))


@pytest.mark.parametrize("fused", [False, True])
def test_where_memory_runs_out_a_saving_is_taken_and_the_bytes_are_the_same(bench, fused):
    """Memory that is short until gradient checkpointing is on, at two steps of a run."""
    state = bench.state.with_optimizer(fused_backward=fused, clip_norm=0.0) if fused else bench.state
    expected = train(state, bench.denoiser, bench.dataset, 9)
    denoise, taken = bench.denoiser.denoise, []
    bench.denoiser.calls = 0

    def short(*arguments):
        if not taken and bench.denoiser.calls >= 5:
            raise MemoryError
        return denoise(*arguments)

    def note(now, words):
        taken.append((now.step, words, now.settings.optimizer.checkpointing))

    bench.denoiser.denoise = short
    outcome = bench.run(9, state, validate_every=0, save_memory=note)
    went_on = 3 if fused else 5  # a fused backward pass moves weights at once: from the last snapshot
    assert taken == [(went_on, "gradient checkpointing on", True)]
    assert equal(outcome.state, expected) and outcome.state.history == expected.history
    assert outcome.state.settings.optimizer.checkpointing and outcome.trained == 9
    assert any(
        note.endswith(f": gradient checkpointing on, and training went on from step {went_on}")
        for note in outcome.notes
    )


def test_memory_that_stays_short_ends_the_run_once_no_saving_is_left(bench):
    taken, denoise = [], bench.denoiser.denoise
    bench.denoiser.calls = 0

    def short(*arguments):
        if bench.denoiser.calls >= 5:
            raise MemoryError
        return denoise(*arguments)

    bench.denoiser.denoise = short
    with pytest.raises(Stopped, match="Memory ran out at step 6") as caught:
        bench.run(9, validate_every=0, save_memory=lambda state, words: taken.append(words))
    assert taken == ["gradient checkpointing on"] and caught.value.state.step == 5
    bench.denoiser.denoise = denoise
    assert bench.run(9, validate_every=0).trained == 4


def test_another_error_is_not_taken_for_want_of_memory(bench):
    def failing(*_):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    bench.denoiser.denoise = failing
    with pytest.raises(RuntimeError, match="shapes cannot"):
        bench.run(3, validate_every=0)


def test_no_steps_do_nothing(bench):
    assert bench.run(0).state is bench.state and bench.files() == [] and bench.opened == 0


def _rewritten(folder, **entries):
    """The state.json of a folder with other entries, and the hash that fits them; its path and bytes."""
    path = folder / "state.json"
    body = {**json.loads(path.read_text()), **entries}
    del body["sha256"]
    path.write_text(json.dumps({**body, "sha256": sha256_of_json(body)}))
    return path, path.read_bytes()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_record_that_is_no_json_is_damage(bench, content):
    folder = bench.run(2).folder
    (folder / "state.json").write_bytes(content)
    with pytest.raises(Damaged, match=r"state\.json: cannot be read as JSON"):
        load(folder, bench.state)


@pytest.mark.parametrize("kind", ["result", "partial"])
def test_a_folder_of_another_run_is_not_taken_for_this_one(bench, kind):
    other = bench.lab.state(bench.denoiser, bench.dataset, seed=4)
    trained = train(other, bench.denoiser, bench.dataset, 4)
    target = runs.target_key(bench.state, 4)
    expected = "it began from another seed"
    if kind == "result":
        folder = bench.store.save(trained)
        folder = folder.rename(bench.store.result_folder(target))
    else:
        folder = bench.store.save_partial(trained, target)
    with pytest.raises(Damaged, match=expected):
        load(folder, bench.state)
    outcome = bench.run(4)
    assert outcome.trained == 4 and equal(outcome.state, train(bench.state, bench.denoiser, bench.dataset, 4))
    if kind == "result":
        assert any(expected in note for note in outcome.notes)


def test_a_state_under_the_name_of_another_step_is_said(bench):
    three = bench.run(3)
    three.folder.rename(bench.store.result_folder(runs.target_key(bench.state, 5)))
    outcome = bench.run(5)
    assert outcome.trained == 5 and any("it is the state of step 3" in note for note in outcome.notes)


class Encoding(Conditionings):
    """Conditionings of captions that remember when they were encoded: after how many forwards."""

    def __init__(self, denoiser, texts):
        self.at = []

        def encode(texts):
            self.at += [denoiser.calls] * len(texts)
            return {text: Conditioning(torch.full((1, 1, 1), len(text) / 100)) for text in texts}

        super().__init__(encode, texts)
        self.at.clear()


def _varying(bench, **settings):
    """The bench with captions that are drawn anew in each step."""
    rules, images = CaptionRules(shuffle=1.0, dropout=0.5), []
    for number, image in enumerate(bench.dataset.images):
        caption = Caption(tags=tuple("abcdefgh"[: 3 + number % 6]), rules=rules)
        images.append(replace(image, caption=caption.plain, caption_template=caption))
    encoding = Encoding(bench.denoiser, [image.caption for image in images] + ["a", "b", ""])
    bench.dataset = replace(bench.dataset, images=tuple(images), conditionings=encoding, held_out=(), **settings)
    return encoding


def test_varying_captions_and_schedules_are_prepared_some_steps_at_a_time(bench, lab, tmp_path, monkeypatch):
    whole = _varying(bench)
    outcome = bench.run(8, keep="every", validate_every=0, snapshot_every=3)
    assert set(whole.at) == {0} and bench.opened == 1
    pieces = Bench(lab, tmp_path / "pieces")
    encoding = _varying(pieces, write_schedule=True)
    monkeypatch.setattr("graft_nodes.training.run.prepare.MOST_STEPS", 3)
    again = pieces.run(8, keep="every", validate_every=0, snapshot_every=3)
    assert equal(again.state, outcome.state) and again.state.history == outcome.state.history
    assert set(encoding.at) == {0, 3, 6} and len(encoding.at) >= len(whole.at) and pieces.opened == 3
    assert _kinds(pieces) == _kinds(bench) == [(3, "snapshot"), (6, "snapshot"), (8, "result")]
    files = sorted(path.name for path in pieces.store.folder.glob("schedule-*"))
    assert files == [f"schedule-{a:08d}-{b:08d}.txt" for a, b in ((1, 3), (4, 6), (7, 8))]
    assert all(any(name in note for note in again.notes) for name in files)


def test_an_interruption_while_captions_are_encoded_keeps_the_steps_before(bench, monkeypatch):
    encoding = _varying(bench)
    monkeypatch.setattr("graft_nodes.training.run.prepare.MOST_STEPS", 3)

    def raise_if_interrupted():
        if encoding.at and encoding.at[-1] == 3 and bench.denoiser.calls == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(8, validate_every=0, snapshot_every=0, raise_if_interrupted=raise_if_interrupted)
    assert bench.denoiser.calls == 3
    rest = bench.run(8, validate_every=0, snapshot_every=0)
    assert rest.trained == 5 and "went on from the snapshot at step 3" in rest.notes


def test_the_search_for_stored_states_does_not_grow_with_the_steps_asked_for(bench, monkeypatch):
    bench.run(3)
    counted = []

    def counting(*position):
        counted.append(position)
        return state_key(*position)

    monkeypatch.setattr("graft_nodes.training.store.store.state_key", counting)
    numbers = []
    for steps in (10, 10_000_000):
        found, problems = bench.store.furthest(bench.state, steps)
        assert found.state.step == 3 and not problems
        numbers.append(len(counted))
        counted.clear()
    assert numbers[0] == numbers[1] > 0


@pytest.mark.parametrize("group", ["average", "powers"])
def test_averages_of_tensors_that_are_not_trained_are_damage(bench, group):
    folder = bench.run(2).folder
    record, tensors = read_record(folder), group_tensors(load(folder, bench.state)[0])
    other = {"average": "average/other.weight", "powers": "powers/0.05/other.weight"}[group]
    with pytest.raises(Damaged, match="averages of other tensors than it trains"):
        restore(bench.state, record, {**tensors, other: torch.zeros(2)}, bench.state.history)


NEWER = {"format": 3, "versions": {"graft": "7.8.9"}, "of a later time": True}


def test_a_state_of_a_newer_format_is_refused_with_its_versions_and_kept(bench):
    path, written = _rewritten(bench.run(4).folder, **NEWER)
    tensors = (path.parent / "state.safetensors").read_bytes()
    for steps in (4, 6):  # that state itself, and one behind it
        with pytest.raises(NewerFormat, match=r"state\.json: Graft 7\.8\.9 wrote it in format 3, and this Graft reads"):
            bench.run(steps)
    with pytest.raises(NewerFormat, match="update Graft to use it, or give this run or state another name"):
        bench.store.save(train(bench.state, bench.denoiser, bench.dataset, 4))
    assert path.read_bytes() == written and (path.parent / "state.safetensors").read_bytes() == tensors
    assert listing.states(bench.folder, "run") == []
    assert bench.run(2).trained == 2  # the way to it is free
    bench.store = Store(bench.folder, "another", {})
    assert bench.run(4).trained == 4


def test_a_snapshot_of_a_newer_format_on_the_way_is_refused_and_kept(bench):
    def stop(step, *_):
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(6, on_step=stop)
    [partial] = bench.folder.rglob("partial/state.json")
    path, written = _rewritten(partial.parent, **NEWER)
    with pytest.raises(NewerFormat, match="in format 3"):
        bench.run(6)
    assert path.read_bytes() == written
    other = bench.run(5)  # another target does not touch it
    assert other.trained == 5 and any("in format 3" in note for note in other.notes) and path.read_bytes() == written


@pytest.mark.parametrize("seconds", [10**400, -(10**400), "1", True])
def test_a_number_that_no_computer_holds_is_damage(bench, seconds):
    folder = bench.run(2).folder
    _rewritten(folder, effort={"seconds": seconds, "memory": 0})
    with pytest.raises(Damaged, match="missing or of another form: effort"):
        load(folder, bench.state)
    _rewritten(folder, effort={"seconds": 1.0, "memory": 0}, history={"loss": [10**400], "rate": [], "norm": []})
    with pytest.raises(Damaged, match="missing or of another form: history"):
        load(folder, bench.state)
    assert bench.run(2).trained == 2


def put_something_else(path, make):
    path.unlink(missing_ok=True)
    make(path)
    if path.is_dir():
        (path / "own").write_text("kept")


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
@pytest.mark.parametrize("make", [os.mkdir, *([os.mkfifo] if hasattr(os, "mkfifo") else [])])
def test_a_folder_or_a_pipe_in_the_place_of_a_state_s_file_is_damage_and_trained_again(bench, name, make):
    first = bench.run(3)
    (path,) = bench.folder.rglob(name)
    put_something_else(path, make)
    with pytest.raises(Damaged, match="not a file"):
        load(path.parent, bench.state)
    second = bench.run(3)
    assert second.trained == 3 and equal(first.state, second.state)
    again, _ = load(path.parent, bench.state)
    assert equal(again, first.state)
    folders = [one for one in bench.folder.rglob("own") if one.read_text() == "kept"]
    assert len(folders) == (make is os.mkdir)
    for folder in folders:
        assert any(f"it is {folder.parent} now" in note for note in second.notes)


@pytest.mark.parametrize("name", ["state.json.partial", "state.safetensors.partial"])
def test_a_folder_in_the_place_of_a_draft_is_put_aside(bench, name):
    first = bench.run(3)
    (path,) = bench.folder.rglob("state.json")
    path.unlink()
    put_something_else(path.with_name(name), os.mkdir)
    assert equal(bench.run(3).state, first.state) and path.is_file()
    assert [one.read_text() for one in bench.folder.rglob("own")] == ["kept"]
