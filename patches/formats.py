"""LoRA state dicts of every spelling (kohya-ss/sd-scripts, PEFT, diffusers, ComfyUI), read into layers and checked whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .adapters import Diff, Layer, LoRA, delta
from .stack import Slice

_ROLES = {  # suffix -> what the tensor is; the longest suffix that fits counts
    ".lora_up.weight": "up", ".lora_down.weight": "down", ".lora_mid.weight": "mid",
    ".lora_B.weight": "up", ".lora_A.weight": "down", ".lora_B.default.weight": "up", ".lora_A.default.weight": "down",
    ".lora_B": "up", ".lora_A": "down", ".lora.up.weight": "up", ".lora.down.weight": "down",
    "_lora.up.weight": "up", "_lora.down.weight": "down",
    ".lora_linear_layer.up.weight": "up", ".lora_linear_layer.down.weight": "down",
    ".alpha": "alpha", ".diff": "diff", ".diff_b": "diff_b",
}  # fmt: skip
_OTHER_KINDS = {
    ".hada_w1_a": "LoHa", ".hada_w1_b": "LoHa", ".hada_w2_a": "LoHa", ".hada_w2_b": "LoHa", ".hada_t1": "LoHa", ".hada_t2": "LoHa",
    ".lokr_w1": "LoKr", ".lokr_w1_a": "LoKr", ".lokr_w1_b": "LoKr", ".lokr_w2": "LoKr", ".lokr_w2_a": "LoKr", ".lokr_w2_b": "LoKr",
    ".lokr_t2": "LoKr", ".dora_scale": "DoRA", ".lora_magnitude_vector": "DoRA", ".lora_magnitude_vector.weight": "DoRA",
    ".lora_magnitude_vector.default.weight": "DoRA", ".oft_blocks": "OFT or BOFT", ".oft_diag": "OFT", ".rescale": "OFT or BOFT",
    ".a1.weight": "GLoRA", ".a2.weight": "GLoRA", ".b1.weight": "GLoRA", ".b2.weight": "GLoRA",
    ".w_norm": "norm weights", ".b_norm": "norm weights", ".set_weight": "set_weight", ".reshape_weight": "reshape_weight",
    ".lora_B.bias": "LoRA bias", ".lora_up.bias": "LoRA bias", ".lora_B.default.bias": "LoRA bias", ".on_input": "IA3",
}  # fmt: skip
_SUFFIXES = sorted((*_ROLES, *_OTHER_KINDS), key=len, reverse=True)
_TEXT_ENCODER = ("lora_te", "text_encoder", "text_model.", "te.", "te1.", "te2.", "lora_prior_te", "cond_stage_model.", "clip_")
_LISTED = 12


class Target(NamedTuple):
    """Where a layer goes: a model ("model" or "clip"), its weight, and for a fused weight the part and a row permutation of the host's."""

    model: str
    weight: str
    part: Slice | None = None
    function: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, eq=False)
class ParsedLora:
    """One LoRA read: layers by target, and the names that found no weight (`text_encoder`: names for a text encoder that is not here)."""

    name: str
    layers: dict[Target, tuple[Layer, ...]]
    unmatched: tuple[str, ...] = ()
    text_encoder: tuple[str, ...] = ()
    kinds: dict[str, int] = field(default_factory=dict)


def read(
    state: Mapping[str, Tensor],
    key_map: Mapping[str, Target],
    shapes: Mapping[tuple[str, str], Sequence[int]],
    name: str,
    partial: bool = False,
) -> ParsedLora:
    """Match a LoRA's state dict with a model's weights and check it whole.

    `key_map` gives the target of every LoRA name the model knows; `shapes` the shape of (model, weight). Raises ValueError listing
    every problem: no match at all, names without a weight (unless `partial`), incomplete pairs, wrong shapes, NaN or infinite values,
    kinds that are not available. Nothing is changed.
    """
    groups, strangers, problems = grouped(state)
    has_clip = any(target.model == "clip" for target in key_map.values())
    layers: dict[Target, list[Layer]] = {}
    sources: dict[Target, str] = {}
    unmatched: list[str] = list(strangers)
    text: list[str] = []
    for base, tensors in groups.items():
        target = key_map.get(base)
        if target is None or (target.model, target.weight) not in shapes:
            (text if not has_clip and base.startswith(_TEXT_ENCODER) else unmatched).append(base)
            continue
        if sources.setdefault(target, base) != base:
            problems.append(f"{base}: names the same weight as {sources[target]} ({target.weight})")
            continue
        for place, layer in _layers(base, tensors, target, problems):
            _check(base, place, layer, shapes, problems)
            layers.setdefault(place, []).append(layer)
    problems += _unusable(groups, layers, unmatched, text, partial) if not problems else []
    if problems:
        raise ValueError(f"LoRA {name} cannot be used:\n" + "\n".join(f"- {problem}" for problem in problems))
    kinds: dict[str, int] = {}
    for of in layers.values():
        for layer in of:
            kinds[layer.kind] = kinds.get(layer.kind, 0) + 1
    return ParsedLora(name, {target: tuple(of) for target, of in layers.items()}, tuple(unmatched), tuple(text), kinds)


