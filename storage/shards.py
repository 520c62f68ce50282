"""Named tensors in several safetensors files of a chosen size, with the index file that transformers and diffusers
use.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .atomic import DRAFT, write_whole
from .bounded_read import MB, read_bounded
from .problem_list import problem_lines
from .safetensors import load_safetensors, write_safetensors

_MOST_INDEX = 64 * MB  # of an index file
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.safetensors")


def plan_shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Splits names into shards of at most `most` bytes, in order; a larger tensor has a shard of its own. 0 is one
    shard for all.
    """
    if most < 0:
        raise ValueError(f"Shards: the largest size is {most} bytes, expected 0 (one file) or more.")
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if most and shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def save_shards(
    tensors: Mapping[str, Tensor], folder: Path, name: str, most: int = 0, metadata: Mapping[str, str] | None = None
) -> list[Path]:
    """Write `<name>.safetensors`, or `<name>-00001-of-00003.safetensors` … and `<name>.safetensors.index.json`; returns
    the files.

    Every file appears complete or not at all, the index last: when there is an index, its shards are there. Raises
    OSError that names the file; then the new files are removed, and what an earlier call wrote is still there.
    """
    sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in tensors.items()}
    shards = plan_shards(sizes, most)
    folder.mkdir(parents=True, exist_ok=True)
    old_files = {path for path in folder.iterdir() if path.suffix != DRAFT}
    weight_map: dict[str, str] = {}
    new_files: list[Path] = []
    try:
        for number, keys in enumerate(shards, 1):
            file = f"{name}.safetensors"
            if len(shards) > 1:
                file = f"{name}-{number:05}-of-{len(shards):05}.safetensors"
            weight_map |= dict.fromkeys(keys, file)
            write_safetensors(folder / file, {key: tensors[key] for key in keys}, metadata or {})
            new_files.append(folder / file)
        if len(shards) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            path = _index_path(folder, name)
            write_whole(path, [json.dumps(index, indent=1).encode()])
            new_files.append(path)
    except BaseException:
        for path in new_files:
            if path not in old_files:
                with contextlib.suppress(OSError):  # the first error counts
                    path.unlink(missing_ok=True)
        raise
    return new_files


def whole_of(path: str | os.PathLike[str]) -> tuple[Path, str] | None:
    """(folder, name) of what a file is a shard of, where the index lies beside it; None of a file that is whole."""
    found = _SHARD.fullmatch(os.path.basename(path))
    folder = Path(path).parent
    if found is None or not _index_path(folder, found[1]).is_file():
        return None
    return folder, found[1]


def files_of(folder: Path, name: str) -> list[Path]:
    """The shards that are there, as the index lists them. Raises ValueError as `load_shards` does."""
    listed = sorted(set(_read_index(_index_path(folder, name)).values()))
    return [folder / file for file in listed if os.path.basename(file) == file and (folder / file).is_file()]


def load_shards(folder: Path, name: str) -> dict[str, Tensor]:
    """Loads what `save` wrote, memory-mapped. Raises ValueError that names every missing or damaged file, every key
    that is missing and every one that the index does not list.
    """
    weight_map = None
    files = [f"{name}.safetensors"]
    if _index_path(folder, name).is_file():
        weight_map = _read_index(_index_path(folder, name))
        files = sorted(set(weight_map.values()))
    problems = _unusable_files(folder, files)
    tensors: dict[str, Tensor] = {}
    if not problems:
        for file in files:
            try:
                tensors |= load_safetensors(str(folder / file))[0]
            except ValueError as error:
                problems.append(str(error))
    if weight_map is not None and not problems:
        for key in sorted(weight_map.keys() - tensors.keys()):
            problems.append(f"{key}: listed in {weight_map[key]}, missing there")
        for key in sorted(tensors.keys() - weight_map.keys()):
            problems.append(f"{key}: not listed")
    if problems:
        raise ValueError(f"The shards of {name} in {folder} cannot be used:\n" + problem_lines(problems))
    return tensors


def _index_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors.index.json"


def _unusable_files(folder: Path, files: list[str]) -> list[str]:
    problems = [f"{file}: leaves the folder" for file in files if os.path.basename(file) != file]
    if problems:
        return problems
    return [f"{file}: missing" for file in files if not (folder / file).is_file()]


def _read_index(path: Path) -> dict[str, str]:
    """An index's file for each tensor's name; raises ValueError that names the index when it is something else."""
    try:
        index: Any = json.loads(read_bounded(path, _MOST_INDEX))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())):
        raise ValueError(f'{path}: expected {{"weight_map": {{tensor: file}}}}')
    return weight_map


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 200 and "\0" not in value
