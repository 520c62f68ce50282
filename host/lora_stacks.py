"""Puts LoRA stacks on a MODEL and a CLIP: ComfyUI's key names and shapes in, patched clones out."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..patches.lora_files import read_stack
from ..patches.lora_files.entry import LoraEntry
from ..patches.lora_files.key_formats import registry as key_formats
from ..patches.lora_files.metadata import ON_TOP_OF
from ..patches.lora_files.parse import Target
from ..patches.lora_files.read_stack import ModelWeights
from ..patches.patching import stack_ledger
from ..patches.patching.fuse import WeightChange
from ..patches.patching.plan import Patches, PatchTarget, plan_stack
from . import two_models
from .base_weights import base_weights
from .comfyui_objects import Clip, Model
from .lora_injection import carried_stacks, inject_stacks
from .model_difference import weight_as_sampled

LABELS = {"model": "model", "clip": "text encoder"}
_CARRIED = "graft-stack"  # key of the attachment that names what a patcher carries; ComfyUI copies it to clones


class _Carried(NamedTuple):
    """What a patcher carries, for people: the LoRAs with their strengths, and whether as ComfyUI's own patches."""

    loras: tuple[str, ...] = ()
    is_host_patch: bool = False


class PatchedModels(NamedTuple):
    """Clones with the stack applied (or the inputs themselves when there was nothing to do), and a report."""

    model: Model
    clip: Clip
    report: str


def apply_lora_stack(
    model: Model, clip: Clip, entries: Sequence[LoraEntry], mode: str = "auto", trained_on: Collection[str] = ()
) -> PatchedModels:
    """Applies LoRAs to clones of a MODEL and, when it is not None, a CLIP. The inputs do not change.

    `entries` go on in order, as one stack, on top of what the inputs carry. `mode`: "merge" (weights change while the
    model is loaded), "bypass" (activations), "host" (ComfyUI's own patches, one fused adapter a weight; for merging,
    extracting and saving models), or "auto". ComfyUI's generic names (`diffusion_model.*.lora_up.weight`, `.diff`) are
    understood like every other, so a trained LORA_MODEL is an entry. The CLIP gets the embeddings in the files too:
    prompts call them with `embedding:NAME`; of two with one name the CLIP's own counts, unless it is among
    `trained_on`. Raises ValueError that lists everything wrong with every entry; no model is touched before that.
    """
    from .lora_host_patches import with_enlarging_loras

    weights = model_weights(model, clip)
    if clip is not None and any(key_formats.embedding_names(entry.state_dict) for entry in entries):
        weights = _with_tokenizer(weights, clip, trained_on)
    stack = read_stack.read_stack(entries, weights, mode, to_generic_keys)
    report = list(stack.report)
    patchers = _patchers(with_enlarging_loras(model, stack.enlarging), clip)
    for space, patches in stack.patches.items():
        bare = patchers[space]
        patchers[space], lines = with_patches(bare, LABELS[space], patches, mode)
        if patchers[space] is not bare:
            two_models.watch(patchers[space])
            _note_carried(bare, patchers[space], [entry for entry in entries if entry.strength(space) != 0.0], space)
        report += lines
    if clip is not None and patchers["clip"] is not clip.patcher:
        clip = clip.clone()
        clip.patcher = patchers["clip"]
    if stack.embeddings:
        from . import embeddings

        clip = embeddings.with_embeddings(clip, stack.embeddings)
    return PatchedModels(patchers["model"], clip, "\n".join(report))


def empty_stacks(patcher: Model) -> None:
    """Lets go of the LoRAs that a clone carries, which nobody uses again, unless they are on its model now."""
    attached = {id(stack) for stack in stack_ledger.attached_stacks(patcher.model)}
    for stack in carried_stacks(patcher):
        if id(stack) not in attached:
            stack.patches.clear()


def _patchers(model: Model, clip: Clip) -> dict[str, Model]:
    """The patchers of a MODEL and, unless it is None, a CLIP, by space."""
    return {"model": model} if clip is None else {"model": model, "clip": clip.patcher}


def _note_carried(bare: Any, patched: Any, entries: Sequence[LoraEntry], space: str) -> None:
    """Note on a clone what it carries: what the patcher below it does, and these LoRAs."""
    carried = bare.get_attachment(_CARRIED) or _Carried()
    loras = tuple(_describe(entry, space) for entry in entries)
    is_host_patch = carried.is_host_patch or len(patched.patches) > len(bare.patches)
    patched.set_attachments(_CARRIED, _Carried(carried.loras + loras, is_host_patch))


def _describe(entry: LoraEntry, space: str) -> str:
    """A LoRA of a stack as metadata name it: its file, its strength, and what else decides what it does."""
    extras = [f"{name} {value}" for name, value in (("blocks", entry.blocks), ("schedule", entry.schedule)) if value]
    return ", ".join((f"{entry.name} at {entry.strength(space):g}", *extras))


def carried_metadata(model: Model, clip: Clip) -> dict[str, str]:
    """What lies on a MODEL and a CLIP (None without one) while a LoRA is trained on them, for its metadata; empty for
    plain ones. The LoRA has learned to work with it.
    """
    patchers = _patchers(model, clip)
    said = []
    for space, patcher in patchers.items():
        carried = patcher.get_attachment(_CARRIED) or _Carried()
        parts = list(carried.loras)
        if patcher.patches and not carried.is_host_patch:
            count = len(patcher.patches)
            parts.append(f"{count} weight{'s' if count > 1 else ''} patched by other nodes")
        if parts and space == "clip":
            said.append(f"text encoder: {'; '.join(parts)}")
        elif parts:
            said.append("; ".join(parts))
    return {ON_TOP_OF: "; ".join(said)} if said else {}


