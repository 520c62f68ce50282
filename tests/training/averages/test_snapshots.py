"""Averages of a run: snapshots of two widths, any width from them, switching, host memory; equal bytes however the
steps are cut.
"""

import json
import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from graft_nodes.ema import host_offload, shadow
from graft_nodes.ema.decay import EMASettings
from graft_nodes.ema.post_hoc import reconstruct
from graft_nodes.patches.lora_files.average import average
from graft_nodes.storage.float16 import SCALE_PREFIX, from_float16, to_float16
from graft_nodes.storage.safetensors import load_safetensors
from graft_nodes.training.averages import snapshots
from graft_nodes.training.optimizers.stepper import OptimizerStepper
from graft_nodes.training.run.call import run
from graft_nodes.training.run.loop import Callbacks, train
from graft_nodes.training.state import Settings, begin, equal
from graft_nodes.training.store.store import Store
from graft_nodes.training.trainable.settings import AdapterSettings

LORA, FULL = AdapterSettings(targets="all", rank=2), AdapterSettings("full", targets="attention")


def begun(lab, denoiser, dataset, ema, adapter=LORA, **optimizer):
    state = lab.state(denoiser, dataset, adapter, **optimizer)
    return begin(denoiser.module, replace(state.start, ema=ema), state.settings)


def go(state, steps, denoiser, dataset, store, stepped=None, every=0):
    return run(
        state, steps, lambda: nullcontext(denoiser), dataset, store, Callbacks(stepped, snapshot_every=every)
    ).state


def files(store):
    return {path.name: path.read_bytes() for path in (store.folder / snapshots.FOLDER).glob("*")}


@pytest.mark.parametrize("adapter", [LORA, FULL], ids=["lora", "full"])
def test_two_calls_are_one_with_snapshots_and_switches(lab, tmp_path, adapter):
    denoiser, dataset = lab.Flow(), lab.pictures()
    start = begun(lab, denoiser, dataset, EMASettings("ramp", snapshots=5, switch_every=4), adapter)
    one, two = Store(tmp_path / "one", "run"), Store(tmp_path / "two", "run")
    whole = go(start, 20, denoiser, dataset, one)
    parts = go(go(start, 7, denoiser, dataset, two), 13, denoiser, dataset, two)
    assert equal(whole, parts) and files(one) == files(two) and len(files(one)) == 2 * 4
    assert [s.profile.step for s in snapshots.expected_snapshots(whole, one.folder)] == [5, 5, 10, 10, 15, 15, 20, 20]
    assert sorted(s.path.name for s in snapshots.expected_snapshots(whole, one.folder)) == sorted(files(one))


@pytest.mark.parametrize("adapter", [LORA, FULL], ids=["lora", "full"])
def test_a_snapshot_is_the_average_that_the_power_schedule_keeps(lab, tmp_path, adapter):
    denoiser, dataset = lab.Flow(), lab.pictures()
    store = Store(tmp_path, "run")
    state = go(begun(lab, denoiser, dataset, EMASettings("ramp", snapshots=8), adapter), 16, denoiser, dataset, store)
    for stored in snapshots.expected_snapshots(state, store.folder):
        alone = begun(lab, denoiser, dataset, EMASettings("power", widths=(stored.width,)), adapter)
        live = train(alone, denoiser, dataset, stored.profile.step).lora_model(ema=True)
        kept = snapshots.read(stored)
        assert kept.keys() == live.keys()
        for name in live:
            torch.testing.assert_close(kept[name], live[name], rtol=2**-11, atol=1e-7)


