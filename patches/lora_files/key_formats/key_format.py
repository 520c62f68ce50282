"""What a key format is: how its names are recognised, how they map to generic names, and how Graft writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...models.family import ModelFamily

Group = dict[str, tuple[str, Tensor]]  # the tensors of one layer: role -> (key in the file, tensor)
Groups = Mapping[str, Group]  # by layer name
GENERIC_PREFIX = "diffusion_model."


class KeyWriter(Protocol):
    """Writes a LoRA under the names of a format."""

    def problems(self, groups: Groups, instead: str) -> list[str]:
        """What the format cannot hold; `instead` names the formats that can."""

    def write(self, groups: Groups, dtype: torch.dtype, family: ModelFamily | None) -> dict[str, Tensor]:
        """The tensors of a file, factors and differences as `dtype`."""


@dataclass(frozen=True)
class KeySpelling:
    """Whole keys that a trainer writes in a way of its own: `rename` gives the generic key of one that fits."""

    pattern: re.Pattern[str]
    rename: Callable[[re.Match[str]], str]


@dataclass(frozen=True, eq=False)
class KeyFormat:
    """One way of naming a LoRA's tensors. `title` says who writes it; `examples` lead keys of files to the weights that
    they are for (tests read them).

    Layers of the diffusion model are recognised by `prefixes`; the rest of a name is the model's path or diffusers',
    with points or underscores. Layers of text encoders begin with one of `text_encoder_prefixes`; where they are
    numbered, `text_encoder` matches what comes before the path, with the number as its only group. `spellings` rename
    whole keys. `embeddings` matches keys of textual inversions in the file, with their name as its only group. Formats
    with a `writer` are choices of Save LoRA; `holds_every_kind` says that it takes every kind of adapter.
    """

    name: str
    title: str
    examples: Mapping[str, str]
    prefixes: tuple[str, ...] = ()
    text_encoder: str = ""
    text_encoder_prefixes: tuple[str, ...] = ()
    spellings: tuple[KeySpelling, ...] = ()
    embeddings: str = ""
    writer: KeyWriter | None = None
    holds_every_kind: bool = False