def with_patches(patcher: Model, label: str, patches: Patches, mode: str) -> tuple[Any, list[str]]:
    """(Clone of a patcher with these patches by weight, report lines). ValueError if the mode is impossible."""
    from .lora_host_patches import with_host_patches

    target = PatchTarget(label, patcher.model, carried_stacks(patcher), why_not_merge(patcher))
    plan = plan_stack(target, patches, mode)
    if plan.host_patches:
        patcher = with_host_patches(patcher, plan.host_patches)
    if plan.stacks:
        patcher = inject_stacks(patcher, plan.stacks)
    return patcher, plan.report


def lora_changes(model: Model, clip: Clip, entries: Sequence[LoraEntry]) -> tuple[dict[str, WeightChange], list[str]]:
    """What LoRAs do to a MODEL and (unless None) a CLIP: (changes by generic name, what is left out, in words).

    For merging them into one LoRA. They start from the weights that the inputs sample with, patches and stacks
    included. Raises ValueError that lists everything wrong.
    """
    patchers = _patchers(model, clip)
    weights = model_weights(model, clip)
    bases = {space: base_weights(patcher) for space, patcher in patchers.items()}
    stack = read_stack.read_stack_to_merge(entries, weights, bases, to_generic_keys)
    changes: dict[str, WeightChange] = {}
    for space, by_weight in stack.patches.items():
        prefix = ""
        if space == "clip":
            prefix = "text_encoders."
        for name, patches in by_weight.items():
            read_weight = functools.partial(weight_as_sampled, patchers[space], name, bases[space][name])
            changes[prefix + name] = WeightChange(patches, weights.shapes[space, name], read_weight)
    return changes, stack.report


def to_generic_keys(state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Rename a LoRA's keys to generic names.

    This is for XLabs' Flux LoRAs, and for those that ComfyUI itself converts (BFL's control LoRAs …).
    """
    import comfy.lora_convert

    # a copy: the conversion may take keys out of what it is given
    return comfy.lora_convert.convert_lora(dict(key_formats.generic_keys(state)))


def model_weights(model: Model, clip: Clip = None) -> ModelWeights:
    """The weights of a MODEL and a CLIP (or None) that LoRAs may patch, with every LoRA key that ComfyUI knows."""
    import comfy.lora

    from .lora_host_patches import can_enlarge, enlarges_weight

    targets, shapes = _targets("model", model, comfy.lora.model_lora_keys_unet)
    if clip is not None:
        clip_targets, clip_shapes = _targets("clip", clip.patcher, comfy.lora.model_lora_keys_clip)
        targets.update(clip_targets)
        shapes.update(clip_shapes)
    enlarged = set()
    for weight, patches in model.patches.items():
        if any(enlarges_weight(patch[1]) for patch in patches):
            enlarged.add(weight)
    return ModelWeights(targets, shapes, clip is not None, frozenset(enlarged), can_enlarge())


def _with_tokenizer(weights: ModelWeights, clip: Clip, replaced: Collection[str]) -> ModelWeights:
    """With what a CLIP's tokenizers read as `embedding:NAME`, and the embeddings that it carries, less `replaced`."""
    from . import embeddings

    carried = {name: file for name, file in embeddings.carried_files(clip).items() if name not in replaced}
    return weights._replace(tokenizer=embeddings.tokenizer_parts(clip), embeddings=carried)


def _targets(
    space: str, patcher: Model, known_keys: Any
) -> tuple[dict[str, Target], dict[tuple[str, str], tuple[int, ...]]]:
    """(target of every LoRA key that ComfyUI knows for a patcher, shape of each of its weights)."""
    targets: dict[str, Target] = {}
    for key, weight in known_keys(patcher.model, {}).items():
        targets[key] = Target(space, weight) if isinstance(weight, str) else Target(space, *weight)
    shapes = {**stack_ledger.weight_shapes(patcher.model), **_shapes_before_enlarging(patcher)}
    return targets, {(space, name): shape for name, shape in shapes.items()}


def _shapes_before_enlarging(patcher: Model) -> dict[str, tuple[int, ...]]:
    """Shapes, as the model's file has them, of the weights that a loaded LoRA has enlarged."""
    if not patcher.backup:
        return {}
    parameters = dict(patcher.model.named_parameters(remove_duplicate=False))
    shapes = {}
    for name, saved in patcher.backup.items():
        if name in parameters and saved.weight.shape != parameters[name].shape:
            shapes[name] = tuple(saved.weight.shape)
    return shapes


def why_not_merge(patcher: Model) -> str | None:
    """Why this patcher's weights cannot be merged, or None."""
    if getattr(patcher, "is_dynamic", lambda: False)():
        return "ComfyUI moves the weights in and out of VRAM (dynamic VRAM)"
    if getattr(patcher.model, "model_lowvram", False):
        return "only a part of the model is loaded on the device (low VRAM)"
    return None


def list_patches(patcher: Model) -> list[str]:
    """What patches this MODEL's weights, in words. Empty for the plain base model."""
    changes = []
    if patcher.patches:
        changes.append(f"{len(patcher.patches)} patched weights")
    stacks = carried_stacks(patcher)
    if stacks:
        changes.append(f"{len(stacks)} LoRA stacks")
    return changes
