"""LoRA files that are to be added to a folder: which names they may have, and whether they are LoRA files at all."""

from __future__ import annotations

import re

from . import open_file, parse
from .key_formats import registry as key_formats

EXTENSION = ".safetensors"
_LONGEST = 240  # bytes of a name; file systems end at 255
_REFUSED = re.compile(r'[\\/:*?"<>|\x00-\x1f\x7f]')  # by one system or another
_DEVICES = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")  # Windows opens these, whatever the folder


def check_name(name: str) -> None:
    """Raises ValueError that says what is wrong with the name of a file that is to be added."""
    if not name.lower().endswith(EXTENSION):
        raise ValueError(
            f"{name[:100]!r} is not a safetensors file: Graft reads LoRAs as {EXTENSION} only. Convert it first if you"
            " trust it"
        )
    bad = sorted(set(_REFUSED.findall(name)))
    if bad or name.startswith(".") or _DEVICES.fullmatch(name):
        raise ValueError(f"{name[:100]!r} cannot be the name of a file on every system: rename it")
    if len(name.encode("utf-8", "surrogatepass")) > _LONGEST:
        raise ValueError(f"{name[:60]!r} … is too long for a file name: rename it")


def check_lora(path: str, name: str) -> None:
    """Raises ValueError that says why a file is not a LoRA file; its header is read, its tensors are not."""
    try:
        tensors, _ = open_file.read_lora_header(path)
    except ValueError as error:
        raise ValueError(str(error).replace(path, name)) from error
    shapes = key_formats.generic_keys({key: tensor.shape for key, tensor in tensors.items()})
    layers = set(parse.layer_names(shapes))
    if not layers and not any(map(_is_bundled_embedding, tensors)):
        raise ValueError(
            f"{name} is not a LoRA: none of its {len(tensors)} tensors is named as a LoRA's. A checkpoint belongs into"
            " another folder"
        )


def _is_bundled_embedding(key: str) -> bool:
    """Whether a key names an embedding as trainers bundle them with LoRAs; those of a file of its own have no name."""
    found = key_formats.embedding_key(key)
    return found is not None and bool(found.name)
