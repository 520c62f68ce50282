"""Gradients of a text encoder: which of its parts, or of the vectors in a caption, reach the model's conditioning."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from ..patches.core.calls import around
from ..training.data.dataset import Conditioning
from ..training.memory.inference_tensors import use_normal_tensors
from .autograd_inplace import AvoidInplaceOps
from .comfyui_objects import Clip, Model
from .denoiser import Denoiser
from .encoding import LiveEncoder
from .plain_kernels import PlainKernels
from .whole_models import whole_clip

if TYPE_CHECKING:
    from ..training.objective.denoiser import Words


def trainable_parts(clip: Clip, model: Model, clip_skip: int = 0) -> set[str]:
    """Paths of a text encoder's modules whose output reaches what a MODEL is conditioned on, found by the gradients of
    an empty caption.

    The others (CLIP-L's last layer for SDXL) get no gradient.
    """
    clip = load_fully(clip)
    encoder = LiveEncoder(clip, clip_skip)
    probes: dict[str, torch.Tensor] = {}
    with make_differentiable(encoder) as stack:
        for path, part in encoder.module.named_modules():
            if next(part.parameters(recurse=False), None) is None:
                continue
            probes[path] = torch.zeros((), device=clip.patcher.load_device, requires_grad=True)
            stack.enter_context(around(part, "probe", functools.partial(_add_probe, probes[path])))
        backward_of_conditions(encoder, model, "")
    return {path for path, probe in probes.items() if probe.grad is not None}


def load_fully(clip: Clip) -> Clip:
    """A CLIP with its whole text encoder on its device."""
    import comfy.model_management as management

    clip = whole_clip(clip)
    management.load_models_gpu([clip.patcher], force_full_load=True)
    return clip


@contextlib.contextmanager
def make_differentiable(encoder: LiveEncoder) -> Iterator[contextlib.ExitStack]:
    """A context in which gradients go through a text encoder. Yields the stack of what is undone at its end."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(use_normal_tensors(encoder.module))
        stack.enter_context(PlainKernels())
        stack.enter_context(AvoidInplaceOps())
        yield stack


def backward_of_conditions(
    encoder: LiveEncoder, model: Model, caption: str, words: Words = MappingProxyType({})
) -> None:
    """The backward pass of the sum of what a MODEL is conditioned on by a caption, with the vectors of its `words`."""
    (conditioning,) = encoder([caption], [Conditioning(torch.zeros(1, 1, 1))], words)
    sums = [tensor.float().sum() for tensor in Denoiser(model).conditions(conditioning) if tensor.requires_grad]
    if sums:
        torch.stack(sums).sum().backward()


def _add_probe(probe: torch.Tensor, _: torch.nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    out = inner(*args, **kwargs)
    if isinstance(out, torch.Tensor) and out.is_floating_point():
        return out + probe.to(out.device, out.dtype)
    return out
