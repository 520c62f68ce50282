"""Reads a LoRA stack for a model: from files, key names and shapes to patches by weight, and a report."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ...storage.printable import logger
from ...storage.problem_list import problem_lines
from ..adapters.layer import Layer
from ..models.recognition import factors_of
from ..models.registry import recognize_lora
from ..patching.fuse import MERGEABLE_DTYPES, Patch, are_additive
from ..patching.plan import CHANGING
from . import block_weights, layer_matching, metadata, parse
from .entry import LoraEntry, StateDict
from .peft_config import peft_configs
from .trained_scale import restore_trained_scales
from .trainer import oft_trainer, rank_schedules

if TYPE_CHECKING:
    from .embeddings import Embedding, EmbeddingReading, TokenizerPart

SpacePatches = dict[str, dict[str, list[Patch]]]  # "model" or "clip" -> weight -> patches in order
_MISFITS_SHOWN = 3
log = logger(__name__)


class ModelWeights(NamedTuple):
    """The weights that LoRAs may patch, as the host describes a MODEL and a CLIP.

    - `key_map`: the target of every LoRA key that the host knows; `shapes`: the shape of every weight by ("model" or
      "clip", name).
    - `enlarged`: weights that a LoRA on the model has enlarged already; `can_enlarge`: whether the host has adapters
      that do so.
    - `tokenizer`: the text encoders of the CLIP that may get embeddings of the files, None if they are not asked for;
      `embeddings`: the file of each embedding that the CLIP carries already, by name.
    """

    key_map: Mapping[str, parse.Target]
    shapes: Mapping[tuple[str, str], tuple[int, ...]]
    has_clip: bool = False
    enlarged: frozenset[str] = frozenset()
    can_enlarge: bool = False
    tokenizer: Sequence[TokenizerPart] | None = None
    embeddings: Mapping[str, str] = MappingProxyType({})


class EnlargingLora(NamedTuple):
    """The layers of one LoRA that enlarge their weight (BFL's control LoRAs), for ComfyUI's own adapters to apply.

    `layers` maps a layer's name in `state_dict` to the weight. `changed` are all weights and biases that it changes.
    """

    name: str
    state_dict: dict[str, Tensor]
    layers: dict[str, str]
    changed: list[str]
    strength: float


@dataclass
class LoraReading:
    """A stack's LoRAs matched with a model's weights, and all errors found."""

    loras: list[tuple[LoraEntry, parse.ParsedLora]] = field(default_factory=list)
    enlarging: list[EnlargingLora] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def raise_problems(self) -> None:
        """Raise one ValueError that lists every problem."""
        if self.problems:
            raise ValueError(problem_lines(self.problems, ""))


class LoraStackPatches(NamedTuple):
    """A stack that has been read: patches by weight, what ComfyUI's own adapters must apply, report lines, and the
    embeddings in the files.
    """

    patches: SpacePatches
    enlarging: Sequence[EnlargingLora]
    report: list[str]
    embeddings: Sequence[Embedding] = ()


def read_stack(
    entries: Sequence[LoraEntry],
    weights: ModelWeights,
    mode: str,
    convert: Callable[[StateDict], StateDict],
) -> LoraStackPatches:
    """Read a LoRA stack for a model.

    Args:
        entries: the files with their strengths.
        weights: what the model has.
        mode: the patch mode that it is applied in.
        convert: turns a file's keys into generic names.

    Raises:
        ValueError: listing every error of every entry.
    """
    reading = read_files(entries, weights, convert)
    embeddings = _read_embeddings(entries, weights)
    reading.problems = [*_refused_entries(entries, mode), *reading.problems, *embeddings.problems]
    reading.raise_problems()
    report = []
    for entry, parsed in reading.loras:
        report.append(entry_report(entry, parsed, weights.has_clip))
        _warn_without_effect(entry, parsed)
    for lora in reading.enlarging:
        report.append(
            f"{lora.name}: {', '.join(lora.changed)} through ComfyUI's own adapters at {lora.strength:g}, because it"
            " enlarges the weight"
        )
    report += embeddings.report
    if weights.tokenizer is None:
        for entry, parsed in reading.loras:
            report += [f"{entry.name}: {line}" for line in _list_embeddings(parsed, _CONNECT_CLIP)]
    masked = mode not in ("merge", "host")
    if not masked:
        report += _all_ranks_lines(reading)
    patches = _patches_by_space(reading, weights, masked)
    return LoraStackPatches(patches, reading.enlarging, report, embeddings.embeddings)


def read_stack_to_merge(
    entries: Sequence[LoraEntry],
    weights: ModelWeights,
    base_weights: Mapping[str, Mapping[str, Tensor]],
    convert: Callable[[StateDict], StateDict],
) -> LoraStackPatches:
    """Read a LoRA stack that is to be merged into one LoRA: its patches, and a report of what is skipped.

    Args:
        entries: the files with their strengths.
        weights: what the model has.
        base_weights: the tensors of the "model" and the "clip" by name.
        convert: turns a file's keys into generic names.

    Raises:
        ValueError: listing every error.
    """
    reading = read_files(entries, weights, convert)
    patches = _patches_by_space(reading, weights, masked=False)
    reading.problems += [f"{lora.name} enlarges weights, which no other LoRA can hold" for lora in reading.enlarging]
    report = []
    for entry, lora in reading.loras:
        if lora.text_encoder and entry.strength_clip != 0.0:
            reading.problems.append(
                f"{entry.name}: {len(lora.text_encoder)} of its layers are for a text encoder: connect CLIP, or set the"
                " row's CLIP strength to 0"
            )
        left_out = [*_effect_warnings(entry, lora), *_list_embeddings(lora, _KEEP_ITS_ROW), *_list_left_out(lora)]
        _warn_without_effect(entry, lora)
        if left_out:
            report.append(f"{entry.name}: {'; '.join(left_out)}")
    report += _all_ranks_lines(reading)
    for space, by_weight in patches.items():
        for weight, on_weight in by_weight.items():
            dtype = base_weights[space][weight].dtype
            if dtype not in MERGEABLE_DTYPES and not are_additive(on_weight):
                reading.problems.append(f"{weight}: it is quantized ({dtype})")
    reading.raise_problems()
    return LoraStackPatches(patches, [], report)


def read_files(
    entries: Iterable[LoraEntry], weights: ModelWeights, convert: Callable[[StateDict], StateDict]
) -> LoraReading:
    """Match every entry's layers with a model's weights; problems are collected, not raised."""
    reading = LoraReading()
    for entry in entries:
        try:
            _read_file(entry, weights, convert, reading)
        except ValueError as error:
            reading.problems.append(str(error))
    reading.problems += _enlarging_conflicts(reading, weights)
    return reading


def _read_file(
    entry: LoraEntry, weights: ModelWeights, convert: Callable[[StateDict], StateDict], reading: LoraReading
) -> None:
    """Match one entry's layers with a model's weights; raises ValueError if it cannot be used."""
    if entry.blocks:
        model_weights = (weight for space, weight in weights.shapes if space == "model")
        block_weights.parse_for_model(entry.blocks, model_weights)
    trained = restore_trained_scales(entry.state_dict, entry.metadata)
    state, enlarging = _split_enlarging(convert(trained))
    key_map = {
        **weights.key_map,
        **layer_matching.find_targets(parse.layer_names(state), weights.key_map, weights.shapes),
    }
    if enlarging:
        reading.enlarging.append(_read_enlarging(entry, enlarging, key_map, weights.can_enlarge))
        if not state:
            return
    hint = metadata.guess_model(entry.state_dict, entry.metadata)
    try:
        state = {**state, **rank_schedules(state, entry.metadata)}
        configs = peft_configs(entry.metadata)
        trainer = oft_trainer(entry.state_dict, entry.metadata)
    except ValueError as error:
        raise ValueError(f"{entry.name} cannot be used:\n- {error}") from error
    lora = parse.read(
        state,
        key_map,
        weights.shapes,
        entry.name,
        entry.partial,
        hint,
        configs,
        trainer,
        embeddings_are_read=weights.tokenizer is not None,
        model_family=functools.partial(_family_title, weights),
    )
    reading.loras.append((entry, lora))


def _family_title(weights: ModelWeights) -> str:
    """The title of the family that a model is of; "" if its weights do not tell."""
    layers = {}
    for (space, name), shape in weights.shapes.items():
        if space == "model" and name.endswith(".weight") and len(shape) == 2:
            layers[name.removesuffix(".weight")] = shape
    family = recognize_lora(factors_of(layers).items())
    if family is None:
        return ""
    return family.title


def _read_embeddings(entries: Sequence[LoraEntry], weights: ModelWeights) -> EmbeddingReading:
    """The embeddings in the files of a stack; none without a CLIP."""
    from . import embeddings

    if weights.tokenizer is None:
        return embeddings.EmbeddingReading()
    return embeddings.read(entries, weights.tokenizer, weights.embeddings)


def _refused_entries(entries: Iterable[LoraEntry], mode: str) -> list[str]:
    """Errors for schedules that the mode does not support, and for strengths that are not numbers."""
    scheduled, not_finite = [], []
    for entry in entries:
        if entry.schedule is not None and mode in ("merge", "host"):
            scheduled.append(f"{entry.name}: {CHANGING}, which patch mode {mode} cannot do; use auto or bypass")
        if not (math.isfinite(entry.strength_model) and math.isfinite(entry.strength_clip)):
            not_finite.append(
                f"{entry.name}: expected finite strengths, got {entry.strength_model} for the model and"
                f" {entry.strength_clip} for the text encoder"
            )
    return scheduled + not_finite


# --- layers that enlarge their weight ---------------------------------------------------------------------------------


def _split_enlarging(state: StateDict) -> tuple[StateDict, dict[str, Tensor]]:
    """(the other tensors, the tensors of layers that enlarge their weight): the latter have a `reshape_weight`."""
    layers = tuple(key.removesuffix("reshape_weight") for key in state if key.endswith(".reshape_weight"))
    if not layers:
        return state, {}
    remaining, enlarging = {}, {}
    for key, tensor in state.items():
        if key.startswith(layers):
            enlarging[key] = tensor
        else:
            remaining[key] = tensor
    return remaining, enlarging


def _read_enlarging(
    entry: LoraEntry, state: dict[str, Tensor], key_map: Mapping[str, parse.Target], can_enlarge: bool
) -> EnlargingLora:
    """Check layers that enlarge their weight; ValueError if the model or the host does not support them."""
    names = [key.removesuffix(".reshape_weight") for key in state if key.endswith(".reshape_weight")]
    unknown = [name for name in names if name not in key_map]
    refused = f"{entry.name} cannot be used:\n"
    if unknown:
        raise ValueError(f"{refused}- it enlarges {', '.join(unknown)}, which this model does not have")
    if not can_enlarge:
        raise ValueError(f"{refused}- it enlarges {', '.join(names)}; only a real ComfyUI can do that")
    not_finite = [key for key, tensor in state.items() if not parse.is_finite(tensor)]
    if not_finite:
        raise ValueError(refused + problem_lines([f"{key}: holds NaN or infinite values" for key in not_finite]))
    layers = {name: key_map[name].weight for name in names}
    changed = []
    for name, weight in layers.items():
        changed.append(weight)
        if f"{name}.diff_b" in state:
            changed.append(weight.removesuffix(".weight") + ".bias")
    strength = entry.strength_model * block_weights.strength_of_weight(entry.block_strengths(), changed[0])
    return EnlargingLora(entry.name, state, layers, changed, strength)


def _enlarging_conflicts(reading: LoraReading, weights: ModelWeights) -> list[str]:
    """Errors for weights that one LoRA enlarges while another one changes them at their old size.

    The one that enlarges may be one of these, or on the model already.
    """
    enlarged = dict.fromkeys(weights.enlarged, "a LoRA that the model carries")
    for lora in reading.enlarging:
        enlarged.update(dict.fromkeys(lora.changed, lora.name))
    problems = []
    for entry, parsed in reading.loras:
        for target in parsed.layers:
            if target.model == "model" and target.weight in enlarged:
                problems.append(
                    f"{entry.name} changes {target.weight}, which {enlarged[target.weight]} enlarges: use only one of"
                    " them on this model"
                )
    return problems


# --- patches and report -----------------------------------------------------------------------------------------------


def _all_ranks_lines(reading: LoraReading) -> list[str]:
    """Report lines for T-LoRAs that are merged: their ranks cannot follow the noise level."""
    lines = []
    for entry, parsed in reading.loras:
        if any(_has_masked_ranks(layer) for layers in parsed.layers.values() for layer in layers):
            lines.append(
                f"{entry.name}: merged with all of its ranks at every step, while T-LoRA uses fewer the more noise"
                " there is; patch modes auto and bypass do that"
            )
    return lines


def _has_masked_ranks(layer: Any) -> bool:
    return getattr(layer, "rank_mask", None) is not None


def _patches_by_space(reading: LoraReading, weights: ModelWeights, masked: bool) -> SpacePatches:
    patches = {}
    for space in ("model", "clip"):
        on_space = patches_by_weight(reading.loras, space, weights.shapes, masked)
        if on_space:
            patches[space] = on_space
    return patches


def patches_by_weight(
    loras: Iterable[tuple[LoraEntry, parse.ParsedLora]],
    space: str,
    shapes: Mapping[tuple[str, str], Sequence[int]],
    masked: bool = True,
) -> dict[str, list[Patch]]:
    """The patches of LoRAs for one model, with block weights. Layers of strength 0 are skipped.

    Args:
        loras: each with its entry in the stack.
        space: "model" or "clip".
        shapes: the shape of each (model, weight).
        masked: whether ranks follow the noise level where they were trained so; a text encoder's always work.

    Returns:
        {weight: patches in order}.
    """
    patches: dict[str, list[Patch]] = {}
    for file, (entry, lora) in enumerate(loras):
        if entry.strength(space) == 0.0:
            continue
        by_block = entry.block_strengths()
        schedule = entry.schedule if space == "model" else None
        for weight, layer, part in parse.patches_of(lora, space, shapes):
            strength = _strength_on(entry, by_block, space, weight)
            if strength != 0.0:
                applied: Any = _choose_layer(layer, strength, entry)
                if _has_masked_ranks(applied) and not (masked and space == "model"):
                    applied = applied.with_all_ranks()
                patches.setdefault(weight, []).append(Patch(applied, strength, part, schedule, file))
    return patches


def _choose_layer(layer: Any, strength: float, entry: LoraEntry) -> Layer:
    """A layer of a LoRA, or what ComfyUI's loader makes of it at this strength, if the entry asks for that."""
    if entry.comfyui_oft and hasattr(layer, "to_comfyui"):  # as kinds do that ComfyUI applies in another way
        return layer.to_comfyui(strength)
    return layer


def _strength_on(entry: LoraEntry, by_block: Mapping[str, float], space: str, weight: str) -> float:
    """The strength of a LoRA on one weight: its own, times its block's."""
    return entry.strength(space) * block_weights.strength_of_weight(by_block, weight, text=space == "clip")


def entry_report(entry: LoraEntry, lora: parse.ParsedLora, has_clip: bool) -> str:
    """The report on one LoRA: weights, strengths, kinds of layers, what is skipped, and the file's metadata."""
    if lora.embeddings_only:
        line = f"{entry.name}: no weights for the model, {_count_embeddings(lora.embeddings)}"
    else:
        line = _describe_changes(entry, lora, has_clip)
    line = "; ".join([line, *_effect_warnings(entry, lora), *_list_left_out(lora)])
    facts = metadata.summarize(entry.metadata)
    if facts:
        line += f"\n  {facts}"
    return line


def _count_embeddings(names: Sequence[str]) -> str:
    return "1 embedding" if len(names) == 1 else f"{len(names)} embeddings"


def _describe_changes(entry: LoraEntry, lora: parse.ParsedLora, has_clip: bool) -> str:
    """How many weights a LoRA changes, at which strengths, and how."""
    line = f"{entry.name}: {_count_changed(entry, lora, 'model')} weights of the model at {entry.strength_model:g}"
    if has_clip:
        line += f", {_count_changed(entry, lora, 'clip')} of the text encoder at {entry.strength_clip:g}"
    kinds = [f"{number} {kind}" for kind, number in sorted(lora.kinds.items())]
    line += f" ({', '.join(kinds)})"
    if entry.blocks:
        line += "; block weights"
    if entry.comfyui_oft and lora.kinds.keys() & {"OFT", "BOFT"}:
        line += "; OFT as in ComfyUI's loader, which counts its strength twice"
    if entry.schedule is not None:
        line += "; the model's strength follows its schedule"
        if has_clip:
            line += ", the text encoder's does not"
    return line


def _count_changed(entry: LoraEntry, lora: parse.ParsedLora, space: str) -> str:
    """How many weights a LoRA changes, "3 of 10" where block weights or a strength of 0 leave some out."""
    by_block = entry.block_strengths()
    weights = [target.weight for target in lora.layers if target.model == space]
    changed = [weight for weight in weights if _strength_on(entry, by_block, space, weight) != 0.0]
    if len(changed) == len(weights):
        return str(len(weights))
    return f"{len(changed)} of {len(weights)}"


def _effect_warnings(entry: LoraEntry, lora: parse.ParsedLora) -> list[str]:
    """A warning if a LoRA has weights and changes none of them."""
    if lora.embeddings_only:
        return []
    by_block = entry.block_strengths()
    for target in lora.layers:
        if _strength_on(entry, by_block, target.model, target.weight) != 0.0:
            return []
    cause = "its strength is"
    if entry.blocks:
        cause = f"its strength or its block weights ({entry.blocks.strip()}) are"
    return [f"it changes nothing: {cause} 0 for every weight that the file has"]


def _warn_without_effect(entry: LoraEntry, lora: parse.ParsedLora) -> None:
    for warning in _effect_warnings(entry, lora):
        log.warning("%s: %s", entry.name, warning)


_CONNECT_CLIP = "to use them in prompts, connect CLIP"
_KEEP_ITS_ROW = "to use them in prompts, put the file itself on a CLIP with Load LoRAs"


def _list_embeddings(lora: parse.ParsedLora, how: str) -> list[str]:
    if not lora.embeddings:
        return []
    names = ", ".join(lora.embeddings)
    return [f"{len(lora.embeddings)} embeddings in the file are left out ({names}): {how}"]


def _list_left_out(lora: parse.ParsedLora) -> list[str]:
    """The parts of a file that are not used, and why."""
    left_out = []
    if lora.text_encoder:
        left_out.append(f"{len(lora.text_encoder)} text encoder layers not used, no CLIP is connected")
    if lora.unmatched:
        left_out.append(f"partial: {len(lora.unmatched)} names match no weight and are left out")
    if lora.repeated:
        count = len(lora.repeated)
        names = "1 name repeats the change" if count == 1 else f"{count} names repeat the changes"
        left_out.append(f"{names} of another name, which counts once")
    if lora.idle:
        count = len(lora.idle)
        alphas = "1 alpha without factors is" if count == 1 else f"{count} alphas without factors are"
        left_out.append(f"{alphas} left out ({', '.join(lora.idle[:_MISFITS_SHOWN])})")
    if lora.misfits:
        shown = "; ".join(lora.misfits[:_MISFITS_SHOWN])
        left_out.append(f"partial: {len(lora.misfits)} layers do not fit and are left out ({shown})")
    return left_out
