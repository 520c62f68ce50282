"""Hashes: the sha256 of bytes, JSON values, tensors and files. Run keys, fingerprints and stored files depend on every
one of them: their values never change.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, BinaryIO

from .regular_file import open_regular

if TYPE_CHECKING:  # hashes of files and JSON need no torch, which takes seconds to import
    from torch import Tensor

_CHUNK = 1 << 20  # bytes of a file that are read at a time

sha256 = hashlib.sha256  # a running hash: `update` it with bytes, then read `hexdigest()`


def sha256_of_json(value: Any) -> str:
    """sha256 of a value's canonical JSON: sorted keys, no spaces."""
    return sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sha256_of_spaced_json(value: Any) -> str:
    """sha256 of a value's JSON with sorted keys and a space behind every comma and colon, as datasets, caches and
    models have been named from the beginning.
    """
    return sha256(spaced_json(value).encode()).hexdigest()


def spaced_json(value: Any) -> str:
    """The JSON that `sha256_of_spaced_json` hashes."""
    return json.dumps(value, sort_keys=True)


def sha256_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of the names, dtypes, shapes and bytes of tensors, in the order of their names."""
    digest = sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        if tensor.numel():
            digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, from host memory."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def sha256_of_file(path: str | os.PathLike[str]) -> str:
    """sha256 of a file's bytes."""
    with open_regular(path) as file:
        return sha256_of_open_file(file)


def sha256_of_open_file(file: BinaryIO) -> str:
    """sha256 of an open file, from its beginning."""
    file.seek(0)
    digest = sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


class HashedChunks:
    """Chunks of bytes that pass through unchanged; afterwards `hexdigest` is the sha256 of all of them."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = chunks
        self._digest = sha256()

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self._digest.update(chunk)
            yield chunk

    @property
    def hexdigest(self) -> str:
        """sha256 of the chunks so far."""
        return self._digest.hexdigest()


def settings_to_hash(settings: Any, never: Collection[str] = ()) -> dict[str, Any]:
    """What is hashed of a settings dataclass: its settings by name, as plain values, without those of `never`."""
    return {one.name: getattr(settings, one.name) for one in fields(settings) if one.name not in never}
