"""Merges LoRAs into one, and extracts a LoRA from the difference of two models: exact, or cut to a rank by SVD."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...storage.problem_list import problem_lines
from ..models.block_names import DiffusersBlocks
from ..patching.fuse import MERGEABLE_DTYPES, Patch, WeightChange, apply_in_order, are_additive, fuse
from . import block_weights
from .entry import LoraEntry
from .key_formats import registry as key_formats
from .low_rank import RANK_RULES, SVD, best_factors, cut_to_rank, svd, svd_of_product
from .merge_methods import METHODS, FileChange, MergeSettings, energy, inner_product
from .pairing import pairing_name
from .parse import read_layers
from .peft_config import peft_configs
from .trained_scale import restore_trained_scales

_SPELLINGS = (  # names of a model's layers: by its authors (and kohya), and by diffusers
    re.compile(
        r"(input|output|double|single|joint)_blocks_|middle_block_|blocks_\d+_((self|cross)_attn_|ffn_\d$)"
        r"|(layers|\w+_refiner)_\d+_attention_(qkv|out)$"
    ),
    re.compile(
        r"(down_blocks|up_blocks|mid_block)_|(single_)?transformer_blocks_|blocks_\d+_(attn[12]_(to|add)_|ffn_net_)"
        r"|(layers|\w+_refiner)_\d+_att(n|ention)_to_"
    ),
)
_SUM = MergeSettings()
_ROUNDING = 1e-13  # what is left out of a squared norm below this share of it is rounding
_CANCELED = 1e-6  # a sum of changes in float32 below this share of theirs is rounding


class Loss(NamedTuple):
    """How much of a change is lost (by norm): the share of the whole, and the layer that loses most with its share.

    `zeros` is in how many layers the change itself is zero.
    """

    share: float = 0.0
    worst_layer: str = ""
    worst_share: float = 0.0
    zeros: int = 0


@dataclass(frozen=True)
class MergedLora:
    """A merged LoRA's state dict, its smallest and largest rank, and what was lost.

    `cut` is what the reduction to a rank lost of the merged change; `files` is what the method lost of each file's
    change, by its place in the stack.
    """

    state: dict[str, Tensor]
    rank: int
    lowest_rank: int
    cut: Loss
    files: Mapping[int, Loss]

    @property
    def lost(self) -> float:
        """The share of the merged change (by norm) that the cut lost."""
        return self.cut.share


# --- LoRAs without a model --------------------------------------------------------------------------------------------


class LayerKey(NamedTuple):
    """A layer's name without prefix and separators, to pair layers across files; `bias` if it is for the bias."""

    name: str
    bias: bool


def merge_loras(
    entries: Iterable[LoraEntry],
    rank: int = 0,
    advance: Callable[[], None] = lambda: None,
    settings: MergeSettings = _SUM,
) -> MergedLora:
    """Merge LoRAs into one without a model, so every layer must be additive. The sum makes the change of all together.

    Layers are paired by name without prefixes and separators, so a model's own names and diffusers' do not mix. Files
    are read layer by layer.

    Args:
        entries: the files with their strengths.
        rank: 0 keeps the sum exactly (factors side by side, float32; a difference if a layer has one); above 0 it is
            cut to that rank by SVD. A method that drops elements leaves no factors: with 0 its change is cut to the
            ranks of the files, added up.
        advance: called after each layer.
        settings: the method, and a rule for the rank of each layer.

    Raises:
        ValueError: listing everything that cannot be merged.
    """
    collected = _CollectedLayers()
    for file, entry in enumerate(entries):
        collected.add(entry, file)
    collected.raise_problems()
    merged = _MergedLayers(rank, settings)
    for key, patches in collected.patches.items():
        merged.add_patches(collected.file_names[key], patches, _largest_shape(patches), key.bias)
        advance()
    return merged.lora()


