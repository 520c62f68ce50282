"""Steps the trained tensors with torch optimizers, all at once or piece by piece, and saves the optimizers' state by
name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...patches.adapters.registry import is_constant
from ...patches.core.host_memory import empty_on_host, has_streams
from ...patches.core.slots import hold_values
from ...patches.patching.rounding import round_to_bfloat16_
from ..memory.offload import Parking
from ..random_draws import generator as seeded_generator
from ..trainable.settings import is_word
from .block_rates import ratios
from .build import build
from .by_tensor import ByGroup
from .settings import OptimizerSettings

PIECE = 1 << 24  # at most this many numbers are in float32, or back from host memory, at the same time
_GROUP_NUMBERS = "scalars"  # the slot under which the numbers of a parameter group are saved, with each of its tensors
_FOUND = "group:"  # what the slot of each number begins with that was found to have changed


@dataclass(frozen=True)
class _Piece:
    """One optimizer and the names of the tensors that it updates, in the order of its parameter groups."""

    optimizer: torch.optim.Optimizer
    names: tuple[str, ...]
    first_numbers: tuple[dict[str, int | float], ...] = ()  # of each group as it was made, where they are compared

    def groups(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Each parameter group with the names of its tensors."""
        first = 0
        for group in self.optimizer.param_groups:
            last = first + len(group["params"])
            yield group, list(self.names[first:last])
            first = last


