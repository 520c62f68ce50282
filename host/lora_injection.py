"""Attaches LoRA stacks while ComfyUI has a model loaded: injections, callbacks and ComfyUI's backup of weights."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..patches.core.clones import put_call, put_callback
from ..patches.models.torch_compile import is_compiled
from ..patches.patching import plan, stack_ledger
from ..patches.patching.fuse import Stack, are_additive
from ..patches.patching.rounding import rounds_stochastically
from .comfyui_objects import Model
from .device_memory import limit_pinned_memory

KEY = "graft"  # of callbacks; every injection has a key of its own, because ComfyUI replaces a used key silently

# Patchers of dynamic VRAM that ComfyUI has detached since it loaded them.
_detached: weakref.WeakSet[Any] = weakref.WeakSet()


def inject_stacks(patcher: Model, stacks: Sequence[Stack]) -> Model:
    """A clone that attaches more stacks, after those that the patcher carries. One injection holds them all."""
    import comfy.patcher_extension as extension

    clone = patcher.clone()
    every_stack = (*_take_injections(clone), *stacks)
    injection = extension.PatcherInjection(inject=functools.partial(_inject, every_stack), eject=_eject)
    injection.graft_stacks = every_stack
    clone.set_injections(f"{KEY}-{stacks[-1].serial}", [injection])
    events = extension.CallbacksMP
    for event, callback in (
        (events.ON_INJECT_MODEL, _on_inject),
        (events.ON_CLONE, _on_clone),
        (events.ON_DETACH, _on_detach),
        (events.ON_LOAD, _on_load),
    ):
        put_callback(clone, event, KEY, callback)
    _free_with_parent(patcher, clone)
    if plan.scheduled_weights(every_stack):
        from . import lora_schedules

        put_call(clone, KEY, lora_schedules.follow_schedules)
        put_callback(clone, events.ON_PREPARE_STATE, KEY, lora_schedules.on_prepare_state)
    return clone


def carried_stacks(patcher: Model) -> list[Stack]:
    """The stacks that a ModelPatcher carries as injections, in order; `Stack.identity` is what a fingerprint hashes."""
    stacks: list[Stack] = []
    for injections in patcher.injections.values():
        for injection in injections:
            stacks += getattr(injection, "graft_stacks", ())
    return stacks


def _take_injections(clone: Any) -> list[Stack]:
    """Removes Graft's injections from a clone and returns their stacks."""
    stacks: list[Stack] = []
    for key, injections in list(clone.injections.items()):
        if injections and all(hasattr(injection, "graft_stacks") for injection in injections):
            for injection in injections:
                stacks += injection.graft_stacks
            clone.remove_injections(key)
    return stacks


# --- what ComfyUI calls -----------------------------------------------------------------------------------------------


def _inject(stacks: Sequence[Stack], patcher: Model) -> None:
    """Attach the stacks; a failure unloads the model, as ComfyUI does when its own part of a load fails."""
    if _is_unloaded(patcher):
        return
    _unpin(patcher, stacks)
    limit_pinned_memory()
    try:
        with _bases_in_backup(patcher):
            ordered_stacks = [_after_host_patches(patcher.model, stack) for stack in stacks]
            stack_ledger.attach(patcher.model, id(patcher), ordered_stacks, _version(patcher))
    except BaseException:  # leave nothing on the device that ComfyUI does not count
        patcher.unpatch_model(patcher.offload_device)
        raise


def _eject(patcher: Model) -> None:
    """Detaches the stacks. It imports nothing, because it may run while Python shuts down."""
    with _bases_in_backup(patcher):
        stack_ledger.detach(patcher.model, id(patcher), _version(patcher))


def _on_inject(patcher: Model) -> None:
    """Undo the injection of a failed load: it would inject again, into what another patcher has loaded since."""
    if _is_unloaded(patcher):
        patcher.eject_model()


def _on_clone(original: Any, clone: Any) -> None:
    clone.is_injected = False  # it has injected nothing, and must not eject what the original injected
    _free_with_parent(original, clone)


def _on_detach(patcher: Model, unpatch_all: bool) -> None:
    if unpatch_all:
        stack_ledger.forget(patcher.model)
        if getattr(patcher, "is_dynamic", bool)():
            _detached.add(patcher)


