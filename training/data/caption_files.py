"""The text file of one picture's caption, as a person edits it: found as the dataset reads it, written whole or not at
all, and never over a change that somebody else has made meanwhile.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from ...storage.atomic import sync_folder, write_whole
from ...storage.bounded_read import read_bounded
from ...storage.digest import sha256
from .captions import MAX_TEXT_BYTES, marked_encoding, refuse_nul
from .file_names import FolderNames
from .filters import Filters
from .layouts import registry
from .preference_files import caption_paths

_writing = threading.Lock()


class CaptionChangedError(ValueError):
    """The file is no longer what it was when it was read."""


@dataclass(frozen=True)
class CaptionText:
    """What a caption file holds: its text, None if there is no file, and the version that a change has to name."""

    text: str | None
    version: str


def caption_path(image: Path, folder: Path, source: str, encoding: str) -> Path:
    """The text file with the caption of an image, or where one would be, for a caption source. Raises ValueError where
    the caption is in a file of another kind.
    """
    layouts = registry.find_layouts(source)
    filters, names = Filters(encoding=encoding), FolderNames()
    for layout in layouts:
        for name in caption_paths(image):
            path = names.first(layout.text_files(name, folder))
            if path is not None:
                return path
        if layout.text_files(image, folder):
            continue
        if layout.open(folder, filters, source != registry.AUTO).read(image) is not None:
            raise ValueError(f"{image.name}: its caption is in {layout.title}; edit it there")
    for layout in layouts:
        for path in layout.text_files(image, folder):
            if path.parent.is_dir():
                return path
    titles = " or ".join(layout.title for layout in layouts)
    raise ValueError(f"{image.name}: caption source {source} reads {titles}; make its caption there")


def read_caption(path: Path, encoding: str) -> CaptionText:
    """What a caption file holds. Raises ValueError when it is too long or has another encoding."""
    content = _content(path)
    if content is None:
        return CaptionText(None, "")
    return CaptionText(_decode(path, content, encoding), _version(content))


def write_caption(path: Path, encoding: str, text: str | None, version: str) -> tuple[str | None, CaptionText]:
    """(the text before, the caption now): writes a caption file, or removes it where `text` is None.

    Its encoding and line ends stay. Raises CaptionChangedError unless the file is still of that version, ValueError for
    a text that it cannot hold, OSError when it cannot be written; the file is then as it was.
    """
    with _writing:
        before = _content(path)
        if _version(before) != version:
            raise CaptionChangedError(
                f"{path.name} has changed on disk since it was read; read it again, then make your change"
            )
        old_text = None
        if before is not None:
            old_text = _decode(path, before, encoding)
        if before is not None and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "the file is read-only; grant the right to write it", str(path))
        if text is None:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            sync_folder(path.parent)
            return old_text, CaptionText(None, "")
        content = _encode(path, text, before or b"", encoding)
        write_whole(path, [content], shared=True)
        return old_text, CaptionText(text, _version(content))


def _content(path: Path) -> bytes | None:
    if path.is_dir():
        raise ValueError(f"{path.name} is a folder, but the caption is to be a file of that name: rename the folder")
    try:
        return read_bounded(path, MAX_TEXT_BYTES)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def _version(content: bytes | None) -> str:
    if content is None:
        return ""
    return sha256(content).hexdigest()


def _decode(path: Path, content: bytes, encoding: str) -> str:
    try:
        text = content.decode(marked_encoding(content, encoding))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path.name}: the caption is not {encoding} text ({error.reason} at byte {error.start}); save it as UTF-8"
            " or name its encoding in filters (encoding: cp1252)"
        ) from error
    refuse_nul(path.name, text, encoding)
    return text


def _encode(path: Path, text: str, before: bytes, encoding: str) -> bytes:
    """The bytes of a text, with the mark and the line ends that the file had."""
    marked = marked_encoding(before, encoding)
    if "\r" not in text and "\r\n" in before.decode(marked):
        text = text.replace("\n", "\r\n")
    try:
        content = text.encode(marked)
    except UnicodeEncodeError as error:
        raise ValueError(f"{path.name}: {text[error.start]!r} cannot be written in {encoding}") from error
    if marked == "utf-16" and before.startswith(codecs.BOM_UTF16_BE):
        content = codecs.BOM_UTF16_BE + text.encode("utf-16-be")
    if len(content) > MAX_TEXT_BYTES:
        raise ValueError(f"{path.name}: {len(content):,} bytes are not a caption; expected at most {MAX_TEXT_BYTES:,}")
    return content
