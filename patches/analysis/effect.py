"""What each block of each LoRA of a stack does to a model's prediction, and which blocks are enough for most of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..lora_files.read_stack import ModelWeights
from ..models.block_names import REST
from ..patching.fuse import Patch
from .charts import Bar, BarChart
from .rows import RowPatches, blocks_of

WeightPatches = Mapping[str, Sequence[Patch]]
# The model's predictions, one for each noise level, with these patches on it and nothing else of the stack.
Predict = Callable[[WeightPatches], Sequence[Tensor]]
_SHOWN = 12  # blocks of a row in the report, the strongest


@dataclass(frozen=True)
class RowEffect:
    """What one LoRA does: the relative change of the prediction at each noise level, by block and with all blocks on.

    `kept` are the strongest blocks. `missed` is how far they are from the whole row, as a share of its change.
    """

    name: str
    strength: float
    blocks: Mapping[str, tuple[float, ...]]
    whole: tuple[float, ...]
    kept: tuple[str, ...]
    missed: float
    text_layers: int
    block_weights: str

    @property
    def shares(self) -> dict[str, float]:
        """The share of each block in the sum of all blocks' effects."""
        effects = {block: mean(levels) for block, levels in self.blocks.items()}
        total = sum(effects.values())
        return {block: effect / total if total else 0.0 for block, effect in effects.items()}

    @property
    def kept_share(self) -> float:
        """The share of the kept blocks in the sum of all blocks' effects."""
        shares = self.shares
        return sum(shares[block] for block in self.kept)


def check_blocks(weights: ModelWeights) -> None:
    """Raises ValueError for a model whose blocks Graft does not know."""
    if blocks_of(weights) == [REST]:
        raise ValueError(
            "Graft knows no blocks of this model, so there is nothing to switch on and off one by one. Use a model of a"
            " family that Graft knows (docs/families.md lists them)."
        )


# --- measuring --------------------------------------------------------------------------------------------------------


def count_steps(rows: Sequence[RowPatches]) -> int:
    """How often `measure` calls `predict` at most."""
    return 1 + sum(len(row.blocks) + 2 for row in rows)


def measure(
    rows: Sequence[RowPatches], predict: Predict, keep: float, advance: Callable[[int], None] = lambda done: None
) -> list[RowEffect]:
    """The effect of every block of every row: ‖f(on) - f(off)‖ / ‖f(off)‖ at each noise level.

    f(off) is the prediction of the model without the stack, f(on) that with only this block of this row on it, at the
    row's strength and block weights.

    Args:
        rows: the stack.
        predict: f, at each noise level.
        keep: the share of a row's effect that the kept blocks must reach.
        advance: is told how many of `steps` are done.

    Raises:
        ValueError: if a prediction tells nothing.
    """
    predicted = _CheckedPrediction(predict, advance)
    base = predicted({}, "the model without the stack")
    if not all(bool(level.any()) for level in base):
        raise ValueError(
            "The model predicts only zeros at one of the noise levels, so no share of that can change. Check that the"
            " prompt is active over the whole range of steps."
        )
    effects = []
    for row in rows:
        effects.append(_measure_row(row, predicted, base, keep))
        predicted.done = count_steps(rows[: len(effects)])
        advance(predicted.done)
    return effects


class _CheckedPrediction:
    """`predict`, with progress, and a check of what comes out."""

    def __init__(self, predict: Predict, advance: Callable[[int], None]):
        self.predict, self.advance, self.done = predict, advance, 0

    def __call__(self, patches: WeightPatches, of: str) -> Sequence[Tensor]:
        predictions = self.predict(patches)
        if not all(bool(torch.isfinite(level).all()) for level in predictions):
            raise ValueError(
                f"The prediction of {of} holds NaN or infinite values, so nothing can be measured. Lower the strength,"
                " or run the model in another precision."
            )
        self.done += 1
        self.advance(self.done)
        return predictions


def _measure_row(row: RowPatches, predicted: _CheckedPrediction, base: Sequence[Tensor], keep: float) -> RowEffect:
    name, changes = row.entry.name, {}
    for block in row.blocks:
        on = predicted(row.patches_in([block]), f"{name} in block {block}")
        changes[block] = relative_changes(on, base)
    whole = predicted(row.patches_in(list(row.blocks)), name) if row.blocks else base
    kept = strongest_blocks({block: mean(levels) for block, levels in changes.items()}, keep)
    missed = 0.0
    if len(kept) < len(row.blocks):
        missed = mean(_missed_shares(predicted(row.patches_in(kept), f"the kept blocks of {name}"), whole, base))
    return RowEffect(
        name,
        row.entry.strength_model,
        changes,
        relative_changes(whole, base),
        kept,
        missed,
        row.text_layers,
        kept_block_weights(row, kept),
    )


def relative_changes(on: Sequence[Tensor], off: Sequence[Tensor]) -> tuple[float, ...]:
    """‖on - off‖ / ‖off‖ at each noise level, in float64.

    Args:
        on: a prediction of any shape for each level.
        off: the same of the model without the block.
    """
    return tuple(_distance(one, other) / _norm(other) for one, other in zip(on, off, strict=True))


