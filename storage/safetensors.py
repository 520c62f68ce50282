"""Safetensors files: opened without copying, pickles and damaged files refused, equal input written as equal bytes.

The format: https://huggingface.co/docs/safetensors. The only file that uses the library.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .atomic import write_whole
from .digest import HashedChunks, tensor_bytes
from .regular_file import open_regular

_SMALL = 2**12  # bytes


def load_safetensors(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a safetensors file, memory-mapped; raises ValueError naming the file when it is anything
    else or damaged.

    The library judges the file; the tensors are views of a mapping of our own, because safetensors (to 0.8.0) never
    frees the two numbers with which it cuts a tensor out of its mapping: tens of kilobytes a file, for as long as the
    process lives.
    """
    _refuse_others(path)
    _refuse_too_many(path)
    try:
        with safe_open(path, framework="pt", device="cpu"):
            pass
    except SafetensorError as error:
        raise _damage_error(path, str(error)) from error
    except RuntimeError as error:  # of PyTorch, which maps the file
        raise _changed_error(path, error) from error
    with open_regular(path) as file:
        tensors, metadata = _read_entries(path, file)
        size = os.fstat(file.fileno()).st_size
        try:
            # unlike a mapping of Python's mmap it keeps no file open
            memory = torch.from_file(path, shared=False, size=size, dtype=torch.uint8).numpy()
        except RuntimeError as error:
            raise _changed_error(path, error) from error
        if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):  # the file was replaced meanwhile
            return load_safetensors(path)
    return {name: _mapped_tensor(path, memory, name, info) for name, info in tensors.items()}, metadata


def _changed_error(path: str, error: RuntimeError) -> ValueError:
    """The error of a file that PyTorch could not map. Raises FileNotFoundError when the file is gone."""
    os.stat(path)
    return _damage_error(path, f"it changed while it was read: {error}")


def _mapped_tensor(path: str, memory: np.ndarray, name: str, info: TensorInfo) -> Tensor:
    """One tensor of a mapped file; it keeps the mapping alive."""
    dtype = _dtype(path, name, info)
    if not math.prod(info.shape):
        return torch.empty(info.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(info.shape), offset=info.start).view(info.shape)


def _dtype(path: str, name: str, info: TensorInfo) -> torch.dtype:
    if info.kind not in _DTYPES:
        raise ValueError(
            f"{path}: {name} is of type {info.kind}, expected one of {', '.join(_DTYPES)}: save it again in one of them"
        )
    return _DTYPES[info.kind]


