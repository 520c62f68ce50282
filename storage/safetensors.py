"""Safetensors files: opened without copying, pickles and damaged files refused, equal input written as equal bytes.

The format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..patches.lora_files.peft_config import BESIDE
from .disk_errors import naming


def load_safetensors(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a safetensors file, memory-mapped; raises ValueError naming the file when it is anything
    else or damaged.

    The library judges the file; the tensors are views of a mapping of our own, because safetensors (to 0.8.0) never
    frees the two numbers with which it cuts a tensor out of its mapping: tens of kilobytes a file, for as long as the
    process lives.
    """
    _refuse_pickle(path)
    try:
        with safe_open(path, framework="pt", device="cpu"):
            pass
    except SafetensorError as error:
        raise _damaged(path, str(error)) from error
    with open(path, "rb") as file:
        tensors, said = _header(path, file)
        size = os.fstat(file.fileno()).st_size
        try:
            memory = torch.from_file(
                path, shared=False, size=size, dtype=torch.uint8
            ).numpy()  # unlike mmap's it holds no file descriptor
        except RuntimeError as error:
            os.stat(path)  # raises where it is gone
            raise _damaged(path, f"it changed while it was read: {error}") from error
        if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):  # another file has taken its place since
            return load_safetensors(path)
    return {name: _mapped(path, memory, name, info) for name, info in tensors.items()}, {**said, **_beside(path)}


def _mapped(path: str, memory: np.ndarray, name: str, info: TensorInfo) -> Tensor:
    """One tensor of a mapped file; it keeps the mapping alive."""
    if info.kind not in _DTYPES:
        raise ValueError(
            f"{path}: {name} is of type {info.kind}, expected one of {', '.join(_DTYPES)}: save it again in one of them"
        )
    dtype = _DTYPES[info.kind]
    if not math.prod(info.shape):
        return torch.empty(info.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(info.shape), offset=info.start).view(info.shape)


_LONGEST_HEADER = 100_000_000  # bytes, as the format allows
_PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")


def _refuse_pickle(path: str) -> None:
    with open(path, "rb") as file:
        start = file.read(16)
    pickled = start.startswith((b"PK", b"\x80")) or path.lower().endswith(_PICKLES)
    if pickled and start[8:9] != b"{":  # a safetensors header; the length before it may begin with any byte
        raise ValueError(
            f"{path} is a pickle, which can run any program when it is opened; Graft reads safetensors only. To convert"
            " a file that you trust: safetensors.torch.save_file(torch.load(path, weights_only=True),"
            " 'file.safetensors')"
        )


def _damaged(path: str, why: str) -> ValueError:
    if not os.path.getsize(path):
        why = "it is empty"
    return ValueError(f"{path} is not a whole safetensors file ({why}); it may be truncated: download or save it again")


class TensorInfo(NamedTuple):
    """One tensor by a file's header: its type in safetensors' words, its shape, where its bytes begin and end in the
    file.
    """

    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


def header(path: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """(tensors by name, metadata) of a safetensors file without reading any tensor; raises ValueError as
    `load_safetensors` does.
    """
    _refuse_pickle(path)
    with open(path, "rb") as file:
        tensors, said = _header(path, file)
    return tensors, {**said, **_beside(path)}


def _header(path: str, file: BinaryIO) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
        raise _damaged(path, f"it has {size} bytes and a header of {length}")
    text = file.read(length)
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"it is {type(content).__name__}, expected an object")
        said = content.pop("__metadata__", None) or {}
        if not isinstance(said, dict) or not all(isinstance(value, str) for value in said.values()):
            raise ValueError("its metadata are not texts by name")
        tensors = {name: _info(name, of, 8 + length) for name, of in content.items()}
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header cannot be read: {error}") from error
    end = max((tensor.end for tensor in tensors.values()), default=8 + length)
    if end != size:
        raise _damaged(path, f"its header speaks of {end} bytes, it has {size}")
    return tensors, said


