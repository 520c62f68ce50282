"""LoRAs on a ModelPatcher and a CLIP: names, injections, the host's own patches, and the difference of two models."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..patches.adapters.layer import packed, unpacked
from ..patches.lora_files import block_weights, layer_names, metadata, parse
from ..patches.lora_files import merge as low_rank
from ..patches.lora_files.peft_config import peft_configs
from ..patches.models.compiled import is_compiled
from ..patches.patching import ledger
from ..patches.patching.fuse import Patch, Stack, additive, effective, fuse, in_order
from ..patches.patching.strength_schedule import Schedule
from .base_weights import base_weights


class Entry(NamedTuple):
    """One LoRA for `graft`: a name for messages, a state dict, strengths for model and CLIP, and whether a partial
    match will do.

    `blocks` are block weights as `patches.lora_files.block_weights` reads them, `metadata` is the file's own;
    `schedule` multiplies the model's strength while sampling.
    """

    name: str
    state: Mapping[str, torch.Tensor]
    model: float = 1.0
    clip: float = 1.0
    partial: bool = False
    blocks: str = ""
    metadata: Mapping[str, str] = MappingProxyType({})
    schedule: Schedule | None = None


class Grafted(NamedTuple):
    """What `graft` gives: clones that carry the stack (or the very inputs when nothing was to be done),
    and a report.
    """

    model: Any
    clip: Any
    report: str


def graft(model: Any, clip: Any, entries: Sequence[Entry], mode: str = "auto") -> Grafted:
    """Put LoRAs on a MODEL and, when it is not None, a CLIP; both are host objects and stay as they are, clones come
    back.

    `entries` go on in order, as one stack, on top of what the inputs carry. `mode`: "merge" (weights change while the
    model is loaded), "bypass" (activations), "host" (ComfyUI's own patches, one fused adapter a weight; for merging,
    extracting and saving models), or "auto". ComfyUI's generic names (`diffusion_model.*.lora_up.weight`, `.diff`) are
    understood like every other, so a trained LORA_MODEL is an entry. Raises ValueError that lists everything wrong with
    every entry; no model is touched before that.
    """
    problems = []
    if mode in ("merge", "host"):
        problems += [
            f"{entry.name}: {_SCHEDULED}, which mode {mode} cannot do; use auto or bypass"
            for entry in entries
            if entry.schedule
        ]
    problems += [
        f"{entry.name}: expected finite strengths, got {entry.model} for the model and {entry.clip} for the text"
        " encoder"
        for entry in entries
        if not (math.isfinite(entry.model) and math.isfinite(entry.clip))
    ]
    _, shapes = targets = lora_targets(model, clip)
    parsed, grown, wrong = _read(entries, model, *targets)
    problems += wrong
    if problems:
        raise ValueError("\n".join(problems))
    lines = [_entry_report(entry, lora, clip is not None) for entry, lora in parsed]
    model = _with_host_adapters(model, grown, lines)
    out = []
    for space, patcher in (("model", model), ("clip", None if clip is None else clip.patcher)):
        if patcher is not None:
            patches = _patches_by_weight(parsed, space, shapes)
        else:
            patches = {}
        out.append(_put(patcher, patches, mode, space, lines) if patches else patcher)
    grafted_clip = clip
    if clip is not None and out[1] is not clip.patcher:
        grafted_clip = clip.clone()
        grafted_clip.patcher = out[1]
    return Grafted(out[0], grafted_clip, "\n".join(lines))


def _read(
    entries: Sequence[Entry],
    model: Any,
    targets: Mapping[str, parse.Target],
    shapes: Mapping[tuple[str, str], Sequence[int]],
) -> tuple[list[tuple[Entry, parse.ParsedLora]], list[tuple[Entry, dict[str, Any]]], list[str]]:
    """(what each entry holds for these weights, the host's own patches of those that enlarge a weight, everything wrong
    with any).
    """
    parsed: list[tuple[Entry, parse.ParsedLora]] = []
    grown: list[tuple[Entry, dict[str, Any]]] = []
    problems: list[str] = []
    for entry in entries:
        try:
            if entry.blocks:
                block_weights.fitting(entry.blocks, (weight for space, weight in shapes if space == "model"))
            state, growing = _growing(_converted(entry.state))
            names = {**targets, **layer_names.found(parse.names(state), targets, shapes)}
            if growing:
                grown.append((entry, _host_adapters(growing, names, entry.name)))
            hint, configs = metadata.made_for(entry.state, entry.metadata), peft_configs(entry.metadata)
            if state or not growing:
                parsed.append((entry, parse.read(state, names, shapes, entry.name, entry.partial, hint, configs)))
        except ValueError as error:
            problems.append(str(error))
    return parsed, grown, problems + _grown_and_fused(model, grown, parsed)


def changes(model: Any, clip: Any, entries: Sequence[Entry]) -> tuple[dict[str, low_rank.Weight], list[str]]:
    """(what LoRAs, in order, do to a MODEL and, when it is not None, a CLIP, by generic name; what of them is left out,
    in words).

    For merging them into one LoRA. What they find are the weights as the inputs carry them, patches and stacks
    included. Raises ValueError that lists everything wrong.
    """
    _, shapes = targets = lora_targets(model, clip)
    parsed, grown, problems = _read(entries, model, *targets)
    problems += [f"{entry.name} enlarges weights, which no other LoRA can hold" for entry, _ in grown]
    problems += [
        f"{entry.name}: {len(lora.text_encoder)} of its layers are for a text encoder: connect clip, or set the row's"
        " clip strength to 0"
        for entry, lora in parsed
        if lora.text_encoder and entry.clip != 0.0
    ]
    found: dict[str, low_rank.Weight] = {}
    for space, patcher, prefix in (
        ("model", model, ""),
        ("clip", None if clip is None else clip.patcher, "text_encoders."),
    ):
        if patcher is not None:
            patches = _patches_by_weight(parsed, space, shapes)
        else:
            patches = {}
        if patches:
            base = base_weights(patcher)
        else:
            base = {}
        needing = [weight for weight, of in patches.items() if not additive(of)]
        problems += [
            f"{weight}: it is quantised ({base[weight].dtype})"
            for weight in needing
            if base[weight].dtype not in _PLAIN
        ]
        for weight, of in patches.items():
            read = functools.partial(_with_patches, patcher, weight, base[weight])
            found[prefix + weight] = low_rank.Weight(of, tuple(shapes[space, weight]), read)
    if problems:
        raise ValueError("\n".join(problems))
    return found, [f"{entry.name}: {'; '.join(left)}" for entry, lora in parsed if (left := _left_out(lora))]


def _converted(state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """A LoRA's state dict under generic names: XLabs' for Flux, and what the host's own conversion knows (BFL's control
    LoRAs …).
    """
    import comfy.lora_convert

    # which may take keys out of what it is given
    return comfy.lora_convert.convert_lora(dict(layer_names.renamed(state)))


def _growing(state: Mapping[str, torch.Tensor]) -> tuple[Mapping[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(the rest, the layers of a LoRA that enlarge their weight, as BFL's control LoRAs do): those the host's own
    adapters apply.
    """
    layers = tuple(key.removesuffix("reshape_weight") for key in state if key.endswith(".reshape_weight"))
    growing = {key: tensor for key, tensor in state.items() if layers and key.startswith(layers)}
    if not growing:
        return (state, {})
    return ({key: tensor for key, tensor in state.items() if key not in growing}, growing)


