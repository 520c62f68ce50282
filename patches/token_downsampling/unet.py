"""Token downsampling of UNets (SD 1.x, SD 2, SDXL): which self-attention blocks it is for, and the `attn1_patch`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..models.token_layout import Grid
from .tokens import ToDoSettings, target_grid, thin

Block = tuple[str, int]  # ("input", "middle" or "output", index)

# Keys of transformer_options
TRAINING = "graft_training"  # {"step", "total_steps", and more} while a training step runs, absent otherwise
EVALUATING = "graft_evaluating"  # True while TrainStep validates or draws previews, absent otherwise
REPLACED = "graft_replaced"  # the blocks whose attn1 computation another patch replaces
LEFT = "graft_left"  # {block: why a call left it alone, "" where it did not}, absent when nobody asks

COMPUTED = "whose attention another node computes"
CHANGED = "whose keys another node changed"
ROUNDING = 1e-6  # between noise levels that were worked out in different precisions


@dataclass(frozen=True)
class Attention:
    """The attention at one place of a UNet: its level (0 = full resolution), and block_index of its transformer blocks.

    `own` are those whose attn1 is self-attention, `foreign` those whose attn1 has a context of its own
    (`disable_self_attn`). `width` is that of queries and keys, all heads together.
    """

    level: int
    own: tuple[int, ...]
    foreign: tuple[int, ...]
    width: int


def attention_blocks(unet: nn.Module) -> dict[Block, Attention]:
    """Every place of an LDM-layout UNet that has attention, in forward order; raises TypeError naming
    any other class.
    """
    for name in ("input_blocks", "middle_block", "output_blocks"):
        if not isinstance(getattr(unet, name, None), nn.Module):
            raise TypeError(
                f"expected an LDM-layout UNet (input_blocks, middle_block, output_blocks), got {type(unet).__name__},"
                f" which has no {name}"
            )
    blocks: dict[Block, Attention] = {}
    levels: list[int] = []
    level = 0
    for index, block in enumerate(unet.input_blocks):  # type: ignore[arg-type]
        level += any(map(_halves, block))
        levels.append(level)
        blocks["input", index] = _attention(level, block)
    blocks["middle", 0] = _attention(level, unet.middle_block)  # type: ignore[arg-type]
    for index, block in enumerate(unet.output_blocks):  # type: ignore[arg-type]
        # output block i is joined with the skip of input block n-1-i, hence runs at its level
        blocks["output", index] = _attention(levels[-1 - index], block)
    return {block: attention for block, attention in blocks.items() if attention.own or attention.foreign}


def _halves(module: nn.Module) -> bool:
    """Whether a module of an input block halves the sides: a Downsample, or a ResBlock with `updown`."""
    return type(module).__name__ == "Downsample" or bool(getattr(module, "updown", False))


def _attention(level: int, block: nn.Module) -> Attention:
    patchable: list[int] = []
    foreign: list[int] = []
    width = 0
    for module in block.children():
        transformers = getattr(module, "transformer_blocks", None)
        if not isinstance(transformers, nn.ModuleList):
            continue
        for index, transformer in enumerate(transformers):
            if getattr(transformer, "disable_self_attn", False):
                foreign.append(index)
            else:
                patchable.append(index)
            attn1: Any = transformer.attn1
            width = attn1.heads * attn1.dim_head
    return Attention(level, tuple(patchable), tuple(foreign), width)


def attention_depths(unet: nn.Module) -> dict[Block, int]:
    """{(block type, index): depth}; depth 1 is the first level that has self-attention (SD1.x has 4 depths, SDXL 2)."""
    levels = {block: attention.level for block, attention in attention_blocks(unet).items() if attention.own}
    depths = {level: number for number, level in enumerate(sorted(set(levels.values())), start=1)}
    return {block: depths[level] for block, level in levels.items()}


@dataclass(frozen=True, eq=False)
class ToDoPatch:
    """`attn1_patch(q, context, value, extra_options)` of one UNet: thins the tokens of K and V, leaves Q unchanged.

    It holds only plain values, so that clones of a model share it. Whether it runs in a call is decided once, around
    the whole call (`active`); otherwise it is not installed for that call. The grid comes from
    `extra_options["activations_shape"]`, so odd sizes, tiles and mixed batches need no memory of earlier calls, and
    gradient checkpointing may call it again.
    """

    settings: ToDoSettings
    factors: Mapping[Block, float]
    foreign: frozenset[tuple[str, int, int]] = frozenset()
    # By depth: (self-attention blocks, blocks left alone), halvings of the latent's sides, width of queries and keys
    depths: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    levels: Mapping[int, int] = field(default_factory=dict)
    widths: Mapping[int, int] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> ToDoPatch:
        return self

    @property
    def identity(self) -> str:
        """The same text for an equal patch, in every process; fingerprints hash it."""
        return self.settings.identity

    def __call__(
        self, q: Tensor, context: Tensor, value: Tensor, extra_options: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        factor = self._factor(extra_options)
        if factor is None:
            return q, context, value
        place, shape = _place(extra_options), extra_options["activations_shape"]
        unthinned = extra_options.get(LEFT)
        if unthinned is None:
            unthinned = {}
        if context.shape[0] != shape[0]:  # windows of another node's, or a video's frames, place by place
            unthinned.setdefault(place, CHANGED)  # a video's spatial attention of the same place came before
            return q, context, value
        replaced = extra_options.get(REPLACED, ())
        if place in replaced or place[:2] in replaced:
            unthinned[place] = COMPUTED
            return q, context, value
        grid = _strip(q, context, value, shape)
        if grid is None:
            unthinned[place] = CHANGED
            return q, context, value
        unthinned[place] = ""
        target = target_grid(grid, factor)
        thinned = self._thin(context, grid, target)
        if value is context:
            return q, thinned, thinned
        return q, thinned, self._thin(value, grid, target)

    def _thin(self, tokens: Tensor, grid: Grid, target: Grid) -> Tensor:
        strips = tokens.shape[1] // (grid[0] * grid[1])
        if strips == 1:
            return thin(tokens, grid, target, self.settings.method)
        strip_tokens = tokens.reshape(tokens.shape[0] * strips, -1, tokens.shape[2])
        return thin(strip_tokens, grid, target, self.settings.method).reshape(tokens.shape[0], -1, tokens.shape[2])

    def _factor(self, options: Mapping[str, Any]) -> float | None:
        """The factor of the block that runs, None where nothing is asked for or the context is not its own."""
        block, shape = options.get("block"), options.get("activations_shape")
        if block is None or shape is None or len(shape) != 4 or _place(options) in self.foreign:
            return None
        return self.factors.get((block[0], block[1]))

    def grid_at(self, depth: int, latent: Sequence[int]) -> Grid:
        """The token grid of a depth for a latent's (..., height, width)."""
        return _halve((latent[-2], latent[-1]), self.levels[depth])


