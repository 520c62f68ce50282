"""Small helpers that ComfyUI's nodes share: conditioning values, patient picture loading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
