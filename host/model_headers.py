"""Diffusion models from the headers of their files: shapes and types, and none of the weights. For `plan`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..storage.safetensors import load_shapes
from ..training.memory.allocations import META

_ENDINGS = (".safetensors", ".sft")
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@contextlib.contextmanager
def load_headers_only() -> Iterator[None]:
    """A context in which Load Diffusion Model reads the header of a safetensors file, and leaves its weights on disk.

    The MODEL's weights are on the meta device: it can be planned, and not run.
    """
    import comfy.sd

    load = comfy.sd.load_diffusion_model

    def load_header(unet_path: str, *arguments: Any, **options: Any) -> Any:
        if not str(unet_path).lower().endswith(_ENDINGS):
            return load(unet_path, *arguments, **options)
        return _load_without_weights(lambda: load(unet_path, *arguments, **options))

    with _replace_attribute(comfy.sd, "load_diffusion_model", load_header):
        yield


@contextlib.contextmanager
def load_as_on_card() -> Iterator[None]:
    """A context in which ComfyUI loads a diffusion model in the types that it has on a graphics card with bf16; on a
    CPU it would load float32.
    """
    import comfy.model_management as management

    with (
        _replace_attribute(management, "unet_dtype", _storage_dtype),
        _replace_attribute(management, "unet_manual_cast", _compute_dtype),
    ):
        yield


def _storage_dtype(
    *_: Any, supported_dtypes: Sequence[torch.dtype], weight_dtype: torch.dtype | None = None, **__: Any
) -> torch.dtype:
    if weight_dtype is None or weight_dtype == torch.float32:
        return supported_dtypes[0]
    if weight_dtype in (*supported_dtypes, *_FLOAT8):
        return weight_dtype
    return supported_dtypes[0]


def _compute_dtype(weight_dtype: torch.dtype | None, *_: Any, **__: Any) -> torch.dtype | None:
    if weight_dtype is None or weight_dtype in _FLOAT8:
        return torch.bfloat16
    return None


def _load_without_weights(load: Any) -> Any:
    """The MODEL that ComfyUI's loader makes of shapes."""
    import comfy.model_base
    import comfy.model_management as management
    import comfy.utils

    with (
        _replace_attribute(comfy.utils, "load_torch_file", _load_header),
        _replace_attribute(management, "unet_offload_device", lambda: META),
        warnings.catch_warnings(),
        torch.device(META),
    ):
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")  # small tensors are read
        patcher = load()
    model = patcher.model
    model.model_sampling = comfy.model_base.model_sampling(model.model_config, model.model_type)  # with its numbers
    return patcher


def _load_header(ckpt: str, *_: Any, return_metadata: bool = False, **options: Any) -> Any:
    tensors, metadata = load_shapes(str(ckpt))
    if return_metadata:
        return tensors, metadata
    return tensors


@contextlib.contextmanager
def _replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
