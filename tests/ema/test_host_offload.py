"""The average in host memory: with a device that copies late and only when told, nothing is read too early or written
too soon.
"""

import threading

import pytest
import torch
from graft_nodes.ema.decay import EMASettings
from graft_nodes.ema.host_offload import Offload, PlainLane, open_lane
from graft_nodes.ema.shadow import Shadow
from graft_nodes.ema.update import average_
from graft_nodes.patches.core.host_memory import has_streams

HALF = 0.5


class LateDevice:
    """A device with a queue of its own: work is only noted when it is given, and done in order when `run` or
    `run_until` says so.

    It is a Lane too: its copies are queued like everything else, and `wait` waits until the copy has run.
    """

    note = ""

    def __init__(self, weights):
        self.weights = weights
        self.staging = {name: torch.full_like(w, float("nan")) for name, w in weights.items()}
        self.main, self.side = [], []  # (what, wait for this event first, set this event after)
        self.copied, self.protected = None, 0
        self.asked = threading.Event()  # the averaging thread waits for a copy

    def give(self, change):
        """Queue a change of the weights on the main stream."""
        self.main.append((change, None))

    def fetch(self, weights):
        behind = len(self.main)
        self.copied = threading.Event()

        def copy(event=self.copied):
            for name, tensor in self.staging.items():
                tensor.copy_(weights[name])
            event.set()

        self.side.append((copy, behind))

    def protect(self):
        self.protected += 1
        self.main.append((None, self.copied))

    def wait(self):
        event = self.copied
        self.asked.set()
        assert event.wait(10), "the copy never ran"

    def run(self, eager):
        """Everything that is queued, in an order that streams allow: the main stream as far as it can when `eager`,
        else copies first.
        """
        done = 0
        while done < len(self.main) or self.side:
            ready = self.side and self.side[0][1] <= done
            if done < len(self.main):
                work, wait = self.main[done]
                blocked = wait is not None and not wait.is_set()
                if not blocked and (eager or not ready):
                    if work is not None:
                        work()
                    done += 1
                    continue
            assert ready, "the streams wait for each other"
            self.side.pop(0)[0]()
        self.main.clear()


def expected(start, values, decay=HALF):
    average = start
    for value in values:
        average = decay * average + (1 - decay) * value
    return average


def set_to(weights, value):
    return lambda: weights["w"].fill_(value)


@pytest.mark.parametrize("eager", [True, False])
def test_the_average_takes_in_what_the_step_left_however_late_the_copy_is(eager):
    weights, average = {"w": torch.zeros(4)}, {"w": torch.ones(4)}
    device = LateDevice(weights)
    offload = Offload(device)
    for step in (1.0, 2.0, 3.0):
        offload.protect()
        device.give(set_to(weights, step))
        runner = threading.Timer(0.05, device.run, [eager])
        taking = threading.Thread(target=offload.take, args=(average, weights, HALF))
        taking.start()  # waits for the lerp of the step before, which needs the device to run
        taking.join(10)
        offload.protect()
        device.give(set_to(weights, -100.0))  # the step after changes the weights before the copy has run
        runner.start()
        runner.join()
        offload.finish()
    assert torch.equal(average["w"], torch.full((4,), expected(1.0, [1.0, 2.0, 3.0])))
    assert torch.equal(weights["w"], torch.full((4,), -100.0))
    offload.close()


def test_without_protection_the_same_device_spoils_the_average():
    """The test above would see a missing wait: this one leaves it out."""
    weights, average = {"w": torch.zeros(4)}, {"w": torch.ones(4)}
    device = LateDevice(weights)
    offload = Offload(device)
    device.give(set_to(weights, 1.0))
    offload.take(average, weights, HALF)
    device.give(set_to(weights, -100.0))
    device.run(eager=True)
    offload.close()
    assert not torch.equal(average["w"], torch.full((4,), expected(1.0, [1.0])))


def test_the_staging_is_not_read_before_the_copy_and_a_step_is_not_held_up():
    weights, average = {"w": torch.full((4,), 3.0)}, {"w": torch.ones(4)}
    device = LateDevice(weights)
    offload = Offload(device)
    offload.take(average, weights, HALF)  # returns though the copy has not run
    assert device.asked.wait(10)
    assert torch.equal(average["w"], torch.ones(4)) and bool(device.staging["w"].isnan().all())
    device.run(eager=False)
    offload.finish()
    assert torch.equal(average["w"], torch.full((4,), 2.0))
    offload.close()