class _CollectedLayers:
    """The layers of several files, paired by name, and all problems that prevent a merge."""

    def __init__(self) -> None:
        self.patches: dict[LayerKey, list[Patch]] = {}
        self.file_names: dict[LayerKey, str] = {}  # the name in the first file that has the layer
        self.spellings: dict[int, str] = {}  # spelling -> a file that uses it
        self.problems: list[str] = []

    def add(self, entry: LoraEntry, file: int) -> None:
        """Add the layers of a file, with its strengths and block weights; `file` is its place in the stack."""
        state = key_formats.generic_keys(restore_trained_scales(entry.state_dict, entry.metadata))
        diffusers = block_weights.diffusers_blocks(state)
        try:
            configs = peft_configs(entry.metadata)
        except ValueError as error:
            self.problems.append(f"{entry.name}: {error}")
            return
        layers, problems = read_layers(state, configs)
        names = {base: pairing_name(base) for base, _, _ in layers}
        self._note_spelling(entry.name, list(names.values()))
        by_block = entry.block_strengths()
        self.problems += _missing_blocks(entry.name, state, by_block, diffusers)
        self.problems += [f"{entry.name}: {problem}" for problem in (*problems, *_weight_problems(layers))]
        for base, bias, layer in layers:
            name = names[base]
            if ":" in name or base.startswith(key_formats.text_encoder_prefixes()):
                strength = entry.strength_clip
                block = block_weights.text_block(base, diffusers)
            else:
                strength = entry.strength_model
                block = block_weights.block_of_name(name, diffusers)
            strength *= block_weights.strength_of_block(by_block, block)
            if strength != 0.0:
                key = LayerKey(name, bias)
                self.file_names.setdefault(key, base)
                self.patches.setdefault(key, []).append(Patch(layer, strength, file=file))

    def _note_spelling(self, file: str, names: Sequence[str]) -> None:
        spellings = [number for number, pattern in enumerate(_SPELLINGS) if any(map(pattern.match, names))]
        if len(spellings) == 1:
            self.spellings.setdefault(spellings[0], file)

    def raise_problems(self) -> None:
        """Raise one ValueError listing everything that cannot be merged."""
        problems = self.problems
        if len(self.spellings) > 1:
            problems.append(
                f"{' and '.join(self.spellings.values())} name the model's layers differently, one as diffusers does:"
                " connect model"
            )
        if not problems:
            for key, patches in self.patches.items():
                problems += _contradictions(self.file_names[key], patches)
        if problems:
            raise ValueError("these LoRAs cannot be merged:\n" + problem_lines(problems))


def _weight_problems(layers: Iterable[tuple[str, bool, Any]]) -> list[str]:
    """Errors for layers that need a model's weight, and for layers whose tensors contradict each other."""
    needs_weight: dict[str, list[str]] = {}
    malformed, parts = [], []
    for base, _, layer in layers:
        if not layer.is_additive:
            needs_weight.setdefault(layer.kind, []).append(base)
        elif layer.contradiction() is not None:
            malformed.append(f"{base}: {layer.contradiction()}")
        if base.endswith(".linear1_qkv"):
            parts.append(f"{base} is for a part of a weight: connect model")
    problems = malformed + parts
    for kind, names in needs_weight.items():
        listed = names[0]
        if len(names) > 1:
            listed += f" and {len(names) - 1} more"
        problems.append(f"{kind} ({listed}) changes the weight that it finds: connect model")
    return problems


def _largest_shape(patches: Iterable[Patch]) -> tuple[int, ...]:
    """The shape of the weight that all patches are for: that of the layer with the most dimensions."""
    shapes: list[tuple[int, ...]] = []
    for patch in patches:
        layer: Any = patch.layer  # additive, so it knows its sides
        shapes.append(layer.weight_shape())
    return max(shapes, key=len)


def _contradictions(base: str, patches: Sequence[Patch]) -> list[str]:
    """An error if the shapes of a layer's patches differ, for the first one that does."""
    shape = _largest_shape(patches)
    for patch in patches:
        problem = patch.layer.mismatch(shape)
        if problem is not None:
            return [
                f"{base}: these LoRAs are for different models, its sides differ between the files ({problem})",
            ]
    return []


