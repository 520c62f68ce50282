"""Makes a training step fit into memory: one saving after the other, those that cost least first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .estimate import GB, Estimate, Plan, estimate
from .facts import Device, ModelFacts
from .wish import SIZES

USABLE = 0.9  # of the memory; the rest is for the driver, the desktop and gaps between tensors
WORTH = 0.01  # a saving below this share of the step is left out
SMALL_RANK = 8
ORDER = (  # of the savings, those that cost least first; here and in `run.memory_savings`
    "gradient checkpointing",
    "batch size",
    "store average on",
    "offload to CPU memory: optimizer",
    "optimizer",
    "fused backward pass",
    "base weights: int8",
    "base weights: nf4",
    "offload to CPU memory: layers",
    "training precision",
    "rank (dim)",
)


@dataclass(frozen=True)
class Fit:
    """A plan, its estimate, and the settings that were changed to save memory."""

    plan: Plan
    estimate: Estimate
    savings: tuple[str, ...]


_WHERE_MEMORY_IS_SHARED = ("gradient checkpointing", "batch size", "rank (dim)")


def _changes(plan: Plan) -> dict[str, dict[str, Any]]:
    """What each saving changes of a plan."""
    return {
        "gradient checkpointing": {"checkpointing": True},
        "batch size": {"batch_size": 1, "accumulation": plan.batch_size * plan.accumulation},
        "store average on": {"average_on_host": True},
        "optimizer": {"optimizer": "adafactor"},
        # Without checkpointing the backward pass keeps the layers.
        "offload to CPU memory: layers": {"layers_on_host": True, "checkpointing": True},
        "training precision": {"bf16_weights": True},
        "rank (dim)": {"rank": min(plan.rank, SMALL_RANK)},
    }


def _savings(wanted: Plan, device: Device) -> Sequence[str]:
    names = [name for name in ORDER if name in _changes(wanted)]
    if device.shares_memory:
        return [name for name in names if name in _WHERE_MEMORY_IS_SHARED]
    if not device.bf16:
        names.remove("training precision")
    return names


def fit(facts: ModelFacts, wanted: Plan, device: Device, memory: int) -> Fit:
    """The first plan that fits into `memory` bytes. ValueError with what to choose instead if none does."""
    found = _choose_savings(facts, wanted, device, memory)
    if found.estimate.total > USABLE * memory:
        raise ValueError(_too_large(facts, found, wanted, device, memory))
    return _keep_blocks(facts, found, memory)


def _keep_blocks(facts: ModelFacts, found: Fit, memory: int) -> Fit:
    """With layers in host memory as many blocks stay on the device as there is room for."""
    if not found.plan.layers_on_host or not facts.largest_block:
        return found
    room = min(USABLE * memory - found.estimate.total, facts.weight_bytes - facts.outside - 2 * facts.largest_block)
    plan = replace(found.plan, kept_blocks=max(0, int(room // facts.largest_block)))
    return replace(found, plan=plan, estimate=estimate(facts, plan))


def _choose_savings(facts: ModelFacts, wanted: Plan, device: Device, memory: int) -> Fit:
    """The first savings that are enough, or all of them, without those that a later one has made needless."""
    taken: list[str] = []
    for saving in _savings(wanted, device):
        size = _apply(wanted, taken, facts).estimate.total
        if size <= USABLE * memory:
            break
        if size - _apply(wanted, [*taken, saving], facts).estimate.total >= WORTH * size:
            taken.append(saving)
    for saving in reversed(taken):
        others = [other for other in taken if other != saving]
        if _apply(wanted, others, facts).estimate.total <= USABLE * memory:
            taken = others
    return _apply(wanted, taken, facts)


def _apply(wanted: Plan, savings: Sequence[str], facts: ModelFacts) -> Fit:
    plan = wanted
    for saving in savings:
        plan = replace(plan, **_changes(plan)[saving])
    return Fit(plan, estimate(facts, plan), tuple(savings))


def _too_large(facts: ModelFacts, least: Fit, wanted: Plan, device: Device, memory: int) -> str:
    advice = []
    for size in SIZES:
        at_size = _choose_savings(facts, wanted, device, size * GB)
        if size * GB > memory and at_size.estimate.total <= USABLE * size * GB:
            advice.append(f"choose {size} GB in memory if your device has it")
            break
    advice.append("load the model in fp8 (weight_dtype of Load Diffusion Model), which halves a 16-bit one")
    advice.append("lower the resolution of Dataset, and connect it to this node")
    side = wanted.largest(facts).resolution
    return (
        f"Training Recipe: memory is {memory / GB:.1f} GB, and a step at {side} pixels takes about"
        f" {least.estimate.total / USABLE / GB:.1f} GB with every saving ({', '.join(least.savings) or 'none helps'})."
        f" What helps: {'; or '.join(advice)}."
    )