class OptimizerStepper:
    """The trained tensors on a device, and the optimizers that step them.

    `state()` gives the optimizers' tensors, `sampled()` the weights to sample with.

    `trained` are the tensors that the model computes with, by name: float32, or bf16 with precision full-bf16. With
    full-bf16 there is only bf16 between the steps: a step makes float32 of one piece after another and rounds
    stochastically. With schedule-free AdamW `trained` are the points at which gradients are taken (y of 2405.15682),
    and the weights to sample with (x) are others. If the tensors are parts of larger ones, `norm` measures the larger
    ones. The tensors lie on `device`, except those that `elsewhere` names. `words_rate` is the learning rate of trained
    words (0: the same).

    Those in `waiting` lie in host memory between the steps: the model brings them over when it computes with them, and
    their gradients come to `leaves`, tensors on the device that take no memory (for all others the trained tensors
    themselves). A step brings over one of them at a time. With `waiting` given, the optimizers' state waits there too.
    """

    def __init__(
        self,
        settings: OptimizerSettings,
        trained: Mapping[str, Tensor],
        saved: Mapping[str, Tensor],
        device: torch.device,
        seed: int,
        norm: Callable[[Mapping[str, Tensor]], Tensor] | None = None,
        elsewhere: Mapping[str, torch.device] | None = None,
        words_rate: float = 0.0,
        waiting: Container[str] | None = None,
    ) -> None:
        self.settings, self.seed, self._norm = settings, seed, norm
        self.record = settings.record
        self.half = settings.precision == "full-bf16"
        self._live_slot = ""  # where the live weights are saved, when they are not the weights to sample with
        if self.record.sampling_weights is not None:
            self._live_slot = self.record.sampling_weights.live_slot
        slots = _slots_by_name(saved, trained)
        devices = {**dict.fromkeys(trained, device), **(elsewhere or {})}
        self.trained: dict[str, Tensor] = {}
        self.leaves: dict[str, Tensor] = {}  # what gradients are taken at
        for name, tensor in trained.items():
            start = slots[name].get(self._live_slot, tensor)
            self._take_live(name, start, devices[name], waiting is not None and name in waiting)
        self._stepped_tensors = self._optimizer_parameters()
        self._parking: Parking | None = None
        if settings.offload == "optimizer" or waiting is not None:
            self._parking = Parking()
        self._ratios = ratios(settings, trained, words_rate)
        self._pieces = self._build_pieces()
        self._piece_of = {name: piece for piece in self._pieces for name in piece.names}
        for piece in self._pieces:
            self._restore(piece, slots)
        self._rate, self._step = 0.0, 0
        self._stepped: set[int] = set()  # ids of the pieces that this step has updated already
        self._norms: list[Tensor] = []  # of gradients that are freed already
        self.is_swapped = False  # whether the tensors hold the weights to sample with

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers, one per piece."""
        return [piece.optimizer for piece in self._pieces]

    # --- building -----------------------------------------------------------------------------------------------------

    def _take_live(self, name: str, start: Tensor, device: torch.device, waits: bool) -> None:
        """Copy a tensor to where the model, or its ring of layers, takes it from."""
        dtype = live_type(self.settings)
        if waits:
            leaf = self.leaves[name] = _placeholder(start.shape, dtype, device)
            self.trained[name] = empty_on_host(leaf.detach()).copy_(start)
        else:
            live = start.to(device, dtype, copy=True).requires_grad_(not is_constant(name))
            self.trained[name] = self.leaves[name] = live

    def _moving(self) -> dict[str, Tensor]:
        """What gradients are taken at, of the tensors that steps change."""
        return {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}

    def _optimizer_parameters(self) -> dict[str, Tensor]:
        """The tensors that the optimizers step: the live ones, or float32 stand-ins that take memory only during their
        step.
        """
        moving = self._moving()
        for name, leaf in moving.items():
            if self.half or self._waits(name):
                moving[name] = _placeholder(leaf.shape, torch.float32, leaf.device)
        return moving

    def _waits(self, name: str) -> bool:
        """Whether a tensor lies in host memory between the steps."""
        return self.leaves[name] is not self.trained[name]

    def _build_pieces(self) -> list[_Piece]:
        pieces = []
        for part in self.record.parts:
            names = [name for name, tensor in self._moving().items() if self._part_of(name, tensor) == part]
            for piece_names in self._split(names):
                by_ratio: dict[float, list[str]] = {}
                for name in piece_names:
                    by_ratio.setdefault(self._ratios[name], []).append(name)
                groups = [
                    {"params": [self._stepped_tensors[name] for name in members], "ratio": ratio}
                    for ratio, members in by_ratio.items()
                ]
                pieces.append(self._piece(build(self.settings, groups, part), piece_names))
        return pieces

    def _piece(self, optimizer: torch.optim.Optimizer, names: Sequence[str]) -> _Piece:
        """An optimizer with the names of its tensors, in the order that it has them in."""
        by_id = {id(self._stepped_tensors[name]): name for name in names}
        ordered = tuple(by_id[id(tensor)] for group in optimizer.param_groups for tensor in group["params"])
        first_numbers: tuple[dict[str, int | float], ...] = ()
        if self.record.finds_group_numbers:
            first_numbers = tuple(map(_numbers_of, optimizer.param_groups))
        return _Piece(optimizer, ordered, first_numbers)

    def _part_of(self, name: str, tensor: Tensor) -> str:
        if is_word(name):
            return self.record.part_of(tensor[0])  # vectors one below the other are not a matrix
        return self.record.part_of(tensor)

    def _split(self, names: Sequence[str]) -> list[list[str]]:
        """Split names into pieces that are stepped together.

        That is all of them, or each alone for a fused backward pass, or as many as PIECE allows where memory is scarce.
        """
        if not names:
            return []
        if self.settings.fused_backward:
            return [[name] for name in names]
        if not (self.half or self._parking) or self.record.joint_step:
            return [list(names)]
        pieces: list[list[str]] = []
        free_elements = 0
        for name in names:
            count = self.trained[name].numel()
            if not pieces or count > free_elements:
                pieces.append([])
                free_elements = PIECE
            pieces[-1].append(name)
            free_elements -= count
        return pieces

    # --- the state ----------------------------------------------------------------------------------------------------

    def _restore(self, piece: _Piece, slots: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load the saved state of its tensors into an optimizer."""
        for group, names in piece.groups():
            numbers = slots[names[0]].get(_GROUP_NUMBERS)
            if numbers is not None:
                for (key, kind), value in zip(self.record.group_numbers.items(), numbers.tolist(), strict=True):
                    group[key] = kind(value)
            for slot, value in slots[names[0]].items():
                if slot.startswith(_FOUND):
                    group[slot.removeprefix(_FOUND)] = value.item()
            for name in names:
                state = self._restored_state(name, slots[name], bool(group.get("fused")))
                if state:
                    piece.optimizer.state[self._stepped_tensors[name]] = state
        self._park(piece)

    def _restored_state(self, name: str, saved: Mapping[str, Tensor], fused: bool) -> dict[str, Tensor | int | float]:
        device = self.leaves[name].device
        state = {}
        for slot, value in saved.items():
            if slot in (self._live_slot, _GROUP_NUMBERS) or slot.startswith(_FOUND):
                continue
            if slot == "step" and not fused:  # torch keeps the step count on the CPU, unless fused
                state[slot] = _number_or(value, value.device)
            else:
                state[slot] = _number_or(value, device)
        return state

    def state(self) -> dict[str, Tensor]:
        """The optimizers' state to save: every number besides the weights that the next step depends on.

        The tensors are on the CPU, named `<slot>/<name>`, in the optimizer's own types.
        """
        self.wait()
        saved: dict[str, Tensor] = {}
        for optimizer, left in self._unread():
            optimizer.take(_read_together(left))
        for piece in self._pieces:
            for place, (group, names) in enumerate(piece.groups()):
                numbers = [float(group[key]) for key in self.record.group_numbers]
                found = {}
                if piece.first_numbers:
                    found = dict(_numbers_of(group).items() - piece.first_numbers[place].items())
                for name in names:
                    state = piece.optimizer.state.get(self._stepped_tensors[name], {})
                    for slot, value in state.items():
                        if value is not None:
                            saved[f"{slot}/{name}"] = _as_tensor(value)
                    for key, number in found.items():
                        saved[f"{_FOUND}{key}/{name}"] = _as_tensor(number)
                    if numbers:
                        saved[f"{_GROUP_NUMBERS}/{name}"] = torch.tensor(numbers, dtype=torch.float64)
                    if self._live_slot and state:
                        saved[f"{self._live_slot}/{name}"] = self.trained[name].detach().to("cpu", copy=True)
        return saved

    def wait(self) -> None:
        """Wait for all copies from and to host memory: call it before the host reads or writes trained tensors."""
        if self._parking:
            self._parking.wait()
        for device in {leaf.device for name, leaf in self.leaves.items() if self._waits(name)}:
            if has_streams(device):
                getattr(torch, device.type).synchronize(device)

    # --- weights to sample with ---------------------------------------------------------------------------------------

    def _sampling_weights(self, name: str) -> Tensor | None:
        """The weights to sample with, if the optimizer has others than the live ones; else None."""
        if self.record.sampling_weights is None or name not in self._piece_of:
            return None
        optimizer = self._piece_of[name].optimizer
        state = optimizer.state.get(self._stepped_tensors[name], {})
        return self.record.sampling_weights.compute(self.trained[name], state, optimizer.param_groups[0])

    def copy_sampling_weights(self) -> dict[str, Tensor]:
        """The weights that are sampled with, validated and saved, as float32 copies on the CPU."""
        self.wait()
        weights = {}
        for name, tensor in self.trained.items():
            sampling = self._sampling_weights(name)
            if sampling is None:
                sampling = tensor.detach()
            weights[name] = sampling.to("cpu", torch.float32, copy=True)
        return weights

    @contextmanager
    @torch.no_grad()
    def use_sampling_weights(self) -> Iterator[None]:
        """A context in which the model computes with the weights to sample with.

        Afterwards the live weights are back, bit for bit. When the exchange itself is broken off, `is_swapped` stays
        true.
        """
        self.wait()
        stack = ExitStack()
        self.is_swapped = self.record.sampling_weights is not None
        try:
            for name, tensor in self.trained.items():
                sampling = self._sampling_weights(name)
                if sampling is not None:
                    stack.enter_context(hold_values(tensor))
                    tensor.copy_(sampling)
            stack.callback(self.wait)
            yield
        finally:
            stack.close()
            self.is_swapped = False

    # --- stepping -----------------------------------------------------------------------------------------------------

    @property
    def early(self) -> bool:
        """Whether weights are updated during the backward pass already (fused_backward)."""
        return self.settings.fused_backward

    def prepare(self, rate: float, step: int) -> None:
        """Begin a step, and drop the gradients of an earlier one.

        Args:
            rate: the learning rate of the step.
            step: its number, 0 is the first.
        """
        self._rate, self._step = rate, step
        self._stepped.clear()
        self._norms.clear()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop all gradients."""
        for leaf in self.leaves.values():
            leaf.grad = None

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """A context for the last backward pass of a step.

        With fused_backward each tensor is updated there as soon as its gradient is complete.
        """
        if not self.early:
            yield
            return
        hooks = []
        for name, tensor in self._moving().items():
            hooks.append(tensor.register_post_accumulate_grad_hook(partial(self._step_early, name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _step_early(self, name: str, tensor: Tensor) -> None:
        assert tensor.grad is not None
        self._norms.append(_norm(tensor.grad))
        self._step_piece(self._piece_of[name])

    def norm(self) -> float:
        """The norm of the whole gradient; also clips the gradients to clip_norm."""
        norm, *_ = self.norm_and([])
        return norm

    def norm_and(self, losses: Sequence[Tensor]) -> list[float]:
        """Clip the gradients; their norm before that, and some losses, as numbers: all are read from the device
        together, with what optimizers have left there for the next step.

        Args:
            losses: tensors without dimensions.

        Returns:
            [norm, *losses].
        """
        unread = self._unread()
        norm, *numbers = self._norm_and([*(number for _, left in unread for number in left), *losses])
        rest = iter(numbers)
        for optimizer, left in unread:
            optimizer.take([next(rest) for _ in left])
        return [norm, *rest]

    def _unread(self) -> list[tuple[ByGroup, list[Tensor]]]:
        """What optimizers have left on the device."""
        return [(one, one.unread()) for one in self.optimizers if isinstance(one, ByGroup)]

    def _norm_and(self, losses: Sequence[Tensor]) -> list[float]:
        gradients = {name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}
        if self.early or self.half:
            return self._norm_in_pieces(list(gradients.values()), losses)
        tensors = [self.trained[name] for name in gradients]
        largest = self.settings.clip_norm or math.inf
        if self._norm is None:
            return _read_together([nn.utils.clip_grad_norm_(tensors, largest), *losses])
        total = self._norm(gradients)
        nn.utils.clip_grads_with_norm_(tensors, largest, total)
        return _read_together([total, *losses])

    def _norm_in_pieces(self, gradients: list[Tensor], losses: Sequence[Tensor]) -> list[float]:
        """The norm of bf16 gradients and of those that are freed already, summed in float64: on the CPU, as not every
        device has it.
        """
        norms = [*self._norms, *map(_norm, gradients)]
        numbers = _read_together([*norms, *losses])
        squares = torch.tensor(numbers[: len(norms)], dtype=torch.float64).square()
        norm, numbers = squares.sum().sqrt().item(), numbers[len(norms) :]
        if gradients and self.settings.clip_norm and math.isfinite(norm):
            factor = min(
                1.0, self.settings.clip_norm / (norm + 1e-6)
            )  # as clip_grad_norm_ does, with the norm in float32
            torch._foreach_mul_(gradients, factor)
        return [norm, *numbers]

    def step_(self) -> None:
        """Finish the step: update every tensor that has not been updated yet."""
        for piece in self._pieces:
            if id(piece) not in self._stepped:
                self._step_piece(piece)

    @torch.no_grad()
    def _step_piece(self, piece: _Piece) -> None:
        self._stepped.add(id(piece))
        for group in piece.optimizer.param_groups:
            group["lr"] = self._rate * group["ratio"]
        for name in piece.names:
            if self._has_stand_in(name):
                self._fill(name)
        if self._parking:
            self._parking.fetch(piece.optimizer, [self.leaves[name].device for name in piece.names])
        piece.optimizer.step()
        self._park(piece)
        for name in piece.names:
            if self._has_stand_in(name):
                self._empty(name)
            self.leaves[name].grad = None

    def _park(self, piece: _Piece) -> None:
        if self._parking:
            self._parking.park(piece.optimizer)

    def _has_stand_in(self, name: str) -> bool:
        return self._stepped_tensors[name] is not self.leaves[name]

    def _fill(self, name: str) -> None:
        """Fill a float32 stand-in with a weight, maybe from host memory, and its gradient."""
        leaf, parameter = self.leaves[name], self._stepped_tensors[name]
        parameter.data = self.trained[name].detach().to(leaf.device, non_blocking=True).float()
        parameter.grad = None if leaf.grad is None else leaf.grad.float()
        leaf.grad = None

    def _empty(self, name: str) -> None:
        """Put what a step made of a float32 stand-in into its weight, with full-bf16 rounded, and free it."""
        live, parameter = self.trained[name].detach(), self._stepped_tensors[name]
        if parameter.grad is not None:
            stepped = parameter.data
            if self.half:
                stepped = live
                if self._waits(name):
                    stepped = torch.empty_like(parameter.data, dtype=live.dtype)
                generator = seeded_generator(self.seed, self._step, f"rounding {name}", stepped.device)
                round_to_bfloat16_(stepped, parameter.data, generator)
            if stepped is not live:
                live.copy_(stepped, non_blocking=True)
        parameter.grad = None
        parameter.data = _placeholder(live.shape, torch.float32, parameter.device).data


def _numbers_of(group: Mapping[str, Any]) -> dict[str, int | float]:
    """The numbers of a parameter group by name, but for those that a step sets."""
    return {key: value for key, value in group.items() if isinstance(value, int | float) and key not in ("lr", "ratio")}


def _slots_by_name(saved: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Saved optimizer tensors (`<slot>/<name>`) by the name of the trained tensor, then by slot."""
    slots: dict[str, dict[str, Tensor]] = {name: {} for name in trained}
    for key, value in saved.items():
        slot, _, name = key.partition("/")
        if name in slots:
            slots[name][slot] = value
    return slots