def _host_adapters(growing: Mapping[str, torch.Tensor], names: Mapping[str, parse.Target], name: str) -> dict[str, Any]:
    """The host's own patches, by weight, of layers that enlarge their weight; ValueError when the model or the host has
    no such thing.
    """
    import comfy.lora

    layers = [key.removesuffix(".reshape_weight") for key in growing if key.endswith(".reshape_weight")]
    gone = [layer for layer in layers if layer not in names]
    if gone:
        raise ValueError(
            f"LoRA {name} cannot be used:\n- it enlarges {', '.join(gone)}, which this model does not have"
        )
    if not hasattr(comfy.lora, "pad_tensor_to_shape"):
        raise ValueError(
            f"LoRA {name} cannot be used:\n- it enlarges {', '.join(layers)}; only a real ComfyUI can do that"
        )
    wrong = [key for key, tensor in growing.items() if not bool(torch.isfinite(tensor.float()).all())]
    if wrong:
        raise ValueError(
            f"LoRA {name} cannot be used:\n" + "\n".join(f"- {key}: holds NaN or infinite values" for key in wrong)
        )
    return comfy.lora.load_lora(dict(growing), {layer: names[layer].weight for layer in layers}, log_missing=False)


def _grown_and_fused(
    model: Any, grown: Sequence[tuple[Entry, dict[str, Any]]], parsed: Sequence[tuple[Entry, parse.ParsedLora]]
) -> list[str]:
    """Weights that one LoRA, of these or of those that the model carries, enlarges and another one changes at its old
    size.
    """
    enlarged = {
        weight: "a LoRA that the model carries"
        for weight, of in model.patches.items()
        if any(_enlarges(each[1]) for each in of)
    }
    enlarged |= {weight: entry.name for entry, patches in grown for weight in patches}
    return [
        f"{entry.name} changes {target.weight}, which {enlarged[target.weight]} enlarges: use only one of them on this"
        " model"
        for entry, lora in parsed
        for target in lora.layers
        if target.model == "model" and target.weight in enlarged
    ]


