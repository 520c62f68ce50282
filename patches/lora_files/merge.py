"""Merges LoRAs into one, and extracts a LoRA from the difference of two models: exact, or cut to a rank by SVD."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...storage.problem_list import problem_lines
from ..models.block_names import DiffusersBlocks
from ..patching.fuse import Patch, additive, fuse, in_order
from . import block_weights
from .entry import LoraEntry
from .key_formats import registry as key_formats
from .key_formats.diffusers import strip_attn_processor
from .layer_names import canonical
from .low_rank import best, cut_to_rank
from .parse import unplaced
from .peft_config import peft_configs

MERGEABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
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
# ComfyUI's prefix of text encoders, which kohya numbers.
_GENERIC = re.compile(r"text_encoders\.(\w+)\.transformer\.(model\.)?")


@dataclass(frozen=True)
class MergedLora:
    """A merged LoRA's state dict, its largest rank, and how much of the change (by norm) the cut lost."""

    state: dict[str, Tensor]
    rank: int
    lost: float


class WeightChange(NamedTuple):
    """What a stack does to one weight of a model: its patches, the weight's shape, and how to read the weight in
    float32.
    """

    patches: Sequence[Patch]
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


# --- LoRAs without a model --------------------------------------------------------------------------------------------


class LayerKey(NamedTuple):
    """A layer's name without prefix and separators, to pair layers across files; `bias` if it is for the bias."""

    name: str
    bias: bool


def merge_loras(entries: Iterable[LoraEntry], rank: int = 0, advance: Callable[[], None] = lambda: None) -> MergedLora:
    """Merge LoRAs into one without a model; it makes the same change as all together, so every layer must be additive.

    `rank` 0 keeps the change exactly (factors side by side, float32; a difference if a layer has one); above 0 it is
    cut to that rank by SVD. Layers are paired by name without prefixes and separators, so a model's own names and
    diffusers' do not mix. Raises ValueError listing everything that cannot be merged.
    """
    collected = _CollectedLayers()
    for entry in entries:
        collected.add(entry)
    collected.raise_problems()
    merged = _MergedLayers(rank)
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

    def add(self, entry: LoraEntry) -> None:
        """Add the layers of a file, with its strengths and block weights."""
        state = key_formats.generic_keys(entry.state_dict)
        diffusers = block_weights.diffusers_blocks(state)
        layers, problems = unplaced(state, peft_configs(entry.metadata))
        names = {base: _pairing_name(base) for base, _, _ in layers}
        self._note_spelling(entry.name, list(names.values()))
        by_block = entry.block_strengths()
        self.problems += _missing_blocks(entry.name, state, by_block, diffusers)
        self.problems += [f"{entry.name}: {problem}" for problem in (*problems, *_not_additive(layers))]
        for base, bias, layer in layers:
            name = names[base]
            if ":" in name or base.startswith(key_formats.text_encoder_prefixes()):
                strength = entry.strength_clip
                block = block_weights.text_block(base, diffusers)
            else:
                strength = entry.strength_model
                block = block_weights.block_of_name(name, diffusers)
            strength *= block_weights.of_block(by_block, block)
            if strength != 0.0:
                key = LayerKey(name, bias)
                self.file_names.setdefault(key, base)
                self.patches.setdefault(key, []).append(Patch(layer, strength))

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


def _not_additive(layers: Iterable[tuple[str, bool, Any]]) -> list[str]:
    """Errors for layers that need a model's weight, and for layers whose tensors contradict each other."""
    needs_weight: dict[str, list[str]] = {}
    malformed, parts = [], []
    for base, _, layer in layers:
        if not layer.additive:
            needs_weight.setdefault(layer.kind, []).append(base)
        elif layer.malformed() is not None:
            malformed.append(f"{base}: {layer.malformed()}")
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
    blocks = {block_weights.block_of_name(_pairing_name(key.rpartition(".")[0]), diffusers) for key in state}
    kinds = block_weights.together({_without_number(block) for block in blocks}) | {block_weights.REST}
    missing = []
    for block in by_block:
        if block and block not in block_weights.TEXT and _without_number(block) not in kinds:
            missing.append(block)
    if not missing:
        return []
    return [f"{name}: blocks: it has no {', '.join(missing[:6])}; its blocks are {', '.join(sorted(kinds))}"]


def _without_number(block: str) -> str:
    return block.rstrip("0123456789")


def _pairing_name(base: str) -> str:
    """A layer's name without prefix and separators (`te1:…` for a text encoder), to pair layers across differently
    written files.
    """
    name = canonical(strip_attn_processor(_GENERIC.sub(_numbered_encoder, base)))
    name = re.sub(r"_(img|txt)_mlp_fc([12])$", _mlp_place, name)
    return re.sub(r"te\d:encoder_block_", "te:encoder_block_", name)  # a T5, whose number depends on the model


def _numbered_encoder(match: re.Match[str]) -> str:
    if match[1] == "clip_g":
        return "te2."
    return "te1."


def _mlp_place(match: re.Match[str]) -> str:
    """diffusers' `fc1` and `fc2` as 0 and 2, their positions in an MLP."""
    return f"_{match[1]}_mlp_{2 * int(match[2]) - 2}"


# --- LoRAs and differences with a model -------------------------------------------------------------------------------


