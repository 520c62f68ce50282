"""Safetensors files: opened without copying, pickles and damaged files refused, equal input written as equal bytes.

The format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .peft_config import BESIDE


def load_safetensors(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a safetensors file, memory-mapped; raises ValueError naming the file when it is anything else or damaged."""
    with open(path, "rb") as file:
        start = file.read(16)
    pickled = start.startswith((b"PK", b"\x80")) or path.lower().endswith((".pt", ".pth", ".ckpt", ".bin", ".pkl"))
    if pickled and start[8:9] != b"{":  # a safetensors header; the length before it may begin with any byte
        raise ValueError(
            f"{path} is a pickle, which can run any program when it is opened; Graft reads safetensors only. To convert a file that you "
            "trust: safetensors.torch.save_file(torch.load(path, weights_only=True), 'file.safetensors')"
        )
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            said = {**dict(file.metadata() or {}), **_beside(path)}
            return {key: file.get_tensor(key) for key in file.keys()}, said  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); it may be truncated: download or save it again") from error


def _beside(path: str) -> dict[str, str]:
    """PEFT's adapter_config.json beside its adapter_model.safetensors, as one more entry of the metadata."""
    config = os.path.join(os.path.dirname(path), "adapter_config.json")
    if os.path.basename(path) != "adapter_model.safetensors" or not os.path.isfile(config):
        return {}
    with open(config, encoding="utf-8") as file:
        return {BESIDE: file.read()}


def load_once(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """`load_safetensors`, remembered as long as the file's size and time of change stay the same; do not change what it returns."""
    found = os.stat(path)
    return _loaded(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=32)
def _loaded(path: str, size: int, changed: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    return load_safetensors(path)


_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes]:
    """A safetensors file in chunks: equal input gives equal bytes (names sorted, metadata too), whatever the order of the mappings."""
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # widest first keeps every tensor aligned
    offset = 0
    for name in order:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in order:
        yield tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_whole(path: str, chunks: Iterable[bytes]) -> None:
    """Write a file that appears complete or not at all: beside its place, fsync, then rename."""
    partial = f"{path}.partial"
    try:
        with open(partial, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.remove(partial)
        raise
