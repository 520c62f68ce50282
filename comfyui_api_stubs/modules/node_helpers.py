"""Small helpers that ComfyUI's nodes share: conditioning values, patient picture loading."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any


def conditioning_set_values(conditioning: list, values: dict[str, Any] = {}, append: bool = False) -> list:  # noqa: B006
    """A conditioning list with `values` set in each entry's dict; with `append`, added to what is there."""
    out = []
    for tensor, settings in conditioning:
        merged = dict(settings)
        for key, value in values.items():
            present = settings.get(key)
            merged[key] = present + value if append and present is not None else value
        out.append([tensor, merged])
    return out


def pillow(fn: Callable, arg: Any) -> Any:
    """`fn(arg)` of Pillow; once more with truncated files allowed when the first try fails."""
    from PIL import ImageFile

    try:
        return fn(arg)
    except (OSError, ValueError):
        previous, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, True
        try:
            return fn(arg)
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = previous


def hasher() -> Callable:
    """The hash function that is used for files."""
    return hashlib.sha256


def string_to_torch_dtype(string: str) -> Any:
    """The torch dtype that "fp32", "fp16" or "bf16" names; None for anything else."""
    import torch

    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}.get(string)
