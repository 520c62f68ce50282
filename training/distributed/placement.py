"""Which part of the trained tensors a rank has: all of each, or its rows of whole weights (`--shard`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import fsdp_order
from .process_group import ProcessGroup, SingleProcess

if TYPE_CHECKING:
    from ..state import TrainState


def local_rows(tensor: Tensor, group: SingleProcess) -> Tensor:
    """This rank's rows of a tensor: the same number on each rank, the last ranks fewer or none (torch.chunk)."""
    chunks = torch.chunk(tensor, group.size)
    if group.rank < len(chunks):
        return chunks[group.rank]
    return tensor[:0]


class TensorPlacement:
    """Which part of the trained tensors a rank holds. Keys are `<name>` or `<slot>/<name>`."""

    is_sharded = False  # whether all ranks are needed to put the tensors together

    def local(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of whole tensors."""
        return dict(tensors)

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Put whole tensors together on the CPU from the parts of all ranks.

        If they are sharded, the first rank gets them and the others get nothing.
        """
        return dict(tensors)


class Replicated(TensorPlacement):
    """Every rank has all of each tensor."""


class RowSharded(TensorPlacement):
    """Every rank has some rows of each tensor."""

    is_sharded = True

    def __init__(self, trained: Mapping[str, Tensor], group: ProcessGroup) -> None:
        self.group = group
        self.shapes = {name: tensor.shape for name, tensor in trained.items()}

    def _whole_shape(self, key: str, tensor: Tensor) -> torch.Size | None:
        """The shape of the whole tensor; None for what every rank has (an optimizer's numbers)."""
        slot, _, name = key.rpartition("/")
        shape = self.shapes.get(name)
        if shape is not None and slot != "scalars" and tensor.ndim == len(shape):
            return shape
        return None

    def is_row_sharded(self, key: str, tensor: Tensor) -> bool:
        """Whether a tensor is divided into rows."""
        return self._whole_shape(key, tensor) is not None

    def local(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            if self.is_row_sharded(key, tensor):
                tensor = local_rows(tensor, self.group)
            if tensor.numel():
                parts[key] = tensor
        return parts

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        plan = []
        for key, tensor in tensors.items():
            plan.append([key, self.is_row_sharded(key, tensor), str(tensor.dtype).removeprefix("torch.")])
        full_tensors: dict[str, Tensor] = {}
        for key, is_row_sharded, dtype in self.group.broadcast(plan, {})[0]:  # the first rank has rows of everything
            if is_row_sharded:
                tensor = self._gather_rows(key, tensors.get(key), getattr(torch, dtype))
            else:
                tensor = tensors.get(key, torch.empty(0))
            if self.group.is_main_process:
                full_tensors[key] = tensor
        return full_tensors

    def _gather_rows(self, key: str, rows: Tensor | None, dtype: torch.dtype) -> Tensor:
        shape = self.shapes[key.rpartition("/")[2]]
        numbers_per_rank = -(-shape[0] // self.group.size) * (shape.numel() // shape[0])
        local_values = torch.zeros(numbers_per_rank, dtype=dtype)
        if rows is not None:
            local_values[: rows.numel()] = rows.reshape(-1)
        gathered = torch.empty(self.group.size, numbers_per_rank, dtype=dtype)
        self.group.all_gather(gathered.view(torch.uint8), local_values.view(torch.uint8), "state")
        return gathered.view(-1)[: shape.numel()].view(shape).clone()

    def norm(self, gradients: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """The norm over whole tensors, of which `gradients` are this rank's rows."""
        if self.group.reproducible:
            return fsdp_order.norm(gradients, self.shapes, self.group, device)
        local_norm = torch.zeros((), device=device)
        if gradients:
            local_norm = torch.linalg.vector_norm(
                torch.stack([torch.linalg.vector_norm(t) for t in gradients.values()])
            )
        norms = torch.empty(self.group.size, 1, device=device)
        self.group.all_gather(norms.view(torch.uint8), local_norm.reshape(1).to(norms).view(torch.uint8), "norms")
        return torch.linalg.vector_norm(norms)


def placement_for(state: TrainState, group: SingleProcess) -> TensorPlacement:
    """The placement of a run's trained tensors in this group."""
    if isinstance(group, ProcessGroup) and group.shard and state.start.adapter.full_weights:
        return RowSharded(state.trained, group)
    return Replicated()
