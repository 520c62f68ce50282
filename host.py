"""The wall to ComfyUI: models, folders, progress and events (comfy.*, folder_paths, server). It translates and holds no policy."""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from .patches import blocks, formats, kernels, metadata, weights
from .patches.adapters import packed, unpacked
from .patches.attention import ToDoPatch
from .patches.attention_override import ToDo, ToDoCall, plan_todo
from .patches.stack import Piece, Stack, additive, effective, fuse, in_order
from .patches.todo import ToDoSettings
from .training.adapters import tensors_digest

if TYPE_CHECKING:
    from .training.dataset import Conditioning

# --- LoRA keys, injections, attention patches -------------------------------------------------------------------------------------


TODO_KEY = "graft_todo"  # of the wrapper


def apply_todo(patcher: Any, settings: ToDoSettings) -> tuple[Any, ToDo, list[str]]:
    """(a clone of a ModelPatcher whose self-attention thins K and V, the plan, notes); the patcher itself when every factor is 1.

    A ToDo that the patcher carries already is replaced. Notes say what of this host and this model deserves a word in the report.
    """
    from comfy.patcher_extension import WrappersMP

    noise = None
    if (settings.start_percent, settings.end_percent) != (0.0, 1.0):
        sampling = patcher.get_model_object("model_sampling")
        noise = (float(sampling.percent_to_sigma(settings.start_percent)), float(sampling.percent_to_sigma(settings.end_percent)))
    todo = plan_todo(patcher.model.diffusion_model, settings, noise)
    if settings.changes_nothing:
        return patcher, todo, []
    clone = patcher.clone()
    options = clone.model_options["transformer_options"] = dict(clone.model_options["transformer_options"])
    patches = options["patches"] = dict(options.get("patches", {}))
    others = [patch for patch in patches.get("attn1_patch", ()) if not _is_todo(patch)]
    wrappers = options["wrappers"] = {kind: dict(keyed) for kind, keyed in options.get("wrappers", {}).items()}
    earlier = wrappers.get(WrappersMP.APPLY_MODEL, {}).get(TODO_KEY)
    if isinstance(todo, ToDoPatch):
        patches["attn1_patch"] = [*others, todo]
    elif "attn1_patch" in patches:
        patches["attn1_patch"] = others
    wrappers.setdefault(WrappersMP.APPLY_MODEL, {})[TODO_KEY] = [ToDoCall(todo)]
    return clone, todo, _todo_notes(todo, len(others), bool(earlier))


def todo_of(patcher: Any) -> ToDo | None:
    """The token downsampling that a ModelPatcher carries."""
    from comfy.patcher_extension import WrappersMP

    wrappers = patcher.model_options.get("transformer_options", {}).get("wrappers", {})
    calls = wrappers.get(WrappersMP.APPLY_MODEL, {}).get(TODO_KEY)
    return calls[0].todo if calls else None


def todo_metadata(patcher: Any) -> dict[str, str]:
    """`ss_todo_*` of the ToDo that is on a MODEL, empty without one."""
    todo = todo_of(patcher)
    return {} if todo is None else todo.settings.metadata()


def attention_kernel() -> str:
    """The name of this host's attention function."""
    from comfy.ldm.modules import attention as host_attention

    return host_attention.optimized_attention.__name__


def _is_todo(patch: Any) -> bool:
    return str(getattr(patch, "identity", "")).startswith("todo ")  # by name: the pack may be imported twice


def _todo_notes(todo: ToDo, others: int, replaced: bool) -> list[str]:
    notes = ["replaces the token downsampling that the model had"] if replaced else []
    if others and isinstance(todo, ToDoPatch):
        notes.append(
            f"other attn1 patches on the model: {others}; where they change the number of tokens (HyperTile does), the block is left alone"
        )
    kernel = kernels.FEWER_KEYS.get(attention_kernel())
    return [*notes, kernel] if kernel else notes


class Entry(NamedTuple):
    """One LoRA for `graft`: a name for messages, a state dict, strengths for model and CLIP, and whether a partial match will do.

    `blocks` are block weights as `patches.blocks` reads them, `metadata` is the file's own.
    """

    name: str
    state: Mapping[str, torch.Tensor]
    model: float = 1.0
    clip: float = 1.0
    partial: bool = False
    blocks: str = ""
    metadata: Mapping[str, str] = MappingProxyType({})


class Grafted(NamedTuple):
    """What `graft` gives: clones that carry the stack (or the very inputs when nothing was to be done), and a report."""

    model: Any
    clip: Any
    report: str


