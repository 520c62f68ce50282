"""Snapshots that all ranks write together: a file per rank, and a state.json by the first rank that lists them.

The file of a rank has its rows of every tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...storage.atomic import sync_folder
from ...storage.safetensors import load_safetensors, write_safetensors

DIVIDED = "graft_divided"  # metadata: the tensors of which the file has rows


def write(
    folder: Path, step: int, rank: int, ranks: int, tensors: Mapping[str, Tensor], divided: list[str]
) -> tuple[str, str]:
    """Write a rank's file to disk; returns its name and sha256.

    `divided` are the tensors of which it has rows. Raises OSError.
    """
    name = f"state-{step:08d}-{rank + 1:05}-of-{ranks:05}.safetensors"
    sha256 = write_safetensors(folder / name, tensors, {DIVIDED: json.dumps(divided)})
    sync_folder(folder)
    return name, sha256


def read(paths: list[Path]) -> dict[str, Tensor]:
    """Put the whole tensors together from files of `write`, in the order of the ranks.

    Raises ValueError naming a damaged file.
    """
    rows: dict[str, list[Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for path in paths:
        tensors, metadata = load_safetensors(str(path))
        try:
            divided: Any = json.loads(metadata.get(DIVIDED, "null"))
        except (ValueError, RecursionError):
            divided = None
        if not isinstance(divided, list):
            raise ValueError(f"{path}: it does not say which of its tensors are rows of others")
        for name, tensor in tensors.items():
            if name in divided:
                rows.setdefault(name, []).append(tensor)
            else:
                whole.setdefault(name, tensor)
    mismatched = sorted(
        name
        for name, parts in rows.items()
        if any(not part.ndim or part[:0].shape != parts[0][:0].shape for part in parts)
    )
    if mismatched:
        raise ValueError(f"{paths[0].parent}: the rows of {', '.join(mismatched[:5])} do not fit together")
    return {**whole, **{name: torch.cat(parts) for name, parts in rows.items()}}
