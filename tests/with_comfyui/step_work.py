"""What a training step computes: ComfyUI's own classes on the meta device, with the settings of Training Recipe.

`step_work.json` keeps it, so that the times in docs/memory.md can be computed without a ComfyUI.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

from graft_nodes.tests.with_comfyui import planned_sizes
from graft_nodes.training.recipes.choose import Recipe

FILE = Path(__file__).with_name("step_work.json")
STEPS_OF_A_PLAN = 2  # the first one gives the optimizer its state


def stored() -> dict[str, dict[str, int]]:
    """Floating point operations of a step, by title and PLAIN or CHECKPOINTED of planned_sizes."""
    work: dict[str, dict[str, int]] = json.loads(FILE.read_text(encoding="utf-8"))
    return work


def write(work: dict[str, dict[str, int]]) -> None:
    """Put them into the file."""
    FILE.write_text(json.dumps(work, indent=1) + "\n", encoding="utf-8")


def how(recipe: Recipe) -> str:
    """The key of a recipe's work: gradient checkpointing computes the forward pass twice."""
    if recipe.optimizer.checkpointing:
        return planned_sizes.CHECKPOINTED
    return planned_sizes.PLAIN


def counted(title: str, pixels: int, recipe: Recipe) -> int:
    """The floating point operations of one step of one picture, two for each multiply-add; products and convolutions,
    and attention as its products (two forward, four backward).
    """
    from graft_nodes.host import memory_planning
    from graft_nodes.training.run import memory_plan
    from torch.utils.flop_counter import FlopCounterMode

    patcher = planned_sizes.patcher_of(title)
    optimizer = replace(recipe.optimizer, precision="bf16", batch_size=1, accumulation=1, offload="none")
    state, dataset = planned_sizes.run_with(patcher, title, pixels, recipe.adapter, optimizer)
    counter = FlopCounterMode(display=False)
    with mock.patch.object(memory_plan, "FusedAttention", contextlib.nullcontext), counter:
        memory_planning.plan(patcher, state, dataset)
    return counter.get_total_flops() // STEPS_OF_A_PLAN