def _missing_blocks(
    name: str, state: Iterable[str], by_block: Mapping[str, float], diffusers: DiffusersBlocks | None
) -> list[str]:
    """An error if block weights name blocks that no layer of the file is in.

    A partial LoRA need not have every block of a list.
    """
    blocks = {block_weights.block_of_name(pairing_name(key.rpartition(".")[0]), diffusers) for key in state}
    kinds = block_weights.related_kinds({block_weights.kind_of(block) for block in blocks}) | {block_weights.REST}
    missing = []
    for block in by_block:
        if block and block not in block_weights.TEXT and block_weights.kind_of(block) not in kinds:
            missing.append(block)
    if not missing:
        return []
    return [f"{name}: blocks: it has no {', '.join(missing[:6])}; its blocks are {', '.join(sorted(kinds))}"]


# --- LoRAs and differences with a model -------------------------------------------------------------------------------


def merge_changes(
    changes: Mapping[str, WeightChange],
    rank: int = 0,
    advance: Callable[[], None] = lambda: None,
    settings: MergeSettings = _SUM,
) -> MergedLora:
    """Merge the patches of a model's weights (of any kind, in order) into one LoRA. Methods other than the sum take
    what each file does to the model's own weight.

    Args:
        changes: what is done to each weight, by its name.
        rank: as in `merge_loras`.
        advance: called after each weight.
        settings: the method, and a rule for the rank of each layer.
    """
    merged = _MergedLayers(rank, settings)
    for name, change in changes.items():
        bias = name.endswith(".bias")
        base = name.removesuffix(".weight")
        if bias:
            base = name.removesuffix(".bias")
        merged.add_patches(base, change.patches, change.shape, bias, change.read)
        advance()
    return merged.lora()


def extract_lora(
    changes: Mapping[str, Callable[[], Tensor]], rank: int, advance: Callable[[], None] = lambda: None
) -> MergedLora:
    """Extract a LoRA from the differences of two models. Biases, norms and other vectors stay full differences.

    Args:
        changes: by weight name, what computes the difference; it is called only when needed.
        rank: the largest rank, by SVD.
        advance: called after each weight.
    """
    merged = _MergedLayers(rank, _SUM)
    for name, compute in changes.items():
        change = compute().float()
        if bool(change.any()):
            base = name.removesuffix(".weight")
            if base == name:
                merged.add_whole(name.removesuffix(".bias"), change, bias=name.endswith(".bias"))
            elif change.ndim > 1:
                merged.add_cut(base, change, rank)
            else:
                merged.add_whole(base, change)
        advance()
    return merged.lora()


def check_comparable(weights: Mapping[str, Tensor], base: Mapping[str, Tensor], prefix: str) -> list[str]:
    """The names of the weights whose difference between two models a LoRA can store.

    Args:
        weights: those of one model by name.
        base: those of the other.
        prefix: which names count.

    Raises:
        ValueError: listing every weight that only one model has, whose shapes differ, or that is quantized.
    """
    names = [name for name in {**weights, **base} if name.startswith(prefix)]
    missing, other_shape, quantized = [], [], []
    for name in names:
        if name not in weights or name not in base:
            missing.append(f"{name}: only {'model' if name in weights else 'base model'} has it")
            continue
        shape, base_shape = tuple(weights[name].shape), tuple(base[name].shape)
        if shape != base_shape:
            other_shape.append(f"{name}: model has {shape}, base model {base_shape}")
        dtypes = {weights[name].dtype, base[name].dtype} - set(MERGEABLE_DTYPES)
        if dtypes:
            quantized.append(f"{name}: it is quantized ({', '.join(map(str, dtypes))})")
    problems = [*missing, *other_shape, *quantized]
    if problems:
        raise ValueError("these models have no difference that a LoRA can hold:\n" + problem_lines(problems))
    return names


class _Tally:
    """Squared norms of changes and of what they lost, layer by layer."""

    def __init__(self) -> None:
        self.kept = self.left_out = 0.0
        self.worst_layer, self.worst_share = "", 0.0
        self.zeros = 0

    def add(self, layer: str, whole: float, left_out: float) -> None:
        """Count a layer: its squared norm, and that of what it lost."""
        self.kept += whole
        self.left_out += left_out
        self.zeros += whole == 0
        share = _share(left_out, whole)
        if share > self.worst_share:
            self.worst_layer, self.worst_share = layer, share

    def loss(self) -> Loss:
        """What all layers lost."""
        return Loss(_share(self.left_out, self.kept), self.worst_layer, self.worst_share, self.zeros)