def graft(model: Any, clip: Any, entries: Sequence[Entry], mode: str = "auto") -> Grafted:
    """Put LoRAs on a MODEL and, when it is not None, a CLIP; both are host objects and stay as they are, clones come back.

    `entries` go on in order, as one stack, on top of what the inputs carry. `mode`: "merge" (weights change while the model is loaded),
    "bypass" (activations), "host" (ComfyUI's own patches, one fused adapter a weight; for merging, extracting and saving models), or
    "auto". ComfyUI's generic names (`diffusion_model.*.lora_up.weight`, `.diff`) are understood like every other, so a trained
    LORA_MODEL is an entry. Raises ValueError that lists everything wrong with every entry; no model is touched before that.
    """
    targets, shapes = lora_targets(model, clip)
    parsed, problems = [], []
    for entry in entries:
        try:
            if entry.blocks:
                blocks.fitting(entry.blocks, (weight for space, weight in shapes if space == "model"))
            state, hint = _converted(entry.state), metadata.made_for(entry.state, entry.metadata)
            parsed.append((entry, formats.read(state, targets, shapes, entry.name, entry.partial, hint)))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    lines = [_entry_report(entry, lora, clip is not None) for entry, lora in parsed]
    out = []
    for space, patcher in (("model", model), ("clip", None if clip is None else clip.patcher)):
        pieces = _pieces(parsed, space, shapes) if patcher is not None else {}
        out.append(_put(patcher, pieces, mode, space, lines) if pieces else patcher)
    grafted_clip = clip
    if clip is not None and out[1] is not clip.patcher:
        grafted_clip = clip.clone()
        grafted_clip.patcher = out[1]
    return Grafted(out[0], grafted_clip, "\n".join(lines))