def _on_load(patcher: Model, *_: Any) -> None:
    _detached.discard(patcher)


def _free_with_parent(parent: Any, clone: Any) -> None:
    """Free what Graft keeps for a model when its parent is unloaded.

    Once a clone has ended, ComfyUI unloads through the parent.
    """
    import comfy.patcher_extension as extension

    on_detach = extension.CallbacksMP.ON_DETACH
    weakref.finalize(clone, _free_on_detach, parent, on_detach).atexit = False


def _free_on_detach(parent: Any, on_detach: str) -> None:
    if stack_ledger.is_kept(parent.model):
        put_callback(parent, on_detach, KEY, _on_detach)


def _is_unloaded(patcher: Model) -> bool:
    """Whether the model is unloaded, so that nobody holds the weights that an injection would change.

    A failed load detaches, and then injects into what is left. A load leaves its mark on the model, and a detach takes
    it off again, but not with dynamic VRAM.
    """
    return patcher.model.current_weight_patches_uuid is None or patcher in _detached


# --- weights that ComfyUI patches, pins or backs up -------------------------------------------------------------------


class _BackedUpBase(NamedTuple):
    """A base weight as an entry of ComfyUI's backup.

    Nodes that merge, extract or save look there for what a patched weight was.
    """

    weight: torch.Tensor
    inplace_update: bool
    graft_stack: bool = True


@contextlib.contextmanager
def _bases_in_backup(patcher: Model) -> Iterator[None]:
    """A context for a change of what is merged: afterwards ComfyUI's backup holds the base of every merged weight.

    That is as for weights that ComfyUI patches itself. ComfyUI restores from its backup only what is ejected; then it
    holds nothing of Graft's.
    """
    for name in [name for name, saved in patcher.backup.items() if hasattr(saved, "graft_stack")]:
        del patcher.backup[name]
    yield
    for name, base in stack_ledger.base_weights(patcher.model).items():
        patcher.backup.setdefault(name, _BackedUpBase(base, False))


def _unpin(patcher: Model, stacks: Iterable[Stack]) -> None:
    """Unpins the weights that are replaced: ComfyUI could not find them later, when it unpins what it has pinned."""
    merged = {name for stack in stacks for name in stack.patches if name not in stack.bypass}
    for name in merged & set(getattr(patcher, "pinned", ())):
        patcher.unpin_weight(name)


_reordered: weakref.WeakKeyDictionary[Stack, dict[frozenset[str], Stack]] = weakref.WeakKeyDictionary()


def _after_host_patches(model: Model, stack: Stack) -> Stack:
    """A stack in which layers that depend on the current weight come after ComfyUI's own patches.

    This is for models whose weights ComfyUI patches at each use.
    """
    bypassed = frozenset(weight for weight in stack.patches if _needs_bypass(model, stack, weight))
    if not bypassed:
        return stack
    variants = _reordered.setdefault(stack, {})
    if bypassed not in variants:
        variants[bypassed] = Stack(stack.patches, stack.bypass | bypassed)
    return variants[bypassed]


def _needs_bypass(model: Model, stack: Stack, weight: str) -> bool:
    if weight in stack.bypass or are_additive(stack.patches[weight]):
        return False
    return _patched_in_use(model, weight)


def _patched_in_use(model: Model, weight: str) -> bool:
    """Whether ComfyUI patches the weight at each use, because it keeps the weight elsewhere."""
    path, _, attribute = weight.rpartition(".")
    module = model.get_submodule(path)
    functions = [getattr(module, f"{attribute}_{kind}", None) for kind in ("function", "lowvram_function")]
    return plan.has_bypass(module, attribute) and any(functions)


def compute_of(patcher: Model) -> tuple[torch.dtype, torch.device]:
    """Type and device of the activations of a MODEL."""
    model = patcher.model
    return model.manual_cast_dtype or model.get_dtype(), torch.device(patcher.load_device)


def _version(patcher: Model) -> stack_ledger.Version:
    model, compute = patcher.model, None
    if hasattr(model, "manual_cast_dtype"):
        compute = compute_of(patcher)
    return stack_ledger.Version(
        model.current_weight_patches_uuid,
        frozenset(patcher.hook_backup),
        compute,
        is_compiled(patcher.wrappers),
        rounds_stochastically(),
    )
