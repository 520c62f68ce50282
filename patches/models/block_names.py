"""Which block a layer of a family's model is in, using the names of block weights (sd-webui-lora-block-weight)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

REST = "BASE"  # the text encoders, and whatever is in no block of the list
TEXT = ("CLIP", "T5")  # the text encoders, where they have blocks of their own


@dataclass(frozen=True)
class NumberedBlocks:
    """Blocks of files that number them differently from the model: a pattern of layer names with underscores, and the
    kind.

    A block's number is step * first group + second group + offset; a group missing from the pattern is 0.
    """

    pattern: str
    kind: str
    step: int = 1
    offset: int = 0

    def number(self, groups: Sequence[str]) -> int:
        """The number of a block, from the pattern's groups."""
        first, second, *_ = (*map(int, groups), 0, 0)
        return first * self.step + second + self.offset


@dataclass(frozen=True, eq=False)
class DiffusersBlocks:
    """Blocks with different names in diffusers and ComfyUI, for files written by diffusers or its trainers.

    `sign` occurs in the layer names of such files. `lists`: as in BlockNames. `first`, `last`: layers before and after
    all blocks. `t5`: text encoders that are T5 in these files.
    """

    sign: str
    lists: Mapping[str, str]
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    t5: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class BlockNames:
    """The blocks of a model. `kinds` are all its kinds of blocks, `lists` the kind of each list of blocks in ComfyUI's
    model and in diffusers', `single` blocks outside any list.

    `files`: blocks of files that number them differently. `first`, `last`: layers before and after all blocks, named IN
    and OUT. `weight_lists`: the meaning of a list of this many block weights, (title, blocks). `presets`: block weights
    by name.
    """

    kinds: tuple[str, ...]
    lists: Mapping[str, str]
    single: Mapping[str, str] = field(default_factory=dict)
    files: tuple[NumberedBlocks, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    weight_lists: Mapping[int, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    diffusers: DiffusersBlocks | None = None


def numbered(kind: str, numbers: Iterable[int]) -> tuple[str, ...]:
    """Names of blocks: IN04, IN05 …"""
    return tuple(f"{kind}{number:02}" for number in numbers)


def plain_blocks(*lists: str) -> BlockNames:
    """Blocks L00, L01 … of a transformer with these lists of blocks."""
    return BlockNames(kinds=("L",), lists=dict.fromkeys(lists, "L"), last=("final_layer",))
