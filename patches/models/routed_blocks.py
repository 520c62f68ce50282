"""How a transformer calls its blocks, for tokens that skip some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .token_layout import FindLayout

REFERENCES = "treats reference images at a noise level of their own"


@dataclass(frozen=True)
class RoutedBlocks:
    """How a list of blocks is called, by its path in the model.

    `image` is the parameter with the image's tokens (B, N, C): its name, its name and the place in the tuple that it
    gets, or its position where blocks take any arguments. It is the whole sequence of self-attention if `joint`, else
    the image's stream alone, and a grid (B, T, H, W, C) if `grid`. `positions` (rotary embeddings, alone or in tuples)
    and `masks` count the tokens of the whole sequence. `returned` is the image's place in what a block returns, None
    where it returns the image alone.

    `apart`: the model looks at the sequence's length between blocks, so each block puts the tokens back. `shared`:
    positions have no axis for rows, so all rows of a batch keep the same tokens. `window` is the module of a block
    whose `sliding_window` says how many places of the sequence a token sees on each side.

    Where one of `absent` is given, {parameter: what it does}, no token can skip; nor where one of `one_step`,
    {parameter: its number of axes}, has more than one row on axis 1: a noise level for each frame or token.
    """

    blocks: str
    image: str | int | tuple[str, int]
    joint: bool = True
    grid: bool = False
    positions: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    returned: int | None = None
    apart: bool = False
    shared: bool = False
    window: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)
    one_step: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RoutedClass:
    """A ComfyUI class: its lists of blocks in the order in which they run, and how to find its image's tokens.

    Without a layout the blocks' image argument holds nothing else. `what` the tokens are of, for the report.
    """

    blocks: tuple[RoutedBlocks, ...]
    layout: FindLayout | None = None
    what: str = "image"


@dataclass(frozen=True)
class TokenRouting:
    """{class name: how its blocks are called} of a family's transformers, and {class name: why no token can skip one}.

    Names are exact: a subclass may call its blocks in another way.
    """

    classes: Mapping[str, RoutedClass] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
