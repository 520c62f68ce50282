"""A LoRA stack at a model's activations that can be switched off and on again, beside whatever else is on the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ...storage.problem_list import problem_lines
from ..core.ledger import open_entry
from ..core.slots import find_slot
from .bypass import Bypass, put_bypass
from .fuse import Patch, are_additive
from .plan import why_not_bypass


class SwitchedStack:
    """A stack at the activations of a model. It is on until `remove`, except inside `switch_off()`.

    No weight changes, so it works beside trained tensors and merged stacks. `compute` is the type and device of the
    activations.
    """

    def __init__(
        self, model: nn.Module, patches: Mapping[str, Sequence[Patch]], compute: tuple[torch.dtype, torch.device]
    ) -> None:
        by_module: dict[str, dict[str, Sequence[Patch]]] = {}
        for name, on_weight in patches.items():
            path, _, attribute = name.rpartition(".")
            by_module.setdefault(path, {})[attribute] = on_weight
        adapters = []
        for path, patched in by_module.items():
            module = model.get_submodule(path)
            adapter = Bypass(module, patched.get("weight", ()), patched.get("bias", ()), compute=compute)
            adapters.append((module, adapter))
        self._adapters = [adapter for _, adapter in adapters]
        with open_entry(model, "training-only LoRA") as stack:
            for module, adapter in adapters:
                stack.enter_context(put_bypass(module, adapter))
            self._on_model = stack.pop_all()

    @contextmanager
    def switch_off(self) -> Iterator[None]:
        """Inside the block the model computes without the stack."""
        for adapter in self._adapters:
            adapter.is_on = False
        try:
            yield
        finally:
            for adapter in self._adapters:
                adapter.is_on = True

    def remove(self) -> None:
        """Take the stack off the model."""
        self._on_model.close()


def check_switchable(model: nn.Module, patches: Mapping[str, Sequence[Patch]], weights_move: bool) -> None:
    """Raise ValueError that lists the weights whose patches cannot be switched.

    They have no bypass or, where the model's weights move (`weights_move`), their patches depend on the weight.
    """
    problems = []
    for name, on_weight in patches.items():
        slot = find_slot(model, name)
        reason = why_not_bypass(slot.module, slot.name)
        if reason is not None:
            problems.append(f"{name}: {reason}")
        elif weights_move and not are_additive(on_weight):
            kinds = ", ".join(sorted({patch.layer.kind for patch in on_weight if not patch.layer.is_additive}))
            problems.append(f"{name}: {kinds} depends on the weight, and the weight is trained")
    if problems:
        raise ValueError(problem_lines(problems))
