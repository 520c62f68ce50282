"""Two MODELs of one base that sample at once, as ComfyUI's Dual Model CFG Guider samples: what is said of their stacks.

ComfyUI has one set of weights for all MODELs of a base and loads one of these MODELs at a time, so a stack on one side
works on both sides or on neither.
"""

from __future__ import annotations

import weakref
from typing import Any

from ..patches.core.clones import put_callback
from ..storage.printable import logger
from . import events
from .comfyui_objects import Model

KEY = "graft-two-models"  # of callbacks, and of the attachment that names the nodes; ComfyUI copies both to clones
_TEXT = (
    "two MODELs of the same base sample at once, and ComfyUI holds one set of weights for both: {effect}. To have LoRAs"
    " on one side alone, load the base for the other side with a loader of its own"
)
log = logger(__name__)

_LAST = "the stack of the MODEL that is loaded last works on both"
_FIRST = "the stack of the MODEL that is loaded first works on neither"
_found: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # by patcher, while it samples


def watch(clone: Any) -> None:
    """Have a clone with a stack say when another MODEL of its base samples beside it, at the nodes that put stacks on:
    their reports are written before anything samples.
    """
    import comfy.patcher_extension as extension

    nodes = (*(clone.get_attachment(KEY) or ()), events.running_node())
    clone.set_attachments(KEY, tuple(dict.fromkeys(node for node in nodes if node is not None)))
    for event, callback in (
        (extension.CallbacksMP.ON_LOAD, _on_load),
        (extension.CallbacksMP.ON_INJECT_MODEL, _on_load),
        (extension.CallbacksMP.ON_DETACH, _on_detach),
        (extension.CallbacksMP.ON_CLEANUP, _on_cleanup),
    ):
        put_callback(clone, event, KEY, callback)


def _on_load(patcher: Model, *_: Any) -> None:
    sampling = getattr(patcher.model, "current_patcher", None)
    if sampling is None:
        _found.pop(patcher, None)
    elif _changes(sampling) != _changes(patcher):
        _found[patcher] = _LAST
    elif _found.get(sampling) == _FIRST:  # what it does is on the model again
        del _found[sampling]


def _on_detach(patcher: Model, *_: Any) -> None:
    if getattr(patcher.model, "current_patcher", None) is patcher:  # while it samples
        _found[patcher] = _FIRST


def _on_cleanup(patcher: Model) -> None:
    """Sampling ends. Only now is it known whether what took this patcher's place changes the weights as it does."""
    effect = _found.pop(patcher, None)
    if effect is None or (effect == _FIRST and _is_on_model(patcher)):
        return
    text = _TEXT.format(effect=effect)
    log.warning("%s", text)
    for node in patcher.get_attachment(KEY):
        events.say_at_node(node, text)


def _is_on_model(patcher: Model) -> bool:
    """Whether the weights are still as the patcher's own patches make them: ComfyUI loads such a MODEL only once."""
    from .lora_injection import carried_stacks

    return not carried_stacks(patcher) and patcher.model.current_weight_patches_uuid == patcher.patches_uuid


def _changes(patcher: Model) -> tuple[Any, ...]:
    """What a patcher does to the weights."""
    from .lora_injection import carried_stacks

    return patcher.patches_uuid, *(stack.identity for stack in carried_stacks(patcher))
