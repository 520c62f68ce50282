"""Gives each layer of a LoRA file the scale it was trained with, where alpha over the stored rank is another.

Two trainers write such files. sd-scripts' `split_qkv` trains three or four pairs on one weight and stores them as one
pair of three or four times the rank, with the alpha of each. LyCORIS writes a LoKr of two whole matrices, which has no
rank in the file, and scales by the root of the rank with `rs_lora`. Which rank was trained is in the metadata, so a
file that does not say who trained it is left as it is. docs/trainer_files.md has the rule of every trainer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .key_formats.key_format import Group
from .parse import dividing_ranks, group_by_layer

_GRAFT_STATE = "graft_state"  # whose own files need no correction
_LYCORIS = "lycoris.kohya"
_SD_SCRIPTS = "networks."  # and musubi-tuner's modules
_WITH_LOKR = (_LYCORIS, "networks.lokr")
_SPLIT = {"qkv": 3, "linear1": 4}  # the pairs on one weight, by the end of its name: q, k, v, and the MLP's
# LyCORIS' own presets choose layers only; one from a file may give a layer a rank and an alpha of its own
_PRESETS = frozenset(
    {
        "full",
        "full-lin",
        "attn-mlp",
        "attn-only",
        "unet-only",
        "unet-transformer-only",
        "unet-convblock-only",
        "ia3",
    }
)
_NOT_STABILIZED = ("dylora", "tlora")  # take `rs_lora` and divide by the rank
_ROUNDING = 2.0**-8  # of an alpha that was saved in bf16


@dataclass(frozen=True)
class _Training:
    """What a file's metadata say about how it was trained; a number is None where they do not say it."""

    module: str
    rank: float | None
    alpha: float | None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_split(self) -> bool:
        """Whether sd-scripts trained a pair for each of q, k and v, which it does at no other word than True."""
        return self.module.startswith(_SD_SCRIPTS) and str(self.arguments.get("split_qkv")) == "True"

    @property
    def is_rank_stabilized(self) -> bool:
        """Whether LyCORIS divided by the root of the rank; whatever is not false switches that on."""
        stabilized = str(self.arguments.get("rs_lora", False)).lower() != "false"
        return self.module == _LYCORIS and stabilized and self.arguments.get("algo") not in _NOT_STABILIZED

    def number(self, argument: str, otherwise: float | None) -> float | None:
        """An argument's number; `otherwise` where it is not given."""
        return _number(self.arguments.get(argument)) or otherwise

    @property
    def ranks_by_layer(self) -> bool:
        """Whether a layer may have a rank that the metadata do not tell."""
        return self.arguments.get("preset", "full") not in _PRESETS or bool(self.arguments.get("network_reg_dims"))


