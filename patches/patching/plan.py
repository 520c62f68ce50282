"""Decides how a stack patches each weight: merged, at the activations (bypass), or through ComfyUI's own patches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from ...storage.problem_list import problem_lines
from ..core.slots import find_slot
from ..models.layers import why_not_merged, why_not_plain
from .bypass import supports_bypass
from .fuse import Patch, Stack, are_additive
from .rounding import ENVIRONMENT_VARIABLE, rounds_stochastically

Patches = Mapping[str, Sequence[Patch]]  # by weight, in order
CHANGING = "their strength changes while sampling"


class PatchTarget(NamedTuple):
    """A model to patch: its label in reports, the stacks already on it, and why it may not be merged."""

    label: str
    module: nn.Module
    carried: Sequence[Stack] = ()
    why_not_merge: str | None = None


class Installation(NamedTuple):
    """What the host does for a stack: patches for ComfyUI's own patcher, stacks to inject, and lines for the report."""

    host_patches: dict[str, list[Patch]]
    stacks: list[Stack]
    report: list[str]


class WeightPlan(NamedTuple):
    """How each weight is patched: merged, at the activations (bypass), or through ComfyUI's own patches (host).

    `reasons` counts weights by the reason why this is not what the mode asks for.
    """

    merge: list[str]
    bypass: list[str]
    host: list[str]
    reasons: dict[str, int]


def plan_stack(target: PatchTarget, patches: Patches, mode: str) -> Installation:
    """How to apply a stack to a model.

    Args:
        target: the model.
        patches: the stack's, by weight.
        mode: "merge", "bypass", "host" (only ComfyUI's own patches) or "auto".

    Raises:
        ValueError: listing the weights for which the mode or a schedule is impossible.
    """
    label = target.label
    if mode == "host":
        line = f"{label}: {len(patches)} weights through ComfyUI's own patches; merging, extracting and saving see them"
        return Installation({weight: list(weight_patches) for weight, weight_patches in patches.items()}, [], [line])
    refuse_after_scheduled(patches, target.carried)
    constant, scheduled = split_by_schedule(patches)
    merge, bypass, by_host, reasons = plan_weights(target.module, constant, mode, target.why_not_merge)
    host_patches = {weight: constant.pop(weight) for weight in by_host}
    report = []
    if merge and rounds_stochastically():
        report.append(f"{label}: half precision is rounded stochastically ({ENVIRONMENT_VARIABLE})")
    if mode == "auto" and not target.why_not_merge:
        report += _unmerged_lines(target, bypass)
    stacks = []
    if constant:
        stacks.append(Stack(constant, bypass))
    if scheduled:
        stacks.append(_scheduled_stack(target, scheduled))
        reasons[f"at the activations because {CHANGING}"] = len(scheduled)
    if reasons:
        counted = [f"{count} {reason}" for reason, count in sorted(reasons.items())]
        report.append(f"{label}: " + "; ".join(counted))
    if stacks:
        report.append(_visibility_line(label, len(merge), len({*bypass, *scheduled})))
    return Installation(host_patches, stacks, report)


def _unmerged_lines(target: PatchTarget, bypass: Sequence[str]) -> list[str]:
    """A line on the quantized weights that could be merged and are not: the measured cost is in docs/lora_stacks.md."""
    found = [find_slot(target.module, name) for name in bypass]
    count = sum(why_not_merged(slot.module, slot.name, coarse=True) is None for slot in found)
    if not count:
        return []
    return [
        f"{target.label}: {count} quantized weights are not merged: rounding them again would add an error as large as"
        " the LoRAs' own change, and at the activations there is none (patch mode merge merges them)"
    ]


def _visibility_line(label: str, merged: int, at_activations: int) -> str:
    """How many weights a stack patches in which way, and what other nodes see of it."""
    if not at_activations:
        saved = "a saved checkpoint holds the stack"
    elif not merged:
        saved = "a saved checkpoint holds the base without the stack"
    else:
        saved = "a saved checkpoint holds what is merged, not what is at the activations"
    return (
        f"{label}: {merged} weights merged while it is loaded, {at_activations} at the activations; {saved}; a merge of"
        " models keeps the stack of its first model and takes the base of its second; nodes that extract a LoRA see the"
        " base (with patch mode host, all of them see the stack)"
    )


