"""The key formats by name, and what is derived from their list.

To add a format, write its file and add its FORMAT to the list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from ...registry import Registry
from . import ai_toolkit, comfyui, diffsynth, diffusers, kohya, lycoris, onetrainer, peft, t_lora, xlabs
from .key_format import KeyFormat, KeySpelling

T = TypeVar("T")


def _shared_prefixes(key_format: KeyFormat) -> list[str]:
    taken = {*key_format.prefixes} & {*layer_prefixes()}
    return [f"prefix {prefix}" for prefix in sorted(taken)]


FORMATS: Registry[KeyFormat] = Registry(
    "key format",
    (
        kohya.FORMAT,
        peft.FORMAT,
        comfyui.FORMAT,
        diffusers.FORMAT,
        lycoris.FORMAT,
        onetrainer.FORMAT,
        ai_toolkit.FORMAT,
        xlabs.FORMAT,
        diffsynth.FORMAT,
        t_lora.FORMAT,
    ),
    duplicates=_shared_prefixes,
)


def writable_formats() -> dict[str, KeyFormat]:
    """The formats that Save LoRA writes, by name, the default first."""
    return {key_format.name: key_format for key_format in FORMATS if key_format.writer is not None}


# --- names of layers --------------------------------------------------------------------------------------------------


def strip_prefixes(name: str) -> str:
    """A layer's name without any format's prefix, with underscores for dots, and none of them at either end (a trainer
    of sd-scripts' early days left one at the end of every name).
    """
    while name.startswith(layer_prefixes()):
        prefix = next(prefix for prefix in layer_prefixes() if name.startswith(prefix))
        name = name[len(prefix) :]
    return name.replace(".", "_").strip("_")


@FORMATS.derived
def layer_prefixes() -> tuple[str, ...]:
    """The prefixes of the diffusion model's layer names, the longest first."""
    prefixes = [prefix for key_format in FORMATS for prefix in key_format.prefixes]
    return tuple(sorted(prefixes, key=len, reverse=True))


@FORMATS.derived
def text_encoder_prefixes() -> tuple[str, ...]:
    """The prefixes of text encoder layer names."""
    return tuple(prefix for key_format in FORMATS for prefix in key_format.text_encoder_prefixes)


def split_text_encoder(name: str) -> tuple[str, str] | None:
    """(number of the text encoder, "1" if the name has none; the rest of the name), or None for other names."""
    match = _text_encoder_pattern().fullmatch(name)
    if match is None:
        return None
    *numbers, rest = match.groups()
    return next(filter(None, numbers), "1"), rest


@FORMATS.derived
def _text_encoder_pattern() -> re.Pattern[str]:
    patterns = [key_format.text_encoder for key_format in FORMATS if key_format.text_encoder]
    return re.compile(rf"(?:{'|'.join(patterns)})[._](.+)")


# --- keys of whole files ----------------------------------------------------------------------------------------------


def generic_keys(state: Mapping[str, T]) -> Mapping[str, T]:
    """A LoRA under generic keys if its trainer spells whole keys in its own way (XLabs); else the same mapping."""
    for key_format in FORMATS:
        for spelling in key_format.spellings:
            if any(spelling.pattern.fullmatch(key) for key in state):
                return {_respell(key, spelling): value for key, value in state.items()}
    return state


def _respell(key: str, spelling: KeySpelling) -> str:
    match = spelling.pattern.fullmatch(key)
    if match is None:
        return key
    return spelling.rename(match)


class EmbeddingKey(NamedTuple):
    """What a key of a textual inversion says: its name (None if the file names none), and the text encoder ("clip_l")
    that it is for, "" if it does not say.
    """

    name: str | None
    encoder: str


def embedding_key(key: str) -> EmbeddingKey | None:
    """What a key of a LoRA file says of a textual inversion, or None if it belongs to none."""
    for pattern in _embedding_patterns():
        match = pattern.fullmatch(key)
        if match is not None:
            groups = match.groupdict("")
            return EmbeddingKey(groups.get("name"), groups["encoder"])
    return None


def embedding_name(key: str) -> str | None:
    """The name of the textual inversion that a key of a LoRA file belongs to, or None."""
    found = embedding_key(key)
    if found is None:
        return None
    if found.name is None:
        return found.encoder
    return found.name


@FORMATS.derived
def _embedding_patterns() -> list[re.Pattern[str]]:
    patterns = [key_format.embeddings for key_format in FORMATS if key_format.embeddings]
    return [re.compile(pattern, re.DOTALL) for pattern in patterns]


def embedding_names(keys: Iterable[str]) -> list[str]:
    """The names of the textual inversions in a LoRA file."""
    names = {embedding_name(key) for key in keys}
    return sorted(name for name in names if name is not None)