def _enlarges(patch: Any) -> bool:
    """Whether a patch of the host's is a LoRA with the shape that its weight shall have, the last of an adapter's six
    values.
    """
    return getattr(patch, "name", None) == "lora" and len(patch.weights) > 5 and patch.weights[5] is not None


def _with_host_adapters(model: Any, grown: Sequence[tuple[Entry, dict[str, Any]]], lines: list[str]) -> Any:
    """A clone that carries the host's own patches, below every stack; the model itself when there are none."""
    if not grown:
        return model
    clone = model.clone()
    for entry, patches in grown:
        strength = entry.model * block_weights.strength(
            block_weights.parse(entry.blocks) if entry.blocks else {}, next(iter(patches))
        )
        clone.add_patches(patches, strength)
        lines.append(
            f"{entry.name}: {', '.join(patches)} through ComfyUI's own adapters at {strength:g}, because it enlarges"
            " the weight"
        )
    return clone


def lora_targets(
    model: Any, clip: Any = None
) -> tuple[dict[str, parse.Target], dict[tuple[str, str], tuple[int, ...]]]:
    """(target of every LoRA name that the host knows for this MODEL and CLIP, shape of every weight by ("model" or
    "clip", name)).
    """
    import comfy.lora

    targets: dict[str, parse.Target] = {}
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    patchers = [("model", model, comfy.lora.model_lora_keys_unet)]
    if clip is not None:
        patchers.append(("clip", clip.patcher, comfy.lora.model_lora_keys_clip))
    for space, patcher, names in patchers:
        shapes.update(
            ((space, name), shape) for name, shape in {**ledger.shapes(patcher.model), **_enlarged(patcher)}.items()
        )
        for name, target in names(patcher.model, {}).items():
            if isinstance(target, str):
                parts = (target,)
            else:
                parts = tuple(target)
            targets[name] = parse.Target(space, *parts)
    return targets, shapes


def _enlarged(patcher: Any) -> dict[str, tuple[int, ...]]:
    """Shapes, as the model's file has them, of the weights that a loaded LoRA has enlarged."""
    if patcher.backup:
        live = dict(patcher.model.named_parameters(remove_duplicate=False))
    else:
        live = {}
    files = {name: saved.weight.shape for name, saved in patcher.backup.items() if name in live}
    return {name: tuple(shape) for name, shape in files.items() if shape != live[name].shape}


