"""Pairs the layers of LoRA files that name them in different key formats, without a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from .key_formats.diffusers import strip_attn_processor
from .layer_matching import canonical_name

_GENERIC = re.compile(r"text_encoders\.(\w+)\.transformer\.(model\.)?")
T = TypeVar("T")


def pairing_name(base: str) -> str:
    """A layer's name without prefix and separators (`te1:…` for a text encoder), to pair layers across differently
    written files.
    """
    name = canonical_name(strip_attn_processor(_GENERIC.sub(_number_encoder, base)))
    name = re.sub(r"_(img|txt)_mlp_fc([12])$", _mlp_place, name)
    return re.sub(r"te\d:encoder_block_", "te:encoder_block_", name)  # a T5, whose number depends on the model


def _number_encoder(match: re.Match[str]) -> str:
    return "te2." if match[1] == "clip_g" else "te1."


def _mlp_place(match: re.Match[str]) -> str:
    """diffusers' `fc1` and `fc2` as 0 and 2, their positions in an MLP."""
    return f"_{match[1]}_mlp_{2 * int(match[2]) - 2}"


def rename_as_first(files: Sequence[Mapping[str, T]]) -> list[dict[str, T]]:
    """Files {layer: contents} with the first one's names for the layers that it has too, in whatever key format.

    A name that two layers of a file would get is given to none.
    """
    first = _unique_names(files[0])
    renamed = [dict(files[0])]
    for layers in files[1:]:
        theirs = {layer: name for name, layer in _unique_names(layers).items()}
        names = {layer: first.get(theirs[layer], layer) if layer in theirs else layer for layer in layers}
        renamed.append({names[layer]: contents for layer, contents in layers.items()})
    return renamed


def _unique_names(layers: Mapping[str, T]) -> dict[str, str]:
    """{pairing name: layer} of those that no other layer of the file has."""
    found: dict[str, list[str]] = {}
    for layer in layers:
        found.setdefault(pairing_name(layer), []).append(layer)
    return {name: same[0] for name, same in found.items() if len(same) == 1}
