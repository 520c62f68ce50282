"""What lies beside a LoRA file, or in its header, for people to look at: a preview picture and trigger words.

Pictures: `name.png`, `name.preview.png` (also jpg, jpeg and webp), else the safetensors' own thumbnail. Trigger words:
sd-webui's `name.json` ("activation text") and Civitai Helper's `name.civitai.info` ("trainedWords").
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import os
from collections.abc import Mapping
from typing import Any

from ...storage.bounded_read import MB, read_bounded
from ...storage.pictures import open_picture, picture_errors, shrink
from . import open_file

_PICTURES = tuple(f"{middle}.{kind}" for kind in ("png", "jpg", "jpeg", "webp") for middle in ("", ".preview"))
_MOST_PICTURE = 64 * MB
_MOST_NOTES = 4 * MB
_MOST_WORDS = 100
_SIDE = 256  # pixels of a preview's longer side


class NoPicture(ValueError):
    """A preview picture that cannot be shown; the message names it without its folder."""


def preview_url(path: str) -> str:
    """The preview picture of a LoRA file as a small data URL, "" if there is none.

    Raises NoPicture if one cannot be shown, ValueError if the LoRA file is damaged.
    """
    found = _picture_file(path)
    if found is not None:
        return _data_url(os.path.basename(found), _picture_bytes(found))
    thumbnail = _thumbnail(open_file.read_lora_header(path)[1])
    if not thumbnail:
        return ""
    return _data_url("the thumbnail in the file", _decode(thumbnail))


def _picture_file(path: str) -> str | None:
    stem = os.path.splitext(path)[0]
    for end in _PICTURES:
        if os.path.isfile(stem + end):
            return stem + end
    return None


def _picture_bytes(path: str) -> bytes:
    try:
        return read_bounded(path, _MOST_PICTURE)
    except ValueError as error:
        raise NoPicture(f"{os.path.basename(path)}: {error}") from error


def _thumbnail(metadata: Mapping[str, str]) -> str:
    """The base64 text of the picture in a file's metadata: modelspec's thumbnail, or the first of the cover images
    that ComfyUI's model library shows.
    """
    own = metadata.get("modelspec.thumbnail", "")
    if own:
        return own.rpartition(",")[2]
    try:
        covers = json.loads(metadata.get("ssmd_cover_images") or "[]")
    except (ValueError, RecursionError):
        return ""
    if isinstance(covers, list) and covers and isinstance(covers[0], str):
        return covers[0]
    return ""


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise NoPicture(f"the thumbnail in the file is not base64 text ({error})") from error


def _data_url(name: str, content: bytes) -> str:
    """A picture drawn anew, small and without anything that is not a pixel."""
    buffer = io.BytesIO()
    try:
        with open_picture(io.BytesIO(content)) as picture:
            shrink(picture, _SIDE).convert("RGB").save(buffer, format="WEBP", quality=85)
    except picture_errors() as error:
        raise NoPicture(f"{name} cannot be shown as a picture ({type(error).__name__})") from error
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def trigger_words(path: str) -> list[str]:
    """The trigger words that notes beside a LoRA file give, each once. Notes that cannot be read give none."""
    stem = os.path.splitext(path)[0]
    found = [*_activation_text(_read_notes(stem + ".json")), *_trained_words(_read_notes(stem + ".civitai.info"))]
    return list(dict.fromkeys(found))[:_MOST_WORDS]


def _read_notes(path: str) -> Mapping[str, Any]:
    """The JSON object in a notes file; empty when there is none or it is anything else."""
    try:
        content = json.loads(read_bounded(path, _MOST_NOTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if isinstance(content, dict):
        return content
    return {}


def _activation_text(notes: Mapping[str, Any]) -> list[str]:
    text = notes.get("activation text")
    if isinstance(text, str) and text.strip():
        return [text.strip()]
    return []


def _trained_words(notes: Mapping[str, Any]) -> list[str]:
    words = notes.get("trainedWords")
    if not isinstance(words, list):
        return []
    return [word.strip() for word in words if isinstance(word, str) and word.strip()]
