"""Opens a LoRA file, with PEFT's adapter_config.json if it lies beside it and all shards if it is one of several, and
caches unchanged files.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor

from ...storage import shards
from ...storage.bounded_read import MB, read_bounded
from ...storage.safetensors import TensorInfo, load_safetensors, read_header
from .peft_config import BESIDE

_MOST_SETTINGS = 16 * MB  # of an adapter_config.json
_MOST_FILES = 128  # that are kept open: they are mapped, so the system keeps or drops their bytes
_opened: OrderedDict[str, tuple[tuple[tuple[int, int], ...], tuple[dict[str, Tensor], dict[str, str]]]] = OrderedDict()
_lock = threading.Lock()


def load(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Open a LoRA file, memory-mapped. PEFT's settings beside it become another metadata entry.

    Args:
        path: a safetensors file; one of several shards stands for them all.

    Returns:
        (tensors, metadata).

    Raises:
        ValueError: naming the file where it is damaged or in another format.
    """
    tensors, metadata = load_safetensors(path)
    whole = shards.whole_of(path)
    if whole is not None:
        tensors = shards.load_shards(*whole)
    return tensors, {**metadata, **_peft_settings(path)}


def load_once(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """`load`, kept as long as the file's `file_version` stays the same. The files used last are kept; one that has
    changed takes the place of what it was.

    Args:
        path: a safetensors file.

    Returns:
        (tensors, metadata), which must not be changed.
    """
    current = file_version(path)
    with _lock:
        kept = _opened.get(path)
        if kept is not None and kept[0] == current:
            _opened.move_to_end(path)
            return kept[1]
    with torch.inference_mode(False):  # as tensors that count their changes, so that they are checked once
        contents = load(path)
    with _lock:
        _opened[path] = current, contents
        _opened.move_to_end(path)
        if len(_opened) > _MOST_FILES:
            _opened.popitem(last=False)
    return contents


MOST_HEADER = 16 << 20  # bytes; parsing holds up everything else in the process


def read_lora_header(path: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """`load` without reading any tensor: the header's description of each. Raises LongHeader for one of more than
    16 MB, which no LoRA has.
    """
    tensors, metadata = read_header(path, MOST_HEADER)
    for other in _files(path)[1:]:
        tensors |= read_header(other, MOST_HEADER)[0]
    return tensors, {**metadata, **_peft_settings(path)}


def file_version(path: str) -> tuple[tuple[int, int], ...]:
    """(size, modification time) of a file, of its other shards and of PEFT's settings beside it, which change when any
    of them is written.
    """
    paths = _files(path)
    config = _peft_config_path(path)
    if config is not None:
        paths.append(config)
    versions = []
    for written in paths:
        status = os.stat(written)
        versions.append((status.st_size, status.st_mtime_ns))
    return tuple(versions)


def _files(path: str) -> list[str]:
    """The file, and the other shards and their index if it is one of several."""
    whole = shards.whole_of(path)
    if whole is None:
        return [path]
    return [path, *(str(file) for file in shards.files_of(*whole) if file != Path(path))]


def _peft_config_path(path: str) -> str | None:
    """The adapter_config.json next to PEFT's adapter_model.safetensors, None if there is none."""
    config = os.path.join(os.path.dirname(path), "adapter_config.json")
    if os.path.basename(path) == "adapter_model.safetensors" and os.path.isfile(config):
        return config
    return None


def _peft_settings(path: str) -> dict[str, str]:
    config = _peft_config_path(path)
    if config is None:
        return {}
    try:
        return {BESIDE: read_bounded(config, _MOST_SETTINGS).decode("utf-8")}
    except UnicodeDecodeError as error:
        raise ValueError(f"{config} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except ValueError as error:
        raise ValueError(f"{config}: {error}") from error