def test_any_width_afterwards_is_the_average_that_would_have_run_along(lab, tmp_path):
    denoiser, dataset = lab.Flow(), lab.pictures()
    store, width = Store(tmp_path, "run"), 0.075
    state = go(
        begun(lab, denoiser, dataset, EMASettings("ramp", snapshots=3), schedule="constant"),
        30,
        denoiser,
        dataset,
        store,
    )
    kept = snapshots.expected_snapshots(state, store.folder)
    found = reconstruct([one.profile for one in kept], width)
    got = average(
        [snapshots.read(one) for one in kept], found.weights, [str(n) for n in range(len(kept))], "factors"
    ).state
    alone = begun(lab, denoiser, dataset, EMASettings("power", widths=(width,)), schedule="constant")
    live, last = train(alone, denoiser, dataset, 30).lora_model(ema=True), state.lora_model()
    apart = sum(float((got[n] - live[n]).square().sum()) for n in live if not n.endswith(".alpha")) ** 0.5
    moved = sum(float((last[n] - live[n]).square().sum()) for n in live if not n.endswith(".alpha")) ** 0.5
    assert apart < 0.15 * moved  # 30 steps are coarse; the profile itself is missed by under 5%
    assert all(torch.equal(got[n], live[n]) for n in live if n.endswith(".alpha"))


def test_switching_sets_the_weights_to_the_average(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    state = begun(lab, denoiser, dataset, EMASettings("constant", 0.5, switch_every=3))
    third, fourth = train(state, denoiser, dataset, 3), train(state, denoiser, dataset, 4)
    assert all(torch.equal(third.trained[name], third.average[name]) for name in third.trained)
    assert not all(torch.equal(fourth.trained[name], fourth.average[name]) for name in fourth.trained)
    plain = train(begun(lab, denoiser, dataset, EMASettings("constant", 0.5)), denoiser, dataset, 3)
    assert not equal(plain, third) and all(
        torch.equal(plain.average[name], third.average[name]) for name in plain.average
    )


def test_an_average_on_a_thread_trains_the_same_bytes(lab, monkeypatch, tmp_path):
    """Host memory as on a device without pinning (the CPU has no need of it)."""
    denoiser, dataset = lab.Flow(), lab.pictures()
    settings = EMASettings("ramp", snapshots=4, switch_every=6, device="host")
    plain = go(begun(lab, denoiser, dataset, settings), 14, denoiser, dataset, Store(tmp_path / "a", "run"))
    lanes = []

    def lane(weights, device):
        lanes.append(host_offload.PlainLane(weights, device))
        return lanes[-1]

    monkeypatch.setattr(shadow, "open_lane", lane)
    threaded = go(begun(lab, denoiser, dataset, settings), 14, denoiser, dataset, Store(tmp_path / "b", "run"))
    assert len(lanes) == 3 and equal(plain, threaded)
    assert files(Store(tmp_path / "a", "run")) == files(Store(tmp_path / "b", "run"))


class LatestLane(host_offload.PlainLane):
    """A lane whose copies land as late as they may: only when someone waits for the average. `reads` says whether the
    device may still read the weights.
    """

    def __init__(self, weights, device):
        super().__init__(weights, device)
        self.may_land, self.reads = threading.Event(), False

    def fetch(self, weights):
        super().fetch(weights)
        self.may_land.clear()
        self.reads = True

    def protect(self):
        self.reads = False

    def wait(self):
        assert self.may_land.wait(10), "nobody waited for the average"


def test_averages_are_waited_for_and_weights_change_only_when_nothing_reads_them(lab, monkeypatch):
    """The average of the run and both power averages, at every place that needs them."""
    denoiser, dataset = lab.Flow(), lab.pictures()
    start = begun(lab, denoiser, dataset, EMASettings("ramp", snapshots=4, switch_every=6, device="host"))

    def trained():
        states, averages = [], []

        def save_average(position, width, lora):
            averages.append((width, lora()))

        callbacks = Callbacks(save_snapshot=states.append, snapshot_every=5, save_average=save_average)
        last = train(start, denoiser, dataset, 14, callbacks)
        return [*states, last], averages

    plain, lanes, changes, offloads = trained(), [], [], []
    finish, switch, step = host_offload.Offload.finish, shadow.Shadow.switch_, OptimizerStepper.step_

    def lane(weights, device):
        lanes.append(LatestLane(weights, device))
        return lanes[-1]

    def finish_(self):
        offloads.append(self)  # a thread whose executor is gone ends by itself
        self.lane.may_land.set()
        finish(self)
        self.lane.reads = False

    def switch_(self, weights):  # waits for its own average
        changes.append(("switch", [lane.reads for lane in lanes if lane is not self.offload.lane]))
        switch(self, weights)

    def step_(self):
        changes.append(("step", [lane.reads for lane in lanes]))
        step(self)

    monkeypatch.setattr(shadow, "open_lane", lane)
    monkeypatch.setattr(host_offload.Offload, "finish", finish_)
    monkeypatch.setattr(shadow.Shadow, "switch_", switch_)
    monkeypatch.setattr(OptimizerStepper, "step_", step_)
    late = trained()
    assert len(plain[0]) == 3 and all(equal(*states) for states in zip(plain[0], late[0], strict=True))
    for (width, lora), (late_width, late_lora) in zip(plain[1], late[1], strict=True):
        assert width == late_width and all(torch.equal(late_lora[name], lora[name]) for name in lora)
    assert changes.count(("step", [False] * 3)) == 14 and changes.count(("switch", [False] * 2)) == 2
    assert len(changes) == 16 and len(plain[1]) == 6
    assert offloads and not [thread for thread in threading.enumerate() if thread.name.startswith("graft-average")]


def test_a_killed_run_goes_on_with_the_same_snapshots(lab, tmp_path):
    denoiser, dataset = lab.Flow(), lab.pictures()
    start = begun(lab, denoiser, dataset, EMASettings("ramp", snapshots=3))
    one, two = Store(tmp_path / "one", "run"), Store(tmp_path / "two", "run")
    whole = go(start, 12, denoiser, dataset, one)

    class Stop(Exception):
        pass

    def stepped(step, moved, validation):
        if step == 6:
            for path in (two.folder / snapshots.FOLDER).glob("*"):  # killed before the snapshots of this step were kept
                if snapshots.json.loads(load_safetensors(str(path))[1]["graft_position"])[0][1] == 6:
                    path.unlink()
            raise Stop

    with pytest.raises(Stop):
        go(start, 12, denoiser, dataset, two, stepped)
    resumed = go(start, 12, denoiser, dataset, two)
    assert equal(whole, resumed) and files(one) == files(two)


def test_a_full_disk_leaves_no_half_snapshot(lab, tmp_path, monkeypatch):
    denoiser, dataset = lab.Flow(), lab.pictures()
    store = Store(tmp_path, "run")

    def full(path, tensors, metadata):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshots, "write_safetensors", full)
    with pytest.raises(OSError, match="No space"):
        go(begun(lab, denoiser, dataset, EMASettings("ramp", snapshots=3)), 6, denoiser, dataset, store)
    assert files(store) == {}