def plan_weights(module: nn.Module, patches: Patches, mode: str, why_not_merge: str | None = None) -> WeightPlan:
    """Decide for each weight of a stack: merge, bypass, or ComfyUI's own patches.

    - "auto" merges plain floating weights and bypasses the others (quantized ones).
    - "merge" also merges plain fp8 and quantized weights that can be quantized again, with stochastic rounding, because
      most changes are smaller than their steps. "auto" does not: that rounding is as large as the LoRAs' own change.

    Args:
        module: the model.
        patches: by weight.
        mode: "auto", "merge" or "bypass".
        why_not_merge: then nothing is merged. Weights without a bypass (norms, embeddings) go to the host if their
            patches only add, except in "merge".

    Raises:
        ValueError: listing the weights for which the mode, or any mode, is impossible.
    """
    plan = WeightPlan([], [], [], Counter())
    problems: list[str] = []
    for name, on_weight in patches.items():
        slot = find_slot(module, name)
        owner, attribute = slot.module, slot.name
        no_merge = why_not_merge or why_not_merged(owner, attribute, coarse=mode == "merge")
        no_bypass = why_not_bypass(owner, attribute)
        if no_merge is None:
            _merge_or_bypass(plan, name, mode, no_bypass)
        elif mode == "merge":
            problems.append(f"{name}: cannot be merged, {no_merge}; set patch mode to auto, bypass or host")
        elif no_bypass is None:
            plan.bypass.append(name)
            if mode != "bypass":
                plan.reasons[f"at the activations because {no_merge}"] += 1
        elif why_not_plain(owner, attribute) is None and are_additive(on_weight):
            plan.host.append(name)
            plan.reasons[f"through ComfyUI's own patches because {no_bypass} and {no_merge}"] += 1
        else:
            problems.append(f"{name}: cannot be merged, {no_merge}, and {no_bypass}; set patch mode to host")
    if problems:
        raise ValueError(problem_lines(problems, ""))
    return plan


def _merge_or_bypass(plan: WeightPlan, name: str, mode: str, no_bypass: str | None) -> None:
    """Plan a weight that may be merged."""
    if mode != "bypass":
        plan.merge.append(name)
    elif no_bypass is None:
        plan.bypass.append(name)
    else:
        plan.merge.append(name)
        plan.reasons[f"merged because {no_bypass}"] += 1


def why_not_bypass(module: nn.Module, attribute: str) -> str | None:
    """Why a weight cannot be patched at the activations, or None."""
    return None if has_bypass(module, attribute) else f"{type(module).__name__} has no bypass"


def has_bypass(module: nn.Module, attribute: str) -> bool:
    """Whether a weight can be patched at the activations."""
    return supports_bypass(module) and attribute in ("weight", "bias")


# --- schedules --------------------------------------------------------------------------------------------------------


def split_by_schedule(patches: Patches) -> tuple[dict[str, list[Patch]], dict[str, list[Patch]]]:
    """(patches without a schedule, patches with one), by weight."""
    constant: dict[str, list[Patch]] = {}
    scheduled: dict[str, list[Patch]] = {}
    for weight, on_weight in patches.items():
        for patch in on_weight:
            if patch.changes is None:
                constant.setdefault(weight, []).append(patch)
            else:
                scheduled.setdefault(weight, []).append(patch)
    return constant, scheduled


def scheduled_weights(stacks: Iterable[Stack]) -> set[str]:
    """The weights whose strength changes during sampling."""
    return {
        weight
        for stack in stacks
        for weight, on_weight in stack.patches.items()
        if any(patch.changes is not None for patch in on_weight)
    }


def refuse_after_scheduled(patches: Patches, carried: Sequence[Stack]) -> None:
    """Raise ValueError if a layer that depends on the current weight has a schedule or comes after one."""
    problems = []
    already_scheduled = scheduled_weights(carried)
    for weight, on_weight in patches.items():
        changing = weight in already_scheduled
        refused = []
        for patch in on_weight:
            changing = changing or patch.changes is not None
            if changing and not patch.layer.is_additive:
                refused.append(patch.layer.kind)
        if refused:
            problems.append(f"{weight}: {', '.join(refused)}")
    if problems:
        raise ValueError(
            "a schedule works for layers that add to a weight, and what changes the weight that it finds must come"
            " before them (T-LoRAs count as rows with a schedule): empty the schedule of these rows, or move rows with"
            " a schedule to the end:\n" + problem_lines(problems)
        )


def _scheduled_stack(target: PatchTarget, patches: Patches) -> Stack:
    """A stack of scheduled patches at the activations; ValueError listing the weights that have no bypass."""
    plan = plan_weights(target.module, patches, "bypass", target.why_not_merge)
    if plan.merge or plan.host:
        weights = problem_lines((*plan.merge, *plan.host))
        raise ValueError(
            "a schedule, or a T-LoRA (then set patch mode to merge), works at the activations, and these weights have"
            f" no bypass; empty the row's schedule:\n{weights}"
        )
    return Stack(patches, plan.bypass)