def _norm(gradient: Tensor) -> Tensor:
    """A gradient's norm, float32."""
    return torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)


def _read_together(numbers: Sequence[Tensor]) -> list[float]:
    """Tensors without dimensions as numbers; the device of the first is waited for once."""
    if not numbers:
        return []
    dtype = numbers[0].dtype
    for number in numbers:
        dtype = torch.promote_types(dtype, number.dtype)
    return torch.stack([number.to(numbers[0].device, dtype) for number in numbers]).tolist()


def live_type(settings: OptimizerSettings) -> torch.dtype:
    """The type of trained tensors between the steps.

    Args:
        settings: with the precision.
    """
    if settings.precision == "full-bf16":
        return torch.bfloat16
    return torch.float32


def _placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter that takes no memory until a step gives it some."""
    return nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(shape))


def _as_tensor(value: Tensor | int | float) -> Tensor:
    """A number from an optimizer as a tensor, to save it: whole numbers int64, others float64.

    No optimizer uses these types for tensors of its own.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, int):
        return torch.tensor(value, dtype=torch.int64)
    return torch.tensor(value, dtype=torch.float64)


def _number_or(value: Tensor, device: torch.device) -> Tensor | int | float:
    """The inverse of `_as_tensor`, with tensors on a device."""
    if value.ndim == 0 and value.dtype in (torch.int64, torch.float64):
        return value.item()
    return value.to(device, copy=True)