def _share(left_out: float, whole: float) -> float:
    return 0.0 if left_out <= _ROUNDING * whole else (left_out / whole) ** 0.5


class _MergedLayers:
    """Collects the layers of the merged LoRA, and counts how much of the change is lost."""

    def __init__(self, rank: int, settings: MergeSettings):
        self.rank, self.settings = rank, settings
        self.method, self.rule = METHODS.get(settings.method), RANK_RULES.get(settings.resize)
        self.chooses_ranks = settings.resize != "none"
        self.ranks: set[int] = set()
        self.state: dict[str, Tensor] = {}
        self.cut = _Tally()
        self.files: dict[int, _Tally] = {}

    def add_patches(
        self,
        base: str,
        patches: Sequence[Patch],
        shape: Sequence[int],
        bias: bool = False,
        read: Callable[[], Tensor] | None = None,
    ) -> None:
        """Add the change of all patches of a weight (or bias) of `shape`; `read` gives the weight to patches that need
        it.
        """
        may_be_flat = read is None and len(shape) == 2 and all(patch.layer.kind != "diff" for patch in patches)
        if self.method.merge is not None:
            self.add_merged(base, file_changes(patches, shape, read), bias, may_be_flat)
            return
        change = _join_patches(0, patches, shape, read)
        if change.up is not None and change.down is not None:
            self.add_product(base, change.up, change.down, shape)
            return
        diff, is_sum = change.whole(), are_additive(patches)
        if is_sum and (self.rank or self.chooses_ranks) and _cancels_out(diff, file_changes(patches, shape)):
            diff = torch.zeros_like(diff)
        self.add_change(base, diff, self.rank, bias, may_be_flat)

    def add_merged(self, base: str, changes: Sequence[FileChange], bias: bool, may_be_flat: bool) -> None:
        """Add the changes of the files to one weight, merged by the method."""
        assert self.method.merge is not None
        up, down, diff, left_out = self.method.merge(changes, self.settings, base)
        for change, lost in zip(changes, left_out, strict=True):
            self.files.setdefault(change.file, _Tally()).add(base, inner_product(change, change), lost)
        shape = changes[0].shape
        if up is not None and down is not None:
            self.add_product(base, up, down, shape)
        elif diff is not None:
            limit = self.rank
            if not limit and not self.chooses_ranks:
                limit = _sum_of_ranks(changes)
            if limit >= min(diff.shape[0], diff[0].numel()):
                limit = 0  # factors would be larger than the difference
            self.add_change(base, diff, limit, bias, may_be_flat)

    def add_change(self, base: str, change: Tensor, limit: int, bias: bool = False, may_be_flat: bool = False) -> None:
        """Add a difference, cut to a rank of at most `limit`, or in full.

        In full it becomes factors with a unit matrix if it may be that of a flattened convolution.
        """
        if change.ndim > 1 and (limit or self.chooses_ranks):
            self.add_cut(base, change, limit)
        elif may_be_flat:
            unit = torch.eye(min(change.shape))
            if len(unit) == len(change):
                self.add_product(base, unit, change, change.shape)
            else:
                self.add_product(base, change, unit, change.shape)
        else:
            self.add_whole(base, change, bias)

    def add_product(self, base: str, up: Tensor, down: Tensor, shape: Sequence[int]) -> None:
        """Add a product up @ down, cut if its rank is above the requested one."""
        if self.chooses_ranks:
            self.add_chosen(base, svd_of_product(up, down), shape, self.rank)
            return
        if self.rank and up.shape[1] > self.rank:
            up, down, total_energy, cut_energy = cut_to_rank(up, down, self.rank)
            self.cut.add(base, total_energy, cut_energy)
        else:
            whole = FileChange(0, 1.0, tuple(shape), up=up, down=down)
            self.cut.add(base, inner_product(whole, whole), 0.0)
        self.add_pair(base, up, down, shape)

    def add_chosen(self, base: str, change: SVD, shape: Sequence[int], limit: int) -> None:
        """Add a change cut to the rank that the rule chooses, and to at most `limit`."""
        rank = self.rule.rank(change.values, self.settings.resize_to)
        if limit:
            rank = min(rank, limit)
        energies = change.values.square()
        self.cut.add(base, float(energies.sum()), float(energies[rank:].sum()))
        self.add_pair(base, *change.truncate(rank).factors(), shape)

    def add_pair(self, base: str, up: Tensor, down: Tensor, shape: Sequence[int]) -> None:
        """Add a factor pair (out, r), (r, columns) for a weight of `shape`."""
        rank = up.shape[1]
        kernel = [1] * len(shape[2:])
        self.state[f"{base}.lora_up.weight"] = up.reshape(up.shape[0], rank, *kernel).contiguous()
        self.state[f"{base}.lora_down.weight"] = down.reshape(rank, *shape[1:]).contiguous()
        self.state[f"{base}.alpha"] = torch.tensor(float(rank))
        self.ranks.add(rank)

    def add_whole(self, base: str, change: Tensor, bias: bool = False) -> None:
        """Add a difference unchanged."""
        self.cut.add(base, energy(change), 0.0)
        key = f"{base}.diff_b" if bias else f"{base}.diff"
        self.state[key] = change.contiguous()

    def add_cut(self, base: str, change: Tensor, limit: int) -> None:
        """Add a difference cut to a rank of at most `limit`."""
        if self.chooses_ranks:
            self.add_chosen(base, svd(change.flatten(1)), change.shape, limit)
            return
        up, down, left_out = best_factors(change.flatten(1), limit)
        self.cut.add(base, energy(change), left_out)
        self.add_pair(base, up, down, change.shape)

    def lora(self) -> MergedLora:
        """The collected LoRA; ValueError if it is empty."""
        if not self.state:
            raise ValueError("there is nothing to make a LoRA of: the change is zero everywhere")
        files = {file: tally.loss() for file, tally in sorted(self.files.items())}
        lowest, largest = min(self.ranks, default=0), max(self.ranks, default=0)
        return MergedLora(self.state, largest, lowest, self.cut.loss(), files)


