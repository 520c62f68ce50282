"""Which model a LoRA is for, told from the names and shapes in its file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import registry
from .family import ModelFamily
from .recognition import LoraShapes


def recognise_lora(tensors: Iterable[tuple[str, Sequence[int]]]) -> ModelFamily | None:
    """The family that (name, shape) of a LoRA's tensors point to; None when they do not tell."""
    file = LoraShapes(tensors)
    if file.is_unet:
        return _by_text_width(file) or _by_unet_names(file)
    for family in registry.families():
        if family.recognition.fits(file):
            return family
    return _by_shared_names(file)


def _by_text_width(file: LoraShapes) -> ModelFamily | None:
    """The UNet whose cross-attention reads text of this width; None where layers contradict each other."""
    matches = [_family_of_text(width) for width in file.text_widths()]
    if len(set(matches)) == 1:
        return matches[0]
    return None


def _family_of_text(width: int) -> ModelFamily | None:
    for family in registry.families():
        if width in family.recognition.text_widths:
            return family
    return None


def _by_unet_names(file: LoraShapes) -> ModelFamily | None:
    """The UNet that alone has such layers, in a file where cross-attention does not tell."""
    if file.text_widths() and all(_family_of_text(width) is None for width in file.text_widths()):
        return None  # a text of a width that no family knows
    for family in registry.families():
        names = family.recognition.unet_names
        if names is not None and file.has(names):
            return family
    return None


def _by_shared_names(file: LoraShapes) -> ModelFamily | None:
    """The family whose columns fit, of those that have the same names; other names where several do."""
    claims: dict[str, list[ModelFamily]] = {}
    for family in registry.families():
        shared = family.recognition.shared_names
        if shared is not None and shared.fits(file):
            claims.setdefault(shared.pattern, []).append(family)
    for families in claims.values():
        deciding = _without_overruled(families)
        if len(deciding) == 1:
            return deciding[0]
    return None


def _without_overruled(families: Sequence[ModelFamily]) -> list[ModelFamily]:
    """Families less those of whose columns one with a further sign (`also`) is among them."""
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
