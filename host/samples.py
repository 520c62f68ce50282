"""LATENTs, CONDITIONINGs and MASKs of a graph as samples to train on."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..training.data.dataset import Conditioning
from ..training.data.parts import Parts, pack_parts
from ..training.data.samples import check_finite
from .latents import is_nested

# Entries that ComfyUI's sampler reads and the model does not: a training step cannot do what they ask for.
_SAMPLERS = {
    "control": "a ControlNet",
    "gligen": "GLIGEN boxes",
    "hooks": "hooks",
    "area": "an area",
    "mask": "a mask of its own",
    "start_percent": "a range of timesteps",
    "clip_start_percent": "a range of timesteps",
}
_PLAIN = (bool, int, float, str, torch.dtype, torch.device)


def latents_of(latent: Mapping[str, Any], number: int) -> list[tuple[torch.Tensor, Parts]]:
    """The latents (C, [frames,] h, w) of a LATENT, or (C, T) of sound, one for each of its batch, in float32 on the
    CPU. Those of video with its sound are packed (1, N), with the shapes of both.
    """
    samples = latent["samples"]
    name = f"latent {number}"
    if is_nested(samples):
        return _pack_sound(samples.unbind(), name)
    if not isinstance(samples, torch.Tensor) or samples.ndim not in (3, 4, 5):
        shape = tuple(getattr(samples, "shape", ()))
        raise ValueError(
            f"Samples: {name} has the shape {shape}: expected a batch of pictures (4 dimensions), of clips (5) or of"
            " sound (3, or 4 of ACE-Step 1)."
        )
    samples = samples.detach().to("cpu", torch.float32)
    check_finite(samples, name)
    return [(one, ()) for one in samples]


def _pack_sound(streams: Sequence[torch.Tensor], name: str) -> list[tuple[torch.Tensor, Parts]]:
    """The packed latents of a batch of video (B, C, frames, h, w) with its sound (B, C, T, frequencies)."""
    shapes = [tuple(stream.shape) for stream in streams]
    if [len(shape) for shape in shapes] != [5, 4] or shapes[0][0] != shapes[1][0]:
        raise ValueError(
            f"Samples: {name} has parts of the shapes {' and '.join(map(str, shapes))}: of those with several parts,"
            " Graft trains video (5 dimensions) with as many sounds (4), as LTXVConcatAVLatent makes them of LTX-2's"
            " latents."
        )
    made = pack_parts([stream.detach().to("cpu", torch.float32) for stream in streams])
    check_finite(made, name)
    return [(one, tuple(shape[1:] for shape in shapes)) for one in made]


def conditionings_of(conditioning: Sequence[Any], name: str, samples: int) -> list[Conditioning]:
    """A CONDITIONING that belongs to one LATENT of so many samples: one for all of them, or one for each, as
    ComfyUI's Resolution Bucket gives.
    """
    if len(conditioning) == samples > 1:
        return [conditioning_of([part], f"{name}, sample {n}") for n, part in enumerate(conditioning, 1)]
    return [conditioning_of(conditioning, name)] * samples


def conditioning_of(conditioning: Sequence[Any], name: str) -> Conditioning:
    """A CONDITIONING as one to train with, on the CPU.

    Raises ValueError when it is for a sampler alone: of several parts, for an area, with a ControlNet …
    """
    if len(conditioning) != 1:
        raise ValueError(
            f"Samples: {name} has {len(conditioning)} parts, as Conditioning (Combine) makes, and a training step takes"
            " one. Connect one of them, or as many parts as its latent has samples, as Resolution Bucket gives."
        )
    context, entries = conditioning[0]
    asked = [said for key, said in _SAMPLERS.items() if entries.get(key) is not None]
    if asked or entries.get("strength", 1.0) != 1.0:
        said = " and ".join(dict.fromkeys(asked or ["a strength of its own"]))
        instead = ""
        if entries.get("control") is not None:
            instead = (
                " Control that is trained is a latent in the conditioning, as nodes such as ReferenceLatent and"
                " WanFunControlToVideo put it there."
            )
        raise ValueError(
            f"Samples: {name} has {said}, which only samplers apply, so the model would not learn it. Connect the"
            f" conditioning from before that node.{instead}"
        )
    if context.shape[0] != 1:
        raise ValueError(
            f"Samples: {name} is a batch of {context.shape[0]}: connect a list of conditionings, one for each sample."
        )
    extras = {}
    for key, value in entries.items():
        if not callable(value):
            extras[key] = _copy_to_cpu(value, f"{name}, {key}")
    context = context.detach().to("cpu", torch.float32)
    check_finite(context, name)
    return Conditioning(context, extras)


def _copy_to_cpu(value: Any, name: str) -> Any:
    """A value of a conditioning with its tensors on the CPU; ValueError for what cannot be told apart by its contents.

    Objects with attributes, such as ComfyUI's output of CLIP vision, are copied.
    """
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            check_finite(value, name)
            return value.detach().to("cpu", torch.float32)
        return value.detach().cpu()
    if value is None or isinstance(value, _PLAIN):
        return value
    if type(value) in (list, tuple):
        return type(value)(_copy_to_cpu(entry, name) for entry in value)
    if type(value) is dict:
        return {key: _copy_to_cpu(entry, name) for key, entry in value.items()}
    if type(value).__module__.startswith("comfy.") and hasattr(value, "__dict__"):
        kept = copy.copy(value)
        for key, entry in vars(value).items():
            setattr(kept, key, _copy_to_cpu(entry, name))
        return kept
    raise ValueError(
        f"Samples: {name} holds a {type(value).__module__}.{type(value).__qualname__}, and a training run keeps tensors"
        " and plain values only."
    )


def masks_of(mask: torch.Tensor) -> list[torch.Tensor]:
    """The masks (1, H, W) in 0..1 of a MASK (B, H, W) or (H, W)."""
    masks = mask.detach().to("cpu", torch.float32).clamp(0.0, 1.0).reshape(-1, 1, *mask.shape[-2:])
    return list(masks)
