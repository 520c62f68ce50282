"""Captions as files give them: the text of a caption file, and what else the files say about an image."""

from __future__ import annotations

import codecs
import io
import os
from dataclasses import dataclass
from pathlib import Path

from ...storage.regular_file import open_regular

MAX_TEXT_BYTES = 1 << 20  # of a caption file


@dataclass(frozen=True)
class WrittenCaption:
    """A caption and the settings that files give for one image; None where they say nothing.

    A caption is either `lines` of text or a list of `tags`. The first `prompt_tags` of them are the main prompt: they
    stay in front and never drop out. `found` is whether any file holds a caption, `more_lines` whether that has lines
    which are left out.
    """

    lines: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    prompt_tags: int = 0
    found: bool = False
    score: float | None = None
    multiply: float | None = None
    flip: float | None = None
    dropout: float | None = None
    shuffle: bool | None = None
    batch_id: str = ""
    loss_scale: float | None = None
    max_length: int = 0
    notes: tuple[str, ...] = ()
    more_lines: bool = False


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """A text file; raises UnicodeDecodeError when it has another encoding, ValueError when it is too long. In place of
    UTF-8 it may be UTF-16, as Windows editors save it, which begins with its mark or shows itself by its NULs.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_TEXT_BYTES:
            raise ValueError(f"{path.name}: {size:,} bytes are not a caption; expected at most {MAX_TEXT_BYTES:,}")
        content = file.read()
    text = io.TextIOWrapper(io.BytesIO(content), encoding=marked_encoding(content, encoding)).read()
    refuse_nul(path.name, text, encoding)
    return text


def marked_encoding(start: bytes, encoding: str) -> str:
    """The encoding of a text that begins with these bytes: where UTF-8 is expected, a mark may say which one it is."""
    if encoding != "utf-8":
        return encoding
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if start.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"  # without the mark that Windows editors put first
    if b"\0" in start:
        return _unmarked_utf_16(start) or encoding
    return encoding


def _unmarked_utf_16(content: bytes) -> str | None:
    """The byte order of UTF-16 without a mark: of most letters one byte is NUL. None where it is not such a text."""
    orders = [("utf-16-le", content[1::2].count(0)), ("utf-16-be", content[0::2].count(0))]
    for order, _ in sorted(orders, key=lambda counted: -counted[1]):
        try:
            text = content.decode(order)
        except UnicodeDecodeError:
            continue
        if "\0" not in text:
            return order
    return None


def refuse_nul(name: str, text: str, encoding: str) -> None:
    """Raise ValueError for a text with NUL characters: it was written in another encoding, or is none."""
    if "\0" in text:
        raise ValueError(
            f"{name}: it has NUL characters, so it is not {encoding} text; save it as UTF-8, or name its encoding in"
            " filters (encoding: utf-16-le)"
        )


def read_lines(path: Path, encoding: str = "utf-8") -> tuple[str, ...]:
    """The lines of a text file that are not empty, with single spaces; raises ValueError that names the file when it
    has another encoding.
    """
    try:
        text = read_text(path, encoding)
    except UnicodeDecodeError as error:
        name = encoding
        if encoding == "utf-8":
            name = "UTF-8"
        raise ValueError(
            f"{path.name}: the caption is not {name} text ({error.reason} at byte {error.start}); save it as UTF-8 or"
            " name its encoding in filters (encoding: cp1252)"
        ) from error
    lines = (" ".join(line.split()) for line in split_lines(text))
    return tuple(line for line in lines if line)


def split_lines(text: str) -> list[str]:
    """The lines of a text. `str.splitlines` would also split at separators that text from the web has in its lines."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def read_caption_text(path: Path, encoding: str = "utf-8", most_lines: int | None = None) -> WrittenCaption:
    """The caption in a text file. Lines after `most_lines` are left out."""
    lines = read_lines(path, encoding)
    kept = lines[:most_lines]
    return WrittenCaption(lines=kept, found=True, more_lines=kept != lines)


def most_lines(wildcards: bool) -> int | None:
    """How many lines of a text file are its caption, as kohya's scripts take them: all where one is drawn, else one."""
    if wildcards:
        return None
    return 1
