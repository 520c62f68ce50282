"""Weight averages: an update on the device beside other libraries and a copy, and an average in host memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from device_timer import Timer, wait
from graft_nodes.ema.decay import EMASettings
from graft_nodes.ema.shadow import Shadow
from torch import Tensor

import ema

from .case import Case, Row, Setting, at_most, bounded, row

PARAMETERS, TINY_PARAMETERS, ROUNDS = 413_000_000, 100_000, 9
OTHERS = ("diffusers, loop", "diffusers, foreach", "ema-pytorch", "torch.optim.swa_utils")
COPIES = 1.7  # an update reads two tensors and writes one, a copy reads one
HELD, WHOLE = 0.1, 1.2  # of a blocking copy and an update by hand


def cases(setting: Setting) -> list[Case]:
    """On the device, and in host memory."""
    return [
        Case("on the device", functools.partial(on_device, setting)),
        Case("in host memory", functools.partial(in_host_memory, setting)),
    ]


def count_of(setting: Setting) -> int:
    """How many parameters."""
    if setting.tiny:
        return TINY_PARAMETERS
    return PARAMETERS


def on_device(setting: Setting) -> Iterator[Row]:
    """Seconds of one update of Graft's, of other libraries', and of a copy."""
    count = count_of(setting)
    missing = ema.missing()
    note = f"{count / 1e6:g}M float32 parameters; each equals decay * shadow + (1 - decay) * weights to 1e-5"
    if missing:
        note += f"; not installed: {', '.join(missing)}"
    rows = ema.updates(count, ROUNDS, setting.device)
    for found in rows:  # of others in times of Graft's, here the other way around
        found["ratio"] = 1 / found["ratio"]
    copy = next(found["value"] for found in rows if found["name"] == "update: plain foreach copy")
    ours = next(found["value"] for found in rows if found["name"] == "update: Graft")
    yield row("update", ours, "s", at_most(COPIES), ours / copy, f"of a copy; {note}")
    others = {found["name"]: at_most(1.0) for found in rows if found["name"].partition(": ")[2] in OTHERS}
    yield from bounded(rows, others, "Graft's seconds in theirs")


def in_host_memory(setting: Setting) -> Iterator[Row]:
    """How long an update holds the training thread, how long until it is done, and the same copied by hand."""
    model = ema.Weights(ema.shapes(count_of(setting)), 1, setting.device)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    first, settings = Shadow.from_weights(weights, "cpu").tensors, EMASettings("constant", decay=0.99)
    timer, rounds = Timer(setting.device), 4
    far = Shadow.from_average(first, 0, weights, setting.device, "host")
    by_hand = {name: tensor.clone() for name, tensor in first.items()}
    held, whole, plain = [], [], []
    for step in range(1, rounds + 1):
        far.protect()
        for tensor in weights.values():
            tensor.add_(0.01 * step)
        wait(setting.device)
        started = timer.clock()
        assert far.update_(weights, settings, step, 100)
        held.append(timer.clock() - started)
        far.finish()
        whole.append(timer.clock() - started)
        plain.append(timer.seconds(functools.partial(_by_hand, by_hand, weights, 0.99)))
    far.close()
    for name, tensor in by_hand.items():
        torch.testing.assert_close(far.tensors[name], tensor, rtol=1e-5, atol=1e-6)
    note = "of a blocking copy to host memory and an update there; equal to it to 1e-5"
    yield row("the training thread is held", min(held), "s", at_most(HELD), min(held) / min(plain), note)
    yield row("until the average has it", min(whole), "s", at_most(WHOLE), min(whole) / min(plain), note)


def _by_hand(average: dict[str, Tensor], weights: dict[str, Tensor], decay: float) -> None:
    for name, tensor in average.items():
        tensor.lerp_(weights[name].to("cpu"), 1 - decay)
