"""LoRAs made of others or of a difference: exact concatenation, or the best of a rank by SVD (large: Halko 2011)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import blocks
from .formats import Group, grouped

_PREFIXES = ("base_model.model.", "diffusion_model.", "lora_unet_", "lycoris_unet_", "lycoris_", "unet.", "transformer.")
_TEXT = ("lora_te", "text_encoder", "clip_", "te")
_SMALL = 384  # up to this side a full SVD is quick


@dataclass(frozen=True)
class Made:
    """A LoRA state dict, its largest rank, and the share of the change's norm that a cut left out."""

    state: dict[str, Tensor]
    rank: int
    lost: float


def merged(
    files: Sequence[tuple[str, Mapping[str, Tensor], float, float]], rank: int = 0, advance: Callable[[], None] = lambda: None,
    by_block: Sequence[Mapping[str, float]] = (),
) -> Made:
    """One LoRA of (name, state dict, model strength, clip strength) each, the same change as all of them together.

    `by_block` has the block weights of each file (`blocks.parse`), or nothing at all.
    `rank` 0 concatenates factors (exact, float32); above 0 the change is cut to it by SVD. Layers are paired by name, prefixes and
    separators aside. Raises ValueError that lists everything that cannot be merged.
    """
    parts: dict[str, list[tuple[Group, float]]] = {}
    written: dict[str, str] = {}
    problems: list[str] = []
    spellings: dict[str, str] = {}
    for (name, state, model, clip), own in zip(files, by_block or [{}] * len(files), strict=True):
        flux = any("single_transformer_blocks" in key for key in state)
        problems += _no_block(name, state, own, flux)
        groups, strangers, wrong = grouped(state)
        problems += [f"{name}: {problem}" for problem in wrong] + [f"{name}: {key} is no LoRA tensor" for key in strangers]
        for base, group in groups.items():
            plain = _plain(base)
            for spelling in ("input_blocks", "down_blocks"):
                if spelling in plain:
                    spellings.setdefault(spelling, name)
            if ("up" in group) != ("down" in group):
                problems.append(f"{name}: {base} is half a pair")
            text = base.startswith(_TEXT)
            strength = (clip if text else model) * blocks.of_block(own, blocks.REST if text else blocks.block_of_name(plain, flux))
            if strength != 0.0:
                written.setdefault(plain, base)
                parts.setdefault(plain, []).append((group, strength))
    if len(spellings) > 1:
        problems.append(f"{' and '.join(spellings.values())} name the UNet's blocks differently; save one again with the other's names")
    if problems:
        raise ValueError("these LoRAs cannot be merged:\n" + "\n".join(f"- {problem}" for problem in problems))
    sums = _Sums(rank)
    for plain, of in parts.items():
        _merge(sums, written[plain], of)
        advance()
    return sums.made()


def _no_block(name: str, state: Mapping[str, Tensor], by_block: Mapping[str, float], flux: bool) -> list[str]:
    """Blocks that are named and that a file's layers are not in, as a problem; a partial LoRA need not have every block of a list."""
    there = {blocks.block_of_name(_plain(key.rpartition(".")[0]), flux) for key in state} | {blocks.REST}
    kinds = {block.rstrip("0123456789") for block in there}
    gone = [block for block in by_block if block and block.rstrip("0123456789") not in kinds]
    return [f"{name}: blocks: it has no {', '.join(gone[:6])}; its blocks are {', '.join(sorted(kinds))}"] if gone else []