def test_the_staging_is_not_written_before_the_lerp_has_read_it(monkeypatch):
    """A second step comes while the lerp of the first is still at work."""
    import graft_nodes.ema.host_offload as module

    weights, average = {"w": torch.full((4,), 1.0)}, {"w": torch.zeros(4)}
    device, gate, order = LateDevice(weights), threading.Event(), []

    def slow(kept, staging, decay):
        assert gate.wait(10)
        order.append("lerp")
        average_(kept, staging, decay)

    fetch = device.fetch
    monkeypatch.setattr(module, "average_", slow)
    monkeypatch.setattr(device, "fetch", lambda w: (order.append("fetch"), fetch(w)))
    offload = Offload(device)
    offload.take(average, weights, HALF)
    device.run(eager=False)
    weights["w"].fill_(3.0)
    second = threading.Thread(target=offload.take, args=(average, weights, HALF))
    second.start()
    second.join(0.1)
    assert second.is_alive() and order == ["fetch"]
    gate.set()
    second.join(10)
    assert order == ["fetch", "lerp", "fetch"] or order == ["fetch", "lerp", "fetch", "lerp"]
    device.run(eager=False)
    offload.finish()
    assert torch.equal(average["w"], torch.full((4,), expected(0.0, [1.0, 3.0])))
    offload.close()


def test_what_goes_wrong_on_the_thread_is_raised_and_mismatches_before_anything_is_copied(monkeypatch):
    weights, average = {"w": torch.zeros(4)}, {"w": torch.zeros(4)}
    device = LateDevice(weights)
    offload = Offload(device)
    with pytest.raises(ValueError, match="only in the weights"):
        offload.take({}, weights, HALF)
    assert not device.side
    monkeypatch.setattr(device, "wait", lambda: 1 / 0)
    offload.take(average, weights, HALF)
    with pytest.raises(ZeroDivisionError):
        offload.finish()
    offload.close()


def test_mps_pins_no_memory_though_its_streams_came_with_torch_2_15(monkeypatch):
    monkeypatch.setattr(torch.mps, "Stream", object, raising=False)
    assert not has_streams(torch.device("mps"))
    assert isinstance(open_lane({"w": torch.zeros(2)}, torch.device("mps")), PlainLane)


def test_a_shadow_over_a_plain_lane_equals_one_beside_the_weights_byte_for_byte():
    """What MPS does: staging without pinning, the lerp on the thread."""
    draw = torch.Generator().manual_seed(0)
    weights = {"a": torch.randn(50, 3, generator=draw), "b": torch.randn(7, generator=draw)}
    near = Shadow.from_weights(weights)
    lane = PlainLane(weights, torch.device("mps"))
    assert "without pinning" in lane.note
    staging = {name: t.data_ptr() for name, t in lane.staging.items()}
    far = Shadow({name: t.clone() for name, t in weights.items()}, 0, Offload(lane))
    for step in range(1, 30):
        for kept in (near, far):
            kept.protect()
        for w in weights.values():
            w.add_(0.1 * torch.randn(w.shape, generator=draw))
        for kept in (near, far):
            kept.update_(weights, EMASettings("ramp", interval=2), step, 30)
    far.finish()
    assert all(torch.equal(near.tensors[name], far.tensors[name]) for name in weights)
    assert {name: t.data_ptr() for name, t in lane.staging.items()} == staging  # allocated once
    with far.swap_in(weights):
        assert torch.equal(weights["a"], near.tensors["a"])
    far.close()


def test_half_precision_weights_are_staged_as_they_are():
    weights = {"a": torch.randn(9).to(torch.bfloat16)}
    far = Shadow({"a": torch.zeros(9)}, 0, Offload(PlainLane(weights, torch.device("mps"))))
    assert far.offload.lane.staging["a"].dtype == torch.bfloat16
    far.update_(weights, EMASettings("constant", 0.5), 1, 1)
    far.close()
    assert torch.equal(far.tensors["a"], 0.5 * weights["a"].float())


def test_host_weights_need_no_lane():
    assert open_lane({"a": torch.zeros(1)}, torch.device("cpu")) is None
    kept = Shadow.from_average({"a": torch.zeros(1)}, 3, {"a": torch.zeros(1)}, torch.device("cpu"), "host")
    assert kept.offload is None and kept.step == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_pinned_staging_and_streams():
    weights = {"a": torch.randn(2048, 2048, device="cuda"), "b": torch.randn(77, device="cuda")}
    near = Shadow.from_weights(weights, "cpu")
    far = Shadow.from_average(near.tensors, 0, weights, torch.device("cuda"), "host")
    assert all(t.is_pinned() for t in far.offload.lane.staging.values())
    for step in range(1, 40):
        far.protect()
        for w in weights.values():
            w.mul_(0.9).add_(0.1)
        far.update_(weights, EMASettings("ramp"), step, 40)
        near.update_({name: w.cpu() for name, w in weights.items()}, EMASettings("ramp"), step, 40)
    far.close()
    assert all(torch.equal(near.tensors[name], far.tensors[name]) for name in weights)
