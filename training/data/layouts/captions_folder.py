"""Text files in a folder named `captions`: beside the image, beside the image's folder, or at the top."""

from __future__ import annotations

from pathlib import Path

from .. import images
from ..captions import WrittenCaption, read_caption_text
from ..file_names import FolderNames
from ..filters import Filters
from .layout import CaptionReader, DatasetLayout

FOLDER = "captions"


def text_files(image: Path, folder: Path) -> list[Path]:
    """Where to look for an image's caption, best place first.

    The captions folder lies beside the image, beside the image's folder (images/1.png, captions/1.txt), or at the top
    of the dataset's folder with the same subfolders.
    """
    places = [image.parent / FOLDER]
    if image.parent != folder:
        places.append(image.parent.parent / FOLDER)
        places.append(folder / FOLDER / image.parent.relative_to(folder))
    return [captions_folder / f"{image.stem}.txt" for captions_folder in places]


class CaptionsFolder(CaptionReader):
    """Reads text files in captions folders."""

    def __init__(self, folder: Path, encoding: str) -> None:
        self.folder, self.encoding = folder, encoding
        self._names = FolderNames()

    def read(self, image: Path) -> WrittenCaption | None:
        path = self._names.first(text_files(image, self.folder))
        if path is None:
            return None
        return read_caption_text(path, self.encoding)


def _recognize(folder: Path) -> bool:
    names = FolderNames()
    return any(names.first(text_files(image, folder)) for image in images.find_images(folder))


def _open(folder: Path, filters: Filters, chosen: bool) -> CaptionReader:
    return CaptionsFolder(folder, filters.encoding)


LAYOUT = DatasetLayout(
    name="folder",
    title="text files in a captions folder",
    hint="a .txt in a captions folder",
    documentation=(
        "`name.txt` in a folder called `captions`. That folder is beside the image, beside the image's folder"
        " (`images/1.png`, `captions/1.txt`), or at the top of the dataset with the same subfolders."
    ),
    suffixes=(".txt",),
    recognize=_recognize,
    open=_open,
    text_files=text_files,
)