def file_changes(
    patches: Sequence[Patch], shape: Sequence[int], read: Callable[[], Tensor] | None = None
) -> list[FileChange]:
    """What each file does to a weight.

    Args:
        patches: of the weight, in order; each knows its file.
        shape: the weight's.
        read: gives the weight in float32 to patches that need it.
    """
    by_file: dict[int, list[Patch]] = {}
    for patch in patches:
        by_file.setdefault(patch.file, []).append(patch)
    if read is not None:
        read = functools.cache(read)
    return [_join_patches(file, own, shape, read) for file, own in by_file.items()]


def _join_patches(
    file: int, patches: Sequence[Patch], shape: Sequence[int], read: Callable[[], Tensor] | None
) -> FileChange:
    """What patches of one weight do together: factors, or one tensor, as ComfyUI reads only the difference where a
    name has both.
    """
    strength, sizes = patches[0].strength, tuple(shape)
    if read is not None and not are_additive(patches):
        weight = read()
        return FileChange(file, strength, sizes, diff=apply_in_order(weight, patches) - weight)
    fused = fuse(patches, shape)
    factors = FileChange(file, strength, sizes, fused.up, fused.down.float())
    if fused.diff is None:
        return factors
    diff = fused.diff
    if fused.up.shape[1]:
        diff = diff + factors.whole()
    return FileChange(file, strength, sizes, diff=diff)


def _cancels_out(total: Tensor, changes: Sequence[FileChange]) -> bool:
    """Whether a sum of changes in float32 is nothing but rounding, as that of a file and its negative is."""
    if len(changes) < 2:
        return False
    parts = math.sqrt(sum(inner_product(change, change) for change in changes))
    return math.sqrt(energy(total)) <= _CANCELED * parts


def _sum_of_ranks(changes: Sequence[FileChange]) -> int:
    """The ranks of the files for a layer, added up; 0 if one of them has no factors."""
    together = 0
    for change in changes:
        if change.down is None:
            return 0
        together += len(change.down)
    return together
