"""Patchers around models that tests build, as the open host's loaders make them: dynamic ones where a real ComfyUI has
dynamic VRAM on (GRAFT_TEST_DYNAMIC=1).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .model_device import DEVICES


def loaded(
    build: Callable[[], Any],
    fill_: Callable[[torch.nn.Module], None],
    disable_dynamic: bool = False,
    file: torch.dtype | None = None,
) -> Any:
    """A patcher around the BaseModel that `build` makes, whose network `fill_` gives its weights in place.

    With dynamic VRAM, unless that is disabled, they are those of a file, of type `file` where one is given. The model
    can be loaded again where the host does that (`cached_patcher_init`).
    """
    import comfy.model_patcher

    with _whole_layers():
        model = build()
        fill_(model.diffusion_model)

    def load(disable_dynamic: bool = False) -> Any:
        weights = {name: weight.to(file) for name, weight in model.diffusion_model.state_dict().items()}
        return _patched(build(), weights, disable_dynamic)

    if _is_dynamic() and not disable_dynamic:
        patcher = load()
    else:
        patcher = comfy.model_patcher.ModelPatcher(model, **DEVICES)
    if hasattr(patcher, "cached_patcher_init"):
        patcher.cached_patcher_init = (load, ())
    return patcher


def _patched(model: Any, weights: Mapping[str, torch.Tensor], disable_dynamic: bool) -> Any:
    import comfy.model_patcher

    kind = comfy.model_patcher.ModelPatcher
    if not disable_dynamic:
        kind = comfy.model_patcher.CoreModelPatcher
    patcher = kind(model, **DEVICES)
    model.diffusion_model.load_state_dict(weights, assign=patcher.is_dynamic())
    return patcher


def _is_dynamic() -> bool:
    memory = _memory()
    return memory is not None and memory.aimdo_enabled


def _memory() -> Any:
    """ComfyUI's module that says whether dynamic VRAM is on; None on hosts without it."""
    with contextlib.suppress(ImportError):
        import comfy.memory_management

        return comfy.memory_management
    return None


@contextlib.contextmanager
def _whole_layers() -> Iterator[None]:
    """A context in which layers have weights from the beginning: with dynamic VRAM they get them from a file."""
    if not _is_dynamic():
        yield
        return
    memory = _memory()
    memory.aimdo_enabled = False
    try:
        yield
    finally:
        memory.aimdo_enabled = True
