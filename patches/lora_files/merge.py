"""LoRAs made of others or of a difference: exact concatenation, or the best of a rank by SVD (large: Halko 2011)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..patching.fuse import Patch, additive, fuse, in_order
from . import block_weights
from .layer_names import canonical, renamed, with_processors_gone
from .parse import TEXT_ENCODER, unplaced
from .peft_config import peft_configs

_SPELLINGS = tuple(
    map(
        re.compile,
        (  # of a model's layers, as its authors wrote it (and kohya), and as diffusers did
            r"(input|output|double|single|joint)_blocks_|middle_block_|blocks_\d+_((self|cross)_attn_|ffn_\d$)"
            r"|(layers|\w+_refiner)_\d+_attention_(qkv|out)$",
            r"(down_blocks|up_blocks|mid_block)_|(single_)?transformer_blocks_|blocks_\d+_(attn[12]_(to|add)_|ffn_net_)"
            r"|(layers|\w+_refiner)_\d+_att(n|ention)_to_",
        ),
    )
)
_GENERIC = re.compile(
    r"text_encoders\.(\w+)\.transformer\.(model\.)?"
)  # ComfyUI's prefix of text encoders, which kohya numbers
_SMALL = 384  # up to this side a full SVD is quick


class Source(NamedTuple):
    """One file of a stack that is merged: name, state dict, strengths, block weights (`blocks.parse`), metadata."""

    name: str
    state: Mapping[str, Tensor]
    model: float = 1.0
    clip: float = 1.0
    by_block: Mapping[str, float] = MappingProxyType({})
    metadata: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Made:
    """A LoRA state dict, its largest rank, and the share of the change's norm that a cut left out."""

    state: dict[str, Tensor]
    rank: int
    lost: float


def merged(sources: Sequence[Source], rank: int = 0, advance: Callable[[], None] = lambda: None) -> Made:
    """One LoRA, the same change as all of the sources together, without a model: their layers must merely add.

    `rank` 0 keeps the change exactly (factors side by side, float32; a difference where a layer has none); above 0 it
    is cut to it by SVD. Layers are paired by name, prefixes and separators aside, so a model's own names and diffusers'
    do not mix. Raises ValueError that lists everything that cannot be merged.
    """
    parts: dict[tuple[str, bool], list[Patch]] = {}
    written: dict[tuple[str, bool], str] = {}
    problems: list[str] = []
    spellings: dict[int, str] = {}
    for source in (source._replace(state=renamed(source.state)) for source in sources):
        flux = any("single_transformer_blocks" in key for key in source.state)
        layers, wrong = unplaced(source.state, peft_configs(source.metadata))
        names = {base: _plain(base) for base, _, _ in layers}
        spelled = [way for way, spelling in enumerate(_SPELLINGS) if any(map(spelling.match, names.values()))]
        if len(spelled) == 1:
            spellings.setdefault(spelled[0], source.name)
        problems += _no_block(source, flux) + [f"{source.name}: {problem}" for problem in wrong]
        problems += [f"{source.name}: {problem}" for problem in _not_additive(layers)]
        for base, bias, layer in layers:
            plain, text = names[base], ":" in names[base] or base.startswith(TEXT_ENCODER)
            own = block_weights.of_block(
                source.by_block,
                block_weights.text_block(base, flux) if text else block_weights.block_of_name(plain, flux),
            )
            strength = (source.clip if text else source.model) * own
            if strength != 0.0:
                written.setdefault((plain, bias), base)
                parts.setdefault((plain, bias), []).append(Patch(layer, strength))
    if len(spellings) > 1:
        problems.append(
            f"{' and '.join(spellings.values())} name the model's layers differently, one as diffusers does: connect"
            " model"
        )
    problems += (
        [problem for key, patches in parts.items() for problem in _contradictions(written[key], patches)]
        if not problems
        else []
    )
    if problems:
        raise ValueError("these LoRAs cannot be merged:\n" + "\n".join(f"- {problem}" for problem in problems))
    sums = _Sums(rank)
    for (plain, bias), patches in parts.items():
        sums.patches(written[plain, bias], patches, _shape(patches), bias)
        advance()
    return sums.made()


def _not_additive(layers: Sequence[tuple[str, bool, Any]]) -> list[str]:
    """Layers that need a model's weight, and layers whose tensors contradict each other, as problems."""
    needing: dict[str, list[str]] = {}
    problems = []
    for base, _, layer in layers:
        if not layer.additive:
            needing.setdefault(layer.kind, []).append(base)
        elif layer.malformed() is not None:
            problems.append(f"{base}: {layer.malformed()}")
    parts = [base for base, _, _ in layers if base.endswith(".linear1_qkv")]
    problems += [f"{base} is for a part of a weight: connect model" for base in parts]
    more = {kind: f" and {len(of) - 1} more" if len(of) > 1 else "" for kind, of in needing.items()}
    problems += [
        f"{kind} ({of[0]}{more[kind]}) changes the weight that it finds: connect model" for kind, of in needing.items()
    ]
    return problems


