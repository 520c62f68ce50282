"""Puts token downsampling on a ModelPatcher: the attn1 patch or attention override, and the wrapper that plans each
call.
"""

from __future__ import annotations

from typing import Any

from ..patches.core.clones import find_call, put_call, put_callback
from ..patches.models import attention_kernels
from ..patches.token_downsampling.attention_override import ToDo, ToDoCall, plan_todo
from ..patches.token_downsampling.tokens import ToDoSettings
from ..patches.token_downsampling.unet import ToDoPatch
from .comfyui_objects import Model

TODO_KEY = "graft_todo"  # of the wrapper and its callback


def apply_todo(patcher: Model, settings: ToDoSettings) -> tuple[Any, ToDo, list[str]]:
    """Apply token downsampling to a ModelPatcher: (a clone with it, the plan, notes).

    The clone is the patcher itself if every factor is 1. A ToDo that the patcher carries already is replaced, or taken
    off if every factor is 1. Notes tell the report what is special about this host and this model.
    """
    from comfy.patcher_extension import CallbacksMP

    replaced = patcher.model_options["transformer_options"].get("patches_replace", {}).get("attn1", {})
    todo = plan_todo(patcher.model.diffusion_model, settings, replaced.keys())
    earlier = todo_of(patcher)
    if settings.changes_nothing and earlier is None:
        return patcher, todo, []
    clone, other_patches = _without_todo(patcher)
    if settings.changes_nothing:
        return clone, todo, ["removes the model's earlier token downsampling"]
    if isinstance(todo, ToDoPatch):
        clone.model_options["transformer_options"]["patches"]["attn1_patch"] = [*other_patches, todo]
    call = ToDoCall(todo)
    put_call(clone, TODO_KEY, call)
    put_callback(clone, CallbacksMP.ON_PRE_RUN, TODO_KEY, call.begin_run)
    notes = []
    if earlier is not None:
        notes.append("replaces the model's earlier token downsampling")
    if other_patches and isinstance(todo, ToDoPatch):
        notes.append(
            f"other attn1 patches on the model: {len(other_patches)}; a block where they change the number of keys is"
            " not downsampled; with HyperTile, each tile whose keys are whole rows of the image is downsampled by"
            " itself"
        )
    kernel = attention_kernels.FEWER_KEYS.get(attention_kernel())
    if kernel:
        notes.append(kernel)
    return clone, todo, notes


def _without_todo(patcher: Model) -> tuple[Any, list[Any]]:
    """Take token downsampling off: (a clone whose patches are a mapping of its own, its other attn1 patches)."""
    from comfy.patcher_extension import CallbacksMP

    clone = patcher.clone()
    put_callback(clone, CallbacksMP.ON_PRE_RUN, TODO_KEY, None)
    put_call(clone, TODO_KEY, None)
    options = clone.model_options["transformer_options"]
    patches = options["patches"] = dict(options.get("patches", {}))
    other_patches = [patch for patch in patches.get("attn1_patch", ()) if not _is_todo(patch)]
    if "attn1_patch" in patches:
        patches["attn1_patch"] = other_patches
    return clone, other_patches


def todo_of(patcher: Model) -> ToDo | None:
    """The token downsampling on a ModelPatcher."""
    call = find_call(patcher, TODO_KEY)
    if call is None:
        return None
    todo: ToDo = call.todo
    return todo


def todo_metadata(patcher: Model) -> dict[str, str]:
    """The metadata of a LoRA trained on a MODEL (`ss_todo_*`).

    It is empty without token downsampling, and if that works only while sampling.
    """
    todo = todo_of(patcher)
    if todo is None or todo.settings.phase == "sampling":
        return {}
    return todo.settings.metadata()


def attention_kernel() -> str:
    """The name of this host's attention function."""
    from comfy.ldm.modules import attention as host_attention

    return host_attention.optimized_attention.__name__


def _is_todo(patch: Any) -> bool:
    return str(getattr(patch, "identity", "")).startswith("todo ")  # by name: the pack may be imported twice
