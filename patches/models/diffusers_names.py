"""diffusers' names for the layers of a model that ComfyUI names differently."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

Table = Sequence[tuple[str, str]]  # (regular expression in ComfyUI's names, diffusers' name), applied one after another


class Part(NamedTuple):
    """Rows of a weight that form a separate layer in diffusers."""

    name: str
    start: int
    length: int


@dataclass(frozen=True)
class FusedQKV:
    """A weight that fuses Q, K and V, and diffusers' name for each ({} is q, k or v).

    `query_rows(rows, columns)` and `key_rows(rows, columns)` return the rows of each; without rows for Q the weight
    fuses K and V alone. `rest` names the part after V.
    """

    pattern: str
    name: str
    query_rows: Callable[[int, int], int]
    key_rows: Callable[[int, int], int]
    rest: str | None = None

    def parts(self, path: str, rows: int, columns: int) -> list[Part]:
        """Q, K, V and the rest of a weight that the pattern fits."""
        query, key = self.query_rows(rows, columns), self.key_rows(rows, columns)
        name = re.sub(self.pattern, self.name, path)
        parts = [
            Part(name.format("q"), 0, query),
            Part(name.format("k"), query, key),
            Part(name.format("v"), query + key, key),
        ]
        if self.rest is not None:
            end = query + 2 * key
            parts.append(Part(re.sub(self.pattern, self.rest, path), end, rows - end))
        return [part for part in parts if part.length]


def square_qkv(pattern: str, name: str, rest: str | None = None) -> FusedQKV:
    """Q, K and V, each with as many rows as columns."""
    return FusedQKV(pattern, name, lambda rows, columns: columns, lambda rows, columns: columns, rest)


def equal_qkv(pattern: str, name: str) -> FusedQKV:
    """Q, K and V, each with a third of the rows."""
    return FusedQKV(pattern, name, lambda rows, columns: rows // 3, lambda rows, columns: rows // 3)


def equal_kv(pattern: str, name: str) -> FusedQKV:
    """K and V alone, each with half of the rows."""
    return FusedQKV(pattern, name, lambda rows, columns: 0, lambda rows, columns: rows // 2)


def grouped_qkv(pattern: str, name: str) -> FusedQKV:
    """Grouped-query attention: Q has as many rows as columns, K and V share the remaining rows."""
    return FusedQKV(pattern, name, lambda rows, columns: columns, lambda rows, columns: (rows - columns) // 2)


@dataclass(frozen=True)
class SwappedHalves:
    """Layers that produce scale and shift, which diffusers stores in reverse order; `rows_per_column`
    None matches any.
    """

    pattern: str
    rows_per_column: int | None = None


@dataclass(frozen=True)
class JoinedLayer:
    """A layer of diffusers that ComfyUI has in two weights: the rows of `pattern`'s first, then those of `rest`."""

    pattern: str
    rest: str
    name: str


def same_name(path: str) -> str:
    """diffusers' name for a layer that has the same name in ComfyUI."""
    return path


@dataclass(frozen=True)
class LayerNames:
    """diffusers' names for a family's layers.

    `prefix` precedes them in files. `rename(path)` is the name of a whole layer, `fused` are weights that diffusers
    splits into parts, `joined` layers that it has in one. `model_sign` is a weight pattern that identifies a model
    whose layers are also looked up under diffusers' names when a LoRA is loaded; None: ComfyUI finds them itself. `t5`
    is the number of T5 among diffusers' text encoders.
    """

    prefix: str = "transformer."
    rename: Callable[[str], str] = same_name
    fused: tuple[FusedQKV, ...] = ()
    swapped: tuple[SwappedHalves, ...] = ()
    joined: tuple[JoinedLayer, ...] = ()
    model_sign: str | None = None
    t5: str = "2"

    def parts(self, path: str, rows: int, columns: int) -> list[Part]:
        """A layer of (rows, columns) under diffusers' names: one, or the parts of a fused weight."""
        for fused in self.fused:
            if re.match(fused.pattern, path):
                return fused.parts(path, rows, columns)
        return [Part(self.rename(path), 0, rows)]

    def swaps_halves(self, path: str, rows: int, columns: int) -> bool:
        """Whether the two halves of a layer's rows are the other way round in diffusers."""
        for swapped in self.swapped:
            times = swapped.rows_per_column
            if re.search(swapped.pattern, path) and (times is None or rows == times * columns):
                return True
        return False


def rename_by_table(table: Table) -> Callable[[str], str]:
    """A layer's name after applying every row of a table."""

    def rename(path: str) -> str:
        for pattern, name in table:
            path = re.sub(pattern, name, path)
        return path

    return rename


def swap_halves(change: Tensor) -> Tensor:
    """A change with its two halves swapped."""
    return change.roll(len(change) // 2, 0)


@dataclass(frozen=True)
class WeightPart:
    """The first rows of a weight for which some files have a layer.

    `pattern` matches the weight's path, `name` is the layer's. The part has `per_row` rows for each row of `sibling`,
    the weight next to it.
    """

    pattern: str
    name: str
    sibling: str
    per_row: int