def _info(name: str, of: object, data: int) -> TensorInfo:
    """A tensor's entry in a header whose data begin at byte `data`; raises ValueError when it is no such entry."""
    if isinstance(of, dict):
        entry = of
    else:
        entry = {}
    kind, shape, offsets = entry.get("dtype"), _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if not isinstance(kind, str) or shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name[:80]!r} is no tensor: expected dtype, shape and two data_offsets, got {str(of)[:80]}")
    if kind in _DTYPES:
        need = math.prod(shape) * _DTYPES[kind].itemsize
    else:
        need = offsets[1] - offsets[0]
    if need != offsets[1] - offsets[0]:
        raise ValueError(f"{name[:80]!r} has {offsets[1] - offsets[0]} bytes, its type and shape need {need}")
    if math.prod(max(side, 1) for side in shape) >= 2**63:  # though it be empty: no tensor has such strides
        raise ValueError(f"{name[:80]!r} is too large for a tensor: its shape is {str(list(shape))[:80]}")
    return TensorInfo(kind, shape, data + offsets[0], data + offsets[1])


_DTYPES = {  # by safetensors' names
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def _counts(given: object) -> tuple[int, ...] | None:
    """A list of whole numbers from 0, None for anything else."""
    whole = isinstance(given, list) and all(type(count) is int and 0 <= count < 2**63 for count in given)
    return tuple(given) if whole else None  # type: ignore[arg-type]


def _settings(path: str) -> str | None:
    """The file of PEFT's settings beside its adapter_model.safetensors, None where there is none."""
    config = os.path.join(os.path.dirname(path), "adapter_config.json")
    if os.path.basename(path) == "adapter_model.safetensors" and os.path.isfile(config):
        return config
    return None


def _beside(path: str) -> dict[str, str]:
    """PEFT's settings beside a file, as one more entry of the metadata."""
    config = _settings(path)
    if config is None:
        return {}
    with open(config, encoding="utf-8") as file:
        try:
            return {BESIDE: file.read()}
        except UnicodeDecodeError as error:
            raise ValueError(f"{config} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def load_once(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """`load_safetensors`, remembered as long as the file's `version` stays the same; do not change what it returns."""
    return _loaded(path, version(path))


def version(path: str) -> tuple[tuple[int, int], ...]:
    """(size, time of change) of a file, and of PEFT's settings beside it: equal as long as nothing was written."""
    found = [os.stat(each) for each in (path, _settings(path)) if each is not None]
    return tuple((one.st_size, one.st_mtime_ns) for one in found)


@lru_cache(maxsize=128)  # mapped files: their bytes are the system's to keep or drop
def _loaded(path: str, version: tuple[tuple[int, int], ...]) -> tuple[dict[str, Tensor], dict[str, str]]:
    return load_safetensors(path)


_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes]:
    """A safetensors file in chunks: equal input gives equal bytes (names sorted, metadata too), whatever the order of
    the mappings.
    """
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    order = sorted(
        tensors, key=lambda name: (-tensors[name].element_size(), name)
    )  # widest first keeps every tensor aligned
    offset = 0
    for name in order:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in order:
        yield tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_whole(path: str, chunks: Iterable[bytes]) -> None:
    """Write a file that appears complete or not at all: beside its place, fsync, then rename. Raises OSError that names
    the file.
    """
    partial = f"{path}.partial"
    try:
        with naming(path):
            with open(partial, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(
            OSError
        ):  # the first error counts; what stays has no file's name and is written over next time
            os.remove(partial)
        raise


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make renames in a folder durable where the system can (Windows cannot open folders)."""
    if os.name == "nt":
        return
    with naming(os.fspath(folder)):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folders(folder: Path) -> list[Path]:
    """Create a folder and those above it, durably; the ones that were not there, outermost first. Raises OSError as
    `naming` says.
    """
    missing = []
    at = folder
    while not at.exists():
        missing.append(at)
        at = at.parent
    missing.reverse()
    for one in missing:
        with naming(str(one)):
            one.mkdir(exist_ok=True)
        sync_folder(one.parent)
    return missing
