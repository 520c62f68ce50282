"""Attention kernels by name: which cannot train, which train slowly, and which refuse fewer keys than queries."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..core.calls import closure_contents

# ComfyUI's function names. Its FlashAttention is a custom operation without a backward; the others quantize and have
# none either.
INFERENCE_ONLY = {
    "attention_sage": "SageAttention (--use-sage-attention)",
    "attention3_sage": "SageAttention 3",
    "attention_flash": "FlashAttention (--use-flash-attention)",
    "attention_comfy_kitchen_int8": "Comfy Kitchen int8 attention (--use-ck-attention)",
}
INFERENCE_ONLY_WORDS = {  # in the names of other packs' overrides; must not match usage, message or passage
    re.compile(r"(?<![a-z])sage|Sage|SAGE"): "SageAttention",
    re.compile("int8", re.IGNORECASE): "int8 attention",
    re.compile("fp8", re.IGNORECASE): "fp8 attention",
}

FEWER_KEYS = {
    "attention_sage": (
        "SageAttention is on: some of its versions refuse fewer keys than queries; ComfyUI then logs an error for each"
        " such block and computes it with PyTorch's attention, which is slower. Without --use-sage-attention there is"
        " no such doubt"
    ),
    "attention3_sage": (
        "SageAttention 3 is on: some of its versions refuse fewer keys than queries; ComfyUI then falls back to"
        " PyTorch's"
    ),
}


def kernel_name(kernel: Any) -> str:
    """The name of an attention function or override."""
    return str(getattr(kernel, "__qualname__", None) or type(kernel).__qualname__)


class InferenceOnly(ValueError):
    """An attention kernel without a backward pass, in a model being trained."""


def refuse_inference_only(kernel: Any) -> None:
    """Raise InferenceOnly, with the kernel's name, if an attention kernel (or the kernel a closure calls) has no
    backward pass.
    """
    names = [kernel_name(kernel), *map(kernel_name, filter(callable, closure_contents(kernel)))]
    for name in names:
        title = INFERENCE_ONLY.get(name.rpartition(".")[2])
        if title is None:
            title = next((label for word, label in INFERENCE_ONLY_WORDS.items() if word.search(name)), None)
        if title is not None:
            raise InferenceOnly(
                f"{title} is for inference only, it has no backward pass (kernel {name}): take its node off the model"
                " and train with PyTorch's attention"
            )


class TrainingKernel:
    """`optimized_attention_override(kernel, q, k, v, heads, …)` of a model being trained.

    Whatever kernel ComfyUI was started with, PyTorch's scaled dot-product attention takes its place: others have no
    backward pass (SageAttention, FlashAttention), keep every score for it, or compute the same. `previous` is another
    node's override, or None; one without a backward pass is refused by name (InferenceOnly). Kernels get one type:
    under autocast, norms of queries and keys (Wan, Qwen-Image) leave float32 beside bf16 values.
    """

    def __init__(self, sdpa: Callable[..., Tensor], previous: Callable[..., Tensor] | None = None):
        self.sdpa, self.previous = sdpa, previous

    def __call__(
        self, kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        q, k, v = _to_narrowest_type(q, k, v)
        if self.previous is None:
            return self.sdpa(q, k, v, *args, **kwargs)
        refuse_inference_only(self.previous)
        return self.previous(self.sdpa, q, k, v, *args, **kwargs)


def _to_narrowest_type(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three in the narrowest type that one of them has: that of the products, which nothing has widened."""
    dtype = min((v.dtype, q.dtype, k.dtype), key=lambda dtype: dtype.itemsize)
    return q.to(dtype), k.to(dtype), v.to(dtype)
