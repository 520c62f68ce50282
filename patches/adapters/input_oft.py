"""PEFT's and OneTrainer's OFT (arXiv 2506.19847) and PEFT's BOFT (arXiv 2311.06243): rotates a layer's input. Loaded,
not trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .channel_maps import Rotation, RotationStage, Scale, rotate_blocks, rotate_butterfly
from .factor_products import sides_text
from .file_format import FileFormat, LayerError, LayerTensors, PlacedLayer, TensorRole
from .kind import AdapterKind
from .layer import ActivationForm, ReadWeight, StoredLayer
from .oft import REFUSED_AS

_TERMS = 5  # of PEFT's Neumann series, where its settings do not say it


@dataclass(frozen=True, eq=False)
class InputOFT(StoredLayer):
    """apply(W) = W R', times `rescale` (out).

    `rotations` (stages, blocks, b, b) are already orthogonal; they act on the flattened columns of W, one stage after
    the other, and the blocks of stage i hold rows that are 2^i half blocks apart. A single block is shared by all
    (PEFT's block_share).
    """

    rotations: Tensor
    rescale: Tensor | None = None
    kind: str = "OFT"
    is_additive: ClassVar[bool] = False

    def apply(self, weight: Tensor) -> Tensor:
        """What a weight (out, in, ...) in float32 becomes."""
        columns = weight.flatten(1).T
        for stage, blocks in enumerate(self.rotations.to(weight.device, torch.float32)):
            half = blocks.shape[-1] // 2
            if stage:
                columns = rotate_butterfly(columns, blocks, 2**stage * half, half)
            else:
                columns = rotate_blocks(columns, blocks)
        rotated = columns.T.reshape(weight.shape)
        if self.rescale is None:
            return rotated
        return rotated * self.rescale.to(rotated).reshape(-1, *(1,) * (weight.ndim - 1))

    def activation_form(self, strength: float, shape: Sequence[int], read: ReadWeight) -> ActivationForm | None:
        """Rotates the input; None if that is a patch of pixels, or if both sides change in part."""
        if math.prod(shape[2:]) != 1 or (self.rescale is not None and strength != 1.0):
            return None
        stages = []
        for stage, blocks in enumerate(self.rotations.float() - torch.eye(self.rotations.shape[-1])):
            half = blocks.shape[-1] // 2
            if stage:
                stages.append(RotationStage(blocks, 2**stage * half, half))
            else:
                stages.append(RotationStage(blocks))
        outputs: tuple[Scale, ...] = ()
        if self.rescale is not None:
            # a copy: gradients cannot pass through inference tensors
            outputs = (Scale(self.rescale.flatten().to(torch.float32, copy=True)),)
        rotation = Rotation(tuple(stages), torch.tensor(strength))
        return ActivationForm(inputs=(rotation.transpose(),), outputs=outputs)

    def mismatch(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        stages, blocks, side, _ = self.rotations.shape
        columns = math.prod(shape[1:]) if len(shape) > 1 else 0
        fits = columns % side == 0 if blocks == 1 else columns == blocks * side
        if stages > 1 and (side % 2 or columns % (2 ** (stages - 1) * side)):
            fits = False
        if not columns or not fits:
            return f"expected a weight {sides_text(shape)}, got {stages}x{blocks} rotations of {side} columns"
        if self.rescale is None or self.rescale.numel() == shape[0]:
            return None
        return f"expected {shape[0]} numbers to rescale by, got {self.rescale.numel()}"


def neumann_rotations(upper: Tensor, terms: int = _TERMS) -> Tensor:
    """The rotations of PEFT's OFT: Cayley's transform (I - Q)(I + Q)^-1, or the first terms of its Neumann series as
    PEFT cuts it off (2 Q^k summed, the last one once).

    Args:
        upper: the upper triangles of the skew-symmetric Q (blocks, n) with n = b (b - 1) / 2.
        terms: how many terms; 0 is the exact transform.

    Returns:
        Rotations (blocks, b, b) in float32.
    """
    blocks, size = upper.shape
    side = _side_of_triangle(size)
    rows, columns = torch.triu_indices(side, side, 1)
    skew = torch.zeros(blocks, side, side)
    skew[:, rows, columns] = upper.float()
    skew = skew - skew.transpose(1, 2)
    identity = torch.eye(side)
    if not terms:
        return (identity - skew) @ torch.linalg.inv(identity + skew)
    last = terms - 1 if terms < 3 else max(3, terms - 1)
    rotations, power = identity.repeat(blocks, 1, 1), skew
    for k in range(1, last + 1):
        factor = 1.0 if k == last > 1 else 2.0
        rotations = rotations + power * factor
        power = power @ skew
    return rotations


def _side_of_triangle(size: int) -> int:
    """The side of the matrix whose upper triangle has this many numbers."""
    return (1 + math.isqrt(1 + 8 * size)) // 2


def _limit_norm(upper: Tensor, limit: float | None) -> Tensor:
    """PEFT's constrained OFT: the norm of each skew block is kept below limit / sqrt(blocks)."""
    if limit is None:
        return upper
    norms = torch.linalg.vector_norm(upper.float(), dim=1, keepdim=True) * 2**0.5
    return upper.float() * (limit / upper.shape[0] ** 0.5 / norms.clamp(min=1e-30)).clamp(max=1.0)


# --- in files ---------------------------------------------------------------------------------------------------------


def _build_oft(tensors: LayerTensors) -> Iterator[PlacedLayer]:
    terms, limit = _TERMS, None
    if tensors.peft is not None:
        terms, limit = tensors.peft.terms, tensors.peft.limit
    upper = _limit_norm(tensors["oft_R"], limit)
    if _SCALED in tensors.tensors:
        upper = _unscale(upper)
    rotations = neumann_rotations(upper, terms)
    if _turns_back(tensors):
        rotations = rotations.transpose(1, 2)
    yield PlacedLayer(InputOFT(rotations[None]))


def _unscale(upper: Tensor) -> Tensor:
    """OneTrainer's Scaled OFT: what it rotates by, from what it trains."""
    return upper.float() / (2.0 * (_side_of_triangle(upper.shape[1]) - 1) ** 0.5)


def _turns_back(tensors: LayerTensors) -> bool:
    """Whether the weight becomes W R, not W R^T: OneTrainer's convolutions do, its linear layers and PEFT do not.

    Raises LayerError if the file does not say who trained it.
    """
    if len(tensors.weight_shape) < 3:
        return False
    if not tensors.trainer:
        raise LayerError(
            "OFT on a convolution: PEFT and OneTrainer turn it in opposite directions, and neither the names nor the"
            " metadata of this file say which of them trained it; save it again with its trainer, with metadata, or,"
            " if it is PEFT's, name it adapter_model.safetensors with its adapter_config.json beside it"
        )
    return tensors.trainer == "OneTrainer"


def _build_boft(tensors: LayerTensors) -> Iterator[PlacedLayer]:
    blocks = tensors["boft_R"].float()
    skew = 0.5 * (blocks - blocks.transpose(-1, -2))
    identity = torch.eye(skew.shape[-1])
    rotations = (identity - skew) @ torch.linalg.inv(identity + skew)
    yield PlacedLayer(InputOFT(rotations, tensors["boft_s"].flatten(), "BOFT"))


def _triangle_error(role: str, tensor: Tensor) -> str | None:
    shape = tuple(tensor.shape)
    if len(shape) == 2:
        side = _side_of_triangle(shape[1])
        if side * (side - 1) // 2 == shape[1]:
            return None
    return f"expected upper triangles (blocks, b (b - 1) / 2), got {role} {shape}"


def _stages_error(role: str, tensor: Tensor) -> str | None:
    shape = tuple(tensor.shape)
    if len(shape) == 4 and shape[-1] == shape[-2]:
        return None
    return f"expected (stages, blocks, b, b), got {role} {shape}"


_SCALED = "scaled_oft"  # OneTrainer's mark of Scaled OFT: it counts if it is there, whatever its value
_OFT = FileFormat(
    name="PEFT's OFT",
    roles=(
        TensorRole(
            "oft_R",
            (".oft_R.weight", ".oft_R.default.weight"),
            needed=True,
            refused_as=REFUSED_AS,
            check=_triangle_error,
        ),
        TensorRole(_SCALED, (".oft_R.scaled_oft",), refused_as=REFUSED_AS),
    ),
    build=_build_oft,
    unsupported={".oft_R": "OFT of PEFT before 0.15", ".oft_r": "OFT of PEFT before 0.15"},
)
_BOFT = FileFormat(
    name="PEFT's BOFT",
    roles=(
        TensorRole("boft_R", (".boft_R", ".boft_R.default"), needed=True, refused_as=REFUSED_AS, check=_stages_error),
        TensorRole("boft_s", (".boft_s", ".boft_s.default"), needed=True, refused_as=REFUSED_AS),
    ),
    build=_build_boft,
)

KIND = AdapterKind("input_oft", (InputOFT,), (_OFT, _BOFT))