def _place(options: Mapping[str, Any]) -> tuple[str, int, int]:
    """The current transformer block: (type, index, number)."""
    block = options["block"]
    return block[0], block[1], options.get("block_index", 0)


def _strip(q: Tensor, context: Tensor, value: Tensor, shape: Sequence[int]) -> Grid | None:
    """The grid (height, width) of the keys that one query sees: all of (B, C, height, width), or a strip of it; None if
    unknown.

    ComfyUI's HyperTile cuts the queries into tiles, which enlarge the batch, and leaves keys and values whole: its
    attention then assigns them to the tiles in order, as strips of whole rows if the rows divide evenly.
    """
    height, width = int(shape[2]), int(shape[3])
    if context.shape[1] != height * width or value.shape[:2] != context.shape[:2]:
        return None  # extended, cut, or tiled by another patch
    if q.shape[0] == context.shape[0]:
        return height, width
    tiles, rest = divmod(q.shape[0], context.shape[0])
    if rest or q.shape[1] * tiles != height * width or height % tiles:
        return None
    return height // tiles, width


def is_active(settings: ToDoSettings, options: Mapping[str, Any], level: Callable[[float], float]) -> bool:
    """Whether a call with these transformer_options thins, from its phase, its point in the run and its noise level.

    `level` gives the noise level at a share of sampling, from 0 (the noisiest) to 1, as defined by the model's sampling
    during the call.
    """
    training = options.get(TRAINING)
    # each sample of a training batch has its own noise level, so start and end percent do not apply
    if training is not None:
        return settings.is_active_while_training(training["step"], training["total_steps"])
    if settings.phase == "training" or (settings.phase == "both" and options.get(EVALUATING)):
        return False  # what a training run measures of itself stays comparable with runs without token downsampling
    if (settings.start_percent, settings.end_percent) == (0.0, 1.0) or options.get("sigmas") is None:
        return True
    now = float(options["sigmas"].max())
    # The ends are open where all of sampling is asked for: samplers that add noise go beyond them. Levels come in
    # float32.
    has_started = settings.start_percent == 0.0 or now <= level(settings.start_percent) * (1 + ROUNDING)
    return has_started and (settings.end_percent == 1.0 or now >= level(settings.end_percent) * (1 - ROUNDING))


