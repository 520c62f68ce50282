"""Recognises which model a LoRA is for, from the names and shapes in its file, and of which family a model is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from . import registry
from .family import ModelFamily
from .layers import is_linear
from .recognition import LoraShapes


def recognize_lora(tensors: Iterable[tuple[str, Sequence[int]]]) -> ModelFamily | None:
    """The family indicated by the (name, shape) pairs of a LoRA's tensors; None if they do not tell."""
    file = LoraShapes(tensors)
    if file.is_unet:
        return _find_by_text_width(file) or _find_by_unet_names(file)
    for family in registry.FAMILIES:
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
    for family in registry.FAMILIES:
        if width in family.recognition.text_widths:
            return family
    return None


def _find_by_unet_names(file: LoraShapes) -> ModelFamily | None:
    """The only UNet with such layers, for a file whose cross-attention does not tell."""
    if file.text_widths() and all(_family_of_text(width) is None for width in file.text_widths()):
        return None  # a text of a width that no family knows
    for family in registry.FAMILIES:
        names = family.recognition.unet_names
        if names is not None and file.has(names):
            return family
    return None


def _find_by_shared_names(file: LoraShapes) -> ModelFamily | None:
    """The family whose columns match, among those with the same names; tries other names if several match."""
    claims: dict[str, list[ModelFamily]] = {}
    for family in registry.FAMILIES:
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
