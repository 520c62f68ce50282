"""The rows of a LoRA stack as they are measured: each LoRA's patches of the model by block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from ..lora_files import block_weights
from ..lora_files.entry import LoraEntry, StateDict
from ..lora_files.read_stack import ModelWeights, patches_by_weight, read_files
from ..models.block_names import TEXT
from ..patching.fuse import Patch


class RowPatches(NamedTuple):
    """One LoRA of a stack.

    - `blocks`: its patches of the model by block and weight, in the model's order. Those of strength 0 are left out.
    - `file_blocks`: every block of the model that the file has layers in, also those of strength 0.
    - `text_layers`: how many layers it has for text encoders.
    """

    entry: LoraEntry
    blocks: dict[str, dict[str, list[Patch]]]
    file_blocks: tuple[str, ...]
    text_layers: int

    def patches_in(self, blocks: Collection[str]) -> dict[str, list[Patch]]:
        """The patches of some blocks by weight."""
        patches: dict[str, list[Patch]] = {}
        for block in blocks:
            patches.update(self.blocks[block])
        return patches

    def block_weights(self, factors: Mapping[str, float]) -> str:
        """This row's block weights with some blocks multiplied; the others and the text encoders stay as they are."""
        if all(factor == 1.0 for factor in factors.values()):
            return self.entry.blocks
        before = self.entry.block_strengths()
        pairs = []
        for block in self.file_blocks:
            pairs.append((block, block_weights.strength_of_block(before, block) * factors.get(block, 1.0)))
        if self.text_layers:
            pairs += [(block, block_weights.strength_of_block(before, block)) for block in TEXT]
        return block_weights.format_weights(pairs)


def blocks_of(weights: ModelWeights) -> list[str]:
    """The blocks of a model, in the order of its weights."""
    names = (weight for space, weight in weights.shapes if space == "model")
    return list(dict.fromkeys(map(block_weights.block_of, names)))


def read_rows(
    entries: Sequence[LoraEntry], weights: ModelWeights, convert: Callable[[StateDict], StateDict]
) -> list[RowPatches]:
    """The patches of every entry by block. `convert` turns a file's keys into generic names.

    Raises ValueError that lists every entry that cannot be used.
    """
    reading = read_files(entries, weights, convert)
    reading.problems += [
        f"{lora.name} enlarges weights of the model, which cannot be done block by block: take its row out"
        for lora in reading.enlarging
    ]
    reading.raise_problems()
    order = blocks_of(weights)
    rows = []
    for entry, lora in reading.loras:
        found: dict[str, dict[str, list[Patch]]] = {}
        for weight, patches in patches_by_weight([(entry, lora)], "model", weights.shapes).items():
            found.setdefault(block_weights.block_of(weight), {})[weight] = patches
        in_file = {block_weights.block_of(target.weight) for target in lora.layers if target.model == "model"}
        blocks = {block: found[block] for block in order if block in found}
        file_blocks = tuple(block for block in order if block in in_file)
        rows.append(RowPatches(entry, blocks, file_blocks, len(lora.text_encoder)))
    return rows
