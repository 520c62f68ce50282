"""The tensors of one layer as stored in files, with the suffixes of its adapter kind."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...adapters.registry import tensor_names
from .key_format import Group


def layer_tensors(name: str, group: Group, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(key, tensor) for each of a layer's tensors under a name: floats as `dtype`, alpha as float32."""
    by_role = {role: tensor for role, (_, tensor) in group.items()}
    for role, tensor in by_role.items():
        record = tensor_names().roles[role]
        if record.to_save is not None:
            tensor = record.to_save(tensor, by_role)
        if role == "alpha":
            tensor = tensor.to(torch.float32)
        elif tensor.is_floating_point() and not record.keeps_type:
            tensor = tensor.to(dtype)
        yield name + record.saved_suffix, tensor
