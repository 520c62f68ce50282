"""What a LoRA file holds for one weight: factors, a difference, a rotation; what it adds to the weight, or what it
makes of it.

LoRA (arXiv 2106.09685), LoCon, LoHa, LoKr (arXiv 2309.14859), DoRA (arXiv 2402.09353), OFT (arXiv 2306.07280), BOFT
(arXiv 2311.06243), GLoRA (arXiv 2306.07967), IA3 (arXiv 2205.05638). Each agrees with the library that makes such files
(lycoris, PEFT) at strength 1; at strength s an additive layer gives W + s * delta, any other one W + s * (made(W) - W).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from .channel_maps import Map, Mix, Scale, Stage, Turn, butterfly, turned

FEW = 64  # up to this rank a LoHa is merged more cheaply as a pair of factors than as a full difference


@dataclass(frozen=True, eq=False)
class LoRA:
    """delta = scale * up @ down, reshaped to the weight. A convolution's factors (LoCon) flatten; `mid` is its Tucker
    core.

    `up` is (out, rank) or (out, rank, 1, 1); `down` is (rank, in) or (rank, in, *kernel); with `mid` (rank, rank,
    *kernel) the kernel of `down` is 1. A missing alpha means scale 1.
    """

    up: Tensor
    down: Tensor
    alpha: float | None = None
    mid: Tensor | None = None
    additive: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        """The family's name, for reports."""
        if self.down.ndim > 2:
            return "LoCon"
        return "LoRA"

    @property
    def rank(self) -> int:
        """Rows of `down`; what alpha is divided by."""
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        """alpha / rank; 1 without alpha."""
        if self.alpha is None:
            return 1.0
        return self.alpha / self.rank

    def factors(self, few: int = FEW) -> tuple[Tensor, Tensor]:
        """(B, A) with B (out, rank) and A (rank, columns), not scaled, so that delta = scale * B @ A; float32 with a
        Tucker core.
        """
        if self.mid is None:
            return self.up.flatten(1), self.down.flatten(1)
        down = torch.einsum("om...,mi->oi...", self.mid.float(), self.down.flatten(1).float())
        return self.up.flatten(1), down.flatten(1)

    def sides(self) -> tuple[int, ...]:
        """The shape of the weight that this is for, as far as it says; a kernel may be flattened into the columns."""
        return (self.up.shape[0], self.down.shape[1], *(self.down if self.mid is None else self.mid).shape[2:])

    def malformed(self) -> str | None:
        """What is wrong with the tensors beside each other, whatever weight they are for, or None."""
        core = self.mid
        if self.up.ndim < 2 or self.down.ndim < 2 or (core is not None and core.ndim < 3):
            return f"expected matrices, got up {_text(self.up)} and down {_text(self.down)}"
        inner = self.up.flatten(1).shape[1]
        if core is None and inner != self.rank:
            return f"ranks differ: up {_text(self.up)}, down {_text(self.down)}"
        if core is not None and (
            inner != core.shape[0] or core.shape[1] != self.rank or self.down.flatten(2).shape[2:].numel() != 1
        ):
            return f"ranks differ: up {_text(self.up)}, mid {_text(core)}, down {_text(self.down)}"
        return None

    def problem(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        wrong, core = self.malformed(), self.mid
        if wrong is not None:
            return wrong
        columns = self.down[0].numel() * (1 if core is None else core[0, 0].numel())
        if not shape or self.up.shape[0] != shape[0] or columns != math.prod(shape[1:]):
            return (
                f"expected a weight {_sides(shape)}, got up {_text(self.up)} x down {_text(self.down)} ="
                f" {self.up.shape[0]}x{columns}"
            )
        return None

    def delta(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """The difference (shape) at strength 1 in float32."""
        up, down = (factor.to(device, torch.float32) for factor in self.factors())
        return (self.scale * (up @ down)).reshape(tuple(shape))

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this holds."""
        if self.mid is None:
            return (self.up, self.down)
        return (self.up, self.down, self.mid)


@dataclass(frozen=True, eq=False)
class Diff:
    """delta = scale * diff, of the weight's own shape."""

    diff: Tensor
    scale: float = 1.0
    kind: ClassVar[str] = "diff"
    additive: ClassVar[bool] = True

    def factors(self, few: int = FEW) -> None:
        """None: a full difference has no factors."""

    def delta(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """The difference (shape) at strength 1 in float32."""
        diff = self.diff.to(device, torch.float32)
        if self.scale == 1.0:
            return diff
        return diff * self.scale

    def malformed(self) -> None:
        """None: one tensor cannot contradict itself."""

    def sides(self) -> tuple[int, ...]:
        """The shape of the weight that this is for."""
        return tuple(self.diff.shape)

    def problem(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        if tuple(self.diff.shape) == tuple(shape):
            return None
        return f"expected a difference {_sides(shape)}, got {_text(self.diff)}"

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this holds."""
        return (self.diff,)


@dataclass(frozen=True, eq=False)
class LoHa:
    """delta = scale * (w1_a @ w1_b) * (w2_a @ w2_b), elementwise; with cores t1, t2 (rank, rank, *kernel) the `a` are
    (rank, out).
    """

    w1_a: Tensor
    w1_b: Tensor
    w2_a: Tensor
    w2_b: Tensor
    alpha: float | None = None
    t1: Tensor | None = None
    t2: Tensor | None = None
    kind: ClassVar[str] = "LoHa"
    additive: ClassVar[bool] = True

    @property
    def scale(self) -> float:
        """alpha / rank; 1 without alpha."""
        if self.alpha is None:
            return 1.0
        return self.alpha / self.w1_b.shape[0]

    def factors(self, few: int = FEW) -> tuple[Tensor, Tensor] | None:
        """The product of two low ranks as one pair of rank r1 * r2 while that is at most `few`, not
        scaled; else None.
        """
        ranks = self.w1_b.shape[0] * self.w2_b.shape[0]
        if self.t1 is not None or self.t2 is not None or ranks > few:
            return None
        a1, b1, a2, b2 = (factor.float() for factor in (self.w1_a, self.w1_b, self.w2_a, self.w2_b))
        return (a1[:, :, None] * a2[:, None, :]).flatten(1), (b1[:, None] * b2[None]).flatten(0, 1)

    def delta(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """The difference (shape) at strength 1 in float32."""
        first, second = (
            _product(*of, device) for of in ((self.w1_a, self.w1_b, self.t1), (self.w2_a, self.w2_b, self.t2))
        )
        return (self.scale * first * second).reshape(tuple(shape))

    def sides(self) -> tuple[int, ...]:
        """The shape of the weight that this is for, as far as it says; without cores a kernel is flattened into the
        columns.
        """
        return _product_sides(self.w1_a, self.w1_b, self.t1)

    def _both(self) -> tuple[tuple[str, Tensor, Tensor, Tensor | None], ...]:
        return ("hada_w1", self.w1_a, self.w1_b, self.t1), ("hada_w2", self.w2_a, self.w2_b, self.t2)

    def malformed(self) -> str | None:
        """What is wrong with the tensors beside each other, whatever weight they are for, or None."""
        return next(filter(None, (_product_problem(*of) for of in self._both())), None)

    def problem(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        wrong = self.malformed()
        if wrong is not None:
            return wrong
        sides = ((name, _product_sides(a, b, core)) for name, a, b, core in self._both())
        return next(
            (
                f"expected a weight {_sides(shape)}, got {name} {_sides(own)}"
                for name, own in sides
                if not _fits(own, shape)
            ),
            None,
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this holds."""
        return _present(self.w1_a, self.w1_b, self.w2_a, self.w2_b, self.t1, self.t2)


@dataclass(frozen=True, eq=False)
class LoKr:
    """delta = scale * kron(w1, w2); each is a matrix or a product a @ b, w2 also of a convolution or with a Tucker core
    t2.

    alpha counts only where a factor is a product (alpha / its rank), as lycoris has it.
    """

    w1: Tensor | None
    w2: Tensor | None
    w1_a: Tensor | None = None
    w1_b: Tensor | None = None
    w2_a: Tensor | None = None
    w2_b: Tensor | None = None
    t2: Tensor | None = None
    alpha: float | None = None
    kind: ClassVar[str] = "LoKr"
    additive: ClassVar[bool] = True

    @property
    def scale(self) -> float:
        """alpha / rank of w2, or of w1 where only that is a product; 1 where neither is or without alpha."""
        if self.w2 is None:
            inner = self.w2_b
        else:
            if self.w1 is None:
                inner = self.w1_b
            else:
                inner = None
        if self.alpha is None or inner is None:
            return 1.0
        return self.alpha / inner.shape[0]

    def factors(self, few: int = FEW) -> None:
        """None: a Kronecker product is not of low rank."""

    def kron(self) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """(w1 (a, b) with the scale, (w2,) (c, d) or the two factors of w2), float32, of a matrix (a c, b d); None of a
        convolution's.
        """
        if self.t2 is not None or any(tensor.ndim > 2 for tensor in self.tensors()):
            return None
        second: tuple[Tensor, ...]
        if self.w2 is not None:
            second = (self.w2,)
        else:
            second = (cast(Tensor, self.w2_a), cast(Tensor, self.w2_b))
        copies = tuple(
            factor.to("cpu", torch.float32, copy=True) for factor in second
        )  # files are read as inference tensors
        return self.scale * _either(self.w1, self.w1_a, self.w1_b, None, "cpu"), copies

    def delta(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """The difference (shape) at strength 1 in float32."""
        first = _either(self.w1, self.w1_a, self.w1_b, None, device)
        second = _either(self.w2, self.w2_a, self.w2_b, self.t2, device)
        first = first.reshape(*first.shape, *(1,) * (second.ndim - first.ndim))
        return (self.scale * torch.kron(first, second.contiguous())).reshape(tuple(shape))

    def _both(self) -> tuple[tuple[str, Tensor | None, Tensor | None, Tensor | None, Tensor | None], ...]:
        return ("lokr_w1", self.w1, self.w1_a, self.w1_b, None), ("lokr_w2", self.w2, self.w2_a, self.w2_b, self.t2)

    def _factor_sides(self) -> list[tuple[int, ...]]:
        return [
            tuple(whole.shape) if whole is not None else _product_sides(cast(Tensor, a), cast(Tensor, b), core)
            for _, whole, a, b, core in self._both()
        ]

    def sides(self) -> tuple[int, ...]:
        """The shape of the weight that this is for, as far as it says; a kernel may be flattened into the columns."""
        (out, columns, *_), (more, inner, *kernel) = self._factor_sides()
        return (out * more, columns * inner, *kernel)

    def malformed(self) -> str | None:
        """What is wrong with the tensors beside each other, whatever weight they are for, or None."""
        for name, whole, a, b, core in self._both():
            if whole is None and (a is None or b is None):
                return f"expected {name}, or {name}_a and {name}_b"
            if whole is not None or a is None or b is None:
                found = None
            else:
                found = _product_problem(name, a, b, core)
            if found is not None or (whole is not None and whole.ndim < 2):
                return found or f"{name}: expected a matrix, got {_text(cast(Tensor, whole))}"
        return None

    def problem(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        wrong = self.malformed()
        if wrong is not None:
            return wrong
        first, second = self._factor_sides()
        if _fits(self.sides(), shape):
            return None
        return f"expected a weight {_sides(shape)}, got {_sides(first)} (x) {_sides(second)}"

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this holds."""
        return _present(self.w1, self.w2, self.w1_a, self.w1_b, self.w2_a, self.w2_b, self.t2)


Additive = LoRA | Diff | LoHa | LoKr


class Around(NamedTuple):
    """What a layer that does not merely add is at the activations: maps around the module's own product, and an
    additive layer beside it.

    y = outputs(W @ inputs(x)), or nothing of it where `own` is false, plus strength * layer_outputs(delta @
    layer_inputs(x)).
    """

    inputs: tuple[Map, ...] = ()
    outputs: tuple[Map, ...] = ()
    own: bool = True
    layer: Additive | None = None
    strength: float = 1.0
    layer_inputs: tuple[Map, ...] = ()
    layer_outputs: tuple[Map, ...] = ()


Read = Callable[[], Tensor]  # gives the weight that a layer finds, in float32


@dataclass(frozen=True, eq=False)
class DoRA:
    """made(W) = magnitude * (W + delta) / ||W + delta||.

    Trainers differ in the axis of the norm: a magnitude (out) or (out, 1, …) has one number a row of W, (1, in, …) one
    a column. ComfyUI divides by ||W|| in the first case; PEFT, lycoris and the paper by ||W + delta|| in both, and so
    does this.
    """

    inner: Additive
    magnitude: Tensor
    additive: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        """The family's name, for reports."""
        if self.inner.kind in ("LoRA", "LoCon"):
            return "DoRA"
        return f"{self.inner.kind} with DoRA"

    def made(self, weight: Tensor) -> Tensor:
        """What a weight (out, in, ...) in float32 becomes."""
        changed = weight + self.inner.delta(weight.shape, weight.device)
        return changed * self._gains(changed)

    def _gains(self, changed: Tensor) -> Tensor:
        """magnitude / norm of a changed weight, with its number of dimensions."""
        others = [dimension for dimension in range(changed.ndim) if dimension != self._axis(changed.shape)]
        norm = torch.linalg.vector_norm(changed, dim=others, keepdim=True)
        return self.magnitude.to(changed.device, torch.float32).reshape(norm.shape) / (
            norm + torch.finfo(torch.float32).eps
        )

    def _axis(self, shape: Sequence[int]) -> int:
        if self.magnitude.shape[0] == shape[0]:
            return 0
        return 1

    def around(self, strength: float, shape: Sequence[int], read: Read) -> Around:
        """At the activations: rows or columns scaled, the inner layer's too; the norms are those of the weight now."""
        weight = read()
        gains = self._gains(weight + self.inner.delta(shape, weight.device)).flatten().cpu()
        own, inner = (Scale(1.0 + strength * (gains - 1.0)),), (Scale(gains),)
        if self._axis(shape) == 0:
            return Around(outputs=own, layer=self.inner, strength=strength, layer_outputs=inner)
        return Around(inputs=own, layer=self.inner, strength=strength, layer_inputs=inner)

    def problem(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        side = self.magnitude.numel()
        rows = side == shape[0] and self.magnitude.shape[0] == shape[0]
        columns = (
            len(shape) > 1 and side == shape[1] and self.magnitude.ndim > 1 and self.magnitude.shape[1] == shape[1]
        )
        if not rows and not columns:
            return (
                f"expected a magnitude of {shape[0]} rows or 1x{shape[1] if len(shape) > 1 else 1} columns, got"
                f" {_text(self.magnitude)}"
            )
        return self.inner.problem(shape)

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this holds."""
        return (*self.inner.tensors(), self.magnitude)


@dataclass(frozen=True, eq=False)
class OFT:
    """made(W) = R W with R block-diagonal and orthogonal, times `rescale` (out, 1, …) where there is one.

    `blocks` (blocks, b, b): one rotation (OFT); (stages, blocks, b, b): a butterfly of stages (BOFT). `alpha` is
    lycoris' and kohya's constraint: the skew-symmetric parts are kept below alpha * out. (ComfyUI reads it without
    `out`, leaves OFT's rescale out, and squares the strength.) `rotated`: the blocks are the rotations themselves,
    rescaled already, as lycoris 2.0 wrote them (`oft_diag`).
    """

    blocks: Tensor
    rescale: Tensor | None = None
    alpha: float | None = None
    rotated: bool = False
    additive: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        """The family's name, for reports."""
        if self.blocks.ndim == 4:
            return "BOFT"
        return "OFT"

    def rotations(self, out: int, device: torch.device | str) -> Tensor:
        """Cayley's (I + Q)(I - Q)^-1 of every block."""
        blocks = self.blocks.to(device, torch.float32)
        if self.rotated:
            return blocks
        skew = blocks - blocks.transpose(-1, -2)
        limit = (self.alpha or 0.0) * out
        norm = torch.linalg.vector_norm(skew) + 1e-8
        if limit > 0 and norm > limit:
            skew = skew * (limit / norm)
        one = torch.eye(blocks.shape[-1], device=blocks.device)
        return (one + skew) @ torch.linalg.inv(one - skew)

    def made(self, weight: Tensor) -> Tensor:
        """What a weight (out, in, ...) in float32 becomes."""
        rotations = self.rotations(weight.shape[0], weight.device)
        rows = weight.flatten(1)
        if self.blocks.ndim == 3:
            rows = (rotations.transpose(1, 2) @ rows.unflatten(0, rotations.shape[:2])).flatten(0, 1)
        else:
            for stage, rotation in enumerate(rotations):
                rows = butterfly(rows, rotation, 2**stage * (rotation.shape[-1] // 2), 1)
        made = rows.reshape(weight.shape)
        if self.rescale is None:
            return made
        return made * self.rescale.to(weight.device, torch.float32).reshape(-1, *(1,) * (weight.ndim - 1))

    def around(self, strength: float, shape: Sequence[int], read: Read) -> Around:
        """At the activations: what comes out is turned."""
        rotations = self.rotations(shape[0], "cpu")
        rotations = rotations - torch.eye(rotations.shape[-1])
        if self.blocks.ndim == 3:
            stages = [Stage(rotations.transpose(1, 2))]
        else:
            stages = [Stage(rotation, 2**stage * (rotation.shape[-1] // 2)) for stage, rotation in enumerate(rotations)]
        if self.rescale is None:
            gains = None
        else:
            gains = self.rescale.flatten().float()
        return Around(outputs=(Turn(tuple(stages), torch.tensor(strength), gains),))

    def problem(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        if self.blocks.ndim not in (3, 4) or self.blocks.shape[-1] != self.blocks.shape[-2]:
            return f"expected square blocks, got {_text(self.blocks)}"
        rows = self.blocks.shape[-3] * self.blocks.shape[-1]
        if len(shape) < 2 or rows != shape[0]:
            return f"expected a weight {_sides(shape)}, got blocks {_text(self.blocks)} for {rows} rows"
        if self.blocks.ndim == 4 and (
            self.blocks.shape[-1] % 2 or rows % (2 ** self.blocks.shape[0] * (self.blocks.shape[-1] // 2))
        ):
            return f"a butterfly of {self.blocks.shape[0]} stages does not divide {rows} rows"
        if self.rescale is None or self.rescale.numel() == rows:
            return None
        return f"expected {rows} of rescale, got {_text(self.rescale)}"

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this holds."""
        return _present(self.blocks, self.rescale)


@dataclass(frozen=True, eq=False)
class InputOFT:
    """made(W) = W R', times `rescale` (out): PEFT's OFT (arXiv 2506.19847) and BOFT, which rotate what goes into the
    layer.

    `rotations` (stages, blocks, b, b) are orthogonal already; they act on the flattened columns of W, one stage after
    the other, and the blocks of stage i hold rows that are 2^i half blocks apart. One block stands for all of them
    (PEFT's block_share).
    """

    rotations: Tensor
    rescale: Tensor | None = None
    kind: str = "OFT"
    additive: ClassVar[bool] = False

    def made(self, weight: Tensor) -> Tensor:
        """What a weight (out, in, ...) in float32 becomes."""
        columns = weight.flatten(1).T
        for stage, blocks in enumerate(self.rotations.to(weight.device, torch.float32)):
            half = blocks.shape[-1] // 2
            if stage:
                columns = butterfly(columns, blocks, 2**stage * half, half)
            else:
                columns = turned(columns, blocks)
        made = columns.T.reshape(weight.shape)
        if self.rescale is None:
            return made
        return made * self.rescale.to(made).reshape(-1, *(1,) * (weight.ndim - 1))

    def around(self, strength: float, shape: Sequence[int], read: Read) -> Around | None:
        """At the activations: what goes in is turned; None where that is a patch of pixels, or where both sides change
        in part.
        """
        if math.prod(shape[2:]) != 1 or (self.rescale is not None and strength != 1.0):
            return None
        stages = []
        for stage, blocks in enumerate(self.rotations.float() - torch.eye(self.rotations.shape[-1])):
            half = blocks.shape[-1] // 2
            stages.append(Stage(blocks, 2**stage * half, half) if stage else Stage(blocks))
        outputs: tuple[Scale, ...]
        if self.rescale is None:
            outputs = ()
        else:
            outputs = (Scale(self.rescale.flatten().float()),)
        return Around(inputs=(Turn(tuple(stages), torch.tensor(strength)).transposed(),), outputs=outputs)

    def problem(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        stages, blocks, side, _ = self.rotations.shape
        if len(shape) > 1:
            columns = math.prod(shape[1:])
        else:
            columns = 0
        if blocks == 1:
            fits = columns % side == 0
        else:
            fits = columns == blocks * side
        if not columns or not fits or (stages > 1 and (side % 2 or columns % (2 ** (stages - 1) * side))):
            return f"expected a weight {_sides(shape)}, got {stages}x{blocks} rotations of {side} columns"
        if self.rescale is None:
            rows = None
        else:
            rows = self.rescale.numel()
        if rows in (None, shape[0]):
            return None
        return f"expected {shape[0]} numbers to rescale by, got {rows}"

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this holds."""
        return _present(self.rotations, self.rescale)


@dataclass(frozen=True, eq=False)
class GLoRA:
    """made(W) = W + scale * (W a1 a2 + b1 b2), b with a Tucker core `bm`; lycoris' older files hold each pair the other
    way round.
    """

    a1: Tensor
    a2: Tensor
    b1: Tensor
    b2: Tensor
    alpha: float | None = None
    bm: Tensor | None = None
    kind: ClassVar[str] = "GLoRA"
    additive: ClassVar[bool] = False

    def _pairs(self, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        a1, a2, b1, b2 = (factor.flatten(1) for factor in (self.a1, self.a2, self.b1, self.b2))
        if a1.shape[0] == columns:
            return (a1, a2, b1, b2)
        return (a2, a1, b2, b1)

    def made(self, weight: Tensor) -> Tensor:
        """What a weight (out, in, ...) in float32 becomes."""
        a1, a2, b1, b2 = (factor.to(weight.device, torch.float32) for factor in self._pairs(weight.shape[1]))
        mixed = torch.einsum("oi...,ir,rj->oj...", weight, a1, a2)
        if self.bm is None:
            added = b1 @ b2
        else:
            added = torch.einsum("or,rm...,mi->oi...", b1, self.bm.to(b1), b2)
        return weight + self._scale(a2) * (mixed + added.reshape(weight.shape))

    def _scale(self, a2: Tensor) -> float:
        if self.alpha is None:
            return 1.0
        return self.alpha / a2.shape[0]

    def around(self, strength: float, shape: Sequence[int], read: Read) -> Around:
        """At the activations: a mixture of what goes in, and a LoRA."""
        a1, a2, b1, b2 = (factor.float() for factor in self._pairs(shape[1]))
        strength = strength * self._scale(a2)
        return Around(inputs=(Mix(strength * a1, a2),), layer=LoRA(b1, b2, None, self.bm), strength=strength)

    def problem(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        if len(shape) < 2 or any(factor.ndim < 2 for factor in self.tensors()):
            return f"expected matrices, got {', '.join(_text(factor) for factor in self.tensors())}"
        a1, a2, b1, b2 = self._pairs(shape[1])
        sides = (shape[1], shape[0], math.prod(shape[1:]) // (1 if self.bm is None else math.prod(shape[2:])))
        core: tuple[int, ...]
        if self.bm is None:
            core = (b1.shape[1], b2.shape[0])
        else:
            core = tuple(self.bm.shape[:2])
        inner = a1.shape[1] == a2.shape[0] and core == (b1.shape[1], b2.shape[0])
        inner &= b1.shape[1] == b2.shape[0] if self.bm is None else self.bm.shape[2:] == torch.Size(shape[2:])
        if (a2.shape[1], b1.shape[0], b2.shape[1]) != sides or a1.shape[0] != shape[1] or not inner:
            return (
                f"expected a weight {_sides(shape)}, got a1, a2, b1, b2"
                f" {', '.join(_text(factor) for factor in self.tensors())}"
            )
        return None

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this holds."""
        return _present(self.a1, self.a2, self.b1, self.b2, self.bm)


@dataclass(frozen=True, eq=False)
class IA3:
    """made(W) = W * (1 + factor) for lycoris, W * factor for PEFT (`whole`); the factor belongs to columns (`columns`)
    or rows.
    """

    factor: Tensor
    columns: bool
    whole: bool = False
    kind: ClassVar[str] = "IA3"
    additive: ClassVar[bool] = False

    def made(self, weight: Tensor) -> Tensor:
        """What a weight (out, in, ...) in float32 becomes."""
        factor, ones = self._factor().to(weight.device), (1,) * (weight.ndim - 1 - int(self.columns))
        return weight * (factor.reshape(1, -1, *ones) if self.columns else factor.reshape(-1, *ones))

    def _factor(self) -> Tensor:
        return self.factor.float().flatten() + (0.0 if self.whole else 1.0)

    def around(self, strength: float, shape: Sequence[int], read: Read) -> Around:
        """At the activations: what goes in, or comes out, is scaled."""
        scale = (Scale(1.0 + strength * (self._factor() - 1.0)),)
        if self.columns:
            return Around(inputs=scale)
        return Around(outputs=scale)

    def problem(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        if len(shape) > int(self.columns):
            side = shape[int(self.columns)]
        else:
            side = -1
        if self.factor.numel() == side:
            return None
        return f"expected {side} factors for a weight {_sides(shape)}, got {_text(self.factor)}"

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this holds."""
        return (self.factor,)


@dataclass(frozen=True, eq=False)
class Set:
    """made(W) = value. (ComfyUI sets it whatever the strength; here strength goes from W to the value.)"""

    value: Tensor
    kind: ClassVar[str] = "set_weight"
    additive: ClassVar[bool] = False

    def made(self, weight: Tensor) -> Tensor:
        """What a weight in float32 becomes."""
        return self.value.to(weight.device, torch.float32).reshape(weight.shape)

    def around(self, strength: float, shape: Sequence[int], read: Read) -> Around:
        """At the activations: a module of its own in place of the other, or with what is left of it."""
        rest = (Scale(torch.full((shape[0],), 1.0 - strength)),)
        return Around(outputs=rest, own=strength != 1.0, layer=Diff(self.value), strength=strength)

    def problem(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        if tuple(self.value.shape) == tuple(shape):
            return None
        return f"expected a weight {_sides(shape)}, got {_text(self.value)}"

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this holds."""
        return (self.value,)


Layer = Additive | DoRA | OFT | InputOFT | GLoRA | IA3 | Set
_CLASSES: dict[str, Any] = {cls.__name__: cls for cls in (LoRA, Diff, LoHa, LoKr, DoRA, OFT, InputOFT, GLoRA, IA3, Set)}


def packed(layer: Any) -> tuple:
    """A layer as a tuple of plain values and tensors: (class name, fields)."""
    values = (getattr(layer, field.name) for field in fields(layer))
    return type(layer).__name__, tuple(packed(value) if hasattr(value, "additive") else value for value in values)


def unpacked(content: tuple) -> Layer:
    """The layer that `packed` took apart."""
    name, values = content
    return _CLASSES[name](*(unpacked(value) if isinstance(value, tuple) else value for value in values))


def settings(layer: Any) -> tuple:
    """Everything of a layer that is not a tensor, for fingerprints."""
    values = (getattr(layer, field.name) for field in fields(layer))
    return layer.kind, tuple(settings(v) if hasattr(v, "additive") else v for v in values if not isinstance(v, Tensor))


def _present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)


def neumann_rotations(upper: Tensor, terms: int = 5) -> Tensor:
    """(blocks, b, b) of PEFT's OFT: Cayley's transform of the skew matrices whose upper triangles are given (blocks, b
    (b - 1) / 2).

    `terms` of its Neumann series as PEFT cuts it off (2 Q^k summed, the last one once); 0 is the exact transform (I -
    Q)(I + Q)^-1.
    """
    blocks, size = upper.shape
    side = int((1 + math.isqrt(1 + 8 * size)) // 2)
    rows, columns = torch.triu_indices(side, side, 1)
    skew = torch.zeros(blocks, side, side)
    skew[:, rows, columns] = upper.float()
    skew = skew - skew.transpose(1, 2)
    one = torch.eye(side)
    if not terms:
        return (one - skew) @ torch.linalg.inv(one + skew)
    if terms < 3:
        last = terms - 1
    else:
        last = max(3, terms - 1)
    rotations, power = one.repeat(blocks, 1, 1), skew
    for k in range(1, last + 1):
        rotations = rotations + power * (1.0 if k == last > 1 else 2.0)
        power = power @ skew
    return rotations


def _product(a: Tensor, b: Tensor, core: Tensor | None, device: torch.device | str) -> Tensor:
    """a @ b of flattened factors, or Tucker's product with a core; float32."""
    a, b = a.to(device, torch.float32), b.to(device, torch.float32)
    if core is not None:
        return torch.einsum("ij...,ip,jr->pr...", core.to(device, torch.float32), a, b)
    return (a.flatten(1) @ b.flatten(1)).reshape(a.shape[0], *b.shape[1:])


def _either(
    whole: Tensor | None, a: Tensor | None, b: Tensor | None, core: Tensor | None, device: torch.device | str
) -> Tensor:
    if whole is None:
        return _product(cast(Tensor, a), cast(Tensor, b), core, device)
    return whole.to(device, torch.float32)


def _product_sides(a: Tensor, b: Tensor, core: Tensor | None) -> tuple[int, ...]:
    if core is None:
        return (a.shape[0], *b.shape[1:])
    return (a.shape[1], b.shape[1], *core.shape[2:])


def _product_problem(name: str, a: Tensor, b: Tensor, core: Tensor | None) -> str | None:
    if a.ndim < 2 or b.ndim < 2 or (core is not None and (core.ndim < 3 or a.ndim != 2 or b.ndim != 2)):
        return f"{name}: expected matrices, got {_text(a)} and {_text(b)}"
    if core is None:
        fits = a.flatten(1).shape[1] == b.shape[0]
    else:
        fits = core.shape[:2] == (a.shape[0], b.shape[0])
    if fits:
        return None
    return f"{name}: ranks differ: {_text(a)}, {_text(b)}" + ("" if core is None else f", core {_text(core)}")


def _fits(sides: Sequence[int], shape: Sequence[int]) -> bool:
    return len(shape) > 1 and sides[0] == shape[0] and math.prod(sides[1:]) == math.prod(shape[1:])


def _text(tensor: Tensor) -> str:
    return _sides(tensor.shape)


def _sides(shape: Sequence[int]) -> str:
    return "x".join(str(side) for side in shape) or "scalar"
