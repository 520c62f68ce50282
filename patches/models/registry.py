"""Every model family Graft knows, and the tables derived from their records.

To add one, write a file with a `FAMILY` and put it into `_BUILT_IN`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from . import (
    auraflow,
    cascade,
    chroma,
    cosmos,
    flux,
    flux2,
    hunyuan_video,
    ltx,
    lumina,
    qwen_image,
    sd3,
    unet,
    wan,
    z_image,
)
from .block_names import BlockNames
from .family import ModelFamily
from .layer_names import LayerNames
from .token_layout import TokenLayout, TransformerClass, UNetLayout

# In the order in which a LoRA file is compared with them: those with names that nobody else has first.
_BUILT_IN: tuple[ModelFamily, ...] = (
    *unet.FAMILIES,
    cascade.FAMILY,
    hunyuan_video.FAMILY,
    chroma.FAMILY,
    flux2.FAMILY,
    auraflow.FAMILY,
    flux.FAMILY,
    sd3.FAMILY,
    qwen_image.FAMILY,
    cosmos.FAMILY,
    wan.FAMILY,
    lumina.FAMILY,
    z_image.FAMILY,
    ltx.FAMILY,
)
_families: list[ModelFamily] = list(_BUILT_IN)


def families() -> tuple[ModelFamily, ...]:
    """All families, in the order they are compared with a LoRA file."""
    return tuple(_families)


def register(family: ModelFamily) -> None:
    """Add a family, which is compared with files before all others; ValueError if its key is taken."""
    if any(family.key == other.key for other in _families):
        raise ValueError(f"a model family {family.key!r} is already registered")
    _families.insert(0, family)


def unregister(family: ModelFamily) -> None:
    """Remove a family."""
    _families.remove(family)


@contextmanager
def registered(family: ModelFamily) -> Iterator[ModelFamily]:
    """Register a family within the block."""
    register(family)
    try:
        yield family
    finally:
        unregister(family)


def transformer_classes() -> dict[str, TransformerClass]:
    """{class name: its token layout} for every transformer that token downsampling supports."""
    classes: dict[str, TransformerClass] = {}
    for family in _families:
        if isinstance(family.token_layout, TokenLayout):
            classes.update(family.token_layout.classes)
    return classes


def titles_of(kind: type[TokenLayout] | type[UNetLayout]) -> list[str]:
    """Titles of the families with this token layout."""
    return [family.title for family in _families if isinstance(family.token_layout, kind)]


def takes_masked_text_alone(model: nn.Module) -> bool:
    """Whether a model takes only one caption with a mask at a time."""
    classes = {kind.__name__ for kind in type(model).__mro__}
    return any(classes & set(family.masked_text_alone) for family in _families)


def layer_names() -> list[LayerNames]:
    """diffusers' names for every family that has them."""
    return [family.layer_names for family in _families if isinstance(family.layer_names, LayerNames)]


def block_names() -> tuple[BlockNames, ...]:
    """The blocks of every family that names them, each once."""
    return _block_names(families())


@functools.lru_cache(maxsize=8)
def _block_names(known: tuple[ModelFamily, ...]) -> tuple[BlockNames, ...]:
    names: dict[int, BlockNames] = {}
    for family in known:
        if isinstance(family.blocks, BlockNames):
            names.setdefault(id(family.blocks), family.blocks)
    return tuple(names.values())