def extracted(
    changes: Mapping[str, Callable[[], Tensor]], rank: int, advance: Callable[[], None] = lambda: None
) -> Made:
    """A LoRA of differences by weight name, each made when its turn comes; biases, norms and other vectors stay whole differences."""
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

    def pair(self, base: str, up: Tensor, down: Tensor, shape: Sequence[int]) -> None:
        """A factor pair (out, r), (r, columns) of a weight of `shape`."""
        rank = up.shape[1]
        self.state[f"{base}.lora_up.weight"] = up.reshape(up.shape[0], rank, *(1 for _ in shape[2:])).contiguous()
        self.state[f"{base}.lora_down.weight"] = down.reshape(rank, *shape[1:]).contiguous()
        self.state[f"{base}.alpha"] = torch.tensor(float(rank))
        self.largest = max(self.largest, rank)

    def whole(self, base: str, change: Tensor, bias: bool = False) -> None:
        """A difference as it is."""
        self.state[f"{base}.diff_b" if bias else f"{base}.diff"] = change.contiguous()

    def cut(self, base: str, change: Tensor) -> None:
        """A difference cut to the rank."""
        up, down, left = best(change.flatten(1), self.rank)
        self._count(float(change.norm()) ** 2, left)
        self.pair(base, up, down, change.shape)

    def cut_pair(self, base: str, up: Tensor, down: Tensor, shape: Sequence[int]) -> None:
        """A product up @ down cut to the rank, through the small matrix between two orthogonal ones."""
        (left_side, first), (right_side, second) = torch.linalg.qr(up), torch.linalg.qr(down.T)
        inner_up, inner_down, left = best(first @ second.T, self.rank)
        self._count(float((first @ second.T).norm()) ** 2, left)
        self.pair(base, left_side @ inner_up, inner_down @ right_side.T, shape)

    def _count(self, all_of_it: float, left: float) -> None:
        self.kept += all_of_it
        self.left += left

    def made(self) -> Made:
        """What was collected; ValueError when it is nothing."""
        if not self.state:
            raise ValueError("there is nothing to make a LoRA of: the change is zero everywhere")
        return Made(self.state, self.largest, (self.left / self.kept) ** 0.5 if self.kept else 0.0)


def best(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """(up, down, squared norm of what is left out): the best product of a rank of a float32 matrix, each factor with half of the spectrum.

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
    left = left if basis is None else basis @ left
    roots = values[:rank].sqrt()
    rest = float(matrix.norm()) ** 2 - float(values[:rank].square().sum())
    return left[:, :rank] * roots, roots[:, None] * right[:rank], max(rest, 0.0)


def _plain(base: str) -> str:
    """A layer's name without its prefix and separators: how layers of differently written files are paired."""
    for prefix in _PREFIXES:
        base = base.removeprefix(prefix)
    return base.replace(".", "_")


def _merge(sums: _Sums, base: str, of: Sequence[tuple[Group, float]]) -> None:
    """The sum of one layer's groups, into `sums`."""
    ups, downs, shape, whole, bias = [], [], None, None, None
    for group, strength in of:
        tensors = {role: tensor.float() for role, (_, tensor) in group.items()}
        if "up" in tensors:
            up, down = tensors["up"].flatten(1), tensors["down"]
            kernel = tensors["mid"].shape[2:] if "mid" in tensors else down.shape[2:]
            shape = (up.shape[0], down.shape[1], *kernel)
            scale = strength * (float(tensors["alpha"]) / down.shape[0] if "alpha" in tensors else 1.0)
            if "mid" in tensors:
                down = torch.einsum("om...,mi->oi...", tensors["mid"], down.flatten(1))
            ups.append(up * scale)
            downs.append(down.flatten(1))
        if "diff" in tensors:
            whole = strength * tensors["diff"] + (0.0 if whole is None else whole)
        if "diff_b" in tensors:
            bias = strength * tensors["diff_b"] + (0.0 if bias is None else bias)
    if len({(up.shape[0], down.shape[1]) for up, down in zip(ups, downs, strict=True)}) > 1:
        raise ValueError(f"{base}: these LoRAs are for different models, its sides differ between the files")
    if bias is not None:
        sums.whole(base, bias, bias=True)
    if whole is not None and (whole.ndim < 2 or not sums.rank):
        sums.whole(base, whole)
    elif whole is not None:
        product = torch.cat(ups, 1) @ torch.cat(downs, 0) if ups else torch.zeros(())
        sums.cut(base, whole + product.reshape(whole.shape) if ups else whole)
        return
    if not ups or shape is None:
        return
    up, down = torch.cat(ups, 1), torch.cat(downs, 0)
    if sums.rank and up.shape[1] > sums.rank:
        sums.cut_pair(base, up, down, shape)
    else:
        sums.pair(base, up, down, shape)
