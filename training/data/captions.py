"""Captions as files give them: the text of a caption file, and what else the files say about an image."""

from __future__ import annotations

import codecs
import io
import os
from collections.abc import Sequence
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
    UTF-8 it may be UTF-16 that begins with its mark, as Windows editors save it.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_TEXT_BYTES:
            raise ValueError(f"{path.name}: {size:,} bytes are no caption; expected at most {MAX_TEXT_BYTES:,}")
        content = file.read()
    return io.TextIOWrapper(io.BytesIO(content), encoding=marked_encoding(content, encoding)).read()


def marked_encoding(start: bytes, encoding: str) -> str:
    """The encoding of a text that begins with these bytes: where UTF-8 is expected, a mark may say which one it is."""
    if encoding != "utf-8":
        return encoding
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if start.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"  # without the mark that Windows editors put first
    return encoding


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


def first_file(paths: Sequence[Path]) -> Path | None:
    """The first of the paths that is a file, None without one."""
    return next((path for path in paths if os.path.isfile(path)), None)  # False for names too long, too


def first_beside(image: Path, suffixes: Sequence[str]) -> Path | None:
    """The first of the files that have an image's name with one of these suffixes in place of its own, None without
    one. `Path.with_suffix` takes longer.
    """
    stem = str(image).removesuffix(image.suffix)
    for suffix in suffixes:
        if os.path.isfile(stem + suffix):
            return Path(stem + suffix)
    return None


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