def _converted(state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """A LoRA's state dict under the names of the host's key map: BFL's and XLabs' for Flux, Wan's …"""
    import comfy.lora_convert

    return comfy.lora_convert.convert_lora(state)


def lora_targets(model: Any, clip: Any = None) -> tuple[dict[str, formats.Target], dict[tuple[str, str], tuple[int, ...]]]:
    """(target of every LoRA name that this MODEL and CLIP know, shape of every weight by ("model" or "clip", name))."""
    import comfy.lora

    targets: dict[str, formats.Target] = {}
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    modules = [("model", model.model, comfy.lora.model_lora_keys_unet)]
    if clip is not None:
        modules.append(("clip", clip.cond_stage_model, comfy.lora.model_lora_keys_clip))
    for space, module, names in modules:
        shapes.update(((space, name), tuple(weight.shape)) for name, weight in module.named_parameters(remove_duplicate=False))
        for name, target in names(module, {}).items():
            parts = (target,) if isinstance(target, str) else tuple(target)
            targets[name] = formats.Target(space, *parts)
    for name, target in _more_names(model).items():
        targets.setdefault(name, formats.Target("model", target))
    return targets, shapes


def _more_names(model: Any) -> dict[str, str]:
    """Names that ComfyUI's own map does not have: PEFT's for UNets, lycoris' of the model's own paths, kohya's of OFT: name -> weight."""
    import comfy.utils

    names = {}
    for diffusers, own in comfy.utils.unet_to_diffusers(model.model.model_config.unet_config).items():
        if diffusers.endswith(".weight"):
            for prefix in ("", "unet.", "base_model.model."):
                names[prefix + diffusers.removesuffix(".weight")] = f"diffusion_model.{own}"
    for name, _ in model.model.diffusion_model.named_parameters():
        if name.endswith(".weight"):
            plain, weight = name.removesuffix(".weight"), f"diffusion_model.{name}"
            names[f"base_model.model.{plain}"] = weight
            for prefix in ("lycoris", "lycoris_unet", "oft_unet"):
                names[f"{prefix}_{plain.replace('.', '_')}"] = weight
    return names


def _pieces(
    parsed: Sequence[tuple[Entry, formats.ParsedLora]], space: str, shapes: Mapping[tuple[str, str], Sequence[int]]
) -> dict[str, list[Piece]]:
    pieces: dict[str, list[Piece]] = {}
    for entry, lora in parsed:
        strength = entry.model if space == "model" else entry.clip
        by_block = blocks.parse(entry.blocks) if entry.blocks else {}
        for weight, layer, part in formats.pieces_of(lora, space, shapes) if strength != 0.0 else ():
            own = strength * blocks.strength(by_block, weight if space == "model" else None)
            if own != 0.0:
                pieces.setdefault(weight, []).append(Piece(layer, own, part))
    return pieces


def _entry_report(entry: Entry, lora: formats.ParsedLora, clip: bool) -> str:
    counts = {space: sum(target.model == space for target in lora.layers) for space in ("model", "clip")}
    line = f"{entry.name}: {counts['model']} weights of the model at {entry.model:g}"
    if clip:
        line += f", {counts['clip']} of the text encoder at {entry.clip:g}"
    line += f" ({', '.join(f'{number} {kind}' for kind, number in sorted(lora.kinds.items()))})"
    if entry.blocks:
        line += "; block weights"
    if lora.text_encoder:
        line += f"; {len(lora.text_encoder)} text encoder layers not used, no CLIP is connected"
    if lora.unmatched:
        line += f"; partial: {len(lora.unmatched)} names match no weight and are left out"
    return line


def _put(patcher: Any, pieces: Mapping[str, Sequence[Piece]], mode: str, space: str, lines: list[str]) -> Any:
    """A clone of the patcher with the pieces on it in the given mode; adds what was done to the report."""
    name = "model" if space == "model" else "text encoder"
    if mode == "host":
        lines.append(f"{name}: {len(pieces)} weights through ComfyUI's own patches; merging, extracting and saving see them")
        return _host_patched(patcher, pieces)
    merge, bypass, reasons = weights.plan(patcher.model, pieces, mode, _why_not_merge(patcher), _not_additive(pieces))
    if reasons:
        lines.append(f"{name}: " + "; ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())))
    lines.append(
        f"{name}: {len(merge)} weights merged while it is loaded, {len(bypass)} at the activations; other nodes that merge, extract or "
        "save it see the base (use mode host for those)"
    )
    return _injected(patcher, Stack(pieces, bypass))


def _not_additive(pieces: Mapping[str, Sequence[Piece]]) -> dict[str, str]:
    """{weight: the kinds of layer on it that need the weight itself}."""
    kinds = {weight: sorted({piece.layer.kind for piece in of if not piece.layer.additive}) for weight, of in pieces.items()}
    return {weight: ", ".join(of) for weight, of in kinds.items() if of}


def _why_not_merge(patcher: Any) -> str | None:
    """Why no weight of this patcher may be merged, or None."""
    return "the host pages its weights in and out (dynamic VRAM)" if getattr(patcher, "is_dynamic", lambda: False)() else None


_KEY = "graft"  # callbacks; injections have a key of their own each, because a used key replaces silently


def _injected(patcher: Any, stack: Stack) -> Any:
    """A clone whose injection attaches the stack, after those that the patcher carries; one injection holds them all."""
    import comfy.patcher_extension as extension

    clone = patcher.clone()
    stacks: list[Stack] = []
    for key, injections in list(clone.injections.items()):
        if injections and all(hasattr(injection, "graft_stacks") for injection in injections):
            stacks += [earlier for injection in injections for earlier in injection.graft_stacks]
            clone.remove_injections(key)
    stacks.append(stack)

    def inject(owner: Any) -> None:
        # Without a load's mark nobody holds these weights: a failed load detaches and then injects into what is left.
        if owner.model.current_weight_patches_uuid is not None:
            weights.attach(owner.model, id(owner), stacks, _version(owner))

    def eject(owner: Any) -> None:
        weights.detach(owner.model, id(owner), _version(owner))

    def cloned(_: Any, copy: Any) -> None:
        copy.is_injected = False  # it has injected nothing; its end must not eject what the original injected

    def detached(_: Any, unpatch_all: bool) -> None:
        if unpatch_all:
            weights.forget(stacks)

    injection = extension.PatcherInjection(inject=inject, eject=eject)
    injection.graft_stacks = tuple(stacks)
    clone.set_injections(f"{_KEY}-{stack.serial}", [injection])
    for event, callback in ((extension.CallbacksMP.ON_CLONE, cloned), (extension.CallbacksMP.ON_DETACH, detached)):
        clone.remove_callbacks_with_key(event, _KEY)
        clone.add_callback_with_key(event, _KEY, callback)
    return clone


def grafted_stacks(patcher: Any) -> list[Stack]:
    """The stacks that a ModelPatcher carries as injections, in order; `Stack.identity` is what a fingerprint hashes."""
    carried = [injection for injections in patcher.injections.values() for injection in injections]
    return [stack for injection in carried for stack in getattr(injection, "graft_stacks", ())]


def _version(patcher: Any) -> weights.Version:
    return weights.Version(patcher.model.current_weight_patches_uuid, frozenset(patcher.hook_backup))


def _host_patched(patcher: Any, pieces: Mapping[str, Sequence[Piece]]) -> Any:
    """A clone with one fused adapter a weight as ComfyUI's own patch; layers that do not merely add go as one adapter of ours."""
    from comfy.weight_adapter import LoRAAdapter

    own = _adapter_class()
    shapes = dict(patcher.model.named_parameters(remove_duplicate=False))
    adapters: dict[str, Any] = {}
    differences: dict[str, Any] = {}
    for weight, of in pieces.items():
        if not additive(of):
            adapters[weight] = own(set(), tuple((piece.strength, piece.part, packed(piece.layer)) for piece in of))
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
    """ComfyUI's adapter that puts pieces of any kind on a weight, in order; its `weights` are (strength, part, packed layer) each."""
    from comfy.weight_adapter import WeightAdapterBase

    class GraftAdapter(WeightAdapterBase):
        name = "graft"

        def __init__(self, loaded_keys: set[str], weights: tuple) -> None:
            self.loaded_keys, self.weights = loaded_keys, weights

        def calculate_weight(
            self, weight: torch.Tensor, key: str, strength: float, strength_model: float, offset: Any, function: Callable,
            intermediate_dtype: torch.dtype = torch.float32, original_weight: Any = None,
        ) -> torch.Tensor:  # fmt: skip
            base = weight.float()
            made = in_order(base, [Piece(unpacked(layer), own, part) for own, part, layer in self.weights])
            return weight.copy_(base + strength * function(made - base))

    return GraftAdapter


def differences(patcher: Any, other: Any) -> dict[str, Callable[[], torch.Tensor]]:
    """{weight: makes patcher's minus other's, float32} of two MODELs' diffusion models, patches and stacks included, where they may differ.

    Raises ValueError that lists every weight that only one has, whose shapes differ, or that is quantised.
    """
    ours, theirs = base_weights(patcher), base_weights(other)
    names = [name for name in {**ours, **theirs} if name.startswith("diffusion_model.")]
    problems = [f"{name}: only {'model' if name in ours else 'base'} has it" for name in names if (name in ours) != (name in theirs)]
    both = [name for name in names if name in ours and name in theirs]
    problems += [
        f"{name}: model has {tuple(ours[name].shape)}, base {tuple(theirs[name].shape)}"
        for name in both if ours[name].shape != theirs[name].shape
    ]  # fmt: skip
    plain = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    kinds = {name: {ours[name].dtype, theirs[name].dtype} - set(plain) for name in both}
    problems += [f"{name}: it is quantised ({', '.join(map(str, of))})" for name, of in kinds.items() if of]
    if problems:
        more = f"\n- and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ValueError("these models have no difference that a LoRA can hold:\n" + "\n".join(f"- {p}" for p in problems[:20]) + more)
    plainly = {name for name in both if _untouched(patcher, name) and _untouched(other, name)}
    changed = [name for name in both if name not in plainly or not _same_memory(ours[name], theirs[name])]

    def difference(name: str) -> torch.Tensor:
        return _with_patches(patcher, name, ours[name]) - _with_patches(other, name, theirs[name])

    return {name: functools.partial(difference, name) for name in changed}


def _same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() and first.dtype == second.dtype


def _pieces_on(patcher: Any, name: str) -> list[Piece]:
    stacks = grafted_stacks(patcher)
    return [*effective(stacks, name, bypass=False), *effective(stacks, name, bypass=True)]


def _untouched(patcher: Any, name: str) -> bool:
    return not patcher.patches.get(name) and not _pieces_on(patcher, name)


def _with_patches(patcher: Any, name: str, base: torch.Tensor) -> torch.Tensor:
    """A weight as the patcher samples with it, in float32 on the CPU: the host's patches, then Graft's stacks."""
    import comfy.lora

    weight = base.detach().to("cpu", torch.float32, copy=True)
    if patcher.patches.get(name):
        weight = comfy.lora.calculate_weight(patcher.patches[name], weight, name)
    return in_order(weight, _pieces_on(patcher, name))


OUTPUT_LORAS = "output/loras/"  # prefix of the names of LoRAs that were saved under ComfyUI's output folder


def lora_names() -> list[str]:
    """Names that `lora_path` knows: ComfyUI's loras folders, then what lies under output/loras."""
    import folder_paths

    saved = os.path.join(folder_paths.get_output_directory(), "loras")
    found = [os.path.relpath(os.path.join(folder, file), saved) for folder, _, files in os.walk(saved) for file in files]
    names = sorted(name.replace(os.sep, "/") for name in found if name.endswith(".safetensors"))
    return [*folder_paths.get_filename_list("loras"), *(OUTPUT_LORAS + name for name in names)]


def lora_path(name: str) -> str:
    """The file of a LoRA's name; ValueError when the name leaves its folder, FileNotFoundError with near matches when there is none."""
    import folder_paths

    plain = name.replace("\\", "/")
    if not _stays_inside(plain):
        raise ValueError(f"{name!r} leaves the loras folder; give a name below it")
    path = folder_paths.get_full_path("loras", name)
    if path is None and plain.startswith(OUTPUT_LORAS):
        path = os.path.join(folder_paths.get_output_directory(), *plain.split("/")[1:])
    if path is None or not os.path.isfile(path):
        near = difflib.get_close_matches(name, lora_names(), n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else " in ComfyUI's loras folders"
        raise FileNotFoundError(f"no LoRA file {name!r}{hint}")
    return path


def weights_path(name: str) -> str:
    """The file of a LoRA's, checkpoint's or diffusion model's name; ValueError when it leaves its folder, FileNotFoundError without one."""
    import folder_paths

    if _stays_inside(name.replace("\\", "/")):
        for folder in ("checkpoints", "diffusion_models"):
            path = folder_paths.get_full_path(folder, name)
            if path is not None and os.path.isfile(path):
                return str(path)
    return lora_path(name)


def output_file(prefix: str, extension: str) -> tuple[str, dict[str, str]]:
    """(path, ui entry) of the next free numbered file of a prefix under ComfyUI's output folder, as ComfyUI itself counts them."""
    import folder_paths

    if not _stays_inside(prefix.replace("\\", "/")) or not prefix.strip("/\\ "):
        raise ValueError(f"prefix {prefix!r}: expected a name below ComfyUI's output folder")
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, folder_paths.get_output_directory())
    file = f"{name}_{counter:05}_{extension}"
    return os.path.join(folder, file), {"filename": file, "subfolder": subfolder, "type": "output"}


def _stays_inside(name: str) -> bool:
    """Whether a relative name with forward slashes stays below the folder it is relative to, on every system."""
    return not (name.startswith("/") or ".." in name.split("/") or ":" in name or "\0" in name)


# --- denoiser, conditioning, latents, fingerprint ---------------------------------------------------------------------------------


class Denoiser:
    """A loaded ModelPatcher as `training.objective.Denoiser`: the host's own forward, with patches, wrappers and size conditions."""

    def __init__(self, patcher: Any) -> None:
        self.patcher, self.model = patcher, patcher.model
        self.module: torch.nn.Module = patcher.model.diffusion_model
        self.device: torch.device = patcher.load_device
        self.sampling = patcher.get_model_object("model_sampling")
        self.prediction = prediction(self.sampling)
        self._conditions: dict[tuple[Any, ...], tuple[Conditioning, dict[str, Any]]] = {}

    def process_in(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents of the VAE as the network sees them."""
        return self.model.process_latent_in(latents)

    def sigma(self, u: torch.Tensor) -> torch.Tensor:
        """Noise levels (B,) of timestep shares (B,): a row of the table for discrete schedules, the model's own shifted share for flows."""
        import comfy.model_sampling

        sampling = self.sampling
        if isinstance(sampling, comfy.model_sampling.ModelSamplingDiscrete):
            table = sampling.sigmas.to(u.device, torch.float32)
            return table[(u * len(table)).long().clamp(max=len(table) - 1)]
        return sampling.sigma(u * getattr(sampling, "multiplier", 1.0)).to(torch.float32)

    def noisy(self, clean: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """Clean latents (B, C, h, w) with noise of level sigma (B,)."""
        return self.sampling.noise_scaling(sigma.view(-1, *[1] * (clean.ndim - 1)), noise, clean)

    def denoise(
        self, x: torch.Tensor, sigma: torch.Tensor, conditionings: Sequence[Conditioning], transformer_options: Mapping[str, Any]
    ) -> torch.Tensor:
        """Denoised latents (B, C, h, w) in float32; pictures whose conditions the host cannot batch go through one group after another."""
        groups: list[list[int]] = []
        conditions = [self._condition(one, x) for one in conditionings]
        for index, condition in enumerate(conditions):
            fitting = (group for group in groups if _can_concat(conditions[group[0]], condition))
            found = next(fitting, None)
            if found is None:
                groups.append([index])
            else:
                found.append(index)
        if len(groups) == 1:
            return self._apply(x, sigma, conditions, transformer_options)
        out: list[torch.Tensor] = [x] * len(conditions)
        for group in groups:
            part = self._apply(x[group], sigma[group], [conditions[i] for i in group], transformer_options)
            for index, one in zip(group, part, strict=True):
                out[index] = one
        return torch.stack(out)

    def _condition(self, conditioning: Conditioning, x: torch.Tensor) -> dict[str, Any]:
        """The host's condition objects of one picture, kept for the next time the same caption comes with the same size."""
        key = (id(conditioning), tuple(x.shape[1:]))
        if key not in self._conditions:
            noise = torch.zeros(1, *x.shape[1:], device=self.device)
            params = {"width": x.shape[-1] * 8, "height": x.shape[-2] * 8, "prompt_type": "positive", **conditioning.extras}
            params.update(cross_attn=conditioning.context.to(self.device), device=self.device, noise=noise, latent_image=noise)
            params = {name: value.to(self.device) if isinstance(value, torch.Tensor) else value for name, value in params.items()}
            made = self.model.extra_conds(**params)
            processed = {name: cond.process_cond(batch_size=1, device=self.device, area=None) for name, cond in made.items()}
            self._conditions[key] = (conditioning, processed)  # the conditioning too, so that its id stays its own
        return self._conditions[key][1]

    def _apply(
        self, x: torch.Tensor, sigma: torch.Tensor, conditions: Sequence[dict[str, Any]], transformer_options: Mapping[str, Any]
    ) -> torch.Tensor:
        import comfy.patcher_extension as extension

        options = self.patcher.model_options
        both = {**options.get("transformer_options", {}), **transformer_options}
        both["wrappers"] = extension.merge_nested_dicts(both.get("wrappers", {}), self.patcher.wrappers)
        both["callbacks"] = extension.merge_nested_dicts(both.get("callbacks", {}), self.patcher.callbacks)
        both.update(sigmas=sigma, cond_or_uncond=[0], uuids=[self.patcher.patches_uuid])
        arguments = {name: cond.concat([other[name] for other in conditions[1:]]) for name, cond in conditions[0].items()}
        arguments["transformer_options"] = both
        wrapper = options.get("model_function_wrapper")
        if wrapper is None:
            return self.model.apply_model(x, sigma, **arguments).float()
        return wrapper(self.model.apply_model, {"input": x, "timestep": sigma, "c": arguments, "cond_or_uncond": [0]}).float()


def _can_concat(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return left is right or (left.keys() == right.keys() and all(left[name].can_concat(right[name]) for name in left))


def prediction(sampling: Any) -> str:
    """What a model with this model sampling predicts: "eps", "v", "flow", or the class's own name when training does not know it."""
    import comfy.model_sampling as known

    names = {cls.__name__ for cls in type(sampling).__mro__}
    if isinstance(sampling, known.CONST) and not names & {"IMG_TO_IMG_FLOW"}:
        return "flow"
    if names & {"EDM", "X0", "IMG_TO_IMG", "COSMOS_RFLOW", "V_PREDICTION_DDPM", "IMG_TO_IMG_FLOW"} or not isinstance(sampling, known.EPS):
        return "/".join(cls.__name__ for cls in type(sampling).__mro__[1:3])
    return "v" if isinstance(sampling, known.V_PREDICTION) else "eps"


@contextlib.contextmanager
def denoiser(patcher: Any) -> Iterator[Denoiser]:
    """Load a MODEL and hand out its Denoiser for the block; afterwards the host is told that the run is over."""
    import comfy.model_management as management

    if getattr(patcher, "is_dynamic", lambda: False)():
        patcher = patcher.clone(disable_dynamic=True)  # pages that come and go cannot be differentiated through
    management.load_models_gpu([patcher], force_full_load=True)
    before = getattr(management, "in_training", None)
    patcher.pre_run()
    try:
        if before is not None:
            management.in_training = True
        yield Denoiser(patcher)
    finally:
        if before is not None:
            management.in_training = before
        patcher.cleanup()



class Fingerprint(NamedTuple):
    """Identity of a model across processes, and what of it could not be hashed (a run with such a model is not reused)."""

    digest: str
    unhashed: tuple[str, ...] = ()


_BASES: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def fingerprint(patcher: Any) -> Fingerprint:
    """Hash of a ModelPatcher: base tensors in key order, then patches, grafts, attention patches, compute dtype and model sampling.

    The live, patched weights are never hashed. The base is hashed once a model; it is never changed for good.
    """
    unhashed: list[str] = []
    parts: list[Any] = [_base_digest(patcher), _model_facts(patcher, unhashed)]
    parts.append([[key, _hashable(entry, f"patch of {key}", unhashed)] for key, entry in sorted(patcher.patches.items())])
    parts.append([stack.identity for stack in grafted_stacks(patcher)])
    for key, injections in patcher.injections.items():
        if not all(hasattr(injection, "graft_stacks") for injection in injections):
            unhashed.append(f"injection {key}")
    options = {key: value for key, value in patcher.model_options.items() if key != "transformer_options"}
    for name, value in ((*sorted(options.items()), *sorted(patcher.model_options.get("transformer_options", {}).items()))):
        parts.append([name, _hashable(value, f"option {name}", unhashed)])
    for name, value in sorted(patcher.object_patches.items()):
        if name != "model_sampling":  # among the facts
            parts.append([name, _hashable(value, f"object patch {name}", unhashed)])
    for name in ("wrappers", "hook_patches", "weight_wrapper_patches"):
        parts.append([name, _hashable(_without_empty(getattr(patcher, name, {})), name, unhashed)])
    return Fingerprint(hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest(), tuple(dict.fromkeys(unhashed)))


def fingerprint_of(thing: Any, name: str) -> Fingerprint:
    """Hash of a CLIP or VAE object: its patcher's fingerprint, or for one without weights its class."""
    patcher = getattr(thing, "patcher", None)
    if patcher is None:
        kind = f"{type(thing).__module__.rpartition('.')[2]}.{type(thing).__qualname__}"
        modules = [module for module in vars(thing).values() if isinstance(module, torch.nn.Module)]
        weights = {f"{i}.{key}": value for i, module in enumerate(modules) for key, value in module.state_dict().items()}
        return Fingerprint(hashlib.sha256(f"{kind} {tensors_digest(weights)}".encode()).hexdigest())
    made = fingerprint(patcher)
    return Fingerprint(f"{made.digest} {getattr(thing, 'layer_idx', None)}", tuple(f"{name}: {what}" for what in made.unhashed))


def _base_digest(patcher: Any) -> str:
    if patcher.model not in _BASES:
        kept = {key: value for key, value in base_weights(patcher).items() if not key.startswith("model_sampling.")}
        _BASES[patcher.model] = tensors_digest(kept)
    return _BASES[patcher.model]


def base_weights(patcher: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model as its file had them (after the loader's cast), by reference, whoever has patched it by now."""
    found = dict(patcher.model.state_dict())
    found.update({key: base for key, base in weights.bases(patcher.model).items() if key in found})
    found.update({key: saved.weight for key, saved in patcher.backup.items() if key in found})
    found.update({key: saved[0] for key, saved in patcher.hook_backup.items() if key in found})
    return found


def unet_weights(patcher: Any) -> dict[str, torch.Tensor]:
    """`base_weights` of the diffusion model alone, by parameter name inside it."""
    prefix = "diffusion_model."
    return {key.removeprefix(prefix): value for key, value in base_weights(patcher).items() if key.startswith(prefix)}


def versions(patcher: Any) -> dict[str, str]:
    """What is recorded beside a training result: versions of Graft and torch, and the device."""
    import importlib.metadata

    try:
        graft = importlib.metadata.version("graft-nodes")
    except importlib.metadata.PackageNotFoundError:  # a folder in custom_nodes: the version stands in its pyproject.toml
        text = Path(__file__).with_name("pyproject.toml").read_text(encoding="utf-8")
        graft = next((line.split('"')[1] for line in text.splitlines() if line.startswith("version = ")), "unknown")
    return {"graft": graft, "torch": str(torch.__version__), "device": str(patcher.load_device)}


def _model_facts(patcher: Any, unhashed: list[str]) -> list[Any]:
    model = patcher.model
    if not hasattr(model, "model_sampling"):  # a text encoder or a VAE
        return [type(model).__qualname__]
    sampling = patcher.get_model_object("model_sampling")
    plain = {k: v for k, v in vars(sampling).items() if isinstance(v, int | float | str | bool) and k != "training"}
    return [
        type(model).__qualname__,
        type(model.latent_format).__qualname__,
        [cls.__qualname__ for cls in type(sampling).__mro__ if cls.__module__.startswith("comfy")],
        {k: repr(v) for k, v in sorted(plain.items())},
        tensors_digest(dict(sampling.named_buffers())),
        str(model.get_dtype()),
        str(model.manual_cast_dtype),
    ]


def _without_empty(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {key: _without_empty(one) for key, one in value.items()}
        return {key: one for key, one in kept.items() if one not in ({}, [])} if kept else {}
    return value


def _hashable(value: Any, where: str, unhashed: list[str]) -> Any:
    """`value` as canonical JSON: tensors by digest, objects by their `identity`, host adapters by kind and weights; others are noted."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return tensors_digest({"": value})
    if isinstance(value, Mapping):
        return [[_hashable(key, where, unhashed), _hashable(one, where, unhashed)] for key, one in value.items()]
    if isinstance(value, list | tuple):
        return [_hashable(one, where, unhashed) for one in value]
    if isinstance(getattr(value, "identity", None), str):
        return value.identity
    if hasattr(value, "weights") and hasattr(value, "name"):
        return [type(value).__qualname__, _hashable(value.weights, where, unhashed)]
    unhashed.append(f"{where} ({type(value).__module__}.{type(value).__qualname__})")
    return "unhashed"


# --- encoding ---------------------------------------------------------------------------------------------------------------------


def encode_pictures(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Latents (B, C, h, w), float32 on the CPU, of pictures (B, H, W, 3) in 0..1."""
    latents = vae.encode(pixels[:, :, :, :3])
    return latents.detach().to("cpu", torch.float32)


def encode_captions(clip: Any, captions: Sequence[str], clip_skip: int = 0) -> dict[str, Conditioning]:
    """What the text encoder makes of each caption, float32 on the CPU; `clip_skip` 2 stops one layer before the last, 0 is as it is."""
    from .training.dataset import Conditioning

    if clip_skip:
        clip = clip.clone()
        clip.clip_layer(-clip_skip)
    out = {}
    for caption in captions:
        context, extras = clip.encode_from_tokens_scheduled(clip.tokenize(caption))[0]
        kept = {name: _float_on_cpu(value) for name, value in extras.items() if not callable(value)}
        out[caption] = Conditioning(_float_on_cpu(context), kept)
    return out


def _float_on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to("cpu", torch.float32 if value.is_floating_point() else value.dtype)


def patched(patcher: Any) -> list[str]:
    """What changes the weights of this MODEL, in words; empty when it is the plain base."""
    found = [f"{len(patcher.patches)} patched weights"] if patcher.patches else []
    return found + [f"{len(stacks)} stacks of LoRAs" for stacks in [grafted_stacks(patcher)] if stacks]


# --- folders, progress, interruption ----------------------------------------------------------------------------------------------


def input_folder(name: str) -> str:
    """The folder of that name below ComfyUI's input folder; ValueError when it leaves it, FileNotFoundError when there is none."""
    import folder_paths

    root = os.path.realpath(folder_paths.get_input_directory())
    path = os.path.realpath(os.path.join(root, name.strip() or "."))
    if not _stays_inside(name.strip().replace("\\", "/")) or os.path.commonpath([root, path]) != root:
        raise ValueError(f"folder {name!r} leaves ComfyUI's input folder; give a folder below it")
    if path == root and not name.strip():
        raise ValueError("folder is empty: give the name of a folder below ComfyUI's input folder")
    if not os.path.isdir(path):
        raise FileNotFoundError(f"there is no folder {name!r} below ComfyUI's input folder ({root})")
    return path


def training_folder() -> str:
    """Where training states are stored."""
    import folder_paths

    return os.path.join(folder_paths.get_output_directory(), "graft")


def progress(total: int) -> Callable[[int], None]:
    """A progress bar of the node that runs now: call it with how much is done."""
    import comfy.utils

    bar = comfy.utils.ProgressBar(total)
    return lambda done: bar.update_absolute(done, total)


def raise_if_interrupted() -> None:
    """Raise the host's own exception when the user has asked to stop."""
    import comfy.model_management

    comfy.model_management.throw_exception_if_processing_interrupted()


def send_event(name: str, data: Mapping[str, Any]) -> None:
    """Send an event to the front end; a host without a server has nobody to send it to."""
    import server

    instance = getattr(server.PromptServer, "instance", None)
    if instance is not None:
        instance.send_sync(name, dict(data))



# --- demo model -------------------------------------------------------------------------------------------------------------------


def demo_unet(device: Any = None) -> Any:
    """A UNet of the demo's shape, of this host's own class, float32, its weights not yet set; for writing a model's first weights."""
    return _demo_base_model(device).diffusion_model


def demo_model(path: str) -> tuple[Any, Any, Any]:
    """(MODEL, CLIP, VAE) of the demo's one safetensors file, built of this host's own classes; ValueError when its keys do not fit."""
    return demo_patcher(path), demo_clip(path), _demo().PixelVAE()


def demo_patcher(path: str, disable_dynamic: bool = False) -> Any:
    """The demo's MODEL. Never a dynamic patcher: 7 MB are best held whole, so `disable_dynamic`, which hosts pass, changes nothing."""
    import comfy.model_management
    import comfy.model_patcher

    offload = comfy.model_management.unet_offload_device()
    model = _demo_base_model(offload)
    _load_exactly(model.diffusion_model, path, "model.diffusion_model.")
    patcher = comfy.model_patcher.ModelPatcher(model, load_device=comfy.model_management.get_torch_device(), offload_device=offload)
    return _rebuilt_by(patcher, demo_patcher, path)


def demo_clip(path: str) -> Any:
    """The demo's CLIP: this host's own CLIP object around the small text encoder, float32."""
    import comfy.ops
    import comfy.sd

    from .demo import words

    target = SimpleNamespace(params={"operations": comfy.ops.manual_cast}, clip=_demo().TextEncoder, tokenizer=words.WordTokenizer)
    clip = comfy.sd.CLIP(target, model_options={"dtype": torch.float32})
    _load_exactly(clip.cond_stage_model, path, "text.")
    _rebuilt_by(clip.patcher, demo_clip_patcher, path)
    return clip


def demo_clip_patcher(path: str, disable_dynamic: bool = False) -> Any:
    """The patcher of the demo's CLIP, read anew; what a host calls that needs a second, untouched copy."""
    return demo_clip(path).patcher


def _demo() -> Any:
    from .demo import model

    return model


def _demo_base_model(device: Any) -> Any:
    """ComfyUI's BaseModel of the demo: flow matching without shift, its latents used as they are."""
    import comfy.latent_formats
    import comfy.model_base
    import comfy.supported_models_base

    class DemoLatent(comfy.latent_formats.LatentFormat):
        latent_channels = _demo().LATENT_CHANNELS

        def __init__(self) -> None:
            self.latent_rgb_factors = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]

    class DemoConfig(comfy.supported_models_base.BASE):
        unet_config: ClassVar[dict] = {}
        unet_extra_config: ClassVar[dict] = {}
        sampling_settings: ClassVar[dict] = {"shift": 1.0, "multiplier": 1000}
        latent_format = DemoLatent
        memory_usage_factor = 0.5

    config = DemoConfig(copy.deepcopy(_demo().UNET_CONFIG))
    config.set_inference_dtype(torch.float32, None)
    return comfy.model_base.BaseModel(config, comfy.model_base.ModelType.FLOW, device=device)


def _load_exactly(module: torch.nn.Module, path: str, prefix: str) -> None:
    """Load the file's tensors under `prefix` into a module; every missing, unexpected or misshapen key is in the one error."""
    from safetensors.torch import load_file

    tensors = {key[len(prefix):]: tensor for key, tensor in load_file(path).items() if key.startswith(prefix)}
    try:
        module.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise ValueError(f"{path} is not the demo model (keys {prefix}*): {error}") from error


def _rebuilt_by(patcher: Any, factory: Callable[..., Any], path: str) -> Any:
    """Tell hosts that can build a second copy of a model how to (`cached_patcher_init`, ComfyUI 0.33); returns the patcher."""
    if hasattr(patcher, "cached_patcher_init"):
        patcher.cached_patcher_init = (factory, (path,))
    return patcher