def _shape(patches: Sequence[Patch]) -> tuple[int, ...]:
    """The shape of the weight that all patches are for: what the one says that says most."""
    return max((patch.layer.sides() for patch in patches), key=len)  # type: ignore[union-attr]


def _contradictions(base: str, patches: Sequence[Patch]) -> list[str]:
    """A layer's first patch that is for another shape than the others, as a problem."""
    shape = _shape(patches)
    problems = [problem for patch in patches if (problem := patch.layer.problem(shape)) is not None]
    return [
        f"{base}: these LoRAs are for different models, its sides differ between the files ({problem})"
        for problem in problems[:1]
    ]


class Weight(NamedTuple):
    """What a stack does to one weight of a model: patches, the weight's shape, and how to read what they find, in
    float32.
    """

    patches: Sequence[Patch]
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def combined(weights: Mapping[str, Weight], rank: int = 0, advance: Callable[[], None] = lambda: None) -> Made:
    """One LoRA, the same change of these weights by name as all their patches, of any kind, in order; `rank` as for
    `merged`.
    """
    sums = _Sums(rank)
    for name, weight in weights.items():
        bias = name.endswith(".bias")
        sums.patches(name.removesuffix(".bias" if bias else ".weight"), weight.patches, weight.shape, bias, weight.read)
        advance()
    return sums.made()


def _no_block(source: Source, flux: bool) -> list[str]:
    """Blocks that are named and that a file's layers are not in, as a problem; a partial LoRA need not have every block
    of a list.
    """
    there = {block_weights.block_of_name(_plain(key.rpartition(".")[0]), flux) for key in source.state}
    kinds = block_weights.together({block.rstrip("0123456789") for block in there}) | {block_weights.REST}
    gone = [
        name
        for name in source.by_block
        if name and name not in block_weights.TEXT and name.rstrip("0123456789") not in kinds
    ]
    if gone:
        return [f"{source.name}: blocks: it has no {', '.join(gone[:6])}; its blocks are {', '.join(sorted(kinds))}"]
    return []


def extracted(
    changes: Mapping[str, Callable[[], Tensor]], rank: int, advance: Callable[[], None] = lambda: None
) -> Made:
    """A LoRA of differences by weight name, each made when its turn comes; biases, norms and other vectors stay whole
    differences.
    """
    sums = _Sums(rank)
    for name, make in changes.items():
        change = make().float()
        if bool(change.any()):
            base = name.removesuffix(".weight")
            if change.ndim > 1 and base != name:
                sums.cut(base, change)
            else:
                sums.whole(base if base != name else name.removesuffix(".bias"), change, bias=name.endswith(".bias"))
        advance()
    return sums.made()