def _missed_shares(kept: Sequence[Tensor], whole: Sequence[Tensor], base: Sequence[Tensor]) -> list[float]:
    """How far the kept blocks are from the whole row at each noise level, as a share of the row's change."""
    shares = []
    for few, every, off in zip(kept, whole, base, strict=True):
        change = _distance(every, off)
        if change:
            shares.append(_distance(few, every) / change)
        else:
            shares.append(0.0)
    return shares


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def _distance(one: Tensor, other: Tensor) -> float:
    return _norm(one.double() - other.double())


def mean(values: Sequence[float]) -> float:
    """The mean over the noise levels; 0 without any."""
    return sum(values) / max(1, len(values))


# --- what is kept -----------------------------------------------------------------------------------------------------


def strongest_blocks(effects: Mapping[str, float], keep: float) -> tuple[str, ...]:
    """The strongest blocks that reach a share of the sum of all effects, in the order of `effects`.

    A share of 1 keeps every block, and so does a row without any effect.
    """
    wanted = keep * sum(effects.values())
    if keep >= 1.0 or not wanted:
        return tuple(effects)
    kept, reached = set(), 0.0
    for block in sorted(effects, key=lambda name: -effects[name]):
        if reached >= wanted:
            break
        kept.add(block)
        reached += effects[block]
    return tuple(block for block in effects if block in kept)


def kept_block_weights(row: RowPatches, kept: Collection[str]) -> str:
    """Block weights that switch off the blocks of a row that are not kept."""
    return row.block_weights({block: float(block in kept) for block in row.blocks})


# --- the report -------------------------------------------------------------------------------------------------------


def report(effects: Sequence[RowEffect], levels: Sequence[float], keep: float) -> str:
    """The table as text: each row of the stack, its strongest blocks, and what is kept."""
    noise = ", ".join(f"{level:.3g}" for level in levels)
    lines = [
        f"How much each block changes the prediction, alone and beside the model without the stack (mean over {noise}"
        " sigma):"
    ]
    for number, effect in enumerate(effects, start=1):
        lines += [f"{number}. {line}" if place == 0 else f"   {line}" for place, line in _row_lines(effect, keep)]
    return "\n".join(lines)


def _row_lines(effect: RowEffect, keep: float) -> Iterable[tuple[int, str]]:
    lines = [f"{effect.name} at {effect.strength:g}: all blocks together {_percent(mean(effect.whole))}"]
    shares = effect.shares
    ranked = sorted(effect.blocks, key=lambda block: -shares[block])
    for block in ranked[:_SHOWN]:
        by_level = " ".join(_percent(level) for level in effect.blocks[block])
        lines.append(
            f"{block:<5} {_percent(mean(effect.blocks[block])):>8}  {shares[block]:>4.0%} of the sum  ({by_level})"
        )
    if len(ranked) > _SHOWN:
        lines.append(f"and {len(ranked) - _SHOWN} weaker blocks")
    lines += _kept_lines(effect, keep)
    if effect.text_layers:
        lines.append(f"its {effect.text_layers} text encoder layers are not measured, and stay on")
    return enumerate(lines)


def _kept_lines(effect: RowEffect, keep: float) -> list[str]:
    if not effect.blocks:
        return ["it changes nothing: its block weights are 0 for every block that the file has"]
    if not mean(effect.whole):
        return ["it changes nothing that this prompt and latent show; every block is kept"]
    if len(effect.kept) == len(effect.blocks):
        return [f"for {keep:.0%} of the effect it needs all {len(effect.blocks)} blocks"]
    return [
        f"for {keep:.0%} of the effect it needs {len(effect.kept)} of {len(effect.blocks)} blocks"
        f" ({', '.join(effect.kept)}), {effect.kept_share:.0%} of the sum; together they differ from the whole row by"
        f" {effect.missed:.0%} of its change",
        f"block weights: {effect.block_weights}",
    ]


def charts(effects: Sequence[RowEffect]) -> list[BarChart]:
    """The effects as bars by block, a chart for each row; the blocks that are kept are strong."""
    drawn = []
    for effect in effects:
        bars = [Bar(block, mean(levels), block in effect.kept) for block, levels in effect.blocks.items()]
        drawn.append(BarChart(f"{effect.name} at {effect.strength:g}: {_percent(mean(effect.whole))}", bars))
    return drawn


def _percent(share: float) -> str:
    return f"{share:.2%}"


def panel(effects: Sequence[RowEffect], levels: Sequence[float], keep: float) -> dict[str, Any]:
    """The effects as JSON for the editor's panel."""
    rows = []
    for effect in effects:
        shares = effect.shares
        blocks = []
        for block, changes in effect.blocks.items():
            blocks.append(
                {
                    "name": block,
                    "effect": mean(changes),
                    "share": shares[block],
                    "levels": list(changes),
                    "kept": block in effect.kept,
                }
            )
        rows.append(
            {
                "file": effect.name,
                "strength": effect.strength,
                "whole": mean(effect.whole),
                "missed": effect.missed,
                "blocks": blocks,
                "after": effect.block_weights,
            }
        )
    return {"rows": rows, "levels": list(levels), "keep": keep}
