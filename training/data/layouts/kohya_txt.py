"""kohya's layout: `name.txt` or `name.caption` beside `name.png`, and repeats in folder names (`10_name`)."""

from __future__ import annotations

from pathlib import Path

from .. import images
from ..captions import WrittenCaption, most_lines, read_caption_text
from ..file_names import FolderNames
from ..filters import Filters
from .layout import CaptionReader, DatasetLayout

SUFFIXES = (".txt", ".caption")


def text_files(image: Path) -> list[Path]:
    """Where to look for an image's caption, best place first."""
    return [image.with_suffix(suffix) for suffix in SUFFIXES]


class TextFiles(CaptionReader):
    """Reads text files beside the images, of each at most `most_lines` lines."""

    def __init__(self, encoding: str, most_lines: int | None = None, suffixes: tuple[str, ...] = SUFFIXES) -> None:
        self.encoding, self.most_lines, self.suffixes = encoding, most_lines, suffixes
        self._names = FolderNames()

    def read(self, image: Path) -> WrittenCaption | None:
        path = self._names.find_beside(image, self.suffixes)
        if path is None:
            return None
        return read_caption_text(path, self.encoding, self.most_lines)


def _recognize(folder: Path) -> bool:
    names = FolderNames()
    return any(names.find_beside(image, SUFFIXES) for image in images.find_images(folder))


def _open(folder: Path, filters: Filters, chosen: bool) -> CaptionReader:
    return TextFiles(filters.encoding, most_lines(filters.wildcards))


LAYOUT = DatasetLayout(
    name="txt",
    title="text files beside the images (kohya)",
    hint="a .txt file beside the image",
    documentation="`name.txt` or `name.caption` beside `name.png`.",
    suffixes=SUFFIXES,
    recognize=_recognize,
    open=_open,
    text_files=lambda image, folder: text_files(image),
)
