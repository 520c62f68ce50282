"""kohya's metadata JSON (sd-scripts, `merge_captions_to_metadata.py`): one file of captions and tags for all images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ....storage.bounded_read import MB, read_json
from .. import images
from ..captions import WrittenCaption, most_lines, split_lines
from ..file_names import FolderNames, compose
from ..filters import Filters
from .layout import CaptionReader, DatasetLayout

_MOST_BYTES = 256 * MB
_CAPTION_KEYS = ("caption", "tags")


class MetadataCaptions(CaptionReader):
    """Reads the captions of `{"name": {"caption": "…", "tags": "…"}}` for the images of a folder.

    A name is an image's path, relative to the folder or whole, with or without its ending, or the file's name alone.
    Of a path that names no picture here, as on another computer, the file's name counts.
    """

    def __init__(
        self,
        folder: Path,
        contents: Iterable[dict[str, dict[str, Any]]],
        most_lines: int | None,
        problems: tuple[str, ...] = (),
    ) -> None:
        self.folder, self.most_lines, self.problems = folder, most_lines, problems
        self._names = FolderNames()
        self._records: dict[str, dict[str, Any]] = {}
        self._by_name: dict[str, list[dict[str, Any]]] = {}
        for records in contents:
            self._add(records)

    @classmethod
    def of_file(cls, folder: Path, file: Path, most_lines: int | None) -> MetadataCaptions:
        """Reads one file; what is wrong with it is a problem of the dataset."""
        try:
            return cls(folder, [load_metadata(file)], most_lines)
        except ValueError as error:
            return cls(folder, [], most_lines, (f"{file.name}: {error}",))

    def _add(self, records: dict[str, dict[str, Any]]) -> None:
        for key, record in records.items():
            place = compose(key.replace("\\", "/"))
            self._records[place] = record
            if not self._is_path_of_a_picture(place):
                self._by_name.setdefault(place.rpartition("/")[2], []).append(record)

    def _is_path_of_a_picture(self, place: str) -> bool:
        """Whether a name is the path of a picture that is there, and so of no other one."""
        path = self.folder / place
        if images.is_image(path.name):
            return self._names.first([path]) is not None
        return self._names.first(f"{path}{suffix}" for suffix in images.SUFFIXES) is not None

    def describes(self, image: Path) -> bool:
        """Whether a metadata file names an image."""
        return bool(self._records_of(image))

    def read(self, image: Path) -> WrittenCaption | None:
        record = self._record(image)
        if record is None:
            return None
        texts: list[str] = []
        for key in _CAPTION_KEYS:
            text = record.get(key) or ""
            if not isinstance(text, str):
                raise ValueError(f"its {key} in the metadata JSON is not text; write it in quotes")
            texts.append(text)
        if not any(key in record for key in _CAPTION_KEYS):
            return None
        lines = _lines(*texts)
        kept = lines[: self.most_lines]
        notes: tuple[str, ...] = ()
        if "train_resolution" in record:
            notes = ("train_resolution of the metadata JSON is not used: buckets come from each image's own size",)
        return WrittenCaption(lines=kept, found=True, more_lines=kept != lines, notes=notes)

    def _record(self, image: Path) -> dict[str, Any] | None:
        records = self._records_of(image)
        if len(records) > 1:
            raise ValueError(f"the metadata JSON has {len(records)} entries of this file name; give whole paths there")
        return next(iter(records), None)

    def _records_of(self, image: Path) -> list[dict[str, Any]]:
        """The record of an image's path; else those of its file name alone."""
        relative = image.relative_to(self.folder)
        for path in (relative, image):
            for place in map(compose, (path.as_posix(), path.with_suffix("").as_posix())):
                if place in self._records:
                    return [self._records[place]]
        return self._by_name.get(compose(image.name)) or self._by_name.get(compose(image.stem), [])


def _lines(caption: str, tags: str) -> tuple[str, ...]:
    """The lines of a caption, each with the tags behind it; the tags alone without a caption."""
    lines = [" ".join(line.split()) for line in split_lines(caption) if line.strip()]
    tags = ", ".join(" ".join(line.split()) for line in split_lines(tags) if line.strip())
    if not lines:
        return tuple(text for text in (tags,) if text)
    if tags:
        lines = [f"{line}, {tags}" for line in lines]
    return tuple(lines)


def load_metadata(file: Path) -> dict[str, dict[str, Any]]:
    """The entries of a metadata JSON. Raises ValueError where it is none or cannot be read."""
    content = read_json(file, _MOST_BYTES)
    if not _is_metadata(content):
        raise ValueError('expected kohya\'s metadata, as {"1": {"caption": "a cat", "tags": "cat, gray"}}')
    return content


def _is_metadata(content: object) -> bool:
    if not isinstance(content, dict) or not all(isinstance(record, dict) for record in content.values()):
        return False
    return any(key in record for record in content.values() for key in _CAPTION_KEYS)


def _contents(folder: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """The entries of each metadata JSON at the top of a folder; other JSON files may be anything."""
    for path in sorted(folder.glob("*.json")):
        try:
            content = load_metadata(path)
        except ValueError:
            continue
        yield content


def _open(folder: Path, filters: Filters, chosen: bool) -> CaptionReader:
    return MetadataCaptions(folder, _contents(folder), most_lines(filters.wildcards))


LAYOUT = DatasetLayout(
    name="metadata",
    title="kohya's metadata JSON",
    hint="kohya's metadata JSON, one for all images",
    documentation=(
        'kohya\'s metadata JSON at the top of the folder: `{"1": {"caption": "a cat", "tags": "cat, gray"}}`. A key'
        " is an image's path or file name, with or without its extension. The tags are added after the caption."
    ),
    suffixes=(".json",),
    recognize=lambda folder: next(_contents(folder), None) is not None,
    open=_open,
)