def restore_trained_scales(state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Mapping[str, Tensor]:
    """The tensors of a LoRA file, with alphas and factors from which every layer has the scale it was trained with.

    - `state`: the file's tensors under its own names; it is not changed, and is returned where nothing differs.
    - `metadata`: the file's own, of which `ss_network_module`, `ss_network_dim`, `ss_network_alpha` and
      `ss_network_args` count.
    """
    training = _training(metadata)
    if training is None:
        return state
    groups, _, _ = group_by_layer(state, plain=False)
    changed: dict[str, Tensor] = {}
    for base, group in groups.items():
        alpha = _alpha(group)
        if alpha is None or any(tensor.is_complex() for _, tensor in group.values()):
            continue  # the second is refused when the file is read
        if "lokr_w1" in group and "lokr_w2" in group:
            scale = _scale_of_whole_lokr(group, alpha, training)
            if scale != 1.0:
                key, factor = group["lokr_w1"]
                changed[key] = factor.float() * scale
            continue
        ratio = _count_split_pairs(base, group, alpha, training) * _rank_stabilization(group, alpha, training)
        if ratio != 1.0:
            changed[group["alpha"][0]] = torch.tensor(alpha * ratio)
    return {**state, **changed} if changed else state


def _training(metadata: Mapping[str, str]) -> _Training | None:
    """What the metadata say, None if they name no trainer with a scale of its own."""
    module = metadata.get("ss_network_module", "")
    if _GRAFT_STATE in metadata:
        return None
    try:
        arguments = json.loads(metadata.get("ss_network_args") or "{}")
    except (ValueError, RecursionError):
        arguments = {}
    rank, alpha = _number(metadata.get("ss_network_dim")), _number(metadata.get("ss_network_alpha"))
    training = _Training(module, rank, alpha, arguments if isinstance(arguments, dict) else {})
    if training.is_split or module in _WITH_LOKR:
        return training
    return None


def _number(value: Any) -> float | None:
    """A number of the metadata, which are text; None if it is none ("None", "Dynamic")."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _alpha(group: Group) -> float | None:
    """A layer's alpha as it is stored, None if it has none; one that is too large for its type is infinite."""
    if "alpha" not in group or group["alpha"][1].numel() != 1 or group["alpha"][1].is_complex():
        return None
    return float(group["alpha"][1])


def _is_close(alpha: float, expected: float | None) -> bool:
    return expected is not None and math.isclose(alpha, expected, rel_tol=_ROUNDING)


# --- split_qkv --------------------------------------------------------------------------------------------------------


def _count_split_pairs(base: str, group: Group, alpha: float, training: _Training) -> int:
    """How many pairs a stored one is made of: its alpha is divided by the rank of one of them."""
    if not training.is_split:
        return 1
    pairs = next((pairs for end, pairs in _SPLIT.items() if base.endswith(end)), 1)
    if pairs == 1 or "up" not in group or "down" not in group:
        return 1
    up, down = group["up"][1], group["down"][1]
    if up.ndim != 2 or down.ndim != 2 or not len(down) == up.shape[1] > 0:
        return 1
    if len(down) % pairs or not _is_block_diagonal(up, pairs):
        return 1
    if training.alpha is None or not _is_close(alpha, training.alpha or len(down) / pairs):
        return 1  # resized since, or somebody has corrected the alpha
    return pairs


def _is_block_diagonal(up: Tensor, blocks: int) -> bool:
    """Whether `up` (rows, blocks x rank) is one block of columns for the first rows, the next for the next …"""
    used = (up.unflatten(1, (blocks, -1)) != 0).any(2)
    order = torch.arange(blocks).expand_as(used)[used]  # row by row
    return bool((used.sum(1) <= 1).all()) and bool((order.diff() >= 0).all())


# --- LyCORIS ----------------------------------------------------------------------------------------------------------


def _scale_of_whole_lokr(group: Group, alpha: float, training: _Training) -> float:
    """What kron(w1, w2) was multiplied by, two whole matrices.

    LyCORIS takes the rank for alpha there, so that the scale is 1, or the root of the rank with `rs_lora`; the stored
    alpha is the rank, or its power of 3/2. Trainers made from it keep the given alpha and divide it by the rank.
    """
    rank, given = training.rank, training.alpha
    if group["lokr_w2"][1].shape[2:].numel() > 1:
        rank, given = training.number("conv_dim", rank), training.number("conv_alpha", given)
    if not rank:
        return 1.0
    root = math.sqrt(rank) if training.is_rank_stabilized else 1.0
    if not math.isfinite(alpha) or _is_close(alpha, rank) or _is_close(alpha, rank * root):
        return root
    if training.ranks_by_layer and not (_is_close(alpha, given) or (given and _is_close(alpha, given * root))):
        return alpha ** (1 / 3) if root != 1.0 else 1.0  # alpha is the layer's own rank, or its power of 3/2
    if root != 1.0 and _is_close(alpha, given):  # LyCORIS before 3.0 stored it as given
        return alpha / root
    return alpha / rank


def _rank_stabilization(group: Group, alpha: float, training: _Training) -> float:
    """What a stored alpha lacks where it was divided by the root of the rank: that root.

    LyCORIS multiplies it in before it saves, GLoRA excepted, and so do all kinds before version 3.0.
    """
    if not training.is_rank_stabilized:
        return 1.0
    rank = _stored_rank(group)
    given = rank if training.alpha == 0 else training.alpha  # LyCORIS takes the rank for an alpha of 0
    if rank and (_is_close(alpha, given) or _is_close(alpha, training.number("conv_alpha", None))):
        return math.sqrt(rank)
    return 1.0


def _stored_rank(group: Group) -> int:
    """The rank that a layer's alpha is divided by, 0 if it has none."""
    if any(tensor.ndim < 2 for role, (_, tensor) in group.items() if role != "alpha"):
        return 0
    if "a2" in group:  # GLoRA's, whose older files store each pair in reverse order
        return min(group["a2"][1].flatten(1).shape)
    return next(iter(dividing_ranks(group)), 0)
