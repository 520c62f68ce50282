"""What moves the trained tensors: optimisers over them, whole or in pieces, with every number of their
state by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..memory.offload import Parking
from ..random_draws import generator
from ..stochastic import round_into_
from .block_rates import ratios
from .build import build
from .settings import OptimizerSettings

PIECE = 1 << 24  # numbers that are in float32, or back from host memory, at one time

# Numbers that a library keeps with a group of tensors and not with each.
_OF_GROUPS: dict[str, tuple[str, ...]] = {
    "schedulefree": ("k", "weight_sum", "lr_max"),
    "prodigy": ("k", "d", "d_max", "d_numerator"),
}
_WHOLE = frozenset({"prodigy"})  # their step depends on all tensors together


@dataclass(frozen=True)
class _Piece:
    """An optimiser and the names of what it moves."""

    optimizer: torch.optim.Optimizer
    names: tuple[str, ...]


class OptimizerStepper:
    """Live trained tensors on a device and what moves them; `state()` gives the optimiser's tensors back, `sampled()`
    the weights.

    `trained` are the tensors that the model computes with, by name: float32, or bf16 with precision full-bf16. Between
    the steps bf16 is all there is; a step makes float32 of one piece after another and rounds stochastically. With
    schedule-free AdamW `trained` are the points at which gradients are taken (y of 2405.15682), and the weights to
    sample with (x) are others. Where the tensors are parts of others, `norm` measures the others.
    """

    def __init__(
        self,
        settings: OptimizerSettings,
        trained: Mapping[str, Tensor],
        saved: Mapping[str, Tensor],
        device: torch.device,
        seed: int,
        norm: Callable[[Mapping[str, Tensor]], Tensor] | None = None,
    ) -> None:
        self.settings, self.seed, self._norm = settings, seed, norm
        self.half = settings.precision == "full-bf16"
        kept: dict[str, dict[str, Tensor]] = {name: {} for name in trained}
        for key, value in saved.items():
            slot, _, name = key.partition("/")
            if name in kept:
                kept[name][slot] = value
        if self.half:
            dtype = torch.bfloat16
        else:
            dtype = torch.float32
        self.trained = {
            name: kept[name].get("y", t).to(device, dtype, copy=True).requires_grad_() for name, t in trained.items()
        }
        self._own = {name: _placeholder(t) if self.half else t for name, t in self.trained.items()}
        self._parking: Parking | None = None
        if settings.offload == "optimizer":
            self._parking = Parking()
        self._ratios = ratios(settings, trained)
        self._pieces = [self._piece(names, matrices) for matrices, part in self._kinds() for names in self._parts(part)]
        self._of = {name: piece for piece in self._pieces for name in piece.names}
        for piece in self._pieces:
            self._restore(piece, kept)
        self._rate, self._step, self._done, self._squares = 0.0, 0, set[int](), list[Tensor]()

    # --- choosing -----------------------------------------------------------------------------------------------------

    def _kinds(self) -> list[tuple[bool, list[str]]]:
        """(whether they go by muon's own rule, names) of what needs an optimiser of its own."""
        if self.settings.optimizer != "muon":
            return [(False, list(self.trained))]
        matrices = [name for name, t in self.trained.items() if t.ndim == 2]
        others = [name for name, t in self.trained.items() if t.ndim != 2]
        return [(kind, names) for kind, names in ((True, matrices), (False, others)) if names]

    def _parts(self, names: Sequence[str]) -> list[list[str]]:
        """Names that move together: all, or each alone for a fused backward, or as many as PIECE allows where memory is
        the matter.
        """
        if self.settings.fused_backward:
            return [[name] for name in names]
        if not (self.half or self._parking) or self.settings.optimizer in _WHOLE:
            return [list(names)]
        out: list[list[str]] = []
        left = 0
        for name in names:
            count = self.trained[name].numel()
            if not out or count > left:
                out.append([])
                left = PIECE
            out[-1].append(name)
            left -= count
        return out

    def _piece(self, names: Sequence[str], matrices: bool) -> _Piece:
        by_ratio: dict[float, list[str]] = {}
        for name in names:
            by_ratio.setdefault(self._ratios[name], []).append(name)
        groups = [{"params": [self._own[name] for name in part], "ratio": ratio} for ratio, part in by_ratio.items()]
        return _Piece(
            build(self.settings, groups, matrices), tuple(name for part in by_ratio.values() for name in part)
        )

    # --- the state ----------------------------------------------------------------------------------------------------

    def _groups(self, piece: _Piece) -> Iterator[tuple[dict, list[str]]]:
        names = iter(piece.names)
        for group in piece.optimizer.param_groups:
            yield group, [next(names) for _ in group["params"]]

    def _restore(self, piece: _Piece, kept: Mapping[str, Mapping[str, Tensor]]) -> None:
        for group, names in self._groups(piece):
            scalars = kept[names[0]].get("scalars")
            if scalars is not None:
                for key, value in zip(_OF_GROUPS[self.settings.optimizer], scalars.tolist(), strict=True):
                    group[key] = int(value) if key == "k" else value
            for name in names:
                slots = {slot: value for slot, value in kept[name].items() if slot not in ("y", "scalars")}
                if slots:
                    beside = {
                        slot: slot != "step" or bool(group.get("fused")) for slot in slots
                    }  # torch counts on the CPU, unless fused
                    device = self.trained[name].device
                    piece.optimizer.state[self._own[name]] = {
                        slot: _number_or(value, device if beside[slot] else None) for slot, value in slots.items()
                    }
        self._park(piece)

    def state(self) -> dict[str, Tensor]:
        """Every number that the next step depends on besides the weights, on the CPU: `<slot>/<name>`, in the
        optimiser's own types.
        """
        if self._parking:
            self._parking.wait()
        out: dict[str, Tensor] = {}
        for piece in self._pieces:
            for group, names in self._groups(piece):
                of_group = [float(group[key]) for key in _OF_GROUPS.get(self.settings.optimizer, ())]
                for name in names:
                    slots = piece.optimizer.state.get(self._own[name], {})
                    out.update(
                        {f"{slot}/{name}": _as_tensor(value) for slot, value in slots.items() if value is not None}
                    )
                    if of_group:
                        out[f"scalars/{name}"] = torch.tensor(of_group, dtype=torch.float64)
                    if "z" in slots:
                        out[f"y/{name}"] = self.trained[name].detach().to("cpu", copy=True)
        return out

    # --- weights to sample with ---------------------------------------------------------------------------------------

    def _x(self, name: str) -> Tensor | None:
        """Schedule-free AdamW's average, float32: y lies between it and z; None where it is the live weight itself."""
        z = self._of[name].optimizer.state.get(self._own[name], {}).get("z")
        if z is None:
            return None
        y = self.trained[name].detach().float()
        return y.lerp(z.to(y.device), 1 - 1 / self._of[name].optimizer.param_groups[0]["betas"][0])

    def sampled(self) -> dict[str, Tensor]:
        """The weights that are sampled with, validated and saved: float32 copies on the CPU."""
        if self._parking:
            self._parking.wait()
        found = ((name, self._x(name), t) for name, t in self.trained.items())
        return {name: (t.detach() if x is None else x).to("cpu", torch.float32, copy=True) for name, x, t in found}

    @contextmanager
    @torch.no_grad()
    def evaluated(self) -> Iterator[None]:
        """For the block the model computes with the weights that are sampled with; the live ones are back afterwards,
        bit for bit.
        """
        before: dict[str, Tensor] = {}
        try:
            for name, t in self.trained.items():
                x = self._x(name)
                if x is not None:
                    before[name] = t.detach().clone()
                    t.copy_(x)
            yield
        finally:
            for name, y in before.items():
                self.trained[name].copy_(y)

    # --- moving -------------------------------------------------------------------------------------------------------

    @property
    def early(self) -> bool:
        """Whether weights move during the backward pass already."""
        return self.settings.fused_backward

    def prepare(self, rate: float, step: int) -> None:
        """Begin step `step` with this learning rate; gradients of an earlier step are gone."""
        self._rate, self._step = rate, step
        self._done.clear()
        self._squares.clear()
        self.forget()

    def forget(self) -> None:
        """Drop all gradients."""
        for t in self.trained.values():
            t.grad = None

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Around the last backward pass of a step: with fused_backward each tensor moves there as soon as its gradient
        is whole.
        """
        if not self.early:
            yield
            return
        hooks = [
            t.register_post_accumulate_grad_hook(partial(self._move_early, name)) for name, t in self.trained.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _move_early(self, name: str, tensor: Tensor) -> None:
        assert tensor.grad is not None
        self._squares.append(_square(tensor.grad))
        self._move(self._of[name])

    def norm(self) -> float:
        """The gradient's norm over everything that is trained, clipped to clip_norm on the way."""
        held = {name: t.grad for name, t in self.trained.items() if t.grad is not None}
        if not self.early and not self.half:
            tensors, most = [self.trained[name] for name in held], self.settings.clip_norm or math.inf
            if self._norm is None:
                return float(nn.utils.clip_grad_norm_(tensors, most))
            total = self._norm(held)
            nn.utils.clip_grads_with_norm_(tensors, most, total)
            return float(total)
        squares = [*self._squares, *(_square(g) for g in held.values())]
        if squares:
            total = torch.stack(squares).sum()
        else:
            total = torch.zeros((), dtype=torch.float64)
        norm = float(total.sqrt())
        if held and self.settings.clip_norm and math.isfinite(norm):
            least = min(1.0, self.settings.clip_norm / (norm + 1e-6))  # as clip_grad_norm_, its norm in float32
            torch._foreach_mul_(list(held.values()), least)
        return norm

    def move_(self) -> None:
        """Finish the step: everything that has not moved yet does."""
        for piece in self._pieces:
            if id(piece) not in self._done:
                self._move(piece)
        self._done.clear()

    @torch.no_grad()
    def _move(self, piece: _Piece) -> None:
        self._done.add(id(piece))
        for group in piece.optimizer.param_groups:
            group["lr"] = self._rate * group["ratio"]
        if self.half:
            for name in piece.names:
                self._widen(name)
        if self._parking:
            self._parking.fetch(piece.optimizer, [self.trained[name].device for name in piece.names])
        piece.optimizer.step()
        self._park(piece)
        for name in piece.names:
            if self.half:
                self._narrow(name)
            self.trained[name].grad = None

    def _park(self, piece: _Piece) -> None:
        if self._parking:
            self._parking.park(piece.optimizer)

    def _widen(self, name: str) -> None:
        live, own = self.trained[name], self._own[name]
        own.data = live.detach().float()
        if live.grad is None:
            own.grad = None
        else:
            own.grad = live.grad.float()
        live.grad = None

    def _narrow(self, name: str) -> None:
        live, own = self.trained[name], self._own[name]
        if own.grad is not None:
            draws = generator(self.seed, self._step, f"rounding {name}", live.device)
            round_into_(live.detach(), own.data, draws)
        own.grad = None
        own.data = _placeholder(live).data


def _square(gradient: Tensor) -> Tensor:
    """The square of a gradient's norm, float64."""
    return torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32).double().square()


def _placeholder(tensor: Tensor) -> nn.Parameter:
    """A float32 parameter of a tensor's shape that takes no memory, until a step gives it some."""
    return nn.Parameter(torch.zeros((), device=tensor.device).expand(tensor.shape))


def _as_tensor(value: Tensor | int | float) -> Tensor:
    """A number of an optimiser as a tensor: whole numbers int64, others float64, which no optimiser uses for tensors of
    its own.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def _number_or(value: Tensor, device: torch.device | None) -> Tensor | int | float:
    """The inverse of `_as_tensor`, on a device (None: where it is)."""
    if value.ndim == 0 and value.dtype in (torch.int64, torch.float64):
        return value.item()
    return value.to(device or value.device, copy=True)
