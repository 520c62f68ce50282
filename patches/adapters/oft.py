"""OFT (arXiv 2306.07280) and BOFT (arXiv 2311.06243) of lycoris and kohya: rotates a weight's rows in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .channel_maps import Rotation, RotationStage, rotate_butterfly
from .factor_products import factorize_side, shape_text, sides_text
from .file_format import FileFormat, LayerTensors, PlacedLayer, TensorRole
from .kind import AdapterKind
from .layer import ActivationForm, ReadWeight, StoredLayer
from .trainable import AdapterHooks, Dropout, Hook, TargetSize, Tensors, TrainableAdapter, TrainedTensor


@dataclass(frozen=True, eq=False)
class OFT(StoredLayer):
    """apply(W) = R W with R block-diagonal and orthogonal, times `rescale` (out, 1, …) if given.

    `blocks` (blocks, b, b): one rotation (OFT); (stages, blocks, b, b): a butterfly of stages (BOFT). `alpha` is
    lycoris' and kohya's constraint: the skew-symmetric parts are kept below alpha * out. (ComfyUI reads it without
    `out`, ignores OFT's rescale, and squares the strength: `to_comfyui`.) `rotated`: the blocks are the rotations
    themselves, already rescaled, as lycoris 2.0 wrote them (`oft_diag`).
    """

    blocks: Tensor
    rescale: Tensor | None = None
    alpha: float | None = None
    rotated: bool = False
    is_additive: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        """The kind's name, for reports."""
        return "BOFT" if self.blocks.ndim == 4 else "OFT"

    def rotations(self, out: int, device: torch.device | str) -> Tensor:
        """The rotations of the blocks by Cayley's transform (Qiu 2023, arXiv 2306.07280) (I + Q)(I - Q)^-1 of each
        block B, with Q = B - B^T.

        Args:
            out: the weight's rows: alpha times it is the largest norm of all Q together.
            device: where they are computed.

        Returns:
            Rotations of the shape of the blocks, in float32.
        """
        blocks = self.blocks.to(device, torch.float32)
        if self.rotated:
            return blocks
        skew = blocks - blocks.transpose(-1, -2)
        limit = (self.alpha or 0.0) * out
        norm = torch.linalg.vector_norm(skew) + 1e-8
        if limit > 0 and norm > limit:
            skew = skew * (limit / norm)
        identity = torch.eye(blocks.shape[-1], device=blocks.device)
        return (identity + skew) @ torch.linalg.inv_ex(identity - skew).inverse  # never singular: no wait to find out

    def to_comfyui(self, strength: float) -> OFT:
        """The layer that at `strength` makes what ComfyUI's LoRA loader makes of this one at that strength.

        It blends every rotation with the identity by the strength, and then the weight by the strength again. It keeps
        the skew-symmetric parts below alpha, and leaves OFT's rescale out. It does not read rotations of lycoris 2.0.
        """
        if self.rotated:
            return self
        side, is_butterfly = self.blocks.shape[-1], self.blocks.ndim == 4
        out = self.blocks.shape[-3] * side
        rotations = replace(self, alpha=(self.alpha or 0.0) / out).rotations(out, self.blocks.device)
        blended = torch.lerp(torch.eye(side, device=rotations.device), rotations, strength)
        return OFT(blended, self.rescale if is_butterfly else None, rotated=True)

    def apply(self, weight: Tensor) -> Tensor:
        """What a weight (out, in, ...) in float32 becomes."""
        rotations = self.rotations(weight.shape[0], weight.device)
        rows = weight.flatten(1)
        if self.blocks.ndim == 3:
            rows = (rotations.transpose(1, 2) @ rows.unflatten(0, rotations.shape[:2])).flatten(0, 1)
        else:
            for stage, rotation in enumerate(rotations):
                rows = rotate_butterfly(rows, rotation, 2**stage * (rotation.shape[-1] // 2), 1)
        rotated = rows.reshape(weight.shape)
        if self.rescale is None:
            return rotated
        return rotated * self.rescale.to(weight.device, torch.float32).reshape(-1, *(1,) * (weight.ndim - 1))

    def activation_form(self, strength: float, shape: Sequence[int], read: ReadWeight) -> ActivationForm:
        """Rotates the output."""
        rotations = self.rotations(shape[0], "cpu")
        rotations = rotations - torch.eye(rotations.shape[-1])
        if self.blocks.ndim == 3:
            stages = [RotationStage(rotations.transpose(1, 2))]
        else:
            half = rotations.shape[-1] // 2
            stages = [RotationStage(rotation, 2**stage * half) for stage, rotation in enumerate(rotations)]
        gains = None
        if self.rescale is not None:
            # a copy: gradients cannot pass through inference tensors
            gains = self.rescale.flatten().to(torch.float32, copy=True)
        return ActivationForm(outputs=(Rotation(tuple(stages), torch.tensor(strength), gains),))

    def mismatch(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        if self.blocks.ndim not in (3, 4) or self.blocks.shape[-1] != self.blocks.shape[-2]:
            return f"expected square blocks, got {shape_text(self.blocks)}"
        side = self.blocks.shape[-1]
        rows = self.blocks.shape[-3] * side
        if len(shape) < 2 or rows != shape[0]:
            return f"expected a weight {sides_text(shape)}, got blocks {shape_text(self.blocks)} for {rows} rows"
        if self.blocks.ndim == 4 and (side % 2 or rows % (2 ** self.blocks.shape[0] * (side // 2))):
            return f"a butterfly of {self.blocks.shape[0]} stages does not divide {rows} rows"
        if self.rescale is None or self.rescale.numel() == rows:
            return None
        return f"expected {rows} of rescale, got {shape_text(self.rescale)}"


# --- in files ---------------------------------------------------------------------------------------------------------

BLOCKS = "oft_blocks"
REFUSED_AS = "OFT or BOFT"
_PARTS = 4  # of a fused weight that kohya's OFT for Flux rotates one by one


def _build_parts(tensors: LayerTensors) -> Iterator[PlacedLayer]:
    """One set of blocks for each of Q, K, V (and the feed-forward part), one after the other down the rows."""
    sets = [tensors[f"{BLOCKS}.{part}"] for part in range(_PARTS) if f"{BLOCKS}.{part}" in tensors.tensors]
    if len(sets) == 1:
        yield PlacedLayer(OFT(sets[0], None, tensors.alpha))
        return
    start = 0
    for blocks in sets:
        rows = blocks.shape[0] * blocks.shape[-1]
        yield PlacedLayer(OFT(blocks, None, tensors.alpha), rows=(start, rows))
        start += rows


def _part_error(role: str, tensor: Tensor) -> str | None:
    if tensor.ndim == 3:
        return None
    return f"expected (blocks, b, b), got {role} {tuple(tensor.shape)}"


_LYCORIS = FileFormat(
    name="OFT",
    roles=(
        TensorRole(BLOCKS, needed=True, refused_as=REFUSED_AS),
        TensorRole("rescale", refused_as=REFUSED_AS),
    ),
    build=lambda tensors: [PlacedLayer(OFT(tensors[BLOCKS], tensors.get("rescale"), tensors.alpha))],
)
_LYCORIS_2 = FileFormat(
    name="OFT of lycoris 2.0",
    roles=(TensorRole("oft_diag", needed=True, refused_as=REFUSED_AS),),
    build=lambda tensors: [PlacedLayer(OFT(tensors["oft_diag"], rotated=True))],
)
_KOHYA_PARTS = FileFormat(
    name="OFT in parts",
    roles=tuple(
        TensorRole(f"{BLOCKS}.{part}", needed=part == 0, refused_as=REFUSED_AS, check=_part_error)
        for part in range(_PARTS)
    ),
    build=_build_parts,
)


# --- training ---------------------------------------------------------------------------------------------------------


class TrainableOFT(TrainableAdapter):
    """OFT as lycoris trains it: `rank` is the side of the blocks, or their number, whichever is larger."""

    name = "oft"
    linear = False
    help = "rotates the weights"
    takes_alpha = False
    network_dropout = False

    def tensors(self, size: TargetSize) -> list[TrainedTensor]:
        """The blocks, which start at zero: no rotation."""
        side, count = factorize_side(size.shape[0], size.rank)
        return [TrainedTensor(BLOCKS, (count, side, side))]

    def hooks(
        self, size: TargetSize, tensors: Tensors, dropout: Dropout, column_norms: Callable[[Tensors], Tensor]
    ) -> AdapterHooks:
        """R (W x) + b: rotates the output without bias, block by block."""
        return AdapterHooks(None, _rotation_hook(size, tensors[BLOCKS], dropout))

    def norm(self, tensors: Tensors, scale: float) -> Tensor:
        """The norm of the blocks."""
        return tensors[BLOCKS].norm()

    def rescale_(self, tensors: Tensors, ratio: Tensor) -> None:
        """The blocks times `ratio`, as lycoris does it."""
        tensors[BLOCKS].mul_(ratio)


def _rotation_hook(size: TargetSize, blocks: Tensor, dropout: Dropout) -> Hook:
    """Rotates a module's output. `rank_dropout` drops whole blocks, which then do not rotate (as in PEFT's OFT)."""
    layer, dropping = OFT(blocks), dropout.is_enabled
    rows, convolution = size.shape[0], len(size.shape) > 2

    def kept_rotations(device: torch.device, generator: torch.Generator | None) -> Tensor:
        rotations = layer.rotations(rows, device)
        if not dropping:
            return rotations
        mask = dropout.keep_mask(blocks.shape[0], rotations.device, generator)
        if mask is None:
            return rotations
        identity = torch.eye(blocks.shape[-1], device=rotations.device, dtype=rotations.dtype)
        return torch.where(mask.view(-1, 1, 1), rotations, identity)

    def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        generator = None
        if dropping:
            generator = dropout.generator()
            if dropout.skips_module(generator):
                return out
        rotations = kept_rotations(out.device, generator)
        channel = 1 if convolution else out.ndim - 1
        values, bias = out.movedim(channel, -1), getattr(module, "bias", None)
        if bias is not None:
            bias = bias.to(out.dtype)
            values = values - bias
        values = values.unflatten(-1, blocks.shape[:2])
        rotated = torch.einsum("knm,...kn->...km", rotations.to(out.dtype), values).flatten(-2)
        if bias is not None:
            rotated = rotated + bias
        return rotated.movedim(-1, channel)

    return hook


KIND = AdapterKind("oft", (OFT,), (_LYCORIS, _LYCORIS_2, _KOHYA_PARTS), (TrainableOFT(),))