Group = dict[str, tuple[str, Tensor]]  # role -> (key in the file, tensor)


def grouped(state: Mapping[str, Tensor]) -> tuple[dict[str, Group], list[str], list[str]]:
    """(tensors by layer name and role, keys of no known form, problems)."""
    groups: dict[str, Group] = {}
    strangers: list[str] = []
    problems: list[str] = []
    others: dict[str, list[str]] = {}
    for key, tensor in state.items():
        suffix = next((suffix for suffix in _SUFFIXES if key.endswith(suffix)), None)
        if suffix is None:
            strangers.append(key)
        elif suffix in _OTHER_KINDS:
            others.setdefault(_OTHER_KINDS[suffix], []).append(key)
        else:
            group = groups.setdefault(key[: -len(suffix)], {})
            if _ROLES[suffix] in group:
                problems.append(f"{key}: the same tensor is also there as {group[_ROLES[suffix]][0]}")
            group[_ROLES[suffix]] = (key, tensor)
    for kind, keys in sorted(others.items()):
        problems.append(f"{kind} is not available in this version of Graft ({_some(keys)}); use ComfyUI's own LoRA loader for this file")
    return groups, strangers, problems


def _layers(base: str, group: Group, target: Target, problems: list[str]) -> Iterator[tuple[Target, Layer]]:
    tensors = {role: tensor for role, (_, tensor) in group.items()}
    for key, tensor in group.values():
        if not bool(torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all()):
            problems.append(f"{key}: holds NaN or infinite values")
    if ("up" in tensors) != ("down" in tensors) or ("mid" in tensors and "up" not in tensors):
        problems.append(f"{base}: expected an up and a down matrix, got only {', '.join(sorted(key for key, _ in group.values()))}")
        return
    if "up" in tensors:
        alpha = tensors.get("alpha")
        if alpha is not None and alpha.numel() != 1:
            problems.append(f"{group['alpha'][0]}: expected one number, got {tuple(alpha.shape)}")
            return
        yield target, LoRA(tensors["up"], tensors["down"], None if alpha is None else float(alpha), tensors.get("mid"))
    if "diff" in tensors:
        yield target, Diff(tensors["diff"])
    if "diff_b" in tensors:
        bias = target.weight.removesuffix(".weight") + ".bias"
        yield Target(target.model, bias, _rows(target.part), target.function), Diff(tensors["diff_b"])


def _rows(part: Slice | None) -> Slice | None:
    """The part of a bias that belongs to a part of its weight."""
    return part if part is not None and part[0] == 0 else None


def _check(
    base: str, target: Target, layer: Layer, shapes: Mapping[tuple[str, str], Sequence[int]], problems: list[str]
) -> None:
    shape = shapes.get((target.model, target.weight))
    if shape is None:
        problems.append(f"{base}: the model has no {target.weight}")
        return
    if target.part is not None:
        shape = [target.part[2] if dimension == target.part[0] else side for dimension, side in enumerate(shape)]
    problem = layer.problem(shape)
    if problem is not None:
        problems.append(f"{base}: {problem} ({target.weight})")


def _unusable(
    groups: Mapping[str, Group], layers: Mapping[Target, list[Layer]], unmatched: Sequence[str], text: Sequence[str], partial: bool
) -> list[str]:
    if not groups:
        return [f"it holds no LoRA layer ({_some(unmatched)})" if unmatched else "it is empty"]
    if not layers and text and not unmatched:
        return [f"it is for a text encoder only ({_some(text)}); connect clip"]
    if not layers:
        return [f"no key matches this model, it is for another one ({_some([*unmatched, *text])})"]
    if unmatched and not partial:
        return [
            f"{len(unmatched)} of {len(groups) + len(unmatched) - sum(name in groups for name in unmatched)} names match no weight of this "
            f"model ({_some(unmatched)}); mark the row as partial to use the rest"
        ]
    return []


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:_LISTED]) + (f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else "")


def pieces_of(parsed: ParsedLora, model: str) -> Iterator[tuple[str, Layer, Slice | None]]:
    """(weight, layer, part) of every layer for one model; a host's row permutation is applied to the whole difference."""
    for target, layers in parsed.layers.items():
        if target.model != model:
            continue
        for layer in layers:
            yield target.weight, layer if target.function is None else _permuted(layer, target.function), target.part


def _permuted(layer: Layer, function: Callable[[Tensor], Tensor]) -> Layer:
    if isinstance(layer, LoRA):
        kernel = layer.down.shape[2:] if layer.mid is None else layer.mid.shape[2:]
        return Diff(function(delta(layer, (layer.up.shape[0], layer.down.shape[1], *kernel))))
    return Diff(function(layer.diff))
