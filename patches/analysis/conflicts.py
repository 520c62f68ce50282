"""Where the LoRAs of a stack overlap and where they cancel each other, by layer and by block, and what to do about it.

The change of a row is its difference of the weights at the row's strength and block weights. LoRA, LoCon (also with a
Tucker core) and LoHa of at most 64 components are compared by their factors, exactly; the dense weight is never formed.
What has no such factors (LoKr, larger LoHa, whole differences, DoRA, OFT …) is computed as a whole, one layer at a
time; its cosine is exact too, but a whole difference has no small subspace to compare.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ..lora_files import block_weights
from ..lora_files.low_rank import svd_of_product
from ..lora_files.merge import file_changes
from ..lora_files.merge_methods import FileChange
from ..patching.fuse import Patch
from .charts import CellTable
from .rows import RowPatches

Pair = tuple[int, int]  # places of two rows
_ROUNDING = 1e-6  # singular values below this share of the largest are rounding
_CHUNK = 2**22  # numbers of a whole difference that are multiplied in float64 at once
_SHOWN = 20  # lines of the report for conflicts, and for layers


class Overlap(NamedTuple):
    """How two changes lie to each other.

    - `cosine`: from -1 (they cancel) over 0 (independent) to 1 (the same direction).
    - `outputs`, `inputs`: the mean squared cosine of the principal angles between their column and their row spaces,
      from 0 to 1; None where a change is not a product of factors.
    """

    cosine: float
    outputs: float | None = None
    inputs: float | None = None


class LayerOverlap(NamedTuple):
    """The overlap of two rows in one layer, the inner product of their changes, and the product of their norms."""

    pair: Pair
    weight: str
    overlap: Overlap
    inner: float
    size: float


@dataclass
class Conflicts:
    """The overlap of every pair of rows: by layer, by block and as a whole.

    `energies` are the squared norms of each row's change by block. `blocks` are in the model's order.
    """

    rows: Sequence[RowPatches]
    blocks: list[str]
    energies: list[dict[str, float]]
    layers: list[LayerOverlap] = field(default_factory=list)
    by_block: dict[Pair, dict[str, Overlap]] = field(default_factory=dict)
    whole: dict[Pair, Overlap] = field(default_factory=dict)

    def name(self, row: int) -> str:
        """A row in messages."""
        entry = self.rows[row].entry
        return f"{row + 1}. {entry.name} at {entry.strength_model:g}"


# --- comparing --------------------------------------------------------------------------------------------------------


def compare(
    rows: Sequence[RowPatches],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    advance: Callable[[], None] = lambda: None,
) -> Conflicts:
    """Compare the changes of all rows, layer by layer.

    Args:
        rows: the stack.
        shapes: those of the model's weights, by name.
        read: gives a weight in float32, for DoRA, OFT and others that depend on it.
        advance: called after each of the layers of `group_by_layer`.
    """
    used = {block for row in rows for block in row.blocks}
    blocks = [block for block in dict.fromkeys(map(block_weights.block_of, shapes)) if block in used]
    conflicts = Conflicts(rows, blocks, [dict.fromkeys(row.blocks, 0.0) for row in rows])
    for weight, patches in group_by_layer(rows).items():
        _compare_layer(conflicts, weight, patches, shapes[weight], functools.partial(read, weight))
        advance()
    found: dict[tuple[Pair, str], list[LayerOverlap]] = {}
    for layer in conflicts.layers:
        found.setdefault((layer.pair, block_weights.block_of(layer.weight)), []).append(layer)
    for pair in itertools.combinations(range(len(rows)), 2):
        of_pair = {block: found.get((pair, block), []) for block in blocks}
        sizes = {block: _norm_product(conflicts, pair, [block]) for block in blocks}
        conflicts.by_block[pair] = {block: _combine(of_pair[block], sizes[block]) for block in blocks if sizes[block]}
        every = list(itertools.chain.from_iterable(of_pair.values()))
        conflicts.whole[pair] = _combine(every, _norm_product(conflicts, pair, blocks))
    return conflicts


def group_by_layer(rows: Sequence[RowPatches]) -> dict[str, dict[int, list[Patch]]]:
    """The patches of each weight by the place of their row."""
    layers: dict[str, dict[int, list[Patch]]] = {}
    for place, row in enumerate(rows):
        for weight, patches in row.patches_in(list(row.blocks)).items():
            layers.setdefault(weight, {})[place] = patches
    return layers


def _compare_layer(
    conflicts: Conflicts,
    weight: str,
    patches: Mapping[int, Sequence[Patch]],
    shape: tuple[int, ...],
    read: Callable[[], Tensor],
) -> None:
    """Add what the rows do to one weight."""
    block = block_weights.block_of(weight)
    changes = {place: file_changes(own, shape, read)[0] for place, own in patches.items()}
    energies = {place: max(0.0, inner_product(change, change)) for place, change in changes.items()}
    spaces = {}
    for place, change in changes.items():
        conflicts.energies[place][block] += energies[place]
        if len(changes) > 1:
            spaces[place] = _bases(change)
    for first, second in itertools.combinations(sorted(changes), 2):
        size = math.sqrt(energies[first] * energies[second])
        product = inner_product(changes[first], changes[second])
        outputs, inputs = _compare_bases(spaces[first], spaces[second])
        overlap = Overlap(_cosine(product, size), outputs, inputs)
        conflicts.layers.append(LayerOverlap((first, second), weight, overlap, product, size))


def _norm_product(conflicts: Conflicts, pair: Pair, blocks: Sequence[str]) -> float:
    """The product of the norms of two rows over some blocks."""
    first, second = (sum(conflicts.energies[place].get(block, 0.0) for block in blocks) for place in pair)
    return math.sqrt(first * second)


def _combine(layers: Sequence[LayerOverlap], size: float) -> Overlap:
    """The overlap over several layers; `size` is the product of the norms, other layers of the rows included.

    Subspaces count by the size of the changes.
    """
    compared = [layer for layer in layers if layer.overlap.outputs is not None]
    weight = sum(layer.size for layer in compared)
    outputs = inputs = None
    if weight:
        outputs = sum(layer.size * (layer.overlap.outputs or 0.0) for layer in compared) / weight
        inputs = sum(layer.size * (layer.overlap.inputs or 0.0) for layer in compared) / weight
    return Overlap(_cosine(sum(layer.inner for layer in layers), size), outputs, inputs)


def _cosine(product: float, size: float) -> float:
    return 0.0 if not size else max(-1.0, min(1.0, product / size))


def inner_product(first: FileChange, second: FileChange) -> float:
    """The inner product of two changes of a weight in float64: sum(first * second)."""
    if first.factors is not None and second.factors is not None:
        (up, down), (other_up, other_down) = first.factors, second.factors
        return float(((up.double().T @ other_up.double()) * (down.double() @ other_down.double().T)).sum())
    if first.factors is None and second.factors is None:
        pairs = zip(_chunks(first), _chunks(second), strict=True)
        return sum(float((rows.double() * other.double()).sum()) for rows, other in pairs)
    factored, whole = first, second
    if first.factors is None:
        factored, whole = second, first
    assert factored.factors is not None
    up, down = (factor.double() for factor in factored.factors)
    total, start = 0.0, 0
    for rows in _chunks(whole):
        total += float((up[start : start + len(rows)] * (rows.double() @ down.T)).sum())
        start += len(rows)
    return total


def _chunks(change: FileChange) -> Sequence[Tensor]:
    """A whole difference as matrices of a few rows."""
    assert change.diff is not None
    matrix = change.diff.reshape(change.shape[0], -1)
    return matrix.split(max(1, _CHUNK // matrix.shape[1]))


def _bases(change: FileChange) -> tuple[Tensor, Tensor] | None:
    """Orthonormal bases (out, r) and (columns, r) of what a change writes and reads; None for a whole difference."""
    if change.factors is None:
        return None
    found = svd_of_product(*change.factors)
    rank = int((found.values > _ROUNDING * found.values[:1]).sum())
    return found.left[:, :rank], found.right[:rank].T


def _compare_bases(
    first: tuple[Tensor, Tensor] | None, second: tuple[Tensor, Tensor] | None
) -> tuple[float | None, float | None]:
    """The mean squared cosine of the principal angles between the outputs of two changes, and between their inputs."""
    if first is None or second is None or not min(first[0].shape[1], second[0].shape[1]):
        return None, None
    outputs, inputs = (_overlap_share(one, other) for one, other in zip(first, second, strict=True))
    return outputs, inputs


def _overlap_share(basis: Tensor, other: Tensor) -> float:
    """The mean squared cosine of the principal angles of two orthonormal bases (n, r) and (n, s): their cosines are the
    singular values of basis.T @ other, so |basis.T @ other|^2 / min(r, s).
    """
    return min(1.0, float((basis.T @ other).square().sum()) / min(basis.shape[1], other.shape[1]))


# --- what to do about it ----------------------------------------------------------------------------------------------


class Fight(NamedTuple):
    """Two rows that overlap in a block: the weaker row there, and the factor for its block weight."""

    pair: Pair
    block: str
    overlap: Overlap
    weaker: int
    factor: float


def find_fights(conflicts: Conflicts, threshold: float) -> list[Fight]:
    """The blocks in which a pair's cosine is at least `threshold`, with either sign; the strongest first.

    The row that changes the block less gets it times 1 - |cosine|: the part that works against the other row, or
    repeats it, is about that large.
    """
    found = []
    for pair, overlaps in conflicts.by_block.items():
        for block, overlap in overlaps.items():
            if abs(overlap.cosine) < threshold:
                continue
            first, second = pair
            weaker = first if conflicts.energies[first][block] < conflicts.energies[second][block] else second
            factor = round(1.0 - abs(overlap.cosine), 2)
            found.append(Fight(pair, block, overlap, weaker, factor))
    return sorted(found, key=lambda fight: -round(abs(fight.overlap.cosine), 6))


def suggest_weights(conflicts: Conflicts, found: Sequence[Fight]) -> list[str]:
    """Block weights for each row: those that it has, times the factors of the fights in which it is the weaker one."""
    factors: list[dict[str, float]] = [{} for _ in conflicts.rows]
    for fight in found:
        factors[fight.weaker][fight.block] = factors[fight.weaker].get(fight.block, 1.0) * fight.factor
    return [row.block_weights(own) for row, own in zip(conflicts.rows, factors, strict=True)]


# --- what is shown ----------------------------------------------------------------------------------------------------


def report(conflicts: Conflicts, found: Sequence[Fight], threshold: float) -> str:
    """The pairs, where they fight, the layers that fight most, and the suggestion."""
    lines = ["Cosine of the changes: -1 they cancel, 0 independent, 1 the same. Shared outputs and inputs: 0% to 100%."]
    for (first, second), overlap in conflicts.whole.items():
        lines.append(f"{conflicts.name(first)} and {conflicts.name(second)}: {_words(overlap)}")
    if not found:
        lines.append(f"no pair reaches a cosine of {threshold:g} in any block: nothing to change")
        return "\n".join(lines)
    lines.append(f"Blocks with a cosine of {threshold:g} or more, the strongest first:")
    for fight in found[:_SHOWN]:
        first, second = fight.pair
        verb = "cancel" if fight.overlap.cosine < 0 else "repeat each other"
        lines.append(
            f"   {fight.block:<5} rows {first + 1} and {second + 1} {verb}: {_words(fight.overlap)};"
            f" row {fight.weaker + 1} times {fight.factor:g}"
        )
    if len(found) > _SHOWN:
        lines.append(f"   and {len(found) - _SHOWN} more")
    lines += _layer_lines(conflicts, threshold)
    for row, weights in enumerate(suggest_weights(conflicts, found)):
        if weights != conflicts.rows[row].entry.blocks:
            lines.append(f"block weights of {conflicts.name(row)}: {weights}")
    return "\n".join(lines)


def _layer_lines(conflicts: Conflicts, threshold: float) -> list[str]:
    """The layers that matter most among those that fight: the largest inner products."""
    layers = [layer for layer in conflicts.layers if abs(layer.overlap.cosine) >= threshold]
    if not layers:
        return []
    layers.sort(key=lambda layer: -abs(layer.inner))
    lines = ["Layers where that comes from, the largest part first:"]
    for layer in layers[:_SHOWN]:
        first, second = layer.pair
        lines.append(f"   {layer.weight}: rows {first + 1} and {second + 1}, {_words(layer.overlap)}")
    if len(layers) > _SHOWN:
        lines.append(f"   and {len(layers) - _SHOWN} more layers")
    return lines


def _words(overlap: Overlap) -> str:
    words = f"cosine {overlap.cosine:+.3f}"
    if overlap.outputs is None or overlap.inputs is None:
        return words
    return f"{words}, shared outputs {overlap.outputs:.1%}, shared inputs {overlap.inputs:.1%}"


def table(conflicts: Conflicts) -> CellTable:
    """The cosines as a table, a line for each pair and a column for each block."""
    lines = []
    for (first, second), overlaps in conflicts.by_block.items():
        values = []
        for block in conflicts.blocks:
            values.append(overlaps[block].cosine if block in overlaps else None)
        lines.append((f"{first + 1} and {second + 1}", values))
    names = [conflicts.name(row) for row in range(len(conflicts.rows))]
    return CellTable(names, conflicts.blocks, lines)


def panel(conflicts: Conflicts, found: Sequence[Fight]) -> dict[str, Any]:
    """The pairs and the suggestion as JSON for the editor's panel."""
    rows: list[dict[str, Any]] = []
    for row in conflicts.rows:
        rows.append({"file": row.entry.name, "strength": row.entry.strength_model, "before": row.entry.blocks})
    pairs = []
    for (first, second), overlaps in conflicts.by_block.items():
        cells = [[block, overlaps[block].cosine, overlaps[block].outputs, overlaps[block].inputs] for block in overlaps]
        whole = conflicts.whole[first, second]
        pairs.append({"rows": [first, second], "cosine": whole.cosine, "blocks": cells})
    return {
        "rows": rows,
        "blocks": conflicts.blocks,
        "pairs": pairs,
        "fights": len(found),
        "worst": [[list(fight.pair), fight.block, fight.overlap.cosine] for fight in found[:_SHOWN]],
        "after": suggest_weights(conflicts, found),
    }
