"""Token downsampling of transformers: the plan for a model whose family knows where the image tokens are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..models import registry
from ..models.token_layout import Grid, TransformerClass, token_grid
from .tokens import ToDoSettings


@dataclass(frozen=True, eq=False)
class TransformerToDo:
    """The token downsampling plan for one transformer: keys and values lose image tokens in every block (depth 1).

    It holds only plain values and the family's functions, so that clones of a model share it.
    """

    settings: ToDoSettings
    tokens: TransformerClass
    name: str
    depths: Mapping[int, tuple[int, int]]  # depth -> (self-attention blocks, other blocks)
    patch: int

    def __deepcopy__(self, memo: dict[int, Any]) -> TransformerToDo:
        return self

    @property
    def identity(self) -> str:
        """The same text for an equal patch, in every process; fingerprints hash it."""
        return self.settings.identity

    def grid_at(self, depth: int, latent: Any) -> Grid:
        """The token grid of a frame for a latent's (..., height, width)."""
        return token_grid(latent, self.patch)


def plan_transformer(model: nn.Module, settings: ToDoSettings) -> TransformerToDo:
    """Plan token downsampling for a transformer.

    Raises TypeError naming an unknown class, and ValueError for more than one depth.
    """
    tokens, name = tokens_of(model), type(model).__name__
    blocks = sum(len(getattr(model, block_list)) for block_list in tokens.blocks)
    if len(settings.factors) > 1:
        raise ValueError(
            f"{len(settings.factors)} depths asked for, but this {name} is a transformer: all its {blocks} blocks see"
            " the same token grid, which is one depth: set maximum depth to 1, or give one factor by depth"
        )
    return TransformerToDo(settings, tokens, name, {1: (blocks, 0)}, tokens.patch(model))


def tokens_of(model: nn.Module) -> TransformerClass:
    """Where a transformer keeps its image tokens; raises TypeError naming an unknown class."""
    name, classes = type(model).__name__, registry.transformer_classes()
    tokens = classes.get(name)
    if tokens is None:
        known = ", ".join(sorted(classes))
        raise TypeError(
            f"token downsampling does not know where {name} keeps its image tokens, so it would do nothing or harm; "
            f"it knows LDM-layout UNets and these transformers: {known}"
        )
    lists = nn.ModuleList | nn.ModuleDict
    missing = [name for name in tokens.blocks if not isinstance(getattr(model, name, None), lists)]
    if missing:
        raise TypeError(
            f"this {name} has no {' and no '.join(missing)}: it is not the ComfyUI class that token downsampling knows"
        )
    return tokens
