"""Types for annotations in V1 nodes (ComfyUI's comfy.comfy_types)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypedDict

import torch

from comfy.comfy_types.node_typing import IO, CheckLazyMixin, ComfyNodeABC, FileLocator, InputTypeDict


class UnetApplyFunction(Protocol):
    """The model's forward, as wrappers get it."""

    def __call__(self, x: torch.Tensor, t: torch.Tensor, **kwargs: Any) -> torch.Tensor: ...


class UnetApplyConds(TypedDict):
    """The conditions of one call of the model."""

    c_concat: torch.Tensor | None
    c_crossattn: torch.Tensor | None
    control: torch.Tensor | None
    transformer_options: dict | None


class UnetParams(TypedDict):
    """The arguments of one call of the model."""

    input: torch.Tensor
    timestep: torch.Tensor
    c: UnetApplyConds
    cond_or_uncond: list[int]


UnetWrapperFunction = Callable[[UnetApplyFunction, UnetParams], torch.Tensor]

__all__ = [
    "IO",
    "CheckLazyMixin",
    "ComfyNodeABC",
    "FileLocator",
    "InputTypeDict",
    "UnetApplyConds",
    "UnetApplyFunction",
    "UnetParams",
    "UnetWrapperFunction",
]