def plan_unet(unet: nn.Module, settings: ToDoSettings, replaced: Collection[tuple[Any, ...]] = ()) -> ToDoPatch:
    """Plan token downsampling for a UNet.

    `replaced` are the blocks, (type, index) or (type, index, transformer), whose attention another patch computes:
    these are counted as left alone. Raises ValueError if the UNet has no self-attention or fewer depths than factors,
    TypeError for another class.
    """
    attention = attention_blocks(unet)
    places: dict[int, list[Block]] = {}  # by depth
    for block, depth in attention_depths(unet).items():
        places.setdefault(depth, []).append(block)
    _check_depths(type(unet).__name__, settings, attention, places)
    factors: dict[Block, float] = {}
    for depth, factor in enumerate(settings.factors, start=1):
        if factor != 1.0:
            factors.update(dict.fromkeys(places[depth], factor))
    foreign: set[tuple[str, int, int]] = set()
    for block, at_block in attention.items():
        foreign |= {(*block, index) for index in at_block.foreign}
    return ToDoPatch(
        settings=settings,
        factors=factors,
        foreign=frozenset(foreign),
        depths={depth: _count_blocks(blocks, attention, replaced) for depth, blocks in places.items()},
        levels={depth: attention[blocks[0]].level for depth, blocks in places.items()},
        widths={depth: attention[blocks[0]].width for depth, blocks in places.items()},
    )


def _check_depths(
    name: str, settings: ToDoSettings, attention: Mapping[Block, Attention], places: Mapping[int, Sequence[Block]]
) -> None:
    """Raise ValueError if a UNet has no self-attention, or fewer depths than factors."""
    count = len(places)
    if count == 0:
        attention_text = "no attention at all"
        if attention:
            attention_text = f"{len(attention)} attention places, each with a context of its own"
        raise ValueError(f"token downsampling needs self-attention; this {name} has {attention_text}")
    if len(settings.factors) > count:
        levels = [f"depth {depth} = latent / {2 ** attention[places[depth][0]].level}" for depth in sorted(places)]
        raise ValueError(
            f"{len(settings.factors)} depths asked for, but this {name} has self-attention at {count} "
            f"({', '.join(levels)}): set maximum depth to {count}, or give at most {count} factors by depth"
        )


def _count_blocks(
    places: Sequence[Block], attention: Mapping[Block, Attention], replaced: Collection[tuple[Any, ...]]
) -> tuple[int, int]:
    """(self-attention blocks that can be thinned, others) at the given places of a UNet."""
    patched = skipped = 0
    for place in places:
        skipped += len(attention[place].foreign)
        for index in attention[place].own:
            if (*place, index) in replaced or place in replaced:
                skipped += 1
            else:
                patched += 1
    return patched, skipped


def _halve(grid: Grid, times: int) -> Grid:
    for _ in range(times):
        grid = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)  # the UNet rounds up
    return grid
