"""Latents and conditionings from the host's VAE and text encoder."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..training.data.dataset import Conditioning


def encode_pictures(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Latents (B, C, h, w), float32 on the CPU, of pictures (B, H, W, 3) in 0..1."""
    latents = vae.encode(pixels[:, :, :, :3])
    return latents.detach().to("cpu", torch.float32)


def encode_captions(clip: Any, captions: Sequence[str], clip_skip: int = 0) -> dict[str, Conditioning]:
    """What the text encoder makes of each caption, float32 on the CPU; `clip_skip` 2 stops one layer before the last, 0
    is as it is.
    """
    from ..training.data.dataset import Conditioning

    clip = skipping(clip, clip_skip)
    out = {}
    for caption in captions:
        context, extras = _encoded(clip, caption)
        out[caption] = Conditioning(
            _float_on_cpu(context), {name: _float_on_cpu(value) for name, value in extras.items()}
        )
    return out


def skipping(clip: Any, clip_skip: int) -> Any:
    """A clone of a CLIP that stops at that layer from the end; 0 leaves it as it is."""
    if not clip_skip:
        return clip
    clone = clip.clone()
    clone.clip_layer(-clip_skip)
    return clone


def _encoded(clip: Any, caption: str) -> tuple[torch.Tensor, dict[str, Any]]:
    context, extras = clip.encode_from_tokens_scheduled(clip.tokenize(caption))[0]
    return context, {name: value for name, value in extras.items() if not callable(value)}


class LiveEncoder:
    """The text encoder of a CLIP that is loaded, for captions whose conditionings carry gradients to what is trained in
    it.
    """

    def __init__(self, clip: Any, clip_skip: int = 0) -> None:
        self.clip = skipping(clip, clip_skip).clone()
        self.clip.load_model = lambda *_, **__: (
            self.clip.patcher
        )  # it is loaded, and another load would move it under the trained tensors
        self.module: torch.nn.Module = self.clip.cond_stage_model

    def __call__(self, captions: Sequence[str], known: Sequence[Conditioning]) -> list[Conditioning]:
        """Conditionings of the captions as the encoder computes now; `known` are the dataset's, whose other entries
        (sizes) are kept.
        """
        from ..training.data.dataset import Conditioning

        made = {caption: _encoded(self.clip, caption) for caption in dict.fromkeys(captions)}
        return [
            Conditioning(made[caption][0], {**old.extras, **made[caption][1]})
            for caption, old in zip(captions, known, strict=True)
        ]


def read_parts(clip: Any, model: Any, clip_skip: int = 0) -> set[str]:
    """Paths of a text encoder's parts whose output reaches what a MODEL is conditioned on, found by gradients of the
    empty caption.

    The others (CLIP-L's last layer for SDXL) can learn nothing.
    """
    import comfy.model_management as management

    from ..training.data.dataset import Conditioning
    from ..training.memory.inference_tensors import as_normal_tensors
    from .autograd_inplace import NoAssignmentInPlace
    from .denoiser import Denoiser

    if getattr(clip.patcher, "is_dynamic", lambda: False)():
        clip = clip.clone(disable_dynamic=True)
    management.load_models_gpu([clip.patcher], force_full_load=True)
    encoder = LiveEncoder(clip, clip_skip)
    probes: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(as_normal_tensors(encoder.module))
        stack.enter_context(NoAssignmentInPlace())
        for path, part in encoder.module.named_modules():
            if any(True for _ in part.parameters(recurse=False)):
                probes[path] = torch.zeros((), device=clip.patcher.load_device, requires_grad=True)
                hook = part.register_forward_hook(functools.partial(_probed, probes[path]))
                stack.callback(hook.remove)
        (made,) = encoder([""], [Conditioning(torch.zeros(1, 1, 1))])
        reached = [t for t in Denoiser(model).conditions(made) if t.requires_grad]
        if reached:
            torch.stack([t.float().sum() for t in reached]).sum().backward()
    return {path for path, probe in probes.items() if probe.grad is not None}


def _probed(probe: torch.Tensor, part: torch.nn.Module, args: Any, out: Any) -> Any:
    if isinstance(out, torch.Tensor) and out.is_floating_point():
        return out + probe.to(out.device, out.dtype)
    return out


def _float_on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to("cpu", torch.float32 if value.is_floating_point() else value.dtype)
