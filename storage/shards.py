"""Averages and other named tensors in shards of a chosen size: safetensors files and the index that transformers and
diffusers use.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


def plan(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Names in shards of at most `most` bytes, in order; a tensor that is larger has one of its own. 0 is one shard for
    all.
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


def save(
    tensors: Mapping[str, Tensor], folder: Path, name: str, most: int = 0, metadata: Mapping[str, str] | None = None
) -> list[Path]:
    """Write `<name>.safetensors`, or `<name>-00001-of-00003.safetensors` … and `<name>.safetensors.index.json`; the
    files written.

    Every file appears whole or not at all, the index last, so that an index in place means that its shards are. Raises
    OSError with nothing half-written left behind, and with what an earlier call wrote still there.
    """
    shards = plan({key: t.numel() * t.element_size() for key, t in tensors.items()}, most)
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    there = {path for path in folder.iterdir() if path.suffix != ".partial"}
    written: list[Path] = []
    try:
        for number, names in enumerate(shards, 1):
            if len(shards) == 1:
                file = f"{name}.safetensors"
            else:
                file = f"{name}-{number:05}-of-{len(shards):05}.safetensors"
            index |= dict.fromkeys(names, file)
            partial = folder / f"{file}.partial"
            written.append(partial)
            save_file(
                {key: tensors[key].detach().cpu().contiguous() for key in names}, str(partial), dict(metadata or {})
            )
            _appear(partial, folder / file)
            written[-1] = folder / file
        if len(shards) > 1:
            total = sum(t.numel() * t.element_size() for t in tensors.values())
            partial = folder / f"{name}.safetensors.index.json.partial"
            written.append(partial)
            partial.write_text(
                json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1), encoding="utf-8"
            )
            _appear(partial, folder / partial.stem)
            written[-1] = folder / partial.stem
    except BaseException as error:
        for path in set(written) - there:
            with contextlib.suppress(OSError):  # the first error counts
                path.unlink(missing_ok=True)
        if isinstance(error, SafetensorError):  # its own form of what the system says
            raise _of_the_system(error, written[-1]) from error
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror or str(error), str(written[-1])) from error
        raise
    return written


def load(folder: Path, name: str) -> dict[str, Tensor]:
    """What `save` wrote. Raises ValueError that names every missing file and every key that is missing
    or not listed.
    """
    index = folder / f"{name}.safetensors.index.json"
    listed: dict[str, str] | None = None
    files = [f"{name}.safetensors"]
    if index.is_file():
        listed = _listed(index)
        files = sorted(set(listed.values()))
    wrong = [f"{file}: leaves the folder" for file in files if os.path.basename(file) != file]
    wrong += [f"{file}: missing" for file in files if not wrong and not (folder / file).is_file()]
    out: dict[str, Tensor] = {}
    for file in files if not wrong else []:
        try:
            with safe_open(str(folder / file), framework="pt", device="cpu") as shard:
                out |= {key: shard.get_tensor(key) for key in shard.keys()}  # noqa: SIM118 (not a mapping)
        except SafetensorError as error:
            wrong.append(f"{file}: not a whole safetensors file ({error})")
    if listed is not None and not wrong:
        wrong += [f"{key}: listed in {listed[key]}, missing there" for key in sorted(listed.keys() - out.keys())]
        wrong += [f"{key}: not listed" for key in sorted(out.keys() - listed.keys())]
    if wrong:
        raise ValueError(f"The shards of {name} in {folder} cannot be used:\n" + "\n".join(f"- {one}" for one in wrong))
    return out


def _listed(index: Path) -> dict[str, str]:
    """Name of a tensor -> file, by an index; ValueError naming it when it is something else."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index}: cannot be read as JSON ({error})") from error
    if isinstance(content, dict):
        listed = content.get("weight_map")
    else:
        listed = None
    if not isinstance(listed, dict) or not all(map(_is_name, listed.values())):
        raise ValueError(f'{index}: expected {{"weight_map": {{tensor: file}}}}')
    return listed


def _is_name(file: object) -> bool:
    return isinstance(file, str) and 0 < len(file) <= 200 and "\0" not in file


def _of_the_system(error: SafetensorError, path: Path) -> OSError:
    """What safetensors says of a disk, as the system itself says it."""
    number = re.search(r"os error (\d+)", str(error))
    if number is None:
        return OSError(f"{path}: cannot be written ({error})")
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path))


def _appear(partial: Path, path: Path) -> None:
    with open(partial, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
