"""What a training step takes, and the settings that make it fit, those that cost least first: the text of `plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..recipes.fit import GB, ORDER, USABLE, WORTH
from ..state import TrainState
from .memory_plan import MemoryPlan

Planner = Callable[[TrainState], MemoryPlan]
_OTHER_RESULT, _SAME_RESULT = "another result", "the same result"


@dataclass(frozen=True)
class Saving:
    """A change of settings, what it costs, and how it is made; None if the state has it already or cannot."""

    words: str
    cost: str
    apply: Callable[[TrainState], TrainState | None]


def _optimizer(state: TrainState, **changes: Any) -> TrainState | None:
    """The state with other optimizer settings; None where they are not allowed together."""
    try:
        optimizer = replace(state.settings.optimizer, **changes)
    except ValueError:
        return None
    return replace(state, settings=replace(state.settings, optimizer=optimizer))


def _checkpointing(state: TrainState) -> TrainState | None:
    if state.settings.optimizer.checkpointing:
        return None
    return _optimizer(state, checkpointing=True)


def _small_batch(state: TrainState) -> TrainState | None:
    optimizer = state.settings.optimizer
    if optimizer.batch_size == 1:
        return None
    return _optimizer(state, batch_size=1, accumulation=optimizer.batch_size * optimizer.accumulation)


def _average_on_host(state: TrainState) -> TrainState | None:
    ema = state.start.ema
    if ema is None or ema.device == "host":
        return None
    return replace(state, start=replace(state.start, ema=replace(ema, device="host")))


def _optimizer_on_host(state: TrainState) -> TrainState | None:
    if state.settings.optimizer.offload != "none":
        return None
    return _optimizer(state, offload="optimizer")


def _adafactor(state: TrainState) -> TrainState | None:
    if state.settings.optimizer.optimizer == "adafactor":
        return None
    return _optimizer(state, optimizer="adafactor", options="scale_parameter = false")


def _layers_on_host(state: TrainState) -> TrainState | None:
    if state.settings.optimizer.offload == "layers" or state.start.adapter.full_weights:
        return None
    return _optimizer(state, offload="layers")


def _bf16(state: TrainState) -> TrainState | None:
    if state.settings.optimizer.precision == "full-bf16":
        return None
    return _optimizer(state, precision="full-bf16")


_BY_NAME = {
    "gradient checkpointing": Saving(
        "gradient checkpointing on", f"slower, as each block runs twice; {_SAME_RESULT}", _checkpointing
    ),
    "batch size": Saving(
        "batch size 1, with more gradient accumulation", f"slower; {_SAME_RESULT} but for rounding", _small_batch
    ),
    "store average on": Saving("store average on host", f"hardly slower; {_SAME_RESULT}", _average_on_host),
    "offload to CPU memory: optimizer": Saving(
        "offload to CPU memory optimizer", f"slower steps of the optimizer; {_SAME_RESULT}", _optimizer_on_host
    ),
    "optimizer": Saving("optimizer adafactor with scale_parameter = false", _OTHER_RESULT, _adafactor),
    "offload to CPU memory: layers": Saving(
        "offload to CPU memory layers", f"slower, as weights come over twice; {_SAME_RESULT}", _layers_on_host
    ),
    "training precision": Saving(
        "training precision full-bf16", f"{_OTHER_RESULT}, as trained weights are bf16", _bf16
    ),
}
SAVINGS = [_BY_NAME[name] for name in ORDER if name in _BY_NAME]


def fitting(state: TrainState, plan: Planner, memory: int) -> Iterator[tuple[Saving, MemoryPlan]]:
    """The savings until a step fits into `memory` bytes, one after the other, each with the plan that it leads to.

    What saves less than a hundredth is left out.
    """
    now = plan(state).peak
    for saving in SAVINGS:
        if now <= USABLE * memory:
            return
        changed = saving.apply(state)
        if changed is None:
            continue
        planned = plan(changed)
        if now - planned.peak >= WORTH * now:
            state, now = changed, planned.peak
            yield saving, planned


def report(state: TrainState, plan: Planner, memory: int = 0) -> str:
    """The text: the peak by part and, with `memory` in bytes, whether it fits and what to change."""
    first = plan(state)
    parts = ", ".join(f"{part} {_size(size)}" for part, size in first.parts.items())
    lines = [f"run {state.run}: a step is planned to take {_size(first.peak)} ({parts})"]
    if not memory:
        return lines[0]
    if first.peak <= USABLE * memory:
        return "\n".join([*lines, f"it fits into {_size(memory)}, of which {USABLE:.0%} may be used"])
    lines.append(f"it does not fit into {_size(memory)}, of which {USABLE:.0%} may be used; what saves memory:")
    now = first.peak
    for saving, planned in fitting(state, plan, memory):
        now = planned.peak
        lines.append(f"- {saving.words}: {_size(now)}; {saving.cost}")
    if now <= USABLE * memory:
        lines.append("with these it fits")
    else:
        lines.append("that is not enough: lower rank (dim) or the resolution of Dataset, or load the model in fp8")
    return "\n".join(lines)


def _size(count: int) -> str:
    if count >= GB / 10:
        return f"{count / GB:.2f} GB"
    return f"{count / 2**20:.1f} MB"