class _Sums:
    """Collects the layers of a LoRA that is being made, and how much of the change they leave out."""

    def __init__(self, rank: int):
        self.rank, self.largest, self.state = rank, 0, {}  # type: int, int, dict[str, Tensor]
        self.kept = self.left = 0.0

    def patches(
        self,
        base: str,
        patches: Sequence[Patch],
        shape: Sequence[int],
        bias: bool = False,
        read: Callable[[], Tensor] | None = None,
    ) -> None:
        """The sum of what patches change of a weight (or bias) of `shape`; `read` gives it where they need it."""
        if read is not None and not additive(patches):
            weight = read()
            self.change(base, in_order(weight, patches) - weight, bias)
            return
        fused = fuse(patches, shape)
        up, down, diff = fused.up, fused.down.float(), fused.diff
        may_be_flat = read is None and len(shape) == 2 and all(patch.layer.kind != "diff" for patch in patches)
        if diff is None:
            self.product(base, up, down, shape)
        else:  # in one: of a name with factors and a difference, ComfyUI reads only the difference
            self.change(base, diff + (up @ down).reshape(diff.shape) if up.shape[1] else diff, bias, may_be_flat)

    def change(self, base: str, change: Tensor, bias: bool = False, may_be_flat: bool = False) -> None:
        """A difference, cut to the rank or whole; whole, as factors with a unit matrix where it may be a flattened
        convolution's.
        """
        if self.rank and change.ndim > 1:
            self.cut(base, change)
        elif may_be_flat:
            one = torch.eye(min(change.shape))
            self.product(base, *((one, change) if len(one) == len(change) else (change, one)), change.shape)
        else:
            self.whole(base, change, bias)

    def product(self, base: str, up: Tensor, down: Tensor, shape: Sequence[int]) -> None:
        """A product up @ down, cut where its rank is above the one that is wanted."""
        if self.rank and up.shape[1] > self.rank:
            self.cut_pair(base, up, down, shape)
        else:
            self._count(float(((up.T @ up) * (down @ down.T)).sum()), 0.0)
            self.pair(base, up, down, shape)

    def pair(self, base: str, up: Tensor, down: Tensor, shape: Sequence[int]) -> None:
        """A factor pair (out, r), (r, columns) of a weight of `shape`."""
        rank = up.shape[1]
        self.state[f"{base}.lora_up.weight"] = up.reshape(up.shape[0], rank, *(1 for _ in shape[2:])).contiguous()
        self.state[f"{base}.lora_down.weight"] = down.reshape(rank, *shape[1:]).contiguous()
        self.state[f"{base}.alpha"] = torch.tensor(float(rank))
        self.largest = max(self.largest, rank)

    def whole(self, base: str, change: Tensor, bias: bool = False) -> None:
        """A difference as it is."""
        self._count(float(change.norm()) ** 2, 0.0)
        self.state[f"{base}.diff_b" if bias else f"{base}.diff"] = change.contiguous()

    def cut(self, base: str, change: Tensor) -> None:
        """A difference cut to the rank."""
        up, down, left = best(change.flatten(1), self.rank)
        self._count(float(change.norm()) ** 2, left)
        self.pair(base, up, down, change.shape)

    def cut_pair(self, base: str, up: Tensor, down: Tensor, shape: Sequence[int]) -> None:
        """A product up @ down cut to the rank."""
        up, down, all_of_it, left = cut_to_rank(up, down, self.rank)
        self._count(all_of_it, left)
        self.pair(base, up, down, shape)

    def _count(self, all_of_it: float, left: float) -> None:
        self.kept += all_of_it
        self.left += left

    def made(self) -> Made:
        """What was collected; ValueError when it is nothing."""
        if not self.state:
            raise ValueError("there is nothing to make a LoRA of: the change is zero everywhere")
        return Made(self.state, self.largest, (self.left / self.kept) ** 0.5 if self.kept else 0.0)


def cut_to_rank(up: Tensor, down: Tensor, rank: int) -> tuple[Tensor, Tensor, float, float]:
    """The nearest product of at most `rank` to (out, r) @ (r, columns), and the squared norms of all of it and of what
    is left out.

    Its factors are balanced; it is found through the small matrix between two orthogonal ones, without a full-size
    product.
    """
    (left_side, first), (right_side, second) = torch.linalg.qr(up), torch.linalg.qr(down.T)
    inner = first @ second.T
    inner_up, inner_down, left = best(inner, rank)
    return left_side @ inner_up, inner_down @ right_side.T, float(inner.norm()) ** 2, left


def best(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """(up, down, squared norm of what is left out): the best product of a rank of a matrix, each factor with half of
    the spectrum.

    Beyond a few hundred rows and columns it is Halko's randomised one, with a fixed seed of its own.
    """
    rank = min(rank, *matrix.shape)
    basis = None
    if min(matrix.shape) > max(_SMALL, 4 * rank):
        drawn = torch.randn(matrix.shape[1], rank + 16, generator=torch.Generator().manual_seed(0)).to(matrix)
        basis = torch.linalg.qr(matrix @ drawn).Q
        for _ in range(3):
            basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
    left, values, right = torch.linalg.svd(matrix if basis is None else basis.T @ matrix, full_matrices=False)
    if basis is not None:
        left = basis @ left
    roots = values[:rank].sqrt()
    rest = float(matrix.norm()) ** 2 - float(values[:rank].square().sum())
    return left[:, :rank] * roots, roots[:, None] * right[:rank], max(rest, 0.0)


def _plain(base: str) -> str:
    """A layer's name without its prefix and separators (`te1:…` of a text encoder): how layers of differently written
    files are paired.
    """
    plain = canonical(
        with_processors_gone(_GENERIC.sub(lambda found: "te2." if found[1] == "clip_g" else "te1.", base))
    )
    plain = re.sub(r"_(img|txt)_mlp_fc([12])$", lambda found: f"_{found[1]}_mlp_{2 * int(found[2]) - 2}", plain)
    return re.sub(r"te\d:encoder_block_", "te:encoder_block_", plain)  # a T5, whose number depends on the model