def merge_changes(
    changes: Mapping[str, WeightChange], rank: int = 0, advance: Callable[[], None] = lambda: None
) -> MergedLora:
    """Merge the patches (of any kind, in order) of a model's weights into one LoRA; `rank` as in `merge_loras`."""
    merged = _MergedLayers(rank)
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
    """Extract a LoRA from the differences of two models, by weight name.

    Each difference is computed only when needed. Biases, norms and other vectors stay full differences.
    """
    merged = _MergedLayers(rank)
    for name, compute in changes.items():
        change = compute().float()
        if bool(change.any()):
            base = name.removesuffix(".weight")
            if base == name:
                merged.add_whole(name.removesuffix(".bias"), change, bias=name.endswith(".bias"))
            elif change.ndim > 1:
                merged.add_cut(base, change)
            else:
                merged.add_whole(base, change)
        advance()
    return merged.lora()


def check_comparable(weights: Mapping[str, Tensor], base: Mapping[str, Tensor], prefix: str) -> list[str]:
    """The names, among those with a prefix, of the weights whose difference between two models a LoRA can store.

    Raises ValueError listing every weight that only one model has, whose shapes differ, or that is quantized.
    """
    names = [name for name in {**weights, **base} if name.startswith(prefix)]
    missing, other_shape, quantised = [], [], []
    for name in names:
        if name not in weights or name not in base:
            missing.append(f"{name}: only {'model' if name in weights else 'base model'} has it")
            continue
        shape, base_shape = tuple(weights[name].shape), tuple(base[name].shape)
        if shape != base_shape:
            other_shape.append(f"{name}: model has {shape}, base model {base_shape}")
        dtypes = {weights[name].dtype, base[name].dtype} - set(MERGEABLE_DTYPES)
        if dtypes:
            quantised.append(f"{name}: it is quantised ({', '.join(map(str, dtypes))})")
    problems = [*missing, *other_shape, *quantised]
    if problems:
        raise ValueError("these models have no difference that a LoRA can hold:\n" + problem_lines(problems))
    return names


class _MergedLayers:
    """Collects the layers of the merged LoRA, and counts how much of the change is lost."""

    def __init__(self, rank: int):
        self.rank, self.largest_rank = rank, 0
        self.state: dict[str, Tensor] = {}
        self.kept = self.left_out = 0.0  # squared norms

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
        if read is not None and not additive(patches):
            weight = read()
            self.add_change(base, in_order(weight, patches) - weight, bias)
            return
        fused = fuse(patches, shape)
        up, down, diff = fused.up, fused.down.float(), fused.diff
        if diff is None:
            self.add_product(base, up, down, shape)
            return
        # As one tensor: if a name has factors and a difference, ComfyUI reads only the difference.
        if up.shape[1]:
            diff = diff + (up @ down).reshape(diff.shape)
        may_be_flat = read is None and len(shape) == 2 and all(patch.layer.kind != "diff" for patch in patches)
        self.add_change(base, diff, bias, may_be_flat)

    def add_change(self, base: str, change: Tensor, bias: bool = False, may_be_flat: bool = False) -> None:
        """Add a difference, cut to the rank or in full.

        In full it becomes factors with a unit matrix if it may be that of a flattened convolution.
        """
        if self.rank and change.ndim > 1:
            self.add_cut(base, change)
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
        if self.rank and up.shape[1] > self.rank:
            up, down, total_energy, cut_energy = cut_to_rank(up, down, self.rank)
            self._count(total_energy, cut_energy)
        else:
            self._count(float(((up.T @ up) * (down @ down.T)).sum()), 0.0)
        self.add_pair(base, up, down, shape)

    def add_pair(self, base: str, up: Tensor, down: Tensor, shape: Sequence[int]) -> None:
        """Add a factor pair (out, r), (r, columns) for a weight of `shape`."""
        rank = up.shape[1]
        kernel = [1] * len(shape[2:])
        self.state[f"{base}.lora_up.weight"] = up.reshape(up.shape[0], rank, *kernel).contiguous()
        self.state[f"{base}.lora_down.weight"] = down.reshape(rank, *shape[1:]).contiguous()
        self.state[f"{base}.alpha"] = torch.tensor(float(rank))
        self.largest_rank = max(self.largest_rank, rank)

    def add_whole(self, base: str, change: Tensor, bias: bool = False) -> None:
        """Add a difference unchanged."""
        self._count(float(change.norm()) ** 2, 0.0)
        key = f"{base}.diff"
        if bias:
            key = f"{base}.diff_b"
        self.state[key] = change.contiguous()

    def add_cut(self, base: str, change: Tensor) -> None:
        """Add a difference cut to the rank."""
        up, down, left_out = best(change.flatten(1), self.rank)
        self._count(float(change.norm()) ** 2, left_out)
        self.add_pair(base, up, down, change.shape)

    def _count(self, whole: float, left_out: float) -> None:
        self.kept += whole
        self.left_out += left_out

    def lora(self) -> MergedLora:
        """The collected LoRA; ValueError if it is empty."""
        if not self.state:
            raise ValueError("there is nothing to make a LoRA of: the change is zero everywhere")
        lost = 0.0
        if self.kept:
            lost = (self.left_out / self.kept) ** 0.5
        return MergedLora(self.state, self.largest_rank, lost)
