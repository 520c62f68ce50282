"""Every model family Graft knows, the tables derived from their records, and which one a LoRA file or a model is of.

To add one, write a file with a `FAMILY` and put it into the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
from .diffusers_names import LayerNames
from .family import ModelFamily
from .layers import is_linear
from .recognition import LoraShapes
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


# --- which family a file or a model is of -----------------------------------------------------------------------------


def recognize_lora(tensors: Iterable[tuple[str, Sequence[int]]]) -> ModelFamily | None:
    """The family indicated by the (name, shape) pairs of a LoRA's tensors; None if they do not tell."""
    file = LoraShapes(tensors)
    if file.is_unet:
        return _find_by_text_width(file) or _find_by_unet_names(file)
    for family in FAMILIES:
        if family.recognition.fits(file):
            return family
    return _find_by_shared_names(file)


def _find_by_text_width(file: LoraShapes) -> ModelFamily | None:
    """The UNet whose cross-attention reads text of this width; None if layers contradict each other."""
    matches = [_family_of_text(width) for width in file.text_widths()]
    if len(set(matches)) == 1:
        return matches[0]
    return None


def _family_of_text(width: int) -> ModelFamily | None:
    for family in FAMILIES:
        if width in family.recognition.text_widths:
            return family
    return None


def _find_by_unet_names(file: LoraShapes) -> ModelFamily | None:
    """The only UNet with such layers, for a file whose cross-attention does not tell."""
    if file.text_widths() and all(_family_of_text(width) is None for width in file.text_widths()):
        return None  # a text of a width that no family knows
    for family in FAMILIES:
        names = family.recognition.unet_names
        if names is not None and file.has(names):
            return family
    return None


def _find_by_shared_names(file: LoraShapes) -> ModelFamily | None:
    """The family whose columns match, among those with the same names; tries other names if several match."""
    claims: dict[str, list[ModelFamily]] = {}
    for family in FAMILIES:
        shared = family.recognition.shared_names
        if shared is not None and shared.fits(file):
            claims.setdefault(shared.pattern, []).append(family)
    for families in claims.values():
        deciding = _drop_overruled(families)
        if len(deciding) == 1:
            return deciding[0]
    return None


def _drop_overruled(families: Sequence[ModelFamily]) -> list[ModelFamily]:
    """The families, minus those with columns that a family with a further sign (`also`) has too."""
    overruled: set[int] = set()
    for family in families:
        shared = family.recognition.shared_names
        if shared is not None and shared.also is not None:
            overruled |= set(shared.widths or ())
    remaining = []
    for family in families:
        shared = family.recognition.shared_names
        if shared is not None and (shared.also is not None or not overruled & set(shared.widths or ())):
            remaining.append(family)
    return remaining


def recognize_model(model: nn.Module) -> ModelFamily | None:
    """The family of a diffusion model, from the names and shapes of its linear layers; None if they do not tell."""
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for name, part in model.named_modules():
        if is_linear(part):
            columns = int(part.in_features)
            shapes.append((f"diffusion_model.{name}.lora_down.weight", (1, columns)))
    return recognize_lora(shapes)