def load_shapes(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """As `load_safetensors`, and only small tensors are read: they may say how others are quantized. The others are on
    the meta device. It maps nothing, so the file may be larger than memory.
    """
    header, metadata = read_header(path)
    with open_regular(path) as file:
        return {name: _read_small_tensor(path, file, name, info) for name, info in header.items()}, metadata


def _read_small_tensor(path: str, file: BinaryIO, name: str, info: TensorInfo) -> Tensor:
    if info.end - info.start > _SMALL:
        return torch.empty(info.shape, dtype=_dtype(path, name, info), device="meta")
    file.seek(info.start)
    content = bytearray(file.read(info.end - info.start))
    return _mapped_tensor(path, np.frombuffer(content, np.uint8), name, info._replace(start=0))


def tensors_from_bytes(content: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file that is in memory."""
    from safetensors.torch import load

    return load(content)


_LONGEST_HEADER = 100_000_000  # bytes, as the format allows
MOST_TENSORS = 100_000  # in a file; the largest models have a few thousand
_PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")


class PickledFile(ValueError):
    """A file that is a pickle, which Graft never opens."""


_LOOKED_AT = 1024  # bytes at the beginning, which tell a page or an answer of a server from a file
_LFS_POINTERS = ("version https://git-lfs.github.com/", "version https://hawser.github.com/")


def _refuse_others(path: str) -> None:
    """Raises ValueError for what is often found in a safetensors file's place: what a server answers in place of the
    file, a pointer to it, a pickle.
    """
    with open_regular(path) as file:
        start = file.read(_LOOKED_AT)
    if int.from_bytes(start[:8], "little") > _LONGEST_HEADER:  # text: no header is that long
        what = _kind_of_text(start.decode("utf-8-sig", "replace").strip())
        if what:
            raise ValueError(f"{path} is not a safetensors file: it is {what}")
    _refuse_pickle(path, start)


def _kind_of_text(text: str) -> str:
    """What a text is that a download left in a file's place, and what to do; "" for any other content."""
    line = " ".join(text.split())[:120]
    if text.startswith(_LFS_POINTERS):
        return (
            "a Git LFS pointer, which stands for the file in a repository; run git lfs pull, or download the file"
            " itself"
        )
    if text.lower().startswith(("<!doctype", "<html", "<head", "<?xml", "<!--")):
        return (
            f"a web page ({line!r}), which a site sends in place of a file to those who are not logged in, or where a"
            " link leads to a page; log in or use the link of the file itself, and download it again"
        )
    if text.startswith(("{", "[")):
        return (
            f"JSON ({line!r}), as a site's answer to a download that it refuses; if it names an error, mend that (a"
            " token, a license to accept), and download the file again"
        )
    return ""


def _refuse_pickle(path: str, start: bytes) -> None:
    pickled = start.startswith((b"PK", b"\x80")) or path.lower().endswith(_PICKLES)
    if pickled and start[8:9] != b"{":  # a safetensors header; the length before it may begin with any byte
        raise PickledFile(
            f"{path} is a pickle, which can run any program when it is opened; Graft reads safetensors only. To convert"
            " a file that you trust: safetensors.torch.save_file(torch.load(path, weights_only=True),"
            " 'file.safetensors')"
        )


def _refuse_too_many(path: str) -> None:
    """Raises ValueError for a header that names more tensors than any model has, before it is parsed."""
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            return  # refused for its length
        count = file.read(length).count(b'"data_offsets"')
    if count > MOST_TENSORS:
        raise ValueError(
            f"{path} names {count:,} tensors, more than the {MOST_TENSORS:,} that Graft reads from one file; it is no"
            " LoRA, model or training state"
        )


def _damage_error(path: str, why: str) -> ValueError:
    if not os.path.getsize(path):
        why = "it is empty"
    return ValueError(f"{path} is not a whole safetensors file ({why}); it may be truncated: download or save it again")


class TensorInfo(NamedTuple):
    """A tensor's entry in a file's header: its type (safetensors' name), its shape, and where its bytes begin and end
    in the file.
    """

    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


class LongHeader(ValueError):
    """A file whose header is longer than its reader takes."""


def read_header(path: str, longest: int = _LONGEST_HEADER) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """(header entry of each tensor, metadata) of a safetensors file. Reads no tensors. Raises ValueError as
    `load_safetensors` does, LongHeader for a header of more than `longest` bytes, before it is parsed.
    """
    _refuse_others(path)
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
    if longest < length <= _LONGEST_HEADER:
        raise LongHeader(f"{path} has a header of {length:,} bytes, more than the {longest:,} that are read to show it")
    _refuse_too_many(path)
    with open_regular(path) as file:
        return _read_entries(path, file)


def _read_entries(path: str, file: BinaryIO) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
        raise _damage_error(path, f"it has {size} bytes and a header of {length}")
    text = file.read(length)
    tensors: dict[str, TensorInfo] = {}
    end = 8 + length
    try:
        entries, metadata = _parse_header(text)
        for name, entry in entries.items():
            tensors[name] = _parse_entry(name, entry, 8 + length)
            end = max(end, tensors[name].end)
    except (ValueError, RecursionError) as error:
        raise _damage_error(path, f"its header cannot be read: {error}") from error
    if end != size:
        raise _damage_error(path, f"its header speaks of {end} bytes, it has {size}")
    return tensors, metadata


def _parse_header(text: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """(entries of the tensors, metadata) of a header's JSON; raises ValueError when it is not such a header."""
    entries = json.loads(text)
    if not isinstance(entries, dict):
        raise ValueError(f"it is {type(entries).__name__}, expected an object")
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are not texts by name")
    return entries, metadata


def _parse_entry(name: str, entry: object, data: int) -> TensorInfo:
    """A tensor's entry in a header whose data begin at byte `data`; raises ValueError when it is not such a entry."""
    fields = entry if isinstance(entry, dict) else {}
    kind, shape, offsets = (
        fields.get("dtype"),
        _parse_counts(fields.get("shape")),
        _parse_counts(fields.get("data_offsets")),
    )
    if not isinstance(kind, str) or shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(
            f"{name[:80]!r} is not a tensor: expected dtype, shape and two data_offsets, got {str(entry)[:80]}"
        )
    size = offsets[1] - offsets[0]
    if kind in _DTYPES and size != math.prod(shape) * _DTYPES[kind].itemsize:
        need = math.prod(shape) * _DTYPES[kind].itemsize
        raise ValueError(f"{name[:80]!r} has {size} bytes, its type and shape need {need}")
    if math.prod(max(side, 1) for side in shape) >= 2**63:  # even if it is empty: no tensor has such strides
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


def _parse_counts(value: object) -> tuple[int, ...] | None:
    """A list of whole numbers from 0, None for anything else."""
    if not isinstance(value, list):
        return None
    for count in value:
        if type(count) is not int or not 0 <= count < 2**63:
            return None
    return tuple(value)


_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[bytes]:
    """A safetensors file in chunks: equal input gives equal bytes (names sorted, metadata too), whatever the order of
    the mappings. Without metadata (None) the header has no entry for them.
    """
    header: dict[str, object] = {}
    if metadata is not None:
        header["__metadata__"] = dict(sorted(metadata.items()))
    # widest first keeps every tensor aligned
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
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
        yield bytes(tensor_bytes(tensors[name]))


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    shared: bool = False,
) -> str:
    """Write a safetensors file that appears complete or not at all (see `write_whole`); returns its sha256."""
    chunks = HashedChunks(safetensors_bytes(tensors, metadata))
    write_whole(path, chunks, shared)
    return chunks.hexdigest