def test_damaged_and_missing_snapshots_are_named(lab, tmp_path):
    denoiser, dataset = lab.Flow(), lab.pictures()
    store = Store(tmp_path, "run")
    state = go(begun(lab, denoiser, dataset, EMASettings("ramp", snapshots=5)), 10, denoiser, dataset, store)
    first, second, third, fourth = snapshots.expected_snapshots(state, store.folder)
    assert snapshots.find_snapshots(store.folder) == [first, second, third, fourth]
    content = bytearray(first.path.read_bytes())
    content[-5] ^= 1
    first.path.write_bytes(content)
    with pytest.raises(ValueError, match="hash is not the recorded one"):
        snapshots.read(first)
    second.path.write_bytes(third.path.read_bytes())
    with pytest.raises(ValueError, match="not the snapshot that its name says"):
        snapshots.read(second)
    third.path.unlink()
    with pytest.raises(ValueError, match=r"missing: the snapshot of step 10, width 0\.05"):
        snapshots.read(third)
    fourth.path.write_bytes(fourth.path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="whole safetensors"):
        snapshots.read(fourth)


def test_a_bit_that_flips_anywhere_in_a_snapshot_is_found_or_changes_no_tensor(lab, tmp_path):
    denoiser, dataset = lab.Flow(), lab.pictures()
    store = Store(tmp_path, "run")
    state = go(begun(lab, denoiser, dataset, EMASettings("ramp", snapshots=5)), 5, denoiser, dataset, store)
    snapshot = snapshots.expected_snapshots(state, store.folder)[0]
    kept, whole, refused = snapshots.read(snapshot), snapshot.path.read_bytes(), 0
    places = range(0, len(whole), len(whole) // 200)
    for number, place in enumerate(places):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << number % 8
        snapshot.path.write_bytes(damaged)
        try:
            found = snapshots.read(snapshot)
        except ValueError as error:
            assert snapshot.path.name in str(error)
            refused += 1
        else:
            assert found.keys() == kept.keys() and all(torch.equal(found[name], kept[name]) for name in kept), place
    assert refused > len(places) / 2


def test_branches_of_a_run_are_told_apart(lab, tmp_path):
    denoiser, dataset = lab.Flow(), lab.pictures()
    store = Store(tmp_path, "run")
    start = begun(lab, denoiser, dataset, EMASettings("ramp", snapshots=5))
    trunk = go(start, 10, denoiser, dataset, store)
    slower = replace(
        trunk, settings=Settings(replace(trunk.settings.optimizer, learning_rate=1e-3), trunk.settings.objective)
    )
    ends = [go(trunk, 5, denoiser, dataset, store), go(slower, 10, denoiser, dataset, store)]
    ways = snapshots.branches(snapshots.find_snapshots(store.folder))
    assert set(ways) == {end.key for end in ends}
    for end in ends:
        assert sorted(ways[end.key], key=lambda s: s.path) == sorted(
            snapshots.expected_snapshots(end, store.folder), key=lambda s: s.path
        )


def test_metadata_orders_and_identifies(lab, tmp_path):
    denoiser, dataset = lab.Flow(), lab.pictures()
    store = Store(tmp_path, "run")
    state = go(begun(lab, denoiser, dataset, EMASettings("ramp", snapshots=5)), 5, denoiser, dataset, store)
    metadata = load_safetensors(str(snapshots.expected_snapshots(state, store.folder)[0].path))[1]
    assert (
        metadata["ss_steps"] == "5"
        and metadata["graft_run"] == state.start.digest
        and metadata["graft_state"] == state.key
    )
    assert json.loads(metadata["graft_position"]) == [[state.settings.digest, 5]]
    assert not any(word in name for name in metadata for word in ("date", "time", "session"))


def test_half_precision_keeps_what_float16_cannot_hold():
    draw = torch.Generator().manual_seed(0)
    plain = torch.randn(1000, generator=draw)
    tensors = {"usual": plain, "small": plain * 1e-7, "large": plain * 1e8, "zero": torch.zeros(4)}
    tensors |= {"alpha": torch.tensor(3.3), "n": torch.arange(3)}
    kept = to_float16(tensors)
    assert {name for name in kept if name.startswith(SCALE_PREFIX)} == {SCALE_PREFIX + "small", SCALE_PREFIX + "large"}
    assert all(kept[name].dtype == torch.float16 for name in ("usual", "small", "large"))
    back = from_float16(kept)
    assert back.keys() == tensors.keys()
    for name in tensors:
        scale = float(tensors[name].abs().max()) or 1.0
        torch.testing.assert_close(back[name] / scale, tensors[name] / scale, rtol=2**-11, atol=1e-7)
    assert float((back["small"] - tensors["small"].half().float()).abs().max()) > 0  # plain float16 would have lost it


def test_settings_that_cannot_be(lab):
    for wrong, says in (
        ({"decay": 1.0}, "decay is 1.0"),
        ({"decay": -0.1}, "decay"),
        ({"target": 0.0}, "start share at the end is"),
        ({"target": 1.0}, "start share at the end is"),
        ({"snapshots": -1}, "snapshot every N steps"),
        ({"switch_every": -1}, "reset to average every N steps"),
        ({"snapshots": 5, "widths": (0.05,)}, "two or more"),
        ({"snapshots": 5, "widths": (0.05, 0.05)}, "two or more"),
        ({"snapshots": 5, "interval": 2}, "multiples of update every N steps"),
        ({"switch_every": 5, "interval": 10}, "multiples of update every N steps"),
    ):
        with pytest.raises(ValueError, match=says):
            EMASettings(**wrong)
    denoiser, dataset = lab.Flow(), lab.pictures()
    for late in ({"interval": 31}, {"snapshots": 31}, {"switch_every": 31}):
        with pytest.raises(ValueError, match="longer than the run"):
            begun(lab, denoiser, dataset, EMASettings("ramp", **late), total_steps=30)
