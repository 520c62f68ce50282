"""The key formats by name, and what is derived from their list.

To add a format, write its file and add its FORMAT to the list at the end.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from . import ai_toolkit, comfyui, diffsynth, diffusers, kohya, lycoris, onetrainer, peft, xlabs
from .key_format import KeyFormat, KeySpelling

T = TypeVar("T")
_FORMATS: dict[str, KeyFormat] = {}


def formats() -> tuple[KeyFormat, ...]:
    """Every registered format, in order."""
    return tuple(_FORMATS.values())


def writable() -> dict[str, KeyFormat]:
    """The formats that Save LoRA writes, by name, the default first."""
    return {key_format.name: key_format for key_format in formats() if key_format.writer is not None}


def register(key_format: KeyFormat) -> None:
    """Add a format; raises ValueError when its name or a prefix is taken."""
    if key_format.name in _FORMATS:
        raise ValueError(f"Key format {key_format.name} is already registered.")
    duplicates = {*key_format.prefixes} & {*layer_prefixes()}
    if duplicates:
        raise ValueError(f"Key format {key_format.name}: already registered: prefix {', '.join(sorted(duplicates))}.")
    _FORMATS[key_format.name] = key_format
    _forget_lists()


def unregister(name: str) -> None:
    """Remove a format from the list."""
    del _FORMATS[name]
    _forget_lists()


@contextmanager
def registered(key_format: KeyFormat) -> Iterator[None]:
    """Register a format within the block."""
    register(key_format)
    try:
        yield
    finally:
        unregister(key_format.name)


# --- names of layers --------------------------------------------------------------------------------------------------


def without_prefixes(name: str) -> str:
    """A layer's name without any format's prefix, with underscores for dots."""
    while name.startswith(layer_prefixes()):
        prefix = next(prefix for prefix in layer_prefixes() if name.startswith(prefix))
        name = name[len(prefix) :]
    return name.replace(".", "_").lstrip("_")


@functools.cache
def layer_prefixes() -> tuple[str, ...]:
    """The prefixes of the diffusion model's layer names, the longest first."""
    prefixes = [prefix for key_format in formats() for prefix in key_format.prefixes]
    return tuple(sorted(prefixes, key=len, reverse=True))


@functools.cache
def text_encoder_prefixes() -> tuple[str, ...]:
    """The prefixes of text encoder layer names."""
    return tuple(prefix for key_format in formats() for prefix in key_format.text_encoder_prefixes)


def split_text_encoder(name: str) -> tuple[str, str] | None:
    """(number of the text encoder, "1" if the name has none; the rest of the name), or None for other names."""
    match = _text_encoder_pattern().fullmatch(name)
    if match is None:
        return None
    *numbers, rest = match.groups()
    return next(filter(None, numbers), "1"), rest


@functools.cache
def _text_encoder_pattern() -> re.Pattern[str]:
    patterns = [key_format.text_encoder for key_format in formats() if key_format.text_encoder]
    return re.compile(rf"(?:{'|'.join(patterns)})[._](.+)")


# --- keys of whole files ----------------------------------------------------------------------------------------------


def generic_keys(state: Mapping[str, T]) -> Mapping[str, T]:
    """A LoRA under generic keys, if its trainer spells whole keys in its own way (XLabs); else the same mapping."""
    for key_format in formats():
        for spelling in key_format.spellings:
            if any(spelling.pattern.fullmatch(key) for key in state):
                return {_respell(key, spelling): value for key, value in state.items()}
    return state


def _respell(key: str, spelling: KeySpelling) -> str:
    match = spelling.pattern.fullmatch(key)
    if match is None:
        return key
    return spelling.rename(match)


def embedding_name(key: str) -> str | None:
    """The name of the textual inversion that a key of a LoRA file belongs to, or None."""
    match = _embedding_pattern().fullmatch(key)
    if match is None:
        return None
    return next(name for name in match.groups() if name is not None)


@functools.cache
def _embedding_pattern() -> re.Pattern[str]:
    patterns = [key_format.embeddings for key_format in formats() if key_format.embeddings]
    return re.compile("|".join(patterns), re.DOTALL)


def embedding_names(keys: Iterable[str]) -> list[str]:
    """The names of the textual inversions in a LoRA file."""
    names = {embedding_name(key) for key in keys}
    return sorted(name for name in names if name is not None)


def _forget_lists() -> None:
    for cached_list in (layer_prefixes, text_encoder_prefixes, _text_encoder_pattern, _embedding_pattern):
        cached_list.cache_clear()


for _module in (kohya, peft, comfyui, diffusers, lycoris, onetrainer, ai_toolkit, xlabs, diffsynth):
    register(_module.FORMAT)
