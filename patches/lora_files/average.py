"""Averages LoRA files: their factors (for states of one run), or their products (for any ranks).

An average of products is exact, or cut to a rank by SVD.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...storage.problem_list import problem_lines
from ..adapters.lora import LoRA
from .key_formats import registry as key_formats
from .key_formats.key_format import Group
from .low_rank import cut_to_rank
from .pairing import rename_as_first
from .parse import dividing_ranks, group_by_layer

ALGEBRAS = ("factors", "products")


@dataclass(frozen=True)
class AveragedLora:
    """An averaged LoRA: its state dict, how it was averaged (`algebra`), its ranks, and how much the cut lost."""

    state: dict[str, Tensor]
    algebra: str
    ranks: tuple[int, ...] = ()
    lost: float = 0.0


def average(
    states: Sequence[Mapping[str, Tensor]], shares: Sequence[float], names: Sequence[str], algebra: str, rank: int = 0
) -> AveragedLora:
    """The weighted average of LoRAs, under the first one's names. They may be in different key formats, as PEFT's and
    kohya's, as long as each layer has a counterpart.

    Args:
        states: the files' tensors by name.
        shares: the weight of each file; they need not add up to 1.
        names: what errors call the files.
        algebra: "factors" averages up and down by themselves, which holds within one run; "products" averages the
            changes up @ down.
        rank: with products the largest rank of the result, by SVD; 0 keeps it exact.

    Raises:
        ValueError: listing every layer, shape and key that differs between the files, and every kind of layer that
            cannot be averaged.
    """
    if algebra not in ALGEBRAS:
        raise ValueError(f"Averaging LoRAs: averaging method is {algebra!r}, expected one of {', '.join(ALGEBRAS)}.")
    if rank < 0 or (rank and algebra == "factors"):
        why = "factors keep their own rank, use 0" if rank > 0 else "expected 0 or more"
        raise ValueError(f"Averaging LoRAs: maximum rank is {rank}; {why}.")
    if not states or not len(states) == len(shares) == len(names):
        raise ValueError(
            f"Averaging LoRAs: expected a share and a name for each file, got {len(states)}, {len(shares)},"
            f" {len(names)}."
        )
    files = _read(states, names, plain=algebra == "products")
    _check(files, names, same_rank=algebra == "factors")
    if algebra == "factors":
        return _factors(files, shares)
    return _products(files, shares, rank)


def _read(states: Sequence[Mapping[str, Tensor]], names: Sequence[str], plain: bool) -> list[dict[str, Group]]:
    """The layers of each file.

    `plain` accepts only factor pairs and differences; without it any kind is accepted, for averages of factors within
    one run.
    """
    files, errors = [], []
    for state, name in zip(states, names, strict=True):
        groups, strangers, problems = group_by_layer(state, plain)
        if not plain:
            strangers = _take_words_(groups, state, strangers)
        errors += [f"{name}: {problem}" for problem in problems]
        errors += [f"{name}: {key} is not a LoRA tensor" for key in strangers]
        errors += [f"{name}: it holds no layer"] if not groups else []
        for base, group in groups.items():
            if ("up" in group) != ("down" in group) or ("mid" in group and "up" not in group):
                errors.append(f"{name}: {base} is half a pair ({', '.join(sorted(key for key, _ in group.values()))})")
            not_finite = [key for key, tensor in group.values() if not bool(torch.isfinite(tensor.float()).all())]
            errors += [f"{name}: {key} holds NaN or infinite values" for key in not_finite]
        files.append(groups)
    _raise(errors)
    return rename_as_first(files)


def _take_words_(groups: dict[str, Group], state: Mapping[str, Tensor], strangers: Sequence[str]) -> list[str]:
    """Puts trained words among the layers, each tensor as one; returns the keys that are none."""
    others = []
    for key in strangers:
        if key_formats.embedding_key(key) is None:
            others.append(key)
        else:
            groups[key] = {"vectors": (key, state[key])}
    return others


def _check(files: Sequence[Mapping[str, Group]], names: Sequence[str], same_rank: bool) -> None:
    errors = []
    first, name = files[0], names[0]
    for groups, other in zip(files[1:], names[1:], strict=True):
        if not first.keys() & groups.keys():
            errors.append(
                f"{name} and {other} have no layer in common by name ({min(first)}, {min(groups)}): they are for"
                " different models, or one has diffusers' names and the other the model's own. For one model: put"
                f" {other} alone into Merge LoRAs with model connected, save the result with Save LoRA in the key"
                f" format of {name}, and average that file"
            )
            continue
        errors += [f"{base}: in {name}, missing in {other}" for base in sorted(first.keys() - groups.keys())]
        errors += [f"{base}: in {other}, missing in {name}" for base in sorted(groups.keys() - first.keys())]
        for base in sorted(first.keys() & groups.keys()):
            errors += [
                f"{base}: {problem} ({name}, {other})" for problem in _differences(first[base], groups[base], same_rank)
            ]
    _raise(errors)


def _differences(left: Group, right: Group, same_rank: bool) -> list[str]:
    keys = left.keys() | right.keys()
    if not same_rank:
        keys -= {"alpha", "mid"}
    differences = []
    for role in sorted(keys):
        if (role in left) != (role in right):
            if role != "alpha" or _scale(left) != _scale(right):
                differences.append(f"{role} only in one")
            continue
        a, b = left[role][1], right[role][1]
        if role == "alpha" and float(a) != float(b):
            differences.append(f"alpha {float(a):g} and {float(b):g}")
        elif same_rank and a.shape != b.shape:
            differences.append(f"{role} {tuple(a.shape)} and {tuple(b.shape)}; average products for different ranks")
        elif not same_rank and role in ("diff", "diff_b") and a.shape != b.shape:
            differences.append(f"{role} {tuple(a.shape)} and {tuple(b.shape)}")
    if not same_rank and not differences and "up" in left and _pair(left).weight_shape() != _pair(right).weight_shape():
        differences.append(f"weights {_pair(left).weight_shape()} and {_pair(right).weight_shape()}")
    return differences


def _factors(files: Sequence[Mapping[str, Group]], shares: Sequence[float]) -> AveragedLora:
    state: dict[str, Tensor] = {}
    for base, group in files[0].items():
        for role, (key, tensor) in group.items():
            state[key] = (
                tensor.float().clone() if role == "alpha" else _sum([groups[base][role][1] for groups in files], shares)
            )
    return AveragedLora(state, "factors", _ranks(files[0]))


def _products(files: Sequence[Mapping[str, Group]], shares: Sequence[float], rank: int) -> AveragedLora:
    state: dict[str, Tensor] = {}
    ranks: set[int] = set()
    total_energy = lost_energy = 0.0
    for base, group in files[0].items():
        for role in sorted(group.keys() & {"diff", "diff_b"}):
            state[group[role][0]] = _sum([groups[base][role][1] for groups in files], shares)
        if "up" not in group:
            continue
        up, down = concatenate([_pair(groups[base]) for groups in files], shares)
        if rank:
            up, down, energy, cut_energy = cut_to_rank(up, down, rank)
            total_energy, lost_energy = total_energy + energy, lost_energy + cut_energy
        shape = _pair(group).weight_shape()
        convolution = group["down"][1].ndim > 2
        state[f"{base}.lora_up.weight"] = (
            up.reshape(*up.shape, *(1,) * (len(shape) - 2)) if convolution else up
        ).float()
        state[f"{base}.lora_down.weight"] = (down.reshape(down.shape[0], *shape[1:]) if convolution else down).float()
        state[f"{base}.alpha"] = torch.tensor(float(up.shape[1]))  # scale 1
        ranks.add(up.shape[1])
    return AveragedLora(
        state, "products", tuple(sorted(ranks)), (lost_energy / total_energy) ** 0.5 if total_energy else 0.0
    )


def concatenate(layers: Sequence[LoRA], shares: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Put weighted layers of one weight side by side. The product of the results is the weighted sum of their changes:

        sum share_i scale_i up_i @ down_i = [share_i scale_i up_i] @ [down_i]

    Args:
        layers: of one weight. Convolutions are flattened, as `LoRA.factors` gives them.
        shares: the weight of each.

    Returns:
        (up (out, all ranks), down (all ranks, columns)) in float64.
    """
    ups, downs = [], []
    for layer, share in zip(layers, shares, strict=True):
        up, down = layer.factors()
        ups.append(up.double() * (share * layer.scale))
        downs.append(down.double())
    return torch.cat(ups, 1), torch.cat(downs, 0)


def _pair(group: Group) -> LoRA:
    alpha = float(group["alpha"][1]) if "alpha" in group else None
    return LoRA(group["up"][1], group["down"][1], alpha, group["mid"][1] if "mid" in group else None)


def _scale(group: Group) -> float:
    """alpha / rank, which is 1 without alpha: PEFT's files have none where kohya's have alpha equal to the rank."""
    if "alpha" not in group:
        return 1.0
    ranks = dividing_ranks(group)
    return float(group["alpha"][1]) / ranks[0] if ranks else math.nan


def _sum(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    total = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for tensor, share in zip(tensors, shares, strict=True):
        total.add_(tensor.to("cpu", torch.float64), alpha=share)
    return total.float()


def _ranks(groups: Mapping[str, Group]) -> tuple[int, ...]:
    return tuple(sorted({group["down"][1].shape[0] for group in groups.values() if "down" in group}))


def _raise(wrong: Sequence[str]) -> None:
    if wrong:
        raise ValueError(f"The LoRAs cannot be averaged ({len(wrong)}):\n" + problem_lines(wrong))
