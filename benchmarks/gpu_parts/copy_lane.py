"""The lane that copies weights to an average in host memory: CudaLane on CUDA, elsewhere the plain one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from device_timer import Timer
from graft_nodes.ema.decay import EMASettings
from graft_nodes.ema.host_offload import Lane, Offload, PlainLane, open_lane
from graft_nodes.ema.shadow import Shadow
from torch import Tensor

from .case import CHECKED, Case, Row, Setting, at_least, at_most, row

ROUNDS = 20
SLOWER, HELD, HIDDEN = 1.2, 0.1, 0.8  # of a copy by hand; of a copy; of the shorter of a copy and what runs beside it


def cases(setting: Setting) -> list[Case]:
    """Order of copies and changes, the average over them, and what a copy costs beside computing."""
    return [
        Case("bytes arrive", partial(bytes_arrive, setting)),
        Case("weights that change at once", partial(changed_at_once, setting)),
        Case("weights that are still being computed", partial(still_computed, setting)),
        Case("an average over it", partial(average, setting)),
        Case("a copy beside computing", partial(beside_computing, setting)),
    ]


def lane_of(setting: Setting, weights: dict[str, Tensor]) -> Lane:
    """The lane that an average takes from this device; the plain one on the CPU, which needs none."""
    return open_lane(weights, setting.device) or PlainLane(weights, setting.device)


def weights_on(setting: Setting) -> dict[str, Tensor]:
    """Two large tensors, so that a copy takes its time, and small ones of other types and layouts."""
    side = 64 if setting.tiny else 8192
    draws = torch.Generator().manual_seed(0)
    square = torch.randn(64, 64, generator=draws).repeat(side // 64, side // 64)
    found = {"float32": square, "bfloat16": square.bfloat16(), "float16": square[:64].half()}
    found["channels last"] = torch.randn(2, 8, 4, 4, generator=draws).to(memory_format=torch.channels_last)
    found["one"] = torch.randn(1, generator=draws)
    return {name: tensor.to(setting.device) for name, tensor in found.items()}


def kind(lane: Lane) -> str:
    """The lane's class, for the table."""
    return type(lane).__name__


def bytes_arrive(setting: Setting) -> Iterator[Row]:
    """Staging has the weights' bytes, and is pinned on CUDA."""
    weights = weights_on(setting)
    lane = lane_of(setting, weights)
    lane.fetch(weights)
    lane.wait()
    for name, tensor in weights.items():
        assert torch.equal(lane.staging[name], tensor.cpu()), f"{name} arrived with other values"
        if setting.device.type == "cuda":
            assert lane.staging[name].is_pinned(), f"staging of {name} is not pinned"
    yield row(kind(lane), len(weights), "tensors", CHECKED, note="equal bytes")


def changed_at_once(setting: Setting) -> Iterator[Row]:
    """What is copied is what the weights were before `protect`, although they change right after it."""
    weights = weights_on(setting)
    lane = lane_of(setting, weights)
    for number in range(ROUNDS):
        for tensor in weights.values():
            tensor.fill_(number)
        lane.fetch(weights)
        lane.protect()
        for tensor in weights.values():
            tensor.fill_(-1)
        lane.wait()
        for name, tensor in lane.staging.items():
            assert bool((tensor == number).all()), f"round {number}: {name} changed while it was copied"
    yield row("rounds", ROUNDS, "", CHECKED, note="none saw a later value")


def still_computed(setting: Setting) -> Iterator[Row]:
    """A copy waits for the work that was queued before it."""
    side = 64 if setting.tiny else 8192
    weights = {"a": torch.zeros(side, side, device=setting.device)}
    factor = torch.full((side, side), 1 / side, device=setting.device)
    lane = lane_of(setting, weights)
    for number in range(ROUNDS // 4):
        result = torch.full((side, side), float(number + 1), device=setting.device)
        for _ in range(4):
            result = result @ factor  # each product leaves the value as it is
        weights["a"].copy_(result)
        lane.fetch(weights)
        lane.protect()
        weights["a"].zero_()
        lane.wait()
        expected = torch.full((side, side), float(number + 1))
        torch.testing.assert_close(lane.staging["a"], expected, rtol=1e-2, atol=0)
    yield row("rounds", ROUNDS // 4, "", CHECKED, note="the value after the products, to 1e-2")


def average(setting: Setting) -> Iterator[Row]:
    """An average over the lane is the average beside the weights."""
    weights = weights_on(setting)
    settings = EMASettings("ramp")
    beside = Shadow.from_weights(weights)
    far = Shadow({name: tensor.cpu() for name, tensor in beside.tensors.items()}, 0, Offload(lane_of(setting, weights)))
    for step in range(1, ROUNDS + 1):
        far.protect()
        for tensor in weights.values():
            tensor.mul_(0.9).add_(0.01 * step)
        for shadow in (beside, far):
            shadow.update_(weights, settings, step, ROUNDS)
    far.close()
    for name, tensor in beside.tensors.items():
        torch.testing.assert_close(far.tensors[name], tensor.cpu(), rtol=1e-5, atol=1e-6)
    yield row("updates", ROUNDS, "", CHECKED, note="equal to 1e-5 to the average beside the weights")


def beside_computing(setting: Setting) -> Iterator[Row]:
    """How long the training thread is held, and how much of a copy hides behind computing."""
    weights = weights_on(setting)
    lane, timer = lane_of(setting, weights), Timer(setting.device)
    side = 64 if setting.tiny else 4096
    factor = torch.full((side, side), 1 / side, device=setting.device)

    def compute() -> None:
        result = factor
        for _ in range(20):
            result = result @ factor

    def copy() -> None:
        lane.fetch(weights)
        lane.wait()

    def both() -> None:
        lane.fetch(weights)
        compute()
        lane.wait()

    for work in (compute, copy, both):
        work()
    alone, copied, together = (min(timer.seconds(work) for _ in range(5)) for work in (compute, copy, both))
    begun = timer.clock()
    lane.fetch(weights)
    held = timer.clock() - begun
    lane.wait()
    size = sum(tensor.nbytes for tensor in weights.values())
    plain = {name: torch.empty_like(tensor) for name, tensor in lane.staging.items()}  # the limit: one copy by hand
    if setting.device.type == "cuda":
        plain = {name: tensor.pin_memory() for name, tensor in plain.items()}

    def by_hand() -> None:
        for name, tensor in weights.items():
            plain[name].copy_(tensor, non_blocking=True)

    by_hand()
    limit = min(timer.seconds(by_hand) for _ in range(5))
    yield row("copy", size / copied / 1e9, "GB/s", at_most(SLOWER), copied / limit, "of a pinned copy by hand")
    yield row("the training thread is held", held, "s", at_most(HELD), held / copied, "of a copy")
    hidden = (alone + copied - together) / min(alone, copied)
    note = f"of the shorter; both took {together / (alone + copied):.2f} of one by one"
    yield row("hidden behind computing", hidden, "", at_least(HIDDEN), note=note)