def _patches_by_weight(
    parsed: Sequence[tuple[Entry, parse.ParsedLora]], space: str, shapes: Mapping[tuple[str, str], Sequence[int]]
) -> dict[str, list[Patch]]:
    patches: dict[str, list[Patch]] = {}
    for entry, lora in parsed:
        if space == "model":
            strength = entry.model
        else:
            strength = entry.clip
        if entry.blocks:
            by_block = block_weights.parse(entry.blocks)
        else:
            by_block = {}
        for weight, layer, part in parse.patches_of(lora, space, shapes) if strength != 0.0 else ():
            own = strength * block_weights.strength(by_block, weight, text=space == "clip")
            if own != 0.0:
                patches.setdefault(weight, []).append(
                    Patch(layer, own, part, entry.schedule if space == "model" else None)
                )
    return patches


def _entry_report(entry: Entry, lora: parse.ParsedLora, clip: bool) -> str:
    counts = {space: sum(target.model == space for target in lora.layers) for space in ("model", "clip")}
    line = f"{entry.name}: {counts['model']} weights of the model at {entry.model:g}"
    if clip:
        line += f", {counts['clip']} of the text encoder at {entry.clip:g}"
    line += f" ({', '.join(f'{number} {kind}' for kind, number in sorted(lora.kinds.items()))})"
    if entry.blocks:
        line += "; block weights"
    if entry.schedule is not None:
        line += "; the model's strength follows its schedule" + (", the text encoder's does not" if clip else "")
    said = metadata.about(entry.metadata)
    return "; ".join([line, *_left_out(lora)]) + (f"\n  {said}" if said else "")


def _left_out(lora: parse.ParsedLora) -> list[str]:
    """What of a file is not used, and why."""
    left = []
    if lora.text_encoder:
        left.append(f"{len(lora.text_encoder)} text encoder layers not used, no CLIP is connected")
    if lora.embeddings:
        left.append(
            f"{len(lora.embeddings)} embeddings in the file are left out ({', '.join(lora.embeddings)}): {_EMBEDDINGS}"
        )
    if lora.unmatched:
        left.append(f"partial: {len(lora.unmatched)} names match no weight and are left out")
    if lora.misfits:
        left.append(
            f"partial: {len(lora.misfits)} layers do not fit and are left out ({'; '.join(lora.misfits[:_SHOWN])})"
        )
    return left


_SHOWN = 3  # of what does not fit
_EMBEDDINGS = "to use them, put a copy of it into ComfyUI's embeddings folder"


