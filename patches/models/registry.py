"""Every model family Graft knows, and the tables derived from their records.

To add one, write a file with a `FAMILY` and put it into the list.
"""

from __future__ import annotations

from torch import nn

from ..registry import Registry
from . import (
    ace_step,
    auraflow,
    cascade,
    chroma,
    cosmos,
    ernie_image,
    flux,
    flux2,
    hidream,
    hunyuan_video,
    ideogram4,
    kandinsky5,
    krea2,
    ltx,
    lumina,
    other_models,
    qwen_image,
    sd3,
    stable_audio,
    unet,
    wan,
    z_image,
)
from .block_names import BlockNames
from .family import ModelFamily
from .layer_names import LayerNames
from .routed_blocks import TokenRouting
from .token_layout import TokenLayout, TransformerClass

# In the order in which a LoRA file is compared with them: those with names that nobody else has first.
FAMILIES: Registry[ModelFamily] = Registry(
    "model family",
    (
        *unet.FAMILIES,
        cascade.FAMILY,
        hunyuan_video.HUNYUAN_VIDEO_15,
        hunyuan_video.FAMILY,
        chroma.FAMILY,
        flux2.FAMILY,
        auraflow.FAMILY,
        flux.FAMILY,
        hidream.FAMILY,
        krea2.FAMILY,
        ernie_image.FAMILY,
        kandinsky5.FAMILY,
        sd3.FAMILY,
        qwen_image.FAMILY,
        ace_step.FAMILY,
        stable_audio.FAMILY,
        cosmos.ANIMA,
        cosmos.FAMILY,
        ltx.LTX_2,
        wan.FAMILY,
        lumina.FAMILY,
        lumina.OMNIGEN2,
        z_image.FAMILY,
        ideogram4.FAMILY,
        ltx.FAMILY,
    ),
    newest_first=True,
)


def transformer_classes() -> dict[str, TransformerClass]:
    """{class name: its token layout} for every transformer that token downsampling supports."""
    classes: dict[str, TransformerClass] = {}
    for family in FAMILIES:
        if isinstance(family.token_layout, TokenLayout):
            classes.update(family.token_layout.classes)
    return classes


def token_routing() -> TokenRouting:
    """How every transformer calls its blocks whose family knows that, and why tokens cannot skip those of others."""
    found = TokenRouting({}, {})
    for family in FAMILIES:
        if isinstance(family.token_routing, TokenRouting):
            found = TokenRouting(
                {**found.classes, **family.token_routing.classes}, {**found.refused, **family.token_routing.refused}
            )
    return found


def takes_masked_text_alone(model: nn.Module) -> bool:
    """Whether a model takes only one caption with a mask at a time."""
    classes = {kind.__name__ for kind in type(model).__mro__}
    return any(classes & set(family.masked_text_alone) for family in FAMILIES)


def layer_names() -> list[LayerNames]:
    """diffusers' names for every family that has them, the other names of each, and those of further models."""
    found: list[LayerNames] = []
    for family in FAMILIES:
        if isinstance(family.layer_names, LayerNames):
            found.append(family.layer_names)
        found += family.other_names
    return [*found, *other_models.LAYER_NAMES]


@FAMILIES.derived
def block_names() -> tuple[BlockNames, ...]:
    """The blocks of every family that names them, each once."""
    names: dict[int, BlockNames] = {}
    for family in FAMILIES:
        if isinstance(family.blocks, BlockNames):
            names.setdefault(id(family.blocks), family.blocks)
    return tuple(names.values())
