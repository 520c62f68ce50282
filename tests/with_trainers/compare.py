"""Compares what a trainer's network does to each layer with what Graft and ComfyUI's own loader make of its file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from . import layouts, seen
from .case import Case, State

MODES = ("merge", "bypass", "host")
LEAST_CHANGE = 1e-2  # of a layer that is trained: less would show little
TOLERANCE = 1e-5


@dataclass
class Found:
    """What one case showed: the largest error of a weight or bias by mode, and what ComfyUI's loader makes of it."""

    trainer: str
    layout: str
    kind: str
    layers: int = 0  # that the trainer's network changes
    errors: dict[str, float] | None = None
    remark: str = ""
    unread: int = 0  # tensors of the file that ComfyUI's loader leaves
    tensors: int = 0
    wrong: int = 0  # layers that ComfyUI's loader gets wrong, of the trainer's
    failed: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measured(case: Case, folder: Path) -> Found:
    """Write the file of a case and compare."""
    layout = layouts.LAYOUTS[case.layout]
    patcher = layouts.comfyui_model(layout, case.changes)
    base = layouts.weights(patcher)
    convert = case.to_theirs or layout.to_diffusers
    theirs = (case.model or layout.diffusers_model)(base)
    plain = {name: _bare(module) for name, module in seen.layers(theirs).items()}
    before = seen.parameters(theirs)
    path, network, in_float32 = case.write(theirs, folder)
    if not in_float32:
        for module in (theirs, network, *plain.values()):
            if module is not None:
                module.double()
    expected = before | seen.seen(theirs, plain)
    if case.spoilt:
        expected = {name: tensor for name, tensor in expected.items() if not _layer(name).endswith(case.spoilt)}
    changed = {name for name, tensor in expected.items() if _miss(tensor, before[name]) > LEAST_CHANGE}
    layers = {_layer(name) for name in changed}
    found = Found(case.trainer, layout.title, case.kind, len(layers), remark=case.remark)
    assert layers, f"{case}: the network changes nothing"
    found.errors = {}
    for mode in MODES:
        ours = _by_graft(patcher, path, mode, base)
        found.errors[mode] = _largest(convert(dict(ours)), expected)
    _by_comfyui(patcher, path, base, convert, expected, found)
    return found


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _bare(module: nn.Module) -> nn.Module:
    """A layer's sizes, without what a trainer does to it later."""
    kind = seen.kind(module)
    if kind is nn.Linear:
        bare: nn.Module = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
    else:
        sizes = (module.in_channels, module.out_channels, module.kernel_size, module.stride, module.padding)
        bare = kind(*sizes, bias=module.bias is not None, device="meta")
    return bare.to(module.weight.dtype)


def _miss(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def _largest(ours: State, expected: State) -> float:
    return max(_miss(ours[name], tensor) for name, tensor in expected.items())


def _loaded(patcher: Any, base: State) -> dict[str, Tensor]:
    """The weights that a model computes with while it is loaded."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([patcher], force_full_load=True)
    model = patcher.model.diffusion_model
    shapes = {name: _bare(module) for name, module in seen.layers(model).items()}
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if name in base}
    found = state | seen.seen(model, shapes)
    comfy.model_management.unload_all_models()
    return found


def _by_graft(patcher: Any, path: Path, mode: str, base: State) -> dict[str, Tensor]:
    from ...host import lora_stacks
    from ...patches.lora_files import open_file
    from ...patches.lora_files.entry import LoraEntry

    tensors, metadata = open_file.load(str(path))
    entry = LoraEntry(path.name, tensors, metadata=metadata)
    return _loaded(lora_stacks.apply_lora_stack(patcher, None, [entry], mode).model, base)


class _Unread(logging.Handler):
    """Counts the tensors that ComfyUI's loader says it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _by_comfyui(
    patcher: Any, path: Path, base: State, convert: Callable[[dict[str, Tensor]], State], expected: State, found: Found
) -> None:
    import comfy.sd
    import comfy.utils

    tensors = comfy.utils.load_torch_file(str(path), safe_load=True)
    found.tensors = len(tensors)
    heard = _Unread()
    logging.getLogger().addHandler(heard)
    try:
        patched, _ = comfy.sd.load_lora_for_models(patcher, None, tensors, 1.0, 0.0)
        ours = convert(_loaded(patched, base))
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        found.failed = f"{type(error).__name__}: {error}"
        return
    finally:
        logging.getLogger().removeHandler(heard)
    found.unread = sum("lora key not loaded" in line or "NOT LOADED" in line for line in heard.lines)
    wrong = {_layer(name) for name, tensor in expected.items() if _miss(ours[name], tensor) > TOLERANCE}
    found.wrong = len(wrong)
