"""What a LoRA key format is: how to recognize its names, map them to generic names, and write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...models.family import ModelFamily

Group = dict[str, tuple[str, Tensor]]  # the tensors of one layer: role -> (key in the file, tensor)
Groups = Mapping[str, Group]  # by layer name
GENERIC_PREFIX = "diffusion_model."
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}  # that files are saved in


class KeyWriter(Protocol):
    """Writes a LoRA in a format's names."""

    def problems(self, groups: Groups, instead: str) -> list[str]:
        """What the format cannot store, nothing by default; `instead` names the formats that can."""
        return []

    def write(self, groups: Groups, dtype: torch.dtype, family: ModelFamily | None) -> dict[str, Tensor]:
        """The tensors of a file, factors and differences as `dtype`."""


@dataclass(frozen=True)
class KeySpelling:
    """Keys that a trainer spells in its own way: `rename` gives the generic key for a match of the whole key."""

    pattern: re.Pattern[str]
    rename: Callable[[re.Match[str]], str]


@dataclass(frozen=True, eq=False)
class KeyFormat:
    """One way of naming a LoRA's tensors (a key format), such as kohya's or PEFT's.

    - `title` says who writes it; `examples` maps keys in files to their weights (tests read them).
    - `prefixes` begin the layers of the diffusion model; the rest of the name is the model's path or diffusers', with
      dots or underscores.
    - `text_encoder_prefixes` begin the layers of text encoders. If these are numbered, `text_encoder` matches the part
      before the path, with the number as its only group.
    - `spellings` rename whole keys. `embeddings` matches keys of textual inversions in the file; its groups are their
      `name`, if the file names them, and the text `encoder` that they are for.
    - Formats with a `writer` can be chosen in Save LoRA; `holds_every_kind` means that the format can store every kind
      of adapter.
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
