"""Where a transformer keeps its image tokens in self-attention: shapes in, positions out (no tensors)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Grid = tuple[int, int]  # (height, width) in tokens


@dataclass(frozen=True)
class Place:
    """One kind of self-attention call, known by its sequence length.

    `start` says where the image begins. When other attention calls of the model happen to have the same length, the
    first `skip` calls of it are theirs, and after that every `period`-th call is this one. `stream` is the part of the
    sequence that blocks with a stream for the image and one for the text are given as the image's: by default all from
    `start` on.
    """

    start: int
    skip: int = 0
    period: int = 1
    stream: tuple[int, int] | None = None


@dataclass(frozen=True)
class Layout:
    """The image tokens of one forward pass: frames of one grid each, and {sequence length: place} of the calls that
    hold them.
    """

    frames: int
    grid: Grid
    places: Mapping[int, Place]


# (model, x, context, conditions): the latent (B, C, [T,] H, W), the text tokens (B, L, D) or None, and the call's other
# conditions by name.
FindLayout = Callable[[nn.Module, Tensor, Tensor | None, Mapping[str, Any]], Layout]


@dataclass(frozen=True)
class TransformerClass:
    """A ComfyUI class: how to find its layout, its patch sides, and its lists of blocks with self-attention."""

    layout: FindLayout
    patch: Callable[[nn.Module], int]
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class TokenLayout:
    """{class name: its layout} of a family's transformers.

    Names are exact: a subclass may keep its tokens elsewhere (Wan's S2V and SCAIL do, causal Wan keeps keys of earlier
    frames).
    """

    classes: Mapping[str, TransformerClass]


@dataclass(frozen=True)
class UNetLayout:
    """An LDM-layout UNet: its attention is found in its blocks, whatever its class name."""


def token_grid(latent: Sequence[int], patch: int) -> Grid:
    """Token grid for a latent's (..., height, width); rounded up, because the model pads sides that do not divide
    evenly.
    """
    return math.ceil(latent[-2] / patch), math.ceil(latent[-1] / patch)


def token_count(latent: Sequence[int], patch: int) -> int:
    """The number of tokens of a latent with (..., height, width)."""
    height, width = token_grid(latent, patch)
    return height * width


def whole_patches(latent: Sequence[int], patch: int) -> int:
    """The number of tokens of a latent that goes through a plain strided convolution: sides are rounded down."""
    return (latent[-2] // patch) * (latent[-1] // patch)


def text_length(context: Tensor | None) -> int:
    """The number of tokens of a text (B, L, D), 0 without one."""
    return 0 if context is None else context.shape[1]


def round_up(count: int, multiple: int | None) -> int:
    """A count rounded up to a multiple; unchanged for None."""
    return count if multiple is None else math.ceil(count / multiple) * multiple


def frame_count(length: int, depth: int) -> int:
    """Token frames for this many latent frames, at `depth` latent frames per token."""
    return math.ceil(length / depth)


def reference_tokens(latents: Iterable[Tensor] | None, patch: int) -> int:
    """The number of tokens added by reference images (..., height, width)."""
    return sum(token_count(latent.shape, patch) for latent in latents or ())


def patch_size(model: nn.Module) -> int:
    """The side of a patch: `patch_size` of the model, a number or (depth, height, width)."""
    size: Any = model.patch_size
    if isinstance(size, tuple | list):
        return int(size[1])
    return int(size)
