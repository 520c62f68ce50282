"""How diffusers names the layers of a model that ComfyUI names otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

Table = Sequence[tuple[str, str]]  # (regular expression in ComfyUI's names, diffusers' name), applied one after another


class Part(NamedTuple):
    """Rows of a weight that are a layer of diffusers' own."""

    name: str
    start: int
    length: int


@dataclass(frozen=True)
class FusedQKV:
    """A weight that is Q, K and V in one, and diffusers' name of each ({} is q, k or v).

    `query_rows(rows, columns)` and `key_rows(rows, columns)` say how many rows each has; `rest` names what comes after
    V.
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
        return parts


def square_qkv(pattern: str, name: str, rest: str | None = None) -> FusedQKV:
    """Q, K and V with as many rows as columns each."""
    return FusedQKV(pattern, name, lambda rows, columns: columns, lambda rows, columns: columns, rest)


def equal_qkv(pattern: str, name: str) -> FusedQKV:
    """Q, K and V with a third of the rows each."""
    return FusedQKV(pattern, name, lambda rows, columns: rows // 3, lambda rows, columns: rows // 3)


def grouped_qkv(pattern: str, name: str) -> FusedQKV:
    """Grouped-query attention: Q has as many rows as columns, K and V share the others."""
    return FusedQKV(pattern, name, lambda rows, columns: columns, lambda rows, columns: (rows - columns) // 2)


@dataclass(frozen=True)
class SwappedHalves:
    """Layers that make scale and shift, which diffusers keeps in the other order; `rows_per_column` None takes any."""

    pattern: str
    rows_per_column: int | None = None


@dataclass(frozen=True)
class LayerNames:
    """diffusers' names of a family's layers.

    `prefix` goes in front of them in files. `rename(path)` is the name of a whole layer, `fused` are weights that
    diffusers has in parts. `model_sign` is the pattern of a weight by which a model is known whose layers are also
    looked for under diffusers' names when a LoRA is loaded; None: ComfyUI finds them itself. `t5` is the number of T5
    among diffusers' text encoders.
    """

    prefix: str
    rename: Callable[[str], str]
    fused: tuple[FusedQKV, ...] = ()
    swapped: tuple[SwappedHalves, ...] = ()
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


def by_table(table: Table) -> Callable[[str], str]:
    """A layer's name after all rows of a table."""

    def rename(path: str) -> str:
        for pattern, name in table:
            path = re.sub(pattern, name, path)
        return path

    return rename


def same_name(path: str) -> str:
    """diffusers' name of a layer that it calls what ComfyUI does."""
    return path


def swap_halves(change: Tensor) -> Tensor:
    """The two halves of a change, the other way round."""
    return change.roll(len(change) // 2, 0)


@dataclass(frozen=True)
class WeightPart:
    """The first rows of a weight that some files have a layer for.

    `pattern` fits the weight's path, `name` is the layer's. The part has `per_row` rows for each row of `sibling`, the
    weight beside it.
    """

    pattern: str
    name: str
    sibling: str
    per_row: int