def _put(patcher: Any, patches: Mapping[str, Sequence[Patch]], mode: str, space: str, lines: list[str]) -> Any:
    """A clone of the patcher with the patches on it in the given mode; adds what was done to the report."""
    if space == "model":
        name = "model"
    else:
        name = "text encoder"
    if mode == "host":
        lines.append(
            f"{name}: {len(patches)} weights through ComfyUI's own patches; merging, extracting and saving see them"
        )
        return _host_patched(patcher, patches)
    _refuse_after_scheduled(patcher, patches)
    constant, scheduled = _by_schedule(patches)
    merge, bypass, by_host, reasons = ledger.plan(patcher.model, constant, mode, _why_not_merge(patcher))
    if by_host:
        patcher = _host_patched(patcher, {weight: constant.pop(weight) for weight in by_host})
    if merge and _rounds_stochastically():
        lines.append(f"{name}: half precision is rounded stochastically ({_ROUNDING})")
    if constant:
        stacks = [Stack(constant, bypass)]
    else:
        stacks = []
    if scheduled:
        stacks.append(_scheduled(patcher, scheduled))
        reasons[f"at the activations because {_SCHEDULED}"] = len(scheduled)
    if reasons:
        lines.append(f"{name}: " + "; ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())))
    if not stacks:
        return patcher
    lines.append(
        f"{name}: {len(merge)} weights merged while it is loaded, {len({*bypass, *scheduled})} at the activations;"
        " other nodes that merge, extract or save it see the base (use mode host for those)"
    )
    return _injected(patcher, stacks)


_SCHEDULED = "their strength changes while sampling"


def _by_schedule(patches: Mapping[str, Sequence[Patch]]) -> tuple[dict[str, list[Patch]], dict[str, list[Patch]]]:
    """(patches without, patches with a schedule) by weight."""
    parts: tuple[dict[str, list[Patch]], dict[str, list[Patch]]] = ({}, {})
    for weight, of in patches.items():
        for patch in of:
            parts[patch.schedule is not None].setdefault(weight, []).append(patch)
    return parts


def _scheduled(patcher: Any, patches: Mapping[str, Sequence[Patch]]) -> Stack:
    """Scheduled patches at the activations; ValueError that lists the weights where that cannot be."""
    planned = ledger.plan(patcher.model, patches, "bypass", _why_not_merge(patcher))
    if planned.merge or planned.host:
        listed = "\n".join(f"- {weight}" for weight in (*planned.merge, *planned.host))
        raise ValueError(
            "a schedule works at the activations, and these weights have no bypass; empty the row's"
            f" schedule:\n{listed}"
        )
    return Stack(patches, planned.bypass)


def _refuse_after_scheduled(patcher: Any, patches: Mapping[str, Sequence[Patch]]) -> None:
    """ValueError that lists the weights where a layer that needs what it finds has, or comes after, a strength that
    changes.
    """
    wrong = []
    for weight, of in patches.items():
        changing = [place for place, patch in enumerate(of) if patch.schedule is not None]
        changing += [
            -1
            for stack in grafted_stacks(patcher)
            for patch in stack.patches.get(weight, ())
            if patch.schedule is not None
        ]
        late = [
            patch.layer.kind
            for place, patch in enumerate(of)
            if changing and place >= min(changing) and not patch.layer.additive
        ]
        wrong += [f"- {weight}: {', '.join(late)}"] if late else []
    if wrong:
        raise ValueError(
            "a schedule works for layers that add to a weight, and what changes the weight that it finds must come"
            " before them: empty the schedule of these rows, or move rows with a schedule to the end:\n"
            + "\n".join(wrong)
        )


def _why_not_merge(patcher: Any) -> str | None:
    """Why no weight of this patcher may be merged, or None."""
    if getattr(patcher, "is_dynamic", lambda: False)():
        return "the host pages its weights in and out (dynamic VRAM)"
    if getattr(patcher.model, "model_lowvram", False):
        return "the host holds only a part of the model on the device"
    return None


_KEY = "graft"  # callbacks; injections have a key of their own each, because a used key replaces silently
_unloaded: weakref.WeakSet[Any] = weakref.WeakSet()  # patchers of dynamic VRAM, detached since they were loaded


def _nobody_loaded(patcher: Any) -> bool:
    """Whether nobody holds the weights that an injection would change now: a failed load detaches, and then injects
    into what is left.

    A load leaves its mark on the model, and a detach takes it off again, but not with dynamic VRAM.
    """
    return patcher.model.current_weight_patches_uuid is None or patcher in _unloaded


def _injected(patcher: Any, more: Sequence[Stack]) -> Any:
    """A clone whose injection attaches more stacks, after those that the patcher carries; one injection
    holds them all.
    """
    import comfy.patcher_extension as extension

    clone = patcher.clone()
    stacks: list[Stack] = []
    for key, injections in list(clone.injections.items()):
        if injections and all(hasattr(injection, "graft_stacks") for injection in injections):
            stacks += [earlier for injection in injections for earlier in injection.graft_stacks]
            clone.remove_injections(key)
    stacks += more

    def inject(owner: Any) -> None:
        if _nobody_loaded(owner):
            return
        _unpin(owner, stacks)
        try:
            with _bases_shown(owner):
                ledger.attach(
                    owner.model, id(owner), [_in_turn(owner.model, stack) for stack in stacks], _version(owner)
                )
        except (
            BaseException
        ):  # as the host does when its own part of a load fails: nothing stays on the device that nobody counts
            owner.unpatch_model(owner.offload_device)
            raise

    def eject(owner: Any) -> None:
        with _bases_shown(owner):
            ledger.detach(
                owner.model, id(owner), _version(owner)
            )  # imports nothing: patchers also end while Python does

    def injected(owner: Any) -> None:
        if _nobody_loaded(owner):
            # or it would inject when it ejects for a moment, into what another patcher has loaded since
            owner.eject_model()

    def cloned(original: Any, copy: Any) -> None:
        copy.is_injected = False  # it has injected nothing; its end must not eject what the original injected
        outlived_by(original, copy)

    def detached(owner: Any, unpatch_all: bool) -> None:
        if unpatch_all:
            ledger.forget(owner.model)
            if getattr(owner, "is_dynamic", bool)():
                _unloaded.add(owner)

    def loaded(owner: Any, *_: Any) -> None:
        _unloaded.discard(owner)

    def left(parent: Any) -> None:
        if ledger.is_kept(parent.model):
            parent.remove_callbacks_with_key(events.ON_DETACH, _KEY)
            parent.add_callback_with_key(events.ON_DETACH, _KEY, detached)

    def outlived_by(parent: Any, copy: Any) -> None:
        """When a clone ends before its model is unloaded, the host unloads through the parent, and what is kept ends
        with that.
        """
        weakref.finalize(copy, left, parent).atexit = False

    events = extension.CallbacksMP
    injection = extension.PatcherInjection(inject=inject, eject=eject)
    injection.graft_stacks = tuple(stacks)
    clone.set_injections(f"{_KEY}-{stacks[-1].serial}", [injection])
    outlived_by(patcher, clone)
    for event, callback in (
        (events.ON_INJECT_MODEL, injected),
        (events.ON_CLONE, cloned),
        (events.ON_DETACH, detached),
        (events.ON_LOAD, loaded),
    ):
        clone.remove_callbacks_with_key(event, _KEY)
        clone.add_callback_with_key(event, _KEY, callback)
    if any(patch.schedule is not None for stack in stacks for of in stack.patches.values() for patch in of):
        clone.remove_wrappers_with_key(extension.WrappersMP.APPLY_MODEL, _KEY)
        clone.add_wrapper_with_key(extension.WrappersMP.APPLY_MODEL, _KEY, _ticking)
    return clone


class _Shown(NamedTuple):
    """A base as an entry of the host's backup, where nodes that merge, extract or save look for what a patched weight
    was.
    """

    weight: torch.Tensor
    inplace_update: bool
    graft_stack: bool = True


@contextlib.contextmanager
def _bases_shown(owner: Any) -> Iterator[None]:
    """Around a change of what is merged: the host's backup holds the base of every merged weight, as of those that it
    patches itself.

    The host restores from its backup only what is ejected; then it holds nothing of ours.
    """
    for name in [name for name, saved in owner.backup.items() if hasattr(saved, "graft_stack")]:
        del owner.backup[name]
    yield
    for name, base in ledger.bases(owner.model).items():
        owner.backup.setdefault(name, _Shown(base, False))


def _unpin(owner: Any, stacks: Iterable[Stack]) -> None:
    """Unpin the weights that are replaced, which the host would look for in vain when it unpins what it has pinned."""
    for name in {name for stack in stacks for name in stack.patches if name not in stack.bypass} & set(
        getattr(owner, "pinned", ())
    ):
        owner.unpin_weight(name)


_moved: weakref.WeakKeyDictionary[Stack, dict[frozenset[str], Stack]] = weakref.WeakKeyDictionary()


def _in_turn(model: Any, stack: Stack) -> Stack:
    """A stack whose layers that need the weight they find come after the host's own patches, where these come as it is
    used.
    """
    alone = {weight for weight, of in stack.patches.items() if weight not in stack.bypass and not additive(of)}
    late = frozenset(weight for weight in alone if _patched_in_use(model, weight))
    if not late:
        return stack
    known = _moved.setdefault(stack, {})
    if late not in known:
        known[late] = Stack(stack.patches, stack.bypass | late)
    return known[late]


def _patched_in_use(model: Any, weight: str) -> bool:
    """Whether the host applies patches to a weight each time that it is used, because it holds the weight elsewhere."""
    path, _, attribute = weight.rpartition(".")
    module = model.get_submodule(path)
    functions = (getattr(module, f"{attribute}_{kind}", None) for kind in ("function", "lowvram_function"))
    return ledger.has_bypass(module, attribute) and any(functions)


def _ticking(executor: Any, x: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Around one prediction of the model: scheduled strengths are set to what holds at its noise level."""
    model = executor.class_obj
    ledger.tick(model, sampled_share(model.model_sampling, float(t.flatten()[0])))
    return executor(x, t, *args, **kwargs)


def sampled_share(sampling: Any, sigma: float) -> float:
    """The share of sampling (0 to 1, by 0.00001) that is done at a noise level, as the host counts start_percent and
    end_percent.
    """
    left, right = 0, _SHARES
    while left < right:  # the levels fall as the share rises
        middle = (left + right) // 2
        if float(sampling.percent_to_sigma(middle / _SHARES)) > sigma * (1 + 1e-5):
            left = middle + 1
        else:
            right = middle
    if left == 1:
        return 0.0
    return left / _SHARES


_SHARES = 100_000


def grafted_stacks(patcher: Any) -> list[Stack]:
    """The stacks that a ModelPatcher carries as injections, in order; `Stack.identity` is what a fingerprint hashes."""
    carried = [injection for injections in patcher.injections.values() for injection in injections]
    return [stack for injection in carried for stack in getattr(injection, "graft_stacks", ())]


def scheduled(patcher: Any) -> int:
    """How many weights of this MODEL have strengths that change while sampling."""
    stacks = grafted_stacks(patcher)
    return len(
        {
            weight
            for stack in stacks
            for weight, of in stack.patches.items()
            if any(patch.schedule is not None for patch in of)
        }
    )


def patched(patcher: Any) -> list[str]:
    """What changes the weights of this MODEL, in words; empty when it is the plain base."""
    if patcher.patches:
        found = [f"{len(patcher.patches)} patched weights"]
    else:
        found = []
    return found + [f"{len(stacks)} stacks of LoRAs" for stacks in [grafted_stacks(patcher)] if stacks]


def _version(patcher: Any) -> ledger.Version:
    model, compute = patcher.model, None
    if hasattr(model, "manual_cast_dtype"):
        compute = (model.manual_cast_dtype or model.get_dtype(), torch.device(patcher.load_device))
    hooked = frozenset(patcher.hook_backup)
    return ledger.Version(
        model.current_weight_patches_uuid, hooked, compute, is_compiled(patcher.wrappers), _rounds_stochastically()
    )


_ROUNDING = "GRAFT_ROUNDING"


def _rounds_stochastically() -> bool:
    """What the environment says of bfloat16 and float16 weights; ValueError when it says something else."""
    said = os.environ.get(_ROUNDING, "") or "nearest"
    if said not in ("nearest", "stochastic"):
        raise ValueError(f"{_ROUNDING} is {said!r}, expected nearest or stochastic")
    return said == "stochastic"


def _host_patched(patcher: Any, patches: Mapping[str, Sequence[Patch]]) -> Any:
    """A clone with one fused adapter a weight as ComfyUI's own patch; layers that are no product of factors go as one
    adapter of ours.
    """
    from comfy.weight_adapter import LoRAAdapter

    own = _adapter_class()
    shapes = dict(patcher.model.named_parameters(remove_duplicate=False))
    adapters: dict[str, Any] = {}
    differences: dict[str, Any] = {}
    for weight, of in patches.items():
        if not additive(of) or any(
            patch.layer.kind != "diff" and patch.layer.factors() is None for patch in of
        ):  # kept as small as it is
            adapters[weight] = own(set(), tuple((patch.strength, patch.part, packed(patch.layer)) for patch in of))
            continue
        fused = fuse(of, shapes[weight].shape)
        if fused.up.shape[1]:
            adapters[weight] = LoRAAdapter(set(), (fused.up, fused.down, None, None, None, None))
        if fused.diff is not None:
            differences[weight] = ("diff", (fused.diff,))
    clone = patcher.clone()
    for patches in (adapters, differences):
        applied = clone.add_patches(patches, 1.0)
        if len(applied) != len(patches):
            raise ValueError(f"the host did not take patches for {sorted(set(patches) - set(applied))}")
    return clone


@functools.cache
def _adapter_class() -> type:
    """ComfyUI's adapter that puts patches of any kind on a weight, in order; its `weights` are (strength, part, packed
    layer) each.
    """
    from comfy.weight_adapter import WeightAdapterBase

    class GraftAdapter(WeightAdapterBase):
        name = "graft"

        def __init__(self, loaded_keys: set[str], weights: tuple) -> None:
            self.loaded_keys, self.weights = loaded_keys, weights

        def calculate_weight(
            self,
            weight: torch.Tensor,
            key: str,
            strength: float,
            strength_model: float,
            offset: Any,
            function: Callable,
            intermediate_dtype: torch.dtype = torch.float32,
            original_weight: Any = None,
        ) -> torch.Tensor:
            with torch.no_grad():
                base = weight.float()
                made = in_order(base, [Patch(unpacked(layer), own, part) for own, part, layer in self.weights])
                return weight.copy_(base + strength * function(made - base))

    return GraftAdapter


_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def differences(patcher: Any, other: Any) -> dict[str, Callable[[], torch.Tensor]]:
    """{weight: makes patcher's minus other's, float32} of two MODELs' diffusion models, patches and stacks included,
    where they may differ.

    Raises ValueError that lists every weight that only one has, whose shapes differ, or that is quantised.
    """
    ours, theirs = base_weights(patcher), base_weights(other)
    names = [name for name in {**ours, **theirs} if name.startswith("diffusion_model.")]
    problems = [
        f"{name}: only {'model' if name in ours else 'base'} has it"
        for name in names
        if (name in ours) != (name in theirs)
    ]
    both = [name for name in names if name in ours and name in theirs]
    problems += [
        f"{name}: model has {tuple(ours[name].shape)}, base {tuple(theirs[name].shape)}"
        for name in both
        if ours[name].shape != theirs[name].shape
    ]
    kinds = {name: {ours[name].dtype, theirs[name].dtype} - set(_PLAIN) for name in both}
    problems += [f"{name}: it is quantised ({', '.join(map(str, of))})" for name, of in kinds.items() if of]
    if problems:
        if len(problems) > 20:
            more = f"\n- and {len(problems) - 20} more"
        else:
            more = ""
        raise ValueError(
            "these models have no difference that a LoRA can hold:\n"
            + "\n".join(f"- {p}" for p in problems[:20])
            + more
        )
    plainly = {name for name in both if _untouched(patcher, name) and _untouched(other, name)}
    changed = [name for name in both if name not in plainly or not _same_memory(ours[name], theirs[name])]

    def difference(name: str) -> torch.Tensor:
        return _with_patches(patcher, name, ours[name]) - _with_patches(other, name, theirs[name])

    return {name: functools.partial(difference, name) for name in changed}


def _same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() and first.dtype == second.dtype


def _patches_on(patcher: Any, name: str) -> list[Patch]:
    stacks = grafted_stacks(patcher)
    return [*effective(stacks, name, bypass=False), *effective(stacks, name, bypass=True)]


def _untouched(patcher: Any, name: str) -> bool:
    return not patcher.patches.get(name) and not _patches_on(patcher, name)


def _with_patches(patcher: Any, name: str, base: torch.Tensor) -> torch.Tensor:
    """A weight as the patcher samples with it, in float32 on the CPU: the host's patches, then Graft's stacks."""
    import comfy.lora

    weight = base.detach().to("cpu", torch.float32, copy=True)
    if patcher.patches.get(name):
        weight = comfy.lora.calculate_weight(patcher.patches[name], weight, name)
    return in_order(weight, _patches_on(patcher, name))
