"""What a training step takes, and the settings that make it fit, those that cost least first: the text of `plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from ..memory.layer_ring import fewest_waiting, more_bytes
from ..memory.quantized_base.base import chosen_layers
from ..memory.quantized_base.int8 import Int8
from ..memory.quantized_base.nf4 import NF4
from ..recipes.fit import GB, ORDER, USABLE, WORTH
from ..state import TrainState
from .memory_plan import MemoryPlan

Planner = Callable[[TrainState], MemoryPlan]
_OTHER_RESULT, _SAME_RESULT = "another result", "the same result"


@dataclass(frozen=True)
class Saving:
    """A change of settings, what it costs, and how it is made: None if the state has it already or cannot.

    `replaces` names the saving that it takes the place of, as both are values of one setting.
    """

    words: str
    cost: str
    apply: Callable[[TrainState], TrainState | None]
    replaces: str = ""


def _optimizer(state: TrainState, **changes: Any) -> TrainState | None:
    """The state with other optimizer settings; None where it has them already or they are not allowed together."""
    try:
        changed = state.with_optimizer(**changes)
    except ValueError:
        return None
    if changed.settings == state.settings:
        return None
    return changed


def _small_batch(state: TrainState) -> TrainState | None:
    optimizer = state.settings.optimizer
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


def _int8_base(state: TrainState) -> TrainState | None:
    if state.start.adapter.quantized_base:
        return None
    return _set_base(state, Int8.name)


def _nf4_base(state: TrainState) -> TrainState | None:
    if state.start.adapter.base_weights == NF4.name:
        return None
    return _set_base(state, NF4.name)


def _set_base(state: TrainState, base_weights: str) -> TrainState | None:
    adapter = state.start.adapter
    if adapter.full_weights:
        return None
    return replace(state, start=replace(state.start, adapter=replace(adapter, base_weights=base_weights)))


def _fused_backward(state: TrainState) -> TrainState | None:
    if not state.start.adapter.full_weights:  # the gradients of adapters are small
        return None
    return _optimizer(state, fused_backward=True, clip_norm=0.0)


def _layers_on_host(state: TrainState) -> TrainState | None:
    if state.start.adapter.full_weights and not state.settings.optimizer.fused_backward:
        return None
    return _optimizer(state, offload="layers")


_BY_NAME = {
    "gradient checkpointing": Saving(
        "gradient checkpointing on",
        f"slower, as each block runs twice; {_SAME_RESULT}",
        partial(_optimizer, checkpointing=True),
    ),
    "batch size": Saving(
        "batch size 1, with more gradient accumulation", f"slower; {_SAME_RESULT} but for rounding", _small_batch
    ),
    "store average on": Saving("store average on host", f"hardly slower; {_SAME_RESULT}", _average_on_host),
    "offload to CPU memory: optimizer": Saving(
        "offload to CPU memory optimizer", f"slower steps of the optimizer; {_SAME_RESULT}", _optimizer_on_host
    ),
    "optimizer": Saving("optimizer adafactor with scale_parameter = false", _OTHER_RESULT, _adafactor),
    "fused backward pass": Saving(
        "fused backward pass on, with maximum gradient norm 0",
        f"{_OTHER_RESULT}, unless that norm is 0 already",
        _fused_backward,
    ),
    "base weights: int8": Saving("base weights int8", f"{_OTHER_RESULT}, hardly", _int8_base),
    "base weights: nf4": Saving(
        "base weights nf4", f"{_OTHER_RESULT}, as weights have 4 bits", _nf4_base, replaces="base weights: int8"
    ),
    "offload to CPU memory: layers": Saving(
        "offload to CPU memory layers",
        f"slower, as weights come over twice; {_SAME_RESULT}",
        _layers_on_host,
        replaces="offload to CPU memory: optimizer",
    ),
    "training precision": Saving(
        "training precision full-bf16",
        f"{_OTHER_RESULT}, as trained weights are bf16",
        partial(_optimizer, precision="full-bf16"),
    ),
}
SAVINGS = [_BY_NAME[name] for name in ORDER if name in _BY_NAME]
_QUANTIZED = (_BY_NAME["base weights: int8"], _BY_NAME["base weights: nf4"])
_LAYERS = _BY_NAME["offload to CPU memory: layers"]
_OPTIMIZER = _BY_NAME["offload to CPU memory: optimizer"]
_BATCH = _BY_NAME["batch size"]  # which the fused backward pass excludes: it accumulates gradients
_IN_MAIN_MEMORY = ("gradient checkpointing", "batch size", "optimizer")


def savings_of(module: nn.Module, on_host: bool = False) -> list[Saving]:
    """The savings that a model can have; `on_host` those where it computes in main memory, from which nothing can be
    moved there.
    """
    if on_host:
        return [_BY_NAME[name] for name in _IN_MAIN_MEMORY]
    if chosen_layers(module):
        return SAVINGS
    return _leave_out(SAVINGS, _QUANTIZED)


def save_more(state: TrainState, on_host: bool) -> tuple[str, TrainState] | None:
    """The next saving that leaves the result as it is to the byte, in the order of the plan.

    Args:
        state: where memory ran out.
        on_host: whether that was main memory, to which nothing can be moved.

    Returns:
        What the saving is called, and the state with it; None where the state has all of them.
    """
    for saving in [_BY_NAME[name] for name in _IN_MAIN_MEMORY] if on_host else SAVINGS:
        changed = saving.apply(state)
        if changed is not None and changed.start == state.start and changed.settings.digest == state.settings.digest:
            return saving.words, changed
    return None


def _leave_out(savings: Sequence[Saving], others: Sequence[Saving]) -> list[Saving]:
    return [saving for saving in savings if saving not in others]


@dataclass(frozen=True)
class Step:
    """A saving that was taken, and with it and those before it the state and its plan."""

    saving: Saving
    state: TrainState
    plan: MemoryPlan


def choose_savings(state: TrainState, plan: Planner, memory: int, savings: Sequence[Saving] = SAVINGS) -> list[Step]:
    """The savings until a step fits, one after the other.

    What saves less than a hundredth is left out, and so is a saving that a later one takes the place of.

    Args:
        state: the run.
        plan: gives a state's plan.
        memory: how many bytes there are; `USABLE` of them are used.
        savings: those to choose from, the cheapest first.

    Returns:
        The savings that were taken, each with the state and the plan that it leads to.
    """
    steps = _each_setting_once(state, plan, memory, savings)
    if _peak(steps) <= USABLE * memory and not _are_quantized_layers_on_host(steps):
        return steps
    choices = [steps]
    for others in (_QUANTIZED, (_OPTIMIZER,), (_BATCH,)):
        choices.append(_each_setting_once(state, plan, memory, _leave_out(savings, others)))
    return min(choices, key=lambda steps: (max(_peak(steps), USABLE * memory), _are_quantized_layers_on_host(steps)))


def _are_quantized_layers_on_host(steps: Sequence[Step]) -> bool:
    """Whether both savings are taken, one of which is mostly enough."""
    taken = [step.saving for step in steps]
    return _LAYERS in taken and any(saving in taken for saving in _QUANTIZED)


def _each_setting_once(state: TrainState, plan: Planner, memory: int, savings: Sequence[Saving]) -> list[Step]:
    """What `_taken` gives without savings that a later one takes the place of."""
    steps = _take_savings(state, plan, memory, savings)
    replaced = [_BY_NAME[step.saving.replaces] for step in steps if step.saving.replaces]
    if any(step.saving in replaced for step in steps):
        return _take_savings(state, plan, memory, _leave_out(savings, replaced))
    return steps


def _take_savings(state: TrainState, plan: Planner, memory: int, savings: Sequence[Saving]) -> list[Step]:
    """Every saving that saves something, until a step fits."""
    steps: list[Step] = []
    now = plan(state).peak
    for saving in savings:
        if now <= USABLE * memory:
            break
        changed = saving.apply(state)
        if changed is None:
            continue
        planned = plan(changed)
        if now - planned.peak >= WORTH * now:
            state, now = changed, planned.peak
            steps.append(Step(saving, state, planned))
    return steps


def _remember_plans(plan: Planner) -> Planner:
    """The planner, which plans no state twice; states differ in what savings change."""
    plans: dict[Any, MemoryPlan] = {}

    def remembered(state: TrainState) -> MemoryPlan:
        changed = (state.settings.optimizer, state.start.ema, state.start.adapter.base_weights)
        if changed not in plans:
            plans[changed] = plan(state)
        return plans[changed]

    return remembered


def _peak(steps: Sequence[Step]) -> float:
    return steps[-1].plan.peak if steps else float("inf")


def report(
    state: TrainState, plan: Planner, memory: int = 0, savings: Sequence[Saving] = SAVINGS, where: str = ""
) -> str:
    """The text: the peak by part and, with `memory` in bytes, whether it fits and which of the savings to choose.

    `where` says where that memory is.
    """
    plan = _remember_plans(plan)
    first = plan(state)
    parts = ", ".join(f"{part} {_size(size)}" for part, size in first.parts.items())
    lines = [
        f"run {state.run}: a step is planned to take {_size(first.peak)} ({parts}); a preview of the size of the"
        f" largest picture, {_size(first.preview)} in all"
    ]
    if not memory:
        return lines[0]
    room, usable = f"{_size(memory)}{where}, of which {USABLE:.0%} may be used", USABLE * memory
    last = first
    if first.peak <= usable:
        lines.append(f"it fits into {room}")
    else:
        lines.append(f"it does not fit into {room}; what saves memory:")
        for step in choose_savings(state, plan, memory, savings):
            last = step.plan
            lines.append(f"- {step.saving.words}: {_size(last.peak)}; {step.saving.cost}")
        if last.peak <= usable:
            lines.append("with these it fits")
        else:
            lines.append("that is not enough: lower rank (dim) or the resolution of Dataset, or load the model in fp8")
    if last.blocks and last.peak <= usable:
        waiting = fewest_waiting(last.blocks, int(usable) - last.peak)
        size = _size(last.peak + more_bytes(last.blocks, waiting))
        lines.append(f"of its {len(last.blocks)} blocks {waiting} wait in CPU memory then, and it takes {size}")
    if last.preview > usable >= last.peak:
        lines.append("a preview of that size does not: give Train Step a smaller latent, or no previews")
    return "\n".join(lines)


def _size(count: int) -> str:
    if count >= GB / 10:
        return f"{count / GB:.2f} GB"
    return f"{count / 2**20:.1f} MB"
