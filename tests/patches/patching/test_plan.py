"""How a stack patches each weight: merged, at the activations, or through ComfyUI's own patches; and its schedules."""

import pytest
import torch
from graft_nodes.patches.adapters.diff import Set
from graft_nodes.patches.patching.fuse import Patch, Stack
from graft_nodes.patches.patching.plan import (
    PatchTarget,
    plan_stack,
    plan_weights,
    scheduled_weights,
    split_by_schedule,
)
from graft_nodes.patches.patching.strength_schedule import Schedule
from torch import nn

from .test_stack_ledger import NAMES, layer, model, stack

LATE = Schedule.from_range(0.5, 1.0)


def test_weights_by_mode():
    of = model()
    patches = stack(of, NAMES).patches
    others = {"3.weight": [Patch(Set(torch.ones_like(of.get_parameter("3.weight"))), 1.0)]}
    assert plan_weights(of, patches, "auto") == (list(NAMES), [], [], {})
    assert plan_weights(of, patches, "bypass") == (
        ["3.weight"],
        ["0.weight", "2.weight"],
        [],
        {"merged because LayerNorm has no bypass": 1},
    )
    left = "through ComfyUI's own patches because LayerNorm has no bypass and paged"
    for mode in ("auto", "bypass"):
        merge, bypass, by_host, reasons = plan_weights(of, patches, mode, "paged")
        assert (merge, bypass, by_host, reasons[left]) == ([], ["0.weight", "2.weight"], ["3.weight"], 1)
        norms = {f"{number}.weight": patches["3.weight"] for number in range(2)}
        more = plan_weights(nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4)), norms, mode, "paged")
        assert more.reasons == {left: 1, left.replace("LayerNorm", "GroupNorm"): 1}
        with pytest.raises(
            ValueError, match=r"3\.weight: cannot be merged, paged, and LayerNorm has no bypass; set patch mode to host"
        ):
            plan_weights(of, others, mode, "paged")
    of[0].weight.data = of[0].weight.data.to(torch.float8_e4m3fn)
    merge, bypass, by_host, reasons = plan_weights(of, patches, "auto")
    assert (merge, bypass, by_host) == (["2.weight", "3.weight"], ["0.weight"], [])
    assert reasons == {"at the activations because its type is torch.float8_e4m3fn": 1}
    assert plan_weights(of, patches, "merge") == (list(NAMES), [], [], {})  # fp8 is merged where that is asked for
    of[0].scale_weight = torch.ones(1)
    with pytest.raises(
        ValueError, match=r"0\.weight: cannot be merged, it is quantized \(scale_weight\); set patch mode to auto"
    ):
        plan_weights(of, patches, "merge")


def test_a_stack_in_every_mode():
    of = model()
    patches = stack(of, NAMES).patches
    target = PatchTarget("model", of)
    merged, bypassed, by_host = (plan_stack(target, patches, mode) for mode in ("merge", "bypass", "host"))
    assert not merged.host_patches and [each.bypass for each in merged.stacks] == [frozenset()]
    assert merged.report[-1].startswith("model: 3 weights merged while it is loaded, 0 at the activations")
    assert bypassed.stacks[0].bypass == {"0.weight", "2.weight"}
    assert "; a saved checkpoint holds the stack; " in merged.report[-1]
    assert bypassed.report[0] == "model: 1 merged because LayerNorm has no bypass"
    assert "; a saved checkpoint holds what is merged, not what is at the activations; " in bypassed.report[-1]
    linear = plan_stack(target, {"0.weight": patches["0.weight"]}, "bypass")
    assert "; a saved checkpoint holds the base without the stack; " in linear.report[-1]
    for plan in (merged, bypassed, linear):
        assert "keeps the stack of its first model and takes the base of its second" in plan.report[-1]
    assert not by_host.stacks and by_host.host_patches.keys() == {*NAMES}
    paged = plan_stack(PatchTarget("text encoder", of, (), "paged"), patches, "auto")
    assert paged.host_patches.keys() == {"3.weight"} and paged.stacks[0].patches.keys() == {"0.weight", "2.weight"}


def test_scheduled_patches_are_a_stack_of_their_own_at_the_activations():
    of = model()
    shape = tuple(of.get_parameter("0.weight").shape)
    constant, scheduled = Patch(layer(shape, 1), 0.5), Patch(layer(shape, 2), 0.5, schedule=LATE)
    assert split_by_schedule({"0.weight": [constant, scheduled]}) == (
        {"0.weight": [constant]},
        {"0.weight": [scheduled]},
    )
    plan = plan_stack(PatchTarget("model", of), {"0.weight": [constant, scheduled]}, "auto")
    assert [each.bypass for each in plan.stacks] == [frozenset(), {"0.weight"}]
    assert scheduled_weights(plan.stacks) == {"0.weight"}
    assert plan.report[0] == "model: 1 at the activations because their strength changes while sampling"
    norm = {"3.weight": [Patch(layer((5,), 1), 0.5, schedule=LATE)]}
    with pytest.raises(ValueError, match=r"these weights have no bypass; empty the row's schedule:\n- 3\.weight"):
        plan_stack(PatchTarget("model", of), norm, "auto")


def test_what_needs_the_weight_it_finds_does_not_come_after_a_schedule():
    of = model()
    shape = tuple(of.get_parameter("0.weight").shape)
    scheduled, dora = Patch(layer(shape, 2), 0.5, schedule=LATE), Patch(layer(shape, 1, "dora"), 0.5)
    target = PatchTarget("model", of)
    assert len(plan_stack(target, {"0.weight": [dora, scheduled]}, "auto").stacks) == 2
    with pytest.raises(ValueError, match=r"move rows with a schedule to the end:\n- 0\.weight: DoRA"):
        plan_stack(target, {"0.weight": [scheduled, dora]}, "auto")
    carrying = PatchTarget("model", of, [Stack({"0.weight": [scheduled]}, ["0.weight"])])
    with pytest.raises(ValueError, match=r"- 0\.weight: DoRA"):
        plan_stack(carrying, {"0.weight": [dora]}, "auto")
