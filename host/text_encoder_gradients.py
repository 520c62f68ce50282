"""Finds the parts of a text encoder that a LoRA can train: those whose output reaches the model's conditioning."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from ..training.data.dataset import Conditioning
from ..training.memory.inference_tensors import as_normal_tensors
from .autograd_inplace import AvoidInplaceOps
from .denoiser import Denoiser
from .encoding import LiveEncoder
from .plain_kernels import PlainKernels


def trainable_parts(clip: Any, model: Any, clip_skip: int = 0) -> set[str]:
    """Paths of a text encoder's modules whose output reaches what a MODEL is conditioned on, found by the gradients of
    an empty caption.

    The others (CLIP-L's last layer for SDXL) get no gradient.
    """
    import comfy.model_management as management

    if getattr(clip.patcher, "is_dynamic", lambda: False)():
        clip = clip.clone(disable_dynamic=True)
    management.load_models_gpu([clip.patcher], force_full_load=True)
    encoder = LiveEncoder(clip, clip_skip)
    probes: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(as_normal_tensors(encoder.module))
        stack.enter_context(PlainKernels())
        stack.enter_context(AvoidInplaceOps())
        for path, part in encoder.module.named_modules():
            if next(part.parameters(recurse=False), None) is None:
                continue
            probes[path] = torch.zeros((), device=clip.patcher.load_device, requires_grad=True)
            hook = part.register_forward_hook(functools.partial(_add_probe, probes[path]))
            stack.callback(hook.remove)
        (conditioning,) = encoder([""], [Conditioning(torch.zeros(1, 1, 1))])
        conditions = Denoiser(model).conditions(conditioning)
        sums = [tensor.float().sum() for tensor in conditions if tensor.requires_grad]
        if sums:
            torch.stack(sums).sum().backward()
    return {path for path, probe in probes.items() if probe.grad is not None}


def _add_probe(probe: torch.Tensor, part: torch.nn.Module, args: Any, out: Any) -> Any:
    if isinstance(out, torch.Tensor) and out.is_floating_point():
        return out + probe.to(out.device, out.dtype)
    return out
