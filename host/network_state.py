"""The state of a network while training computes with it: what runs inside, and what is put back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..patches.models.weight_caches import clear_weight_caches
from ..training.memory.inference_tensors import use_normal_tensors


@contextlib.contextmanager
def record_running_modules(network: torch.nn.Module) -> Iterator[list[torch.nn.Module]]:
    """The modules of a network that compute something inside."""
    own = set(network.modules())
    modules: list[torch.nn.Module] = []

    def note(module: torch.nn.Module, _: Any) -> None:
        if module in own:
            modules.append(module)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield modules
    finally:
        handle.remove()


@contextlib.contextmanager
def keep_attributes(network: torch.nn.Module) -> Iterator[None]:
    """Takes off a network what its forward leaves on it: Cosmos keeps tensors of the last call, with their graph."""
    before = dict(vars(network))
    try:
        yield
    finally:
        for name in vars(network).keys() - before.keys():
            delattr(network, name)
        vars(network).update(before)


@contextlib.contextmanager
def switch_to_eval(network: torch.nn.Module) -> Iterator[None]:
    """Switches off what a network only does in training mode: older ComfyUIs leave ACE-Step's dropout on."""
    parts = [part for part in network.modules() if part.training]
    try:
        for part in parts:
            part.training = False
        yield
    finally:
        for part in parts:
            part.training = True


@contextlib.contextmanager
def freeze_beside(model: torch.nn.Module, network: torch.nn.Module) -> Iterator[None]:
    """Freezes the parts of a model beside its network: Stable Audio's embedders of seconds make conditions, which are
    kept for the next steps.
    """
    with contextlib.ExitStack() as stack:
        with torch.inference_mode(False):
            for part in model.children():
                if part is not network and next(part.parameters(), None) is not None:
                    stack.enter_context(use_normal_tensors(part))
        yield


@contextlib.contextmanager
def drop_weight_caches(network: torch.nn.Module) -> Iterator[None]:
    """A context in which a network keeps nothing from the weights of before, and leaves nothing of those of now."""
    clear_weight_caches(network)
    try:
        yield
    finally:
        clear_weight_caches(network)
